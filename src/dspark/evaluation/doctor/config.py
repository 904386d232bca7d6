"""Options of `dspark doctor`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import tyro
from pydantic import Field

from dspark.config import Settings
from dspark.engine.config import ModelOptions

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A baker makes 12 loaves a day and sells each for $3. How much does she earn in a week? Explain step by step.",
    "Write a Python class for a stack with the methods push, pop and is_empty.",
)


class DoctorOptions(Settings):
    """Find out why a drafter's drafts are not accepted: training, serving and transformers compared on a few prompts.

    Example: dspark doctor --target smollm2-135m --drafter runs/first/best
    """

    prompt: tuple[str, ...] = ()
    """Messages to answer, of the kind that the drafter was trained for; none: three built-in ones."""
    answer_tokens: int = Field(96, ge=8)
    """Tokens of each answer: more give a surer verdict."""
    transformers: bool = True
    """Let transformers judge the target's states."""
    model: ModelOptions = ModelOptions()
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object instead of the report."""
