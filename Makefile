# make setup | quickstart | test | crashtest | check | clean. Everything lives in .venv (.venv-cuda); nothing outside this directory is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
SETUP ?= cpu
# A directory each: the two FBGEMMs install the same files.
VENV := $(if $(filter cuda,$(SETUP)),.venv-cuda,.venv)
BIN := $(VENV)/bin

.PHONY: setup quickstart test crashtest check lint types java clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set everything up, then train and test both model families on synthetic data (CPU)"
	@echo "make test         set everything up, then lint, types and all tests"
	@echo "make crashtest    set everything up, then kill training runs at random: ROUNDS=20 times, SEED=any"
	@echo "make setup        only the set-up, into $(VENV) (SETUP=cuda for GPUs)"
	@echo "make clean        remove $(VENV), data/ and runs/"

setup: $(VENV)/.installed-$(SETUP)

# torchrec comes last and alone: resolved with its dependencies it would replace torch by an unmatched CUDA stack.
$(VENV)/.installed-$(SETUP): requirements/base.txt requirements/$(SETUP).txt requirements/torchrec.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/$(SETUP).txt
	$(BIN)/pip install --quiet --no-deps -r requirements/torchrec.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(SETUP) requirements/dev.txt
	$(BIN)/pip install --quiet -r requirements/dev.txt
	touch $@

quickstart: setup
	$(BIN)/recmill doctor
	$(BIN)/recmill prepare synthetic-clicks --output data/clicks
	$(BIN)/recmill prepare synthetic-histories --output data/histories
	$(BIN)/recmill train configs/quickstart/dlrm.toml --run runs/dlrm --procs 2
	$(BIN)/recmill train configs/quickstart/bert4rec.toml --run runs/bert4rec
	$(BIN)/recmill evaluate runs/dlrm --split test
	$(BIN)/recmill recommend runs/bert4rec --history 12,7,99 --k 10
	@echo
	@$(BIN)/recmill results runs/dlrm runs/bert4rec

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types

# Spark's tests need a Java runtime: installed where we may, else they are skipped and say so.
java:
	@command -v java >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq openjdk-17-jre-headless >/dev/null; } \
		|| echo "no Java here, and none could be installed: the tests of --engine spark will be skipped"

test: check java
	$(BIN)/pytest -n 2 --dist worksteal

ROUNDS ?= 20
SEED ?=
crashtest: setup
	$(BIN)/python tests/crashtest.py --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

clean:
	rm -rf .venv .venv-* data runs
