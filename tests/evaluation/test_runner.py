"""A run over the tiny pair: every row once, whatever the batch, the interruption or the number of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.engine.config import EngineSettings
from dspark.engine.pair import open_engine
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError, DataError
from dspark.evaluation.config import EvalOptions
from dspark.evaluation.results import Run, read_run
from dspark.evaluation.rows import NO_TIME, Row

HERE = Path(__file__).parent
NUM_ROWS = 2 * 2 * (6 + 3)  # two temperatures, with speculation and plainly
MakeOptions = Callable[..., EvalOptions]
RunAlone = Callable[[EvalOptions], Run]


def timeless(rows: list[Row] | tuple[Row, ...]) -> dict[str, Row]:
    """Rows by id without their times; each id once. Confidences as the file has them, within float sums."""
    found = {}
    for row in rows:
        rounds = tuple(
            r._replace(confidence_logits=tuple(round(x, 3) for x in r.confidence_logits)) for r in row.rounds
        )
        found[row.id] = replace(row, seconds=NO_TIME, rounds=rounds)
    assert len(found) == len(rows)
    return found


def test_rows_tell_what_the_engine_did(make_options: MakeOptions, whole: Run, tmp_path: Path) -> None:
    run = whole
    assert len(run.rows) == NUM_ROWS
    engine = open_engine(make_options(tmp_path).model, EngineSettings(max_batch=1, max_length=64))
    for row in run.rows:
        if row.error is not None:
            assert "exceed the 64 allowed" in row.error
            continue
        turns = 2 if row.task == "mt-bench" else 1
        assert len(row.texts) == len(row.finish) == turns
        assert row.tokens == row.decoded + turns, "the first token of a turn comes from its prefill"
        assert bool(row.rounds) == row.drafted or row.decoded == 0
        assert sum(r.num_output for r in row.rounds) == (row.decoded if row.drafted else 0)
        assert row.seconds.prefill > 0
        assert (row.seconds.decode > 0) == (row.decoded > 0)
    greedy = {row.pair: row.texts for row in run.rows if row.setting.temperature == 0 and row.drafted}
    assert greedy == {row.pair: row.texts for row in run.rows if row.setting.temperature == 0 and not row.drafted}
    row = next(r for r in run.rows if r.task == "mt-bench" and r.drafted and r.setting.temperature == 0)
    first = engine.generate([prompt_of(engine, "fbc")], SamplingParams(max_tokens=8))
    assert row.texts[0] == first[0].text


def prompt_of(engine, text: str) -> list[int]:
    return engine.target.tokenizer(f"<|user|>{text}<|end|><|assistant|>", add_special_tokens=False)["input_ids"]


def test_batch_and_seed(make_options: MakeOptions, run_alone: RunAlone, whole: Run, tmp_path: Path) -> None:
    """Requests of a batch do not touch each other, sampled ones neither."""
    alone, other = (
        timeless(run_alone(make_options(tmp_path / f"{batch}-{seed}", batch=batch, seed=seed, plain=False)).rows)
        for batch, seed in ((1, 0), (4, 1))
    )
    drafted = {name: row for name, row in timeless(whole.rows).items() if row.drafted}
    assert alone == drafted, "the same as in batches of four"
    sampled = [(row.texts, other[name].texts) for name, row in drafted.items() if row.setting.temperature]
    assert any(a != b for a, b in sampled), "another seed draws other answers"


def test_more_prompts_are_added_and_other_settings_refused(
    make_options: MakeOptions, run_alone: RunAlone, tmp_path: Path
) -> None:
    few = run_alone(make_options(tmp_path, prompts=2))
    more = run_alone(make_options(tmp_path, prompts=3, temperatures=(0.0,)))
    again = {row.id: row for row in more.rows}
    assert all(again[row.id] == row for row in few.rows if row.setting.temperature == 0), "times included: not redone"
    assert len(more.rows) == 2 * (3 + 3)
    with pytest.raises(ConfigError, match="tokens"):
        run_alone(make_options(tmp_path, prompts=3, tokens=17))


def test_thinking_mode(make_options: MakeOptions, run_alone: RunAlone, tmp_path: Path) -> None:
    run = run_alone(make_options(tmp_path, tasks=("gsm8k",), thinking="both", prompts=3, plain=False))
    assert {row.setting.thinking for row in run.rows} == {True, False}
    lengths = {mode: sum(r.prompt_tokens for r in run.rows if r.setting.thinking is mode) for mode in (True, False)}
    assert lengths[False] == lengths[True] + 3 * 2, "the template writes one letter more"


def test_bad_tasks(make_options: MakeOptions, run_alone: RunAlone, tmp_path: Path) -> None:
    for tasks, error, message in (
        (("gsm9k",), ConfigError, "no built-in task"),
        (("gsm8k", "gsm8k"), ConfigError, "comes twice"),
        (("aime25",), DataError, r"aime25\.jsonl is not there"),
    ):
        with pytest.raises(error, match=message):
            run_alone(make_options(tmp_path / "none", tasks=tasks))
    assert not (tmp_path / "none").exists()


def test_a_file_of_prompts(make_options: MakeOptions, run_alone: RunAlone, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}\n'
    )
    options = make_options(tmp_path / "out", tasks=(f"notes={tmp_path / 'mine.jsonl'}",), plain=False)
    run = run_alone(options)
    assert {(row.task, row.category) for row in run.rows} == {("mine", "notes")}
    assert all(row.prompt_tokens == len("sauea") + 2 for row in run.rows), (
        "system, user, markers and the answer's header"
    )


def started(options: EvalOptions, processes: int = 1) -> subprocess.Popen[bytes]:
    """`dspark eval` in processes of its own."""
    paths = [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "dspark", "eval", "--out", str(options.out), "--data", str(options.measure.data)]
    command += ["--target", options.model.target, "--drafter", options.model.drafter, "--dtype", "float32"]
    command += ["--tasks", *options.measure.tasks, "--device", "cpu", "--batch", str(options.measure.batch)]
    command += ["--tokens", str(options.measure.tokens), "--max-length", str(options.measure.max_length)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def test_kill_and_resume(make_options: MakeOptions, run_alone: RunAlone, whole: Run, tmp_path: Path) -> None:
    """A real SIGKILL in the middle, and a torn last line: the resumed run loses and doubles nothing."""
    options = make_options(tmp_path / "killed")
    process, path = started(options), tmp_path / "killed" / "rows.jsonl"
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= 5):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = path.read_bytes()
    left = left[: left.rfind(b"\n") + 1]
    assert 5 <= left.count(b"\n") < NUM_ROWS
    path.write_bytes(left + b'{"id": "gsm8k:torn')
    resumed = run_alone(options)
    assert path.read_bytes().startswith(left)
    assert timeless(resumed.rows) == timeless(whole.rows)
    assert len(path.read_bytes().splitlines()) == NUM_ROWS


def test_two_processes_are_one(make_options: MakeOptions, run_alone: RunAlone, whole: Run, tmp_path: Path) -> None:
    """Rows that another process left are taken over, the rest is dealt out, and the main process has all in the end."""
    options = make_options(tmp_path / "two")
    run_alone(options.replace(measure=options.measure.replace(prompts=2)))
    for name in ("rows.jsonl", "rows.settings.json"):
        (tmp_path / "two" / name).rename(tmp_path / "two" / name.replace("rows", "rows.rank3"))
    assert started(options, processes=2).wait(timeout=300) == 0
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "report.html",
        "report.json",
        "rows.jsonl",
        "rows.settings.json",
        "run.json",
    ]
    rows = [json.loads(line) for line in (tmp_path / "two" / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["id"] for row in rows}) == len(whole.rows)
    assert timeless(read_run(tmp_path / "two", "x").rows) == timeless(whole.rows)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
