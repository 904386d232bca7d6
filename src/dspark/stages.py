"""The training path's stages, each a recipe in and files out. Joins packages that do not know each other."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from types import FrameType

import torch

from dspark.cache import build
from dspark.cache.cached import CachedSamples
from dspark.cache.capture import Capture
from dspark.cache.config import CacheSettings
from dspark.cache.estimate import CacheEstimate, estimate
from dspark.cache.hybrid import HybridSamples
from dspark.cache.link import TargetLink, TargetServer
from dspark.cache.remote import RemoteSamples
from dspark.cache.streamed import RowTable, StreamedSamples
from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message, read_conversations
from dspark.data.sources import read_prompts
from dspark.data.template import Rendered, SkipReason, render_all
from dspark.drafters.base import Drafter
from dspark.drafters.layouts.deepspec import read_drafter, write_drafter
from dspark.engine.config import EngineSettings, ProfileOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import drafter_path, open_engine
from dspark.engine.profile import FULL, QUICK, Profiled, additive_of, diagonal_of, measure_costs, write_costs
from dspark.engine.request import SamplingParams
from dspark.errors import CheckpointError, ConfigError
from dspark.evaluation import calibrate as calibration
from dspark.evaluation.calibrate import CalibrationReport
from dspark.evaluation.config import CalibrateOptions
from dspark.files import lock
from dspark.generation import regenerate as regeneration
from dspark.generation import synthesize as synthesis
from dspark.generation.config import RegenerateSettings, SynthesizeSettings
from dspark.log import get_logger
from dspark.models.hub import resolve_model
from dspark.models.target import DtypeName, Target, decodes, load_target, load_target_ends
from dspark.models.tokenizer import vocabulary_digest
from dspark.spec.cost import AdditiveProfile, DiagonalProfile, RoundCosts
from dspark.training.build import adapt_scale, drafter_config, freeze, new_drafter, spread_layers, warm_start
from dspark.training.checkpoint import latest_state
from dspark.training.config import HeldOut, TrainSettings
from dspark.training.parallel import Ranks, join_ranks
from dspark.training.plan import TrainPlan, plan
from dspark.training.sampler import EpochSampler
from dspark.training.trainer import Trainer, TrainReport

_log = get_logger(__name__)

MEASURED_LENGTH = 2048  # tokens of prompt and answer, where held-out prompts are measured

Samples = CachedSamples | StreamedSamples | RemoteSamples | HybridSamples


def synthesize(settings: SynthesizeSettings) -> None:
    """Let the target write prompts; a run that was cut off continues."""
    synthesis.synthesize(plain_engine(settings.target, settings.dtype, settings.engine), settings)


def regenerate(settings: RegenerateSettings) -> None:
    """Let the target answer prompts; a run that was cut off continues."""
    regeneration.regenerate(plain_engine(settings.target, settings.dtype, settings.engine), settings)


def plain_engine(target: str, dtype: DtypeName, settings: EngineSettings) -> Engine:
    """An engine without a drafter: in large batches plain decoding is the faster one."""
    return Engine(load_target(target, dtype), None, settings)


def build_cache(settings: CacheSettings) -> None:
    """Run answered conversations through the target and store its hidden states; resumes a build that was cut off."""
    target = load_target(settings.target, settings.dtype, capture=settings.capture)
    build.build_cache(target, rendered_rows(target, settings), settings)


def estimate_cache(settings: CacheSettings) -> CacheEstimate:
    """What `build_cache` would write and how long it would take; nothing is written."""
    target = load_target(settings.target, settings.dtype, capture=settings.capture)
    return estimate(target, rendered_rows(target, settings), settings)


def rendered_rows(target: Target, settings: CacheSettings | TrainSettings) -> Iterator[Rendered]:
    """The training rows of the conversations that the settings name, as the target's chat template renders them."""
    conversations = islice(read_conversations(settings.conversations, settings.skip_bad), settings.limit)
    skipped: Counter[SkipReason] = Counter()
    return render_all(ChatTemplate(target.tokenizer), conversations, settings.max_length, skipped)


def train(settings: TrainSettings) -> TrainReport | None:
    """Train a drafter; resumes the run found in `settings.out`. None on all but the main process.

    With `target_ranks` the last processes run the target for the others until these have ended.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    settings.check_features()
    check_held_out(settings)
    with join_ranks(settings.device, settings.target_ranks) as ranks:
        if ranks.runs_target:
            serve_states(settings, ranks)
            return None
        with open_samples(settings, ranks) as (target, samples):
            if len(samples) < settings.batch_size:
                raise ConfigError(f"batch_size: {settings.batch_size} exceeds the {len(samples)} samples: lower it")
            drafter = build_drafter(settings, target, samples).to(ranks.device)
            export = exporter(settings, target)
            measure = None if settings.held_out is None else acceptance_probe(settings.held_out, target)
            trainer = Trainer(settings, target.model, drafter, samples, export, ranks, measure)

            def stop() -> None:
                trainer.stop_requested = True

            streamed = samples.streamed if isinstance(samples, HybridSamples) else samples
            if isinstance(streamed, RemoteSamples):  # only without a store is it known what will be asked for
                streamed.follow(upcoming(settings, samples, ranks) if streamed is samples else iter(()), stop)
            asked = "finishing this step and saving; press Ctrl-C again to stop at once"
            with only_run(settings.out, ranks), graceful_stop(stop, asked):
                report = trainer.run()
        return report if ranks.is_main else None


@contextmanager
def only_run(out: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of this one's directory. Raises ConfigError where one is under way there."""
    if not ranks.is_main:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("wb") as file:
        lock(file, out)
        yield


def check_held_out(settings: TrainSettings) -> None:
    """Raise ConfigError where held-out prompts are to be measured with a target that our engine cannot run."""
    if settings.held_out is None or settings.capture == "decoder":
        return
    if settings.capture == "transformers" or not decodes(resolve_model(settings.target)):
        raise ConfigError(
            f"held_out: is measured by the engine, and {settings.target} is to run through transformers: leave "
            "[held_out] out, or let our decoder run it where it can"
        )


@contextmanager
def open_samples(settings: TrainSettings, ranks: Ranks) -> Iterator[tuple[Target, Samples]]:
    """The target, or as much of it as this process needs, and the samples to train on, from where the settings say."""
    measures = settings.held_out is not None and ranks.is_main
    if settings.features == "cached":
        cached = CachedSamples(settings.cache)
        target = load_part(settings, ranks, None if measures else cached.target_digest)
        cached.check(target)
        yield target if measures else target.without_layers(), cached
    elif settings.target_ranks:
        link = TargetLink(ranks.target_rank, ranks.device)
        digest, ends = link.digests()
        target = load_part(settings, ranks, None if measures else digest)
        if target.ends_digest != ends:
            raise CheckpointError(f"{settings.target}: is another model here than where the target runs")
        layers = tapped_layers(settings, target)
        table = RowTable(rendered_rows(target, settings))
        with (
            RemoteSamples(table, link, layers, target.config.hidden_size) as remote,
            kept(settings, target, remote, ranks) as samples,
        ):
            yield target, samples
    else:
        target = load_part(settings, ranks, None)
        with kept(settings, target, streamed_samples(settings, target, ranks), ranks) as samples:
            yield target, samples


def load_part(settings: TrainSettings, ranks: Ranks, digest: str | None) -> Target:
    """The whole target; or, where its digest is known, its embedding, final norm and LM head alone."""
    if digest is None:
        target = load_target(settings.target, settings.target_dtype, pack=False, capture=settings.capture)
    else:
        target = load_target_ends(settings.target, settings.target_dtype, digest)
    target.model.to(ranks.device)
    return target


def streamed_samples(settings: TrainSettings, target: Target, ranks: Ranks) -> StreamedSamples:
    """The conversations with states that `target` makes here."""
    layers = tapped_layers(settings, target)
    capture = Capture(target.states(), layers, log_normalizer=True, device=ranks.device)
    return StreamedSamples(RowTable(rendered_rows(target, settings)), capture, layers, settings.batch_tokens)


def tapped_layers(settings: TrainSettings, target: Target) -> tuple[int, ...]:
    """The layers that streamed states are of. Raises ConfigError for layers or lengths that the target lacks."""
    layers = settings.drafter.target_layer_ids or spread_layers(target.config.num_hidden_layers)
    build.check_capture(target, layers, settings.max_length)
    return layers


@contextmanager
def kept(
    settings: TrainSettings, target: Target, streamed: StreamedSamples | RemoteSamples, ranks: Ranks
) -> Iterator[Samples]:
    """The streamed samples, with features = "hybrid" stored in the cache as far as it goes."""
    if settings.features == "streamed":
        yield streamed
        return
    assert settings.max_cache_bytes is not None
    identity = build.states_of(target, streamed.target_layer_ids, settings.hidden_dtype)
    place = (ranks.rank, ranks.world_size)
    with HybridSamples(streamed, settings.cache[0], identity, settings.max_cache_bytes, place) as hybrid:
        ranks.wait()  # every process has mended its part before others read it
        yield hybrid


def serve_states(settings: TrainSettings, ranks: Ranks) -> None:
    """Run the target for the trainers of this process until they have ended, however they do."""
    target = load_target(settings.target, settings.target_dtype, capture=settings.capture)
    target.model.to(ranks.device)
    digests = target.digest, target.ends_digest
    server = TargetServer(streamed_samples(settings, target, ranks).load, digests, ranks.trainers)

    def stop() -> None:
        server.stop_requested = True

    with graceful_stop(stop, "serving states until the trainers have saved; press Ctrl-C again to stop at once"):
        server.run(ranks.device)


def upcoming(settings: TrainSettings, samples: Samples, ranks: Ranks) -> Iterator[list[int]]:
    """The micro-batches that this process is going to load, from the step on at which the run resumes."""
    state = latest_state(settings.out / "states")
    sampler = EpochSampler(samples.lengths, settings.batch_size, settings.seed)
    first = 0 if state is None else state[1]["step"] * settings.accumulation
    return (sampler.batch(index).tolist() for index in count(first + ranks.rank, ranks.world_size))


def plan_training(settings: TrainSettings) -> TrainPlan:
    """What `train` would take and touch; nothing is written, no weights are read. The caches need not be there yet."""
    taps, lengths, whole = settings.drafter.target_layer_ids, None, not settings.target_ranks
    if settings.features == "cached":
        whole = False
        if all((path / "manifest.json").is_file() for path in settings.cache):
            samples = CachedSamples(settings.cache)
            taps, lengths, whole = samples.target_layer_ids, samples.lengths, samples.target_digest is None
    processes = max(1, int(os.environ.get("WORLD_SIZE", "1")) - settings.target_ranks)
    return plan(settings, lengths, taps, processes, whole or settings.held_out is not None)


def build_drafter(settings: TrainSettings, target: Target, samples: Samples) -> Drafter:
    """A fresh drafter, or the one to start from as the recipe wants it. Raises ConfigError where they do not fit."""
    config = drafter_config(settings.drafter, target.model, samples.target_layer_ids)
    if settings.init_from is None:
        drafter = new_drafter(config, target.model, samples, settings.seed, settings.recent_heads)
    else:
        read = read_drafter(settings.init_from, target.model, target.digest)
        if read.config.target_layer_ids != samples.target_layer_ids:
            raise ConfigError(
                f"init_from reads layers {read.config.target_layer_ids}, the samples hold "
                f"{samples.target_layer_ids}: set drafter.target_layer_ids to the layers that it reads"
            )
        drafter = warm_start(read, config, target.model, settings.seed)
        adapt_scale(drafter, samples)
    freeze(drafter, settings.freeze)
    return drafter


def acceptance_probe(settings: HeldOut, target: Target) -> Callable[[Path], float]:
    """A function that measures a checkpoint: the accepted length of its drafts on held-out prompts, through the engine.

    Raises DataError when the prompts cannot be read. The function needs the whole target.
    """
    template = ChatTemplate(target.tokenizer)
    by_file = [list(islice(read_prompts((path,)), settings.limit)) for path in settings.prompts]
    prompts = [template.prompt_ids([Message("user", p.turns[0])]) for rows in by_file for p in rows]
    params = SamplingParams(max_tokens=settings.max_tokens, temperature=settings.temperature, seed=0)

    def measure(path: Path) -> float:
        drafter = read_drafter(path, target.decoder, target.digest).prepare()
        engine = Engine(target, drafter, EngineSettings(max_batch=16, max_length=MEASURED_LENGTH))
        fitting = [ids for ids in prompts if len(ids) + settings.max_tokens <= engine.limit]
        engine.generate(fitting, [params] * len(fitting))
        return engine.stats.accepted_length or 0.0

    return measure


def calibrate(options: CalibrateOptions) -> CalibrationReport:
    """Fit the temperatures of a drafter's confidences, and write them beside it or where the options say."""
    path = drafter_path(options.model)
    if options.out is None and (path is None or options.model.drafter == "auto"):
        raise ConfigError("out: name a directory: a drafter that comes with the package is not written to")
    directory = options.out or path
    assert directory is not None
    settings = EngineSettings(max_batch=options.max_batch, max_length=options.max_length, record_rounds=True)
    return calibration.calibrate(open_engine(options.model, settings), options, directory)


def profile(options: ProfileOptions) -> Profiled:
    """Measure the costs of rounds and write them in the shape asked for. Raises ConfigError without a drafter."""
    effort = QUICK if options.quick else FULL
    settings = EngineSettings(max_batch=options.max_batch, max_length=2 * effort.context, prefix_cache=False)
    engine = open_engine(options.model, settings)
    if engine.drafter is None:
        raise ConfigError("drafter: rounds with drafts are measured: name a drafter for this target")
    costs = measure_costs(engine.target, engine.drafter, engine.settings, effort)
    profiled = Profiled(costs, options.max_batch, costs.measured["num_drafts"], options.out)
    table: RoundCosts | DiagonalProfile | AdditiveProfile = costs
    if options.shape != "rounds":
        shape = diagonal_of if options.shape == "diagonal" else additive_of
        table = shape(costs, options.max_batch, profiled.num_drafts + 1)
    write_costs(options.out, table)
    return profiled


def exporter(settings: TrainSettings, target: Target) -> Callable[[Drafter, Path], None]:
    """A function that writes servable checkpoints, which name the target they are for."""
    provenance = {
        "target": target.name,
        "target_digest": target.digest,
        "vocabulary_digest": vocabulary_digest(target.tokenizer),
        "recipe": settings.digest(),
    }
    return lambda drafter, path: write_drafter(drafter, path, provenance=provenance)


@contextmanager
def graceful_stop(ask: Callable[[], None], message: str) -> Iterator[None]:
    """While open, the first Ctrl-C or SIGTERM calls `ask` and logs `message`; a second one ends the process now."""
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask()
        _log.warning("%s", message)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
