"""The files that deployments start from: they name what is there, and settings that are read."""

import configparser
import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from dspark.errors import DsparkError

ROOT = Path(__file__).parents[1]

# What PyPI's CUDA build of torch requires to the digit, as its page there says. The build for processors alone, which
# these tests may run with, does not say it.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def pins() -> dict[str, str]:
    """Version by name, of every line of constraints.txt."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def contradicted(requirements: list[str]) -> list[str]:
    """Those of the requirements that a pin does not meet."""
    found, pinned = [], pins()
    for requirement in map(Requirement, requirements):
        pin = pinned.get(canonicalize_name(requirement.name))
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if pin is not None and applies and not requirement.specifier.contains(pin, prereleases=True):
            found.append(f"{requirement} is pinned to {pin}")
    return found


def test_the_pins_meet_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    assert not contradicted(asked)


def test_the_pins_meet_what_the_pinned_packages_ask_for() -> None:
    """As far as they are installed here, in the pinned version."""
    checked, found = 0, []
    for name, version in pins().items():
        with suppress(PackageNotFoundError):
            installed = distribution(name)
            if Version(installed.version).public == Version(version).public:
                found += [f"{name}: {problem}" for problem in contradicted(installed.requires or [])]
                checked += 1
    assert checked
    assert not found


def test_triton_is_the_one_that_torch_brings() -> None:
    pinned = pins()
    assert pinned["torch"] in TRITON_OF_TORCH, "look its Triton up, and add it"
    assert pinned["triton"] == TRITON_OF_TORCH[pinned["torch"]]


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
