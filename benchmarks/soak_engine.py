"""Random requests with aborts and limits against each request run alone: no cache block lost, no text changed.

    python benchmarks/soak_engine.py --json                                        # 2,000 requests, a tiny random pair
    python benchmarks/soak_engine.py --target smollm2-135m --requests 100 --json   # the real pair, in float32

Arrivals come in bursts, of all priorities, into a pool too small for everybody and a queue that fills up; prompts share
beginnings and are cut in chunks; a tenth is aborted, wherever it is; others end at stop tokens, at max_tokens or at the
length limit. Half is greedy, half sampled with a seed, and a quarter does not speculate. Leaves with 1 on a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark.drafters.base import Drafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.factory import make_drafter
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.engine.request import Completion, SamplingParams
from dspark.engine.text import TextStream
from dspark.errors import OverloadError
from dspark.log import progress
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target

VOCAB = 64  # of the tiny target
LONGEST = 40  # tokens of an answer
SETTINGS = EngineSettings(
    max_batch=6, max_length=112, block_size=8, num_blocks=40, step_tokens=64, max_waiting=12, aging_steps=20
)
KINDS = [
    SamplingParams(max_tokens=LONGEST, ignore_eos=True, temperature=temperature, top_p=top_p, seed=5, speculate=draft)
    for temperature, top_p in ((0.0, 1.0), (1.0, 0.9))
    for draft in (True, True, True, False)
]


@dataclass(frozen=True)
class Case:
    """A request: prompt, sampling and the limits of its answer."""

    prompt: tuple[int, ...]
    kind: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def params(self) -> SamplingParams:
        """As the engine takes them."""
        return KINDS[self.kind].replace(max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids)


@dataclass
class Alone:
    """What each request says when it has the engine to itself: the same settings, one place, no prefix cache."""

    engine: Engine
    answers: dict[tuple[tuple[int, ...], int, int], list[int]] = field(default_factory=dict)

    def tokens(self, case: Case) -> list[int]:
        """The whole answer, cut where the case stops."""
        kind = KINDS[case.kind]
        # A sampled answer with a nearer end is not the start of a longer one: its last rounds judge fewer drafts.
        longest = case.max_tokens if kind.temperature and kind.speculate else LONGEST
        key = case.prompt, case.kind, longest
        if key not in self.answers:
            (done,) = self.engine.generate([case.prompt], kind.replace(max_tokens=longest))
            self.answers[key] = done.token_ids
        answer = self.answers[key][: case.max_tokens]
        ends = [i + 1 for i, token in enumerate(answer) if token in case.stop_token_ids]
        return answer[: min(ends, default=len(answer))]

    def is_right(self, case: Case, done: Completion) -> bool:
        """Whether an answer, or the beginning of one that was aborted, is what it should be, text included."""
        expected = self.tokens(case)
        if done.finish_reason == "abort":
            expected = expected[: len(done.token_ids)]
        elif done.finish_reason != ("stop" if expected[-1] in case.stop_token_ids else "length"):
            return False
        stream = TextStream(self.engine.target.tokenizer.backend_tokenizer.decode)
        stream.push(expected)
        stream.finish()
        return done.token_ids == expected and done.text == stream.text


def main() -> int:
    args = arguments()
    engine, by_itself = open_engines(args)
    start = time.perf_counter()
    result = soak(engine, Alone(by_itself), args.requests, args.seed)
    result["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(result) if args.json else "\n".join(f"{key:18} {value}" for key, value in result.items()))
    return int(bool(result["pages_lost"] or result["wrong_texts"]))


def soak(engine: Engine, alone: Alone, num_requests: int, seed: int) -> dict[str, float]:
    """Serve that many requests, checking the engine's state after every step."""
    rng = random.Random(seed)
    prompts = shared_prompts(rng, engine.target.config.vocab_size)
    live: dict[str, Case] = {}
    counts = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    wrong = refused = came = 0

    def settle(done: Completion) -> None:
        nonlocal wrong
        counts[done.finish_reason] += 1
        bar.update(1)
        wrong += not alone.is_right(live.pop(done.request_id), done)

    bar = progress(num_requests, "soak", "request")
    while came < num_requests or engine.has_work():
        for _ in range(min(rng.choice((0, 0, 0, 1, 2, 10)), num_requests - came)):
            case = draw(rng, prompts)
            try:
                live[engine.submit(case.prompt, case.params, priority=rng.choice((-1, 0, 0, 1)))] = case
                came += 1
            except OverloadError:
                refused += 1
        for out in engine.step() if engine.has_work() else ():
            if out.completion is not None:
                settle(out.completion)
        engine.check_integrity()
        if live and rng.random() < 0.025:
            done = engine.abort(rng.choice(sorted(live)))
            assert done is not None
            settle(done)
    bar.close()
    load, stats = engine.load, engine.stats
    return {
        "requests": came, "pages_lost": load.num_blocks - load.free_blocks, "wrong_texts": wrong, **counts,
        "refused": refused, "preemptions": stats.preemptions, "prefix_hit_rate": round(stats.prefix_hit_rate or 0, 3),
        "rounds": stats.rounds, "accepted_length": round(stats.accepted_length or 0, 3),
    }  # fmt: skip


def shared_prompts(rng: random.Random, vocab: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to 90 tokens that begin in one of six ways."""
    heads = [[rng.randrange(1, vocab) for _ in range(60)] for _ in range(6)]
    tails = [[rng.randrange(1, vocab) for _ in range(rng.randrange(1, 30))] for _ in range(40)]
    return [(*rng.choice(heads)[: rng.choice((0, 8, 17, 40, 60))], *tail) for tail in tails]


def draw(rng: random.Random, prompts: list[tuple[int, ...]]) -> Case:
    """A request of any kind."""
    stops = tuple(rng.randrange(1, VOCAB) for _ in range(rng.choice((0, 0, 2))))
    return Case(rng.choice(prompts), rng.randrange(len(KINDS)), rng.randint(1, LONGEST), stops)


def open_engines(args: argparse.Namespace) -> tuple[Engine, Engine]:
    """The engine to be tried, and the one that runs each request alone."""
    alone = SETTINGS.replace(max_batch=1, num_blocks=None, max_waiting=None, prefix_cache=False)
    if args.target != "tiny":
        options = ModelOptions.from_dict(
            {"target": args.target, "drafter": args.drafter, "dtype": "float32"}, "options"
        )
        engine = open_engine(options, SETTINGS)
        return engine, Engine(engine.target, engine.drafter, alone)
    target, drafter = tiny_pair()
    return Engine(target, drafter, SETTINGS), Engine(target, drafter, alone)


def tiny_pair(vocab_size: int = VOCAB, num_positions: int = 112) -> tuple[Target, Drafter]:
    """A random target whose laws are flat, so that a random drafter meets them often, in float32."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": num_positions,
    }  # fmt: skip
    layers = {"num_hidden_layers": 3, "layer_types": ("full_attention",) * 3, "architecture": "LlamaForCausalLM"}
    decoder = Decoder(DecoderConfig.model_validate(shape | layers)).requires_grad_(False).eval()
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.1)
    rest = {
        "num_hidden_layers": 2, "num_target_layers": 3, "target_layer_ids": (-1, 1), "block_size": 4,
        "mask_token_id": vocab_size - 1, "markov_rank": 0, "rope": decoder.config.rope,
    }  # fmt: skip
    drafter = make_drafter(DrafterConfig.model_validate(shape | rest), decoder).prepare()
    return Target("tiny", decoder, byte_tokenizer(), "", "", "", ""), drafter


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each id is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="tiny", help="tiny = made here; else any target, with its drafter")
    parser.add_argument("--drafter", default="auto", help="of a target that is not tiny")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
