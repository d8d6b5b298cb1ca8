# `make help` lists the targets.
#
# Without PYTHON= everything runs in .venv, made from requirements.txt with the python3 on PATH. With PYTHON=/path/to/python
# it runs in that environment as it is: nothing is installed, and what is missing is named.
# ARGS= is handed to the program that a target runs: make run ARGS="--steps 20", make test ARGS="-k mish".

.DEFAULT_GOAL := help
.PHONY: help setup build run test test-gpu matrix planted bench budgets docs site lint tidy format sanitize wheel release hub aarch64 clean FORCE

ifneq ($(origin PYTHON),undefined)
ifeq ($(strip $(PYTHON)),)
$(error PYTHON= is empty: name a Python that has torch, or leave PYTHON out and make sets up .venv)
endif
READY :=
else
PYTHON := .venv/bin/python
READY := .venv/ready
endif

# Here a build is for the machine it runs on; wheels are for every GPU, so they leave the list as the user set it.
ifeq ($(origin TORCH_CUDA_ARCH_LIST),undefined)
setup build run test test-gpu planted bench budgets docs sanitize: export TORCH_CUDA_ARCH_LIST = native
endif

BUILD_NEEDS := ninja
TEST_NEEDS := $(BUILD_NEEDS) pytest pytest-xdist hypothesis numpy setuptools transformers rich matplotlib nbclient ipykernel
C_SOURCES = find extension_cpp templates tests examples benchmarks -name .venv -prune -o \
  -type f -regex '.*\.\(c\|h\|cpp\|cu\|cuh\)' -print 2>/dev/null
CLANG_FORMAT = $$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/clang-format
CLANG_TIDY ?= clang-tidy-14
need = $(if $(READY),,@command -v $(PYTHON) >/dev/null || { echo "error: PYTHON=$(PYTHON) was not found." >&2; exit 1; }; \
  $(PYTHON) check_environment.py $(1))

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo '  PYTHON=/path/to/python uses that environment; ARGS="..." is handed on; build_library.py names the build variables'

# The stamp comes last, so that a set-up that broke off is taken up again. A .venv whose python3 is gone is made anew.
# Of one that another user or another folder has, check_environment.py says so.
.venv/ready: requirements.txt $(shell test -x .venv/bin/python && \
  grep -qsxF "$$(pwd -P)" .venv/lib/python*/site-packages/extension_cpp.pth || echo FORCE)
	@test -x .venv/bin/python || command -v python3 >/dev/null || \
	  { echo "error: Python 3.10 or newer is needed, and there is no python3 on PATH." >&2; exit 1; }
	@if test -x .venv/bin/python; then .venv/bin/python check_environment.py machine; \
	  else python3 check_environment.py machine && python3 -m venv --clear .venv; fi
	@echo "Installing requirements.txt into .venv: torch and its CUDA libraries, a download of 3 GB that takes 5 GB of disk."
	@echo "PYTHON=/path/to/python uses an environment that has torch instead."
	@# uv unpacks several packages at once, which takes minutes less. It reads no settings of pip's: where it finds no
	@# index, pip does the work.
	@.venv/bin/python -m pip install --disable-pip-version-check --quiet -c requirements.txt uv
	@.venv/bin/python -m uv pip install --python .venv/bin/python --compile-bytecode -r requirements.txt || \
	  { echo "uv could not install them; pip does." >&2; \
	    .venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt; }
	@# The package of this folder, so that scripts elsewhere find it, too.
	@.venv/bin/python -c 'import os, pathlib, sysconfig; \
	  pathlib.Path(sysconfig.get_path("purelib"), "extension_cpp.pth").write_text(os.getcwd() + "\n")'
	@touch $@

setup: $(READY)  ## make .venv from requirements.txt

build: $(READY)  ## compile the library for this machine: its CPU, and its GPU if it has one
	$(call need,$(BUILD_NEEDS))
	@$(PYTHON) build_library.py

run: $(READY)  ## build, then show what the operators do: python -m extension_cpp demo
	$(call need,$(BUILD_NEEDS) rich matplotlib)
	@$(PYTHON) build_library.py
	@$(PYTHON) -m extension_cpp demo $(ARGS)

# Two workers, each with a file or an op of the battery at a time (tests/conftest.py). ARGS="-n 0 ..." for a debugger.
test: $(READY)  ## build, then run the tests, on the GPU too if there is one
	$(call need,$(TEST_NEEDS))
	@$(PYTHON) build_library.py
	@$(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

test-gpu: $(READY)  ## build, then run the tests that use the GPU
	$(call need,$(TEST_NEEDS))
	@$(PYTHON) build_library.py
	@$(PYTHON) -m pytest --device cuda -k cuda $(ARGS)

bench: $(READY)  ## build, then time the operators beside PyTorch's; ARGS="compare A B" and plot look at it
	$(call need,$(BUILD_NEEDS) rich matplotlib)
	@$(PYTHON) build_library.py
	@$(PYTHON) -m benchmarks $(ARGS)

budgets: $(READY)  ## build, then print the library's size, its kernels by family, the slowest translation units
	$(call need,$(BUILD_NEEDS))
	@$(PYTHON) build_library.py
	@$(PYTHON) scripts/kernel_resources.py --summary $(ARGS)

docs: $(READY)  ## build, then write docs/ops.md and the documents' tables from docstrings, schemas and results
	$(call need,$(BUILD_NEEDS) rich)
	@$(PYTHON) build_library.py
	@$(PYTHON) -m scripts.document_ops

site: $(READY)  ## build, then site/: documents, API reference and all published tables as a site, with links checked
	$(call need,$(BUILD_NEEDS) mkdocs mkdocs-material mkdocstrings-python)
	@$(PYTHON) build_library.py
	@$(PYTHON) -m mkdocs build $(ARGS)

sanitize: $(READY)  ## C tests under address and undefined sanitizers; on a GPU the tests under compute-sanitizer
	$(call need,$(TEST_NEEDS))
	@$(PYTHON) build_library.py
	@$(PYTHON) -m pytest tests/test_c.py $(ARGS)
	@PYTHON=$(PYTHON) scripts/sanitize_gpu

aarch64: $(READY)  ## the C tests compiled for aarch64 and run under qemu-user
	$(call need,$(TEST_NEEDS))
	@$(PYTHON) build_library.py
	@$(PYTHON) -m pytest --slow tests/test_c.py -k aarch64 $(ARGS)

wheel: $(READY)  ## dist/*.whl: one file for every Python from 3.10 and torch from 2.10, every GPU from 7.5
	$(call need,$(BUILD_NEEDS) setuptools wheel)
	@rm -rf dist build/bdist.* build/lib.*
	@$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@ls -l dist

# Named here for both: in `make wheel release` wheel has its turn before release.
ifneq ($(filter release,$(MAKECMDGOALS)),)
wheel release: export GLIBC ?= 2.28
endif
release: wheel  ## that wheel for glibc 2.28 and the sdist, both checked in clean environments of every Python here
	$(call need,rich ziglang)
	@$(PYTHON) -m scripts.release $(ARGS)

hub: $(READY)  ## build/torch-stable-abi*/: copies for Hugging Face's kernels, for CPUs and for CUDA if there is nvcc
	$(call need,$(BUILD_NEEDS) kernel-abi-check)
	@$(PYTHON) -m scripts.hub

matrix: wheel  ## test that wheel on the oldest and newest torch and every Python of this machine (downloads gigabytes)
	$(call need,rich)
	@$(PYTHON) scripts/matrix.py dist/*.whl $(ARGS)

planted: $(READY)  ## plant 60 errors one by one and list those that no test sees (hours); ARGS="--cpu --jobs 8"
	$(call need,$(TEST_NEEDS))
	@$(PYTHON) build_library.py
	@$(PYTHON) -m tests.planted $(ARGS)

lint: $(READY)  ## ruff, mypy, clang-format
	$(call need,ruff mypy clang-format)
	@$(PYTHON) -m ruff check --quiet .
	@$(PYTHON) -m ruff format --check --quiet .
	@$(PYTHON) -m mypy
	@$(C_SOURCES) | xargs $(CLANG_FORMAT) --dry-run -Werror
	@# Comments, too, which clang-format leaves as they are.
	@! $(C_SOURCES) | xargs grep -HnE '.{101}' || { echo "error: these lines have more than 100 columns." >&2; exit 1; }

# $(1): flags of the compiler; the files come from standard input.
TIDY = xargs -P 2 -n 3 sh -c '$(CLANG_TIDY) --quiet "$$@" -- -Iextension_cpp/csrc $(1)' clang-tidy
tidy: $(READY)  ## clang-tidy on the C and the C++ (minutes), with clang-tidy 14
	$(call need,)
	@command -v $(CLANG_TIDY) >/dev/null || \
	  { echo "error: $(CLANG_TIDY) was not found (Debian: apt install clang-tidy-14)." >&2; exit 1; }
	@find extension_cpp/csrc -name '*.c' | $(call TIDY,-std=c17 -DCPU_LEVEL_V3 -mavx2 -mfma -mf16c)
	@torch=$$($(PYTHON) -c 'import build_library; print(build_library.torch_folder())') && export torch && \
	  find extension_cpp/csrc -name '*.cpp' | $(call TIDY,-std=c++17 -isystem "$$torch/include" \
	  -DTORCH_EXTENSION_NAME=extension_cpp -DBUILD_INFO=__FILE__)

format: $(READY)  ## lay out the code as lint wants it
	$(call need,ruff clang-format)
	@$(PYTHON) -m ruff check --quiet --fix-only .
	@$(PYTHON) -m ruff format .
	@$(C_SOURCES) | xargs $(CLANG_FORMAT) -i

clean:  ## remove what was built; .venv and .matrix stay
	rm -rf build dist out site *.egg-info extension_cpp/*.so .pytest_cache .mypy_cache .ruff_cache
	find . -name .venv -prune -o -name .matrix -prune -o -name __pycache__ -type d -print | xargs rm -rf
