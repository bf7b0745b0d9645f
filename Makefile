# SPDX-License-Identifier: Apache-2.0
# Needs Python 3.11 or newer, and nothing else: `make setup` puts the rest into .venv.
PYTHON ?= python3
# Where `make demo` takes torch from: the CPU build, a tenth of the size. Empty: from where pip takes everything.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
READY := .venv/ready
PEERS_BIN := .venv-peers/bin
PEERS_READY := .venv-peers/ready
FRAMEWORKS_BIN := .venv-frameworks/bin
FRAMEWORKS_READY := .venv-frameworks/ready
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/ready
# pytest, in lanes: three on two cores.
LANES := $(BIN)/python tests/lanes.py
CODE := src tests examples benchmarks docs
SPHINX := $(DOCS_BIN)/python -m sphinx -q -W --keep-going
VERSIONS := 3.13-2.15.0 3.12-2.11.0 3.11-2.9.1

.PHONY: help setup demo test check lint format type unit multiprocess multihost e2e frameworks versions gpu mutants faults kills kills-on-hosts slowdowns bench scale bench-peers docs docs-browser docs-links environments chart lock release-check clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## an environment of its own in .venv, from requirements/dev.lock

$(READY): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rankwise needs Python 3.11 or newer: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/install python3-venv
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	# Where Python may not write its bytecode (PYTHONDONTWRITEBYTECODE), every process that starts would compile again.
	@$(BIN)/python -m compileall -q src tests
	@touch $@

demo:  ## train on one rank and on two, and compare; says first what it downloads
	@PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) .ci/demo

test: check  ## checks, then every tier of tests; installs the programs they need, or says which tiers it leaves out
	@PYTHON=$(PYTHON) .ci/programs install || true
	@tiers=$$(PYTHON=$(PYTHON) .ci/programs tiers) && if [ "$$tiers" ]; then $(LANES) $$tiers; fi
	@PYTHON=$(PYTHON) .ci/programs left-out

check: lint type  ## every check that runs no code

lint: setup  ## style, format, spelling
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/codespell $(CODE) *.md
	@$(BIN)/python docs/messages.py --avoid docs/avoided.txt README.md CONTRIBUTING.md CHANGELOG.md docs/*.md docs/decisions/*.md

format: setup  ## fix what tools can fix
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

type: setup  ## types, strictly
	$(BIN)/basedpyright

unit: setup  ## pure values, in seconds
	$(LANES) tests/unit

multiprocess: setup  ## real groups of ranks on this machine
	$(LANES) tests/multiprocess

multihost: setup  ## hosts that are network namespaces, Slurm, Open MPI, ssh; needs root and what .ci/run installs
	$(LANES) tests/multihost

e2e: setup  ## commands and examples, as a user runs them
	$(LANES) tests/e2e

frameworks: $(FRAMEWORKS_READY)  ## other frameworks' scripts under torchrun and rankwise, from .venv-frameworks
	$(FRAMEWORKS_BIN)/python -m pytest tests/frameworks

versions: $(VERSIONS:%=version-%)  ## what depends most on Python and torch, on other versions of both

# version-3.13-2.15.0: Python, then torch.
version-%:
	@.ci/version $(subst -, ,$*)

environments: $(FRAMEWORKS_READY) $(VERSIONS:%=install-%)  ## install what `frameworks` and `versions` test with

install-%:
	@.ci/version $(subst -, ,$*) install

gpu:  ## at most eight minutes on a GPU, from this checkout; needs no network; to try it without one: tests/gpu/run.py --device strict
	$(PYTHON) tests/gpu/run.py

mutants: setup  ## put small mistakes into a copy of the code, one at a time, and count those that tests notice
	$(BIN)/python tests/mutants/run.py $(ONLY)

faults: setup  ## scripts with one mistake each: does rankwise verify find it and its cause?
	$(BIN)/python tests/faults/run.py $(ONLY)

kills: setup  ## kill a training at random moments of its saves, restores and updates: is nothing lost and the end bit-equal?
	$(BIN)/python tests/faults/kills.py $(ONLY)
	$(BIN)/python tests/faults/kills_in_update.py $(ONLY)

kills-on-hosts: setup  ## the same on hosts that are network namespaces: ranks, launchers and hosts; needs root
	$(BIN)/python tests/faults/kills_on_hosts.py $(ONLY)

slowdowns: setup  ## jobs with one slow rank each: does the report name it and why? run nothing else at the same time
	$(BIN)/python tests/slowdowns/run.py

bench: setup  ## ratios against other tools; run nothing else at the same time
	$(BIN)/python benchmarks/run.py $(ONLY)

scale: setup  ## the control plane at 10 to 10,000 simulated ranks: time, memory, messages (RANKS="10 100")
	$(BIN)/python benchmarks/scale.py $(RANKS)

bench-peers: $(PEERS_READY)  ## a training step beside other libraries, from .venv-peers
	$(PEERS_BIN)/python benchmarks/peers.py

docs: $(DOCS_READY)  ## the documentation as static files in site/; any warning is an error
	rm -rf site build/docs
	$(SPHINX) -b html -d build/docs/en docs site
	$(SPHINX) -b html -d build/docs/zh -c docs -t zh docs/zh site/zh
	$(DOCS_BIN)/python docs/check_links.py site
	@echo "open site/index.html"

docs-browser: docs setup  ## the same, and a report, in a real browser: widths, search, dark mode; needs chromium
	$(DOCS_BIN)/python docs/check_browser.py site
	$(BIN)/python docs/sample_report.py build/report
	$(DOCS_BIN)/python docs/check_report.py build/report

docs-links: $(DOCS_READY)  ## follow the links of the documentation to other sites; needs a network
	$(SPHINX) -b linkcheck -d build/docs/links docs build/docs/linkcheck

$(PEERS_READY) $(FRAMEWORKS_READY) $(DOCS_READY): .venv-%/ready: requirements/%.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rankwise needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/install python3-venv
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@.venv-$*/bin/python -m compileall -q src
	@touch $@

chart:  ## draw docs/images/speed-*.svg, with the ratios of a table of `make bench` (TABLE=file) if there is one
	$(PYTHON) docs/speed_chart.py $(TABLE)

release-check: setup  ## build a release into dist/, check it, and try its wheel in a fresh environment
	.ci/release-check

lock:  ## pin each requirements/*.in again
	$(PYTHON) requirements/lock.py

clean:  ## remove what the other targets made
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis dist site build/docs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
