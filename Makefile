# Two commands do everything on a fresh machine with Python 3.10 or newer:
#   make run    sets up, then trains on the embedded data set (two CPU cores, under three minutes)
#   make test   sets up, then checks style, types and behaviour
#   make chaos  1,000 hostile inputs and 40 kills of runs (two CPU cores, under 30 minutes); writes results/
#   make sbom   the list of all packages with their versions, sbom.json (CycloneDX)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

.PHONY: run test lint types unit chaos sbom setup clean
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

chaos: $(DEV)
	$(BIN)/python tests/chaos/campaign.py --cases 1000 --out results/chaos.json
	$(BIN)/python benchmarks/kills.py --kills 40 --out results/kills.json

# The tool has an environment of its own, so that it is not in the list.
sbom: $(DEV)
	test -x $(VENV)/sbom/bin/cyclonedx-py || $(PYTHON) -m venv $(VENV)/sbom
	$(VENV)/sbom/bin/python -m pip install --quiet 'cyclonedx-bom>=5'
	$(VENV)/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
	  --output-format JSON --output-file sbom.json $(BIN)/python

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
