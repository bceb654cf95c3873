# Sentinel Swarm. `make help` lists the targets; each sets up what it needs.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

# Python 3.11 by its own name, else python3 if that is one. Looked for only when the environment is to be made.
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo "$$p" && break; done)

.DEFAULT_GOAL := help
.PHONY: help install demo test image-test lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make the virtual environment with pinned dependencies, if it is missing or out of date

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 found; install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" scripts/install.py --venv "$(VENV)"
	@touch $@

demo: $(STAMP) ## train a small model in a swarm on this machine and eject an attacker (ARGS='--help' shows more)
	@$(BIN)/sentinel demo $(ARGS)

test: $(STAMP) ## run the tests (ARGS='-m slow' runs the long ones, ARGS='-k word' some)
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

image-test: $(STAMP) ## build the container image and run a swarm from it (root, buildah and debootstrap; ten minutes)
	@$(BIN)/python -m pytest -m image -s $(ARGS)

lint: $(STAMP) ## ruff and strict mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP) ## measure, one JSON line per benchmark (ARGS=NAME runs one)
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove the virtual environment and every cache
	rm -rf "$(VENV)" *.egg-info build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
