"""`dspark data show`: conversations as rendered rows, trained tokens set apart, and what was skipped and why."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.console.config import ShowOptions
from dspark.console.generate import open_console
from dspark.data.chat import ChatTemplate
from dspark.data.conversation import Conversation, read_conversations
from dspark.data.template import Rendered, RowRefused, render
from dspark.log import progress
from dspark.models.hub import resolve_model
from dspark.models.tokenizer import load_tokenizer

TRAINED, CONTEXT = "bold green", "dim"
MALFORMED = "no conversation (malformed line)"


class Segment(NamedTuple):
    """Neighbouring tokens [start, end) of a row that are all trained or all not, and their text."""

    start: int
    end: int
    trained: bool
    text: str


@dataclass
class Tally:
    """Rows and tokens counted so far."""

    num_rows: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """The counts as the last line of the JSON output."""
        return {
            "rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "num_trained": self.num_trained,
            "skipped": dict(self.skipped),
        }

    def table(self) -> Table:
        """The counts as a table: rows to train on, then skipped ones by reason, the most frequent first."""
        table = Table("", "rows")
        table.columns[1].justify = "right"
        table.add_row("to train on", str(self.num_rows), style=TRAINED)
        for reason, number in self.skipped.most_common():
            table.add_row(f"skipped: {reason}", str(number))
        return table

    def share(self) -> str:
        """The line of tokens under the table."""
        return (
            f"{self.num_trained} of {self.num_tokens} tokens trained ({self.num_trained / max(self.num_tokens, 1):.1%})"
        )


def show(options: ShowOptions) -> None:
    """Print the first `limit` conversations and the counts of all. Raises `DataError` and `CheckpointError`."""
    chat = ChatTemplate(load_tokenizer(resolve_model(options.target)))
    console, tally = open_console(options.output), Tally()
    bad: list[str] = []
    rows = judge(chat, read_conversations(options.files, options.skip_bad, bad), options.max_length, tally)
    for conversation, row in islice(rows, options.limit):
        if options.output.json_output:
            _print_json(_as_dict(chat, conversation, row))
        else:
            _print(console, chat, conversation, row)
    with progress(None, "count", "row", initial=options.limit, leave=False) as bar:
        for _ in rows:
            bar.update(1)
    if bad:
        tally.skipped[MALFORMED] = len(bad)
    if options.output.json_output:
        _print_json(tally.as_dict())
    else:
        console.print(tally.table())
        console.print(tally.share())


def judge(
    chat: ChatTemplate, conversations: Iterable[Conversation], max_length: int, tally: Tally
) -> Iterator[tuple[Conversation, Rendered | RowRefused]]:
    """Yield each conversation with its row or the reason why it has none, and count them in `tally`."""
    for conversation in conversations:
        try:
            row = render(chat, conversation, max_length)
        except RowRefused as refusal:
            tally.skipped[refusal.reason] += 1
            yield conversation, refusal
        else:
            tally.num_rows += 1
            tally.num_tokens += len(row.token_ids)
            tally.num_trained += sum(row.loss_mask)
            yield conversation, row


def segments(chat: ChatTemplate, row: Rendered) -> Iterator[Segment]:
    """Yield the row's tokens from the first to the last, cut where its loss mask changes."""
    for trained, tokens in groupby(range(len(row.token_ids)), key=lambda index: row.loss_mask[index]):
        start, *rest = tokens
        end = start + 1 + len(rest)
        text = chat.tokenizer.decode(row.token_ids[start:end], clean_up_tokenization_spaces=False)
        yield Segment(start, end, bool(trained), str(text))


def _as_dict(chat: ChatTemplate, conversation: Conversation, row: Rendered | RowRefused) -> dict[str, Any]:
    head: dict[str, Any] = {"id": conversation.id, "source": conversation.source}
    if isinstance(row, RowRefused):
        return head | {"skipped": str(row.reason), "detail": str(row)}
    counts = {"num_tokens": len(row.token_ids), "num_trained": sum(row.loss_mask)}
    return head | counts | {"segments": [segment._asdict() for segment in segments(chat, row)]}


def _print(console: Console, chat: ChatTemplate, conversation: Conversation, row: Rendered | RowRefused) -> None:
    """Print one conversation; without colours the trained text stands in ⟦brackets⟧."""
    name = " ".join(filter(None, (conversation.source, conversation.id)))
    if isinstance(row, RowRefused):
        console.print(Text(f"── {name}: skipped: {row}", "yellow"), soft_wrap=True)
        return
    console.print(
        Text(f"── {name}: {sum(row.loss_mask)} of {len(row.token_ids)} tokens trained", "cyan"), soft_wrap=True
    )
    plain = console.color_system is None or console.no_color
    text = Text()
    for segment in segments(chat, row):
        shown = f"⟦{segment.text}⟧" if plain and segment.trained else segment.text
        text.append(shown, TRAINED if segment.trained else CONTEXT)
    console.print(text, soft_wrap=True)


def _print_json(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
