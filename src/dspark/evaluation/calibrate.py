"""Calibrating a drafter's confidence: collect full-width rounds, fit temperatures, judge them, write the files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.data.sources import Prompt, select_prompts
from dspark.drafters.layouts.calibration import CALIBRATION_NAME, SGLANG_NAME, Calibration
from dspark.draws import draw
from dspark.engine.engine import Engine
from dspark.engine.request import RoundRecord
from dspark.errors import ConfigError, DataError
from dspark.evaluation.confidence import ConfidenceReport, as_tensors, confidence_report
from dspark.evaluation.config import CalibrateOptions
from dspark.evaluation.reliability import draw_confidence
from dspark.evaluation.rounds import AnsweredPrompt, collect
from dspark.log import get_logger
from dspark.spec.calibration import fit_temperatures, survived

_log = get_logger(__name__)

ROUNDS_NAME = "calibration.rounds.jsonl"
PLOT_NAME = "calibration.png"
BIAS_LIMIT = 0.03  # of a mean survival: beyond it a warning tells what temperatures cannot mend
NOISE_LIMIT = 0.02  # of the calibration error: beyond it, the figures say more about the number of rounds


@dataclass(frozen=True)
class CalibrationReport:
    """What came of a calibration: `before` and `after` judge the held-out rounds without and with it."""

    calibration: Calibration
    before: ConfidenceReport
    after: ConfidenceReport
    num_end_rounds: int  # left out, cut short by the end of their answer
    directory: Path

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files written into the directory."""
        return CALIBRATION_NAME, SGLANG_NAME, PLOT_NAME, ROUNDS_NAME


def calibrate(engine: Engine, options: CalibrateOptions, directory: Path) -> CalibrationReport:
    """Fit the temperatures of the engine's drafter and write calibration files, rounds and plot into `directory`.

    The engine must keep records of rounds (`record_rounds`) and verify at full width. Raises ConfigError for a drafter
    without a confidence head, and DataError when there is nothing to fit or to judge on.
    """
    drafter = engine.drafter
    if drafter is None or drafter.confidence_head is None:
        raise ConfigError("drafter: has no confidence head, so there is nothing to calibrate: use a DSpark drafter")
    assert engine.settings.record_rounds, "the engine must keep records of rounds"
    assert drafter.digest is not None
    if engine.settings.num_draft_tokens is not None:
        raise ConfigError("num_draft_tokens: a calibration is fitted at the drafter's full width: leave it out")
    paths = (*options.prompts, *options.held_out)
    prompts = select_prompts(paths, options.limit, options.seed)
    answers = collect(engine, prompts, options, directory / ROUNDS_NAME)
    held_out = held_out_ids(prompts, options)
    fitted = _rounds(answer for answer in answers if answer.prompt_id not in held_out)
    judged = _rounds(answer for answer in answers if answer.prompt_id in held_out)
    temperatures = fit(fitted)
    before, after = judge(judged), judge(judged, temperatures)
    warn_of_bias(after)
    calibration = Calibration(
        drafter_digest=drafter.digest,
        target=engine.target.name,
        target_digest=engine.target.digest,
        temperatures=temperatures,
        sampling_temperatures=options.temperatures,
        prompts=tuple(path.name for path in options.prompts),
        num_rounds=len(fitted),
        num_held_out_rounds=before.num_rounds,
        ece_before=tuple(position.ece for position in before.positions),
        ece_after=tuple(position.ece for position in after.positions),
    )
    calibration.write(directory)
    draw_confidence({"before": before, "after": after}, directory / PLOT_NAME)
    return CalibrationReport(calibration, before, after, sum(answer.num_end_rounds for answer in answers), directory)


def fit(rounds: Sequence[RoundRecord]) -> tuple[float, ...]:
    """Temperatures by position, from full-width rounds. Raises DataError for none, and for trimmed ones."""
    _check(rounds, "fit")
    logits, correct_len = as_tensors(rounds)
    return fit_temperatures(logits, survived(correct_len, logits.shape[1]))


def judge(rounds: Sequence[RoundRecord], temperatures: Sequence[float] | None = None) -> ConfidenceReport:
    """The confidence report of full-width rounds. Raises DataError for none, and for trimmed ones."""
    _check(rounds, "judge")
    report = confidence_report(rounds, temperatures)
    assert report is not None
    if (noise := max(position.ece_noise for position in report.positions)) > NOISE_LIMIT:
        _log.warning(
            "%d held-out rounds are few: chance alone gives a calibration error of %.3f at the worst position; "
            "answer more prompts",
            report.num_rounds,
            noise,
        )
    return report


def warn_of_bias(after: ConfidenceReport) -> None:
    """Say where calibrated survival is still too high or too low on the whole: scaling a logit near 0 moves nothing."""
    worst = max(after.positions, key=lambda position: abs(position.confidence - position.survival))
    error = (worst.survival * (1 - worst.survival) / after.num_rounds) ** 0.5
    if abs(worst.confidence - worst.survival) > BIAS_LIMIT + 2 * error:
        _log.warning(
            "position %d: the calibrated mean survival is %.3f, the measured one %.3f, which no temperature mends: "
            "train the confidence head alone on fresh answers (recipes/train-smollm2-135m-confidence.toml)",
            worst.position,
            worst.confidence,
            worst.survival,
        )


def held_out_ids(prompts: Iterable[Prompt], options: CalibrateOptions) -> set[str]:
    """The prompts to judge on: those of the held-out files or, without such files, a share drawn by prompt."""
    if options.held_out:
        return {prompt.id for prompt in prompts if prompt.path in options.held_out}
    share = options.held_out_share
    return {prompt.id for prompt in prompts if draw(options.seed, "held out", prompt.id) < share}


def _rounds(answers: Iterable[AnsweredPrompt]) -> list[RoundRecord]:
    return [record for answer in answers for record in answer.rounds]


def _check(rounds: Sequence[RoundRecord], verb: str) -> None:
    """Refuse rounds whose labels are censored: those not verified might have been accepted."""
    if trimmed := sum(not record.is_full_width for record in rounds):
        raise DataError(
            f"{trimmed} of {len(rounds)} rounds were trimmed, so that it is unknown whether their other drafts would "
            "have been accepted: collect rounds at full width, without a planner"
        )
    if not rounds:
        raise DataError(f"there are no full-width rounds to {verb} on: give more prompts, or raise max_tokens")
