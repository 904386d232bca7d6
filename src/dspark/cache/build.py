"""Building a target cache: rows in, batched prefill, samples out, checked against the target."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from dspark.cache.capture import Capture, NumberedRow, batches
from dspark.cache.check import check_samples, check_states
from dspark.cache.config import CacheSettings
from dspark.cache.format import HiddenDtype, Manifest
from dspark.cache.writer import CacheWriter
from dspark.errors import CacheError, ConfigError
from dspark.log import get_logger, progress
from dspark.models.target import Target

_log = get_logger(__name__)


class CacheRow(Protocol):
    """What a build needs of a rendered conversation."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def loss_mask(self) -> Sequence[int]: ...


def build_cache(
    target: Target, rows: Iterable[CacheRow], settings: CacheSettings, total: int | None = None
) -> Manifest:
    """Write the target's states for `rows` to `settings.out`; the row's number becomes the sample id.

    Rows that an earlier build has written are left out, after a look that they are the same; so a build that was cut
    off continues, and a finished cache grows when rows were added. `total` is for the progress bar.

    Raises `ConfigError` for layers or lengths the target does not have, and `CacheError` when the directory belongs to
    something else, a row differs from the one written under its number, there are no rows, or the written states are
    not the target's.
    """
    capture = Capture(target.states(), settings.target_layer_ids, settings.log_normalizer)
    with CacheWriter(settings.out, cache_identity(target, settings), settings.shard_bytes) as writer:
        checked = False
        with progress(total, "cache", "row") as bar:
            for window in _windows(rows, settings.window):
                new = [row for row in window if not _is_written(writer, row)]
                bar.update(len(window) - len(new))
                for batch in batches(new, settings.batch_tokens):
                    for sample in capture(batch):
                        check_states(sample)
                        writer.write(sample)
                    bar.update(len(batch))
                    if not checked:  # a wrong capture shows at once, not after hours
                        _check(writer, [row[0] for row in batch], capture, settings.check_samples)
                        checked = True
        if not writer.sample_ids:
            raise CacheError(f"{settings.out}: there is no row to store: see the skipped conversations above")
        agreement = _check(writer, writer.sample_ids, capture, settings.check_samples)
        manifest = writer.finish()
    _log.info("%s: %d samples, argmax agreement %.4f", settings.out, manifest.num_samples, agreement)
    return manifest


def cache_identity(target: Target, settings: CacheSettings) -> Manifest:
    """What the cache is of: its manifest without counts. Raises `ConfigError` for what the target cannot do."""
    check_capture(target, settings.target_layer_ids, settings.max_length)
    return states_of(target, settings.target_layer_ids, settings.hidden_dtype)


def check_capture(target: Target, target_layer_ids: tuple[int, ...], max_length: int) -> None:
    """Raise `ConfigError` for layers or lengths that the target does not have."""
    num_layers, limit = target.config.num_hidden_layers, target.config.max_position_embeddings
    if max_length > limit:
        raise ConfigError(f"max_length: {max_length} is beyond the {limit} positions of {target.name}")
    if bad := [i for i in target_layer_ids if not -1 <= i < num_layers - 1]:
        raise ConfigError(
            f"target_layer_ids: {bad[0]} is outside -1..{num_layers - 2} of {target.name}, whose layers count from 0 "
            "(the last one cannot be tapped)"
        )


def states_of(target: Target, target_layer_ids: tuple[int, ...], hidden_dtype: HiddenDtype) -> Manifest:
    """The manifest, without counts, of a cache of the target's states."""
    return Manifest(
        target_layer_ids=target_layer_ids,
        hidden_dtype=hidden_dtype,
        hidden_size=target.config.hidden_size,
        target_model_name_or_path=target.name,
        tokenizer_digest=target.tokenizer_digest,
        chat_template_digest=target.chat_template_digest,
        target_revision=target.digest,
        ends_digest=target.ends_digest,
        vocab_size=target.config.vocab_size,
    )


def _windows(rows: Iterable[CacheRow], size: int) -> Iterator[list[NumberedRow]]:
    numbered = ((number, row.token_ids, row.loss_mask) for number, row in enumerate(rows))
    while window := list(islice(numbered, size)):
        yield window


def _is_written(writer: CacheWriter, row: NumberedRow) -> bool:
    number, token_ids, loss_mask = row
    if number not in writer:
        return False
    stored = writer.read(number)
    if stored.token_ids.tolist() != list(token_ids) or stored.loss_mask.tolist() != list(loss_mask):
        raise CacheError(
            f"{writer.path}: sample {number} was written for another row: give the same conversations in the same "
            "order, new ones at the end, or choose another directory"
        )
    return True


def _check(writer: CacheWriter, sample_ids: list[int], capture: Capture, count: int) -> float:
    """Compare up to `count` of the written samples, evenly spread, with the target's own states."""
    step = max(1, len(sample_ids) // count)
    return check_samples((writer.read(i) for i in sample_ids[::step][:count]), capture)
