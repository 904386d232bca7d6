"""A target with 8-bit weights against the stored ones: speed, accepted length and how close it is, in one run.

    python benchmarks/quantized.py                 # 8 prompts a set, 64 new tokens
    python benchmarks/quantized.py --quick --json  # 1 prompt a set, 16 tokens

Speeds are new tokens per second of a whole greedy answer, prefill included: medians of ratios over prompts.
"""

from __future__ import annotations

import argparse
from statistics import mean, median

import torch
from common import SETS, add_answer_arguments, parser_of, read_prompts, tell

from dspark.console.session import Session, Timed, open_session
from dspark.engine.config import ModelOptions
from dspark.engine.request import SamplingParams


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    count, tokens = (1, 16) if args.quick else (args.prompts, args.tokens)
    prompts = read_prompts(args.data, SETS, count)
    sessions = {weights: open_pair(args, weights) for weights in ("stored", "int8")}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    answers: dict[tuple[str, bool], list[Timed]] = {}
    for texts in prompts.values():
        for text in texts:
            for weights, session in sessions.items():
                for speculate in (False, True):
                    ids = session.prompt_ids([{"role": "user", "content": text}])
                    answer = session.answer(ids, params.replace(speculate=speculate))
                    answers.setdefault((weights, speculate), []).append(answer)
    result = figures(answers) | closeness(sessions, answers["stored", False])
    result |= {"dtype": str(sessions["stored"].target.decoder.dtype), "threads": torch.get_num_threads()}
    tell(result, args.json)


def open_pair(args: argparse.Namespace, weights: str) -> Session:
    """A session without a prefix cache: a prompt that is answered again costs the same."""
    chosen = {"target": args.target, "drafter": args.drafter, "dtype": args.dtype, "weights": weights}
    session = open_session(ModelOptions.from_dict(chosen, "options"), prefix_cache=False)
    assert session.speculates, "a benchmark of speculation needs a drafter"
    return session


def figures(answers: dict[tuple[str, bool], list[Timed]]) -> dict[str, float]:
    """Ratios of speeds, accepted lengths, and whether speculation gave plain decoding's text (exact in float32)."""

    def ratio(above: tuple[str, bool], below: tuple[str, bool]) -> float:
        return median(b.seconds / a.seconds for a, b in zip(answers[above], answers[below], strict=True))

    result = {
        "plain_int8_over_stored": ratio(("int8", False), ("stored", False)),
        "dspark_int8_over_stored": ratio(("int8", True), ("stored", True)),
    }
    for weights in ("stored", "int8"):
        plain, drafted = answers[weights, False], answers[weights, True]
        spoken = sum(origin != "prefill" for timed in drafted for origin in timed.completion.origins)
        result |= {
            f"dspark_over_plain_{weights}": ratio((weights, True), (weights, False)),
            f"accepted_length_{weights}": spoken / max(1, sum(timed.completion.rounds for timed in drafted)),
            f"greedy_identity_{weights}": mean(
                float(a.completion.token_ids == b.completion.token_ids) for a, b in zip(plain, drafted, strict=True)
            ),
        }
    return result


def closeness(sessions: dict[str, Session], answers: list[Timed]) -> dict[str, float]:
    """Over the stored target's answers: how often both choose the same token, and the divergence of their laws."""
    same, divergences = [], []
    for timed in answers:
        row = timed.completion.token_ids
        laws = []
        for session in sessions.values():
            states = session.target.states()([row], ())[0]
            with torch.inference_mode():
                laws.append(session.target.decoder.logits(states.last_hidden).float().log_softmax(-1))
        stored, rounded = laws
        same.append(float((stored.argmax(-1) == rounded.argmax(-1)).float().mean()))
        divergences.append(float((stored.exp() * (stored - rounded)).sum(-1).mean()))
    return {"same_choice": mean(same), "kl_divergence_nats": mean(divergences)}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_answer_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
