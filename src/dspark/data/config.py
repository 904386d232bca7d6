"""Settings of prompt files. Imports no torch."""

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from dspark.config import Settings

FIELD = re.compile(r"\{([\w.-]+)\}")  # a field of the row inside a text, dots leading into objects: {extra.question}


class PromptSet(Settings):
    """One set of prompts: where its rows are, and which of their fields say what."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Unique; names the files written, opens the ids of the rows and is their source."""
    files: tuple[Path, ...] = ()
    """Local JSON-lines and Parquet (.parquet) files; either these or `dataset`."""
    dataset: str | None = None
    """Hub id, local directory or format ("json", "parquet", "csv") that the datasets library loads."""
    subset: str | None = None
    """The data set's configuration, such as "main"."""
    split: str = "train"
    revision: str | None = None
    """Commit or tag on the hub; name one to get the same rows next year."""
    data_files: tuple[str, ...] = ()
    """Files of the data set, for a format or where not all are wanted."""
    streaming: bool = False
    """Read a hub data set row by row instead of fetching it first; together with `limit`, for large ones."""
    rename: dict[str, str] = Field({})
    """Field of the row -> "messages", "conversations" or "turns", where a conversation has another name."""
    prompt: str | None = None
    """Text of the user turn with fields in braces, "{instruction}\\n{input}"; None: the row holds a conversation."""
    system: str | None = None
    """System message before the prompt, with fields in braces or without."""
    limit: int | None = Field(None, ge=1)
    """Keep the first so many prompts; None: all."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if bool(self.files) == (self.dataset is not None):
            raise ValueError(f"{self.name}: give either files or dataset")
        given = self.model_fields_set & {"subset", "split", "revision", "data_files", "streaming"}
        if self.files and given:
            raise ValueError(f"{self.name}: {min(given)} belongs to dataset, not to files")
        if self.prompt is not None and not FIELD.search(self.prompt):
            raise ValueError(f'{self.name}: prompt names no field: write it in braces, "{{{self.prompt.strip()}}}"')
        if self.system is not None and self.prompt is None:
            raise ValueError(f"{self.name}: system goes with prompt; a conversation has its own")
        return self


class PrepareSettings(Settings):
    """Prompt files from public or local sets: without duplicates and evaluation texts, some held out."""

    out: Path
    """Directory of NAME.jsonl and NAME.held-out.jsonl of each set, and report.json."""
    sets: tuple[PromptSet, ...] = Field(min_length=1)
    """A prompt that several sets have is kept in the first one."""
    exclude: tuple[Path, ...] = ()
    """JSON-lines files whose user turns must not be repeated, evaluation sets above all."""
    held_out: float = Field(0.0, ge=0, lt=1)
    """Share of the prompts kept from training, to measure acceptance on."""
    seed: int = 0
    """Decides which prompts are held out: by their words alone, so that they stay so when sets grow."""
    skip_bad: bool = False
    """Leave malformed rows out instead of stopping."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [part.name for part in self.sets]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"sets: the name {min(twice)!r} is used twice: give each set its own")
        return self
