"""`dspark generate` and `dspark chat`."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.text import Text

from dspark.console.config import ChatOptions, GenerateOptions, OutputOptions
from dspark.console.paint import LEGEND, Painter, figures
from dspark.console.session import Session, Timed, open_session, sampling_params
from dspark.engine.request import SamplingParams


def generate(options: GenerateOptions) -> None:
    """Answer one prompt and print it, streaming, or as one JSON object."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    session = open_session(options.model, options.n, plan=options.plan)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": prompt})
    ids = session.text_ids(prompt) if options.raw else session.prompt_ids(messages)
    params = sampling_params(options.answer).replace(n=options.n)
    if options.output.json_output:
        print_json(session, session.answer(ids, params))
        return
    console = open_console(options.output)
    timed = stream(session, console, ids, params) if options.n == 1 else several(session, console, ids, params)
    compare = options.compare and session.speculates and timed.completion.finish_reason != "abort"
    console.print(figures(timed, session.plain_speed(ids, params) if compare else None))
    if session.speculates and console.color_system:
        console.print(LEGEND)


def chat(options: ChatOptions) -> None:
    """Read user turns until the end of input; answer each with the whole conversation before it."""
    session = open_session(options.model, plan=options.plan)
    console = open_console(options.output)
    params = sampling_params(options.answer)
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages, plain_speed = list(start), None
    while (line := read_turn(console)) is not None:
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        ids = session.prompt_ids(messages)
        timed = session.answer(ids, params) if options.output.json_output else stream(session, console, ids, params)
        if options.output.json_output:
            print_json(session, timed)
        else:
            if session.speculates and plain_speed is None:  # once: it costs seconds
                plain_speed = session.plain_speed(ids, params)
            console.print(figures(timed, plain_speed))
        messages.append({"role": "assistant", "content": timed.completion.text})


def read_turn(console: Console) -> str | None:
    """One line from the user; None when they are done."""
    prompt = "[bold]you>[/bold] " if sys.stdin.isatty() else ""
    try:
        line = console.input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in ("/exit", "/quit") else line


def stream(session: Session, console: Console, ids: list[int], params: SamplingParams) -> Timed:
    """Answer and print as it comes."""
    painter = Painter(session, console, params.stop, params.min_tokens)
    timed = session.answer(ids, params, painter.show)
    console.print(Text(""))
    return timed


def several(session: Session, console: Console, ids: list[int], params: SamplingParams) -> Timed:
    """Answer several times at once, and print the answers one after the other."""
    timed = session.answer(ids, params)
    painter = Painter(session, console, params.stop, params.min_tokens)
    for completion in timed.completions:
        console.print(Text(f"answer {completion.index + 1}", "bold"))
        console.print(painter.painted(completion), soft_wrap=True)
    return timed


def print_json(session: Session, timed: Timed) -> None:
    """One object a line and an answer: text, accepted_length, tokens_per_second (of all answers), finish_reason.

    Where asked for, logprobs: of each token its text, id and log probability, and the likeliest tokens there.
    """
    for completion in timed.completions:
        row: dict[str, object] = {
            "text": completion.text,
            "accepted_length": None if completion.tau is None else round(completion.tau, 3),
            "tokens_per_second": round(timed.tokens_per_second, 2),
            "finish_reason": completion.finish_reason,
        }
        if completion.logprobs is not None:
            row["logprobs"] = [
                _logprob(session, entry.token_id, entry.logprob)
                | {"top": [_logprob(session, token_id, logprob) for token_id, logprob in entry.top]}
                for entry in completion.logprobs
            ]
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _logprob(session: Session, token_id: int, logprob: float) -> dict[str, object]:
    text = session.target.tokenizer.decode([token_id])
    return {"token": text, "id": token_id, "logprob": round(logprob, 5)}


def open_console(output: OutputOptions) -> Console:
    """A console on stdout; colours when it is a terminal and they are wanted."""
    return Console(highlight=False, no_color=not output.color, color_system="auto" if output.color else None)
