VENV := .venv
BIN := $(VENV)/bin
# Keeps pytest from starting one TVM per core of a large machine.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal
# What the reference describes: the package, and what variants and policies are written with.
REFERENCE := attentune attentune.group attentune.variant attentune.schedules.common \
  attentune.schedules.policy attentune.record attentune.library attentune.torch

.PHONY: install demo test test-fast lint bench docs clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/attentune demo

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow"

lint: $(VENV)/.installed-test build/typed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The reference, as pages to open in a browser.
docs: $(VENV)/.installed-test
	$(BIN)/pdoc --docformat numpy --output-directory build/reference $(REFERENCE)

bench: $(VENV)/.installed-test
	$(BIN)/attentune bench

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# mypy finds modules by their place on disk, so it gets the two source folders as they install.
.PHONY: build/typed
build/typed:
	rm -rf $@
	mkdir -p $@/attentune
	ln -s $(CURDIR)/python/attentune/* $@/attentune/
	ln -s $(CURDIR)/schedules $@/attentune/schedules

# The sources are installed editable, so only these two files ask for another installation.
$(VENV)/.installed: pyproject.toml CMakeLists.txt | $(BIN)/python
	$(BIN)/python -m pip install --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml CMakeLists.txt | $(BIN)/python
	$(BIN)/python -m pip install --editable ".[test]"
	touch $@ $(VENV)/.installed

# The first of these that is 3.10 or later and can make a virtual environment. pip before 21.3
# has no editable installs of this kind.
$(BIN)/python:
	@for python in python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
	    >/dev/null 2>&1; then \
	    echo "$$python -m venv $(VENV)"; \
	    $$python -m venv --clear $(VENV) && $(BIN)/python -m pip install "pip>=21.3"; exit $$?; \
	  fi; \
	done; \
	echo "attentune needs Python 3.10 or later with the venv module; none was found on PATH" >&2; \
	exit 1
