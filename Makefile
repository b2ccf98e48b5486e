# Needs Python 3.11 or newer and make; everything else goes into .venv, at the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
OLDEST := .venv-oldest

.DEFAULT_GOAL := help
.PHONY: help demo test test-integrations test-oldest lint bench bench-gpu zoo diseases evidence clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## compare five normalizers on small images, with a report (under four minutes)
	$(BIN)/normkit demo

test: $(READY) ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-oldest: $(OLDEST)/.installed ## layers, engine and their properties with the oldest torch that is supported
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal tests/engine tests/layers tests/properties

test-integrations: $(VENV)/.integrations ## layers in ONNX files; Lightning, Transformers, Accelerate, timm and Ray (about three minutes)
	NORMKIT_INTEGRATIONS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations tests/lab/sweep/test_ray.py

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## time every layer on this machine
	$(BIN)/python -m benchmarks

bench-gpu: $(READY) ## measure on a GPU what docs/benchmark-gpu.json lacks, and write the pages (about seven minutes)
	$(BIN)/python -m benchmarks.gpu
	$(BIN)/python -m benchmarks.gpu --page

zoo: $(READY) ## convert a sample of timm's and all of torchvision's models (about three minutes)
	$(BIN)/python -m tools.zoo --sample 60 --in-turn

diseases: $(READY) ## diagnose models with known faults (about half a minute)
	$(BIN)/python -m tools.diseases

evidence: $(READY) ## write the pages about the papers from the committed results
	$(BIN)/python -m tools.evidence

clean: ## remove .venv and everything that tools left behind
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the stamp is touched last, so that an interrupted installation is done again; not compiled, for that
# takes a minute for 20,000 files, most of which are never imported, and Python does it when they are
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "normkit needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[lab,test,dev]'
	@touch $@

$(VENV)/.integrations: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[integrations]'
	@touch $@

# torch as old as pyproject.toml allows, the rest as in .venv
$(OLDEST)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "normkit needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(OLDEST)
	grep -v '^torch' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-compile -c $(OLDEST)/constraints.txt -e . \
	  numpy pytest hypothesis expecttest pytest-timeout pytest-xdist \
	  "torch==$$(sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).*"
	@touch $@
