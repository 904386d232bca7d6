"""Sampled answers under edits follow the edited law of the target, and faults in the edits are noticed."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.engine.edits import TokenCounts
from dspark.engine.grammar import Grammars
from dspark.engine.request import SamplingParams

from .test_law import POSITIONS, PROMPT, VOCAB, draw, filtered, p_value

LETTERS = "abcdefg"  # token ids 1..7; 0 ends a text
CHOICE = ("abcd", "abdc", "acc", "bad", "bbbb", "bbg", "cab", "cfe", "ddda", "dg" * 3, "egg", "fade", "gab", "gbf")
FREE = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)
KINDS = {
    "repetition": FREE.replace(repetition_penalty=5.0),
    "presence and frequency": FREE.replace(presence_penalty=1.0, frequency_penalty=0.6),
    "bias": FREE.replace(logit_bias={2: 1.2, 4: -100.0}, top_k=6),
    "bad words": FREE.replace(bad_words=[[5, 2], [6, 6], [1, 5, 3], [0, 7], [7, 0], [3, 1, 5, 4]]),
    "min_tokens": FREE.replace(min_tokens=2, stop_token_ids=(1, 3, 4, 6, 99)),
    "grammar": SamplingParams(max_tokens=6, temperature=1.5, choice=CHOICE),
    "all": SamplingParams(
        max_tokens=6,
        temperature=0.8,
        choice=CHOICE,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias={1: -0.5, 7: 1.5},
        bad_words=["ba", [4, 7]],
        min_p=0.02,
        top_p=0.95,
    ),
}
TRIALS = 21_000


@pytest.fixture(scope="module")
def pair(make_model, make_drafter):
    """A target over seven letters and an end, and a drafter of three drafts whose laws often agree with it."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    target, reference = make_model("llama", vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.2, **small)
    vocab = {"<eos>": 0} | {letter: i for i, letter in enumerate(LETTERS, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    target = dataclasses.replace(
        target, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    )
    changes = {"target_layer_ids": (0,), "num_hidden_layers": 1, "block_size": 3}
    return target, make_drafter(target.decoder, **changes), reference


def edited(logits: np.ndarray, answer: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The logits of the row after prompt and answer with every edit, one after the other and the long way."""
    logits, history = logits.copy(), [*PROMPT, *answer]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(answer) < params.min_tokens:
        logits[[t for t in params.stop_token_ids if t < VOCAB]] = -np.inf
    for token in range(VOCAB):
        if token in history:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        if token in answer:
            logits[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for word in params.bad_words:
        ids = [LETTERS.index(letter) + 1 for letter in word] if isinstance(word, str) else list(word)
        if history[len(history) - len(ids) + 1 :] == ids[:-1]:
            logits[ids[-1]] = -np.inf
    if params.choice:
        text = "".join(LETTERS[t - 1] for t in answer)
        follows = {word[len(text)] for word in params.choice if word.startswith(text) and len(word) > len(text)}
        for token in range(VOCAB):
            if (token == 0 and text not in params.choice) or (token and LETTERS[token - 1] not in follows):
                logits[token] = -np.inf
    return logits


def exact_law(reference, params: SamplingParams) -> np.ndarray:
    """P of every triple of first tokens, [V ** 3]."""
    prefixes = torch.tensor([[*PROMPT, *two] for two in itertools.product(range(VOCAB), repeat=2)])
    with torch.inference_mode():
        logits = reference(prefixes).logits.double().numpy()  # [V * V, 5, V]
    law = np.zeros((VOCAB, VOCAB, VOCAB))
    for two, rows in zip(itertools.product(range(VOCAB), repeat=2), logits, strict=True):
        law[two] = 1
        for i in range(POSITIONS):
            after = edited(rows[2 + i], two[:i], params)
            if not np.isfinite(after).any():
                law[two] = 0  # after a prefix that is impossible itself
                break
            p = filtered(after, params)
            law[two] *= p if i == 2 else p[two[i]]
    assert law.sum() == pytest.approx(1)
    return law.reshape(-1)


def p_values(pair, kinds: dict[str, SamplingParams], trials: int) -> dict[str, float]:
    """How well each kind follows its law; 0 where it put out what is impossible."""
    found = {}
    for (name, params), counts in zip(kinds.items(), draw(pair, [*kinds.values()], trials, 1.2), strict=True):
        law = exact_law(pair[2], params)
        found[name] = 0.0 if counts[law == 0].any() else p_value(counts, law)
    return found


def test_edited_answers_follow_the_edited_law(pair):
    assert min((found := p_values(pair, KINDS, TRIALS)).values()) > 1e-3, found


def test_the_edits_matter(pair):
    """Else the test above would show little: each law is far from that of the unedited target."""
    free = exact_law(pair[2], FREE)
    for name, params in KINDS.items():
        assert np.abs(exact_law(pair[2], params) - free).sum() > 0.3, name


@pytest.mark.parametrize("kind", ["repetition", "presence and frequency"])
def test_penalties_once_a_round_are_noticed(pair, kind, monkeypatch):
    """Planted: every row is edited as the first, without the drafts before it."""
    along = TokenCounts.along

    def once(self, drafts):
        rows, tokens, counts = along(self, [])
        num_rows = len(drafts) + 1
        return np.tile(np.arange(num_rows), len(rows)), tokens.repeat(num_rows), counts.repeat(num_rows)

    monkeypatch.setattr(TokenCounts, "along", once)
    assert p_values(pair, {kind: KINDS[kind]}, 6000)[kind] < 1e-9


def test_one_grammar_mask_a_round_is_noticed(pair, monkeypatch):
    """Planted: the mask of the first row holds for all, the bonus row's among them."""
    masks = Grammars.masks

    def first(self, along):
        bounded, words = masks(self, along)
        start = 0
        for _, drafts in along:
            words[start : start + len(drafts) + 1] = words[start]
            start += len(drafts) + 1
        return bounded, words

    monkeypatch.setattr(Grammars, "masks", first)
    assert p_values(pair, {"grammar": KINDS["grammar"]}, 3000)["grammar"] == 0
