# `make help` lists the targets. Every target sets up what it needs, so that each works on a fresh clone.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
BACKEND ?= torch
NPROC ?= 4
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
N ?= 1000
FUZZ_ARGS ?=
CHECK_ARGS ?=
ZOO_ARGS ?=

# `make test TORCH=2.14.1`: in an environment of its own, with this torch in the place of that in requirements/dev.txt.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread for each process: tests and the demo start several, which share the cores of this machine.
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The environment is made again only when its files change. `-qq`: pip says nothing but errors.
$(READY): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "hpfunc needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the packages of requirements/dev.txt$(if $(TORCH), with torch $(TORCH)) (once, takes minutes)"
	@sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' requirements/dev.txt > $(VENV)/requirements.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -r $(VENV)/requirements.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
	@touch $@

# MindSpore is large, and only its own demo and tests need it.
MINDSPORE_READY := $(VENV)/.mindspore
$(MINDSPORE_READY): $(READY) requirements/mindspore.txt
	@echo "installing the packages of requirements/mindspore.txt (once, takes minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-deps -r requirements/mindspore.txt
	@touch $@

# What only the zoo needs.
ZOO_READY := $(VENV)/.zoo
$(ZOO_READY): $(READY) requirements/zoo.txt
	@echo "installing the packages of requirements/zoo.txt (once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-deps -r requirements/zoo.txt
	@touch $@

.PHONY: setup
setup: $(READY) ## create the virtual environment, or bring it up to date

.PHONY: demo
demo: $(READY) $(if $(filter mindspore,$(BACKEND)),$(MINDSPORE_READY)) ## train a language model on real text over 4 processes; BACKEND=mindspore
	HPFUNC_BACKEND=$(BACKEND) $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/$(BACKEND)/train_text.py $(DEMO_ARGS)

.PHONY: bench
bench: $(READY) ## hpfunc beside FSDP2 and DDP: tables, plots and targets (needs root and a quiet machine; under 20 minutes)
	$(BIN)/python examples/benchmarks/bench.py $(BENCH_ARGS)

.PHONY: test
test: $(READY) $(if $(filter mindspore,$(BACKEND)),$(MINDSPORE_READY)) ## run all tests and the examples in docstrings; PYTEST_ARGS="-k mesh" chooses; BACKEND=mindspore adds its own; TORCH=2.14.1 takes that torch
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: $(READY) ## compare N steps drawn at random with plain torch; N=20000 takes an hour; FUZZ_ARGS="--seed 7 --shrink"
	$(BIN)/python -m tests.fuzz --count $(N) --failures fuzz-failures.jsonl $(FUZZ_ARGS)

.PHONY: device-check
device-check: $(READY) ## what hpfunc does on this machine's GPU, in one table (8 minutes); without one on the simulated device; CHECK_ARGS="--rows i,iii"
	$(BIN)/python -m tests.device.check $(CHECK_ARGS)

.PHONY: zoo
zoo: $(ZOO_READY) ## train hundreds of architectures of transformers, timm and diffusers, and write docs/zoo.md (20 minutes; goes on where it stopped); ZOO_ARGS="--only llama"
	$(BIN)/python -m tests.zoo $(ZOO_ARGS)

.PHONY: check
check: lint types imports docs ## run every static check and the docs build

.PHONY: lint
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: $(READY)
	$(BIN)/pyright

.PHONY: imports
imports: $(READY)
	$(BIN)/lint-imports

.PHONY: doctest
doctest: $(READY) ## run the docstring examples of the package, which `make test` runs too
	$(BIN)/python -m pytest -q hpfunc

.PHONY: docs
docs: $(READY) ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

.PHONY: format
format: $(READY) ## format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## remove everything that is built, the virtual environment too
	rm -rf .venv .venv-torch-* build dist docs/_build tests/device/_build .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
