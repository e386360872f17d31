# `make demo` and `make test` set everything up on a fresh machine; nothing has to be configured.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The CPU build of torch is enough for everything here; any torch from 2.4 on works.
TORCH ?= torch==2.13.0
# For two processors; some tests mostly wait. In the order of tests/conftest.py: xdist's own has the
# files of few tests last, slow or not.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder
# Set in many containers: each of the tests' processes would compile the package anew.
export PYTHONDONTWRITEBYTECODE =
STAMP = $(VENV)/.installed

.PHONY: demo test lint bench bench-ort bench-batching gpu-check docs dist setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py scripts/setup.sh $(wildcard native/*.?pp)
	PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" scripts/setup.sh
	touch $@

demo: $(STAMP)
	$(BIN)/trims demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.host $(BENCH_ARGS)

bench-ort: $(STAMP)
	$(BIN)/python -m benchmarks.ort $(BENCH_ARGS)

# The batcher against those of others, in an environment of its own; about half an hour.
bench-batching: $(STAMP)
	VENV="$(VENV)" benchmarks/peers/setup.sh .venv-peers
	.venv-peers/bin/python -m benchmarks.batching_overhead
	.venv-peers/bin/python -m benchmarks.batching_peers --choose --devices sleep --seconds 5 --repeats 1 --jobs 4
	.venv-peers/bin/python -m benchmarks.batching_peers --jobs 4 $(BENCH_ARGS)

# On a machine with a GPU and its own torch; WHEELS: a folder made by scripts/gpu_wheels.sh.
gpu-check:
	scripts/gpu_check.sh $(if $(WHEELS),--wheels "$(WHEELS)") $(GPU_CHECK_ARGS)

docs: $(STAMP)
	$(BIN)/python scripts/check_docs.py

# What is uploaded to a package index; PYTHONS="python3.10 python3.12": a wheel for each.
dist:
	scripts/dist.sh dist $(or $(PYTHONS),$(PYTHON))

clean:
	rm -rf $(VENV) .venv-peers build dist *.egg-info trims_shim/_native*.so
