import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.data.sources import normalise
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.errors import ConfigError, DataError, RequestError
from dspark.generation.config import SynthesizeSettings
from dspark.generation.synthesize import Rejection, synthesize
from dspark.models.target import Target

MakeEngine = Callable[[], Engine]


def settings(path: Path, **changes: Any) -> SynthesizeSettings:
    seeds = [
        {"source": "chat", "count": 6, "max_tokens": 16},
        {"source": "code", "count": 3, "max_tokens": 16, "system": "abc", "prefixes": ["bad ", "cab "]},
    ]
    base = {"out": path / "prompts.jsonl", "seeds": seeds, "seed": 1, "min_words": 2, "max_attempts": 99}
    return SynthesizeSettings.from_dict(base | changes, "test")


@pytest.fixture(scope="session")
def finished(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted run."""
    path = tmp_path_factory.mktemp("finished")
    synthesize(Engine(target, None, EngineSettings(max_batch=8, max_length=96)), settings(path))
    return path


@pytest.fixture
def continued(finished: Path, tmp_path: Path) -> Path:
    """A copy of that directory, to go on in."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_of_each_kind(make_engine: MakeEngine, tmp_path: Path, finished: Path) -> None:
    engine = make_engine()
    report = synthesize(engine, settings(tmp_path))
    found = rows(tmp_path / "prompts.jsonl")
    assert report.total == report.written == len(found) == 9
    assert [row["source"] for row in found] == ["chat"] * 6 + ["code"] * 3
    texts = [turn for row in found for turn in row["turns"]]
    assert len({normalise(text) for text in texts}) == 9
    assert all(len(text.split()) >= 2 and text == text.strip() and "<|" not in text for text in texts)
    for row in found[6:]:
        attempt = int(row["id"].removeprefix("code:"))
        assert row["turns"][0].startswith(("bad ", "cab ")[attempt % 2].strip())
    assert report.rejected[Rejection.SHORT] > 0
    assert (tmp_path / "prompts.jsonl").read_bytes() == (finished / "prompts.jsonl").read_bytes()
    assert not engine.has_work()
    engine.check_integrity()


def test_excluded_texts_are_not_repeated(make_engine: MakeEngine, finished: Path, tmp_path: Path) -> None:
    first = finished / "prompts.jsonl"
    report = synthesize(make_engine(), settings(tmp_path, exclude=[first]))
    assert report.rejected[Rejection.EXCLUDED] >= 9
    assert {row["turns"][0] for row in rows(tmp_path / "prompts.jsonl")}.isdisjoint(
        row["turns"][0] for row in rows(first)
    )


@pytest.mark.parametrize("cut", [1, 300])
def test_a_cut_run_continues_to_the_same_file(make_engine: MakeEngine, continued: Path, cut: int) -> None:
    file = continued / "prompts.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    left = whole[:-cut].count(b"\n")
    report = synthesize(make_engine(), settings(continued))
    assert file.read_bytes() == whole
    assert report.written == 9 - left
    assert synthesize(make_engine(), settings(continued)).written == 0


def test_counts_may_grow(make_engine: MakeEngine, continued: Path) -> None:
    synthesize(make_engine(), settings(continued, seeds=[{"source": "chat", "count": 8, "max_tokens": 16}]))
    assert [row["source"] for row in rows(continued / "prompts.jsonl")].count("chat") == 8


def test_other_settings_are_refused(make_engine: MakeEngine, continued: Path) -> None:
    with pytest.raises(ConfigError, match=r"seed: .*prompts\.jsonl was begun with other values"):
        synthesize(make_engine(), settings(continued, seed=2))
    (continued / "prompts.settings.json").unlink()
    with pytest.raises(DataError, match="no earlier run wrote it"):
        synthesize(make_engine(), settings(continued))


def test_a_hopeless_kind_is_given_up(make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seeds = [{"source": "chat", "count": 4, "max_tokens": 1}]
    report = synthesize(make_engine(), settings(tmp_path, seeds=seeds, max_attempts=3))
    assert report.total == 0
    assert report.rejected.total() == 12
    assert "gave up after 12 attempts with 0 of 4" in caplog.text


def test_a_header_too_long_is_an_error(make_engine: MakeEngine, tmp_path: Path) -> None:
    seeds = [{"source": "chat", "count": 4, "system": "a" * 200}]
    with pytest.raises(RequestError, match="prompt"):
        synthesize(make_engine(), settings(tmp_path, seeds=seeds))


def test_sources_are_unique(tmp_path: Path) -> None:
    seeds = [{"source": "chat", "count": 4}, {"source": "chat", "count": 5}]
    with pytest.raises(ConfigError, match="'chat' is used twice"):
        settings(tmp_path, seeds=seeds)
