# `make help` lists the targets. PYTHON chooses the Python, ARGS adds arguments to the command.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN = $(VENV)/bin
INSTALL = $(BIN)/python gpu_vecenv/cli/install.py
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' gpu_vecenv/_version.py)
CORES = $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
# RL libraries that need a Python environment of their own, an extra each, and three oracles that do; all others of tests/clients share one.
ALONE = benchmarl rllib agilerl sample-factory xuance overcooked-ai meltingpot ai-economist
CLIENTS_APART = $(ALONE) clients
tests_of = $(if $(filter $1,$(ALONE)),$(wildcard tests/*/test_$(subst -,_,$1).py),$(SHARED))
SHARED = tests/adapters/test_pufferlib.py $(filter-out $(foreach client,$(ALONE),$(call tests_of,$(client))),$(wildcard tests/clients/test_*.py))
# Installed without their dependencies, which exclude the torch, Gymnasium or NumPy of this project; the extra has the others.
FORCED_clients = 'pufferlib-core>=3.0.23'
FORCED_sample-factory = 'sample-factory>=2.1.1'
FORCED_ai-economist = 'ai-economist==1.7.1'
CLIENTS = $(filter-out $(ALONE) pufferlib,$(patsubst tests/adapters/test_%.py,%,$(wildcard tests/adapters/test_*.py)))

# RL libraries that share an environment with development; without a lock, what cannot be installed is left out.
SHARING = sb3 supersuit torchrl skrl rsl-rl rl-games tianshou lightning
# CI sets LOCKS=.ci/locks: only what these files name is installed then, and pip compares its digests.
LOCKS ?=
LOCK = $(LOCKS:%=%/dev.txt)
TOOLS = $(VENV)-tools/bin
COMPILE = $(TOOLS)/uv pip compile --directory .ci --no-python-downloads --universal --python-version 3.10 \
	--generate-hashes --only-binary :all: --emit-build-options --constraint constraints.txt \
	--no-emit-package gpu-vecenv --no-emit-package torch --custom-compile-command 'make lock' --quiet
comma = ,
empty =
listed = $(subst $(empty) ,$(comma),$(strip $1))

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL = -n auto --dist worksteal
# With -Og the host's kernels compile in half the time. HOST_FLAGS= compiles them as users have them.
HOST_FLAGS ?= -Og
COMPILES = --host-flags=$(HOST_FLAGS)
QUICK = not slow and not exhaustive and not gpu
ALL = not exhaustive
ADAPTERS = printf '%s\n' $(CLIENTS:%=tests/adapters/test_%.py) | xargs -P $(CORES)
# What `make bench-peers` measures beside us; WarpDrive needs a GPU, PufferLib a build that downloads.
PEERS ?= gymnasium mpe2 sisl classic overcooked_ai rware ai_economist envpool gymnax purejaxrl jaxmarl pgx vmas
# After xargs: runs pytest on each line of paths by itself; no test on a line (pytest's code 5) is no error.
EACH_LINE = -L 1 sh -c '$(PYTEST) "$$@" || [ $$? = 5 ]' sh

.DEFAULT_GOAL = help
.PHONY: help train quick check lint types test-changed test test-slow test-all test-exhaustive test-clients nightly gpu \
	third-party mutants reliability ledger release-check bench bench-peers docs dist lock audit clean $(CLIENTS_APART:%=test-client-%)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

train: $(VENV)/train.stamp ## install, then train the taggers of tag_gridworld
	$(BIN)/gpu-vecenv train tag_gridworld --total-steps 2000000 \
		--policies '{"runner": {"population": 16, "num_minibatches": 4}}' $(ARGS)
	@command -v gpu-vecenv >/dev/null || echo 'gpu-vecenv is not on the path of this shell: . $(VENV)/bin/activate'

quick: $(VENV)/dev.stamp ## lint, types and the quick tests of the packages that changed: under a minute
	@$(MAKE) --no-print-directory --output-sync -j 3 lint types test-changed

check: lint types ## formatting, lint, import rules and types

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find cuda examples tests -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/lint-imports
	$(BIN)/python tests/support/prose.py

types: $(VENV)/dev.stamp
	$(BIN)/python -m mypy

test-changed: $(VENV)/dev.stamp
	$(BIN)/python tests/support/select_tests.py | xargs $(EACH_LINE) -q $(PARALLEL) $(COMPILES) -m "$(QUICK)" $(ARGS)

test: $(VENV)/dev.stamp ## install, then run the tests of every package and adapter: a few minutes
	$(ADAPTERS) $(EACH_LINE) -q $(COMPILES) -m "$(QUICK)" $(ARGS)
	$(PYTEST) $(PARALLEL) $(COMPILES) -m "$(QUICK)" $(ARGS)
	@echo 'Left out: slow tests (make test-all); exhaustive tests, planted bugs and the RL libraries that need environments'
	@echo 'of their own, $(CLIENTS_APART) (make nightly); tests of NVIDIA GPUs (make gpu).'

test-slow: $(VENV)/dev.stamp ## the slow tests that `make test` leaves out
	$(ADAPTERS) $(EACH_LINE) -q $(COMPILES) -m "not ($(QUICK)) and $(ALL)" $(ARGS)
	$(PYTEST) $(PARALLEL) $(COMPILES) -m "not ($(QUICK)) and $(ALL)" $(ARGS)

test-all: $(VENV)/dev.stamp ## all tests that this environment and computer can run but the exhaustive ones
	$(ADAPTERS) $(EACH_LINE) -q $(COMPILES) -m "$(ALL)" $(ARGS)
	$(PYTEST) $(PARALLEL) $(COMPILES) -m "$(ALL)" $(ARGS)

test-exhaustive: $(VENV)/dev.stamp ## every case of what the other tests try in part: architectures, sanitizers, notebooks, RL libraries that learn
	$(ADAPTERS) $(EACH_LINE) -q -m "exhaustive and not gpu" $(ARGS)
	$(PYTEST) $(PARALLEL) -m "exhaustive and not gpu" $(ARGS)

test-clients: $(CLIENTS_APART:%=test-client-%) ## the tests of RL libraries that need environments of their own

$(CLIENTS_APART:%=test-client-%): test-client-%: $(VENV)-%/stamp
	for file in $(call tests_of,$*); do OMP_NUM_THREADS=1 $(VENV)-$*/bin/python -m pytest $(ARGS) $$file || [ $$? = 5 ] || exit 1; done

nightly: mutants test-exhaustive test-clients third-party reliability ledger audit ## all of what takes hours: see these targets

third-party: $(VENV)-third-party/stamp ## whether `check` finds in environments of other libraries what docs/interfaces.md says; ARGS=write
	OMP_NUM_THREADS=1 $(VENV)-third-party/bin/python tests/check/third_party.py $(ARGS)

ledger: $(VENV)/dev.stamp ## whether this computer computes the digests that GPUs gave, in every mode
	$(BIN)/python tests/ledger.py replay

gpu: $(VENV)/dev.stamp ## the tests that need an NVIDIA GPU; without one this fails
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch finds no GPU: see $(BIN)/gpu-vecenv doctor")'
	$(PYTEST) -m gpu $(ARGS)
	$(ADAPTERS) -P 1 $(EACH_LINE) -m gpu $(ARGS)

mutants: $(VENV)/dev.stamp ## plant bugs in kernels and trainer: the tests must find each
	$(BIN)/python tests/mutation_gate.py $(ARGS)

reliability: $(VENV)/dev.stamp ## kills, damaged files, races, leaks, random numbers, wrong calls: minutes each
	for experiment in saves damage resume cache leaks soak rng large interrupts calls injections; do $(BIN)/python tests/reliability $$experiment $(ARGS) || exit 1; done

release-check: ledger ## the ledger, and that the receipts of GPU runs exist and belong to these sources
	$(BIN)/python tests/receipts.py --strict

bench: $(VENV)/train.stamp ## throughput of the games, a table or one JSON line per row
	$(BIN)/python -m gpu_vecenv.bench $(ARGS)

bench-peers: $(VENV)/train.stamp ## throughput beside other libraries, each in an environment of its own: PEERS, benchmarks/README.md
	for peer in $(PEERS); do $(BIN)/python -m benchmarks $$peer $(ARGS) || exit 1; done

docs: $(VENV)/docs.stamp ## the documentation site, docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going --fresh-env docs docs/_build/html $(ARGS)

lock: $(VENV)-tools/stamp ## write the lock files of CI; ARGS=--upgrade takes the newest versions
	$(COMPILE) --extra dev --extra compiler --extra cuda13 $(SHARING:%=--extra %) $(ARGS) --output-file locks/dev.txt ../pyproject.toml >/dev/null
	$(COMPILE) $(ARGS) --constraint locks/dev.txt --output-file locks/runtime.txt ../pyproject.toml >/dev/null
	$(COMPILE) $(ARGS) --group ../pyproject.toml:tools --output-file locks/tools.txt >/dev/null

audit: $(VENV)-tools/stamp ## weaknesses of the workflows, and known ones of what the lock files name and of torch
	$(TOOLS)/zizmor --offline --quiet .github
	$(TOOLS)/pip-audit --strict --disable-pip --no-deps --requirement .ci/constraints.txt $(ARGS)
	for lock in .ci/locks/*.txt; do $(TOOLS)/pip-audit --strict --disable-pip --require-hashes --requirement $$lock $(ARGS) || exit 1; done

dist: $(VENV)-tools/stamp ## build what is published into dist/ and sbom/, from the last commit, and check it; with TAG=v1.2.3 that must be its version
	@[ -z "$$TAG" ] || [ "$$TAG" = "v$(VERSION)" ] || { echo "TAG is $$TAG, but gpu_vecenv/_version.py says $(VERSION)"; exit 1; }
	@[ -z "$$TAG" ] || grep -qx 'version: $(VERSION)' CITATION.cff || { echo "CITATION.cff does not say version: $(VERSION)"; exit 1; }
	@[ -z "$$TAG" ] || grep -q '^## \[$(VERSION)\] - 2' CHANGELOG.md || { echo "CHANGELOG.md has no date for [$(VERSION)]"; exit 1; }
	rm -rf build dist sbom
	.ci/build $(TOOLS)/python dist
	$(TOOLS)/python -m twine check --strict dist/*
	$(TOOLS)/check-wheel-contents dist/*.whl
	mkdir -p build sbom
	sed 's/^dynamic = \["version"\]$$/version = "$(VERSION)"/' pyproject.toml >build/pyproject.toml # an SBOM names the version
	cat .ci/constraints.txt .ci/locks/runtime.txt | $(TOOLS)/cyclonedx-py requirements --pyproject build/pyproject.toml \
		--mc-type library --output-reproducible --output-file sbom/gpu_vecenv-$(VERSION).cdx.json -

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) $(CLIENTS_APART:%=$(VENV)-%) $(VENV)-third-party .venv-bench-* docs/_build docs/games docs/notebooks docs/project build dist sbom *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps make an installation happen again only when pyproject.toml or the lock changes.
$(VENV)/train.stamp: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) $(if $(LOCK),--lock $(LOCK),--extras train --try sb3,supersuit,compiler)
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) $(if $(LOCK),--lock $(LOCK),--extras dev --try $(call listed,$(SHARING)))
	@touch $@ $(VENV)/train.stamp

$(VENV)/docs.stamp: pyproject.toml $(LOCK) | $(BIN)/python
	$(INSTALL) $(if $(LOCK),--lock $(LOCK),--extras docs)
	@touch $@

$(VENV)-tools/stamp: .ci/locks/tools.txt
	$(MAKE) VENV=$(VENV)-tools $(TOOLS)/python
	$(TOOLS)/python -m pip install --quiet --require-hashes --requirement .ci/locks/tools.txt
	@touch $@

$(VENV)-%/stamp: EXTRAS_APART = render,test
# XuanCe demands an older moviepy.
$(VENV)-xuance/stamp: EXTRAS_APART = test
$(VENV)-%/stamp: pyproject.toml
	$(MAKE) VENV=$(VENV)-$* $(VENV)-$*/bin/python
	$(VENV)-$*/bin/python gpu_vecenv/cli/install.py --extras $(EXTRAS_APART),$*
	$(if $(FORCED_$*),$(VENV)-$*/bin/python -m pip install --quiet --no-deps $(FORCED_$*))
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.10 or newer, or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$$($(PYTHON) --version 2>&1) is too old: 3.10 is the least. Name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
