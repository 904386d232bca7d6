"""The project's own checks catch what they are for."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_size_caps_name_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = load("check_sizes")
    monkeypatch.setattr(check, "SOURCE", tmp_path / "src")
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "short.py").write_text("def ok(self, a, b, c, d, e, f, g, h): ...\n", encoding="utf-8")
    assert check.main() == 0
    assert "within the caps" in capsys.readouterr().out

    (package / "long.py").write_text("x = 1\n" * 401, encoding="utf-8")
    (package / "wide.py").write_text("def wide(a, b, c, d, e, f, *g, h, **i): ...\n", encoding="utf-8")
    (package / "tall.py").write_text("async def tall():\n" + "    x = 1\n" * 60, encoding="utf-8")
    assert check.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "src/package/long.py: 401 lines (cap 400)",
        "src/package/tall.py:1 tall: 61 lines (cap 60)",
        "src/package/wide.py:1 wide: 9 parameters (cap 8)",
    ]


def test_light_import_check_names_the_heavy_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = load("check_light_imports")
    (tmp_path / "heavy_probe").mkdir()
    (tmp_path / "heavy_probe" / "config.py").write_text("import scipy\n", encoding="utf-8")
    monkeypatch.setattr(check, "SOURCE", tmp_path)
    monkeypatch.setattr(check, "ALWAYS_LIGHT", ["dspark.errors", "heavy_absent"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert check.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "heavy_absent: cannot be imported: No module named 'heavy_absent'",
        "heavy_probe.config: imports scipy",
    ]
