# Two commands do everything on a fresh machine with Python 3.10 or newer:
#   make run    sets up, then trains on the embedded data set (two CPU cores, under three minutes)
#   make test   sets up, then checks style, types and behaviour
#   make wheel-check  builds the wheel and uses it in empty environments (PYTHONS="python3.11 python3.13")
#   make chaos  1,000 hostile inputs and 40 kills of runs (two CPU cores, under 30 minutes); writes results/
#   make docs   the documentation as a site, in site/index.html (fails on a broken link or reference)
#   make screenshots  the pictures in docs/assets, by headless Chromium
#   make sbom   the list of all packages with their versions, sbom.json (CycloneDX)
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEV    := $(VENV)/.ready-dev

.PHONY: run test lint types unit docs screenshots wheel wheel-check chaos sbom setup clean
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

# The tests build the same site, so `make test` checks its links too.
docs: $(DEV)
	PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screenshots: $(DEV)
	$(BIN)/python docs/screenshots.py

# The wheel and the source archive, in dist/.
wheel:
	rm -rf dist build
	test -x $(VENV)/build/bin/python || $(PYTHON) -m venv $(VENV)/build
	$(VENV)/build/bin/python -m pip install --quiet 'build>=1.2' 'twine>=6'
	$(VENV)/build/bin/python -m build --outdir dist
	$(VENV)/build/bin/python -m twine check --strict dist/*

# Outside of the source tree, with nothing but what the wheel asks for.
PYTHONS ?= $(PYTHON)
wheel-check: wheel
	set -e; for python in $(PYTHONS); do $$python tests/wheel_check.py dist/*.whl; done

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
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
