# Two commands on a fresh machine with Python 3.10 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow bench lint clean

demo: $(READY)  ## train four optimizers on embedded data; a table and plots in demo/
	$(BIN)/blockadapt demo --out demo

test: lint  ## ruff, mypy and every test but the slow ones
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: $(READY)  ## the tests that take long
	$(BIN)/pytest -n 2 -m slow

bench: $(READY)  ## speed and memory, as ratios within one run; leave the machine alone meanwhile
	$(BIN)/blockadapt bench --out bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,experiments]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo bench
