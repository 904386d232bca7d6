"""Building a cache with a real (tiny) target: states, masks, resuming, and the checks that refuse a wrong cache."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.cache.build import build_cache
from dspark.cache.capture import Capture
from dspark.cache.check import check_samples, check_states
from dspark.cache.config import CacheSettings
from dspark.cache.reader import CacheReader
from dspark.errors import CacheError, ConfigError
from dspark.models.attention import AttentionBatch
from dspark.models.linear import pack_linears
from dspark.models.target import Target

TAPS = (-1, 0, 2)


@dataclass
class Row:
    token_ids: list[int]
    loss_mask: list[int]


def make_rows(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(2, 150, size=count).tolist():
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        rows.append(Row(rng.integers(0, 61, size=length).tolist(), mask))
    return rows


def settings(path: Path, **changes: Any) -> CacheSettings:
    base = {"conversations": [path], "out": path / "cache", "target_layer_ids": TAPS, "max_length": 200}
    return CacheSettings.from_dict(base | {"batch_tokens": 500, "window": 16, "check_samples": 4} | changes, "test")


def own_states(target: Target, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """The target's taps and last states of one row alone, one block a row."""
    decoder = target.decoder
    positions = torch.arange(len(token_ids))[None]
    batch = AttentionBatch.build(positions, [len(token_ids)], [[1]], len(token_ids))
    output = decoder(torch.tensor([token_ids]), batch, decoder.new_cache(2, len(token_ids)), TAPS)
    return output.taps[0], output.hidden[0]


def test_samples_are_the_targets_states(target: Target, tmp_path: Path) -> None:
    rows = make_rows(40)
    manifest = build_cache(target, iter(rows), settings(tmp_path, shard_bytes=100_000), total=40)
    reader = CacheReader(tmp_path / "cache")
    assert reader.manifest == manifest
    assert (manifest.num_samples, manifest.last_hidden, manifest.vocab_size) == (40, "pre_norm", 61)
    assert (manifest.target_model_name_or_path, manifest.target_revision) == ("tiny", "d" * 16)
    assert manifest.num_shards > 1
    for number, (row, sample) in enumerate(zip(rows, reader, strict=True)):
        assert sample.sample_id == number
        assert sample.token_ids.tolist() == row.token_ids
        assert sample.loss_mask.tolist() == row.loss_mask
        assert sample.attention_mask.tolist() == [1] * len(row.token_ids)
        features, last = own_states(target, row.token_ids)
        torch.testing.assert_close(sample.features.float(), features, rtol=8e-3, atol=1e-4)
        torch.testing.assert_close(sample.last_hidden.float(), last, rtol=8e-3, atol=1e-4)
        logits = target.decoder.logits(sample.last_hidden.float())
        assert sample.log_normalizer is not None
        wanted = torch.tensor([*row.loss_mask[1:], 0], dtype=torch.bool)
        torch.testing.assert_close(sample.log_normalizer[wanted], logits.logsumexp(-1)[wanted], rtol=1e-5, atol=1e-5)
        assert sample.log_normalizer[~wanted].isnan().all()


def test_without_normalizers(target: Target, tmp_path: Path) -> None:
    build_cache(target, make_rows(3), settings(tmp_path, log_normalizer=False))
    assert all(sample.log_normalizer is None for sample in CacheReader(tmp_path / "cache"))


def test_a_bfloat16_target_gives_float32_normalizers(target: Target, tmp_path: Path) -> None:
    """The trainer divides by them in float32: their error is that of the stored states alone."""
    decoder = copy.deepcopy(target.decoder).bfloat16()
    pack_linears(decoder)
    build_cache(replace(target, model=decoder), make_rows(6), settings(tmp_path))
    for sample in CacheReader(tmp_path / "cache"):
        assert sample.log_normalizer is not None
        wide = decoder.norm.float()(sample.last_hidden.float()) @ decoder.lm_head_weight.float().T
        wanted = ~sample.log_normalizer.isnan()
        torch.testing.assert_close(sample.log_normalizer[wanted], wide.logsumexp(-1)[wanted], rtol=1e-5, atol=1e-5)


def test_normalizers_of_a_target_that_caps_its_logits(target: Target, tmp_path: Path) -> None:
    decoder = copy.deepcopy(target.decoder)
    decoder.config = decoder.config.replace(final_logit_softcapping=1.5)
    build_cache(replace(target, model=decoder), make_rows(3), settings(tmp_path))
    for sample in CacheReader(tmp_path / "cache"):
        assert sample.log_normalizer is not None
        wanted = ~sample.log_normalizer.isnan()
        own = decoder.logits(sample.last_hidden.float())
        assert own.abs().max() <= 1.5
        torch.testing.assert_close(sample.log_normalizer[wanted], own.logsumexp(-1)[wanted], rtol=1e-5, atol=1e-5)


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def test_a_killed_build_continues(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(24)
    (tmp_path / "whole").mkdir()
    build_cache(target, rows, settings(tmp_path / "whole"))
    call = Capture.__call__
    calls = 0

    def killed(self: Capture, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:  # the first batch, four checks, another batch
            raise Killed
        return call(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "__call__", killed)
        with pytest.raises(Killed):
            build_cache(target, rows, settings(tmp_path))
    with pytest.raises(CacheError, match="cut off"):
        CacheReader(tmp_path / "cache")
    with (tmp_path / "cache" / "shard-00000.bin").open("ab") as shard:
        shard.write(b"half a sample")
    manifest = build_cache(target, rows, settings(tmp_path))
    assert manifest.num_samples == 24
    for sample, expected in zip(
        CacheReader(tmp_path / "cache"), CacheReader(tmp_path / "whole" / "cache"), strict=True
    ):
        assert sample.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(sample.features.float(), expected.features.float(), rtol=8e-3, atol=1e-4)


def test_rows_may_be_added_and_not_changed(target: Target, tmp_path: Path) -> None:
    rows = make_rows(9)
    build_cache(target, rows[:6], settings(tmp_path))
    assert build_cache(target, rows, settings(tmp_path)).num_samples == 9
    assert build_cache(target, rows, settings(tmp_path)).num_samples == 9
    with pytest.raises(CacheError, match="sample 0 was written for another row"):
        build_cache(target, rows[1:], settings(tmp_path))
    with pytest.raises(CacheError, match="another target_layer_ids"):
        build_cache(target, rows, settings(tmp_path, target_layer_ids=[0, 1]))


def test_settings_the_target_cannot_serve(target: Target, tmp_path: Path) -> None:
    for layer in (3, 4, -2):
        with pytest.raises(ConfigError, match=f"target_layer_ids: {layer} is outside -1..2 of tiny"):
            build_cache(target, make_rows(2), settings(tmp_path, target_layer_ids=[0, layer]))
    with pytest.raises(ConfigError, match="max_length: 300"):
        build_cache(target, make_rows(2), settings(tmp_path, max_length=300))
    with pytest.raises(CacheError, match="no row"):
        build_cache(target, [], settings(tmp_path))


def test_wrong_states_are_refused(target: Target) -> None:
    """What a faulty capture gives: zeros, NaN, another row's states, another layer, a normalised last state."""
    capture = Capture(target.states(), TAPS, log_normalizer=False)
    samples = capture([(i, row.token_ids, row.loss_mask) for i, row in enumerate(make_rows(8))])
    assert check_samples(samples, capture) == 1.0
    one, other = samples[:2]
    length = min(len(one.token_ids), len(other.token_ids))
    one, other = (s._replace(**{k: getattr(s, k)[:length] for k in s._fields[1:-2]}) for s in (one, other))
    with pytest.raises(CacheError, match="not finite"):
        check_states(one._replace(last_hidden=torch.full_like(one.last_hidden, float("nan"))))
    with pytest.raises(CacheError, match="features are all zero"):
        check_states(one._replace(features=one.features * torch.tensor([1, 1, 0])[:, None]))
    with pytest.raises(CacheError, match="not those of its tokens"):
        check_samples([one._replace(features=other.features)], capture)
    with pytest.raises(CacheError, match="not those of its tokens"):
        check_samples([one._replace(features=one.features.flip(1))], capture)
    with pytest.raises(CacheError, match="target's own at"):
        check_samples([one._replace(last_hidden=other.last_hidden)], capture)
    with pytest.raises(CacheError, match="target's own at"):
        check_samples([one._replace(last_hidden=one.last_hidden.roll(1, 0))], capture)


def test_a_faulty_capture_stops_the_build(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that come back in another order are found after the first one, and no manifest is written."""
    call = Capture.__call__

    def shuffled(self: Capture, batch: Any) -> Any:
        samples = call(self, batch)
        last = [sample.last_hidden.flip(0) for sample in samples]
        return [s._replace(last_hidden=h) if len(batch) > 1 else s for s, h in zip(samples, last, strict=True)]

    monkeypatch.setattr(Capture, "__call__", shuffled)
    with pytest.raises(CacheError, match="target's own"):
        build_cache(target, make_rows(12), settings(tmp_path))
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_the_recipe_loads() -> None:
    recipe = CacheSettings.from_toml(Path(__file__).parents[2] / "recipes" / "cache.toml")
    assert -1 <= min(recipe.target_layer_ids) < max(recipe.target_layer_ids) < 29
