"""What a run says on stderr: plain lines in a file, one live line on a terminal, nothing from the other processes."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_training import Samples, make_trainer

from dspark.log import configure_logging, get_logger
from dspark.models.decoder import Decoder
from dspark.training import live
from dspark.training.live import RunLine
from dspark.training.parallel import Ranks

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
FIGURES = {"loss": 1.2345, "tau": 2.5, "tokens_per_second": 1234.5, "data_wait_share": 0.0125}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def dspark_logs() -> Iterator[None]:
    logger = logging.getLogger("dspark")
    before = (logger.handlers, logger.level, logger.propagate)
    configure_logging()
    yield
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


def test_a_file_gets_plain_lines(
    target: Decoder,
    rows: Samples,
    tmp_path: Path,
    alone: Ranks,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.0)
    make_trainer(target, rows, tmp_path, alone, {}, {"max_steps": 6, "log_every": 2}).run()
    out, err = capsys.readouterr()
    assert out == ""
    figures = r"loss \d+\.\d{3}, tau \d\.\d\d, [\d,]+ tokens/s, waiting \d+\.\d%, \d+:\d\d:\d\d left"
    lines = [
        re.fullmatch(rf"INFO dspark\.training\.live: step (\d) of 6: {figures}", line) for line in err.splitlines()
    ]
    assert [line and line[1] for line in lines] == ["2", "4", "6"]


def test_a_file_is_not_filled_with_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with RunLine(1000, 0) as line:
        for _ in range(1000):
            line.advance()
            line.report(FIGURES)
    assert capsys.readouterr().err.splitlines() == [
        "INFO dspark.training.live: step 1000 of 1000: loss 1.234, tau 2.50, 1,234 tokens/s, waiting 1.2%, 0:00:00 left"
    ]


def test_only_the_main_process_speaks(
    target: Decoder, rows: Samples, tmp_path: Path, alone: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    second = Ranks(1, 1, torch.device("cpu"))
    make_trainer(target, rows, tmp_path, second, {}, {"max_steps": 2}).run()
    assert capsys.readouterr().err == ""


def test_an_interrupted_run_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def interrupted() -> None:
        with RunLine(1500, 100) as line:
            line.advance()
            line.report(FIGURES)
            line.advance()
            get_logger("dspark.training.trainer").warning("finishing this step")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sys.stderr is terminal, "the stream is given back"
    text = terminal.getvalue()
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.rindex(SHOW_CURSOR) > text.rindex("train")
    shown = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", text)
    assert "WARNING dspark.training.trainer: finishing this step\n" in shown
    last = shown.splitlines()[-1]
    assert re.search(r"train .* 102/1500 +loss 1\.234, tau 2\.50, 1,234 tokens/s, waiting 1\.2%, [\d:]+ left", last)
