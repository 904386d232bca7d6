"""Check the size caps of the package: files, their median, functions and their parameters."""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
MAX_FILE_LINES = 400
MAX_MEDIAN_LINES = 160
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8  # beside self


def main() -> int:
    """Print each fault and return 1 if there is any."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(SOURCE.rglob("*.py"))}
    faults = [f"{_name(path)}: {n} lines (cap {MAX_FILE_LINES})" for path, n in lines.items() if n > MAX_FILE_LINES]
    median = statistics.median(n for path, n in lines.items() if path.name != "__init__.py")
    if median > MAX_MEDIAN_LINES:
        faults.append(f"median file: {median:g} lines (cap {MAX_MEDIAN_LINES})")
    for path in lines:
        faults.extend(function_faults(path))
    print("\n".join(faults) or f"{len(lines)} files, median {median:g} lines, all within the caps")
    return 1 if faults else 0


def function_faults(path: Path) -> Iterator[str]:
    """Yield one line for each function of a file that is too long or takes too many parameters."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{_name(path)}:{node.lineno} {node.name}"
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{where}: {length} lines (cap {MAX_FUNCTION_LINES})"
        arguments = node.args
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        count = len([name for name in names if name not in ("self", "cls")])
        count += (arguments.vararg is not None) + (arguments.kwarg is not None)
        if count > MAX_PARAMETERS:
            yield f"{where}: {count} parameters (cap {MAX_PARAMETERS})"


def _name(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


if __name__ == "__main__":
    sys.exit(main())
