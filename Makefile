# Everything a clone needs: `make` lists the targets. Each target prepares the environment that it uses, once.

# The interpreter for new environments: the first of these that starts and is supported.
PYTHON := $(or $(PYTHON),$(shell for candidate in python3 python3.11 python3.12 python3.13; do \
	"$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 \
	&& { echo "$$candidate"; break; }; done))

# Where torch's CPU wheel comes from if pip does not find it by default: the address of PyTorch's CPU wheel index, shown on
# PyTorch's install page. On Linux the default package index has the CUDA build only, and setup stops and says so.
TORCH_INDEX ?=

# Further arguments for the program that a target runs: make demo ARGS="--steps 20 --seed 3", make test ARGS="-k journal".
ARGS ?=

# The other versions that `make test-others` tries.
OTHER_PYTHONS ?= 3.12 3.13

VENV := .venv
IN := $(VENV)/bin
CORE_VENV = .venv-core-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
GATED := rc/events/*,rc/projections/*,rc/lifecycle.py,rc/decide.py,rc/next_effects.py

.DEFAULT_GOAL := help
.PHONY: help setup setup-core demo test test-core test-engine test-others coverage lint format types clean check-python

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: check-python ## Prepare .venv with vLLM for CPU (TORCH_INDEX= says where torch comes from if need be)
	@$(PYTHON) requirements/install.py $(VENV) all --torch-index "$(TORCH_INDEX)"

setup-core: check-python ## Prepare an environment without torch and vLLM (PYTHON= chooses the version)
	@$(PYTHON) requirements/install.py $(CORE_VENV) core

demo: setup ## Train a small policy with RL on one real vLLM server that is updated while it runs
	@$(IN)/rc demo $(ARGS)

test: setup ## Run every test, those on a real vLLM server too
	@$(IN)/python -m pytest $(ARGS)

test-engine: setup ## Run the tests that need a real vLLM server
	@$(IN)/python -m pytest -m engine $(ARGS)

test-core: setup-core ## Run the tests that need no engine, without torch and vLLM (PYTHON= chooses the version)
	@$(CORE_VENV)/bin/python -m pytest -m "not engine" $(ARGS)

test-others: ## Run test-core on each of OTHER_PYTHONS that can be started here
	@failed=; for version in $(OTHER_PYTHONS); do \
		found=; for candidate in "python$$version" "$$(pyenv root 2>/dev/null)/versions/$$version".*/bin/python; do \
			if "$$candidate" -c '' >/dev/null 2>&1; then found=$$candidate; break; fi; done; \
		if [ -z "$$found" ]; then echo "Python $$version: skipped, no interpreter of it can be started here"; continue; fi; \
		echo "Python $$version: $$found"; \
		$(MAKE) --no-print-directory test-core PYTHON="$$found" || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "test-core failed on Python$$failed"; exit 1; fi

coverage: setup ## Run the tests that need no engine and hold the core to 90 % branch coverage
	@$(IN)/python -m pytest -m "not engine" --cov --cov-report= $(ARGS)
	@$(IN)/coverage report --include='$(GATED)' --precision=1 --fail-under=90 || { \
		echo "The files above need at least 90 % branch coverage together: test the lines in the last column."; exit 1; }

lint: setup ## Check style, format and the direction of imports
	@$(IN)/ruff check || { echo "ruff found the above; 'make format' repairs what can be repaired."; exit 1; }
	@$(IN)/ruff format --check --quiet || { echo "Some files are not formatted: run 'make format'."; exit 1; }
	@$(IN)/lint-imports --no-logo

format: setup ## Repair style and format where that can be done safely
	@$(IN)/ruff check --fix-only
	@$(IN)/ruff format

types: setup ## Check types, strictly
	@$(IN)/mypy rc tests requirements $(if $(wildcard harness/*.py harness/*/*.py),harness)

clean: ## Remove environments, caches and builds; what runs wrote stays
	rm -rf .venv .venv-core-* build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

check-python:
	@test -n "$(PYTHON)" || { echo "No Python 3.11, 3.12 or 3.13 was found: install one, or name it: make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) cannot be started or is older than Python 3.11, which RolloutCore needs: make PYTHON=/path/to/python3.11"; \
		exit 1; }
