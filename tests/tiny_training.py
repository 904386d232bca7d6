"""A tiny target, samples that it really produced, and a trainer over them: for tests in and outside pytest."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.base import Drafter
from dspark.models.attention import AttentionBatch
from dspark.models.config import DecoderConfig
from dspark.models.decoder import Decoder
from dspark.training.batch import SampleSource
from dspark.training.build import drafter_config, new_drafter
from dspark.training.config import TrainSettings
from dspark.training.parallel import Ranks
from dspark.training.trainer import Trainer

VOCAB, HIDDEN, LAYERS, TAPS = 40, 32, 4, (0, 2)


class Row(NamedTuple):
    sample_id: int
    token_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    last_hidden: Tensor
    log_normalizer: Tensor | None
    post_norm: bool = False


class Samples(list[Row]):
    """Rows as a source of samples."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row.token_ids) for row in self])

    def row(self, index: int) -> Row:
        return self[index]

    def load(self, indices: Sequence[int]) -> list[Row]:
        return [self[i] for i in indices]


def make_target() -> Decoder:
    decoder = make_decoder(tied=True)
    decoder.embed_tokens.weight.mul_(2.0)
    return decoder


def make_decoder(tied: bool) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        layer_types=("full_attention",) * LAYERS,
        tie_word_embeddings=tied,
    )
    return Decoder(config).requires_grad_(False).eval()


def make_rows(target: Decoder) -> Samples:
    """24 sequences of 12-30 random tokens, the later two thirds supervised, with the target's states."""
    rng, made = np.random.default_rng(0), Samples()
    for i in range(24):
        length = int(rng.integers(12, 31))
        ids = torch.from_numpy(rng.integers(0, VOCAB, length))
        batch = AttentionBatch.build(torch.arange(length)[None], [length], [[1, 2, 3, 4]], 8)
        out = target(ids[None], batch, target.new_cache(5, 8), TAPS)
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[length // 3 :] = 1
        normalizer = target.logits(out.hidden[0]).logsumexp(-1)
        made.append(Row(i, ids.int(), mask, out.taps[0].bfloat16(), out.hidden[0].bfloat16(), normalizer))
    return made


def make_trainer(
    target: Decoder,
    rows: SampleSource,
    out: Path,
    ranks: Ranks,
    shape: dict[str, object],
    changes: dict[str, object],
    measure: Callable[[Path], float] | None = None,
) -> Trainer:
    """Eight steps of two micro-batches of four sequences, saved every third step, unless `changes` say otherwise."""
    base: dict[str, object] = {
        "cache": [],
        "out": out,
        "drafter": {"num_hidden_layers": 1, "block_size": 3, "mask_token_id": 1, "markov_rank": 4} | shape,
        "num_anchors": 8,
        "batch_size": 4,
        "accumulation": 2,
        "max_steps": 8,
        "learning_rate": 5e-3,
        "compute_dtype": "float32",
        "save_every": 3,
        "log_every": 1,
    }
    settings = TrainSettings.from_dict(base | changes, "test")
    config = drafter_config(settings.drafter, target, TAPS)
    drafter = new_drafter(config, target, rows, settings.seed, settings.recent_heads)
    return Trainer(settings, target, drafter, rows, export, ranks, measure)


def export(drafter: Drafter, path: Path) -> None:
    """What a servable checkpoint needs: every parameter, whole."""
    path.mkdir(exist_ok=True, parents=True)
    torch.save({name: p.detach().clone() for name, p in drafter.named_parameters()}, path / "drafter.pt")


def losses(out: Path) -> list[float]:
    """The loss of every step that a run logged."""
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
