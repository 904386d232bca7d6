"""What evaluation must show on the built-in pair.

    python benchmarks/evaluation.py --json
    python benchmarks/evaluation.py --prompts 4 --tokens 32   # a few minutes

`batch16_over_batch1`: prompts per hour of an evaluation, speculation and plain decoding both, in batches of 16 over one
at a time; the two take turns block by block within one run. `batch_invariant`: greedy float32 texts of both are the
same, and so are the drafts accepted in every round. `ece_max_after_sts`: calibration error of the worst position with
the calibration that lies beside the drafter, on prompts that were neither fitted on nor, as the first 25 of each set
were, used to choose among fits; `ece_noise_max` is what chance alone
would show. `doctor_found`: of `doctor_planted` faults, planted one at a time in a tiny pair trained for it, those that
`dspark doctor` names; `doctor_false_alarms` counts the faults that it names in the same pair untouched.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import ALL_SETS, SETS, SHARED_SETS
from planted_faults import doctor_found

from dspark.data.sources import Prompt, select_prompts
from dspark.drafters.layouts.calibration import CALIBRATION_NAME, Calibration
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import drafter_path, open_engine
from dspark.evaluation.calibrate import judge
from dspark.evaluation.config import CalibrateOptions, MeasureOptions
from dspark.evaluation.rounds import collect
from dspark.evaluation.rows import Row, Setting, make_cases
from dspark.evaluation.runner import answers, warm_up
from dspark.evaluation.tasks import load_tasks
from dspark.log import progress

BATCHES = (1, 16)
BLOCK = 32  # prompts, after which the other batch takes its turn


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    figures = batching(args) | calibration(args) | diagnosis()
    if args.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{key:24} {value}" for key, value in figures.items()))


def batching(args: argparse.Namespace) -> dict[str, object]:
    """Prompts per hour in batches of 16 over one at a time, and whether the answers are the same."""
    options = {batch: measure_options(args, batch) for batch in BATCHES}
    first = open_engine(
        ModelOptions(target=args.target, drafter=args.drafter, dtype="float32"), options[1].engine_settings()
    )
    engines = {batch: Engine(first.target, first.drafter, o.engine_settings()) for batch, o in options.items()}
    tasks = load_tasks(tuple(args.sets), args.data, args.prompts)
    cases = make_cases(tasks, [Setting(0.0)])
    seconds, rows = dict.fromkeys(BATCHES, 0.0), {batch: list[Row]() for batch in BATCHES}
    for batch in BATCHES:
        warm_up(engines[batch], cases)
    with progress(len(BATCHES) * 2 * len(cases), "batching", "answer") as bar:
        for start in range(0, len(cases), BLOCK):
            for batch in BATCHES:
                began = time.perf_counter()
                for row in answers(engines[batch], cases[start : start + BLOCK], options[batch], set(), bar):
                    rows[batch].append(row)
                seconds[batch] += time.perf_counter() - began
    per_hour = {batch: 3600 * len(cases) / seconds[batch] for batch in BATCHES}
    return {
        "batch16_over_batch1": round(per_hour[16] / per_hour[1], 3),
        "batch_invariant": contents(rows[1]) == contents(rows[16]),
        "prompts_per_hour_batch1": round(per_hour[1], 1),
        "prompts_per_hour_batch16": round(per_hour[16], 1),
        "prompts": len(cases),
        "threads": torch.get_num_threads(),
    }


def calibration(args: argparse.Namespace) -> dict[str, object]:
    """The worst calibration error of the drafter as it is shipped, on prompts that its calibration has not seen."""
    files = tuple(args.data / f"{name}.jsonl" for name in args.calibration_sets)
    path = drafter_path(model := ModelOptions(target=args.target, drafter=args.drafter))
    assert path is not None, "without a drafter there is nothing to calibrate"
    options = CalibrateOptions(prompts=files, max_tokens=args.calibration_tokens)
    settings = EngineSettings(max_batch=options.max_batch, max_length=options.max_length, record_rounds=True)
    engine = open_engine(model, settings)
    assert engine.drafter is not None
    shipped = Calibration.read(path / CALIBRATION_NAME, engine.drafter)
    prompts = unseen(files, args.calibration_skip, args.calibration_prompts, options.seed)
    with TemporaryDirectory() as temporary:
        answered = collect(engine, prompts, options, (args.keep or Path(temporary)) / "evaluation.rounds.jsonl")
    rounds = [record for answer in answered for record in answer.rounds]
    before, after = judge(rounds), judge(rounds, shipped.temperatures)
    return {
        "ece_max_after_sts": round(after.ece_max, 4),
        "ece_max_before_sts": round(before.ece_max, 4),
        "ece_noise_max": round(max(position.ece_noise for position in after.positions), 4),
        "held_out_rounds": after.num_rounds,
    }


def unseen(files: tuple[Path, ...], skip: int, keep: int, seed: int) -> list[Prompt]:
    """Of each file the next `keep` prompts after the first `skip` of the order that the seed decides."""
    looked_at = {prompt.id for prompt in select_prompts(files, skip, seed)}
    return [prompt for prompt in select_prompts(files, skip + keep, seed) if prompt.id not in looked_at]


def diagnosis() -> dict[str, object]:
    """How many of the planted faults the doctor names."""
    result = doctor_found()
    return {
        "doctor_found": result["found"],
        "doctor_planted": result["total"],
        "doctor_false_alarms": int(not result["healthy_pair_passes"]),
    }


def contents(rows: list[Row]) -> dict[str, object]:
    """What must not depend on the batch: texts, and where rounds stood and how many drafts they accepted."""
    return {row.id: (row.texts, [record[:5] for record in row.rounds]) for row in rows}


def measure_options(args: argparse.Namespace, batch: int) -> MeasureOptions:
    """Alike but for the batch."""
    return MeasureOptions(tokens=args.tokens, batch=batch, max_length=2048, device="cpu")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--data", type=Path, default=SHARED_SETS, help="directory with SET.jsonl files")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--prompts", type=int, default=32, help="per set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--calibration-sets", nargs="+", default=list(ALL_SETS), help="of prompts it was not fitted on")
    parser.add_argument("--calibration-prompts", type=int, default=25, help="per set")
    parser.add_argument("--calibration-skip", type=int, default=25, help="first prompts of each set, left out")
    parser.add_argument("--calibration-tokens", type=int, default=64)
    parser.add_argument("--keep", type=Path, help="directory that keeps the rounds judged, for another run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    main()
