"""Prompts written by the target: it sees the opening of a user turn and goes on as the user would."""

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from dspark.data.chat import ChatTemplate, UserHeader
from dspark.data.journal import Journal
from dspark.data.sources import Exclusions, normalise
from dspark.draws import draw_integer
from dspark.engine.engine import Engine
from dspark.engine.request import Completion, SamplingParams
from dspark.engine.stream import run_tasks
from dspark.errors import DsparkError
from dspark.generation.config import PromptSeed, SynthesizeSettings
from dspark.log import get_logger, progress

_log = get_logger(__name__)


class Rejection(StrEnum):
    """Why a prompt is not kept."""

    UNFINISHED = "did not end within max_tokens"
    EMPTY = "empty"
    SHORT = "shorter than min_words"
    BROKEN = "holds bytes that are no character"
    DUPLICATE = "written before"
    EXCLUDED = "repeats an excluded text"


@dataclass(frozen=True)
class SynthesisReport:
    """What a run did: prompts in the file at its end, those of this run, and why others were dropped."""

    total: int
    written: int
    rejected: Counter[Rejection]


def synthesize(engine: Engine, settings: SynthesizeSettings) -> SynthesisReport:
    """Append prompts {"id", "source", "turns"} to `settings.out` until each kind has its count.

    Attempt `i` of a kind depends on the settings and `i` alone, and attempts are judged in order: a run that was killed
    and started again writes what the uninterrupted one would have. Raises `ConfigError`, `DataError`, `RequestError`.
    """
    screen = _Screen(settings)
    with Journal(settings.out, _stamp(engine, settings)) as journal:
        for row in journal.rows:
            screen.remember(row["turns"][0])
        already = len(journal.ids)
        for seed in settings.seeds:
            _fill(engine, settings, seed, journal, screen)
        report = SynthesisReport(len(journal.ids), len(journal.ids) - already, screen.rejected)
    rejected = "; ".join(f"{number} {reason}" for reason, number in report.rejected.items())
    _log.info("%s: %d prompts, %d of them new; dropped: %s", settings.out, report.total, report.written, rejected or 0)
    return report


def _stamp(engine: Engine, settings: SynthesizeSettings) -> dict[str, object]:
    """What decides the content of the rows; counts may grow and kinds may be added."""
    seeds = {f"seeds.{seed.source}": seed.model_dump(mode="json", exclude={"count"}) for seed in settings.seeds}
    return {"target": engine.target.digest, "seed": settings.seed, "min_words": settings.min_words, **seeds}


class _Screen:
    """Decides which prompts are kept."""

    def __init__(self, settings: SynthesizeSettings) -> None:
        self._min_words = settings.min_words
        self._excluded = Exclusions.read(settings.exclude)
        self._seen: set[str] = set()
        self.rejected: Counter[Rejection] = Counter()

    def remember(self, text: str) -> None:
        """Keep the text from being written again."""
        self._seen.add(normalise(text))

    def passes(self, text: str, finished: bool) -> bool:
        """Whether a new prompt is kept; counts the reason otherwise."""
        rejection = self._judge(text, finished)
        if rejection is None:
            self.remember(text)
            return True
        self.rejected[rejection] += 1
        return False

    def _judge(self, text: str, finished: bool) -> Rejection | None:
        if not finished:
            return Rejection.UNFINISHED
        if not text:
            return Rejection.EMPTY
        if len(text.split()) < self._min_words:
            return Rejection.SHORT
        if "\ufffd" in text:
            return Rejection.BROKEN
        if normalise(text) in self._seen:
            return Rejection.DUPLICATE
        return Rejection.EXCLUDED if text in self._excluded else None


@dataclass
class _Attempt:
    """One prompt being written."""

    index: int
    prefix: str
    prompt_ids: list[int]
    params: SamplingParams
    completion: Completion | None = None

    def request(self) -> tuple[list[int], SamplingParams]:
        return self.prompt_ids, self.params

    def take(self, completion: Completion) -> bool:
        self.completion = completion
        return True

    def refuse(self, error: DsparkError) -> None:
        raise error

    @property
    def text(self) -> str:
        """The user turn, the given words included."""
        assert self.completion is not None
        return (self.prefix + self.completion.text).strip()

    @property
    def finished(self) -> bool:
        """Whether the target ended the turn itself."""
        assert self.completion is not None
        return self.completion.finish_reason == "stop"


def _fill(engine: Engine, settings: SynthesizeSettings, seed: PromptSeed, journal: Journal, screen: _Screen) -> None:
    """Write prompts of one kind until the file holds `seed.count` of them."""
    done = [int(row["id"].rpartition(":")[2]) for row in journal.rows if row["source"] == seed.source]
    kept, first, last = len(done), max(done, default=-1) + 1, seed.count * settings.max_attempts
    if kept >= seed.count:
        return
    running = run_tasks(engine, _attempts(engine, settings, seed, first))
    with (
        progress(seed.count, seed.source, "prompt", initial=kept) as bar,
        closing(_in_order(running, first)) as finished,
    ):
        for attempt in finished:
            if screen.passes(attempt.text, attempt.finished):
                row = {"id": f"{seed.source}:{attempt.index}", "source": seed.source, "turns": [attempt.text]}
                journal.append(row)
                kept += 1
                bar.update(1)
            if kept == seed.count:
                return
            if attempt.index + 1 >= last:
                _log.warning("%s: gave up after %d attempts with %d of %d prompts", seed.source, last, kept, seed.count)
                return


def _attempts(engine: Engine, settings: SynthesizeSettings, seed: PromptSeed, first: int) -> Iterator[_Attempt]:
    """Attempts without end, from number `first`."""
    chat = ChatTemplate(engine.target.tokenizer)
    header = chat.user_header(seed.system)
    openings = [(prefix, chat.encode(header.text + prefix)) for prefix in seed.prefixes]
    for index in count(first):
        prefix, prompt_ids = openings[index % len(openings)]
        yield _Attempt(index, prefix, prompt_ids, _params(settings, seed, header, index))


def _params(settings: SynthesizeSettings, seed: PromptSeed, header: UserHeader, index: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=seed.max_tokens,
        temperature=seed.temperature,
        top_p=seed.top_p,
        seed=draw_integer(settings.seed, seed.source, index),
        stop_token_ids=() if header.stop_token_id is None else (header.stop_token_id,),
        stop=() if header.stop_text is None else (header.stop_text,),
    )


def _in_order(attempts: Generator[_Attempt, None, None], first: int) -> Generator[_Attempt, None, None]:
    """Yield attempts by their number, each as soon as those before it are there."""
    early: dict[int, _Attempt] = {}
    wanted = first
    with closing(attempts):
        for attempt in attempts:
            early[attempt.index] = attempt
            while wanted in early:
                yield early.pop(wanted)
                wanted += 1
