"""Plain decoding against transformers, and DSpark against plain decoding: ratios, medians, interleaved in one run.

    python benchmarks/decode.py                 # 8 prompts a set, 64 new tokens
    python benchmarks/decode.py --quick --json  # within a minute

Speeds are new tokens per second of a whole answer, prefill included. `greedy_identity` is measured in float32.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median

import torch
import transformers
from common import SETS, add_answer_arguments, open_pair, parser_of, read_prompts, tell

from dspark.console.session import Session
from dspark.engine.request import SamplingParams
from dspark.models.hub import resolve_model


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    count, tokens = (1, 16) if args.quick else (args.prompts, args.tokens)
    prompts = read_prompts(args.data, SETS, count)
    session = open_pair(args.target, args.drafter, args.dtype)
    bf16 = (
        session if session.target.decoder.dtype == torch.bfloat16 else open_pair(args.target, args.drafter, "bfloat16")
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model(args.target), dtype=torch.bfloat16
    ).eval()
    result = against_transformers(bf16, reference, prompts, tokens) | against_plain(session, prompts, tokens)
    exact = (
        session if session.target.decoder.dtype == torch.float32 else open_pair(args.target, args.drafter, "float32")
    )
    result["greedy_identity"] = greedy_identity(exact, prompts, tokens)
    result |= {"dtype": str(session.target.decoder.dtype), "threads": torch.get_num_threads()}
    tell(result, args.json)


def against_transformers(
    session: Session, reference: torch.nn.Module, prompts: dict[str, list[str]], tokens: int
) -> dict[str, float]:
    """Our plain decoding ÷ transformers' generate, same weights and dtype (bfloat16), greedy, batch 1."""
    ratios = []
    plain = SamplingParams(max_tokens=tokens, speculate=False, ignore_eos=True)
    for ids in all_ids(session, prompts):
        ours = tokens / session.answer(ids, plain).seconds
        start = time.perf_counter()
        with torch.inference_mode():
            reference.generate(  # type: ignore[operator]
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        ratios.append(ours / (tokens / (time.perf_counter() - start)))
    return {"plain_over_transformers": median(ratios)}


def against_plain(session: Session, prompts: dict[str, list[str]], tokens: int) -> dict[str, float]:
    """DSpark ÷ our plain decoding at temperature 0 and 1 (median per set, mean over sets), and the accepted length."""
    result: dict[str, float] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        ratios, taus = [], []
        for texts in prompts.values():
            set_ratios, spoken, rounds = [], 0, 0
            for i, ids in enumerate(all_ids(session, {"": texts})):
                params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=i)
                plain = session.answer(ids, params.replace(speculate=False))
                drafted = session.answer(ids, params)
                speeds = [len(t.completion.token_ids) / t.seconds for t in (drafted, plain)]
                set_ratios.append(speeds[0] / speeds[1])
                spoken += sum(origin != "prefill" for origin in drafted.completion.origins)
                rounds += drafted.completion.rounds
            ratios.append(median(set_ratios))
            taus.append(spoken / max(1, rounds))
        result[f"dspark_over_plain_{name}"] = mean(ratios)
        result[f"accepted_length_{name}"] = mean(taus)
    return result


def greedy_identity(session: Session, prompts: dict[str, list[str]], tokens: int) -> float:
    """Share of prompts whose float32 greedy tokens are the same with and without speculation."""
    same = []
    for ids in all_ids(session, prompts):
        params = SamplingParams(max_tokens=tokens)
        pair = [session.answer(ids, params.replace(speculate=s)).completion.token_ids for s in (False, True)]
        same.append(float(pair[0] == pair[1]))
    return mean(same)


def all_ids(session: Session, prompts: dict[str, list[str]]) -> list[list[int]]:
    """Token ids of every prompt, as the chat template renders it."""
    return [session.prompt_ids([{"role": "user", "content": text}]) for texts in prompts.values() for text in texts]


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_answer_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
