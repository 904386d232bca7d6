"""Accepted length of a drafter by set and position, at temperature 0 and 1: the figures of its card.

    python benchmarks/accepted_length.py --prompts 40 --tokens 128 --out card.json

tau counts the bonus token: tokens put out per target pass. Position i: the share of rounds whose draft i was accepted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import ALL_SETS, open_pair, read_prompts

from dspark.engine.request import Completion, SamplingParams
from dspark.files import atomic_path
from dspark.log import progress


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    prompts = read_prompts(args.data, tuple(args.sets), args.prompts)
    session = open_pair(args.target, args.drafter, args.dtype, max_batch=args.batch)
    rows = []
    with progress(len(args.temperatures) * len(prompts), "accepted length", "set") as bar:
        for name, texts in prompts.items():
            ids = [session.prompt_ids([{"role": "user", "content": text}]) for text in texts]
            ids = [i for i in ids if len(i) + args.tokens < 4000]
            for temperature in args.temperatures:
                params = [
                    SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=i) for i in range(len(ids))
                ]
                rows.append({"set": name, "temperature": temperature} | summary(session.engine.generate(ids, params)))
                bar.update(1)
                print(json.dumps(rows[-1]), flush=True)
    if args.out:
        with atomic_path(args.out) as path:
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def summary(completions: list[Completion]) -> dict[str, object]:
    """tau over all rounds, and acceptance by position."""
    rounds = sum(c.rounds for c in completions)
    spoken = sum(origin != "prefill" for c in completions for origin in c.origins)
    width = max((len(c.accepted_by_position) for c in completions), default=0)
    accepted = [
        sum(c.accepted_by_position[i] for c in completions if len(c.accepted_by_position) > i) for i in range(width)
    ]
    return {
        "prompts": len(completions),
        "rounds": rounds,
        "tau": round(spoken / max(1, rounds), 3),
        "accepted_by_position": [round(a / max(1, rounds), 3) for a in accepted],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--data", type=Path, help="directory with SET.jsonl files")
    parser.add_argument("--sets", nargs="+", default=list(ALL_SETS))
    parser.add_argument("--prompts", type=int, default=40, help="per set")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
