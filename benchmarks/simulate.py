"""How close a simulation of the published deployment comes to its figures.

    python benchmarks/simulate.py --json

`simulated_shape_error`: the planner on costs that follow from the throughputs of plain decoding and of full
verification. The worse of two: the largest relative error of adaptive throughput's ratios between neighbouring
concurrencies, and the largest share by which it stays below the better of the other two.
"""

from __future__ import annotations

import argparse
import json

from dspark.evaluation.config import SimulateOptions
from dspark.evaluation.simulate import simulated_shape_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures = {"simulated_shape_error": round(simulated_shape_error(SimulateOptions(seed=args.seed)), 4)}
    print(json.dumps(figures) if args.json else f"simulated_shape_error {figures['simulated_shape_error']}")


if __name__ == "__main__":
    main()
