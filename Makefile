# Two commands on a fresh clone: `make demo` and `make test`.
#
#   make demo                     install, run the demo, print the path of its report
#   make test                     install development tools; lint, words, reading paths, types, doctests, tests
#   make test-all                 the same with all tests: also those marked slow, and all cases of sampled ones
#   make docs                     the site, in docs/_build/html; runs tutorials and gallery; Python 3.11 or newer
#   make bench                    speed compared with published code, cost per node; ten minutes
#   make release-check            wheel and sdist on each Python, version and extra; an hour; Python 3.11 or newer
#   make clean                    remove .venv and caches; runs/ stays
#   make demo PYTHON=python3.12   with another Python (3.10 or newer)
#
# On Linux, pip takes the torch build with the libraries for NVIDIA GPUs, some GB. A smaller build
# without them, installed into .venv beforehand, is kept if it is the pinned version.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# pip reads these itself, also while it builds the package. The paths are relative, since pip splits at spaces.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(BIN)/python -m pip install -qq

.PHONY: help demo test test-all types tests docs bench release-check clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   make/  make/p' Makefile

# A rerun gets a folder of its own, so that two runs can be compared: runs/demo, runs/demo-2, ...
demo: $(VENV)/.runs
	@out=runs/demo; n=2; \
	while [ -e "$$out" ]; do out=runs/demo-$$n; n=$$((n + 1)); done; \
	$(BIN)/fedstill run demo --out "$$out"

# Types are checked while the first tests run, which mostly wait.
test: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_words.py
	$(BIN)/python tools/reading.py --check
	$(MAKE) --jobs 2 types tests

test-all:
	$(MAKE) test SELECTED=--all

types: $(VENV)/.tests
	$(BIN)/mypy

# One thread each. Three processes for two cores, since the first tests mostly wait (tests/conftest.py), and each
# process collects all tests. Many processes import the package, so it is compiled once for all of them, whatever
# the shell says of bytecode.
# Tests marked "waits" start FLARE's processes, whose timeouts a busy machine can exceed. If only such tests fail,
# they run a second time, alone; both results are printed, and what fails twice fails.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --durations=10 $(SELECTED)
FAILED := --last-failed --last-failed-no-failures none
tests: $(VENV)/.tests
	@$(PYTEST) -n 3 --dist worksteal --cache-clear fedstill tests; status=$$?; \
	if [ $$status -ne 1 ]; then exit $$status; fi; \
	$(PYTEST) $(FAILED) -m "not waits" --collect-only fedstill tests > /dev/null; \
	if [ $$? -ne 5 ]; then exit 1; fi; \
	echo "Tests of FLARE's processes failed. They run once more, one at a time:"; \
	$(PYTEST) $(FAILED) -m waits fedstill tests

# Downloads packages only. A warning, such as a broken link, is an error.
docs: $(VENV)/.docs
	$(BIN)/python tools/notebooks.py --check
	$(BIN)/python -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html
	@echo "The site: docs/_build/html/index.html"

# The table of benchmarks/README.md.
bench: $(VENV)/.tests
	$(BIN)/python benchmarks/peers.py --rounds 1
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/features.py --nodes 20

# Wheel and sdist in empty environments; see CONTRIBUTING.md.
release-check:
	$(PYTHON) tools/release_check.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist docs/_build docs/gallery docs/notebooks docs/sg_execution_times.rst
	find fedstill tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is newer than what it was installed from, or the installation is repeated.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "fedstill needs Python 3.10 or newer, and '$(PYTHON)' is not: try 'make PYTHON=python3.12'" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runs: $(VENV)/.made constraints.txt pyproject.toml
	@echo "Installing what a run needs into $(VENV); the first time takes some minutes."
	$(PIP) torch
	$(PIP) --editable '.[dp]'
	@touch $@

$(VENV)/.tests: $(VENV)/.runs
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.runs
	$(PIP) --editable '.[docs]'
	@touch $@
