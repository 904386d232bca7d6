"""Settings of a cache build. Imports no torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dspark.config import Settings
from dspark.models.config import CaptureName


class CacheSettings(Settings):
    """Which conversations to run through which target, and what to keep of it."""

    target: str = "smollm2-135m"
    """Built-in name, directory, GGUF file or hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """The target's weights and arithmetic, whatever `hidden_dtype` is."""
    capture: CaptureName = "auto"
    """What runs the target: our decoder, transformers, or (auto) transformers where our decoder does not know it."""
    conversations: tuple[Path, ...] = Field(min_length=1)
    """JSON-lines files; rows hold messages, conversations or turns."""
    out: Path
    """Directory of the cache; a build that was cut off continues there."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Tapped layers, counted from 0; -1 taps the embeddings. The last layer cannot be tapped."""
    max_length: int = Field(2048, ge=2)
    """Tokens kept of a conversation."""
    limit: int | None = Field(None, ge=1)
    """Use the first so many conversations; None: all."""
    hidden_dtype: Literal["bfloat16", "int8"] = "bfloat16"
    """How states are stored; int8, with a scale for each token and layer, halves the bytes."""
    log_normalizer: bool = True
    """Store the logsumexp of the target's logits, which the trainer needs for a reduced draft vocabulary."""
    batch_tokens: int = Field(4096, ge=1)
    """Rows of one prefill, padding counted; one conversation always fits."""
    window: int = Field(1024, ge=1)
    """Conversations sorted by length together, so that a batch holds equal lengths."""
    shard_bytes: int = Field(2 << 30, ge=1)
    """A new shard file begins where the last one would grow beyond this."""
    check_samples: int = Field(16, ge=1)
    """Samples compared with the target's own states, at the beginning and again at the end."""
    skip_bad: bool = False
    """Leave malformed lines out instead of stopping."""
