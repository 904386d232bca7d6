"""Time to the first token of a prompt whose beginning is in the prefix cache, against the same prompt cold.

    python benchmarks/first_token.py --json

Cold and cached prompts take turns; each cold one begins as no prompt before it did. Medians, batch 1.
"""

from __future__ import annotations

import argparse
import random
from statistics import median

from common import models_of, parser_of, tell

from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.pair import open_engine
from dspark.engine.request import SamplingParams

PREFIX_TOKENS = 500
QUESTION_TOKENS = 20  # what follows the shared beginning


def prefix_hit_ttft_ratio(engine: Engine, repeats: int = 5) -> dict[str, float]:
    """First-token seconds with a cached beginning ÷ cold, and both; the engine must have its prefix cache on."""
    rng = random.Random(0)
    vocab = engine.target.config.vocab_size
    seconds: dict[str, list[float]] = {"cold": [], "cached": []}
    for _ in range(repeats + 1):
        prefix = [rng.randrange(vocab) for _ in range(PREFIX_TOKENS)]
        for name in seconds:
            prompt = prefix + [rng.randrange(vocab) for _ in range(QUESTION_TOKENS)]
            (done,) = engine.generate([prompt], SamplingParams(max_tokens=1))
            assert (done.figures.cached_tokens > 0) == (name == "cached"), "the prefix cache must be on"
            assert done.figures.first_token_seconds is not None
            seconds[name].append(done.figures.first_token_seconds)
    cold, cached = (median(times[1:]) for times in seconds.values())  # the first ones warm the machine up
    return {"prefix_hit_ttft_ratio": cached / cold, "ttft_cold_seconds": cold, "ttft_cached_seconds": cached}


def main() -> None:
    args = arguments()
    result = prefix_hit_ttft_ratio(
        open_engine(models_of(args), EngineSettings(max_batch=1, max_length=1024)), args.repeats
    )
    tell(result, args.json)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
