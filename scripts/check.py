"""Run every check of the project and tell how long each took; with arguments, only those: `check.py lint types`."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
WORKERS = min(os.cpu_count() or 1, 4)
CHECKS: dict[str, list[str]] = {
    "format": [str(SCRIPTS / "ruff"), "format", "--check", "--quiet", "--diff", "."],
    "lint": [str(SCRIPTS / "ruff"), "check", "--quiet", "."],
    "sizes": [sys.executable, "scripts/check_sizes.py"],
    "layers": [str(SCRIPTS / "lint-imports"), "--no-cache", "--no-logo"],
    "light": [sys.executable, "scripts/check_light_imports.py"],
    "types": [str(SCRIPTS / "mypy"), "--strict", "src"],
    "wheel": [sys.executable, "scripts/check_wheel.py"],
    "tests": [sys.executable, "-m", "pytest", "--quiet", "--durations=10", "-n", str(WORKERS), "--dist", "worksteal"],
}


def main(names: list[str]) -> int:
    """Run the named checks, going on after a failure; return 1 if any failed."""
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        print(f"unknown check {unknown[0]!r}; there are: {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # one worker a core, one thread a worker
    failed = []
    start = time.monotonic()
    for name in names or CHECKS:
        print(f"== {name}", flush=True)
        before = time.monotonic()
        code = subprocess.run(CHECKS[name], cwd=ROOT, env=environment, check=False).returncode
        print(f"== {name}: {'ok' if code == 0 else 'FAILED'} in {time.monotonic() - before:.1f} s\n", flush=True)
        if code != 0:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed", f"({time.monotonic() - start:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
