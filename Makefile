# Needs Python >= 3.11 with venv, and nothing else: the first target that runs installs the rest into .venv.
# With VENV= nothing is installed, and PYTHON runs as it is, for example in a container with torch and CUDA.
# TORCH=2.15.0 takes another version of torch than the pinned one, in an environment of its own.

PYTHON ?= python3
VENV ?= .venv$(if $(TORCH),-$(TORCH))
RUN := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
INSTALLED := $(if $(VENV),$(VENV)/.installed)
READY := $(if $(VENV),$(VENV)/.ready)

# One thread per rank: results are then the same bits in one process and in many.
export OMP_NUM_THREADS ?= 1

# What one process has compiled the next ones read, also where the environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=

# A file's tests share the models that it captures, so that they stay in one process.
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo smoke test full docs zoo prose lint benchmark gpu gpu-tests gpu-times gpu-offload package format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## make .venv and install everything into it, tools for tests included

# pyproject.toml is the one place that pins torch. To get a CPU build where the default index has
# only CUDA ones, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. With TORCH, the other
# requirements of development are listed without that pin.
ifdef VENV
$(INSTALLED): pyproject.toml
	@echo "installing torch and pipec into $(VENV), the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --disable-pip-version-check -qq --editable . \
		'torch==$(if $(TORCH),$(TORCH),$(shell sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml))'
	@touch $@

$(READY): $(INSTALLED)
	@echo "installing the tools for tests into $(VENV): a few minutes the first time"
	@$(if $(TORCH),$(RUN) tests/helpers/unpinned_requirements.py > $(VENV)/requirements.txt)
	@$(RUN) -m pip install --disable-pip-version-check -qq --editable $(if $(TORCH),. \
		--requirement $(VENV)/requirements.txt 'torch==$(TORCH)','.[dev]')
	@$(RUN) tests/helpers/chromium.py
	@touch $@
else
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
endif

demo: $(INSTALLED) ## train a byte-level GPT on four stages for a minute, and write a page of its steps
	$(RUN) examples/train_gpt.py --output build/demo

smoke: $(READY) ## every schedule on one tiny model, against eager torch, in 15 s
	$(RUN) -m pytest -q tests/test_smoke.py

# Types are those of the pinned torch.
test: $(if $(TORCH),$(READY),lint) ## lint, types and the tests that take no longer than a second or two
	$(RUN) -m pytest $(PARALLEL) -m "not slow"

full: lint ## lint, types and every test
	$(RUN) -m pytest $(PARALLEL)

docs: $(READY) ## the documentation, as a site, in build/docs; a warning is an error
	$(RUN) -m sphinx -W --keep-going -q docs build/docs

zoo: $(READY) ## train some 200 architectures, compare them with eager torch, and write docs/models.md
	PYTHONPATH=tests:tests/helpers $(RUN) -m zoo

prose: $(READY) ## find phrases that have to be decoded, in pages and public docstrings
	PYTHONPATH=.:tests/helpers $(RUN) tests/helpers/prose.py

lint: $(READY) prose ## lint, types and prose
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

benchmark: $(READY) ## step time and compile time, as Markdown tables
	$(RUN) benchmarks/step_time.py
	$(RUN) benchmarks/compile_time.py

gpu: gpu-tests gpu-times gpu-offload ## all of the next three, each less than ten minutes

gpu-tests: $(READY) ## the tests that need a GPU
	$(RUN) tests/cuda/check_environment.py
	$(RUN) -m pytest tests/cuda --session-timeout 560

gpu-times: $(READY) ## step times on a GPU as a Markdown table
	$(RUN) tests/cuda/check_environment.py
	timeout 590 $(RUN) benchmarks/gpu.py

gpu-offload: $(READY) ## a model of 6.7B parameters on a GPU, with its weights in host memory
	timeout 590 $(RUN) benchmarks/gpu.py --offload 24 --width 4096 --layers 32 --batch 16 --steps 2

package: $(READY) ## build wheel and sdist into dist/, and check them
	rm -rf dist
	$(RUN) -m build --outdir dist
	$(RUN) -m twine check --strict dist/*

format: $(READY) ## rewrite the code as the linter wants it
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

clean: ## remove .venv and everything that was built
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
