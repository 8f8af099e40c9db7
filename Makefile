# Two commands do everything on a fresh machine with Python 3.10 or newer:
#   make run    sets up, then trains on the embedded data set (two CPU cores, under three minutes)
#   make test   sets up, then checks style, types and behaviour
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

.PHONY: run test lint types unit setup clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

setup: $(DEV)

# The package alone: what `cclnet train` and `cclnet evaluate` need.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $(READY)

# With all extras and the tools of the tests.
$(DEV): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(DEV)

run: $(READY)
	$(BIN)/cclnet train

test: lint types unit

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=src $(BIN)/lint-imports

types: $(DEV)
	$(BIN)/mypy

unit: $(DEV)
	$(BIN)/pytest --numprocesses 2 --dist loadfile

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
