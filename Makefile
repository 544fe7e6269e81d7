# Everything is installed into .venv (or .venv-cuda); nothing outside this directory is touched. `make` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
DEVICE ?= cuda
# `make gpu-validation` uses the environment of its device, everything else that of the CPU unless SETUP says otherwise.
SETUP ?= $(if $(filter gpu-validation,$(MAKECMDGOALS)),$(DEVICE),cpu)
# One directory each, because both FBGEMM packages install the same files.
VENV := $(if $(filter cuda,$(SETUP)),.venv-cuda,.venv)
BIN := $(VENV)/bin

.PHONY: help setup quickstart captures pictures python312 test crashtest rehearse hostile gpu-validation check lint format types java chromium launchers trackers object-store clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   set up $(VENV), then train and test both kinds of model on synthetic data (CPU)"
	@echo "make test         set up $(VENV), then run the linter, the type checker and all tests"
	@echo "make check        run the linter and the type checker only"
	@echo "make format       format the code and fix what the linter can fix"
	@echo "make crashtest    kill training runs at random moments: ROUNDS=20 times, SEED=any number, STORE=cached_ssd"
	@echo "make rehearse     preempt a Slurm job ROUNDS=20 times: saved, requeued, finished with the same losses"
	@echo "make hostile      try to break the command: TRIALS=1000, MINUTES=at most, SEED=any number, ONLY=one trial"
	@echo "make gpu-validation  run every feature on the GPUs of this machine: GPUS=all of them, DEVICE=cpu to try it without"
	@echo "make python312     install the wheel with Python 3.12 (PYTHON312=) and the pinned torch in .venv-3.12; train, evaluate"
	@echo "make captures     record what training prints in a terminal, for docs/terminal (needs tmux)"
	@echo "make pictures     draw the pictures of reports in docs/pictures from a real run (needs Chromium)"
	@echo "make setup        set up $(VENV) only (SETUP=cuda for GPUs)"
	@echo "make clean        remove $(VENV), data/ and runs/"

setup: $(VENV)/.installed-$(SETUP)

# torchrec is installed last and without its dependencies, which would replace torch by a CUDA build that does not match.
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
	$(BIN)/recmill train quickstart/dlrm --run runs/dlrm --procs 2
	$(BIN)/recmill train quickstart/bert4rec --run runs/bert4rec
	$(BIN)/recmill evaluate runs/dlrm --split test
	$(BIN)/recmill recommend runs/bert4rec --history 12,7,99 --k 10
	@echo
	@$(BIN)/recmill results runs/dlrm runs/bert4rec

captures: setup
	$(BIN)/python -m benchmarks.captures

pictures: setup chromium
	$(BIN)/python -m benchmarks.pictures

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types

# Spark's tests need a Java runtime. Without permission to install one, these tests are skipped and say so.
java:
	@command -v java >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq openjdk-17-jre-headless >/dev/null; } \
		|| echo "no Java here, and none could be installed: the tests of --engine spark will be skipped"

# The browser in which reports are tested.
chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| echo "no Chromium here, and none could be installed: the tests of reports in a browser will be skipped"

# Slurm and Open MPI for the tests of `recmill launch`, from Debian; MPICH and torchx, which needs an old urllib3, beside
# the environment. Without permission to install them, these tests are skipped and say so.
launchers: $(VENV)/.installed-dev
	@command -v sbatch mpirun qsub >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends slurm-wlm slurm-wlm-torque munge openmpi-bin >/dev/null; } \
		|| echo "no Slurm or Open MPI here, and none could be installed: their tests will be skipped"
	@[ -d $(VENV)/launchers/torchx ] || $(BIN)/pip install --quiet --target $(VENV)/launchers mpich==5.0.2 torchx==0.7.0 \
		|| echo "no MPICH and torchx here, and none could be installed: their tests will be skipped"

# What `recmill export-metrics` writes for, 218 MB, beside the environment. Without it, two tests are skipped and say so.
trackers: $(VENV)/.installed-dev
	@[ -d $(VENV)/trackers/mlflow ] || $(BIN)/pip install --quiet --target $(VENV)/trackers wandb==0.31.0 mlflow-skinny==3.17.2 \
		sqlalchemy==2.1.8 alembic==1.20.1 || echo "no Weights & Biases and MLflow here, and none could be installed: their tests will be skipped"

# A server like S3, for the tests of inputs in object storage: 132 MB, beside the environment.
object-store: $(VENV)/.installed-dev
	@[ -d $(VENV)/object-store/moto ] || $(BIN)/pip install --quiet --target $(VENV)/object-store 'moto[s3]==5.2.5' flask==3.1.3 \
		flask-cors==6.0.5 s3fs==2026.9.0 || echo "no moto here, and it could not be installed: the tests of object storage will be skipped"

test: check java chromium launchers trackers object-store
	$(BIN)/pytest -n 2 --dist worksteal

ROUNDS ?= 20
SEED ?=
STORE ?=
crashtest: setup
	$(BIN)/python -m tests.crashtest --rounds $(ROUNDS) $(if $(STORE),--store $(STORE)) $(if $(SEED),--seed $(SEED))

rehearse: launchers
	REHEARSALS=$(ROUNDS) $(BIN)/pytest tests/distributed/test_launchers.py -k preempted_slurm -n 0 -v

gpu-validation: $(VENV)/.installed-dev
	$(BIN)/python -m tests.gpu_validation --device $(DEVICE) $(if $(GPUS),--procs $(GPUS)) $(if $(STEPS),--steps $(STEPS))

TRIALS ?= 1000
MINUTES ?=
ONLY ?=
hostile: setup
	$(BIN)/python -m tests.hostile --trials $(TRIALS) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ONLY),--only $(ONLY))

# Too slow for CI: about a minute of CPU time for pip alone. The current directory of the commands is not the checkout.
PYTHON312 ?= python3.12
TRIED := .venv-3.12/tried
python312:
	$(PYTHON312) -m venv .venv-3.12
	.venv-3.12/bin/pip install --quiet -r requirements/cpu.txt
	.venv-3.12/bin/pip install --quiet --no-deps -r requirements/torchrec.txt
	rm -rf $(TRIED) && mkdir $(TRIED) && cp -rP src configs pyproject.toml README.md LICENSE $(TRIED)
	.venv-3.12/bin/pip install --quiet --no-deps --no-build-isolation --force-reinstall $(TRIED)/
	rm -rf $(TRIED)/*
	cd $(TRIED) && ../bin/recmill prepare synthetic-clicks --output data/clicks --rows 3000 --tables 20,900
	cd $(TRIED) && ../bin/recmill train quickstart/dlrm --run runs/dlrm --procs 2 --set train.max_steps=3
	cd $(TRIED) && ../bin/recmill evaluate runs/dlrm && ../bin/recmill --version

clean:
	rm -rf .venv .venv-* data runs
