"""Cached, streamed or both: the same samples, the same losses; what was stored is used again, within its bounds."""

import copy
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_training import LAYERS, TAPS, Samples, losses, make_trainer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dspark.cache import build
from dspark.cache.cached import CachedSamples
from dspark.cache.capture import Capture
from dspark.cache.config import CacheSettings
from dspark.cache.hybrid import HybridSamples
from dspark.cache.reader import CacheReader
from dspark.cache.streamed import RowTable, StreamedSamples
from dspark.errors import CacheError, CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.states import DecoderStates
from dspark.models.target import Target
from dspark.training.batch import SampleSource
from dspark.training.build import spread_layers
from dspark.training.config import TrainSettings
from dspark.training.parallel import Ranks

SHAPE: dict[str, object] = {"draft_vocab_size": 30}
Run = Callable[[SampleSource, str], list[float]]


class CountingCapture(Capture):
    """Counts the rows that the target runs over."""

    rows = 0

    def __call__(self, rows):  # type: ignore[no-untyped-def]
        self.rows += len(rows)
        return super().__call__(rows)


@pytest.fixture(scope="module")
def model(target: Decoder) -> Target:
    """Its final norm scales channels, so that applying it twice shows."""
    decoder = copy.deepcopy(target)
    torch.manual_seed(2)
    decoder.norm.weight.copy_(torch.rand_like(decoder.norm.weight) * 3)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    return Target("tiny", decoder, tokenizer, "d", "t", "c", ends_digest="e")


@pytest.fixture
def run(model: Target, tmp_path: Path, alone: Ranks) -> Run:
    """Train on some samples in a directory of that name; its losses."""

    def train(samples: SampleSource, name: str) -> list[float]:
        make_trainer(model.decoder, samples, tmp_path / name, alone, SHAPE, {"max_steps": 4}).run()
        return losses(tmp_path / name)

    return train


def cached(model: Target, rows: Samples, path: Path, **changes: object) -> CachedSamples:
    base: dict[str, object] = {"conversations": [path], "out": path, "target_layer_ids": TAPS, "max_length": 64}
    build.build_cache(model, rows, CacheSettings.from_dict(base | changes, "test"))
    return CachedSamples([path])


def streamed(model: Target, rows: Samples, batch_tokens: int = 1000) -> tuple[StreamedSamples, CountingCapture]:
    capture = CountingCapture(DecoderStates(model.decoder), TAPS, log_normalizer=True)
    return StreamedSamples(RowTable(rows), capture, TAPS, batch_tokens), capture


def hybrid(
    samples: StreamedSamples, model: Target, path: Path, max_bytes: int = 1 << 20, place: tuple[int, int] = (0, 1)
) -> HybridSamples:
    return HybridSamples(samples, path, build.states_of(model, TAPS, "bfloat16"), max_bytes, place)


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_three_ways_one_curve(model: Target, rows: Samples, tmp_path: Path, run: Run) -> None:
    """Every row run alone, so that nothing but the way of its states differs: the losses are equal to the last bit."""
    expected = run(cached(model, rows, tmp_path / "cache", batch_tokens=1), "cached")
    assert len(expected) == 4
    stream, capture = streamed(model, rows, batch_tokens=1)
    assert run(stream, "streamed") == expected
    assert capture.rows == 24 + 4 * 2 * 4, "the scale once, then every micro-batch"
    stream, capture = streamed(model, rows, batch_tokens=1)
    with hybrid(stream, model, tmp_path / "store") as both:
        assert run(both, "hybrid") == expected
    assert capture.rows == 24, "every row once"
    assert CacheReader(tmp_path / "store" / "part-00000").manifest.num_samples == 24


def test_micro_batches_of_unequal_lengths(model: Target, rows: Samples, tmp_path: Path, run: Run) -> None:
    expected = run(cached(model, rows, tmp_path / "cache", batch_tokens=500), "cached")
    assert run(streamed(model, rows)[0], "streamed") == pytest.approx(expected, rel=1e-3)
    assert run(streamed(model, rows)[0], "again") == losses(tmp_path / "streamed"), "a streamed run repeats itself"


def test_a_streamed_run_resumes_bit_for_bit(
    model: Target, rows: Samples, tmp_path: Path, alone: Ranks, run: Run
) -> None:
    expected = run(streamed(model, rows)[0], "whole")
    cut = make_trainer(model.decoder, streamed(model, rows)[0], tmp_path / "cut", alone, SHAPE, {"max_steps": 4})
    load_step = cut.load_step

    def killed(step: int) -> object:
        if step == 2:
            raise SystemExit
        return load_step(step)

    cut.load_step = killed  # type: ignore[method-assign, assignment]
    with pytest.raises(SystemExit):
        cut.run()
    assert run(streamed(model, rows)[0], "cut") == expected


def test_a_store_stays_within_its_bytes(model: Target, rows: Samples, tmp_path: Path, run: Run) -> None:
    stream, capture = streamed(model, rows, batch_tokens=1)
    expected = run(stream, "streamed")
    stream, capture = streamed(model, rows, batch_tokens=1)
    with hybrid(stream, model, tmp_path / "store", max_bytes=50_000) as both:
        assert run(both, "hybrid") == expected
    assert 30_000 < size_of(tmp_path / "store") <= 50_000
    stored = CacheReader(tmp_path / "store" / "part-00000").manifest.num_samples
    assert 0 < stored < 24
    assert capture.rows > 24


def test_a_killed_run_keeps_what_it_stored(model: Target, rows: Samples, tmp_path: Path) -> None:
    stream, _ = streamed(model, rows)
    killed = hybrid(stream, model, tmp_path)
    first = killed.load([3, 1, 4])
    killed.__exit__(KeyboardInterrupt, None, None)
    assert not (tmp_path / "part-00000" / "manifest.json").exists()
    shard = tmp_path / "part-00000" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes() + b"half a sample")
    stream, capture = streamed(model, rows)
    with hybrid(stream, model, tmp_path) as again:
        second = again.load([1, 4, 5, 3])
    assert capture.rows == 1
    assert [sample.sample_id for sample in second] == [1, 4, 5, 3]
    for one, other in ((first[0], second[3]), (first[1], second[0])):
        assert torch.equal(one.features, other.features)
        assert torch.equal(one.last_hidden, other.last_hidden)


def test_processes_read_what_the_others_stored(model: Target, rows: Samples, tmp_path: Path) -> None:
    (one, capture_one), (two, capture_two) = streamed(model, rows), streamed(model, rows)
    left, right = (hybrid(s, model, tmp_path, place=(rank, 2)) for rank, s in enumerate((one, two)))
    left.load([0, 1])
    right.load([2, 3])
    assert [s.sample_id for s in left.load([3, 0])] == [3, 0]
    assert [s.sample_id for s in right.load([1, 4])] == [1, 4]
    assert (capture_one.rows, capture_two.rows) == (2, 3)
    with left, right:
        pass
    stream, capture = streamed(model, rows)
    with hybrid(stream, model, tmp_path) as later:  # a world of one goes on with both parts
        assert len(later.load([0, 1, 2, 3, 4])) == 5
    assert capture.rows == 0


def test_other_conversations_are_refused(model: Target, rows: Samples, tmp_path: Path) -> None:
    with hybrid(streamed(model, rows)[0], model, tmp_path) as both:
        both.load([0])
    with (
        hybrid(streamed(model, Samples(rows[1:]))[0], model, tmp_path) as both,
        pytest.raises(CacheError, match="sample 0 was stored for another conversation"),
    ):
        both.load([0])


def test_a_run_on_other_samples_is_refused(model: Target, rows: Samples, run: Run) -> None:
    run(rows, "run")
    with pytest.raises(CheckpointError, match="other samples"):
        run(Samples(rows[:-1]), "run")


def test_states_that_no_target_has_stop_the_stream(model: Target, rows: Samples) -> None:
    broken = copy.deepcopy(model.decoder)
    broken.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    capture = Capture(DecoderStates(broken), TAPS, log_normalizer=False)
    with pytest.raises(CacheError, match="not finite"):
        StreamedSamples(RowTable(rows), capture, TAPS, 100).load([0])
    with pytest.raises(CacheError, match="no row"):
        RowTable([])


def write_version_2(samples: CachedSamples, model: Target, path: Path, layers: tuple[int, ...] = TAPS) -> None:
    """A cache as DeepSpec writes it: last hidden states after the final norm, no normalizers, no gaps."""
    path.mkdir()
    shard, index = b"", b""
    for sample in samples.load(range(len(samples))):
        last = model.decoder.norm(sample.last_hidden.float()).bfloat16()
        offsets = []
        for tensor in (*sample[1:4], sample.features.view(torch.int16), last.view(torch.int16)):
            offsets.append(len(shard))
            shard += tensor.contiguous().numpy().tobytes()
        index += struct.pack("<QIIQQQQQ", sample.sample_id, 0, len(sample.token_ids), *offsets)
    (path / "shard-00000.bin").write_bytes(shard)
    (path / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": 1,
        "target_layer_ids": layers,
        "index_record_size": 56,
        "hidden_size": model.config.hidden_size,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        "target_model_name_or_path": "elsewhere",
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_version_2_is_trained_on_without_a_second_norm(model: Target, rows: Samples, tmp_path: Path, run: Run) -> None:
    ours = cached(model, rows, tmp_path / "cache")
    write_version_2(ours, model, tmp_path / "public")
    public = CachedSamples([tmp_path / "public"])
    public.check(model)
    expected = run(ours, "ours")
    assert run(public, "public") == pytest.approx(expected, rel=3e-3)
    misread = Samples(s._replace(post_norm=False) for s in public.load(range(24)))  # type: ignore[arg-type]
    assert np.abs(np.array(run(misread, "misread")) / expected - 1).max() > 0.03


def test_a_version_2_cache_of_another_target_is_refused(model: Target, rows: Samples, tmp_path: Path) -> None:
    ours = cached(model, rows, tmp_path / "cache")
    write_version_2(ours, model, tmp_path / "shifted", layers=(1, 2))
    with pytest.raises(CacheError, match="features of its first sample are not this target's"):
        CachedSamples([tmp_path / "shifted"]).check(model)
    other = replace(model, name="other", digest="x")
    with pytest.raises(CacheError, match="recipe's target is other"):
        ours.check(other)
    write_version_2(ours, model, tmp_path / "public")
    with pytest.raises(CacheError, match="last_hidden is not that of"):
        CachedSamples([tmp_path / "cache", tmp_path / "public"])


def test_int8_states_train_alike(model: Target, rows: Samples, tmp_path: Path, run: Run) -> None:
    exact = run(cached(model, rows, tmp_path / "cache"), "exact")
    narrow = cached(model, rows, tmp_path / "narrow", hidden_dtype="int8")
    assert run(narrow, "int8") == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "cache: missing"),
        ({"cache": ["c"], "conversations": ["a"]}, "conversations: features = 'cached' reads none"),
        ({"features": "streamed"}, "conversations: features = 'streamed' needs them"),
        ({"features": "streamed", "conversations": ["a"], "cache": ["c"]}, "cache: features = 'streamed' takes none"),
        ({"features": "hybrid", "conversations": ["a"]}, "cache: features = 'hybrid' takes one directory"),
        ({"features": "hybrid", "conversations": ["a"], "cache": ["c"]}, "max_cache_bytes: features = 'hybrid' needs"),
        ({"cache": ["c"], "max_cache_bytes": 5}, "max_cache_bytes: features = 'cached' has none"),
        ({"cache": ["c"], "target_dtype": "bfloat16", "compute_dtype": "float32"}, "target_dtype"),
    ],
)
def test_where_samples_come_from_is_said_once(settings: dict[str, object], message: str) -> None:
    recipe = TrainSettings.from_dict({"out": "o", "drafter": {"mask_token_id": 1}} | settings, "test")
    with pytest.raises(ConfigError, match=message):
        recipe.check_features()


def test_layers_are_spread_over_the_target() -> None:
    assert spread_layers(36) == (1, 9, 17, 25, 33)
    for num_layers in range(2, 9):
        assert all(0 <= i < num_layers - 1 for i in spread_layers(num_layers))
    assert spread_layers(LAYERS) == (1,)
