"""EAGLE-3 against a reference that runs every step anew over whole sequences, and training against serving."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafters.config import DrafterConfig
from dspark.drafters.eagle3 import Eagle3Drafter
from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.models.layers import softcap
from dspark.spec.types import SamplingRows

VARIANTS = [
    {},
    {"qk_norm": False, "attention_bias": True},
    {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh", "draft_vocab_size": 17, "own_lm_head": True},
]
GEMMA4 = {"layer_style": "gemma4", "attention_k_eq_v": True, "final_logit_softcapping": 2.0}
ANCHORS = [1, 2, 6, 7, 8, 18]
MakeChain = Callable[..., Eagle3Drafter]


def sequence(length: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 40, (1, length), generator=generator)
    return ids, torch.randn(1, length, 3, 32, generator=generator)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """Heads [h, D] at a position, base 10000."""
    half = x.shape[-1] // 2
    angle = position / 10_000 ** (torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def last_row(drafter: Eagle3Drafter, tokens: list[int], hidden: list[Tensor]) -> Tensor:
    """The layer over rows 0, 1, ..: row t reads the embedding of tokens[t] and hidden[t]. The last row's output [H]."""
    c, w = drafter.config, dict(drafter.backbone.named_parameters())

    def weight(name: str) -> Tensor:
        return w[f"layers.0.{name}.weight"]

    def heads(name: str, x: Tensor, norm: str | None, position: int | None) -> Tensor:
        bias = w[f"layers.0.self_attn.{name}.bias"] if c.attention_bias else 0
        out = (weight(f"self_attn.{name}") @ x + bias).view(-1, c.head_dim)
        if norm and c.qk_norm:
            out = rms(out, weight(f"self_attn.{norm}"), c.rms_norm_eps)
        return out if position is None else rotated(out, position)

    keys, values, x = [], [], torch.empty(0)
    for t, (token, state) in enumerate(zip(tokens, hidden, strict=True)):
        embedded = drafter.embedding_weight[token].to(state.dtype)
        parts = (
            rms(embedded, weight("input_layernorm"), c.rms_norm_eps),
            rms(state, weight("hidden_norm"), c.rms_norm_eps),
        )
        x = torch.cat(parts)
        keys.append(heads("k_proj", x, "k_norm", t))
        values.append(heads("v_proj", x, None, None))
    query, share = heads("q_proj", x, "q_norm", len(tokens) - 1), c.num_attention_heads // c.num_key_value_heads
    out = []
    for h in range(c.num_attention_heads):
        scores = torch.stack([query[h] @ key[h // share] for key in keys]) / c.head_dim**0.5
        out.append(sum(p * value[h // share] for p, value in zip(scores.softmax(0), values, strict=True)))
    y = hidden[-1] + weight("self_attn.o_proj") @ torch.cat(out)
    y = y + w["layers.0.self_attn.o_proj.bias"] if c.attention_bias else y
    z = rms(y, weight("post_attention_layernorm"), c.rms_norm_eps)
    gate = weight("mlp.gate_proj") @ z
    gate = F.silu(gate) if c.hidden_act == "silu" else F.gelu(gate, approximate="tanh")
    return y + weight("mlp.down_proj") @ (gate * (weight("mlp.up_proj") @ z))


def reference(drafter: Eagle3Drafter, ids: Tensor, features: Tensor, anchor: int) -> Tensor:
    """One chain: each step recomputes every row that it sees. [G, H]"""
    fused = [drafter.backbone.fc.weight @ f.flatten().to(drafter.dtype) for f in features[0, :anchor]]
    outputs: list[Tensor] = []
    for k in range(drafter.num_drafts):
        tokens = ids[0, 1 : anchor + k + 1].tolist()
        outputs.append(last_row(drafter, tokens, fused + outputs))
    return rms(torch.stack(outputs), drafter.backbone.norm.weight, drafter.config.rms_norm_eps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_time_test_is_the_plain_loop(make_chain: MakeChain, variant: dict[str, object]) -> None:
    """In float64: every hidden state, and every parameter's gradient."""
    drafter = make_chain(**variant).double()
    for name, p in drafter.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(p, 0.5, 1.5)
    ids, features = sequence()
    anchors = torch.tensor([ANCHORS])
    hidden = drafter.train_hidden(ids, features, anchors, torch.ones_like(anchors, dtype=torch.bool))[0]
    expected = torch.stack([reference(drafter, ids, features, anchor) for anchor in ANCHORS])
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn(hidden.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    names, parameters = zip(*drafter.backbone.named_parameters(), strict=True)
    got = torch.autograd.grad((hidden * direction).sum(), parameters)
    wanted = torch.autograd.grad((expected * direction).sum(), parameters)
    for name, ours, theirs in zip(names, got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()), msg=name)


def test_a_row_sees_its_context_and_its_own_chain_alone(make_chain: MakeChain) -> None:
    """Which inputs move which outputs, by gradients, against the definition."""
    drafter = make_chain()
    _, features = sequence(9)
    anchors, generator = torch.tensor([[1, 4, 5, 7]]), torch.Generator().manual_seed(5)
    following = torch.randn(1, 9, 32, generator=generator, requires_grad=True)
    fed = torch.randn(1, 4, 4, 32, generator=generator, requires_grad=True)
    features.requires_grad_()
    hidden = drafter.backbone.train_chains(features, following, fed, anchors)
    for i, anchor in enumerate(anchors[0].tolist()):
        for k in range(4):
            grads = torch.autograd.grad(hidden[0, i, k].sum(), (features, following, fed), retain_graph=True)
            by_feature, by_following, by_fed = (
                g[0].flatten(start).ne(0).any(-1) for g, start in zip(grads, (1, 1, 2), strict=True)
            )
            assert by_feature.tolist() == [t < anchor for t in range(9)]
            assert by_following.tolist() == [t < anchor - 1 for t in range(9)]
            assert by_fed.tolist() == [[j == i and step <= k for step in range(4)] for j in range(4)]


def test_nothing_leaks_from_the_future(make_chain: MakeChain) -> None:
    """Other tokens and features from position t on move no slot that knows only what is before t."""
    drafter = make_chain()
    ids, features = sequence()
    anchors = torch.arange(1, 20)[None]
    valid = torch.ones_like(anchors, dtype=torch.bool)
    newest = anchors[0, :, None] + torch.arange(4)  # the last token that each slot may know
    with torch.no_grad():
        before = drafter.train_hidden(ids, features, anchors, valid)[0]
        for t in (3, 9, 15):
            other_ids, other = ids.clone(), features.clone()
            other_ids[:, t:] = (other_ids[:, t:] + 1) % 40
            other[:, t:] += 1.0
            after = drafter.train_hidden(other_ids, other, anchors, valid)[0]
            torch.testing.assert_close(after[newest < t], before[newest < t], rtol=0, atol=0)
            assert ((after - before).abs().amax(-1)[newest >= t] > 1e-5).all()


@pytest.mark.parametrize("variant", [{}, GEMMA4])
def test_nothing_leaks_between_conversations_of_a_row(make_chain: MakeChain, variant: dict[str, object]) -> None:
    """Chains are those of each conversation alone, and changing one of them moves no chain of its neighbours."""
    drafter = make_chain(**variant)
    ids, features = sequence()
    spans = [(0, 8), (8, 16), (16, 24)]
    segment_ids = torch.tensor([[segment for segment, (a, b) in enumerate(spans) for _ in range(a, b)]])
    anchors = torch.tensor([[a + i for a, _ in spans for i in (1, 2, 4)]])  # four drafts end with the conversation
    valid = torch.ones_like(anchors, dtype=torch.bool)
    with torch.no_grad():
        packed = drafter.train_hidden(ids, features, anchors, valid, segment_ids)
        for segment, (a, b) in enumerate(spans):
            own = slice(3 * segment, 3 * segment + 3)
            alone = drafter.train_hidden(ids[:, a:b], features[:, a:b], anchors[:, own] - a, valid[:, own])
            torch.testing.assert_close(packed[:, own], alone, rtol=1e-5, atol=1e-5)
            other_ids, other = ids.clone(), features.clone()
            other_ids[:, a:b] = (other_ids[:, a:b] + 1) % 40
            other[:, a:b] += 1.0
            moved = (drafter.train_hidden(other_ids, other, anchors, valid, segment_ids) - packed).abs()
            moved = moved.amax(dim=(0, 2, 3))
            assert (moved[own] > 1e-4).all()
            assert not moved[: own.start].any()
            assert not moved[own.stop :].any()


def test_serving_takes_the_targets_dtype(make_chain: MakeChain, target: Decoder) -> None:
    """Beside a bfloat16 target weights, head, cache and states are bfloat16 too, the feature scale folded in."""
    ids, features = sequence()
    target.bfloat16()
    drafter = make_chain(draft_vocab_size=17, own_lm_head=True)
    drafter.backbone.feature_scale.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = drafter.train_hidden(ids, features, torch.tensor([[10]]), torch.tensor([[True]]))[0, 0, 0]
        expected = (hidden @ drafter.lm_head_weight.T).softmax(-1)
    drafter.prepare()
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert (drafter.backbone.feature_scale == 1).all()
    cache = drafter.new_cache(num_blocks=8, block_size=4)
    table = [3, 1, 2, 4, 5, 6]
    with torch.inference_mode():
        inject(drafter, cache, table, ids, features.bfloat16(), 0, 10)
        batch = drafter.draft_batch([10], [table], 4)
        block = drafter.propose(ids[:, 10], batch, cache, rows([1.0]), torch.tensor([10]), 1)
    assert cache.k[0].dtype == cache.states.dtype == torch.bfloat16
    assert (block.probs[0, 0] - expected).abs().sum() < 0.1


def rows(temperatures: list[float]) -> SamplingRows:
    n = len(temperatures)
    none = torch.zeros(n, dtype=torch.long)
    return SamplingRows(torch.tensor(temperatures), none, torch.ones(n), torch.zeros(n), torch.arange(n))


def inject(
    drafter: Eagle3Drafter, cache, table: list[int], ids: Tensor, features: Tensor, start: int, end: int
) -> None:
    positions = torch.arange(start, end)
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(start, end)])
    drafter.inject(features[0, start:end], ids[0, start + 1 : end + 1], positions, slots, cache)


@pytest.mark.parametrize("variant", [{}, {"draft_vocab_size": 17, "own_lm_head": True}, GEMMA4])
@pytest.mark.parametrize("seq_lens", [[10], [10, 4, 17]])
def test_drafts_and_their_law_are_those_of_training(
    make_chain: MakeChain, variant: dict[str, object], seq_lens: list[int]
) -> None:
    """Fed back as ground truth, the drafted tokens give the law that they were drawn from. Stale pages are not read."""
    drafter = make_chain(**variant).prepare()
    ids, features = sequence()
    tables = [[7, 2, 9, 4, 5, 6], [11, 12, 13, 1], [3, 8, 15, 14, 17, 16]]
    cache = drafter.new_cache(num_blocks=20, block_size=4)
    with torch.inference_mode():
        cache.k[0][4:] = cache.v[0][4:] = torch.nan
        for table, seq_len in zip(tables, seq_lens, strict=False):
            inject(drafter, cache, table, ids, features, 0, seq_len)
        anchors = ids[0, seq_lens]
        for temperature in (0.0, 1.0):
            batch = drafter.draft_batch(seq_lens, tables[: len(seq_lens)], 4)
            law = rows([temperature] * len(seq_lens))
            block = drafter.propose(anchors, batch, cache, law, torch.tensor(seq_lens), 4)
            assert block.tokens.shape == (len(seq_lens), 4)
            for b, seq_len in enumerate(seq_lens):
                true = torch.cat([ids[:, : seq_len + 1], block.tokens[b : b + 1]], dim=1)
                anchor, valid = torch.tensor([[seq_len]]), torch.tensor([[True]])
                hidden = drafter.train_hidden(true, features[:, : true.shape[1]], anchor, valid)[0, 0]
                logits = softcap(hidden @ drafter.lm_head_weight.T, drafter.config.final_logit_softcapping)
                best = logits.argmax(-1)
                if temperature:
                    torch.testing.assert_close(block.probs[b], logits.softmax(-1), rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(block.tokens[b], best if block.token_ids is None else block.token_ids[best])


def test_accepted_rows_are_overwritten_with_the_targets(make_chain: MakeChain) -> None:
    """After a round, context and state are those of one injection, whatever the chain left behind."""
    drafter = make_chain().prepare()
    ids, features = sequence()
    table = [3, 1, 2, 4, 5, 6]
    with torch.inference_mode():
        cache, fresh = (drafter.new_cache(num_blocks=8, block_size=4) for _ in range(2))
        inject(drafter, cache, table, ids, features, 0, 10)
        batch = drafter.draft_batch([10], [table], 4)
        before = cache.k[0].clone()
        assert drafter.propose(ids[:, 10][:1], batch, cache, rows([0.0]), torch.tensor([10]), 2).num_drafts == 2
        changed = (cache.k[0] != before).flatten(1).any(-1).nonzero()[:, 0].tolist()
        assert changed in ([table[2] * 4 + 2], [table[2] * 4 + 1, table[2] * 4 + 2]), "rows 9 and 10 of the chain alone"
        inject(drafter, cache, table, ids, features, 10, 13)
        inject(drafter, fresh, table, ids, features, 0, 13)
        last = torch.tensor([table[3] * 4])
        torch.testing.assert_close(cache.state(last), fresh.state(last))
        seen = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(13)])
        torch.testing.assert_close(cache.k[0][seen], fresh.k[0][seen])
        torch.testing.assert_close(cache.v[0][seen], fresh.v[0][seen])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "eagle3 has one layer"),
        ({"markov_rank": 4}, "neither markov_rank nor a confidence head"),
        ({"sliding_window": 5, "layer_types": ("sliding_attention",)}, "sees the whole context"),
        ({"ttt_length": 0}, "ttt_length"),
        ({"algorithm": "dflash", "num_hidden_layers": 2}, "mask_token_id is missing"),
        ({"algorithm": "dflash", "mask_token_id": 1, "own_lm_head": True}, "own_lm_head is for eagle3"),
    ],
)
def test_what_a_chain_cannot_be_is_refused(make_chain: MakeChain, change: dict[str, object], message: str) -> None:
    fields = make_chain().config.model_dump()
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict(fields | change, "test")
