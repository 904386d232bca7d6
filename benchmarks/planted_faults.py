"""Faults planted in a healthy pair, one at a time, and whether the doctor names each.

    python benchmarks/planted_faults.py               # trains a tiny pair in seconds; prints found and total as JSON
    python benchmarks/planted_faults.py --pair DIRECTORY

A fault sits in the files where they can express it; otherwise in the loaded models, as a wrong port would have it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_pair import LETTERS, MASK, make_pair, tokenizer
from torch import Tensor

from dspark.engine.config import ModelOptions
from dspark.evaluation.doctor.config import DoctorOptions
from dspark.evaluation.doctor.examine import diagnose, examine
from dspark.evaluation.doctor.pair import Pair, open_pair
from dspark.evaluation.doctor.report import Diagnosis, Fault
from dspark.evaluation.doctor.variants import SkippedNorm
from dspark.log import progress
from dspark.models.attention import AttentionBatch
from dspark.models.config import RopeConfig
from dspark.models.rope import RotaryEmbedding

PROMPTS = ("abcd", "hgfd")  # as long as the language looks back
ANSWER_TOKENS = 36  # about as long as the texts that the tiny drafter was trained on
WEIGHTS, CONFIG = Path("drafter/model.safetensors"), Path("drafter/config.json")

Files = Callable[[Path], None]  # changes the files of a pair's directory
Tampering = Callable[[Pair], None]  # changes a pair that has been loaded


class Plant(NamedTuple):
    """How a fault gets into a pair, and the name that the doctor must give it."""

    fault: Fault
    files: Files | None = None
    tampering: Tampering | None = None


def set_fields(path: Path, **fields: Any) -> Files:
    """Change fields of a JSON file of the pair."""

    def change(directory: Path) -> None:
        raw = json.loads((directory / path).read_text(encoding="utf-8"))
        (directory / path).write_text(json.dumps(raw | fields), encoding="utf-8")

    return change


def both(one: Files, other: Files) -> Files:
    """Two changes that make one fault."""

    def change(directory: Path) -> None:
        one(directory)
        other(directory)

    return change


def change_tensors(change: Callable[[dict[str, Tensor]], None]) -> Files:
    """Change the drafter's tensors."""

    def files(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return files


def shuffle_head(tensors: dict[str, Tensor]) -> None:
    """The head of a drafter whose vocabulary has another order."""
    order = torch.randperm(len(tensors["markov_head.markov_w1.weight"]), generator=torch.Generator().manual_seed(3))
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][order].contiguous()


def exchange_head(tensors: dict[str, Tensor]) -> None:
    """The two matrices of the head under each other's name."""
    one, two = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    tensors[one], tensors[two] = tensors[two], tensors[one]


def other_tokenizer(directory: Path) -> None:
    """The tokenizer of a model with the same letters in another order."""
    tokenizer(LETTERS[::-1]).save_pretrained(str(directory / "target"))


def serve_rows(change: Callable[[AttentionBatch], AttentionBatch]) -> Tampering:
    """Lay the engine's draft rows out otherwise."""

    def tampering(pair: Pair) -> None:
        layout = pair.serving.draft_batch
        pair.serving.draft_batch = lambda *where: change(layout(*where))  # type: ignore[method-assign]

    return tampering


def skip_final_norm(pair: Pair) -> None:
    """Logits of the target's states before its final norm."""
    pair.target.decoder.norm = SkippedNorm(pair.target.decoder.norm)  # type: ignore[assignment]


def skip_draft_norm(pair: Pair) -> None:
    """Logits of the engine's drafts before the drafter's final norm."""
    pair.serving.backbone.norm = SkippedNorm(pair.serving.backbone.norm)  # type: ignore[assignment]


def rotate_target(pair: Pair) -> None:
    """A target that turns its keys otherwise than its config says."""
    rope, head_dim = RopeConfig.from_dict(SCALED, "planted"), pair.target.config.head_dim
    pair.target.decoder.rotaries[0] = RotaryEmbedding(rope, head_dim)


def lose_commits(pair: Pair) -> None:
    """Rounds whose context lacks all committed rows but the first two; a prefill, from position 0, is whole."""
    inject = pair.serving.inject

    def injected(features: Tensor, next_ids: Tensor, positions: Tensor, *where: Any) -> None:
        keep, begin, previous = [], 0, -2
        for position in positions.tolist():
            begin = begin if position == previous + 1 else position
            keep.append(float(begin == 0 or position < begin + 2))
            previous = position
        inject(features * torch.tensor(keep)[:, None, None], next_ids, positions, *where)

    pair.serving.inject = injected  # type: ignore[method-assign]


def capture_next_layers(pair: Pair) -> None:
    """The engine captures the layers after the ones that the drafter reads."""
    config = pair.serving.config
    pair.serving.config = config.replace(target_layer_ids=tuple(layer + 1 for layer in config.target_layer_ids))


SCALED = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
SCALED_TARGET = set_fields(Path("target/config.json"), rope_parameters=SCALED)
TEN: dict[str, Plant] = {
    "wrong layer": Plant("wrong layer", set_fields(CONFIG, target_layer_ids=[1, 2])),
    "wrong slot convention": Plant("wrong slot convention", set_fields(CONFIG, sample_from_anchor=False)),
    "shifted position": Plant(
        "shifted position", tampering=serve_rows(lambda batch: replace(batch, positions=batch.positions + 1))
    ),
    "causal mask": Plant(
        "causal mask",
        tampering=serve_rows(lambda batch: replace(batch, visible_end=batch.positions + 1, _biases={})),
    ),
    "swapped head": Plant("swapped head", change_tensors(shuffle_head)),
    "other tokenizer": Plant("other tokenizer", other_tokenizer),
    "missing tensor": Plant(
        "missing tensor", change_tensors(lambda t: t.__delitem__("layers.0.self_attn.q_norm.weight"))
    ),
    "scaled rope": Plant("scaled rope", set_fields(CONFIG, rope_parameters=SCALED)),
    "wrong mask id": Plant("wrong mask id", set_fields(CONFIG, mask_token_id=MASK + 1)),
    "norm skipped": Plant("norm skipped", tampering=skip_final_norm),
}
FURTHER: dict[str, Plant] = {
    "layer ids that count the embeddings": Plant("wrong layer", set_fields(CONFIG, target_layer_ids=[-1, 0])),
    "wrong layer in the engine": Plant("wrong layer", tampering=capture_next_layers),
    "rows one position early": Plant(
        "shifted position", tampering=serve_rows(lambda batch: replace(batch, positions=batch.positions - 1))
    ),
    "exchanged head": Plant("swapped head", change_tensors(exchange_head)),
    "scaled rope of the target": Plant("scaled rope", SCALED_TARGET),
    "scaled rope of a target without record": Plant("scaled rope", both(SCALED_TARGET, set_fields(CONFIG, dspark={}))),
    "draft norm skipped in the engine": Plant("norm skipped", tampering=skip_draft_norm),
    "commits that lose rows": Plant("serving path", tampering=lose_commits),
    "a target rotated otherwise than its config says": Plant("scaled rope", tampering=rotate_target),
}


def doctor_options(directory: Path, transformers: bool = True) -> DoctorOptions:
    """The doctor's options for a pair's directory."""
    model = ModelOptions(target=str(directory / "target"), drafter=str(directory / "drafter"), dtype="float32")
    return DoctorOptions(
        model=model,
        prompt=PROMPTS,
        answer_tokens=ANSWER_TOKENS,
        transformers=transformers,
    )


def plant(what: Plant, pair: Path, out: Path, transformers: bool = True) -> Diagnosis:
    """Copy the healthy pair to `out`, plant one fault in the copy, and let the doctor examine it."""
    shutil.copytree(pair, out)
    if what.files is not None:
        what.files(out)
    options = doctor_options(out, transformers)
    if what.tampering is None:
        return examine(options)
    opened, checks = open_pair(options.model)
    assert opened is not None, "a fault of the loaded models needs models that load"
    what.tampering(opened)
    return diagnose(opened, checks, options)


def doctor_found(pair: Path | None = None) -> dict[str, Any]:
    """Plant the ten faults one at a time; `found` counts those that the doctor names as they are called.

    `pair` is a directory of `make_pair`; None trains one. The healthy pair is examined, too.
    """
    with TemporaryDirectory() as work:
        if pair is None:
            pair = Path(work) / "pair"
            make_pair(pair)
        named: dict[str, str | None] = {}
        with progress(len(TEN) + 1, "planted faults", "pair") as bar:
            healthy = examine(doctor_options(pair)).first is None
            bar.update(1)
            for number, (name, what) in enumerate(TEN.items()):
                first = plant(what, pair, Path(work) / f"planted-{number}").first
                named[name] = None if first is None else first.fault
                bar.update(1)
    found = sum(named[name] == what.fault for name, what in TEN.items())
    return {"found": found, "total": len(TEN), "healthy_pair_passes": healthy, "named": named}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, help="directory of tiny_pair.py; default: train one")
    print(json.dumps(doctor_found(parser.parse_args().pair)))


if __name__ == "__main__":
    main()
