"""A start for block drafters: heads that already look at the newest row of the context.

With random weights attention spreads over the context, and nothing but its position tells the newest row apart. Here
queries of block rows, and keys of context rows, begin with one constant component each, whose rotated product falls off
with the distance between them.

Shapes: N rows, H hidden, D head size, G draft slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.backbone import Backbone, BlockLayer, DraftAttention
from dspark.drafters.dspark import BlockDrafter
from dspark.errors import ConfigError
from dspark.models import rope
from dspark.models.rope import RotaryEmbedding

REACH = 256  # rows back that the newest one is told apart from
_FIT_STEPS, _FIT_RATE = 400, 0.05
_RIDGE = 1e-3
_STRENGTH = 20.0  # of the constant component over the random ones; norms of queries and keys take the rest away


@torch.no_grad()
def look_at_newest(drafter: BlockDrafter, features: Tensor, token_ids: Tensor, heads: int, seed: int) -> None:
    """Let the last `heads` key/value heads of the first layer begin with the newest context row in view.

    features [N, m, H] and token_ids [N] of training rows, the drafter's feature scale set. Their values begin as plain
    pieces of the context feature. Raises ConfigError where the layer has fewer heads, or keys that serve as values.
    """
    backbone = drafter.backbone
    attention = _first_attention(backbone, heads)
    context = backbone.project_context(features).float()
    block, counts = _block_rows(drafter, token_ids)
    query, key = fit_falloff(backbone.rotary, attention, drafter.num_drafts, seed)
    groups, size = attention.num_heads // attention.num_kv_heads, attention.head_dim
    constant = _direction(block, torch.ones(len(block)), counts)
    # Keys of a block's own rows get the opposite sign, so that these heads pass them over.
    rows, wanted = torch.cat([context, block]), torch.cat([torch.ones(len(context)), -torch.ones(len(block))])
    apart = _direction(rows, wanted, torch.cat([torch.ones(len(context)), counts * len(context) / counts.sum()]))
    _last(attention.q_proj, heads * groups * size).add_(
        _STRENGTH * torch.outer(query, constant).repeat(heads * groups, 1)
    )
    _last(attention.k_proj, heads * size).add_(_STRENGTH * torch.outer(key, apart).repeat(heads, 1))
    assert attention.v_proj is not None
    values = _last(attention.v_proj, heads * size)
    place = torch.arange(len(values))
    values.zero_()
    values[place, place % values.shape[1]] = 1.0


def fit_falloff(
    rotary: RotaryEmbedding, attention: DraftAttention, num_drafts: int, seed: int
) -> tuple[Tensor, Tensor]:
    """A query and a key [D] each whose scores put most weight on the nearest of `REACH` rows, from every slot.

    Slot i of a block stands i + 1 places behind the newest context row.
    """
    generator = torch.Generator().manual_seed(seed)
    vectors = [(0.5 * torch.randn(rotary.head_dim, generator=generator)).requires_grad_() for _ in range(2)]
    length = REACH + num_drafts
    cos, sin = rotary(torch.arange(length)[None], torch.float32)
    optimizer = torch.optim.Adam(vectors, lr=_FIT_RATE)
    with torch.enable_grad():
        for _ in range(_FIT_STEPS):
            query, key = (_unit(v) for v in vectors)
            # Rows 0..REACH-1 are context, slot i stands at REACH + i: scores of each slot for all context rows.
            queries = rope.apply(query.expand(1, length, 1, -1), cos, sin)[0, REACH:, 0]
            keys = rope.apply(key.expand(1, length, 1, -1), cos, sin)[0, :REACH, 0]
            newest = (queries @ keys.T * attention.scale).log_softmax(-1)[:, -1]
            optimizer.zero_grad()
            (-newest.sum()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return _unit(vectors[0]).detach(), _unit(vectors[1]).detach()


def _first_attention(backbone: Backbone, heads: int) -> DraftAttention:
    layer = backbone.layers[0]
    assert isinstance(layer, BlockLayer)
    attention = layer.self_attn
    if heads > attention.num_kv_heads:
        raise ConfigError(f"recent_heads {heads}: the drafter has {attention.num_kv_heads} key/value heads")
    if attention.v_proj is None:
        raise ConfigError("recent_heads: this drafter's keys are its values: leave it out")
    return attention


def _block_rows(drafter: BlockDrafter, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """What the first layer's projections read of the anchors and of the mask [N + 1, H], and how often each comes."""
    layer = drafter.backbone.layers[0]
    ids = torch.cat([token_ids.long(), torch.tensor([drafter.mask_token_id])])
    counts = torch.ones(len(ids))
    counts[-1] = len(token_ids) * (drafter.config.query_rows - 1)
    return layer.input_layernorm(drafter.embed(ids)).float(), counts  # type: ignore[operator]


def _direction(rows: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """The vector [H] whose products with the rows [N, H] come nearest to `wanted` [N], by ridge regression."""
    weighted = rows * counts[:, None]
    gram = weighted.T @ rows
    gram.diagonal().add_(_RIDGE * counts.sum())
    return torch.linalg.solve(gram, weighted.T @ wanted)  # type: ignore[no-any-return]


def _last(projection: nn.Linear, rows: int) -> Tensor:
    """The last `rows` rows of its weight, a view: [rows, H]."""
    return projection.weight[-rows:]


def _unit(vector: Tensor) -> Tensor:
    """At the spread that a norm gives queries and keys: root mean square 1."""
    return vector / vector.square().mean().sqrt()
