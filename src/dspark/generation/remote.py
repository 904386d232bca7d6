"""Answers to prompts from OpenAI-compatible servers: the rows of local regeneration, without a target loaded here."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dspark.config import secret
from dspark.data.sources import Prompt
from dspark.errors import DsparkError
from dspark.generation.answering import Answering, Answers, RegenerationReport, open_answers
from dspark.generation.client import Answer, Client, Refused, Unavailable, backoff, retry, together
from dspark.generation.config import RegenerateSettings
from dspark.generation.probe import agreed_model, probe, request_body


def regenerate(settings: RegenerateSettings) -> RegenerationReport:
    """Append to `settings.out` the rows of `dspark.generation.regenerate`, answered by `settings.endpoints`.

    A request that fails in passing is repeated, on whichever endpoint is free; a prompt that has no answer after
    `remote.max_attempts` goes into the `.errors.jsonl` file beside `out` and is tried again by the next run. Rows are
    on disk as soon as they are whole: a run that is killed and started again loses none and writes none twice.

    Raises `ConfigError` for endpoints that do not answer at the start, serve different models, or refuse a setting,
    and `DsparkError` when `remote.max_failures` prompts in a row had no answer.
    """
    return asyncio.run(_regenerate(settings))


async def _regenerate(settings: RegenerateSettings) -> RegenerationReport:
    async with AsyncExitStack() as stack:
        key = secret("remote.api_key_env", settings.remote.api_key_env)
        clients = [Client(url, settings.remote, key) for url in settings.endpoints]
        for client in clients:
            await stack.enter_async_context(client)
        model = await agreed_model(clients, settings.remote)
        await together(probe(client, model, settings) for client in clients)
        with open_answers(settings, model) as answers:
            await _Run(settings, model, answers).through(clients)
            return answers.report()


@dataclass(eq=False)
class _Slot:
    """Room for one request to a server, and how many have failed there in a row."""

    client: Client
    num_failures: int = 0


@dataclass
class _Run:
    """Conversations under way: each takes a free slot for each request, and waits outside the slots."""

    settings: RegenerateSettings
    model: str
    answers: Answers
    free: list[_Slot] = field(default_factory=list)  # the one that became free first stands first
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    failures_in_a_row: int = 0
    num_clients: int = 0

    async def through(self, clients: list[Client]) -> None:
        """Answer every prompt that is left."""
        self.num_clients = len(clients)
        concurrency = self.settings.remote.concurrency
        for _ in range(concurrency):
            for client in clients:
                self.free.append(_Slot(client))
        prompts = iter(self.answers.left)
        await together(self._work(prompts) for _ in range(concurrency * len(clients)))

    async def _work(self, prompts: Iterator[Prompt]) -> None:
        for prompt in prompts:
            await self._converse(Answering(prompt, self.settings))

    async def _converse(self, task: Answering) -> None:
        """Ask for one answer after the other, and write the row or give the prompt up."""
        try:
            over = False
            while not over:
                body = request_body(self.settings, self.model, (*task.messages, task.turn), task.temperature, task.seed)
                answer = await retry(self.settings.remote, partial(self._ask, body, set()))
                over = task.add(answer.message, answer.num_tokens, answer.finished)
        except Refused as error:
            if not task.num_answers:
                self._give_up(task, error)
                return
        except Unavailable as error:  # what it has of answers is not kept: the next run begins it again
            self._give_up(task, error)
            return
        self.answers.write(task)

    async def _ask(self, body: dict[str, Any], failed: set[Client]) -> Answer:
        """One try, at another server than those of `failed`, to which a server that fails is added."""
        async with self._slot(failed) as client:
            try:
                answer = await client.complete(body)
            except Unavailable:
                failed.add(client)
                raise
        self.failures_in_a_row = 0
        return answer

    async def _free_slot(self, failed: set[Client]) -> _Slot:
        """A free slot of a server that is not in `failed`: a dead server must not use up a prompt's attempts."""
        if len(failed) == self.num_clients:  # all of them: begin again
            failed.clear()
        while (slot := next((s for s in self.free if s.client not in failed), None)) is None:
            self.freed.clear()
            await self.freed.wait()
        self.free.remove(slot)
        return slot

    def _release(self, slot: _Slot) -> None:
        self.free.append(slot)
        self.freed.set()

    @asynccontextmanager
    async def _slot(self, failed: set[Client]) -> AsyncIterator[Client]:
        """A free slot's server; a slot where a request failed rests before it is free again."""
        slot = await self._free_slot(failed)
        try:
            yield slot.client
        except Unavailable as error:
            slot.num_failures += 1
            rest = backoff(self.settings.remote, slot.num_failures, error.retry_after)
            asyncio.get_running_loop().call_later(rest, self._release, slot)
            raise
        except BaseException:
            self._release(slot)
            raise
        slot.num_failures = 0
        self._release(slot)

    def _give_up(self, task: Answering, error: DsparkError) -> None:
        if self.failures_in_a_row >= self.settings.remote.max_failures:
            return  # the run is ending: what was under way is left to the next one
        self.answers.give_up(task, error)
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self.settings.remote.max_failures:
            raise DsparkError(
                f"{self.failures_in_a_row} prompts in a row had no answer (the last: {error}): mend the endpoints and "
                "run again to go on"
            )
