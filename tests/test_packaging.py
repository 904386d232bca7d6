"""The files that deployments start from: they name what is there, and settings that are read."""

import configparser
import re
import tomllib
from pathlib import Path

import pytest

from dspark.errors import DsparkError

ROOT = Path(__file__).parents[1]


def test_the_image_copies_what_is_there_and_not_ignored() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in kept)
    assert re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE) == ["wheel", "base", "cuda", "cpu"]
    assert re.findall(r"^USER (\w+)$", text, re.MULTILINE) == ["dspark"] * 2  # neither image runs as root


def test_the_unit_waits_for_the_drain_and_gives_up_on_bad_settings() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "dspark.service")
    settings = tomllib.loads((ROOT / "deploy" / "serve.toml").read_text())
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > settings["limits"]["drain_seconds"]
    assert int(service["RestartPreventExitStatus"]) == DsparkError.exit_code
    assert service["ExecStart"].endswith(" serve /etc/dspark/serve.toml")


def test_the_settings_are_read() -> None:
    config = pytest.importorskip("dspark.server.config", reason="the server is not there")
    settings = config.ServeSettings.from_toml(ROOT / "deploy" / "serve.toml")
    assert not settings.is_public
