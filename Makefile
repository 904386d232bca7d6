# make demo    install into .venv and watch a real model answer, plainly and with DSpark
# make test    install the development tools too and run every check
# make venv    only create .venv with everything for development
# make format  format the code and apply the safe lint fixes
# make clean   remove .venv and everything that can be made again

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiling every module at once takes longer than the rest: Python compiles what is imported, when it is.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt
PROJECT := pyproject.toml constraints.txt

.PHONY: demo test venv format clean

demo: $(VENV)/runtime.stamp
	@$(BIN)/dspark demo

test: $(VENV)/dev.stamp
	@$(BIN)/python scripts/check.py

venv: $(VENV)/dev.stamp

format: $(VENV)/dev.stamp
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dspark needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": name another one, for example make PYTHON=python3.12")'
	@$(PYTHON) -m venv --clear $(VENV) || { echo "python cannot create an environment: install its venv module (on Debian: apt install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/runtime.stamp: $(VENV)/python.stamp $(PROJECT)
	@echo "Installing dspark into $(VENV) (PyTorch is large: minutes the first time)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/runtime.stamp
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@
