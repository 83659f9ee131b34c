# Everything happens in .venv, which the first target that needs it makes; the second time takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := test,lint,transformers,peft
PIP := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help install demo test test-all lint format bench clean

help:
	@echo "make demo      plan GPT-2 over real text for 0.6 of its memory, and print the result with its proof"
	@echo "make test      all tests but the slow ones"
	@echo "make test-all  all tests"
	@echo "make lint      ruff, pyright, import contracts, spelling"
	@echo "make format    let ruff mend what it can"
	@echo "make bench     measure the figures of benchmarks/RESULTS.md"
	@echo "make clean     remove .venv and everything that was built"

install: $(VENV)/.installed

# torch comes first and by itself: the pinned version is then there when the rest is resolved, and is not replaced.
$(VENV)/.torch: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) (some hundred MB; once)"
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing keepwise with its development tools (once)"
	@$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

demo: install
	$(BIN)/keepwise fit gpt2 --budget 0.6x

# Tests run on tensors so small that threads only cost time, most of all on a machine that has other work to do.
test test-all: export OMP_NUM_THREADS ?= 1

test: install
	$(BIN)/python -m pytest -m "not slow"

# Properties are tried on new random examples here; `make test` repeats the same ones.
test-all: export HYPOTHESIS_PROFILE ?= search
test-all: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	@if test -f benchmarks/run.py; then $(BIN)/python benchmarks/run.py; else $(BIN)/python benchmarks/stock.py; fi

clean:
	rm -rf $(VENV) build dist out .hypothesis .ruff_cache .import_linter_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
