# On a fresh machine with Python 3.11+ (with venv) and make, two commands do everything:
#   make demo    set up, then predict and explain a real model against a real GPU's size
#   make test    set up, then lint, types, layering, documentation and tests
# Only the package index is needed. A CPU build of torch is enough, and much the quickest to install:
# where the default index carries CUDA builds, point pip's usual settings at one with CPU builds.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

DEMO_TARGET ?= examples/gpt2.py:workload
DEMO_GPU ?= rtx3090
PYTEST_ARGS ?=
# Two files of tests at a time; each process computes with one thread and keeps the modules that it compiles.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers site tests convolutions accuracy format clean

help:
	@echo "make demo     set up, then predict $(DEMO_TARGET) against $(DEMO_GPU)"
	@echo "make test     set up, then lint, types, layers, site and tests"
	@echo "make accuracy set up, then predict all 81 measured training steps and check every row (minutes)"
	@echo "make convolutions  install cuDNN (0.9 GB), then test convolutions with it"
	@echo "make setup | lint | types | layers | site | tests | format | clean"

setup: $(STAMP)

# Made again when what is to be installed changes; otherwise the second call costs nothing.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "error: $(PYTHON) was not found; install Python 3.11 or newer, or give PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $$($(PYTHON) --version) is too old; oomph needs Python 3.11 or newer (PYTHON=/path/to/python)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing torch into $(VENV) (the largest part; minutes on a slow line)"
	@$(PIP) torch
	@echo "== installing oomph, oomph-lab and their tools"
	@$(PIP) -e '.[dev]' -e lab
	@touch $@

# Exit status 1 means "does not fit", which is an answer; anything above it is a failure.
demo: $(STAMP)
	@echo "== oomph predict $(DEMO_TARGET) --gpu $(DEMO_GPU)   (no GPU is used; nothing of the model's size is allocated)"
	@$(BIN)/oomph predict $(DEMO_TARGET) --gpu $(DEMO_GPU) || { status=$$?; [ $$status -eq 1 ] || exit $$status; }

# Two at a time: mypy computes with one core only.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint types layers site tests

lint: $(STAMP)
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "== types"
	@$(BIN)/mypy

layers: $(STAMP)
	@echo "== layers"
	@$(BIN)/lint-imports

# The documentation, with warnings as errors.
site: $(STAMP)
	@echo "== site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tests: $(STAMP)
	@echo "== tests"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The tests of convolutions once more, with cuDNN asked about workspaces: another 0.9 GB of packages.
convolutions: $(STAMP)
	@echo "== installing cuDNN into $(VENV) (0.9 GB)"
	@$(PIP) -e '.[cudnn]'
	@$(MAKE) --no-print-directory tests PYTEST_ARGS=tests/prediction/test_cudnn.py

# Fails where a prediction leaves its bounds, or differs from the committed row of the same torch release. cuDNN
# is not asked, so the rows do not depend on whether it is installed.
accuracy: $(STAMP)
	@OMP_NUM_THREADS=1 OOMPH_CUDNN=0 $(BIN)/python -m benchmarks.accuracy predict --check

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info lab/build lab/dist lab/src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
