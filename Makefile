# Everything that a newcomer needs: `make demo`, `make test`. Both create their own environment.
.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# `python -m` must run the installed package, not the sources in the current folder.
export PYTHONSAFEPATH := 1
# Less to trip over: no version checks, no progress bars in logs.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
UV := $(shell command -v uv 2>/dev/null)
SOURCES := $(shell find ciuicflow -name '*.py') hatch_build.py

.PHONY: help demo test lint unit pure soak bench loadtest dev tools clean

help: ## Show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.package ## See it work: the gateway before an emulated engine (ARGS=--once: and exit)
	$(BIN)/ciuicflow demo $(ARGS)

test: lint unit pure ## Lint, types, layers, and every test but the long ones

lint: $(VENV)/.package ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.package ## The test suite against the installed (compiled) package
	$(BIN)/pytest -q -n $(WORKERS) -m "not soak" $(ARGS)

# The same sources uncompiled: what a wheel falls back to without a C compiler.
PURE_TESTS := tests/unit tests/conformance/test_bodies.py tests/conformance/test_disconnect.py \
	tests/conformance/test_pipelining.py tests/conformance/test_streaming.py
pure: $(VENV)/.package ## A part of the suite against the plain Python sources
	PYTHONPATH=$(CURDIR) $(BIN)/pytest -q -n $(WORKERS) -m "not soak" $(PURE_TESTS)

soak: $(VENV)/.package ## The long runs: 10 000 requests accounted for, memory of 2 000 streams
	$(BIN)/pytest -q -m soak --timeout 1800 $(ARGS)

bench: $(VENV)/.package ## CPU and latency per request against nginx, side by side (needs wrk, nginx)
	$(BIN)/ciuicflow bench http $(ARGS)

# The package `loadtest` is in this folder; the gateway that it starts is the installed one.
loadtest: $(VENV)/.package ## Latency by tier and goodput, flow control beside its rivals (ARGS="--help")
	PYTHONSAFEPATH= $(BIN)/python -m loadtest $(ARGS)

dev: $(VENV)/.deps ## Install the sources editable and uncompiled: edits take effect at once
	$(call install,--no-deps -e .)
	touch $(VENV)/.package

tools: ## Debian packages that some tests and the benchmark use (as root)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		curl haproxy nginx-light prometheus wrk

clean: ## Remove the environment and everything made
	rm -rf $(VENV) dist results .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

ifdef UV
install = uv pip install -q --python $(BIN)/python $(1)
$(VENV)/bin/python:
	uv venv -q --python '>=3.11' $(VENV)
else
install = $(BIN)/pip install -q $(1)
$(VENV)/bin/python:
	python3 -m venv $(VENV)
	$(BIN)/pip install -q 'pip>=25.1'
endif

$(VENV)/.deps: pyproject.toml | $(VENV)/bin/python
	CIUICFLOW_PURE=1 $(call install,-e '.[bench]' --group dev)
	touch $@

$(VENV)/.package: $(VENV)/.deps $(SOURCES)
	$(call install,--no-deps --force-reinstall .)
	touch $@
