"""Many requests through one engine, handed back as they finish."""

import time
from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

from dspark.engine.engine import Engine, StepOutput
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import DataError, DsparkError, RequestError


class Task(Protocol):
    """Something that takes one request or several, one after the other."""

    def request(self) -> tuple[list[int], SamplingParams]:
        """The next prompt and how to answer it."""

    def take(self, completion: Completion) -> bool:
        """Take the answer; say whether the task is done."""

    def refuse(self, error: DsparkError) -> None:
        """The next request cannot be made or served: the task is done. May raise the error instead."""


T = TypeVar("T", bound=Task)


# What a step took, in seconds, and what it put out, with the task of each output.
OnStep = Callable[[float, list[tuple[T, StepOutput]]], None]


def run_tasks(engine: Engine, tasks: Iterable[T], on_step: OnStep[T] | None = None) -> Generator[T, None, None]:
    """Yield each task when it is done, keeping the engine's batch full; a closed iterator aborts what is running.

    `on_step` is told of every step before its tasks go on.
    """
    waiting = iter(tasks)
    live: dict[str, T] = {}
    at_once = 2 * engine.settings.max_batch  # one batch decodes, one waits to fill its gaps
    try:
        while True:
            while len(live) < at_once and (task := next(waiting, None)) is not None:
                if not _start(engine, task, live):
                    yield task
            if not live:
                return
            started = time.perf_counter()
            outputs = engine.step()
            if on_step is not None:
                on_step(time.perf_counter() - started, [(live[output.request_id], output) for output in outputs])
            for output in outputs:
                if output.completion is None:
                    continue
                task = live.pop(output.request_id)
                if task.take(output.completion) or not _start(engine, task, live):
                    yield task
    finally:
        for request_id in live:
            engine.abort(request_id)


def _start(engine: Engine, task: T, live: dict[str, T]) -> bool:
    """Submit the task's next request; False when it was refused."""
    try:
        live[engine.submit(*task.request())] = task
    except (RequestError, DataError) as error:
        task.refuse(error)
        return False
    return True
