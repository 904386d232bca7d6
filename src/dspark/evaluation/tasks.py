"""Task sets: prompts of the built-in tasks, from a directory or their public homes, and of any JSON-lines file."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dspark.data.prepare import read_set
from dspark.data.sources import Prompt, read_prompts
from dspark.errors import ConfigError, DataError
from dspark.evaluation.homes import BUILTIN_TASKS, TASK_NAMES, BuiltinTask
from dspark.files import atomic_path, json_line
from dspark.log import progress
from dspark.models.hub import home

OTHER = "other"  # the category of a file that names none


class Task(NamedTuple):
    """Prompts measured together. A prompt's id is the task's name and a digest of its words."""

    name: str
    category: str
    prompts: tuple[Prompt, ...]


def load_tasks(names: tuple[str, ...], data: Path | None, limit: int) -> list[Task]:
    """The first `limit` prompts of each task, in order.

    A name is a built-in one, whose rows are NAME.jsonl in `data`, or what was fetched from its home; or a JSON-lines
    file, or CATEGORY=FILE. Raises `ConfigError` for a name that is neither or comes twice, `DataError` for the rows.
    """
    tasks = [_load(name, data, limit) for name in names]
    taken = [task.name for task in tasks]
    if twice := next((name for name in taken if taken.count(name) > 1), None):
        raise ConfigError(f"tasks: {twice!r} comes twice: rename one of the files")
    return tasks


def _load(name: str, data: Path | None, limit: int) -> Task:
    builtin = {task.name: task for task in BUILTIN_TASKS}.get(name)
    category, separator, rest = name.partition("=")
    path = Path(rest if separator else name)
    if builtin is not None:
        return _task(name, builtin.category, _builtin_file(builtin, data), limit)
    if not path.is_file():
        raise ConfigError(f"tasks: {name!r} is no built-in task ({', '.join(TASK_NAMES)}) and no file")
    return _task(path.stem, category if separator else OTHER, path, limit)


def _task(name: str, category: str, path: Path, limit: int) -> Task:
    seen: Counter[str] = Counter()
    prompts = []
    for prompt in islice(read_prompts((path,)), limit):
        key = content_id(name, prompt)
        seen[key] += 1
        again = f"-{seen[key]}" if seen[key] > 1 else ""
        prompts.append(replace(prompt, id=key + again, source=name))
    if not prompts:
        raise DataError(f"{path}: holds no prompt")
    return Task(name, category, tuple(prompts))


def content_id(name: str, prompt: Prompt) -> str:
    """The same for the same words, whichever file or row they stand in: runs are paired by it."""
    words = json.dumps([prompt.system, *prompt.turns])
    return f"{name}:{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def _builtin_file(task: BuiltinTask, data: Path | None) -> Path:
    """The rows of a built-in task, fetched if need be."""
    path = (data or home() / "eval") / f"{task.name}.jsonl"
    if not path.is_file():
        if data is not None:
            raise DataError(f"data: {path} is not there; leave --data out to fetch the task, or choose other --tasks")
        fetch(task, path)
    return path


def fetch(task: BuiltinTask, path: Path) -> None:
    """Write a built-in task's prompts from its public home, through the `datasets` library. Raises `DataError`."""
    try:
        with ExitStack() as stack:
            file = stack.enter_context(stack.enter_context(atomic_path(path)).open("wb"))
            bar = stack.enter_context(progress(None, f"fetching {task.name}", "prompt"))
            for prompt in read_set(task.home, skip_bad=False, dropped=Counter()):
                file.write(json_line(prompt.as_dict()))
                bar.update(1)
    except (ConfigError, DataError) as error:
        raise DataError(f"task {task.name}: {error}; or put {path.name} into a directory and name it: --data") from None
