"""The engine in a thread of its own, and the way between it and the event loop.

Commands go to the thread through a queue that it empties between two steps; what a step put out comes back to the loop
in one call. Everything that the loop reads of the engine in between is a snapshot.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from dspark.engine.engine import Engine, StepOutput
from dspark.engine.stats import EngineLoad
from dspark.errors import DsparkError
from dspark.log import get_logger
from dspark.server.answers import Answers, EngineGone, Job

_log = get_logger(__name__)

OnStep = Callable[[list[StepOutput], EngineLoad], None]


class EngineThread:
    """Serves jobs on one engine. Its methods are called on the event loop."""

    def __init__(self, engine: Engine, on_step: OnStep | None = None) -> None:
        self.engine = engine
        self.load = engine.load
        self.failure: BaseException | None = None
        self._on_step = on_step
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._live: dict[str, Answers] = {}  # by the engine's request id
        self._begun: dict[Answers, asyncio.Future[None]] = {}  # those that the engine has not taken yet
        self._stopping = False  # set and read on the thread
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_live(self) -> int:
        """Prompts under way."""
        return len(self._live)

    async def submit(self, job: Job) -> Answers:
        """Queue a job: all of its prompts, or none.

        Raises RequestError and OverloadError as the engine does, and EngineGone.
        """
        self._check_alive()
        answers = Answers(job)
        taken: asyncio.Future[None] = self._loop.create_future()
        self._begun[answers] = taken
        self._live |= dict.fromkeys(job.engine_names, answers)
        self._commands.put(partial(self._submit, job, taken))
        try:
            await taken
        except BaseException:
            self.drop(answers)
            raise
        finally:
            del self._begun[answers]
        return answers

    def drop(self, answers: Answers) -> None:
        """Abort what is still under way of a job; at the latest after the step that runs now."""
        for name in answers.job.engine_names:
            if self._live.pop(name, None) is not None:
                self._commands.put(partial(self.engine.abort, name))

    def fail_all(self, error: DsparkError) -> None:
        """End all jobs with an error, and abort them."""
        for answers in set(self._live.values()):
            answers.fail(error)
            self.drop(answers)
        for taken in self._begun.values():
            if not taken.done():
                taken.set_exception(error)

    async def stop(self) -> None:
        """End the thread after the step that runs now."""
        self.fail_all(EngineGone("the server is shutting down"))
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineGone("the engine failed: restart the server; its log says why")

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                if self.engine.has_work() and not self._stopping:
                    outputs = self.engine.step()
                    self._tell(self._deliver, outputs, self.engine.load)
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread ends the server, and clients are told
            _log.critical("the engine failed", exc_info=True)
            self._tell(self._fail, error)

    def _obey(self) -> None:
        """Carry out the commands that came; wait for one when there is nothing else to do."""
        if not self.engine.has_work():
            self._tell(self._idle, self.engine.load)
            self._commands.get()()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            command()

    def _submit(self, job: Job, taken: asyncio.Future[None]) -> None:
        begun: list[str] = []
        try:
            for name, prompt in zip(job.engine_names, job.prompts, strict=True):
                begun.append(self.engine.submit(prompt, job.params, name, job.priority))
        except Exception as error:  # noqa: BLE001 - what a request brings about is its own affair: the others go on
            if not isinstance(error, DsparkError):
                _log.error("a request broke the engine's submit", exc_info=True)
            for name in begun:
                self.engine.abort(name)
            self._tell(_settle, taken, error)
        else:
            self._tell(_settle, taken, None)

    def _stop(self) -> None:
        self._stopping = True

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the loop make a call; nothing happens once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    # And this on the loop again.

    def _idle(self, load: EngineLoad) -> None:
        self.load = load

    def _deliver(self, outputs: list[StepOutput], load: EngineLoad) -> None:
        self.load = load
        for output in outputs:
            answers = self._live.get(output.request_id)
            if answers is None:
                continue
            answers.put(output)
            if answers.finished:
                for name in answers.job.engine_names:
                    del self._live[name]
        if self._on_step is not None:
            self._on_step(outputs, load)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.fail_all(EngineGone("the engine failed: restart the server; its log says why"))


def _settle(taken: asyncio.Future[None], error: Exception | None) -> None:
    """Answer a future that may have been cancelled."""
    if taken.done():
        return
    if error is None:
        taken.set_result(None)
    else:
        taken.set_exception(error)
