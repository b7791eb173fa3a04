# Two commands: `make up` (a running server that answers) and `make test`. Both are idempotent.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export FOREBAY_CACHE ?= $(HOME)/.cache/forebay

.PHONY: up test soak wheel env lint clean help

help:
	@sed -n 's/^## //p' Makefile

## make up    make the environment, start the small real model, ask it a question, serve until Ctrl-C
up: env
	@exec $(BIN)/forebay up smollm2 --port 8000-8009 --host-cache auto --ask "What is the capital of France?"

## make test  ruff, mypy, the architecture test and all tests
test: env lint
	@bash scripts/test.sh

## make soak  the long runs (hours); results go to docs/soak.md
soak: env
	@$(BIN)/python -m pytest -m soak tests

## make wheel the installable package, in dist/
wheel: env
	@rm -rf build dist && $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation --wheel-dir dist . && rm -rf build && ls dist/*.whl

lint: env
	@echo "lint: ruff, mypy"; $(BIN)/ruff check . && $(BIN)/ruff format --check -q . && $(BIN)/mypy

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@bash scripts/make_env.sh "$(PYTHON)" "$(VENV)"

clean:
	rm -rf $(VENV)
