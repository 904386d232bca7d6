"""The command line from end to end on a tiny target: prompts -> answers -> cache -> drafter -> text; and bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_target import save_tiny_target

from dspark import cli
from dspark.console import demo
from dspark.console.config import DemoOptions
from dspark.console.session import Timed
from dspark.engine.request import Completion
from dspark.engine.stats import RequestFigures
from dspark.stages import plan_training
from dspark.training.config import TrainSettings


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_target(path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of `dspark ARGUMENTS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["dspark", *arguments])
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def write_recipe(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def logged(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_the_whole_path(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"turns": [text]}) for text in ("abc", "bcd efg", "hij", "klm nop", "aab", "cde", "fed", "gab")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    head = f'target = "{target}"\ndtype = "float32"\n'
    regenerate = write_recipe(
        tmp_path / "regenerate.toml",
        head + f'prompts = ["{tmp_path}/prompts.jsonl"]\nout = "{tmp_path}/answers.jsonl"\nmax_tokens = 24\n'
        "temperatures = {1 = 1.0}\n[engine]\nmax_batch = 4\nmax_length = 128\n",
    )
    cache = write_recipe(
        tmp_path / "cache.toml",
        head + f'conversations = ["{tmp_path}/answers.jsonl"]\nout = "{tmp_path}/features"\n'
        "target_layer_ids = [0, 2]\nmax_length = 128\n",
    )
    train = write_recipe(
        tmp_path / "train.toml",
        f'target = "{target}"\ncache = ["{tmp_path}/features"]\nout = "{tmp_path}/run"\nbatch_size = 2\n'
        'num_anchors = 8\nmax_steps = 4\nlog_every = 1\ncompute_dtype = "float32"\n'
        "[drafter]\nnum_hidden_layers = 1\nblock_size = 3\nmask_token_id = 1\nmarkov_rank = 4\ndraft_vocab_size = 16\n",
    )
    chain = write_recipe(
        tmp_path / "chain.toml",
        f'target = "{target}"\ncache = ["{tmp_path}/features"]\nout = "{tmp_path}/chain"\nbatch_size = 2\n'
        'num_anchors = 8\nmax_steps = 4\nlog_every = 1\ncompute_dtype = "float32"\n'
        '[drafter]\nalgorithm = "eagle3"\nttt_length = 3\ndraft_vocab_size = 16\nown_lm_head = true\n',
    )
    assert run(monkeypatch, "regenerate", regenerate) == 0
    capsys.readouterr()
    assert run(monkeypatch, "cache", cache, "--estimate") == 0
    shown = capsys.readouterr().out
    assert re.search(r"(?s)samples +\d+ *\n.*features .*index .*bytes .*shards +about 1 *\ntime ", shown)
    assert not (tmp_path / "features").exists(), "an estimate writes nothing"
    assert run(monkeypatch, "cache", cache) == 0
    check_plan(monkeypatch, capsys, tmp_path, train)
    for arguments in (("train", train), ("train", train, "save_every=2")):
        assert run(monkeypatch, *arguments) == 0
        assert "4 of 4" in capsys.readouterr().out
    state = next((tmp_path / "run" / "states").glob("step-*"))
    expected = plan_training(TrainSettings.from_toml(train))
    stored = sum(path.stat().st_size for path in state.glob("*.distcp"))
    assert expected.state_bytes < stored < expected.state_bytes + 200_000  # names and archive headers
    assert (tmp_path / "run" / "last" / "model.safetensors").stat().st_size > expected.drafter_bytes
    answers, layers = f'conversations=["{tmp_path}/answers.jsonl"]', "drafter.target_layer_ids=[0, 2]"
    ways = {
        "streamed": ["cache=[]", "features=streamed"],
        "hybrid": [f'cache=["{tmp_path}/store"]', "features=hybrid", "max_cache_bytes=1000000"],
    }
    for name, way in ways.items():
        assert run(monkeypatch, "train", train, answers, layers, f"out={tmp_path}/{name}", "max_length=128", *way) == 0
        assert logged(tmp_path / name) == pytest.approx(logged(tmp_path / "run"), rel=1e-3)
    for arguments in (("train", chain), ("train", chain, "tokens_per_row=64", f"out={tmp_path}/packed")):
        assert run(monkeypatch, *arguments) == 0
    assert logged(tmp_path / "packed") == pytest.approx(logged(tmp_path / "chain"), rel=1e-4)
    expected = plan_training(TrainSettings.from_toml(chain))
    stored = (tmp_path / "chain" / "last" / "model.safetensors").stat().st_size
    assert expected.drafter_bytes < stored < expected.drafter_bytes + 10_000
    again = (f"init_from={tmp_path}/chain/last", f"out={tmp_path}/again")
    assert run(monkeypatch, "train", chain, *again) == 0
    assert run(monkeypatch, "train", train, *again) == 2
    assert "init_from has algorithm 'eagle3'" in capsys.readouterr().err
    capsys.readouterr()
    common = ["--target", str(target), "--dtype", "float32", "--max-tokens", "20", "--json"]
    texts = []
    for drafter in (str(tmp_path / "run" / "last"), str(tmp_path / "again" / "last"), "none"):
        assert run(monkeypatch, "generate", "abc", "--drafter", drafter, *common) == 0
        row = json.loads(capsys.readouterr().out)
        assert row.keys() == {"text", "accepted_length", "tokens_per_second", "finish_reason"}
        assert (row["accepted_length"] is None) == (drafter == "none")
        texts.append(row["text"])
    assert len(set(texts)) == 1, "greedy text is the same with and without speculation"
    drafter = ("--target", str(target), "--dtype", "float32", "--drafter", str(tmp_path / "run" / "last"))
    assert run(monkeypatch, "calibrate", str(tmp_path / "prompts.jsonl"), *drafter, "--max-tokens", "24", "--json") == 0
    temperatures = json.loads(capsys.readouterr().out)["calibration"]["temperatures"]
    assert json.loads((tmp_path / "run" / "last" / "calibration.json").read_text())["temperatures"] == temperatures
    assert len(temperatures) == 3


BAD = [
    (["generate", "", "--target", "TARGET"], "prompt is empty"),
    (["generate", "abc " * 100, "--target", "TARGET"], "prompt has"),
    (["generate", "abc", "--target", "TARGET", "--drafter", "nowhere"], "no such directory"),
    (["generate", "abc", "--target", "TARGET", "--temperature", "-1"], "temperature"),
    (["generate", "abc", "--target", "TARGET", "--min-tokens", "300"], "min_tokens is 300 but max_tokens 256"),
    (["generate", "abc", "--target", "TARGET", "--json-schema", "nowhere"], "json_schema nowhere: cannot be read"),
    (["generate", "abc", "--target", "TARGET", "--json-schema", "RECIPE"], "json_schema: not valid JSON"),
    (
        ["generate", "abc", "--target", "TARGET", "--regex", "a"],
        "regex: llguidance can not read this target's tokenizer",
    ),
    (["generate", "abc", "--target", "EMPTY"], "config.json"),
    (["train", "missing.toml"], "missing.toml: cannot be read"),
    (["train", "RECIPE", "learning_rte=1"], "learning_rte"),
    (["train", "RECIPE", "epochs"], "key=value"),
    (["train", "RECIPE"], "manifest.json"),
    (["train", "RECIPE", "features=streamed"], "conversations: features = 'streamed' needs them"),
    (["cache", "RECIPE"], "conversations: missing"),
    (["calibrate", "prompts.jsonl"], "out: name a directory"),
    (["calibrate", "prompts.jsonl", "--drafter", "nowhere"], "no such directory"),
]


def check_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path, recipe: str
) -> None:
    """A dry run tells the run's size and leaves nothing behind; so does one whose cache is not there yet."""
    monkeypatch.setenv("COLUMNS", "400")
    capsys.readouterr()
    before = sorted(directory.rglob("*"))
    assert run(monkeypatch, "train", recipe, "--dry-run") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["steps"].strip() == "4"
    samples = json.loads((directory / "features" / "manifest.json").read_text())["num_samples"]
    assert lines["data"].startswith(f"{samples} samples")
    assert run(monkeypatch, "train", recipe, f'cache=["{directory}/none"]', "--dry-run") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["data"].strip() == "known when the cache is built"
    assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "EMPTY").mkdir()
    recipe = f'target = "{target}"\ncache = ["{tmp_path}"]\nout = "{tmp_path}/run"\n[drafter]\nmask_token_id = 1\n'
    (tmp_path / "RECIPE").write_text(recipe)
    places = {"TARGET": str(target), "EMPTY": str(tmp_path / "EMPTY"), "RECIPE": str(tmp_path / "RECIPE")}
    assert run(monkeypatch, *(places.get(a, a) for a in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_brackets_of_an_answer_are_not_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code such as x[n - 1] must survive on its way to the terminal, in the plain column as in the coloured one."""
    completion = Completion("r", [1], [1, 2], "x[n - 1] [bold]", "stop", ["prefill", "bonus"], RequestFigures(1, 1))
    answer = Timed([completion], 1.0, 1.0)
    session = SimpleNamespace(
        speculates=True,
        text_ids=lambda text: [1],
        prompt_ids=lambda messages: [1],
        answer=lambda ids, params: answer,
        target=SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: "x[n - 1] [bold]"[: 8 * len(ids)])),
    )
    monkeypatch.setattr(demo, "open_session", lambda options: session)
    demo.demo(DemoOptions())
    assert capsys.readouterr().out.count("x[n - 1] [bold]") == 2 * len(demo.PROMPTS)


@pytest.mark.parametrize("name", [*cli.COMMANDS, *(f"data {name}" for name in cli.DATA_COMMANDS)])
def test_help_shows_an_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *name.split(), "--help") == 0
    assert f"Example: dspark {name}" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    """As `python -m dspark`, which torchrun takes too."""
    code = "import runpy, sys\nsys.argv = ['dspark', 'train', '--help']\n"
    code += "try:\n    runpy.run_module('dspark', run_name='__main__')\n"
    code += "finally:\n    assert 'torch' not in sys.modules\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Example: dspark train" in result.stdout
