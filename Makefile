# Rollyard's targets. `make help` explains each of them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEV_STAMP := $(VENV)/.stamp-dev
TASKS ?= 64
SAMPLES ?= 8
SEEDS ?= 1
# A machine may forbid bytecode. Hundreds of processes start here, and each of them would compile its sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup run demo-train demo-async demo-vllm demo-kubernetes demo-slurm check test test-all bench lint format typecheck crds sync-client page reference docs clean

help: ## Show what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml scripts/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup run
	@touch $@

$(DEV_STAMP): $(STAMP) pyproject.toml scripts/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup dev
	@touch $@

setup: $(DEV_STAMP) ## Set up what the tests and the benchmark need

run: $(STAMP) ## Set up, start everything on this machine, and run the quickstart job (TASKS, SAMPLES)
	@$(BIN)/rollyard quickstart --tasks $(TASKS) --samples $(SAMPLES) --out runs/quickstart

demo-train: $(STAMP) ## A model that learns: GRPO on rollouts from Rollyard, on two cores (SEEDS)
	@PYTHON="$(PYTHON)" $(BIN)/python scripts/demo-train runs/train --seeds $(SEEDS)

demo-async: $(STAMP) ## The same with rollouts that overlap with updates: max_lag 0, 1 and 4 side by side (SEEDS)
	@PYTHON="$(PYTHON)" $(BIN)/python scripts/demo-train runs/async --seeds $(SEEDS) --max-lag 0 1 4

demo-vllm: $(STAMP) ## The same on two vLLM servers, with new weights in the middle (TASKS, SAMPLES)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/demo-vllm runs/vllm --tasks $(TASKS) --samples $(SAMPLES)

demo-kubernetes: $(STAMP) ## The same on a cluster: images, helm install, kubectl apply, and away again (TASKS, SAMPLES)
	@$(BIN)/python scripts/demo-kubernetes runs/kubernetes --tasks $(TASKS) --samples $(SAMPLES)

demo-slurm: $(STAMP) ## The same on Slurm: bridge, sbatch jobs, Apptainer sandboxes, and away again (TASKS, SAMPLES)
	@$(BIN)/python scripts/demo-slurm runs/slurm --tasks $(TASKS) --samples $(SAMPLES)

check: $(DEV_STAMP) ## Lint, types, and the tests that need nothing but this machine: at most 4 minutes
	@VENV="$(VENV)" $(BIN)/python scripts/test check $(PART)

test: $(DEV_STAMP) ## Every invariant, and each real system once (PART=slurm runs one part): at most 25 minutes
	@VENV="$(VENV)" scripts/setup systems "$(PART)"
	@VENV="$(VENV)" $(BIN)/python scripts/test test $(PART)

test-all: $(DEV_STAMP) ## Every variant and every seed, part by part (PART); it goes on where it was stopped: two hours
	@VENV="$(VENV)" scripts/setup all-systems "$(PART)"
	@VENV="$(VENV)" $(BIN)/python scripts/test all $(PART)

bench: $(DEV_STAMP) ## Measure speed and memory beside the baselines, into bench/results.json
	@PYTHON="$(PYTHON)" scripts/vllm-env > /dev/null || echo "bench: the figures of vLLM are not measured" >&2
	@$(BIN)/python bench/run.py --out bench/results.json

lint: $(DEV_STAMP) ## Ruff and the import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports

format: $(DEV_STAMP) ## Let ruff format and mend what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

typecheck: $(DEV_STAMP) ## mypy, strict
	@$(BIN)/mypy

crds: $(DEV_STAMP) ## Generate the CRD YAML from the pydantic models, and copy it into the chart
	@$(BIN)/python -m rollyard_crds && cp crds/yaml/*.yaml helm/rollyard/files/crds/

sync-client: $(DEV_STAMP) ## Generate the sync client from the async one
	@$(BIN)/python scripts/sync-client

page: ## Build the page from web/ with node and npm, into the control plane's package
	@scripts/page

reference: $(DEV_STAMP) ## Write the pages that follow from the code: fields, reasons, options, chart values, states, attacks
	@$(BIN)/python scripts/reference_pages.py
	@$(BIN)/python scripts/option_docs.py
	@$(BIN)/python scripts/machine_docs.py
	@$(BIN)/python scripts/attacks_page.py

docs: reference ## Build the documentation and the API reference into build/docs; a warning is an error
	@$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs && echo build/docs/index.html

clean: ## Remove what was built here (caches outside the tree stay)
	@rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
