PYTHON ?= python
BIN = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
# Tiny models run faster on one thread, above all beside other work: a process for each core instead.
WORKERS ?= auto
# An older SGLang that is accepted, in a folder of its own, and the tests that ran on it.
SGLANG ?= 0.5.22
SGLANG_TESTS = $(addprefix tests/sglang/, test_agreement.py test_fork_server.py test_monitoring.py test_plugin.py \
	test_pool.py test_refusals.py features hicache) tests/runtime_loader/sglang/compat
# The Triton that the newest SGLang's torch requires (2.14.1, ~=3.8.0). Bounds of counts are the pinned one's.
TRITON ?= 3.8.0
KERNEL_TESTS = tests/runtime_loader/kernels/
COUNTED = test_the_decode_loop_is_short_converts_nothing_and_copies_codes_by_sixteen_bytes[architectures]
TRITON_TESTS = $(addprefix $(KERNEL_TESTS), test_launch.py test_kernels_compiled.py) \
	--deselect "$(KERNEL_TESTS)test_kernels_compiled.py::$(COUNTED)"
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

# What README's results table is made from: the demo model's servers on a processor.
ABLATION = --lengths 10,100,1000,4000 --concurrency 1,4,16 --batches 1,4,16 --repeats 3 --kv-memory 64MiB \
	--server-args "--device cpu --dtype bfloat16 --disable-cuda-graph --mem-fraction-static 0.5 --max-running-requests 16"

.PHONY: check test test-sglang test-triton test-launches test-amx test-full gpu lint format demo demo-model schema wheels ablation catalogue catalogue-index verdicts notebook picture

check: lint ## what every commit passes
	$(PYTEST) -m "not slow and not full and not gpu" tests

test: lint ## what CI runs
	$(PYTEST) -m "not gpu and not full" tests

test-sglang: .releases/sglang/$(SGLANG) ## the tests of servers on an older SGLang: make test-sglang SGLANG=0.5.22
	PYTHONPATH=$(abspath $<)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTEST) -m "not gpu and not full" $(SGLANG_TESTS)

test-triton: .releases/triton/$(TRITON) ## kernels compiled for GPUs that are not there, and launched on a driver that checks
	PYTHONPATH=$(abspath $<)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTEST) -m "not gpu and not full" $(TRITON_TESTS)

test-launches: .releases/triton/$(TRITON) ## the same of every format; on one architecture: make test-launches ARCH=90
	PYTHONPATH=$(abspath $<)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTEST) -k "every$(if $(ARCH), and $(ARCH))" \
		$(KERNEL_TESTS)test_launch.py

test-amx: ## libraries for tiles (AMX) on a processor that Bochs emulates, which it builds first
	$(PYTHON) -m tools.amx.bochs
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/runtime_loader/cpu/test_native_attention_amx.py

.releases/%:
	rm -rf $@.part
	$(PYTHON) -m pip install --quiet --no-deps --target $@.part $(subst /,==,$*)
	mv $@.part $@

test-full: lint ## everything, each server with processes of its own; a machine with a GPU runs the gpu tests too
	KVTUNER_TESTS_FORK=0 $(PYTEST) tests

gpu: ## on a machine with one: are the kernels right, and how fast
	$(PYTHON) benchmarks/gpu.py || test $$? -eq 3 # what was left out for want of time stops nothing
	$(PYTHON) benchmarks/hicache.py --json benchmarks/results/hicache-gpu.json

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(BIN)/lint-imports

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

ablation: ## the table of servers in docs/benchmark.md; about half an hour on two cores
	OMP_NUM_THREADS=1 $(BIN)/kvtuner search --model demo --budget 4bit --no-report --out runs/demo-4bit
	OMP_NUM_THREADS=1 PYTHONPATH=examples/sglang_on_cpu $(BIN)/kvtuner bench runs/demo-4bit --model demo --ablation $(ABLATION) \
		--out runs/demo-ablation
	mkdir -p benchmarks/results/ablation-cpu
	cp runs/demo-ablation/bench.html runs/demo-ablation/bench.md runs/demo-ablation/bench.json runs/demo-ablation/*.svg \
		benchmarks/results/ablation-cpu/

demo:
	$(BIN)/kvtuner search --model demo --budget 4bit

demo-model:
	$(PYTHON) -m tools.train_demo_model --out calibration/demo/model

schema:
	$(PYTHON) -m tools.make_schemas

wheels: ## the packages of a release: sources, and wheels with and without compiled libraries
	rm -f dist/kvtuner-*
	$(PYTHON) -m build --no-isolation
	$(PYTHON) -m tools.make_platform_wheels dist/kvtuner-*-py3-none-any.whl --out dist

catalogue: ## searches the profiles that come with kvtuner anew
	OMP_NUM_THREADS=1 $(PYTHON) -m tools.make_catalogue

notebook: ## runs examples/quickstart.ipynb anew
	OMP_NUM_THREADS=1 $(PYTHON) -m tools.run_quickstart

picture: demo ## draws README's picture, of its search
	$(PYTHON) -m tools.make_readme_picture

verdicts: ## prints README's table, of the catalogue's profiles
	$(PYTHON) -m tools.make_verdict_table

catalogue-index: ## after a profile was added to exported_configs/profiles
	$(PYTHON) -m tools.make_catalogue_index
