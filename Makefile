# Two commands on a fresh machine with Python 3.10 or newer: `make demo` and `make test`. `make` alone lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow browser docs pictures mutants bench lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' $(MAKEFILE_LIST) | while read -r target words; do printf '%-10s %s\n' "$$target" "$$words"; done

demo: $(READY)  ## train four optimizers on embedded data; a table and plots in demo/
	$(BIN)/blockadapt demo --out demo

test: lint  ## ruff, mypy and every test but the slow ones; installs nothing outside .venv
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(READY)  ## the tests that take long
	$(BIN)/pytest -n 2 --dist worksteal -m slow --timeout 3600

browser:  ## install Debian's Chromium, which tests of the report's page need; takes apt-get and root
	@if command -v chromium; then exit; fi; \
	if ! command -v apt-get > /dev/null || [ "$$(id -u)" != 0 ]; then \
		echo "make browser: cannot install Chromium without apt-get and root; install it so that \`chromium\` is in PATH." >&2; exit 1; \
	fi; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium chromium-driver

docs: $(READY)  ## build the documentation site into site/; fails on a broken link and on a name without documentation
	@$(BIN)/python -c "import mkdocs, mkdocstrings" 2> /dev/null || \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build

pictures: $(READY)  ## draw the documents' pictures anew; the training behind learning-rates.svg only with its own script
	for picture in groupings clipping valley "learning_rates --draw"; do \
		set -- $$picture; $(BIN)/python docs/pictures/$$1.py $$2; \
	done

mutants: $(READY)  ## break the library in one place after another, and see whether the tests notice
	$(BIN)/python tests/mutants/mutants.py

bench: $(READY)  ## speed and memory, as ratios within one run; leave the machine alone meanwhile
	$(BIN)/blockadapt bench --out bench

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,experiments]"
	touch $(READY)

clean:  ## remove the environment and what demo, docs and bench wrote
	rm -rf $(VENV) demo bench site
