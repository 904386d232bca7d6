"""The target's tokenizer: loaded fast, from a directory that holds it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark.errors import CheckpointError

Tokenizer = PreTrainedTokenizerFast

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or GGUF file.

    Raises `CheckpointError` when it is missing, damaged, or exists only in a slow form.
    """
    path = Path(path)
    options: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    directory = path.parent if options else path
    if not options and not any((path / name).exists() for name in _FILES):
        raise CheckpointError(f"{path}: holds no tokenizer (tokenizer.json)")
    try:
        if (path / "tokenizer.json").exists():
            json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))  # tokenizers says less when it is damaged
        loader = Tokenizer if _is_generic(directory) and not options else AutoTokenizer
        tokenizer = loader.from_pretrained(str(directory), local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be read ({error})") from None
    if not isinstance(tokenizer, Tokenizer):
        raise CheckpointError(f"{path}: tokenizer.json is missing; only fast tokenizers are supported")
    return tokenizer


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits that identify how text becomes ids."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits that identify which token has which id; unlike `tokenizer_digest` not how it is stored."""
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


def chat_template_digest(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits that identify the chat template; of the empty text when there is none."""
    return hashlib.sha256(str(tokenizer.chat_template or "").encode()).hexdigest()[:16]


def _is_generic(directory: Path) -> bool:
    """Whether tokenizer.json says it all, so that transformers need not look for the model's class (seconds saved)."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    return config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
