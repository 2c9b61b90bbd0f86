# Every target sets up .venv from requirements/cpu.lock when it is not there yet (about 3 minutes, 4 GB), then reuses it.
# PYTHON chooses the interpreter of a new .venv: make demo PYTHON=python3.12

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PACKAGES := .venv/.packages
READY := .venv/.project
TWO := --numprocesses 2 --dist loadfile

export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench soak drills lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(READY) ## align SmolLM2-135M on this machine, from a fresh reward model to the held-out report
	$(BIN)/rlhf demo

# Cheap stages first: a failed one stops those that start engines. Two processes, each with whole files: a file's tests
# share what is slow to start, and starting is mostly waiting.
test: test-fast ## every test: unit and simulation, then distributed, integration, e2e
	$(BIN)/pytest $(TWO) tests/distributed tests/integration tests/e2e

test-fast: $(READY) ## unit and simulation tests: no Ray, no vLLM
	$(BIN)/pytest $(TWO) tests/unit tests/simulation

lint: $(READY) ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## every benchmark in benchmarks/
	@set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python -m "benchmarks.$$(basename "$$script" .py)"; done

soak: $(READY) ## 200,000 simulated runs with faults (about 40 minutes on one core)
	$(BIN)/python -m rlhf_cluster.simulation.soak 200000

drills: $(READY) ## 500 seeded drills: a part of a running system is killed, the run has to finish (about 40 minutes)
	$(BIN)/python -m tests.drills.run 500

lock: $(READY) ## write requirements/cpu.lock from what .venv holds
	$(BIN)/python requirements/make_lock.py

clean: ## remove .venv and caches; keeps runs/ and models/
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-deps: dependency resolution would add packages that break this set (see requirements/make_lock.py).
$(PACKAGES): requirements/cpu.lock
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo 'This project needs Python 3.11 or 3.12; name one: make PYTHON=/path/to/python3.11'; exit 1; }
	@echo 'Setting up .venv from requirements/cpu.lock (once; about 3 minutes)'
	"$(PYTHON)" -m venv .venv
	$(BIN)/pip install --quiet --quiet --no-deps -r requirements/cpu.lock
	@touch $@

$(READY): $(PACKAGES) pyproject.toml
	$(BIN)/pip install --quiet --quiet --no-deps --no-build-isolation -e .
	@touch $@
