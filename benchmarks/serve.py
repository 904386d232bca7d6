"""The serving engine under load: rounds planned by costs against plain decoding, static widths and transformers.

    python benchmarks/serve.py --json
    python benchmarks/serve.py --parts load --concurrency 1,8 --rounds 2 --tokens 16   # a quick look

Part `load`: at each concurrency so many requests are decoded together, greedily, twice as many in all (4 at least).
Plain decoding, each static width and the planner take turns on the same prompts, answers of half to one and a half
times --tokens; ratios are medians over the rounds of tokens per second, prefill included.
  adaptive_over_plain_min        planner / plain, at the worst concurrency
  adaptive_over_plain_1          the same at concurrency 1
  adaptive_over_best_static_min  planner / the best static width of that concurrency, at the worst one
  planner_share                  planning / all of a round, at the highest concurrency
  round_time_error               median of |expected - measured| / measured time of the planner's rounds
Part `transformers`: plain8_over_transformers8, our plain decoding of 8 requests / transformers' generate of 8.
Part `prefix`: prefix_hit_ttft_ratio, first-token time with 500 cached tokens / cold (benchmarks/first_token.py).
Part `soak`: pages_lost and wrong_texts of random requests with aborts and limits (benchmarks/soak_engine.py).
Part `simulate`: simulated_shape_error, the planner on the published curve (`dspark simulate`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from common import SETS, read_prompts
from first_token import prefix_hit_ttft_ratio
from rich.console import Console
from rich.table import Table
from serve_load import Pair, measure_load
from soak_engine import SETTINGS, Alone, soak, tiny_pair

from dspark.console.session import Session
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import calibrated, drafter_path, open_engine
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError
from dspark.log import configure_logging
from dspark.models.hub import resolve_model

LONGEST_PROMPT = 192
BATCH = 8  # of the comparison with transformers


def main() -> None:
    args = arguments()
    configure_logging()
    if args.threads:
        torch.set_num_threads(args.threads)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "load": load, "transformers": against_transformers, "prefix": prefix, "soak": soaked, "simulate": simulated,
    }  # fmt: skip
    result: dict[str, Any] = {}
    for name in args.parts:
        result |= parts[name](args)
    result["details"] = result.pop("details", {}) | {"threads": torch.get_num_threads(), "tokens": args.tokens}
    if args.json:
        print(json.dumps(result))
    else:
        show(result)


def load(args: argparse.Namespace) -> dict[str, Any]:
    """The planner against plain decoding and static widths."""
    pair = open_pair(args)
    prompts = prompt_ids(pair.target_session, args)
    loads = measure_load(pair, prompts, args.concurrency, args.widths, args.tokens, args.rounds)
    ratios = {size: measured.over("plain") for size, measured in loads.items()}
    result: dict[str, Any] = {"adaptive_over_plain_min": min(ratios.values())}
    if 1 in ratios:
        result["adaptive_over_plain_1"] = ratios[1]
    result["adaptive_over_best_static_min"] = min(each.over(each.best_static) for each in loads.values())
    result["planner_share"] = loads[max(loads)].planner_share
    result["round_time_error"] = median(error for each in loads.values() for error in each.round_time_errors)
    return result | {"details": {"load": {str(size): each.summary() for size, each in loads.items()}}}


def open_pair(args: argparse.Namespace) -> Pair:
    """Target, drafter, and the settings of the planner with the temperatures of the drafter's calibration."""
    options = model_options(args)
    engine = open_engine(options, EngineSettings(max_batch=1, max_length=64))
    path = drafter_path(options)
    if engine.drafter is None or path is None:
        raise ConfigError("drafter: the part load needs one: name it with --drafter")
    settings = calibrated(EngineSettings(planner=args.planner), path, engine.drafter)
    return Pair(Session(engine.target, engine), engine.drafter, settings, args.costs)


def against_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding of 8 requests together, same weights and dtype, greedy, as many new tokens for each."""
    session = Session((engine := open_engine(model_options(args, "none"), plain_settings(args))).target, engine)
    prompts = prompt_ids(session, args)
    prompts = [prompts[i % len(prompts)] for i in range(BATCH)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model(args.target), dtype=engine.target.decoder.dtype
    ).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ratios = []
    for number in range(args.rounds + 1):  # the first one warms up
        start = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=args.tokens, ignore_eos=True))
        ours, start = time.perf_counter() - start, time.perf_counter()
        with torch.inference_mode():
            reference.generate(
                ids, attention_mask=seen, do_sample=False, max_new_tokens=args.tokens, min_new_tokens=args.tokens,
                pad_token_id=0,
            )  # fmt: skip
        if number:
            ratios.append((time.perf_counter() - start) / ours)
    return {"plain8_over_transformers8": median(ratios)}


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    """What a cached beginning saves."""
    engine = open_engine(model_options(args), EngineSettings(max_batch=1, max_length=1024))
    return {"prefix_hit_ttft_ratio": prefix_hit_ttft_ratio(engine, args.rounds)["prefix_hit_ttft_ratio"]}


def soaked(args: argparse.Namespace) -> dict[str, Any]:
    """Random requests on a tiny pair, each compared with itself run alone."""
    target, drafter = tiny_pair()
    alone = SETTINGS.replace(max_batch=1, num_blocks=None, max_waiting=None, prefix_cache=False)
    found = soak(Engine(target, drafter, SETTINGS), Alone(Engine(target, drafter, alone)), args.requests, 0)
    return {key: found[key] for key in ("pages_lost", "wrong_texts")}


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """The planner against the published throughputs."""
    from dspark.evaluation.simulate import simulated_shape_error

    return {"simulated_shape_error": simulated_shape_error()}


def model_options(args: argparse.Namespace, drafter: str | None = None) -> ModelOptions:
    """The models of the command line."""
    return ModelOptions.from_dict(
        {"target": args.target, "drafter": drafter or args.drafter, "dtype": args.dtype}, "options"
    )


def plain_settings(args: argparse.Namespace) -> EngineSettings:
    """Of an engine for 8 requests."""
    return EngineSettings(max_batch=BATCH, max_length=LONGEST_PROMPT + args.tokens + 1, prefix_cache=False)


def prompt_ids(session: Session, args: argparse.Namespace) -> list[list[int]]:
    """Prompts as the chat template renders them, one of each set after the other; long ones are left out."""
    by_set = read_prompts(args.data, SETS, args.prompts)
    texts = [text for row in zip(*by_set.values(), strict=False) for text in row]
    ids = [session.prompt_ids([{"role": "user", "content": text}]) for text in texts]
    return [prompt for prompt in ids if len(prompt) <= LONGEST_PROMPT]


def show(result: dict[str, Any]) -> None:
    """Print the figures, and tokens per second by concurrency."""
    console = Console(highlight=False)
    for key, value in result.items():
        if key != "details":
            console.print(f"{key:30} {value:.3f}" if isinstance(value, float) else f"{key:30} {value}")
    loads: dict[str, dict[str, Any]] = result["details"].get("load", {})
    if not loads:
        return
    names = list(next(iter(loads.values()))["tokens_per_second"])
    table = Table(title="tokens per second (by static width: 1, 2, ... drafts)")
    widths = [name.removeprefix("static ") for name in names]
    for column in ("requests", *widths, "/ plain", "/ best static", "drafted for", "rows"):
        table.add_column(column, justify="right")
    for size, each in loads.items():
        speeds = [f"{each['tokens_per_second'][name]:.1f}" for name in names]
        ratios = [f"{each[key]:.2f}" for key in ("over_plain", "over_best_static", "drafted_share", "verify_length")]
        table.add_row(size, *speeds, *ratios)
    console.print(table)


def numbers(text: str) -> list[int]:
    """1,2,4 -> [1, 2, 4]."""
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("load", "transformers", "prefix", "soak", "simulate")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--data", type=Path, help="directory with SET.jsonl files; default: built-in prompts")
    parser.add_argument("--prompts", type=int, default=16, help="per set")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(names), help=",".join(names))
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--widths", type=numbers, help="static widths, in drafts; default: all of the drafter's")
    parser.add_argument("--planner", default="early_stop", choices=("early_stop", "lagged"))
    parser.add_argument("--costs", type=Path, help="a file of `dspark profile`; default: measured here")
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison, after one that warms up")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per answer, in the mean")
    parser.add_argument("--requests", type=int, default=2000, help="of the part soak")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(names):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}: choose from {','.join(names)}")
    return args


if __name__ == "__main__":
    main()
