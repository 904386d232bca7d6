"""Options of the interactive commands. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from dspark.config import Settings
from dspark.engine.config import ModelOptions, PlanOptions


class AnswerOptions(Settings):
    """How an answer is drawn and where it ends."""

    max_tokens: int = Field(256, ge=1)
    """New tokens at most."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest tokens that together reach this mass."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest."""
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    """Divides the logits of tokens in prompt and answer (multiplies negative ones); 1 is off."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken off the logits of tokens in the answer."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """The same, once for each time a token occurs."""
    bad_words: tuple[str, ...] = ()
    """Words that the answer may not contain, as the tokens they make at the start of a line and after a blank."""
    min_tokens: int = Field(0, ge=0)
    """New tokens before which nothing ends the answer."""
    json_schema: Path | None = None
    """A file with a JSON schema that the answer follows."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    seed: int | None = None
    """Makes sampling repeatable."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    ignore_eos: bool = False
    """Go on past the end-of-turn token."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """With --json: each token's log probability, and so many of the likeliest beside it."""


class OutputOptions(Settings):
    """How the answer is shown."""

    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON instead of text, one object a line."""
    color: bool = True
    """Colour tokens by what they are (accepted draft, bonus; trained). Off when the output is not a terminal."""


class GenerateOptions(Settings):
    """Answer one prompt.

    Example: dspark generate "Write a haiku about rivers." --temperature 0.7 --seed 1
    """

    prompt: Annotated[str, tyro.conf.Positional]
    """The user's message; "-" reads it from standard input."""
    raw: bool = False
    """Continue the prompt as it stands, without the chat template."""
    system: str | None = None
    """A system message before the prompt."""
    n: int = Field(1, ge=1, le=128)
    """Answers to the prompt, each drawn on its own."""
    compare: bool = True
    """Afterwards decode a few tokens plainly, to show the speed-up."""
    model: ModelOptions = ModelOptions()
    plan: PlanOptions = PlanOptions()
    answer: AnswerOptions = AnswerOptions()
    output: OutputOptions = OutputOptions()


class ChatOptions(Settings):
    """Talk with the target over several turns; /reset forgets them, /exit or Ctrl-D ends.

    Example: dspark chat --temperature 0.7
    """

    system: str | None = None
    """A system message that stands before every turn."""
    model: ModelOptions = ModelOptions()
    plan: PlanOptions = PlanOptions()
    answer: AnswerOptions = AnswerOptions()
    output: OutputOptions = OutputOptions()


class ShowOptions(Settings):
    """Show which tokens of conversations are trained, as a target's chat template renders them; nothing is written.

    Example: dspark data show answers.jsonl --target smollm2-135m --limit 2
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = Field(min_length=1)
    """JSON-lines files of conversations: rows of messages, conversations or turns."""
    target: str = "smollm2-135m"
    """Whose tokenizer and chat template: a built-in name, a Hugging Face directory or hub id, or a GGUF file."""
    limit: int = Field(3, ge=0)
    """Conversations to print; the counts at the end are of all rows."""
    max_length: int = Field(2048, ge=2)
    """Tokens kept of a conversation."""
    skip_bad: bool = False
    """Leave malformed lines out and count them instead of stopping."""
    output: OutputOptions = OutputOptions()


class DemoOptions(Settings):
    """Three prompts, decoded plainly and with DSpark, side by side: the same text and the measured speed-up.

    Example: dspark demo --max-tokens 48
    """

    max_tokens: int = Field(64, ge=8)
    """New tokens per prompt."""
    model: ModelOptions = ModelOptions()
    output: OutputOptions = OutputOptions()
