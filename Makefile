# Needs Python >= 3.11 with venv, and nothing else: the first target that runs installs the rest into .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# One thread per rank: results are then the same bits in one process and in many.
export OMP_NUM_THREADS ?= 1

# What one process has compiled the next ones read, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

# A file's tests share the models that it captures, so that they stay in one process.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo smoke test full zoo lint benchmark gpu format clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## make .venv and install everything into it

# pyproject.toml is the one place that pins torch. To get a CPU build where the default index has
# only CUDA ones, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
$(READY): pyproject.toml
	@echo "installing into .venv: a few minutes the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --disable-pip-version-check -qq --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a byte-level GPT on four stages for a minute; results in build/demo
	$(BIN)/python examples/train_gpt.py --output build/demo

smoke: $(READY) ## every schedule on one tiny model, against eager torch, in half a minute
	$(BIN)/pytest -q tests/test_smoke.py

test: lint ## lint, types and the tests that take no longer than a second or two
	$(BIN)/pytest $(PARALLEL) -m "not slow"

full: lint ## lint, types and every test
	$(BIN)/pytest $(PARALLEL)

zoo: $(READY) ## train some 200 architectures, compare them with eager torch, and write docs/models.md
	PYTHONPATH=tests:tests/helpers $(BIN)/python -m zoo

lint: $(READY) ## lint and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

benchmark: $(READY) ## step time and compile time, as Markdown tables
	$(BIN)/python benchmarks/step_time.py --markdown
	$(BIN)/python benchmarks/compile_time.py --markdown

gpu: $(READY) ## the tests that need a GPU, and step times on it as a Markdown table
	$(BIN)/pytest tests/cuda
	$(BIN)/python benchmarks/gpu.py --markdown

format: $(READY) ## rewrite the code as the linter wants it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
