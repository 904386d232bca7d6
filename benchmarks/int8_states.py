"""What 8-bit states cost a drafter: bytes, and the length of the drafts that it would have accepted.

    python benchmarks/int8_states.py                                       # answers are generated first
    python benchmarks/int8_states.py --conversations answers.jsonl --rows 16 --json

The drafter drafts at every answer position, fed with the true tokens before each draft (as in training), from features
as the target made them, after a bfloat16 cache and after an int8 one; the target's law is the exact one every time.
`accept`: probability that draft k is accepted at temperature 1, by k. `tau`: expected accepted length, bonus counted;
`tau_greedy`: the same where both take their most likely token. Bar: `int8_over_bfloat16_bytes` <= 0.52.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from cache_bytes import num_bytes, stored_as
from common import SETS, read_prompts

from dspark.cache.capture import batches
from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Message, read_conversations
from dspark.data.template import SkipReason, render_all
from dspark.drafters.base import Drafter
from dspark.drafters.layouts.deepspec import read_drafter
from dspark.engine.config import EngineSettings, ModelOptions
from dspark.engine.engine import Engine
from dspark.engine.pair import drafter_path
from dspark.engine.request import SamplingParams
from dspark.log import progress
from dspark.models.target import Target, load_target
from dspark.training.batch import collate
from dspark.training.config import LossMix
from dspark.training.metrics import MetricSums
from dspark.training.objective import Weighting, micro_objective

WIDTHS = ("exact", "bfloat16", "int8")
DECAY = 4.0
MAX_LENGTH = 768

Row = tuple[int, Sequence[int], Sequence[int]]  # number, token ids, loss mask


class States(NamedTuple):
    """A row with the target's states, as the trainer's batches take them."""

    sample_id: int
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    last_hidden: torch.Tensor
    log_normalizer: torch.Tensor | None = None
    post_norm: bool = False


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = load_target(args.target, "float32", pack=False)
    path = drafter_path(ModelOptions.from_dict({"target": args.target, "drafter": args.drafter}, "options"))
    assert path is not None, "name a drafter that fits the target"
    drafter = read_drafter(path, target.decoder, target.digest).requires_grad_(False)
    rows = generated(target, args.tokens) if args.conversations is None else read(target, args.conversations, args.rows)
    found = measure(target, drafter, rows)
    lengths = np.array([len(token_ids) for _, token_ids, _ in rows], dtype=np.int64)
    shape = (len(drafter.config.target_layer_ids), target.config.hidden_size)
    share = num_bytes(lengths, *shape, "int8") / num_bytes(lengths, *shape, "bfloat16")
    result: dict[str, object] = {"tokens": int(lengths.sum()), "anchors": int(found["exact"].sums["anchors"][0])}
    result["int8_over_bfloat16_bytes"] = round(share, 4)
    for width in WIDTHS:
        figures = found[width].results()
        positions = range(1, drafter.num_drafts + 1)
        result[width] = {
            "tau": round(figures["tau"], 4),
            "tau_greedy": round(figures["tau_greedy"], 4),
            "accept": [round(figures[f"accept/{k}"], 4) for k in positions],
        }
    exact = found["exact"].results()
    result |= {
        f"{width}_over_exact_tau": round(found[width].results()["tau"] / exact["tau"], 4) for width in WIDTHS[1:]
    }
    if args.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:26} {value}")


def measure(target: Target, drafter: Drafter, rows: list[Row]) -> dict[str, MetricSums]:
    """Metric sums of teacher-forced drafts at every anchor of the rows, by what the features went through."""
    source, taps = target.states(), drafter.config.target_layer_ids
    index = torch.full((target.config.vocab_size,), -1)
    index[drafter.token_ids if drafter.token_ids is not None else slice(None)] = torch.arange(
        len(drafter.lm_head_weight)
    )
    weighting = Weighting(LossMix(soft_ce=1.0), DECAY, None if drafter.token_ids is None else index)
    found = {width: MetricSums() for width in WIDTHS}
    with torch.inference_mode(), progress(len(rows), "int8 states", "row") as bar:
        for group in batches(rows, 1):
            (number, token_ids, loss_mask), (own,) = group[0], source([group[0][1]], taps)
            for width in WIDTHS:
                taken = own.taps if width == "exact" else stored_as(own.taps, width)
                mask = torch.tensor(loss_mask, dtype=torch.uint8)
                sample = States(number, torch.tensor(token_ids), mask, taken, own.last_hidden)
                batch = collate([sample], len(token_ids), drafter.num_drafts, np.random.default_rng(0))
                objective = micro_objective(drafter, target.model, batch, weighting)
                found[width].add(objective.metrics, objective.loss, 1.0, batch)
            bar.update(1)
    return found


def read(target: Target, path: Path, count: int) -> list[Row]:
    """The first rows of a file of answered conversations."""
    skipped: Counter[SkipReason] = Counter()
    rendered = render_all(ChatTemplate(target.tokenizer), read_conversations([path]), MAX_LENGTH, skipped)
    return [(i, row.token_ids, row.loss_mask) for i, row in enumerate(islice(rendered, count))]


def generated(target: Target, tokens: int) -> list[Row]:
    """The target's own answers, drawn at temperature 1, to the prompts of the other benchmarks."""
    chat = ChatTemplate(target.tokenizer)
    prompts = [
        chat.prompt_ids([Message("user", text)]) for texts in read_prompts(None, SETS, 4).values() for text in texts
    ]
    prompts = [ids for ids in prompts if len(ids) + tokens <= MAX_LENGTH]
    engine = Engine(target, None, EngineSettings(max_batch=len(prompts), max_length=MAX_LENGTH))
    params = [SamplingParams(max_tokens=tokens, temperature=1.0, seed=i) for i in range(len(prompts))]
    answers = [completion.token_ids for completion in engine.generate(prompts, params)]
    return [
        (i, [*prompt, *answer], [0] * len(prompt) + [1] * len(answer))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--conversations", type=Path, help="answered conversations; default: answers made here")
    parser.add_argument("--rows", type=int, default=16, help="of the file")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer made here")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    main()
