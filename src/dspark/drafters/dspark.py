"""The block drafter: target embedding -> backbone -> target LM head -> sequential head -> confidence.

Shapes: B requests, A anchors, G draft slots, Q rows of a block, H hidden, m tapped layers, V vocabulary, Vd draft
vocabulary. Source: DSpark paper sections 3.1-3.3; `markov_rank` 0 and no confidence head is DFlash.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.drafters.backbone import Backbone
from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, MarkovHead
from dspark.models.attention import AttentionBatch
from dspark.models.ends import TargetEnds
from dspark.models.kv_cache import PagedKVCache
from dspark.spec.types import DraftBlock, SamplingRows


class BlockDrafter(Drafter):
    """DSpark and DFlash: one pass over the anchor and the masks drafts the whole block."""

    backbone: Backbone

    def __init__(self, config: DrafterConfig, target: TargetEnds, token_ids: Tensor | None = None) -> None:
        super().__init__(config, target, token_ids)
        assert config.mask_token_id is not None
        self.mask_token_id = config.mask_token_id
        self.backbone = Backbone(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    def new_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Storage for the draft layers' context keys and values."""
        c = self.config
        heads = self.backbone.num_kv_heads
        return PagedKVCache(c.num_hidden_layers, num_blocks, block_size, heads, c.head_dim, self.dtype, self.device)

    def inject(self, features: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor, cache: PagedKVCache) -> None:
        """See `Drafter.inject`; the context of a block is the features alone."""
        self.backbone.inject(features, positions, slots, cache)

    def draft_rows(self, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """The block's rows of each request: positions seq_len + 0..Q-1, visible to each other as the config says."""
        rows, first = self.config.query_rows, seq_lens[:, None]
        positions = first + torch.arange(rows, device=seq_lens.device)
        bidirectional = self.config.block_attention == "bidirectional"
        return positions, (first + rows).expand(-1, rows) if bidirectional else positions + 1

    def propose(
        self,
        anchors: Tensor,
        batch: AttentionBatch,
        cache: PagedKVCache,
        rows: SamplingRows | None,
        seq_lens: Tensor,
        num_drafts: int,
    ) -> DraftBlock:
        """See `Drafter.propose`."""
        ids = torch.full_like(batch.positions, self.mask_token_id)
        ids[:, 0] = anchors
        hidden = self.backbone.draft(self.embed(ids), batch, cache)
        first = 0 if self.config.sample_from_anchor else 1
        hidden = hidden[:, first : first + num_drafts]
        return self._sample_block(self.draft_logits(hidden), hidden, anchors, rows, seq_lens)

    def _sample_block(
        self, base: Tensor, hidden: Tensor, anchors: Tensor, rows: SamplingRows | None, seq_lens: Tensor
    ) -> DraftBlock:
        """The sequential head's loop over base [B, G, Vd]: slot k's logits take the bias of the token of slot k-1."""
        prev, confidence = anchors, []
        tokens: list[Tensor] = []
        laws: list[Tensor | None] = []
        state = self.markov_head.initial_state(len(anchors), hidden) if self.markov_head else None
        for k in range(base.shape[1]):
            logits, embedded = base[:, k], None
            if self.markov_head is not None:
                feature, embedded, state = self.markov_head.step(prev, hidden[:, k], state)
                logits = logits + self.markov_head.markov_w2(feature)
            if self.confidence_head is not None:
                confidence.append(self.confidence_head(hidden[:, k], embedded))
            prev, law = self.draw(logits, rows, seq_lens + 1 + k)
            tokens.append(prev)
            laws.append(law)
        return self.block(tokens, laws, torch.stack(confidence, dim=1) if confidence else None)

    def train_hidden(
        self, token_ids: Tensor, features: Tensor, anchors: Tensor, valid: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """See `Drafter.train_hidden`."""
        anchors = torch.where(valid, anchors, 0)
        ids = torch.full((*anchors.shape, self.config.query_rows), self.mask_token_id, device=anchors.device)
        ids[..., 0] = token_ids.gather(1, anchors)
        hidden = self.backbone.train_blocks(self.embed(ids), features, anchors, segment_ids)
        return hidden if self.config.sample_from_anchor else hidden[:, :, 1:]
