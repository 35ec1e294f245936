# A fresh clone needs Python >= 3.10, a C++ compiler and make; everything else comes with `make venv`.
PYTHON ?= python3
# DEEPSPEED=x.y.z takes another version of DeepSpeed, in an environment of its own.
DEEPSPEED ?=
VENV ?= .venv$(if $(DEEPSPEED),-$(DEEPSPEED))
BIN := $(abspath $(VENV))/bin
# Processes that run tests at the same time.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
export TORCH_EXTENSIONS_DIR := $(CURDIR)/build/torch_extensions$(if $(DEEPSPEED),-$(DEEPSPEED))
export PATH := $(BIN):$(PATH)

.PHONY: venv demo test test-full fuzz versions lint docs format bench release-check arm64 clean

# The development set is pinned. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes torch's CPU build, which
# is much smaller. Extensions are compiled once.
$(VENV)/.ready: requirements/requirements.txt requirements/requirements-dev.txt requirements/requirements-example.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -r requirements/requirements-dev.txt -r requirements/requirements-example.txt
	$(BIN)/python -m pip install -q --no-deps -e . $(if $(DEEPSPEED),deepspeed==$(DEEPSPEED))
	@echo "Compiling C++ extensions, DeepSpeed's too, which takes one to two minutes on two idle cores"
	cd tests/unit/ops/muon && $(BIN)/python -m helpers.extensions
	touch $@

venv: $(VENV)/.ready

# Trains a small GPT with AdamW and with Muon and compares the losses.
demo: venv
	$(BIN)/python examples/pretrain_gpt/compare.py --out build/demo

# Every test, but of long matrices a sample of their cases.
test: venv
	$(PYTEST) -m "not full" -n $(WORKERS) --dist worksteal

# Everything; with libaio's headers NVMe by DeepSpeed's async_io, which takes minutes to compile, else by plain files.
test-full: venv
	TEST_ASYNC_IO=$(if $(wildcard /usr/include/libaio.h),1) $(PYTEST) -n $(WORKERS) --dist worksteal

# Trains N random configs against the oracle.
N ?= 2000
fuzz: venv
	FUZZ=$(N) $(PYTEST) "tests/unit/ops/muon/zero/test_fuzz.py::test_every_config_trains_or_is_refused_in_words_that_help[$(N)]"

# Runs parts of the suite on the versions of tools/versions.txt, or on some of its ROWS, and writes docs/evidence/versions.md.
ROWS ?=
versions: venv
	WORKERS=$(WORKERS) $(BIN)/python tools/versions.py $(ROWS)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p deepspeed.muon
	$(BIN)/python tools/words.py

# The documentation as a site, into build/site; a broken link is an error.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/python -m benchmarks step

# Builds sdist and wheel and proves the wheel beside stock DeepSpeed, in a fresh environment.
release-check: venv
	$(BIN)/python tools/release_check.py

# Builds and tests the kernels for 64-bit Arm and trains with them, emulated: half an hour on two cores.
arm64: venv
	WORKERS=$(WORKERS) $(BIN)/python tools/arm64.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
