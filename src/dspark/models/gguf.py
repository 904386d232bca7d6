"""GGUF files."""

from pathlib import Path
from typing import Any

from torch import Tensor


class GgufFile:
    def __init__(self, path: Path) -> None:
        self.where = str(path)
        raise NotImplementedError

    def hf_config(self) -> dict[str, Any]:
        raise NotImplementedError

    def names(self) -> set[str]:
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        raise NotImplementedError
