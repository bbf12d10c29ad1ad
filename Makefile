PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CONSTRAINTS := $(abspath constraints.txt)
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')

# Threads that wait for each other sleep, for the sake of a core that is busy: tests run two at a time. Spinning, eager
# training made 44 steps/s on two idle cores and 2 when another process held one of them; sleeping it made 28 and 20.
reproduce test: export OMP_WAIT_POLICY := passive

.PHONY: reproduce test bench lint format clean

reproduce: $(INSTALLED)
	$(BIN)/fastlin reproduce 2c --out runs/reproduce

test: $(INSTALLED)
	$(BIN)/pytest -n 2 --cov=fastlin --cov-report=term-missing:skip-covered --cov-fail-under=95

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.cpu

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy fastlin benchmarks
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(SOURCES)

# pip before 25.3 hands PIP_CONSTRAINT to the isolated build environment, later ones PIP_BUILD_CONSTRAINT.
$(INSTALLED): export PIP_CONSTRAINT := $(CONSTRAINTS)
$(INSTALLED): export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
$(INSTALLED): export FASTLIN_WERROR := 1
$(INSTALLED): pyproject.toml setup.py constraints.txt fastlin/_version.py $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist runs *.egg-info fastlin/_C.*.so .coverage .pytest_cache .mypy_cache .ruff_cache
