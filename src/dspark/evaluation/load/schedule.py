"""What is asked, and when: everything follows from the seed, so all modes get the same requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, zip_longest
from typing import Any, NamedTuple

from dspark.data.sources import Prompt
from dspark.draws import draw, draw_integer
from dspark.evaluation.load.config import Load, Mode, RequestOptions
from dspark.evaluation.tasks import Task


class Planned(NamedTuple):
    """A request of a load: its number, when it comes (seconds after the first), and what it asks."""

    number: int
    arrival: float
    prompt: Prompt
    max_tokens: int


def plan(tasks: Sequence[Task], options: RequestOptions, load: Load, count: int) -> list[Planned]:
    """The requests of one load; in a closed loop all arrive at once, and wait for a place."""
    prompts = islice(cycle(interleaved(tasks)), count)
    gaps = arrivals(load.arrivals, options.seed) if load.arrivals else iter([0.0] * count)
    least = options.min_tokens or options.max_tokens
    planned, time = [], 0.0
    for index, prompt in enumerate(prompts):
        length = least + int(draw(options.seed, "length", index) * (options.max_tokens - least + 1))
        planned.append(Planned(index, time, prompt, length))
        time += next(gaps)
    return planned


def interleaved(tasks: Sequence[Task]) -> list[Prompt]:
    """A prompt of each task in turn, so that few requests have the mix that many have."""
    rows = zip_longest(*(task.prompts for task in tasks))
    return [prompt for row in rows for prompt in row if prompt is not None]


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Gaps of a Poisson process: exponential."""
    rng = random.Random(f"arrivals {seed} {rate}")
    while True:
        yield rng.expovariate(rate)


def body(request: Planned, options: RequestOptions, mode: Mode, model: str) -> dict[str, Any]:
    """The chat-completions request."""
    turns = [] if request.prompt.system is None else [{"role": "system", "content": request.prompt.system}]
    content = sized(request.prompt.turns[0], options.prompt_words)
    asked: dict[str, Any] = {
        "model": model,
        "messages": [*turns, {"role": "user", "content": content}],
        "max_tokens": request.max_tokens,
        "temperature": options.temperature,
        "seed": draw_integer(options.seed, "answer", request.number) % 2**31,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        asked["ignore_eos"] = True
    if mode.speculative is not None:
        asked["speculative"] = mode.speculative
    return asked


def sized(text: str, num_words: int | None) -> str:
    """The text itself, or so many words of it, over and over."""
    return text if num_words is None else " ".join(islice(cycle(text.split() or [text]), num_words))
