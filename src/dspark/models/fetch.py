"""Files fetched from the Python package index that pip uses here: resumed after a break, checked, and renamed whole."""

import base64
import json
import os
import re
import ssl
import subprocess
import sys
from dataclasses import dataclass
from html import unescape
from http.client import PARTIAL_CONTENT, REQUESTED_RANGE_NOT_SATISFIABLE, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from dspark.errors import CheckpointError
from dspark.files import sha256_file
from dspark.log import progress

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_TIMEOUT = 60.0  # seconds without a byte
_CHUNK = 1 << 18


@dataclass(frozen=True)
class PackageIndex:
    """The package indexes that pip is configured to use, the main one first, and a file of certificates for them."""

    urls: tuple[str, ...] = (DEFAULT_INDEX,)
    cert: str | None = None

    @classmethod
    def of_pip(cls) -> Self:
        """Read pip's settings; the environment wins over the files, as in pip."""
        options = _pip_options()
        extra = options.get("extra-index-url", "").split()
        return cls((options.get("index-url", DEFAULT_INDEX), *extra), options.get("cert"))

    def find(self, project: str, filename: str) -> str:
        """Return the URL of a file of a project (normalised name).

        Raises `CheckpointError` when no index can be reached or none has the file.
        """
        problems = []
        for index in self.urls:
            page = f"{index.rstrip('/')}/{project}/" + ("index.html" if index.startswith("file:") else "")
            try:
                with self._open(page, {"Accept": _ACCEPT}) as response:
                    links = _links(response.read().decode(), page)
            except (OSError, HTTPException) as error:
                problems.append(f"{index}: {error}")
                continue
            for link in links:
                if urlsplit(link).path.endswith(f"/{filename}"):
                    return link
            problems.append(f"{index}: not there")
        raise CheckpointError(f"{filename} cannot be found ({'; '.join(problems)}); PIP_INDEX_URL names another index")

    def fetch(self, url: str, path: Path, sha256: str, desc: str) -> None:
        """Fetch `url` to `path` behind a progress bar, going on from what an earlier try left in `path`.part.

        Raises `CheckpointError` when the connection breaks (what came stays, to be resumed) or the checksum is wrong.
        """
        part = path.with_name(f"{path.name}.part")
        try:
            self._append(url, part, desc)
        except HTTPError as error:
            if error.code != REQUESTED_RANGE_NOT_SATISFIABLE:  # which says that nothing is left to fetch
                raise CheckpointError(f"{url}: {error}; run again to resume") from None
        except (OSError, HTTPException) as error:
            raise CheckpointError(f"{url}: the connection broke ({error}); run again to resume") from None
        if sha256_file(part) != sha256:
            part.unlink()
            raise CheckpointError(f"{url}: wrong SHA-256, thrown away; run again, or check the index that serves it")
        part.replace(path)

    def _append(self, url: str, part: Path, desc: str) -> None:
        """Add to `part` what it lacks, or write it anew where the server cannot give the rest alone."""
        done = part.stat().st_size if part.exists() else 0
        with self._open(url, {"Range": f"bytes={done}-"} if done else {}) as response:
            done = done if response.status == PARTIAL_CONTENT else 0
            total = done + int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
            part.parent.mkdir(parents=True, exist_ok=True)
            with (
                part.open("ab" if done else "wb") as file,
                progress(total, desc, "B", initial=done, unit_scale=True) as bar,
            ):
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
                done = file.tell()
        if total is not None and done < total:
            raise ConnectionError(f"after {done} of {total} bytes")

    def _open(self, url: str, headers: dict[str, str]) -> Any:
        parts = urlsplit(url)
        if parts.username:  # https://user:password@host, as pip has it
            login = base64.b64encode(f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()).decode()
            headers = headers | {"Authorization": f"Basic {login}"}
            url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        context = ssl.create_default_context(cafile=self.cert)
        return urlopen(Request(url, headers=headers), timeout=_TIMEOUT, context=context)


def _links(page: str, base: str) -> list[str]:
    """Return the files of a simple index page, JSON (PEP 691) or HTML (PEP 503), as absolute URLs."""
    if page.lstrip().startswith("{"):
        links = [str(file["url"]) for file in json.loads(page)["files"]]
    else:
        links = [unescape(link) for link in re.findall(r"""<a\s[^>]*href=["']([^"']+)""", page)]
    return [urldefrag(urljoin(base, link)).url for link in links]


def _pip_options() -> dict[str, str]:
    """Return pip's settings by option name."""
    options: dict[str, str] = {}
    if find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for section, name, value in re.findall(r"^(\S+)\.([\w-]+)='(.*)'$", listing, flags=re.MULTILINE):
            if section in ("global", "download"):
                options[name] = value
    for variable, value in os.environ.items():
        if variable.startswith("PIP_"):
            options[variable.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options
