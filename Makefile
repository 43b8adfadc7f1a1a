# make demo | test | bench | check | campaign NAME=... ; each sets up what it needs from nothing.
PYTHON ?= python3
# By its exact version and first: a range would take the newest build and its CUDA packages.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: venv demo test bench check campaign clean

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: venv
	$(BIN)/python -m pytest

bench: venv
	$(BIN)/python -m benchmarks

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

campaign: venv
	$(BIN)/python -m benchmarks.campaigns $(NAME)

clean:
	rm -rf $(VENV) .venv-* data runs build dist
