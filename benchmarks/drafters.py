"""Three drafters trained alike (recipes/compare): how much further DSpark gets than DFlash and EAGLE-3.

    python benchmarks/drafters.py --json
    python benchmarks/drafters.py --measure runs/compare --prompts 40 --tokens 96

The first form reads `recipes/compare/results.json`. The second one, after `dspark train` on each of the three recipes,
measures `runs/compare/NAME/last` for each and writes that file: accepted length (tau, the bonus counted) at temperature
1 through the engine, by set and position, and what was trained on what.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from accepted_length import summary
from common import HERE, open_pair, read_prompts

from dspark.config import read_toml
from dspark.engine.request import SamplingParams
from dspark.files import atomic_path
from dspark.log import progress
from dspark.training.config import TrainSettings

RECIPES = HERE.parent / "recipes" / "compare"
RESULTS = RECIPES / "results.json"
NAMES = ("dspark", "dflash", "eagle3")
SETS = ("gsm8k", "mbpp", "mt-bench")
TEMPERATURE = 1.0


def main() -> None:
    args = arguments()
    if args.measure:
        if args.threads:
            torch.set_num_threads(args.threads)
        results = {"settings": settings_of(args), "drafters": {name: measure(name, args) for name in args.only}}
        if args.results.is_file():  # one drafter after another, as their trainings end
            before = json.loads(args.results.read_text(encoding="utf-8"))
            if before["settings"] == results["settings"]:
                results["drafters"] = before["drafters"] | results["drafters"]
        with atomic_path(args.results) as path:
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    figures = ratios(json.loads(args.results.read_text(encoding="utf-8")))
    print(json.dumps(figures) if args.json else "\n".join(f"{key:24} {value}" for key, value in figures.items()))


def ratios(results: dict[str, Any]) -> dict[str, object]:
    """The means over the sets and their ratios. Raises SystemExit where the three were not trained alike."""
    drafters = results["drafters"]
    if missing := [name for name in NAMES if name not in drafters]:
        raise SystemExit(f"{', '.join(missing)}: not measured yet: see --help")
    for field in ("steps", "anchors", "batch_size", "samples", "data"):
        values = {name: drafters[name][field] for name in NAMES}
        if len({json.dumps(value) for value in values.values()}) > 1:
            raise SystemExit(f"the three were not trained alike: {field} is {values}")
    tau = {name: sum(row["tau"] for row in drafters[name]["sets"]) / len(SETS) for name in NAMES}
    return {
        "dspark_over_dflash": round(tau["dspark"] / tau["dflash"], 3),
        "dspark_over_eagle3": round(tau["dspark"] / tau["eagle3"], 3),
        **{f"tau_{name}": round(value, 3) for name, value in tau.items()},
        **{f"parameters_{name}": drafters[name]["parameters"] for name in NAMES},
    }


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Accepted length of one drafter by set, and what its training was."""
    out = args.measure / name
    session = open_pair("smollm2-135m", str(out / "last"), args.dtype, max_batch=args.batch)
    file = RECIPES / f"train-{name}.toml"
    recipe = TrainSettings.from_dict(read_toml(file), str(file))
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = []
    with progress(len(SETS), name, "set") as bar:
        for task, texts in read_prompts(args.data, SETS, args.prompts).items():
            ids = [session.prompt_ids([{"role": "user", "content": text}]) for text in texts]
            params = [SamplingParams(max_tokens=args.tokens, temperature=TEMPERATURE, seed=i) for i in range(len(ids))]
            rows.append({"set": task} | summary(session.engine.generate(ids, params)))
            bar.update(1)
    drafter = session.engine.drafter
    assert drafter is not None
    return {
        "recipe": f"recipes/compare/{file.name}",
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "steps": steps[-1]["step"],
        "anchors": recipe.num_anchors,
        "batch_size": recipe.batch_size,
        **manifest_of(args.cache),
        "sets": rows,
    }


def manifest_of(cache: Path) -> dict[str, Any]:
    """What identifies the training data: the number of samples and the target they are of."""
    manifest = json.loads((cache / "manifest.json").read_text(encoding="utf-8"))
    return {"samples": manifest["num_samples"], "data": manifest["target_revision"]}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """How the drafters are measured."""
    fields = ("prompts", "tokens", "dtype")
    return {"target": "smollm2-135m", "temperature": TEMPERATURE, **{name: getattr(args, name) for name in fields}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--measure", type=Path, metavar="RUNS", help="directory with the three runs' output directories"
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="measure these, keep the others")
    parser.add_argument("--cache", type=Path, default=Path("runs/smollm2-135m/features"), help="what they trained on")
    parser.add_argument("--data", type=Path, help="directory with SET.jsonl files")
    parser.add_argument("--prompts", type=int, default=40, help="per set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", default="float32", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--threads", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    main()
