"""EAGLE-3: one layer that drafts a token at a time, from fused target features and then from its own hidden states.

Row t reads the embedding of token t + 1 and a hidden state of position t, stands at RoPE position t, and predicts token
t + 2. In a context row that state is fused from the target's features; in a chain row it is the layer's output one row
before. With the anchor at position a, the chain starts at row a - 1: its first row is a context row.

Shapes: B requests or sequences, N flat rows, A anchors, G draft slots, S tokens, H hidden, m tapped layers, h/hk query
and key heads, D head size, Vd draft vocabulary. Source: EAGLE-3 (arXiv 2503.01840), sections 3.1-3.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.backbone import DraftLayer, FeatureFusion, RMSNorm, segment_starts
from dspark.drafters.base import Drafter
from dspark.drafters.block_attention import KeysValues, Mask, Visibility, make_mask
from dspark.drafters.config import DrafterConfig
from dspark.models.attention import AttentionBatch
from dspark.models.ends import TargetEnds
from dspark.models.kv_cache import PagedKVCache
from dspark.models.rope import Rotation
from dspark.spec.types import DraftBlock, SamplingRows


class Eagle3Layer(DraftLayer):
    """A decoder layer whose attention reads [embedding ; hidden], 2H wide; the residual stream carries the hidden."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, 0)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[..., H] twice -> [..., 2H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotation: Rotation,
        context: KeysValues,
        chain: KeysValues | None,
        mask: Mask,
    ) -> tuple[Tensor, KeysValues]:
        """Training: one row of every chain, embedded and hidden [B, A, H], behind the context rows [B, S, ..] and the
        chain's earlier rows [B, A, k, ..] -> the next hidden state [B, A, H], not normed, and the rows with this one.
        """
        attention, x = self.self_attn, self.attention_input(embedded, hidden)[:, :, None]  # [B, A, 1, 2H]
        own = attention.keys_values(x, rotation)
        if chain is not None:
            own = KeysValues(*(torch.cat(rows, dim=2) for rows in zip(chain, own, strict=True)))
        attended = attention.attend(attention.queries(x, rotation), context, own, mask)
        return self.after_attention(hidden, attended[:, :, 0]), own


class Eagle3Backbone(FeatureFusion):
    """`fc` fuses the tapped target states; the layer turns one row's state into the next row's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, [Eagle3Layer(config)])

    @property
    def layer(self) -> Eagle3Layer:
        """The one layer."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    def step(self, embedded: Tensor, hidden: Tensor, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        """Serving: one row a request, embedded and hidden [B, 1, H] -> the next hidden state [B, 1, H], not normed."""
        rotation = self.rotary(batch.positions, hidden.dtype)
        x = self.layer.attention_input(embedded, hidden)
        return self.layer.after_attention(hidden, self.layer.self_attn.cached(x, rotation, batch, cache))

    def train_chains(
        self, features: Tensor, following: Tensor, fed: Tensor, anchors: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Training-time test: every anchor's chain, fed with the true tokens and its own hidden states.

        features [B, S, m, H]; following [B, S, H], the embedding of each place's next token; fed [B, A, G, H], the
        embeddings of the anchor and the tokens after it; anchors [B, A] >= 1, places in the row; segment_ids [B, S],
        the row's conversations (None: one a row) -> normed hidden [B, A, G, H].

        Row 0 is the context row at anchor - 1. Row k sees its conversation before that row and the rows 0..k of its own
        chain: never another anchor's chain, never a context row that the target has not reached yet. Positions count
        from the beginning of each conversation.
        """
        attention, fused = self.layer.self_attn, self.fuse(features)
        if segment_ids is None:
            segment_ids = anchors.new_zeros(features.shape[:2])
        places, starts = torch.arange(features.shape[1], device=anchors.device), segment_starts(segment_ids)
        inputs = self.layer.attention_input(following, fused)
        context = attention.keys_values(inputs, self.rotary(places - starts, fused.dtype))
        roots, first = anchors - 1, starts.gather(1, anchors)  # [B, A]: the context is [first, root)
        hidden = fused.gather(1, roots[..., None].expand(-1, -1, fused.shape[-1]))  # [B, A, H]
        chain: KeysValues | None = None
        outputs = []
        for k in range(fed.shape[2]):
            positions = (roots - first + k)[..., None]  # [B, A, 1]
            mask = make_mask(self.execution.attention, Visibility(first, roots, positions, places - starts), k + 1)
            rotation = self.rotary(positions, fed.dtype)
            hidden, chain = self.run_layer(self.layer, fed[:, :, k], hidden, rotation, context, chain, mask)
            outputs.append(self.norm(hidden))
        return torch.stack(outputs, dim=2)


class Eagle3Cache(PagedKVCache):
    """Context keys and values and, for each page, the fused state of the last committed row in it."""

    def __init__(
        self, config: DrafterConfig, num_kv_heads: int, num_blocks: int, block_size: int, like: Tensor
    ) -> None:
        """`like` has the dtype and the device of what is kept."""
        super().__init__(1, num_blocks, block_size, num_kv_heads, config.head_dim, like.dtype, like.device)
        self.states = like.new_zeros(num_blocks, config.hidden_size)

    def keep_last(self, slots: Tensor, fused: Tensor) -> None:
        """Keep of rows [N, H] the last one in each page; the rows of a page stand together, in ascending order."""
        pages, rows = slots // self.block_size, torch.arange(len(slots), device=slots.device)
        ends = F.pad(pages[1:] != pages[:-1], (0, 1), value=True)
        # Every row writes what the last one of its page holds, so no shape depends on where pages end.
        last = torch.where(ends, rows, len(slots)).flip(0).cummin(0).values.flip(0)
        self.states.index_copy_(0, pages, fused[last])

    def state(self, slots: Tensor) -> Tensor:
        """The kept states of the pages that slots [B] lie in: [B, H]."""
        return self.states[slots // self.block_size]


class Eagle3Drafter(Drafter):
    """A chain drafter: `num_drafts` steps of one row each. Raises CheckpointError as `Drafter` does."""

    backbone: Eagle3Backbone
    context_reads_next = True

    def __init__(self, config: DrafterConfig, target: TargetEnds, token_ids: Tensor | None = None) -> None:
        super().__init__(config, target, token_ids)
        self.backbone = Eagle3Backbone(config)
        self.lm_head: nn.ParameterDict | None = None
        if config.own_lm_head:
            rows = self.target_lm_head_weight.detach().to(self.dtype, copy=True)
            self.lm_head = nn.ParameterDict({"weight": nn.Parameter(rows)})

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head rows that make the draft logits, [Vd, H]: its own and trained, or the target's and frozen."""
        if self.lm_head is None:
            return self.target_lm_head_weight
        weight: Tensor = self.lm_head["weight"]
        return weight

    def new_cache(self, num_blocks: int, block_size: int) -> Eagle3Cache:
        """Storage for the layer's context keys and values, and the state that a chain starts from."""
        like = self.backbone.norm.weight
        return Eagle3Cache(self.config, self.backbone.num_kv_heads, num_blocks, block_size, like)

    def inject(self, features: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor, cache: PagedKVCache) -> None:
        """See `Drafter.inject`. Overwrites the provisional rows of the chain with the target's own."""
        assert isinstance(cache, Eagle3Cache)
        backbone, layer = self.backbone, self.backbone.layer
        fused = backbone.fuse(features)
        x = layer.attention_input(self.embed(next_ids), fused)
        k, v = layer.self_attn.keys_values(x, backbone.rotary(positions, x.dtype))
        cache.write(0, slots, k, v)
        cache.keep_last(slots, fused)

    def draft_rows(self, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """The chain's rows of each request, one a draft: positions seq_len - 1 on, causal."""
        positions = seq_lens[:, None] - 1 + torch.arange(self.num_drafts, device=seq_lens.device)
        return positions, positions + 1

    def propose(
        self,
        anchors: Tensor,
        batch: AttentionBatch,
        cache: PagedKVCache,
        rows: SamplingRows | None,
        seq_lens: Tensor,
        num_drafts: int,
    ) -> DraftBlock:
        """See `Drafter.propose`: each draft is fed back with the hidden state that it was drawn from."""
        assert isinstance(cache, Eagle3Cache)
        token, hidden = anchors, cache.state(batch.slots[:, 0])[:, None]
        tokens: list[Tensor] = []
        laws: list[Tensor | None] = []
        for k in range(num_drafts):
            hidden = self.backbone.step(self.embed(token[:, None]), hidden, batch.row(k), cache)
            logits = self.draft_logits(self.backbone.norm(hidden))[:, 0]
            token, law = self.draw(logits, rows, seq_lens + 1 + k)
            if self.shards is not None:
                token = self.shards.agree(token, "drafts")
            tokens.append(token)
            laws.append(law)
        return self.block(tokens, laws)

    def train_hidden(
        self, token_ids: Tensor, features: Tensor, anchors: Tensor, valid: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """See `Drafter.train_hidden`: `num_drafts` steps of training-time test."""
        anchors = torch.where(valid, anchors, 1).clamp_min(1)
        fed = anchors[..., None] + torch.arange(self.num_drafts, device=anchors.device)  # [B, A, G]
        fed = token_ids.gather(1, fed.clamp_max(token_ids.shape[1] - 1).flatten(1)).view_as(fed)
        # A conversation's last row reads the token that stands behind it, or the row's first: no chain sees that row.
        following = self.embed(token_ids.roll(-1, dims=1))
        return self.backbone.train_chains(features, following, self.embed(fed), anchors, segment_ids)
