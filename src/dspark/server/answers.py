"""The outputs of one HTTP request as they come from the engine's thread."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark.engine.engine import StepOutput
from dspark.engine.request import Completion, SamplingParams
from dspark.errors import DsparkError


class EngineGone(DsparkError):
    """The engine failed or was stopped: no request can go on."""


@dataclass(frozen=True)
class Job:
    """Prompts answered alike; answer i of prompt p is choice p * params.n + i."""

    name: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    priority: int = 0
    streams: bool = False  # whether outputs are wanted as they come, not only the finished answers

    @property
    def engine_names(self) -> list[str]:
        """The engine's request id of each prompt."""
        return [f"{self.name}/{i}" for i in range(len(self.prompts))]

    def choice(self, output: StepOutput) -> int:
        """The number of the choice that an output belongs to."""
        return int(output.request_id.rpartition("/")[2]) * self.params.n + output.index


@dataclass(eq=False)
class Answers:
    """The answers to a job. All of it runs on the event loop.

    `async for outputs in answers` yields what has come since the last time, until every answer is finished. Raises
    EngineGone when the engine failed or the request was dropped for good (`fail`).
    """

    job: Job
    completions: dict[int, Completion] = field(default_factory=dict)  # by choice
    num_tokens: int = 0  # put out so far, over all answers
    error: DsparkError | None = None
    _outputs: list[StepOutput] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_answers(self) -> int:
        """Answers asked for."""
        return len(self.job.prompts) * self.job.params.n

    @property
    def finished(self) -> bool:
        """Whether every answer came."""
        return len(self.completions) == self.num_answers

    def put(self, output: StepOutput) -> None:
        """Take an output of the engine."""
        self.num_tokens += len(output.token_ids)
        if output.completion is not None:
            self.completions[self.job.choice(output)] = output.completion
        if self.job.streams:
            self._outputs.append(output)
        if self.job.streams or self.finished:
            self._arrived.set()

    def fail(self, error: DsparkError) -> None:
        """There will be no more."""
        self.error = error
        self._arrived.set()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> list[StepOutput]:
        if not self._outputs and self.error is None and self.finished:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        if self.error is not None:
            raise self.error
        outputs, self._outputs = self._outputs, []
        return outputs

    async def all(self) -> list[Completion]:
        """Every answer, by choice."""
        async for _ in self:
            pass
        return [self.completions[choice] for choice in range(self.num_answers)]


def new_name(kind: str) -> str:
    """A name for a job: `kind-…`."""
    return f"{kind}-{secrets.token_hex(12)}"
