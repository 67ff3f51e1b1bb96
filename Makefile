# Each target sets up what it needs in .venv, on a fresh machine too, and is quick to start the second time.
#
#   make demo                        two worker processes train a network together; one is killed on the way (about half a minute)
#   make test                        each promise once: every test, but its sweeps (ARGS="tests/engine -k cancel" for a part, JOBS=1 to debug)
#   make test-all                    every case of every test: seeds, rows by data types, crossed parametrizations, both event loops (REST=1: what neither make test nor make docs runs)
#   make simulator                   every case of the part that runs CUDA kernels in numba's simulator (ARGS="tests/cuda/test_streams.py")
#   make native                      the tests of compiled functions, with native programs from the first run on, every access to memory checked
#   make ptx                         compiles every CUDA kernel to PTX, and tests the driver; no device is needed (ARGS=--small: single precision only)
#   make ray                         the tests of RayCluster, on several Ray nodes of this machine, in .venv-ray (figures: .venv-ray/bin/python -m tests.ray)
#   make interop                     bridges to PyTorch and JAX, the Array API suite (ARRAY_API_TESTS=its folder, else cloned), SciPy, scikit-learn, einops
#   make browser                     the dashboard, pictures and documents in headless Chromium, in .venv-browser; screenshots in out/dashboard
#   make cpus                        the numeric tests under every code path of this CPU, and on other Pythons (ARGS="--paths oldest threads-8")
#   make matrix                      tests on other Pythons, with lowest and highest versions, other settings and other releases (ARGS=--list names the rows)
#   make flaky                       tests of the network and of processes ten times beside four busy processes; goes on where it was stopped
#   make counts                      instructions of small passes, counted by valgrind, beside those that are kept (ARGS=--renew keeps the new ones)
#   make lint                        ruff and mypy --strict
#   make types                       pyright --verifytypes on the installed package, and programs as users write them under pyright and mypy, in .venv-types
#   make format                      what ruff can mend by itself
#   make docs                        the documentation as HTML in out/docs, warnings are errors; its code and doctests are run; in .venv-docs
#   make chaos                       thousands of fault schedules and real processes killed, with a table (ARGS="--scale 0.1" for a tenth)
#   make release-checks              the same, as much as before a release: many hours; goes on where it was stopped (ARGS="--hours 1 --jobs 2")
#   make release                     builds sdist and wheel, checks both, and tests the wheel (ARGS=--small: not that; ARGS=--all: with every test)
#   make wan                         four processes train over shaped links of 1 Mbit/s; one is killed and joins again (ARGS=--small for seconds' worth)
#   make scale                       1,000 workers on the simulated network, training while workers are lost; tables (ARGS=--small for a minute's worth)
#   make faults                      training under kills, freezes, cut links and joins, here and in torchft, DDP and others (ARGS="--systems aiograd")
#   make gpu                         tests and benchmarks on a CUDA device, table in out/gpu.md; says what is missing where there is none
#   make bench | parity | examples   benchmarks, comparison with torch, every example (those with torch: `make interop`)
#   make clean                       removes caches and build products, not the environments
#
# PYTHON=/path/to/python chooses the interpreter of a new .venv, JOBS how many processes run tests (as many as there are cores).

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
ARGS ?=
HAS_NUMBA_CUDA = $(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("numba_cuda") is None)'

# Tests start hundreds of interpreters, which find compiled modules here whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := test
.PHONY: demo test test-all simulator native ptx ray interop browser cpus matrix flaky counts lint types format docs chaos release release-checks scale wan \
        faults gpu bench parity examples clean

demo: $(VENV)/.installed-demo
	@$(BIN)/python -m aiograd demo $(ARGS)

# tests/sweeps.py says what a sweep is.
test: CASES = -m "not sweep"
test-all: CASES = $(if $(REST),-m "sweep and not docs")
run = $(BIN)/python -m pytest -n $(1) --dist worksteal $(CASES)

# The simulator of CUDA kernels needs an interpreter of its own: it has one beside the other tests, and its report comes last.
test test-all: $(VENV)/.installed-dev
ifneq ($(ARGS),)
	$(call run,$(JOBS)) $(ARGS)
else
	@report=$$(mktemp); simulator=; trap 'kill $$simulator 2>/dev/null; rm -f $$report' EXIT; trap 'exit 130' INT TERM; \
	if $(HAS_NUMBA_CUDA); then NUMBA_ENABLE_CUDASIM=1 $(call run,1) tests/cuda >$$report 2>&1 & simulator=$$!; \
	else echo "no numba-cuda for this platform: CUDA kernels are not run"; fi; \
	(set -x; $(call run,$(JOBS))); status=$$?; \
	if [ $$simulator ]; then wait $$simulator || status=$$?; fi; simulator=; cat $$report; exit $$status
endif

simulator: $(VENV)/.installed-dev
	NUMBA_ENABLE_CUDASIM=1 $(call run,$(JOBS)) $(or $(ARGS),tests/cuda)

native: $(VENV)/.installed-dev
	AIOGRAD_COMPILE_TIER=native AIOGRAD_NATIVE_CHECK=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not sweep" $(or $(ARGS),tests/compiler)

ptx: $(VENV)/.installed-dev $(VENV)/.installed-ptx
	$(BIN)/python -m pytest -q -n $(JOBS) tests/cuda_driver
	$(BIN)/python -m tests.ptx $(ARGS)

# Ray is large and brings much with it: it has an environment of its own.
ray:
	@$(MAKE) --no-print-directory VENV=.venv-ray .venv-ray/.installed-dev,ray
	.venv-ray/bin/python -m pytest $(or $(ARGS),tests/ray)

interop:
	@$(MAKE) --no-print-directory VENV=.venv-interop .venv-interop/.installed-dev,interop
	.venv-interop/bin/python -m tests.interop --jobs $(JOBS) $(ARGS)

# Chromium comes from the system: `apt-get install chromium` on Debian.
browser: out/docs/.built
	@$(MAKE) --no-print-directory VENV=.venv-browser .venv-browser/.installed-browser
	.venv-browser/bin/python -m tests.browser $(ARGS)

cpus: $(VENV)/.installed-dev
	$(BIN)/python -m tests.cpus --jobs $(JOBS) $(ARGS)

# Its environments are under out/matrix.
matrix: $(VENV)/.installed-dev
	$(BIN)/python -m tests.matrix --jobs $(JOBS) $(ARGS)

flaky: $(VENV)/.installed-dev
	$(BIN)/python -m tests.flaky $(ARGS)

# Valgrind comes from the system: `apt-get install valgrind` on Debian.
counts: $(VENV)/.installed-dev
	$(BIN)/python -m tests.counts $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# Types as users see them: with the package alone, and whatever other libraries ship.
types:
	@$(MAKE) --no-print-directory VENV=.venv-types .venv-types/.installed-types
	.venv-types/bin/python -m tests.types $(ARGS)

format: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check --fix .

# Sphinx and what the guides show (Jupyter, FastAPI) have an environment of their own.
docs: out/docs/.built
	.venv-docs/bin/python -m pytest -q -n $(JOBS) tests/test_documentation.py tests/test_recipes.py tests/test_readme.py tests/test_reference.py tests/serving/test_web.py $(ARGS)

out/docs/.built: $(shell find docs aiograd tests/public_names.py tests/distributed/fault_model.py -type f ! -name '*.pyc')
	@$(MAKE) --no-print-directory VENV=.venv-docs .venv-docs/.installed-dev,docs
	rm -rf out/docs
	.venv-docs/bin/python -m sphinx -E -q -W --keep-going -b html docs out/docs
	@touch $@

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos $(ARGS)

release-checks: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos --release $(ARGS)

# Builds in `dist` and looks at what it has built; publishes nothing.
release:
	@$(MAKE) --no-print-directory VENV=.venv-release .venv-release/.installed-dev,release
	.venv-release/bin/python -m pytest -q tests/release/test_griffe.py
	.venv-release/bin/python -m tests.release --jobs $(JOBS) $(ARGS)

scale: $(VENV)/.installed-dev
	$(BIN)/python -m tests.scale $(ARGS)

wan: $(VENV)/.installed-dev
	$(BIN)/python -m tests.wan $(ARGS)

# Every other system has an environment of its own, .venv-faults-NAME.
faults: $(VENV)/.installed-dev
	$(BIN)/python -m tests.faults $(ARGS)

# PyTorch with CUDA is large: it is installed only where there is a driver.
gpu: $(VENV)/.installed-dev
	@if $(BIN)/python -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then $(MAKE) --no-print-directory $(VENV)/.installed-gpu; fi
	$(BIN)/python -m tests.gpu $(ARGS)

bench: $(VENV)/.installed-bench
	$(BIN)/python -m tests.benchmarks $(ARGS)

parity: $(VENV)/.installed-parity
	$(BIN)/python -m tests.parity $(ARGS)

examples: $(VENV)/.installed-dev
	@set -e; for example in $(filter-out examples/torch_%,$(wildcard examples/*.py)); do echo "== $$example"; $(BIN)/python "$$example"; done

clean:
	rm -rf build dist out .benchmarks .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find aiograd tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of extras, renewed when pyproject.toml changes. An environment that is there already is installed into.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aiograd needs Python 3.11 or later; $(VENV) has $$($(BIN)/python -V 2>&1). Remove $(VENV) and run make again." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@for python in $(PYTHONS); do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			echo "making $(VENV) with $$($$python -V)"; exec "$$python" -m venv $(VENV); \
		fi; \
	done; \
	echo "No Python 3.11 or later with venv and ensurepip found (tried: $(PYTHONS))." >&2; \
	echo "Install one (on Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	exit 1
