"""The drafter: target embedding -> backbone -> target LM head -> sequential head -> confidence.

Shapes: B requests, A anchors, G draft slots, Q rows of a block, H hidden, m tapped layers, V vocabulary, Vd draft
vocabulary. Source: DSpark paper sections 3.1-3.3; `markov_rank` 0 and no confidence head is DFlash.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone
from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, MarkovHead
from dspark.errors import CheckpointError
from dspark.models.attention import AttentionBatch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import PagedKVCache
from dspark.models.layers import softcap
from dspark.models.linear import pack_linears
from dspark.spec.sampling import Role, argmax, categorical, probabilities, uniform
from dspark.spec.types import DraftBlock, SamplingRows


class Drafter(nn.Module):
    """A block drafter bound to one target, whose embedding and LM head it borrows frozen.

    `token_ids` [Vd] maps a draft index to a target id when the draft vocabulary is reduced, else None.
    Raises CheckpointError when config and target disagree on hidden size or vocabulary.
    """

    token_ids: Tensor | None

    def __init__(self, config: DrafterConfig, target: Decoder, token_ids: Tensor | None = None) -> None:
        super().__init__()
        check_target(config, target, token_ids)
        self.config = config
        self.backbone = Backbone(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.register_buffer("token_ids", token_ids, persistent=False)
        # Borrowed, so kept out of parameters() and of the state dict.
        self._borrowed = _Borrowed(target, token_ids)

    @property
    def num_drafts(self) -> int:
        """Draft tokens per round, gamma."""
        return self.config.num_drafts

    @property
    def lm_head_weight(self) -> Tensor:
        """The frozen LM head rows of the draft vocabulary, [Vd, H]."""
        return self._borrowed.lm_head_weight

    @property
    def embedding_weight(self) -> Tensor:
        """The target's frozen embedding table, [V, H], as it is stored."""
        return self._borrowed.embedding

    def embed(self, token_ids: Tensor) -> Tensor:
        """Target embedding of token ids, in the drafter's dtype: [...] -> [..., H]."""
        embedded: Tensor = self._borrowed.embed(token_ids)
        return embedded.to(self.backbone.norm.weight.dtype)

    def prepare(self) -> Drafter:
        """Freeze for serving: no gradients, the target's dtype (its bytes are the cost), linears packed."""
        self.requires_grad_(False).eval()
        self.backbone.fold_scale()
        for parameter in self.parameters():
            parameter.data = parameter.data.to(self.embedding_weight.dtype)
        rows, width = self.lm_head_weight.shape
        head = nn.Linear(width, rows, bias=False, device="meta")
        head.weight = nn.Parameter(self.lm_head_weight.to(self.backbone.norm.weight.dtype), requires_grad=False)
        self._borrowed.head = nn.Sequential(head)
        pack_linears(self)
        pack_linears(self._borrowed.head)
        return self

    # ---- serving

    def new_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Storage for the draft layers' context keys and values; block tables are the target's."""
        c = self.config
        dtype = self.backbone.norm.weight.dtype
        return PagedKVCache(c.num_hidden_layers, num_blocks, block_size, c.num_key_value_heads, c.head_dim, dtype)

    def inject(self, features: Tensor, positions: Tensor, slots: Tensor, cache: PagedKVCache) -> None:
        """Write committed rows' context: features [N, m, H], positions [N], slots [N]."""
        self.backbone.inject(features, positions, slots, cache)

    def draft_batch(self, seq_lens: list[int], block_tables: list[list[int]], block_size: int) -> AttentionBatch:
        """The block's rows of each request: positions seq_len + 0..Q-1, visible to each other as the config says."""
        rows = self.config.query_rows
        first = torch.tensor(seq_lens)[:, None]
        positions = first + torch.arange(rows)
        visible = (first + rows).expand(-1, rows) if self.config.block_attention == "bidirectional" else positions + 1
        return AttentionBatch.build(positions, [rows] * len(seq_lens), block_tables, block_size, visible)

    def propose(
        self, anchors: Tensor, batch: AttentionBatch, cache: PagedKVCache, rows: SamplingRows, seq_lens: Tensor
    ) -> DraftBlock:
        """Draft a block per request: anchors [B] ids at positions seq_lens [B] -> tokens [B, G] and their law."""
        assert not isinstance(self._borrowed.head, nn.Identity), "call prepare() before drafting"
        ids = torch.full(batch.positions.shape, self.config.mask_token_id)
        ids[:, 0] = anchors
        hidden = self.backbone.draft(self.embed(ids), batch, cache)
        if not self.config.sample_from_anchor:
            hidden = hidden[:, 1:]
        base = softcap(self._borrowed.head(hidden).float(), self.config.final_logit_softcapping)  # [B, G, Vd]
        return self._sample_block(base, hidden, anchors, rows, seq_lens)

    def _sample_block(
        self, base: Tensor, hidden: Tensor, anchors: Tensor, rows: SamplingRows, seq_lens: Tensor
    ) -> DraftBlock:
        """The sequential head's loop: slot k's logits take the bias of the token drawn at slot k-1."""
        greedy = bool(rows.greedy.all())
        prev, tokens, probs, confidence = anchors, [], [], []
        state = self.markov_head.initial_state(len(anchors), hidden) if self.markov_head else None
        for k in range(self.num_drafts):
            logits, embedded = base[:, k], None
            if self.markov_head is not None:
                feature, embedded, state = self.markov_head.step(prev, hidden[:, k], state)
                logits = logits + self.markov_head.markov_w2(feature)
            if self.confidence_head is not None:
                confidence.append(self.confidence_head(hidden[:, k], embedded))
            if greedy:
                choice = argmax(logits)
            else:
                law = probabilities(logits[:, None], rows)[:, 0]
                # -1 marks a law that is not one (NaN): any token will do, since the verifier then draws from p alone.
                choice = categorical(law, uniform(rows.seed, seq_lens + 1 + k, Role.DRAFT)).clamp_min(0)
                probs.append(law)
            prev = choice if self.token_ids is None else self.token_ids[choice]
            tokens.append(prev)
        return DraftBlock(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(probs, dim=1) if probs else base.new_zeros(len(anchors), len(tokens), 0),
            token_ids=self.token_ids,
            confidence=torch.sigmoid(torch.stack(confidence, dim=1)) if confidence else None,
        )

    # ---- training

    def train_hidden(
        self, token_ids: Tensor, features: Tensor, anchors: Tensor, valid: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Hidden states of every draft slot of every anchor's block.

        token_ids [B, S]; features [B, S, m, H]; anchors [B, A] places in the row, valid [B, A] -> [B, A, G, H].
        segment_ids [B, S]: the conversations of a row, each seen by its own anchors only; None: one a row.
        Rows of an invalid anchor are finite and mean nothing.
        """
        anchors = torch.where(valid, anchors, 0)
        ids = torch.full((*anchors.shape, self.config.query_rows), self.config.mask_token_id, device=anchors.device)
        ids[..., 0] = token_ids.gather(1, anchors)
        hidden = self.backbone.train_blocks(self.embed(ids), features, anchors, segment_ids)
        return hidden if self.config.sample_from_anchor else hidden[:, :, 1:]


class _Borrowed:
    """The target's embedding table and LM head rows, held without registering them as the drafter's parameters."""

    def __init__(self, target: Decoder, token_ids: Tensor | None) -> None:
        self.embed = target.embed_tokens  # [...] -> [..., H], scaled where the target scales
        self.embedding = target.embed_tokens.weight.detach()
        full = target.lm_head_weight.detach()
        self.lm_head_weight = full if token_ids is None else full[token_ids]
        self.head: nn.Module = nn.Identity()


def check_target(config: DrafterConfig, target: Decoder, token_ids: Tensor | None) -> None:
    """Raise CheckpointError where the drafter's shape does not fit the target."""
    t = target.config
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, t.hidden_size),
        ("vocab_size", config.vocab_size, t.vocab_size),
        ("num_target_layers", config.num_target_layers, t.num_hidden_layers),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"drafter {name} is {ours} but the target has {theirs}: this drafter is for another target"
            )
    if (token_ids is None) != (config.draft_vocab_size is None):
        raise CheckpointError("draft_vocab_size and the d2t map must come together")
    if token_ids is not None and len(token_ids) != config.draft_vocab_size:
        raise CheckpointError(f"d2t has {len(token_ids)} entries but draft_vocab_size is {config.draft_vocab_size}")
