"""The command line: one subcommand a stage. Parses, then calls one function, which alone imports torch."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from dspark.cache.config import CacheSettings
from dspark.config import Settings, read_toml
from dspark.console.config import ChatOptions, DemoOptions, GenerateOptions, ShowOptions
from dspark.data.config import PrepareSettings
from dspark.engine.config import ProfileOptions
from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.config import CalibrateOptions, CompareOptions, EvalOptions, SimulateOptions
from dspark.evaluation.doctor.config import DoctorOptions
from dspark.evaluation.load.config import LoadOptions
from dspark.generation.config import RegenerateSettings, SynthesizeSettings
from dspark.log import configure_logging
from dspark.server.config import ServeSettings
from dspark.training.config import TrainSettings

Recipe = Annotated[Path, tyro.conf.Positional]
Overrides = Annotated[tuple[str, ...], tyro.conf.Positional]
S = TypeVar("S", bound=Settings)


def generate(options: Annotated[GenerateOptions, tyro.conf.arg(name="")]) -> None:
    """Answer one prompt with speculative decoding.

    Example: dspark generate "Write a haiku about rivers." --temperature 0.7 --seed 1
    """
    from dspark.console.generate import generate as run

    run(options)


def chat(options: Annotated[ChatOptions, tyro.conf.arg(name="")]) -> None:
    """Talk with the target over several turns; /reset forgets them, /exit or Ctrl-D ends.

    Example: dspark chat --temperature 0.7
    """
    from dspark.console.generate import chat as run

    run(options)


def demo(options: Annotated[DemoOptions, tyro.conf.arg(name="")]) -> None:
    """Three prompts decoded plainly and with DSpark, side by side: the same text and the measured speed-up.

    Example: dspark demo --max-tokens 48
    """
    from dspark.console.demo import demo as run

    run(options)


def synthesize(recipe: Recipe, overrides: Overrides = ()) -> None:
    """Let the target write prompts.

    Example: dspark synthesize recipes/synthesize.toml out=prompts.jsonl
    """
    settings = load_recipe(SynthesizeSettings, recipe, overrides)
    from dspark.stages import synthesize as run

    run(settings)


def regenerate(recipe: Recipe, overrides: Overrides = ()) -> None:
    """Let the target answer prompts, here or on OpenAI-compatible servers (endpoints); resumes where it stopped.

    Example: dspark regenerate recipes/regenerate.toml out=answers.jsonl max_tokens=192
    """
    settings = load_recipe(RegenerateSettings, recipe, overrides)
    if settings.endpoints:  # nothing is computed here: no torch
        from dspark.generation.remote import regenerate as ask

        ask(settings)
    else:
        from dspark.stages import regenerate as run

        run(settings)


def cache(recipe: Recipe, overrides: Overrides = (), estimate: bool = False) -> None:
    """Store the target's hidden states over answered conversations; --estimate tells the bytes and writes nothing.

    Example: dspark cache recipes/cache.toml out=features
    """
    settings = load_recipe(CacheSettings, recipe, overrides)
    from dspark.stages import build_cache, estimate_cache

    if estimate:
        from dspark.console import tables

        tables.show(tables.estimate_rows(estimate_cache(settings)))
    else:
        build_cache(settings)


def train(recipe: Recipe, overrides: Overrides = (), dry_run: bool = False) -> None:
    """Train a drafter on cached or streamed states of the target; resumes. Under torchrun, on many processes.

    Example: dspark train recipes/train-smollm2-135m.toml out=runs/first max_steps=200

    Args:
        recipe: TOML file of settings.
        overrides: Settings that replace the recipe's, as key=value.
        dry_run: Only print sizes, memory, disk, steps, and what would be read and written.
    """
    settings = load_recipe(TrainSettings, recipe, overrides)
    from dspark.console import tables

    if dry_run:
        from dspark.stages import plan_training

        tables.show(tables.plan_rows(plan_training(settings)))
        return
    from dspark.stages import train as run

    report = run(settings)
    if report is not None:
        tables.show(tables.report_rows(report))


def calibrate(options: Annotated[CalibrateOptions, tyro.conf.arg(name="")]) -> None:
    """Make a drafter's confidences mean what they say: fit temperatures, judge them on held-out prompts; resumes.

    Example: dspark calibrate prompts.jsonl --drafter runs/first/best
    """
    from dspark.evaluation.calibration_table import show_calibration
    from dspark.stages import calibrate as run

    show_calibration(run(options), options.json_output)


def profile(options: Annotated[ProfileOptions, tyro.conf.arg(name="")]) -> None:
    """Measure what rounds take on this machine: the table by which an engine chooses how much to draft and to verify.

    Made-up requests, 1, 2, 4, ... up to max_batch at once, are decoded plainly and with more and more drafts each. Give
    the file to `dspark generate --costs` or `dspark chat --costs` or, as `costs`, to an engine's settings, and measure
    again for another machine, number of threads, target or drafter.

    Example: dspark profile --out costs.json --max-batch 32
    """
    from dspark.console.costs import show_costs
    from dspark.stages import profile as run

    show_costs(run(options), options.json_output)


def evaluate(options: Annotated[EvalOptions, tyro.conf.arg(name="")]) -> None:
    """Measure a drafter over task sets: accepted length, acceptance by position, speed-up; resumes. Torchrun shares it.

    Example: dspark eval --drafter runs/first/last --tasks gsm8k mt-bench --prompts 40 --out results/first
    """
    from dspark.evaluation.evaluate import evaluate as run

    run(options)


def compare(options: Annotated[CompareOptions, tyro.conf.arg(name="")]) -> None:
    """Put drafters or results of `dspark eval` side by side, paired by prompt, with the significance of differences.

    Example: dspark compare results/first results/second --out results/compared
    """
    from dspark.evaluation.evaluate import compare as run

    run(options)


def doctor(options: Annotated[DoctorOptions, tyro.conf.arg(name="")]) -> None:
    """Find out why a drafter's drafts are not accepted; exit code 0 when the pair is healthy, 1 when a fault was found.

    Example: dspark doctor --target smollm2-135m --drafter runs/first/best
    """
    from dspark.evaluation.doctor.show import doctor as run

    if code := run(options):
        sys.exit(code)


def simulate(options: Annotated[SimulateOptions, tyro.conf.arg(name="")]) -> None:
    """Run the planner against costs of rounds and a model of acceptance, over loads; no model is run.

    Example: dspark simulate --arrivals 2 8 32 --out simulation
    """
    from dspark.evaluation.simulation_report import run

    run(options)


def load(options: Annotated[LoadOptions, tyro.conf.arg(name="")]) -> None:
    """Put load on an OpenAI-compatible server and measure speeds, latencies and what speculation did; resumes.

    Example: dspark load http://127.0.0.1:8000 --modes plain static --concurrency 1 4 16 --out load
    """
    from dspark.evaluation.load.report import run

    run(options)


def show(options: Annotated[ShowOptions, tyro.conf.arg(name="")]) -> None:
    """Show which tokens of conversations are trained, as a target's chat template renders them; nothing is written.

    Example: dspark data show answers.jsonl --target smollm2-135m --limit 2
    """
    from dspark.console.show import show as run

    run(options)


def prepare(recipe: Recipe, overrides: Overrides = ()) -> None:
    """Make prompt files from public or local sets: without duplicates and evaluation texts, some held out.

    Example: dspark data prepare recipes/prepare.toml out=prompts held_out=0.01
    """
    settings = load_recipe(PrepareSettings, recipe, overrides)
    from dspark.data.prepare import prepare as run

    run(settings)


def serve(
    model: Annotated[str, tyro.conf.Positional],
    overrides: Overrides = (),
    host: str | None = None,
    port: int | None = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API; the address and an example are printed when it is ready.

    Example: dspark serve smollm2-135m --port 8001 engine.max_batch=16 limits.max_waiting=64

    Args:
        model: A built-in name, a Hugging Face directory or hub id, a GGUF file; or a TOML file of settings.
        overrides: Settings that replace the file's, as key=value.
        host: Address to listen on; by default this machine alone can reach it.
        port: Port to listen on; 0 takes a free one.
    """
    given = {"host": host, "port": port}
    flags = tuple(f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None)
    data = read_toml(Path(model)) if model.endswith(".toml") else {"model": {"target": model}}
    settings = ServeSettings.from_dict(overridden(data, (*overrides, *flags)), model)
    from dspark.server.run import serve as run

    run(settings)


COMMANDS: dict[str, Callable[..., Any]] = {
    "generate": generate,
    "chat": chat,
    "demo": demo,
    "synthesize": synthesize,
    "regenerate": regenerate,
    "cache": cache,
    "train": train,
    "calibrate": calibrate,
    "profile": profile,
    "eval": evaluate,
    "compare": compare,
    "doctor": doctor,
    "serve": serve,
    "load": load,
    "simulate": simulate,
}
DATA_COMMANDS: dict[str, Callable[..., Any]] = {"show": show, "prepare": prepare}


def load_recipe(kind: type[S], path: Path, overrides: tuple[str, ...]) -> S:
    """A TOML recipe with `dotted.key=value` overrides; values are TOML, bare words are strings. Raises ConfigError."""
    return kind.from_dict(overridden(read_toml(path), overrides), str(path))


def overridden(data: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """The data of a recipe with `dotted.key=value` overrides put in. Raises ConfigError."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"{override!r}: write overrides as key=value, for example max_steps=200")
        place: dict[str, Any] = data
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = parse_value(text)
    return data


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def command_line() -> tyro.extras.SubcommandApp:
    """Every subcommand, those on data files under `dspark data`."""
    app, data = tyro.extras.SubcommandApp(), tyro.extras.SubcommandApp()
    for name, run in DATA_COMMANDS.items():
        data.command(name=name)(run)
    for name, run in COMMANDS.items():
        app.command(name=name)(run)
    app.command(
        data, name="data", help="Look at conversations, make prompt files. Example: dspark data show rows.jsonl"
    )
    return app


def main() -> None:
    """Entry point: exit code 0, 1 for a fault found, 2 for bad input (one line on stderr), 130 after Ctrl-C."""
    configure_logging()
    try:
        command_line().cli(
            prog="dspark",
            description="Speculative decoding with DSpark drafters: train one, and decode faster with the same text.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except DsparkError as error:
        sys.stderr.write(f"dspark: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("dspark: stopped\n")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
