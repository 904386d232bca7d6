"""Check that the command line and the settings import without the heavy libraries, so that `--help` is instant."""

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
HEAVY = {"torch", "transformers", "scipy", "tensorboard"}
ALWAYS_LIGHT = ["dspark.errors", "dspark.log", "dspark.files", "dspark.cli"]

PROBE = f"""
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted({HEAVY!r} & sys.modules.keys()))
"""


def main() -> int:
    """Import each module in a process of its own, print which heavy libraries came along, return 1 if any did."""
    configs = [_module(path) for path in sorted(SOURCE.rglob("config.py"))]
    modules = [*ALWAYS_LIGHT, *configs]
    failed = False
    for module in modules:
        probe = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True, check=False)
        if probe.returncode != 0:
            failed = True
            print(f"{module}: cannot be imported: {probe.stderr.strip().splitlines()[-1]}")
        elif heavy := probe.stdout.strip():
            failed = True
            print(f"{module}: imports {heavy}")
    if not failed:
        print(f"{len(modules)} modules import without {', '.join(sorted(HEAVY))}")
    return 1 if failed else 0


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


if __name__ == "__main__":
    sys.exit(main())
