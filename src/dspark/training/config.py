"""Settings of a training run. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from dspark.config import Settings
from dspark.drafters.config import Algorithm
from dspark.errors import ConfigError
from dspark.models.config import CaptureName

NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "dspark": {},
    "dflash": NO_HEADS,
    "eagle3": NO_HEADS | {"num_hidden_layers": 1},
}
"""What an algorithm fixes in the drafter's shape."""
LOSSES: Mapping[str, Mapping[str, float]] = {
    "dspark": {},
    "dflash": {"ce": 1.0, "l1": 0.0, "confidence": 0.0},
    "eagle3": {"ce": 0.0, "soft_ce": 1.0, "l1": 0.0, "confidence": 0.0},
}
"""Loss terms of an algorithm's public release, where a run names no others."""


class LossMix(Settings):
    """Weights of the loss terms; the defaults are the public DSpark release's (see `LOSSES` for the others)."""

    ce: float = 0.1
    """Cross-entropy on the true next token."""
    soft_ce: float = 0.0
    """Cross-entropy against the target's whole distribution."""
    l1: float = 0.9
    """Sum over the vocabulary of |q - p| (no one half in front)."""
    confidence: float = 1.0
    """Binary cross-entropy of the confidence head against 1 - L1/2."""
    decay: float = 4.0
    """Slot k weighs exp(-k / decay); for EAGLE-3 set `step_loss_decay` of the drafter instead."""


class DrafterShape(Settings):
    """The drafter to train; what is not named here is the target's, or fixed by the algorithm (`SHAPES`)."""

    algorithm: Algorithm = "dspark"
    num_hidden_layers: int = 2
    intermediate_size: int | None = None
    """None: the target's."""
    num_attention_heads: int | None = None
    """None: the target's."""
    num_key_value_heads: int | None = None
    """None: the target's. A narrow target leaves little room for the context in its few heads; more cost little."""
    target_layer_ids: tuple[int, ...] = ()
    """Empty: those of the cache; without a cache five, spread evenly."""
    block_size: int = 7
    mask_token_id: int | None = None
    """A token that the target never writes; block drafters need one."""
    sample_from_anchor: bool = True
    block_attention: Literal["bidirectional", "causal"] = "bidirectional"
    markov_rank: int = 64
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: int | None = None
    """Keep the most frequent tokens of the training answers; None keeps all."""
    ttt_length: int = Field(7, ge=1)
    """EAGLE-3: steps of training-time test, and so drafts of a round."""
    step_loss_decay: float = Field(0.8, gt=0, le=1)
    """EAGLE-3: step k weighs step_loss_decay ** k."""
    own_lm_head: bool = False
    """EAGLE-3: train an LM head, which starts from the target's rows, instead of using those frozen."""

    @model_validator(mode="before")
    @classmethod
    def _fixed_by_the_algorithm(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {**SHAPES.get(str(data.get("algorithm", "dspark")), {}), **data}


class HeldOut(Settings):
    """Measuring the drafter while it is trained: real speculative decoding of prompts that it was not trained on."""

    prompts: tuple[Path, ...]
    """Prompt files (JSON lines)."""
    limit: int = Field(16, gt=0)
    """Prompts of each file."""
    max_tokens: int = Field(64, gt=1)
    temperature: float = Field(0.0, ge=0)
    every: int = Field(500, gt=0)
    """Optimizer steps between measurements; one more is made at the end."""
    patience: int | None = Field(None, gt=0)
    """Stop after so many measurements in a row without a better one; None: never."""


class TrainSettings(Settings):
    """One training run."""

    target: str = "smollm2-135m"
    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """The target's weights, and its arithmetic where it runs beside the drafter."""
    capture: CaptureName = Field("auto", exclude_if=lambda value: value == "auto")
    """What runs the target: our decoder, transformers, or (auto) transformers where our decoder does not know it."""
    target_ranks: int = Field(0, ge=0, exclude_if=lambda value: value == 0)
    """Streamed and hybrid, under torchrun: so many processes, the last ones, run the target alone and send its states
    to the others, which train. 0: each process runs the target beside its drafter."""
    features: Literal["cached", "streamed", "hybrid"] = "cached"
    """Where the target's states come from: read from `cache`; made for each micro-batch; made once and kept on disk as
    far as `max_cache_bytes` goes."""
    cache: tuple[Path, ...] = ()
    """Cached: caches to read. Hybrid: the one directory to fill."""
    conversations: tuple[Path, ...] = ()
    """Streamed and hybrid: JSON-lines files; rows hold messages, conversations or turns."""
    max_cache_bytes: int | None = Field(None, gt=0)
    """Hybrid: what the cache may take on disk, over all processes."""
    hidden_dtype: Literal["bfloat16", "int8"] = "bfloat16"
    """Hybrid: how states are stored."""
    max_length: int = Field(2048, ge=2)
    """Streamed and hybrid: tokens kept of a conversation."""
    limit: int | None = Field(None, ge=1)
    """Streamed and hybrid: use the first so many conversations; None: all."""
    skip_bad: bool = False
    """Streamed and hybrid: leave malformed lines out instead of stopping."""
    batch_tokens: int = Field(8192, ge=1)
    """Streamed and hybrid: rows of one forward of the target, padding counted; one conversation always fits."""
    out: Path
    """Directory of states, metrics and the servable drafter; a run found there is continued."""
    drafter: DrafterShape
    loss: LossMix = LossMix()
    init_from: Path | None = None
    """A drafter checkpoint to start from instead of random weights; heads that it lacks start fresh."""
    recent_heads: int = Field(0, ge=0, exclude_if=lambda value: value == 0)
    """Block drafters, from random weights: so many key/value heads of the first layer begin by looking at the newest
    context row, as in the shipped drafter. docs/results.md tells what it gained: little. 0: all begin at random."""
    freeze: tuple[str, ...] = ()
    """Beginnings of parameter names that stay as they are, such as "backbone" or "markov_head"."""
    held_out: HeldOut | None = None
    """Keeps the best checkpoint under `out/best`."""
    num_anchors: int = Field(512, gt=0)
    """Anchors drawn per sequence and epoch."""
    batch_size: int = Field(8, gt=0)
    """Conversations per micro-batch."""
    tokens_per_row: int | None = Field(None, ge=1)
    """Lay short conversations of a micro-batch one behind the other in rows of at most so many tokens; None: one a
    row. The losses are the same."""
    accumulation: int = Field(1, gt=0)
    """Micro-batches per optimizer step, over all processes."""
    epochs: int = Field(10, gt=0)
    max_steps: int | None = None
    """Stop (and end the schedule) after so many optimizer steps; None: all epochs."""
    learning_rate: float = Field(6e-4, gt=0)
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1)
    warmup_ratio: float = Field(0.04, ge=0, le=1)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Autocast type of forward and backward; master weights are always float32."""
    attention: Literal["auto", "flex", "matmul"] = "auto"
    """How draft layers attend: `flex`, one fused kernel that keeps no scores, for CUDA; `matmul`, plain products, for
    any device. auto: flex where the GPU has it."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each draft layer, and run it again in backward: less memory, more time."""
    compile: Literal["inductor", "eager"] | None = None
    """Run the draft layers through torch.compile with this backend; None: as they are. Meant for CUDA; eager
    traces without making code, to find faults."""
    seed: int = 0
    save_every: int = Field(200, gt=0)
    """Optimizer steps between checkpoints."""
    log_every: int = Field(10, gt=0)
    wandb_project: str | None = None
    """Log to this Weights & Biases project as well; needs wandb."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    """CPU threads; None: torch's default."""

    @model_validator(mode="before")
    @classmethod
    def _losses_of_the_algorithm(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        drafter, loss = data.get("drafter"), data.get("loss", {})
        if not isinstance(drafter, Mapping) or not isinstance(loss, Mapping):
            return data
        algorithm = str(drafter.get("algorithm", "dspark"))
        if algorithm == "eagle3" and "decay" in loss:
            raise ValueError("loss.decay is for block drafters: with eagle3 set drafter.step_loss_decay")
        return {**data, "loss": {**LOSSES.get(algorithm, {}), **loss}}

    @property
    def slot_decay(self) -> float:
        """Slot k weighs exp(-k / slot_decay), whatever the algorithm."""
        if self.drafter.algorithm != "eagle3":
            return self.loss.decay
        ratio = self.drafter.step_loss_decay
        return math.inf if ratio == 1 else -1 / math.log(ratio)

    def check_features(self) -> None:
        """Raise `ConfigError` where the settings do not say where samples come from, or say it twice."""
        hybrid, cached = self.features == "hybrid", self.features == "cached"
        if cached != (not self.conversations):
            raise ConfigError(
                f"conversations: features = {self.features!r} " + ("reads none" if cached else "needs them")
            )
        if cached and not self.cache:
            raise ConfigError("cache: missing: name a cache, or set features to streamed or hybrid")
        if not cached and len(self.cache) != hybrid:
            raise ConfigError(f"cache: features = {self.features!r} takes {'one directory' if hybrid else 'none'}")
        if hybrid != (self.max_cache_bytes is not None):
            raise ConfigError(f"max_cache_bytes: features = {self.features!r} {'needs it' if hybrid else 'has none'}")
        if cached and self.target_ranks:
            raise ConfigError("target_ranks: features = 'cached' runs no target: leave it out")
        if self.recent_heads and (self.init_from is not None or self.drafter.algorithm == "eagle3"):
            raise ConfigError("recent_heads: for block drafters that start from random weights: leave it out")
        if self.target_dtype == "bfloat16" and self.compute_dtype != "bfloat16":
            raise ConfigError("target_dtype: bfloat16 needs compute_dtype bfloat16")

    def identity(self) -> str:
        """A digest of what decides the losses; runs with the same one may continue each other."""
        places: dict[str, Any] = {"out": Path(), "cache": (), "conversations": (), "features": "cached"}
        places |= {"target_ranks": 0, "capture": "auto"}
        pace: dict[str, Any] = {"save_every": 1, "log_every": 1, "num_threads": None, "device": "auto"}
        memory: dict[str, Any] = {"max_cache_bytes": None, "batch_tokens": 1, "tokens_per_row": None}
        execution: dict[str, Any] = {"attention": "auto", "activation_checkpointing": False, "compile": None}
        return self.replace(**places, **pace, **memory, **execution, wandb_project=None).digest()
