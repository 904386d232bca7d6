"""Bytes of a target cache with bfloat16 and int8 states, and what each loses of the target's own.

    python benchmarks/cache_bytes.py --conversations answers.jsonl --rows 32

`argmax_agreement`: over supervised positions, near ties counted as a build counts them. `feature_error`: relative error
of each tapped layer, median over tokens. `total_variation`: mean distance of the next-token laws, 0 to 1.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dspark.cache.capture import Capture, batches, supervised_next
from dspark.cache.check import relative_error, same_choice
from dspark.cache.estimate import part_bytes
from dspark.cache.format import HiddenDtype, sample_flags
from dspark.cache.quantise import dequantise, quantise
from dspark.data.chat import ChatTemplate
from dspark.data.conversation import read_conversations
from dspark.data.template import SkipReason, render_all
from dspark.log import progress
from dspark.models.states import RowStates
from dspark.models.target import load_target

WIDTHS: tuple[HiddenDtype, ...] = ("bfloat16", "int8")


def main() -> None:
    args = arguments()
    target = load_target(args.target, args.dtype)
    skipped: Counter[SkipReason] = Counter()
    rows = render_all(
        ChatTemplate(target.tokenizer), read_conversations([args.conversations]), args.max_length, skipped
    )
    numbered = [(i, row.token_ids, row.loss_mask) for i, row in enumerate(islice(rows, args.rows))]
    source, layers = target.states(), tuple(args.layers)
    capture = Capture(source, layers, log_normalizer=False)
    found: dict[HiddenDtype, list[Loss]] = {width: [] for width in WIDTHS}
    with torch.inference_mode(), progress(len(numbered), "cache bytes", "row") as bar:
        for batch in batches(numbered, args.batch_tokens):
            states = source([token_ids for _, token_ids, _ in batch], layers)
            for (_, _, loss_mask), own in zip(batch, states, strict=True):
                for width in WIDTHS:
                    found[width].append(loss(own, torch.tensor(loss_mask), capture, width))
            bar.update(len(batch))
    lengths = np.array([len(token_ids) for _, token_ids, _ in numbered], dtype=np.int64)
    sizes = {width: num_bytes(lengths, len(layers), target.config.hidden_size, width) for width in WIDTHS}
    for width, losses in found.items():
        agree, distance, error = (torch.cat(column) for column in zip(*losses, strict=True))
        figures = {
            "hidden_dtype": width,
            "tokens": int(lengths.sum()),
            "bytes": sizes[width],
            "share_of_bfloat16": round(sizes[width] / sizes["bfloat16"], 4),
            "argmax_agreement": round(float(agree.float().mean()), 5),
            "total_variation": round(float(distance.mean()), 5),
            "feature_error": [round(e, 5) for e in error.median(dim=0).values.tolist()],
        }
        print(json.dumps(figures))


class Loss(NamedTuple):
    """What storing the states of one row changes."""

    agree: torch.Tensor  # bool [N], the same choice at supervised positions
    distance: torch.Tensor  # f32 [N], total variation of the next-token laws
    error: torch.Tensor  # f32 [S, m], relative error of the features


def num_bytes(lengths: np.ndarray, num_layers: int, hidden_size: int, width: HiddenDtype) -> int:
    """Bytes of a cache of rows of these lengths."""
    return sum(part_bytes(lengths, num_layers, hidden_size, sample_flags(width, log_normalizer=True)).values())


def loss(own: RowStates, loss_mask: torch.Tensor, capture: Capture, width: HiddenDtype) -> Loss:
    """Compare a row's states as the target made them with the same states after a cache."""
    positions = supervised_next(loss_mask)
    truth, stored = own.last_hidden[positions], stored_as(own.last_hidden, width)[positions]
    laws = [capture.logits(states).softmax(-1) for states in (truth, stored)]
    distance = (laws[0] - laws[1]).abs().sum(-1) / 2
    return Loss(same_choice(capture, stored, truth), distance, relative_error(stored_as(own.taps, width), own.taps))


def stored_as(states: torch.Tensor, width: HiddenDtype) -> torch.Tensor:
    """What a cache gives back."""
    states = states.bfloat16()
    return dequantise(*quantise(states)) if width == "int8" else states


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 15, 22, 28])
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    return parser.parse_args()


if __name__ == "__main__":
    main()
