"""Does a cache hold the target's own states? Compared at build time: a wrong cache trains without complaint."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dspark.cache.capture import Capture, supervised_next
from dspark.cache.format import Sample
from dspark.errors import CacheError

MIN_AGREEMENT = 0.98  # share of positions whose argmax must be the target's
_MAX_POSITIONS = 64  # of one sample
_TIE = 0.05  # standard deviations of a row of logits: closer than this, bfloat16 may order two words either way
_MAX_FOREIGN_ERROR = 0.25  # the same for caches built elsewhere, perhaps with bfloat16 arithmetic
_MAX_ERROR = 0.1  # relative error of a layer's states, median over tokens: rounding and batching stay far below


def check_states(sample: Sample) -> None:
    """Refuse states that no target has: not finite, or a layer of zeros. Raises `CacheError`."""
    for name, states in (("features", sample.features), ("last_hidden", sample.last_hidden[:, None])):
        if not bool(states.isfinite().all()):
            raise CacheError(f"sample {sample.sample_id}: {name} are not finite: try dtype float32")
        if not bool((states != 0).any(dim=2).any(dim=0).all()):
            raise CacheError(f"sample {sample.sample_id}: {name} are all zero: the capture of a layer failed")


def check_samples(samples: Iterable[Sample], capture: Capture) -> float:
    """Compare stored samples with the target run on each of them alone.

    Returns the share of supervised positions where the argmax from the stored last hidden state is the target's own.
    Raises `CacheError` when that is below `MIN_AGREEMENT`, or when a tapped layer's states are others.
    """
    agreed, compared = 0, 0
    for sample in samples:
        (own,) = capture([(sample.sample_id, sample.token_ids.tolist(), sample.loss_mask.tolist())])
        error = relative_error(sample.features, own.features)  # [S, m]
        if float(error.median(dim=0).values.max()) > _MAX_ERROR:
            raise CacheError(f"sample {sample.sample_id}: the stored features are not those of its tokens")
        positions = supervised_next(sample.loss_mask)[:_MAX_POSITIONS]
        agreed += int(same_choice(capture, sample.last_hidden[positions], own.last_hidden[positions]).sum())
        compared += len(positions)
    if agreed < MIN_AGREEMENT * compared:
        raise CacheError(
            f"the argmax of the stored states is the target's own at {agreed} of {compared} positions only: "
            "the cache would train a drafter for another target"
        )
    return agreed / compared if compared else 1.0


def relative_error(stored: Tensor, truth: Tensor) -> Tensor:
    """|stored - truth| / |truth| of each state: [..., H] -> [...]."""
    stored, truth = stored.float(), truth.float()
    size = torch.linalg.vector_norm(truth, dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    error: Tensor = torch.linalg.vector_norm(stored - truth, dim=-1) / size
    return error


def same_choice(capture: Capture, stored: Tensor, own: Tensor) -> Tensor:
    """Whether states [N, H] before the final norm lead to the same best word as the target's, near ties counted."""
    found, truth = capture.logits(stored), capture.logits(own)
    chosen = truth.gather(1, found.argmax(dim=1, keepdim=True)).squeeze(1)
    return truth.amax(dim=1) - chosen <= _TIE * truth.std(dim=1)


def check_foreign(sample: Sample, capture: Capture, where: str) -> None:
    """Refuse a cache built elsewhere whose states are not this target's, as its first sample shows.

    Raises `CacheError`, which opens with `where`.
    """
    (own,) = capture([(sample.sample_id, sample.token_ids.tolist(), sample.loss_mask.tolist())])
    last = capture.normed(own.last_hidden) if sample.post_norm else own.last_hidden
    pairs = (("features", sample.features, own.features), ("last_hidden", sample.last_hidden[:, None], last[:, None]))
    for name, stored, truth in pairs:
        error = float(relative_error(stored, truth).median(dim=0).values.max())
        if error > _MAX_FOREIGN_ERROR:
            raise CacheError(
                f"{where}: the {name} of its first sample are not this target's (relative error {error:.2f}): "
                "name the target that it was built with, and its layers counted from 0"
            )
