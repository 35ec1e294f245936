# A fresh clone needs Python >= 3.10, a C++ compiler and make; everything else comes with `make venv`.
PYTHON ?= python3
VENV ?= .venv
DEEPSPEED ?=
BIN := $(VENV)/bin
export TORCH_EXTENSIONS_DIR := $(CURDIR)/build/torch_extensions$(if $(DEEPSPEED),-$(DEEPSPEED))
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: venv demo test test-full lint docs format bench release-check clean

# The development set is pinned; torch is taken as a CPU build where no other is installed.
$(VENV)/.ready: requirements/requirements.txt requirements/requirements-dev.txt requirements/requirements-example.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -r requirements/requirements-dev.txt -r requirements/requirements-example.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

venv: $(VENV)/.ready

# Trains a small GPT with AdamW and with Muon and compares the losses.
demo: venv
	$(BIN)/python examples/pretrain_gpt/compare.py

# The whole suite; DEEPSPEED=x.y.z runs it on another version of DeepSpeed, in an environment of its own.
ifeq ($(DEEPSPEED),)
test: venv
	rm -rf build/torch_extensions/*/*/lock
	$(BIN)/python -m pytest -m "not full and not ranks" -n 2
	$(BIN)/python -m pytest -m "not full and ranks"
else
test:
	$(MAKE) venv VENV=.venv-$(DEEPSPEED) DEEPSPEED=
	.venv-$(DEEPSPEED)/bin/python -m pip install -q --no-deps deepspeed==$(DEEPSPEED)
	rm -rf $(TORCH_EXTENSIONS_DIR)/*/*/lock
	PATH=$(CURDIR)/.venv-$(DEEPSPEED)/bin:$$PATH .venv-$(DEEPSPEED)/bin/python -m pytest -m "not full"
endif

test-full: venv
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p deepspeed.muon

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

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
