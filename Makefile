PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CONSTRAINTS := $(abspath constraints.txt)
NEXT_TRITON := 3.9.0
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Without bytecode on disk each process that imports torch takes 7 s, with it 3.
unexport PYTHONDONTWRITEBYTECODE

# For torch's own operations, in eager and in the optimisers: tests run one a core, and torch's threads that wait for each
# other spin on it. Eager training made 44 steps/s on two idle cores and 2 when another process held one of them; sleeping
# it made 28 and 20. fastlin's kernels run on one thread where spinning would cost time (csrc/cpu/sharing.h).
reproduce test test-all gpu-check: export OMP_WAIT_POLICY := passive
PYTEST := $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal --durations 20

.PHONY: reproduce test test-all next-triton bench bench-readme docs wheel gpu-check lint format clean

reproduce: $(INSTALLED)
	$(BIN)/fastlin reproduce 2c --out runs/reproduce

# Minutes: before every commit. tests/support/selection.py says what it leaves to test-all.
test: $(INSTALLED)
	$(PYTEST) -m "not long"

# Everything, with coverage, then Triton's tests with its newest version.
test-all: $(INSTALLED)
	$(PYTEST) --cov=fastlin --cov-report=term-missing:skip-covered --cov-fail-under=95
	$(MAKE) next-triton

# torch's CUDA wheels have an older triton; this one lies in a folder that comes before it on the path.
next-triton: FOLDER := $(abspath .venv/next-triton-$(NEXT_TRITON))
next-triton: $(INSTALLED)
	test -d $(FOLDER) || $(BIN)/pip install --no-deps --target $(FOLDER) triton==$(NEXT_TRITON)
	PYTHONPATH=$(FOLDER) $(BIN)/python -c 'import triton; assert triton.__version__ == "$(NEXT_TRITON)", triton'
	PYTHONPATH=$(FOLDER) $(PYTEST) tests/triton -m "not long"
	PYTHONPATH=$(FOLDER) $(PYTEST) tests/triton/test_compiled.py -k default

bench: $(INSTALLED)
	$(BIN)/fastlin bench

# The pages of docs/ as a site in build/site; without network.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# An sdist, and a wheel made from it, in dist/. libgomp stays outside: in one process there is one, torch's.
wheel: export PIP_CONSTRAINT := $(CONSTRAINTS)
wheel: export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
wheel: $(INSTALLED)
	rm -rf build/wheel dist
	$(BIN)/python -m build --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

# Measures anew what README.md and docs/benchmarks.md say of speed, and writes it there: record, tables and pictures.
bench-readme: $(INSTALLED)
	$(BIN)/pip install -q -c constraints.txt jax
	$(BIN)/fastlin bench --json benchmarks/results/cpu.json
	$(BIN)/python -m benchmarks.readme

# On a machine with a GPU: all tests on it, then fastlin bench --device cuda; one report in runs/gpu-check.
gpu-check: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu_check --out runs/gpu-check

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy fastlin benchmarks dev
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(SOURCES)

# --no-compile: Python compiles what it imports, where pip would compile all of torch, scipy and the rest.
# pip before 25.3 hands PIP_CONSTRAINT to the isolated build environment, later ones PIP_BUILD_CONSTRAINT.
$(INSTALLED): export PIP_CONSTRAINT := $(CONSTRAINTS)
$(INSTALLED): export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
$(INSTALLED): export FASTLIN_WERROR := 1
$(INSTALLED): pyproject.toml setup.py constraints.txt fastlin/_version.py csrc/cuda/nvcc.py $(SOURCES)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist runs *.egg-info fastlin/_C.*.so fastlin/_cuda.*.so .coverage .pytest_cache .mypy_cache .ruff_cache
