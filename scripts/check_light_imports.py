"""Check that the command line and the settings import without the heavy libraries, so that `--help` is instant."""

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
HEAVY = {"torch", "transformers", "scipy", "matplotlib", "tensorboard", "httpx", "datasets"}
ALWAYS_LIGHT = ["dspark.errors", "dspark.log", "dspark.files", "dspark.cli"]

PROBE = f"""
import importlib, sys
seen = set()
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: cannot be imported: {{error}}")
    heavy = {HEAVY!r} & sys.modules.keys() - seen
    seen |= heavy
    if heavy:
        print(f"{{name}}: imports {{', '.join(sorted(heavy))}}")
"""


def main() -> int:
    """Import the modules in a fresh process, print which brought a heavy library along, return 1 if any did."""
    modules = [*ALWAYS_LIGHT, *(_module(path) for path in sorted(SOURCE.rglob("config.py")))]
    probe = subprocess.run([sys.executable, "-c", PROBE, *modules], stdout=subprocess.PIPE, text=True, check=True)
    print(probe.stdout or f"{len(modules)} modules import without {', '.join(sorted(HEAVY))}\n", end="")
    return 1 if probe.stdout else 0


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


if __name__ == "__main__":
    sys.exit(main())
