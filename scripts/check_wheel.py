"""Build the wheel, install it into a clean environment, and use it from there as a stranger would.

The environment sees the libraries that the running Python has, but not the sources: what the wheel forgot is missing.
"""

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

PROBE = """
import importlib, importlib.metadata, pathlib, pkgutil, sys
import dspark
assert pathlib.Path(dspark.__file__).is_relative_to(sys.prefix), f"imported from {dspark.__file__}"
assert importlib.metadata.version("dspark") == dspark.__version__
names = [module.name for module in pkgutil.walk_packages(dspark.__path__, "dspark.")]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules imported from the installed wheel")
"""


def main() -> int:
    """Return 0, or 1 with the missing files; a command that fails raises `CalledProcessError`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", name, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = folder.glob("*.whl")
        missing = _source_files() - set(zipfile.ZipFile(wheel).namelist())
        if missing:
            print("not in the wheel:", *sorted(missing), sep="\n  ")
            return 1
        python = _clean_environment(folder / "venv")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
        subprocess.run([*pip, str(wheel)], check=True)
        subprocess.run([python, "-I", "-c", PROBE], check=True, cwd=name)
        command = [python, "-I", python.with_name("dspark"), "--help"]
        subprocess.run(command, check=True, cwd=name, stdout=subprocess.DEVNULL)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


def _source_files() -> set[str]:
    """Every file of the package, `py.typed` and data included, as named inside a wheel."""
    paths = [path for path in (SOURCE / "dspark").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(SOURCE).as_posix() for path in paths}


def _clean_environment(folder: Path) -> Path:
    """Make an environment that borrows the libraries of this Python; return its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    # A .pth file names one more folder to look in. The .pth files of that folder are not read, so that an editable
    # installation of dspark there stays invisible.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main())
