# `make` alone lists the targets. Options go behind them: make pretrain ARGS="--train.steps 50",
# make setup PYTHON=python3.12, make setup TORCH=cpu (PyTorch without CUDA: smaller by gigabytes).
PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
PY := .venv/bin/python
PYTEST = $(PY) -m pytest -n $(WORKERS) --timeout 1200
REPOSITORY = $(shell sed -n 's/^Repository = "\(.*\)"/\1/p' pyproject.toml)
# uv does not read pip's configuration: pass on a mirror that is configured there.
MIRROR = $${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(PY) -m pip config get global.index-url 2>/dev/null)}}
UV = VIRTUAL_ENV=.venv UV_DEFAULT_INDEX="$(MIRROR)" .venv/bin/uv pip

ifeq ($(TORCH),cpu)
# With this index pip finds 2.13.0+cpu beside 2.13.0 and prefers it. As an option, the index joins
# those that the user has configured; as an environment variable it would replace them.
CPU_WHEELS := --extra-index-url https://download.pytorch.org/whl/cpu
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Container images often set this. Every program would then compile all that it imports anew, which
# takes longer than importing it.
unexport PYTHONDONTWRITEBYTECODE

NVCC_PIN := $(shell sed -n s/^nvidia-cuda-nvcc==//p cuda/toolkit.txt)
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/exlm_mini
TOOLKIT = $(CACHE)/cuda-$(NVCC_PIN)

.PHONY: help setup pretrain doctor cuda book chapters test test-fast test-chapters test-slow test-reliability test-machines check format lock repository clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' Makefile | while IFS='	' read -r name text; do \
		printf '  make %-17s %s\n' "$$name" "$$text"; done

setup: .venv/.ready ## create .venv with all packages pinned (other targets do so when needed)

pretrain: .venv/.ready ## train a small ExLM on molecules; options in ARGS="--output DIR ..."
	$(PY) -m exlm_mini.pretrain --recipe smiles-tiny $(ARGS)

doctor: .venv/.ready ## show what this machine offers, build the compiled backend, check every backend
	$(PY) -m exlm_mini.doctor $(ARGS)

# The folder is renamed once it is complete; if two calls run at once, the first to finish wins.
cuda: .venv/.ready ## fetch CUDA's compiler, 350 MB; prints the CUDA_HOME to export
	@test -d "$(TOOLKIT)" || { mkdir -p "$(CACHE)" && part=$$(mktemp -d "$(TOOLKIT).XXXX") && \
		trap 'rm -rf "$$part"' EXIT && \
		$(PY) -m pip install -qq --no-deps --target "$$part/all" -r cuda/toolkit.txt >&2 && \
		{ mv -T "$$part/all" "$(TOOLKIT)" 2>/dev/null || test -d "$(TOOLKIT)"; }; }
	@ls -d "$(TOOLKIT)"/nvidia/cu*

book: .venv/.ready ## build the book: book/_build/html/index.html
	.venv/bin/jupyter-book build -W -n --keep-going . --config book/_config.yml \
		--toc book/_toc.yml --path-output book

chapters: .venv/.ready ## run the chapters and store their outputs; only some: ARGS="03 05"
	$(PY) book/chapters.py --run $(ARGS)

test: check test-fast ## lint, fast tests and chapters; ARGS="-k rope" (options for pytest) leaves out the chapters
	@test -n "$(ARGS)" || $(MAKE) --no-print-directory test-chapters

test-fast: .venv/.ready ## the tests that take seconds
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-chapters: .venv/.ready ## run the chapters and compare every stored output
	$(PYTEST) --nbval chapters

# pytest exits with 5 if it finds no tests.
test-slow: .venv/.ready ## the tests marked slow
	$(PYTEST) -m "slow and not gpu" $(ARGS) || [ $$? -eq 5 ]

test-reliability: .venv/.ready ## tests of what a run survives: kills, full disks, damaged files, changed settings
	$(PYTEST) -m "reliability and not gpu" $(ARGS)

test-machines: .venv/.ready ## run chapters and trainings as on other processors; takes hours; ARGS="--only avx2"
	$(PY) tests/stress/machines.py --workers $(WORKERS) $(ARGS)

check: .venv/.ready ## check lint, format, types and workflows; `make test` begins with this
	$(PY) -m ruff check --quiet .
	$(PY) -m ruff format --check --quiet .
	$(PY) -m mypy
	.venv/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*

format: .venv/.ready ## rewrite the sources in the house format
	$(PY) -m ruff check --quiet --fix .
	$(PY) -m ruff format .

# The file .partial marks a set-up that did not finish: the next one starts from scratch.
# A finished .venv is updated in place when the lock or pyproject.toml changes.
# pip installs uv and PyTorch, whose build may be on an index only pip knows; uv installs the rest.
.venv/.ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: '$(PYTHON)' is not Python 3.11 or newer; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "setup: this Python lacks ensurepip; installing $$package with apt-get"; \
		(apt-get update && DEBIAN_FRONTEND=noninteractive \
			apt-get install -y --no-install-recommends $$package) >/dev/null 2>&1; \
	fi; \
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		echo "setup: this Python lacks ensurepip; run: sudo apt-get install $$package" >&2; exit 1; }
	@if [ -e .venv/.partial ] || \
		! .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "setup: making .venv with $$($(PYTHON) --version)"; \
		rm -rf .venv && mkdir .venv && touch .venv/.partial && $(PYTHON) -m venv .venv; \
	fi
	@touch .venv/.partial
	@echo "setup: installing $$(grep -c == requirements.lock) pinned packages"
	@start=$$(date +%s) && \
		$(PY) -m pip install -qq --no-deps --no-compile $(CPU_WHEELS) \
			$$(grep -E '^(torch|uv)==' requirements.lock) && \
		$(UV) install -q -r requirements.lock && \
		$(UV) install -q --no-deps --no-build-isolation -e . && \
		echo "setup: done in $$(( $$(date +%s) - start )) s"
	@mv .venv/.partial $@ && touch $@

# The lock leaves out the CUDA packages: a CUDA build of PyTorch brings those it needs.
lock: .venv/.ready ## update requirements.lock from pyproject.toml; for the newest releases: ARGS=--upgrade
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(UV) compile -q --python-version 3.11 --no-annotate \
		--extra all --group dev pyproject.toml -o requirements.lock $(ARGS)
	sed -i -E '/^(nvidia|triton|cuda)[-_a-z0-9]*==/d' requirements.lock

repository: ## write a fork's address into every file: make repository URL=https://github.com/me/book
	@case "$(URL)" in https://*) ;; *) echo "URL does not start with https://; run make repository URL=https://..."; exit 2 ;; esac
	git grep -lF "$(REPOSITORY)" | xargs sed -i 's|$(REPOSITORY)|$(URL)|g'

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis book/_build
	find exlm_mini exlm_lab tests -name __pycache__ -type d -prune -exec rm -rf {} +
