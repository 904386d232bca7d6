"""Running loads: each mode under each load, a row when it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dspark.config import secret
from dspark.data.journal import Journal
from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.load.client import Client, Failed
from dspark.evaluation.load.config import Load, LoadOptions, Mode
from dspark.evaluation.load.rows import Asked, LoadRow
from dspark.evaluation.load.schedule import Planned, body, plan
from dspark.evaluation.tasks import Task, load_tasks
from dspark.log import get_logger, progress

ROWS = "rows.jsonl"
_PROBE_TOKENS = 4

_log = get_logger(__name__)


class Place(NamedTuple):
    """A mode, and the server that is asked."""

    mode: Mode
    series: str
    client: Client
    model: str


def measure(options: LoadOptions) -> list[LoadRow]:
    """Every mode under every load that the directory has no row of yet; all rows found there, in order.

    Raises ConfigError for a server that does not answer or refuses a field, and DsparkError where a whole load failed.
    """
    tasks = load_tasks(options.ask.tasks, options.ask.data, options.ask.prompts)
    stamp = {"ask": options.ask.model_dump(mode="json", exclude={"data"}), "requests": options.requests}
    with Journal(options.out / ROWS, stamp) as journal:
        rows = [LoadRow.from_dict(row, f"{options.out / ROWS}") for row in journal.rows]
        return rows + asyncio.run(_measure(options, tasks, journal))


async def _measure(options: LoadOptions, tasks: Sequence[Task], journal: Journal) -> list[LoadRow]:
    rows = []
    async with AsyncExitStack() as stack:
        places = []
        for text in options.modes:
            mode = Mode.parse(text)
            series = " ".join(filter(None, (options.label, mode.name)))
            if all(f"{series}/{load.name}" in journal.ids for load in options.loads):
                continue
            key = secret("api_key_env", options.api_key_env)
            client = await stack.enter_async_context(Client(mode.url or options.url, key, options.timeout))
            place = Place(mode, series, client, options.model or await client.model())
            await _probe(place, options, tasks)
            places.append(place)
        # Modes take turns under each load, so that a machine that slows down slows all of them.
        for load in options.loads:
            for place in places:
                if f"{place.series}/{load.name}" not in journal.ids:
                    row = await run_load(place, load, tasks, options)
                    journal.append(row.as_dict())
                    rows.append(row)
    return rows


async def _probe(place: Place, options: LoadOptions, tasks: Sequence[Task]) -> None:
    """Ask for a few tokens: what the server refuses is said before anything is measured, and its first time is past."""
    request = plan(tasks, options.ask, Load(1, None), 1)[0]._replace(max_tokens=_PROBE_TOKENS)
    try:
        await place.client.answer(body(request, options.ask, place.mode, place.model))
    except Failed as error:
        raise ConfigError(f"modes: {place.series}: {error}") from None


async def run_load(place: Place, load: Load, tasks: Sequence[Task], options: LoadOptions) -> LoadRow:
    """One mode under one load. Raises DsparkError where no request was answered."""
    planned = plan(tasks, options.ask, load, load.num_requests(options.requests))
    before = await place.client.counters()
    with progress(len(planned), f"{place.series}, {load.name}", "request") as bar:
        run = _Run(place, options, bar)
        await (run.closed(planned, load.concurrency) if load.concurrency else run.open(planned))
    after = await place.client.counters()
    requests = tuple(sorted(run.asked, key=lambda asked: asked.index))
    failures = [asked.error for asked in run.asked if asked.error is not None]
    if len(failures) == len(planned):
        raise DsparkError(f"{place.series}, {load.name}: no request was answered: {failures[0]}")
    if failures:
        _log.warning("%s, %s: %d requests failed (first: %s)", place.series, load.name, len(failures), failures[0])
    counters = None if before is None or after is None else {key: after[key] - before[key] for key in after}
    return LoadRow(place.series, load.name, *load, place.client.url, place.model, requests, counters)


@dataclass
class _Run:
    """Requests under way."""

    place: Place
    options: LoadOptions
    bar: Any
    asked: list[Asked] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)

    async def closed(self, planned: Sequence[Planned], concurrency: int) -> None:
        """So many at a time."""
        left = iter(planned)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(planned))):
                group.create_task(self._one_by_one(left))

    async def open(self, planned: Sequence[Planned]) -> None:
        """Each when it is due."""
        async with asyncio.TaskGroup() as group:
            for request in planned:
                await asyncio.sleep(self.begun + request.arrival - time.perf_counter())
                group.create_task(self._ask(request, request.arrival))

    async def _one_by_one(self, left: Iterator[Planned]) -> None:
        for request in left:
            await self._ask(request, time.perf_counter() - self.begun)

    async def _ask(self, request: Planned, arrived: float) -> None:
        sent = time.perf_counter()
        name = request.prompt.id
        try:
            reply = await self.place.client.answer(body(request, self.options.ask, self.place.mode, self.place.model))
            self.asked.append(Asked.of(request.number, name, arrived, reply, self.begun))
        except Failed as error:
            ended = time.perf_counter() - self.begun
            failed = Asked(
                request.number, name, arrived, sent - self.begun, ended, error=str(error), refused=error.refused
            )
            self.asked.append(failed)
        self.bar.update(1)
