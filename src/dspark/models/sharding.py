"""Tensor parallel: every process holds a share of each layer's heads, of each MLP's columns and of the vocabulary.

A layer's first projections give a process its own heads or columns whole, the last one a part of a sum, so that a layer
costs two sums. The residual stream, norms and the embedding table are whole everywhere. Each collective has a name, its
site, under which profiles show it and `Shards.counts` counts it. Source: Megatron-LM (arXiv 1909.08053), section 3.

Shapes: N processes, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from dspark.errors import ConfigError
from dspark.models.decoder import Attention, Decoder, DecoderLayer
from dspark.models.mlp import MLP, SparseMLP

Site = Literal["call", "states", "attention", "mlp", "logits", "drafts"]
"""call, states: what runs next, and its large inputs, from the first process (`engine.parallel`); attention, mlp: the
sums of a layer; logits: the vocabulary's shares put together; drafts: a chain's token, which its next row reads."""


@dataclass
class Shards:
    """This process's place among those that share a model, and their collectives: all join each, in the same order."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: every process
    counts: Counter[str] = field(default_factory=Counter)  # collectives so far, by site
    together: bool = False  # whether the others are in the same call: a collective alone would wait for ever

    def part(self, count: int) -> slice:
        """This process's of `count` things, which `check_divides` let pass."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def sum(self, x: Tensor, site: Site) -> Tensor:
        """The sum of every process's x, the same bits on all; x is overwritten."""
        with self.at(site):
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, site: Site) -> Tensor:
        """Every process's x [..., n], by rank: [..., N * n]."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self.at(site):
            dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def agree(self, x: Tensor, site: Site) -> Tensor:
        """The first process's x on all; the others' is overwritten."""
        with self.at(site):
            dist.broadcast(x, src=0, group=self.group)
        return x

    @contextmanager
    def at(self, site: Site) -> Iterator[None]:
        """Name what runs inside for profiles, and count it."""
        assert self.together, f"{site}: the other processes do not know of this call; it belongs into a runner's"
        self.counts[site] += 1
        with record_function(f"dspark.sync.{site}"):
            yield


class Summed(nn.Module):
    """A module of whose output every process has a part of the sum."""

    def __init__(self, module: nn.Module, shards: Shards, site: Site) -> None:
        super().__init__()
        self.module, self.shards, self.site = module, shards, site

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], the whole sum."""
        return self.shards.sum(self.module(x), self.site)


class Gathered(nn.Module):
    """An LM head of which every process has the rows of its share of the vocabulary, the last ones perhaps padding."""

    def __init__(self, weight: Tensor, shards: Shards, keep: bool) -> None:
        """`weight` [V, H] is the whole head's; `keep` where something else holds it anyway: then nothing is copied."""
        super().__init__()
        self.size, self.shards = len(weight), shards
        each = -(-len(weight) // shards.size)
        share = weight[shards.rank * each : (shards.rank + 1) * each]
        if len(share) < each:
            share = torch.cat([share, share.new_zeros(each - len(share), weight.shape[1])])
        self.linear = new_linear(share if keep else share.clone())

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return self.shards.gather(self.linear(x), "logits")[..., : self.size]


def new_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A frozen layer with these weights [out, in]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def own_rows(linear: nn.Module, shards: Shards, groups: Sequence[int] | None = None) -> nn.Linear:
    """The share of a layer that gives this process its outputs; `groups` of rows are divided each by itself."""
    assert isinstance(linear, nn.Linear)
    sizes = list(groups or [linear.out_features])

    def share(rows: Tensor) -> Tensor:
        return torch.cat([part[shards.part(len(part))] for part in torch.split(rows, sizes)])

    return new_linear(share(linear.weight), None if linear.bias is None else share(linear.bias))


def own_columns(linear: nn.Module, shards: Shards, site: Site) -> Summed:
    """The share of a layer that reads this process's inputs. The bias is added once, by the first process."""
    assert isinstance(linear, nn.Linear)
    columns = linear.weight[:, shards.part(linear.in_features)].clone()
    return Summed(new_linear(columns, linear.bias if shards.rank == 0 else None), shards, site)


def check_divides(whose: str, sizes: dict[str, int], shards: Shards) -> None:
    """Raise ConfigError where a size, by its config's field, cannot be shared evenly."""
    for name, size in sizes.items():
        if size % shards.size:
            fit = [n for n in range(1, size + 1) if all(s % n == 0 for s in sizes.values())]
            raise ConfigError(
                f"tensor_parallel {shards.size} does not divide the {whose}'s {name} ({size}): "
                f"set it to {' or '.join(map(str, fit[-4:]))}"
            )


def shard_decoder(decoder: Decoder, shards: Shards) -> None:
    """Keep this process's share of a whole decoder, in place. Not for packed layers: pack afterwards.

    Raises ConfigError naming the field that the number of processes does not divide; nothing has been changed then.
    """
    config = decoder.config
    sizes = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    if config.num_global_key_value_heads is not None:
        sizes["num_global_key_value_heads"] = config.num_global_key_value_heads
    sizes["intermediate_size"] = config.intermediate_size
    if config.moe is not None:
        sizes["moe_intermediate_size"] = config.moe.moe_intermediate_size
    check_divides("target", sizes, shards)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        _shard_attention(layer.self_attn, shards)
        layer.add_module("mlp", _shard_mlp(layer.mlp, shards))
    decoder.add_module("lm_head", Gathered(decoder.lm_head_weight, shards, keep=config.tie_word_embeddings))


def _shard_attention(attention: Attention, shards: Shards) -> None:
    heads = [attention.num_heads, attention.num_kv_heads, attention.num_value_heads]
    groups = [count * attention.head_dim for count in heads]
    attention.qkv_proj = own_rows(attention.qkv_proj, shards, groups)
    attention.num_heads, attention.num_kv_heads, attention.num_value_heads = (n // shards.size for n in heads)
    attention.add_module("o_proj", own_columns(attention.o_proj, shards, "attention"))


def _shard_mlp(mlp: nn.Module, shards: Shards) -> nn.Module:
    if isinstance(mlp, SparseMLP):  # every process has a share of every expert; one sum for all experts of a row
        experts = mlp.experts
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)  # [E, I, H] each
        part = shards.part(gate.shape[1])
        experts.gate_up_proj = nn.Parameter(torch.cat([gate[:, part], up[:, part]], dim=1), requires_grad=False)
        experts.down_proj = nn.Parameter(experts.down_proj.detach()[..., part].clone(), requires_grad=False)
        return Summed(mlp, shards, "mlp")
    assert isinstance(mlp, MLP)
    inner = mlp.down_proj.in_features
    mlp.gate_up_proj = own_rows(mlp.gate_up_proj, shards, [inner, inner])
    mlp.add_module("down_proj", own_columns(mlp.down_proj, shards, "mlp"))
    return mlp
