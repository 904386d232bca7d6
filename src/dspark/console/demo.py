"""`dspark demo`: plain decoding and DSpark side by side."""

from __future__ import annotations

from statistics import mean

from rich.table import Table
from rich.text import Text

from dspark.console.config import DemoOptions
from dspark.console.generate import open_console, print_json
from dspark.console.paint import LEGEND, Painter
from dspark.console.session import open_session
from dspark.engine.request import SamplingParams
from dspark.errors import ConfigError
from dspark.log import progress

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A baker makes 12 loaves a day and sells each for $3. How much does she earn in a week? Explain step by step.",
    "Give me five tips for staying healthy.",
)


def demo(options: DemoOptions) -> None:
    """Decode three prompts greedily both ways, print the texts side by side and the measured speed-up."""
    session = open_session(options.model)
    if not session.speculates:
        raise ConfigError("demo compares plain decoding with a drafter: pass --drafter PATH (this target ships none)")
    params = SamplingParams(max_tokens=options.max_tokens)
    painter, ratios = Painter(session, open_console(options.output), ()), []
    session.answer(session.text_ids("warm up"), params.replace(max_tokens=8))
    runs = []
    with progress(2 * len(PROMPTS), "demo", "answer", leave=False) as bar:
        for prompt in PROMPTS:
            ids = session.prompt_ids([{"role": "user", "content": prompt}])
            plain = session.answer(ids, params.replace(speculate=False))
            bar.update(1)
            runs.append((prompt, plain, session.answer(ids, params)))
            bar.update(1)
    for prompt, plain, drafted in runs:
        ratios.append(drafted.tokens_per_second / plain.tokens_per_second)
        if options.output.json_output:
            print_json(session, drafted)
            continue
        same = "same text" if plain.completion.token_ids == drafted.completion.token_ids else "texts differ (float tie)"
        table = Table(title=Text(prompt, "bold"), title_justify="left", expand=True, show_lines=True)
        table.add_column(f"plain  {plain.tokens_per_second:.1f} tok/s", ratio=1)
        tau = drafted.completion.tau or 1.0
        table.add_column(f"DSpark  {drafted.tokens_per_second:.1f} tok/s  τ {tau:.2f}  {ratios[-1]:.2f}x", ratio=1)
        table.add_row(Text(plain.completion.text), painter.painted(drafted.completion))
        painter.console.print(table)
        painter.console.print(Text(same, "dim"))
    if not options.output.json_output:
        painter.console.print(LEGEND)
        painter.console.print(Text(f"Mean speed-up over plain decoding: {mean(ratios):.2f}x", "bold"))
