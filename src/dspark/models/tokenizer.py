"""The target's tokenizer: loaded fast, from a directory that holds it."""

import hashlib
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark.errors import CheckpointError

Tokenizer = PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or GGUF file.

    Raises `CheckpointError` when it is missing, damaged, or exists only in a slow form.
    """
    path = Path(path)
    directory, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    if not options and not any((path / name).exists() for name in _FILES):
        raise CheckpointError(f"{path}: holds no tokenizer (tokenizer.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be read ({error})") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{path}: tokenizer.json is missing; only fast tokenizers are supported")
    return tokenizer


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits that identify how text becomes ids."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def chat_template_digest(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits that identify the chat template; of the empty text when there is none."""
    return hashlib.sha256(str(tokenizer.chat_template or "").encode()).hexdigest()[:16]
