PYTHON ?= python
BIN = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
# Tiny models run faster on one thread, above all beside other work: a process for each core instead.
WORKERS ?= auto
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

.PHONY: check test test-full gpu lint format demo demo-model schema

check: lint ## what every commit passes
	$(PYTEST) -m "not slow and not gpu" tests

test: lint ## what CI runs
	$(PYTEST) -m "not gpu and not full" tests

test-full: lint ## everything; a machine with a GPU runs the gpu tests too
	$(PYTEST) tests

gpu: ## on a machine with one: are the kernels right, and how fast
	$(PYTHON) benchmarks/gpu.py
	$(PYTHON) benchmarks/hicache.py --json benchmarks/results/hicache-gpu.json

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(BIN)/lint-imports

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

demo:
	$(BIN)/kvtuner search --model demo --budget 4bit

demo-model:
	$(PYTHON) -m kvtuner.calibration.demo.train --out calibration/demo/model

schema:
	$(PYTHON) -m kvtuner.exported_configs.schema
