"""What a person reads: tables, JSON and the page, from rows with known figures and from a real run."""

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dspark import cli
from dspark.errors import DataError
from dspark.evaluation import report
from dspark.evaluation.compare import compare
from dspark.evaluation.config import EvalOptions, ReportOptions
from dspark.evaluation.page import POLICY
from dspark.evaluation.results import Run, short_names
from dspark.evaluation.summary import summarise

from .made_rows import made_run

CHANCES = (0.8, 0.7, 0.5, 0.6)
VOID = {"meta", "br"}


class Checked(HTMLParser):
    """Notes tags that are closed in another order than opened, ids, cell texts and whatever is asked of elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self.titles: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.references += [v for n, v in attrs if v and n in ("src", "href", "xlink:href", "srcset", "data", "action")]
        assert tag not in ("script", "link", "iframe", "img", "object")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "svg":
            assert named["aria-label"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "small"):
            self.cells.append(data)
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def check_page(path: Path) -> Checked:
    """The page is whole, and everything it refers to is in it."""
    text = path.read_text(encoding="utf-8")
    checked = Checked(text)
    assert not checked.open
    assert len(set(checked.ids)) == len(checked.ids)
    assert {ref.removeprefix("#") for ref in checked.references} <= set(checked.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(checked.ids)
    assert "url(http" not in text
    assert "@import" not in text
    assert POLICY in text
    for drawn in re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(drawn)
    return checked


def test_a_report_holds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """In its tables, JSON and page, which reads on light and dark."""
    monkeypatch.setenv("COLUMNS", "120")
    run = made_run("<b>name</b>", CHANCES, prompts=8)
    report.give(tmp_path, "report", [run], [], ReportOptions())
    (greedy, _) = summarise(run.rows)
    tau = greedy.tasks["gsm8k"].tau
    checked = check_page(tmp_path / "report.html")
    assert f"{tau.value:.2f}" in checked.cells
    assert f"{tau.low:.2f} … {tau.high:.2f}" in checked.cells
    assert f"{greedy.everything.speedup.value:.2f}" in checked.cells
    assert f"{greedy.everything.conditional[3].value:.2f}" in checked.cells
    assert {
        "Accepted length", "Speed", "Accepted length by task", "Conditional acceptance by position",
        "Prefix survival by position", "Distribution of τ", "By context length", "By script of the prompt",
        "Confidence by position", "Confidence of <b>name</b>",
    } <= set(checked.titles)  # fmt: skip
    assert "By script of the answer" not in checked.titles, "all are of one script"
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    drawn = "".join(re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): (#000000|#ffffff|black|white)\b", drawn), "unseen on one of the two"
    printed = capsys.readouterr().out
    assert f"{tau.value:.2f} ±{(tau.high - tau.low) / 2:.2f}" in printed
    assert max(map(len, printed.splitlines())) <= 120
    told = json.loads((tmp_path / "report.json").read_text())
    (one,) = told["runs"]
    found = one["settings"][0]["tasks"]["gsm8k"]["tau"]
    assert found == {"value": round(tau.value, 4), "low": round(tau.low, 4), "high": round(tau.high, 4)}
    assert one["settings"][0]["confidence"]["positions"][0]["position"] == 1
    assert one["about"]["drafter"] == "<b>name</b>"


def test_a_comparison_holds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made_run("a", CHANCES, 0, 8, plain=False), made_run("b", (0.5,) * 4, 1, 8, plain=False)]
    comparison = compare(*runs)
    report.give(tmp_path, "compare", runs, [comparison], ReportOptions(json_output=True))
    checked = check_page(tmp_path / "compare.html")
    tau = comparison.differences[0]
    assert tau.metric == "tau"
    assert f"{tau.difference.value:+.3f}" in checked.cells
    assert {"b against a", "τ of b over a"} <= set(checked.titles)
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "compare.json").read_text())
    assert told["comparisons"][0]["differences"][0]["p_value"] == round(tau.p_value, 4)


def test_nothing_answered(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompt was answered"):
        report.give(tmp_path, "report", [Run("a", [], {}, {})], [], ReportOptions())


def test_short_names() -> None:
    assert short_names([Path("/x/runs/a"), Path("/x/runs/b")]) == ["a", "b"]
    assert short_names([Path("/x/a/last"), Path("/x/b/last"), Path("/y/c")]) == ["a/last", "b/last", "y/c"]
    with pytest.raises(DataError, match="twice"):
        short_names([Path("/x/a"), Path("/x/a")])


def test_commands(
    make_options: Callable[..., EvalOptions], make_pair: Callable[..., Path], tmp_path: Path, monkeypatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`dspark eval`, then `dspark compare` of its results and a drafter that is still to be measured."""
    options = make_options(tmp_path / "good")
    m = options.measure
    common = ["--data", str(m.data), "--tasks", "gsm8k", "--tokens", "8", "--target", options.model.target]
    common += ["--dtype", "float32", "--max-length", "64", "--device", "cpu", "--temperatures", "1", "--json"]

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["dspark", *arguments, *common])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    assert run("eval", "--drafter", str(make_pair()), "--out", str(tmp_path / "good")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"][0]["settings"][0]["tasks"]["gsm8k"]["prompts"] == 6
    check_page(tmp_path / "good" / "report.html")
    noisy = str(make_pair(3.0))
    assert run("compare", str(tmp_path / "good"), noisy, "--out", str(tmp_path / "both")) == 0
    told = json.loads(capsys.readouterr().out)
    (comparison,) = told["comparisons"]
    rate = next(d for d in comparison["differences"] if d["metric"] == "acceptance_rate")
    assert rate["difference"]["value"] < 0, "noise makes a drafter worse"
    check_page(tmp_path / "both" / "compare.html")
    assert (tmp_path / "both" / "noise-3" / "rows.jsonl").is_file()
    assert run("compare", str(tmp_path / "good"), noisy, "--drafter", noisy, "--out", str(tmp_path / "both")) == 2
    assert "as arguments: dspark compare FIRST SECOND" in capsys.readouterr().err
    assert run("eval", "--drafter", "none", "--out", str(tmp_path / "none")) == 2
    assert "pass --drafter PATH" in capsys.readouterr().err
    assert run("eval", "--drafter", noisy, "--thinking", "of", "--out", str(tmp_path / "none")) == 2
