"""Rows with known acceptance, made without models."""

import math
import random
from collections.abc import Sequence

from dspark.engine.request import RoundRecord
from dspark.evaluation.results import Run
from dspark.evaluation.rows import Row, Seconds, Setting

GREEDY, SAMPLED = Setting(0.0), Setting(1.0)
STAMP = {"target_digest": "t", "chat_template_digest": "c", "tokens": 64, "seed": 0}
CATEGORIES = {"gsm8k": "math", "math500": "math", "mbpp": "code", "mt-bench": "chat"}


def made_row(
    rng: random.Random, task: str, number: int, setting: Setting, chances: Sequence[float], drafted: bool = True
) -> Row:
    """64 tokens; draft i is accepted with chance `chances[i]`, shifted a little for the prompt as a whole."""
    easy = rng.uniform(-0.1, 0.1)
    rounds, position = [], 40 + 30 * number
    tokens = 0
    while drafted and tokens < 63:
        width = min(len(chances), 63 - tokens - 1)
        correct = next((i for i in range(width) if rng.random() >= chances[i] + easy), width)
        output = min(correct + 1, 63 - tokens)
        logits = tuple(1.5 * math.log(c / (1 - c)) + rng.uniform(-1, 1) for c in chances)  # too sure of itself
        rounds.append(RoundRecord(position, width + 1, len(chances), correct, output, logits))
        position, tokens = position + output, tokens + output
    seconds = 0.03 * len(rounds) if drafted else 0.02 * 63
    seconds *= rng.uniform(0.95, 1.05)
    key = f"{task}:{number}"
    return Row(
        id=f"{key}/t{setting.temperature:g}/{'drafted' if drafted else 'plain'}",
        task=task,
        category=CATEGORIES[task],
        prompt=key,
        setting=setting,
        drafted=drafted,
        prompt_script="latin" if number % 5 else "cyrillic",
        answer_script="latin",
        prompt_tokens=40,
        tokens=64,
        decoded=63,
        seconds=Seconds(0.05, seconds),
        texts=(key,),
        finish=("length",),
        rounds=tuple(rounds),
    )


def made_run(
    name: str, chances: Sequence[float], seed: int = 0, prompts: int = 20, plain: bool = True, lift: float = 0.0
) -> Run:
    """`prompts` prompts of four tasks, greedy and sampled; `lift` is added to the chances of math."""
    rng, rows = random.Random(seed), []
    for task, category in CATEGORIES.items():
        here = [chance + (lift if category == "math" else 0.0) for chance in chances]
        for setting in (GREEDY, SAMPLED):
            for number in range(prompts):
                rows.append(made_row(rng, task, number, setting, here))
                if plain:
                    rows.append(made_row(rng, task, number, setting, (), drafted=False))
    return Run(name, rows, STAMP, {"target": "t", "drafter": name, "batch": 8})
