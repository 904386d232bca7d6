"""Three drafters trained alike (recipes/compare): how much further DSpark gets than DFlash and EAGLE-3.

    python benchmarks/drafters.py --json

reads `recipes/compare/results.json`, which was made, for NAME in dspark, dflash and eagle3, by

    dspark train recipes/compare/train-NAME.toml
    dspark eval --drafter runs/compare/NAME/last --tasks gsm8k mbpp mt-bench --prompts 30 --tokens 96 --dtype float32 \
        --batch 16 --no-plain --temperatures 1 --out results/compare/NAME
    python benchmarks/drafters.py --collect results/compare --runs runs/compare

Accepted length (tau, the bonus counted) at temperature 1, the mean of the three sets; ratios by set have intervals in
docs/results.md (`dspark compare`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import HERE
from safetensors import safe_open

from dspark.config import read_toml
from dspark.evaluation.results import read_run
from dspark.evaluation.summary import summarise
from dspark.files import atomic_path, read_jsonl
from dspark.training.config import TrainSettings

RECIPES = HERE.parent / "recipes" / "compare"
RESULTS = RECIPES / "results.json"
NAMES = ("dspark", "dflash", "eagle3")
SETS = ("gsm8k", "mbpp", "mt-bench")
TEMPERATURE = 1.0
ALIKE = ("steps", "anchors", "batch_size", "samples", "data", "measured")


def main() -> None:
    args = arguments()
    if args.collect:
        results = {name: collect(name, args.collect / name, args.runs / name, args.cache) for name in NAMES}
        with atomic_path(args.results) as path:
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    figures = ratios(json.loads(args.results.read_text(encoding="utf-8")))
    print(json.dumps(figures) if args.json else "\n".join(f"{key:24} {value}" for key, value in figures.items()))


def ratios(results: dict[str, Any]) -> dict[str, object]:
    """The means over the sets and their ratios. Raises SystemExit where the three are not alike."""
    for field in ALIKE:
        values = {name: results[name][field] for name in NAMES}
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1:
            raise SystemExit(f"the three are not alike: {field} is {values}")
    tau = {name: sum(results[name]["tau"][task] for task in SETS) / len(SETS) for name in NAMES}
    return {
        "dspark_over_dflash": round(tau["dspark"] / tau["dflash"], 3),
        "dspark_over_eagle3": round(tau["dspark"] / tau["eagle3"], 3),
        **{f"tau_{name}": round(value, 3) for name, value in tau.items()},
        **{f"parameters_{name}": results[name]["parameters"] for name in NAMES},
    }


def collect(name: str, results: Path, run: Path, caches: list[Path]) -> dict[str, Any]:
    """What one drafter reached, by set, and what it was trained on."""
    recipe = RECIPES / f"train-{name}.toml"
    settings = TrainSettings.from_dict(read_toml(recipe), str(recipe))
    measured = read_run(results, name)
    (sampled,) = (found for found in summarise(measured.rows) if found.setting.temperature == TEMPERATURE)
    last_step = [row["step"] for _, row in read_jsonl(run / "metrics.jsonl")][-1]
    manifests = [json.loads((cache / "manifest.json").read_text(encoding="utf-8")) for cache in caches]
    (target,) = {manifest["target_revision"] for manifest in manifests}
    compared = ("target_digest", "tokens", "seed", "dtype")
    return {
        "recipe": f"recipes/compare/{recipe.name}",
        "parameters": num_parameters(run / "last" / "model.safetensors"),
        "steps": last_step,
        "anchors": settings.num_anchors,
        "batch_size": settings.batch_size,
        "samples": sum(manifest["num_samples"] for manifest in manifests),
        "data": target,
        "measured": {field: measured.stamp[field] for field in compared}
        | {"prompts": {task: sampled.tasks[task].prompts for task in SETS}},
        "tau": {task: round(sampled.tasks[task].tau.value or 0.0, 4) for task in SETS},
    }


def num_parameters(path: Path) -> int:
    """Trained parameters in a drafter's file: everything but its vocabulary map."""
    with safe_open(path, framework="pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys() if name not in ("d2t", "t2d")}  # noqa: SIM118
    total = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--collect", type=Path, metavar="RESULTS", help="directory of the three drafters' dspark eval")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"), help="directory of the three training runs")
    default = [Path("runs/smollm2-135m/features")]
    parser.add_argument("--cache", type=Path, nargs="+", default=default, help="what they trained on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
