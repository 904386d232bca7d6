"""Base of all settings: frozen values, an unknown key is an error, TOML in, digest out."""

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from dspark.errors import ConfigError


class Settings(BaseModel):
    """Base class of every group of settings. Subclasses declare fields; each default is written there once.

    Instances cannot be changed: derive another one with `replace`. Values that follow from others are properties.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Self:
        """Check `data` and build the settings.

        `where` names the origin of the data (a file, a command line) and opens the message of the `ConfigError`
        raised for an unknown key, a missing one, or a value of the wrong type or range.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(f"{where}: {_describe(cls, error)}") from None

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read settings from a TOML file. Raises `ConfigError` naming the file and the field or line at fault."""
        return cls.from_dict(read_toml(path), where=str(path))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, checked like new ones. Raises `ConfigError`."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return self.from_dict(fields | changes, where=type(self).__name__)

    def digest(self) -> str:
        """Return 16 hex digits that identify the values: the start of the SHA-256 of their canonical JSON."""
        canonical = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"), default=_plain)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises `ConfigError` naming the file and, for malformed TOML, the line."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # both malformed TOML and bytes that are not UTF-8
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _plain(value: object) -> object:
    """Stand in for a value that JSON lacks; a set has no order of its own, so it gets one."""
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def secret(field: str, variable: str | None) -> str | None:
    """What an environment variable holds that setting `field` names; None where it names none.

    Raises ConfigError where the variable is not set, or empty.
    """
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{field}: the environment variable {variable} is not set")
    return value


def _describe(cls: type[BaseModel], error: ValidationError) -> str:
    """Put the first fault in one line: the field's dotted name, what is wrong, and how many faults follow."""
    first, *others = error.errors(include_url=False)
    field = ".".join(str(part) for part in first["loc"])
    match first["type"]:
        case "extra_forbidden":
            problem = "unknown setting" + _suggestion(cls, first["loc"])
        case "missing":
            problem = "missing: give it a value"
        case "value_error":
            problem = str(first["ctx"]["error"])
        case _:
            problem = f"{first['msg']}, got {first['input']!r}"
    more = f" (and {len(others)} more)" if others else ""
    return f"{field}: {problem}{more}" if field else f"{problem}{more}"


def _suggestion(cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Name the closest known key, or all of them, for the unknown key at `location`."""
    for part in location[:-1]:
        inner = cls.model_fields[str(part)].annotation if str(part) in cls.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ""
        cls = inner
    known = list(cls.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known) or 'none'}"
