"""The files of a cache: both versions, damage, and builds that were killed."""

import json
import pickle
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.cache.estimate import part_bytes
from dspark.cache.format import (
    HAS_LOG_NORMALIZER,
    INDEX_NAME,
    QUANTISED,
    HiddenDtype,
    Layout,
    Manifest,
    Sample,
    sample_flags,
)
from dspark.cache.reader import CacheReader
from dspark.cache.writer import CacheWriter
from dspark.errors import CacheError, ConfigError

NUM_LAYERS, HIDDEN = 2, 6
IDENTITY = Manifest(
    target_layer_ids=(0, 2),
    hidden_size=HIDDEN,
    target_model_name_or_path="tiny",
    tokenizer_digest="a",
    chat_template_digest="b",
    target_revision="c",
    vocab_size=50,
)


def make_sample(sample_id: int, seq_len: int | None = None, log_normalizer: bool = True) -> Sample:
    length = seq_len or 3 + sample_id % 5
    generator = torch.Generator().manual_seed(sample_id)
    return Sample(
        sample_id=sample_id,
        token_ids=torch.randint(0, 50, (length,), generator=generator, dtype=torch.int32),
        attention_mask=torch.ones(length, dtype=torch.uint8),
        loss_mask=torch.randint(0, 2, (length,), generator=generator, dtype=torch.uint8),
        features=torch.randn(length, NUM_LAYERS, HIDDEN, generator=generator).bfloat16(),
        last_hidden=torch.randn(length, HIDDEN, generator=generator).bfloat16(),
        log_normalizer=torch.randn(length, generator=generator) if log_normalizer else None,
    )


def assert_same(found: Sample, expected: Sample) -> None:
    assert (found.sample_id, found.post_norm) == (expected.sample_id, expected.post_norm)
    for name in Sample._fields[1:-1]:
        one, other = getattr(found, name), getattr(expected, name)
        if other is None:
            assert one is None
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name


def write_cache(path: Path, ids: list[int], shard_bytes: int = 700, hidden_dtype: HiddenDtype = "bfloat16") -> Manifest:
    with CacheWriter(path, IDENTITY.model_copy(update={"hidden_dtype": hidden_dtype}), shard_bytes) as writer:
        for sample_id in ids:
            writer.write(make_sample(sample_id))
        return writer.finish()


def test_samples_come_back_in_the_order_of_their_ids(tmp_path: Path) -> None:
    manifest = write_cache(tmp_path, [5, 0, 3, 1, 4, 2])
    assert manifest.num_samples == 6
    assert manifest.num_shards > 1
    reader = CacheReader(tmp_path)
    assert reader.manifest == manifest
    assert [len(make_sample(i).token_ids) for i in range(6)] == list(reader.seq_lens)
    for copy in (reader, pickle.loads(pickle.dumps(reader))):
        for sample_id in range(6):
            assert_same(copy[sample_id], make_sample(sample_id))
    with pytest.raises(IndexError):
        reader[6]
    for shard in manifest.shards:
        assert (tmp_path / shard.file_name).stat().st_size <= 700


def test_version_3_bytes(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, IDENTITY) as writer:
        writer.write(make_sample(7, seq_len=3))
        writer.write(make_sample(9, seq_len=5, log_normalizer=False))
        writer.finish()
    index = (tmp_path / INDEX_NAME).read_bytes()
    shard = (tmp_path / "shard-00000.bin").read_bytes()
    assert len(index) == 2 * 64
    sample_id, shard_id, seq_len, ids, attention, mask, features, last, crc, flags = struct.unpack(
        "<QIIQQQQQII", index[:64]
    )
    assert (sample_id, shard_id, seq_len, ids, attention, mask, features) == (7, 0, 3, 0, 12, 15, 18)
    assert last == features + 3 * NUM_LAYERS * HIDDEN * 2
    end = last + 3 * HIDDEN * 2
    assert end % 4 == 2  # the log normalizer begins two bytes later
    end += 2 + 3 * 4
    assert flags == 1
    assert crc == google_crc32c.value(shard[:end])
    first = make_sample(7, seq_len=3)
    assert shard[ids:attention] == first.token_ids.numpy().tobytes()
    assert first.log_normalizer is not None
    assert shard[end - 12 : end] == first.log_normalizer.numpy().tobytes()
    second = struct.unpack("<QIIQQQQQII", index[64:])
    assert second[3] == 64 * -(-end // 64)
    assert second[-1] == 0


def test_version_2_is_read(tmp_path: Path) -> None:
    """A cache as DeepSpec writes it: arrays without gaps, so that integers may lie at odd addresses."""
    samples = [make_sample(i, seq_len=3 + 2 * i, log_normalizer=False) for i in range(3)]
    shard, index = b"", b""
    for sample in samples:
        offsets = []
        for tensor in (*sample[1:4], sample.features.view(torch.int16), sample.last_hidden.view(torch.int16)):
            offsets.append(len(shard))
            shard += tensor.numpy().tobytes()
        index += struct.pack("<QIIQQQQQ", sample.sample_id, 0, len(sample.token_ids), *offsets)
    (tmp_path / "shard-00000.bin").write_bytes(shard)
    (tmp_path / INDEX_NAME).write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": 3,
        "num_shards": 1,
        "target_layer_ids": [0, 2],
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": HIDDEN,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        "target_model_name_or_path": "Qwen/Qwen3-4B",
        "chat_template": "qwen",
        "max_length": 4096,
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    reader = CacheReader(tmp_path)
    assert reader.manifest.last_hidden == "post_norm"
    for i, (found, expected) in enumerate(zip(reader, samples, strict=True)):
        assert_same(found, expected._replace(post_norm=True))
        assert torch.equal(reader.row(i).token_ids, expected.token_ids)
        assert torch.equal(reader.row(i).loss_mask, expected.loss_mask)


def test_reading_does_not_copy_and_writing_does_not_reach_the_file(tmp_path: Path) -> None:
    write_cache(tmp_path, [0])
    reader = CacheReader(tmp_path)
    assert reader[0].features.data_ptr() == reader[0].features.data_ptr()
    reader[0].features.zero_()
    assert_same(CacheReader(tmp_path)[0], make_sample(0))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_names_the_shard_and_the_sample(tmp_path: Path, damage: str) -> None:
    manifest = write_cache(tmp_path, list(range(6)))
    shard = tmp_path / manifest.shards[-1].file_name
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        shard.write_bytes(data)
    elif damage == "truncate":
        shard.write_bytes(data[:-1])
    else:
        shard.unlink()
    reader = CacheReader(tmp_path)
    assert_same(reader[0], make_sample(0))
    with pytest.raises(CacheError, match=shard.name) as error:
        reader[5]
    assert damage == "remove" or "sample 5" in str(error.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 4}, "version"),
        ({"hidden_dtype": "float8_e4m3fn"}, "hidden_dtype"),
        ({"index_record_size": 56}, "index_record_size"),
        ({"num_shards": 3}, "shards"),
        ({"num_samples": 5}, "samples.idx"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_a_bad_manifest_names_its_field(tmp_path: Path, change: dict[str, object], named: str) -> None:
    manifest = write_cache(tmp_path, list(range(4)))
    (tmp_path / "manifest.json").write_text(json.dumps(json.loads(manifest.model_dump_json()) | change))
    with pytest.raises(CacheError, match=named):
        CacheReader(tmp_path)


def test_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"no manifest\.json"):
        CacheReader(tmp_path / "missing")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CacheError, match="not valid JSON"):
        CacheReader(tmp_path)


@pytest.mark.parametrize("lost", range(0, 420, 30))
def test_a_killed_build_continues(tmp_path: Path, lost: int) -> None:
    """Whatever the last bytes of shard and index are, each sample is there once at the end."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    write_cache(whole, list(range(8)))
    with CacheWriter(killed, IDENTITY, shard_bytes=700) as writer:
        for sample_id in (3, 1, 0, 2, 4):
            writer.write(make_sample(sample_id))
    last = max(killed.glob("shard-*.bin"))
    with last.open("rb+") as file:
        file.truncate(max(0, last.stat().st_size - lost))
    with (killed / INDEX_NAME).open("ab") as index:
        index.write(bytes(lost % 64))
    with CacheWriter(killed, IDENTITY, shard_bytes=700) as writer:
        assert set(writer.sample_ids) >= {3, 1}
        for sample_id in range(8):
            if sample_id not in writer:
                writer.write(make_sample(sample_id))
        assert writer.finish().num_samples == 8
    for found, expected in zip(CacheReader(killed), CacheReader(whole), strict=True):
        assert_same(found, expected)


def test_a_damaged_last_shard_loses_the_damaged_sample_only(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, IDENTITY) as writer:
        for sample_id in range(4):
            writer.write(make_sample(sample_id))
    shard = tmp_path / "shard-00000.bin"
    data = bytearray(shard.read_bytes())
    data[-2] ^= 1
    shard.write_bytes(data)
    with CacheWriter(tmp_path, IDENTITY) as writer:
        assert writer.sample_ids == [0, 1, 2]


def test_a_finished_cache_grows(tmp_path: Path) -> None:
    write_cache(tmp_path, [1, 0])
    with CacheWriter(tmp_path, IDENTITY, shard_bytes=700) as writer:
        assert writer.sample_ids == [0, 1]
        writer.write(make_sample(2))
        with pytest.raises(CacheError, match="cut off"):
            CacheReader(tmp_path)
        writer.finish()
    assert [s.sample_id for s in CacheReader(tmp_path)] == [0, 1, 2]


def test_two_processes_do_not_write_one_cache(tmp_path):
    with CacheWriter(tmp_path, IDENTITY), pytest.raises(ConfigError, match="is written by another process"):
        CacheWriter(tmp_path, IDENTITY)
    with CacheWriter(tmp_path, IDENTITY) as writer:
        assert not writer.sample_ids


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "cache", [0])
    with pytest.raises(CacheError, match="another target_revision"):
        CacheWriter(tmp_path / "cache", IDENTITY.model_copy(update={"target_revision": "d"}))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(CacheError, match="not empty"):
        CacheWriter(tmp_path / "other", IDENTITY)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(CacheError, match="cannot be written"):
        CacheWriter(tmp_path / "cache", IDENTITY)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3))
def test_layout_has_no_overlap(seq_len: int, num_layers: int, hidden_size: int, flags: int) -> None:
    layout = Layout.of(seq_len, num_layers, hidden_size, flags)
    one = 1 if flags & QUANTISED else 2
    sizes = [4 * seq_len, seq_len, seq_len, one * seq_len * num_layers * hidden_size, one * seq_len * hidden_size]
    ends = [start + size for start, size in zip(layout.starts, sizes, strict=True)]
    assert [0, *ends[:-1]] == list(layout.starts)
    assert layout.scales % 4 == layout.log_normalizer % 4 == 0
    assert layout.scales >= ends[-1]
    states_end = layout.scales + 4 * seq_len * (num_layers + 1) if flags & QUANTISED else ends[-1]
    assert 0 <= layout.log_normalizer - states_end < 4
    assert layout.end == (layout.log_normalizer + 4 * seq_len if flags & HAS_LOG_NORMALIZER else states_end)


@pytest.mark.parametrize("hidden_dtype", ["bfloat16", "int8"])
def test_the_bytes_that_are_estimated_are_written(tmp_path: Path, hidden_dtype: HiddenDtype) -> None:
    write_cache(tmp_path, list(range(6)), shard_bytes=1 << 20, hidden_dtype=hidden_dtype)
    lengths = CacheReader(tmp_path).seq_lens.astype(np.int64)
    size = sum((tmp_path / name).stat().st_size for name in (INDEX_NAME, "shard-00000.bin"))
    parts = part_bytes(lengths, NUM_LAYERS, HIDDEN, sample_flags(hidden_dtype, log_normalizer=True))
    assert 0 <= sum(parts.values()) - size < 64
    assert parts["index"] == 6 * 64
    assert ("scales" in parts) == (hidden_dtype == "int8")


def test_int8_states_come_back_within_half_a_step(tmp_path: Path) -> None:
    """Each token and layer by its own largest value, however far apart those lie; a row of zeros stays one."""
    sample = make_sample(3, seq_len=40)
    sample = sample._replace(features=sample.features * torch.logspace(-3, 3, 40).bfloat16()[:, None, None])
    sample.features[5, 1] = 0
    with CacheWriter(tmp_path, IDENTITY.model_copy(update={"hidden_dtype": "int8"})) as writer:
        writer.write(sample)
        assert writer.finish().hidden_dtype == "int8"
    found = CacheReader(tmp_path)[0]
    assert_same(found._replace(features=sample.features, last_hidden=sample.last_hidden), sample)
    for stored, states in ((found.features, sample.features), (found.last_hidden, sample.last_hidden)):
        assert stored.dtype == torch.bfloat16
        largest = states.float().abs().amax(dim=-1, keepdim=True)
        error = (stored.float() - states.float()).abs()
        assert bool((error <= largest / 254 + largest * 2**-8).all())
        assert float(error.max() / largest.max()) > 1e-4, "something was rounded"
    assert not found.features[5, 1].any()


def test_int8_takes_at_most_52_percent(tmp_path: Path) -> None:
    """Scales and tokens counted, at the sizes of the built-in target."""
    lengths = np.array([17, 300, 768])
    wide, narrow = (
        sum(part_bytes(lengths, 5, 576, sample_flags(dtype, log_normalizer=True)).values())
        for dtype in ("bfloat16", "int8")
    )
    assert narrow <= 0.52 * wide


def test_a_killed_int8_build_continues(tmp_path: Path) -> None:
    identity = IDENTITY.model_copy(update={"hidden_dtype": "int8"})
    with CacheWriter(tmp_path, identity) as writer:
        for sample_id in range(4):
            writer.write(make_sample(sample_id))
    shard = tmp_path / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-3])
    with CacheWriter(tmp_path, identity) as writer:
        assert writer.sample_ids == [0, 1, 2]
        writer.write(make_sample(3))
        assert writer.finish().num_samples == 4
    assert len(list(CacheReader(tmp_path))) == 4
    with pytest.raises(CacheError, match="another hidden_dtype"):
        CacheWriter(tmp_path, IDENTITY)
