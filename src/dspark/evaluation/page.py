"""A report as one HTML page that asks nothing of any other place: tables, and plots drawn into it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dspark.evaluation.drawing import Plot, svg
from dspark.evaluation.tables import Cell, Table

# The policy makes a browser refuse whatever the page might want from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --soft: #666c73; --line: #d9dce0; --band: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --paper: #16181b; --soft: #9aa1a9; --line: #363b41; --band: #1f2226; }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { color: var(--soft); margin: .3rem 0 .6rem; max-width: 60rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th.label, td.label { text-align: left; }
tbody tr:nth-child(even) { background: var(--band); }
td small { display: block; color: var(--soft); font-size: .75em; }
svg { max-width: 100%; height: auto; }
""".strip()


def page(title: str, about: Table, first: Sequence[Table], plots: Sequence[Plot], further: Sequence[Table]) -> str:
    """The whole document: what was measured, the first tables, the plots, the other tables."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        _table(about),
        *(_section(table.title, table.note, _table(table)) for table in first),
        *(_section(plot.title, plot.note, _image(plot, f"plot{i}")) for i, plot in enumerate(plots)),
        *(_section(table.title, table.note, _table(table)) for table in further),
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, note: str, body: str) -> str:
    told = f"\n<p>{escape(note)}</p>" if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>{told}\n{body}\n</section>"


def _image(plot: Plot, name: str) -> str:
    return svg(plot, name).replace("<svg ", f'<svg role="img" aria-label="{escape(plot.title)}" ', 1)


def _table(table: Table) -> str:
    """Cells with their intervals beneath them."""

    def row(tag: str, cells: Sequence[Cell]) -> str:
        found = ""
        for i, cell in enumerate(cells):
            kind = ' class="label"' if i < table.labels else ""
            small = f"<small>{escape(cell.interval)}</small>" if cell.interval else ""
            found += f"<{tag}{kind}>{escape(cell.text)}{small}</{tag}>"
        return f"<tr>{found}</tr>"

    head = row("th", [Cell(name) for name in table.columns])
    body = "\n".join(row("td", cells) for cells in table.rows)
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
