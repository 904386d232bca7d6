import logging
from collections.abc import Iterator

import pytest

from dspark.log import configure_logging, get_logger, progress


@pytest.fixture
def dspark_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("dspark")
    before = (logger.handlers, logger.level, logger.propagate)
    yield logger
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


def test_log_lines_go_to_stderr_once(dspark_logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    configure_logging()
    get_logger("dspark.engine.round").info("hello")
    get_logger("dspark.engine.round").debug("hidden")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "INFO dspark.engine.round: hello\n"


def test_progress_is_quiet_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1000, "rows", unit="row", initial=200) as bar:
        for _ in range(800):
            bar.update(1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "rows: 100%" in err
    assert "1000/1000" in err
    assert err.count("\r") <= 3
