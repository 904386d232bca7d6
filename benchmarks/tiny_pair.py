"""A tiny target and a tiny drafter, trained in seconds: a healthy pair to plant faults in.

The target learns a made-up language in which the next letter follows from the last one and, for most letters, from the
one three places before it. So a drafter must read the right layer at the right position to guess it.

    python benchmarks/tiny_pair.py DIRECTORY      # writes DIRECTORY/target and DIRECTORY/drafter

Shapes: B texts, T letters.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from common import Samples
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from dspark.cache.capture import Capture
from dspark.files import atomic_path
from dspark.models.attention import AttentionBatch
from dspark.models.config import DecoderConfig, RopeConfig
from dspark.models.decoder import Decoder
from dspark.models.states import DecoderStates
from dspark.models.target import load_target
from dspark.models.weights import save_decoder
from dspark.stages import exporter
from dspark.training.build import drafter_config, new_drafter
from dspark.training.config import TrainSettings
from dspark.training.parallel import join_ranks
from dspark.training.selection import keep
from dspark.training.trainer import Trainer

SPECIALS = ("<|end|>", "<|mask|>", "<|pad|>", "<unk>")
LETTERS = "abcdefghijklmnopqrstuvwx"
EOS, MASK = 0, 1
LAG = 3  # the letter so many places before the last one decides, too
TAPS = (0, 1)
TARGET_STEPS, DRAFTER_STEPS = 120, 150


class Language(NamedTuple):
    """The next letter is maps[c][the letter LAG before the last one], where c is the last letter's class.

    The maps give letters of two different halves of the alphabet: so who knows the last letter, as a sequential head
    does, knows the half, and who knows the context knows one letter of each half.
    """

    maps: Tensor  # i64 [2, letters]

    @classmethod
    def random(cls, seed: int) -> Language:
        generator = torch.Generator().manual_seed(seed)
        half = len(LETTERS) // 2
        maps = [torch.randperm(len(LETTERS), generator=generator) % half + c * half for c in range(2)]
        return cls(torch.stack(maps))

    def texts(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Token ids [count, length] that begin with random letters."""
        x = torch.randint(0, len(LETTERS), (count, LAG + 1), generator=generator)
        while x.shape[1] < length:
            last, before = x[:, -1], x[:, -1 - LAG]
            following = self.maps[last % 2, before]
            x = torch.cat([x, following[:, None]], dim=1)
        return x + len(SPECIALS)


class Row(NamedTuple):
    """One training text: all letters that the language decides are supervised."""

    token_ids: list[int]
    loss_mask: list[int]


def tokenizer(letters: str = LETTERS) -> PreTrainedTokenizerFast:
    """One token a letter, in the order given; no chat template."""
    vocab = {token: index for index, token in enumerate((*SPECIALS, *letters))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", unk_token="<unk>")


def train_target(language: Language) -> Decoder:
    """A four-layer Llama that has learned the language."""
    torch.manual_seed(0)
    vocab_size = len(SPECIALS) + len(LETTERS)
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope=RopeConfig(rope_theta=100.0),
        max_position_embeddings=128,
        layer_types=("full_attention",) * 4,
        eos_token_ids=(EOS,),
    )
    decoder = Decoder(config)
    for name, weight in decoder.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=1.0 if name == "embed_tokens.weight" else weight.shape[1] ** -0.5)
    generator, count, length = torch.Generator().manual_seed(1), 16, 28
    positions, tables = torch.arange(length).expand(count, -1), [[1 + b] for b in range(count)]
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=TARGET_STEPS, pct_start=0.1)
    for _ in range(TARGET_STEPS):
        ids = language.texts(count, length, generator)
        batch = AttentionBatch.build(positions, [length] * count, tables, 32)
        logits = decoder.logits(decoder(ids, batch, decoder.new_cache(count + 1, 32)).hidden[:, LAG:-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, LAG + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return decoder.requires_grad_(False).eval()


def train_drafter(language: Language, target_path: Path, out: Path) -> None:
    """A DSpark drafter of two layers for the target, trained by the training loop and written as a checkpoint."""
    target = load_target(target_path, "float32", pack=False)
    rows = [
        Row(ids, [0] * (LAG + 1) + [1] * (len(ids) - LAG - 1))
        for ids in language.texts(96, 40, torch.Generator().manual_seed(2)).tolist()
    ]
    capture = Capture(DecoderStates(target.decoder), TAPS, log_normalizer=True)
    samples = Samples(capture([(i, *row) for i, row in enumerate(rows)]))
    with TemporaryDirectory() as work, join_ranks("cpu") as ranks:
        settings = TrainSettings.from_dict(
            {
                "target": str(target_path),
                "out": Path(work) / "run",
                "drafter": {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": MASK, "markov_rank": 8},
                "loss": {"ce": 1.0, "l1": 0.1, "confidence": 0.1},
                "num_anchors": 24,
                "batch_size": 6,
                "max_steps": DRAFTER_STEPS,
                "learning_rate": 3e-2,
                "compute_dtype": "float32",
                "save_every": DRAFTER_STEPS,
            },
            "tiny pair",
        )
        drafter = new_drafter(
            drafter_config(settings.drafter, target.decoder, TAPS), target.decoder, samples, settings.seed
        )
        Trainer(settings, target.decoder, drafter, samples, exporter(settings, target), ranks).run()
        keep(settings.out / "last", out)


def make_pair(directory: Path) -> None:
    """Write `directory`/target and `directory`/drafter, whole or not at all."""
    language = Language.random(seed=7)
    with atomic_path(directory) as path:
        save_decoder(train_target(language), tokenizer(), path / "target")
        train_drafter(language, path / "target", path / "drafter")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to write")
    make_pair(parser.parse_args().directory)
