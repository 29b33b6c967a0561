# One command per job on a fresh machine: each makes the environment first and reuses it afterwards.

# The Python that runs the bootstrap; it looks by itself for the one that .venv is made of.
PYTHON ?= python3
MODEL ?= deepseek-v3-mtp2
# Files or folders of `make test`, a version of `make matrix` (all of them without it).
TESTS ?= tests
MCORE ?=
# More arguments: `make test ARGS="-k chunks"`, `make rehearse ARGS="--format json"`,
# `make matrix MCORE=0.17.1 ARGS="-- tests/unit_tests/test_model.py"`.
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
MEGATRON_ON_CPU := $(RUN) -m megatron.quant_state.reference

.DEFAULT_GOAL := help
.PHONY: help env rehearse test check format matrix wheel wheel-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## make or refresh .venv (the other targets do it by themselves)
	@$(PYTHON) tools/bootstrap.py

rehearse: env ## train the twin of MODEL (deepseek-v3-mtp2) and compare the gradients
	@$(VENV)/bin/quant-state rehearse $(MODEL) $(ARGS)

test: env ## the CPU test suite
	@$(MEGATRON_ON_CPU) -m pytest $(TESTS) -m "not gpu" --durations=10 $(ARGS)

check: env ## format, lint, types, layers and changelog fragments, changing nothing
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	@$(RUN) -m towncrier build --draft --version 0 > /dev/null && echo "changelog.d: fragments are fine"

format: env ## rewrite the files in the house format
	@tools/format.sh

matrix: env ## the unit tests against every supported megatron-core, or MCORE alone
	@$(VENV)/bin/nox $(if $(MCORE),--session "tests($(MCORE))") $(ARGS)

wheel: env ## build dist/*.whl
	@$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

wheel-test: env ## rehearse from the built wheel, installed outside the tree
	@$(VENV)/bin/nox --session wheel $(ARGS)

clean: ## remove what was built and cached, keep the environments
	rm -rf build dist .cache .nox .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find megatron tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
