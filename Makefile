# make install | demo | test | check | bench | bench-accuracy | bench-scaling | clean
# TORCH_INDEX: a package index with CPU builds of torch, where plain pip would take the CUDA build of several GB.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools

export HF_HUB_OFFLINE ?= 1

.PHONY: install demo test check lint bench bench-accuracy bench-scaling clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --requirement constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(TOOLS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev,ray,wandb,mlflow,ccl]'
	touch $@

demo: install
	$(BIN)/fleetune demo --processes 2

lint: $(TOOLS)
	$(BIN)/ruff format --check src tests benchmarks lab
	$(BIN)/ruff check src tests benchmarks lab
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q -m 'not slow'

test: lint
	$(BIN)/python -m pytest -q

bench: $(TOOLS)
	$(BIN)/python -m benchmarks.train_speed
	$(BIN)/python -m benchmarks.train_speed --size bert-base --rounds 4 --steps 2 --profile_steps 1
	$(BIN)/python -m benchmarks.train_speed --lengths squad --rounds 5 --steps 2 --profile_steps 1
	$(BIN)/python -m benchmarks.train_memory
	$(BIN)/python -m benchmarks.tuning
	$(BIN)/python -m benchmarks.predict_speed
	$(BIN)/python -m benchmarks.data_memory

# 5 seeds of two trainers: hours
bench-accuracy: $(TOOLS)
	$(BIN)/python -m benchmarks.accuracy

# Needs root: hosts are network namespaces
bench-scaling: $(TOOLS)
	$(BIN)/python -m benchmarks.scaling

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
