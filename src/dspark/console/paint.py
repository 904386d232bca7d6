"""Showing tokens as they come, coloured by origin, and the line of figures after them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from dspark.console.session import Session, Timed
from dspark.engine.engine import StepOutput
from dspark.engine.request import Completion
from dspark.engine.text import TextStream

STYLES = {"prefill": "default", "accepted": "green", "bonus": "yellow"}
LEGEND = Text.assemble(("accepted draft", "green"), "  ", ("bonus (target)", "yellow"))


@dataclass
class Painter:
    """Prints an answer token by token. Its text is the engine's: same decoder, same stop strings."""

    session: Session
    console: Console
    stop: tuple[str, ...]
    min_tokens: int = 0
    stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self._new_stream()

    def show(self, output: StepOutput) -> None:
        """Print one step's tokens."""
        for token_id, origin in zip(output.token_ids, output.origins, strict=True):
            _, text = self.stream.push([token_id])
            self._print(text, STYLES[origin])
        if output.finished:
            self._print(self.stream.finish(), STYLES["bonus"])

    def painted(self, completion: Completion) -> Text:
        """A finished answer as one coloured text."""
        stream, text = self._new_stream(), Text()
        for token_id, origin in zip(completion.token_ids, completion.origins, strict=True):
            text.append(stream.push([token_id])[1], STYLES[origin])
        return text.append(stream.finish())

    def _new_stream(self) -> TextStream:
        tokenizer = self.session.target.tokenizer
        return TextStream(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), self.stop, self.min_tokens)

    def _print(self, text: str, style: str) -> None:
        if text:
            self.console.print(Text(text, style), end="", soft_wrap=True)


def figures(timed: Timed, plain_speed: float | None) -> Text:
    """Tokens per second, accepted length and the ratio to plain decoding."""
    completion, speed = timed.completion, timed.tokens_per_second
    parts = [f"{timed.num_tokens} tokens", f"{speed:.1f} tok/s"]
    if completion.tau is not None:
        parts.append(f"accepted length τ {completion.tau:.2f}")
    if plain_speed and completion.tau is not None:
        parts.append(f"{speed / plain_speed:.2f}x plain decoding ({plain_speed:.1f} tok/s)")
    parts.append(f"finish: {completion.finish_reason}")
    return Text(" · ".join(parts), "dim")
