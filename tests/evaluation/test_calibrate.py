"""Calibrating a tiny drafter through the engine: what is fitted, on which rounds, and what is written."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.data.sources import select_prompts
from dspark.drafters.config import DrafterConfig
from dspark.drafters.dspark import BlockDrafter
from dspark.drafters.layouts.calibration import Calibration
from dspark.engine.config import EngineSettings
from dspark.engine.engine import Engine
from dspark.engine.request import RoundRecord, SamplingParams
from dspark.errors import ConfigError, DataError
from dspark.evaluation.calibrate import CalibrationReport, calibrate, fit, held_out_ids, judge, warn_of_bias
from dspark.evaluation.calibration_table import position_table, print_json, threshold_table
from dspark.evaluation.confidence import confidence_report
from dspark.evaluation.config import CalibrateOptions
from dspark.evaluation.rounds import collect, ends_answer
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.models.target import Target

NUM_DRAFTS = 3
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def target() -> Target:
    """Letters, and an end of turn; what it writes is close to uniform, so that answers differ."""
    specials = ("<|end|>", "<|user|>", "<|assistant|>", "<|mask|>", "<unk>")
    vocab = {token: index for index, token in enumerate((*specials, *"abcdefghij klmn"))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    torch.manual_seed(3)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=len(vocab),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        layer_types=("full_attention",) * 2,
        eos_token_ids=(0,),
    )
    decoder = Decoder(config).requires_grad_(False).eval()
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.6)
    return Target("tiny", decoder, tokenizer, "0" * 16, "1" * 16, "2" * 16, "3" * 16)


@pytest.fixture(scope="module")
def make_engine(target: Target) -> MakeEngine:
    """make_engine(bias) -> a drafter whose head is as sure as the bias says, whatever it drafts."""

    def make(bias: float = 3.0, enable_confidence_head: bool = True, **settings: object) -> Engine:
        c = target.config
        torch.manual_seed(5)
        config = DrafterConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            rope=c.rope,
            max_position_embeddings=256,
            num_target_layers=2,
            target_layer_ids=(0,),
            block_size=NUM_DRAFTS,
            mask_token_id=3,
            markov_rank=4,
            enable_confidence_head=enable_confidence_head,
        )
        drafter = BlockDrafter(config, target.decoder)
        if drafter.confidence_head is not None:
            torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.1)
            torch.nn.init.constant_(drafter.confidence_head.proj.bias, bias)
        chosen = {"max_batch": 4, "max_length": 64, "record_rounds": True} | settings
        return Engine(target, drafter.prepare(), EngineSettings(**chosen))

    return make


def write_prompts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")
    return path


def options_in(directory: Path) -> CalibrateOptions:
    """Twelve prompts to fit on, eight to judge on."""
    fitted = write_prompts(directory / "fit.jsonl", [f"abc {chr(97 + i)}" for i in range(12)])
    other = write_prompts(directory / "other.jsonl", [f"{chr(97 + i)} klm" for i in range(8)])
    return CalibrateOptions(prompts=(fitted,), held_out=(other,), max_tokens=24, max_length=64)


@pytest.fixture
def options(tmp_path: Path) -> CalibrateOptions:
    return options_in(tmp_path)


@pytest.fixture(scope="module")
def calibrated(make_engine: MakeEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, CalibrationReport]:
    """An overconfident drafter, and what came of its calibration."""
    path = tmp_path_factory.mktemp("calibrated")
    engine = make_engine(bias=4.0)
    return engine, calibrate(engine, options_in(path), path / "out")


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_overconfident_head_is_calibrated(calibrated: tuple[Engine, CalibrationReport]) -> None:
    engine, report = calibrated
    found, out = report.calibration, report.directory
    assert engine.drafter is not None
    assert Calibration.read(out / "calibration.json", engine.drafter) == found
    assert all((out / name).is_file() for name in report.files)
    assert (out / "calibration.png").read_bytes().startswith(b"\x89PNG")
    for_sglang = json.loads((out / "calibration.sglang.json").read_text())
    assert for_sglang["temperatures"] == [*found.temperatures]
    assert found.temperatures[0] > 2
    assert report.after.ece_max < 0.5 * report.before.ece_max
    assert found.num_rounds > 100
    assert found.num_held_out_rounds == report.before.num_rounds == report.after.num_rounds > 50
    assert report.num_end_rounds > 0
    assert found.ece_after == tuple(p.ece for p in report.after.positions)


def test_the_fit_sees_no_held_out_round(calibrated: tuple[Engine, CalibrationReport]) -> None:
    _, report = calibrated
    rows = rows_in(report.directory / "calibration.rounds.jsonl")
    rounds = {
        kind: [
            RoundRecord(*fields, tuple(logits))
            for row in sorted(rows, key=lambda row: row["id"])
            if row["prompt"].startswith(kind)
            for *fields, logits in row["rounds"]
        ]
        for kind in ("fit", "other")
    }
    assert len(rows) == 12 + 8
    assert fit(rounds["fit"]) == report.calibration.temperatures
    assert confidence_report(rounds["other"]) == report.before
    assert confidence_report(rounds["other"], report.calibration.temperatures) == report.after


def test_a_run_goes_on_where_it_was_cut_off(
    calibrated: tuple[Engine, CalibrationReport], make_engine: MakeEngine, options: CalibrateOptions, tmp_path: Path
) -> None:
    """The rows that are there are taken, the others asked for, and the end is that of one run."""
    engine, report = calibrated
    whole = rows_in(report.directory / "calibration.rounds.jsonl")
    prompts = select_prompts((*options.prompts, *options.held_out), None, 0)
    first, second = make_engine(bias=4.0), make_engine(bias=4.0)
    collect(first, prompts[:9], options, tmp_path / "rounds.jsonl")
    written = (tmp_path / "rounds.jsonl").read_bytes()
    answers = collect(second, prompts, options, tmp_path / "rounds.jsonl")
    assert (tmp_path / "rounds.jsonl").read_bytes().startswith(written)
    assert first.stats.rounds + second.stats.rounds == engine.stats.rounds
    kept = {answer.prompt_id: [record.correct_len for record in answer.rounds] for answer in answers}
    assert kept == {row["prompt"]: [fields[3] for fields in row["rounds"]] for row in whole}
    drafted = engine.stats.proposed // NUM_DRAFTS  # rounds; the last token of an answer has none
    assert sum(len(answer.rounds) + answer.num_end_rounds for answer in answers) == drafted
    assert all(len(record.confidence_logits) == NUM_DRAFTS for answer in answers for record in answer.rounds)


def test_another_drafters_journal_is_refused(
    make_engine: MakeEngine, options: CalibrateOptions, tmp_path: Path
) -> None:
    prompts = select_prompts(options.prompts, 1, 0)
    collect(make_engine(), prompts, options, tmp_path / "rounds.jsonl")
    with pytest.raises(ConfigError, match="drafter: .*begun with other values"):
        collect(make_engine(bias=1.0), prompts, options, tmp_path / "rounds.jsonl")


@pytest.mark.parametrize(("max_tokens", "max_length"), [(9, 64), (60, 14)])
def test_only_ends_of_answers_shorten_a_static_round(make_engine: MakeEngine, max_tokens: int, max_length: int) -> None:
    engine = make_engine(max_length=max_length)
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1, ignore_eos=True)
    completions = engine.generate([[1, 5 + i, 0, 2] for i in range(4)], params)
    shortened = 0
    for completion in completions:
        for record in completion.round_records:
            ends = ends_answer(record, completion, max_tokens, engine.limit)
            assert ends is not record.is_full_width
            shortened += ends
            if ends and record.verify_len > 1:  # one row fewer is a planner's doing
                trimmed = record._replace(verify_len=record.verify_len - 1)
                assert not ends_answer(trimmed, completion, max_tokens, engine.limit)
    assert shortened


def test_trimmed_rounds_are_refused(make_engine: MakeEngine, options: CalibrateOptions) -> None:
    whole = RoundRecord(9, 4, 3, 1, 2, (0.0, 0.0, 0.0))
    assert len(fit([whole, whole._replace(correct_len=3)])) == 3
    with pytest.raises(DataError, match="1 of 2 rounds were trimmed.*at full width"):
        fit([whole, whole._replace(verify_len=3)])
    with pytest.raises(DataError, match="no full-width rounds to fit on"):
        fit([])


def test_a_bias_that_no_temperature_mends_draws_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Logits near 0 stay confidences near a half, whatever divides them."""
    rounds = [
        RoundRecord(9, 2, 1, int(i % 10 < rate), 1, (0.01 * (i % 7 - 3),)) for rate in (3, 5) for i in range(2000)
    ]
    for biased, half in ((True, rounds[:2000]), (False, rounds[2000:])):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_bias(judge(half, fit(half)))
        assert ("which no temperature mends" in caplog.text) is biased


def test_prompts_are_split_by_the_seed(options: CalibrateOptions) -> None:
    alone = options.replace(held_out=())
    prompts = select_prompts(options.prompts, None, 0)
    held_out = held_out_ids(prompts, alone)
    assert 0 < len(held_out) < len(prompts)
    assert held_out == held_out_ids(prompts[::-1], alone)
    assert held_out != held_out_ids(prompts, alone.replace(seed=1))


def test_what_cannot_be_calibrated(make_engine: MakeEngine, options: CalibrateOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drafter: has no confidence head"):
        calibrate(make_engine(enable_confidence_head=False), options, tmp_path / "out")
    with pytest.raises(ConfigError, match="num_draft_tokens: .* full width"):
        calibrate(make_engine(num_draft_tokens=2), options, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_prompt_too_long_is_left_out(
    make_engine: MakeEngine, options: CalibrateOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_prompts(tmp_path / "long.jsonl", ["abc", "abc " * 40])
    with caplog.at_level(logging.WARNING):
        answers = collect(make_engine(), select_prompts((path,), None, 0), options, tmp_path / "rounds.jsonl")
    assert [answer.prompt_id for answer in answers] == ["long:1"]
    assert "long:2: left out" in caplog.text


def test_few_rounds_draw_a_warning(
    make_engine: MakeEngine, options: CalibrateOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        calibrate(make_engine(), options.replace(limit=2), tmp_path / "out")
    assert "held-out rounds are few" in caplog.text


def test_tables_and_json(calibrated: tuple[Engine, CalibrationReport], capsys: pytest.CaptureFixture[str]) -> None:
    _, report = calibrated
    console = Console(width=150)
    console.print(position_table(report))
    console.print(threshold_table(report.before, report.after))
    text = capsys.readouterr().out
    first, last = report.before.positions[0], report.after.positions[-1]
    assert f"{first.ece:.4f} → {report.after.positions[0].ece:.4f}" in text
    assert f"{report.before.positions[-1].brier:.4f} → {last.brier:.4f}" in text
    print_json(report)
    found = json.loads(capsys.readouterr().out)
    assert found["ece_max_after_sts"] == report.after.ece_max
    assert len(found["before"]["thresholds"]) == len(report.before.thresholds)
