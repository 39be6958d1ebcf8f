# Every target makes its own .venv first, with what it needs; that is done again only when the dependencies change.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/.made
DEMO := .venv/.demo
READY := .venv/.ready
DOCS := .venv/.docs
# Python compiles what runs when it first runs: a small part of what pip would compile.
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable

.PHONY: help demo test check docs lint bench engines red models results planes clean

help: ## Show this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/make \1\t\2/' | expand -t 14

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Candid needs Python 3.11 or newer: run 'make PYTHON=/path/to/python3.11'."; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

$(DEMO): pyproject.toml constraints.txt | $(VENV)
	@test $(READY) -nt pyproject.toml -a $(READY) -nt constraints.txt || $(INSTALL) '.[paper,web]'
	@touch $@

$(READY): pyproject.toml constraints.txt | $(VENV)
	$(INSTALL) '.[dev]'
	@touch $@

$(DOCS): $(READY)
	$(INSTALL) '.[docs]'
	@touch $@

demo: $(DEMO) ## Verdicts on photos, a classifier of your own, a new class, the paper's system; one page (about a minute after set-up)
	$(BIN)/candid demo

lint: $(READY) ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## Style, types, doctests and all tests but the slowest (6 minutes)
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m 'not slow'

check: docs ## What needs the network: the slowest tests, the site, notebooks, wheels, the oldest versions, installs in new environments, the Dockerfile (about 30 minutes)
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m slow
	$(BIN)/python -m experiments.notebooks
	$(BIN)/python -m experiments.oldest
	$(BIN)/python -m experiments.check

docs: $(DOCS) ## The documentation as a site with search, in build/site (a broken link fails; needs the network once)
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . build/site
	@echo "build/site/docs/index.html"

bench: $(READY) ## Speed and memory next to peers and the machine's limit; writes docs/speed.json and docs/speed.md (on a quiet machine, at most 25 minutes)
	$(BIN)/python -m benchmarks

engines: ## Ray Data in an environment of its own: two workers, one of them killed (COUNT=5000; needs the network; about 5 minutes)
	$(PYTHON) -m venv build/engines
	build/engines/bin/pip install --quiet --constraint constraints.txt --editable '.[bulk]'
	build/engines/bin/pip install --quiet 'ray[data]>=2.50'
	build/engines/bin/python -m experiments.engines --photos $(or $(COUNT),600)

red: $(READY) ## Attack the server, models, runs, disks and caches on this machine (about 12 minutes; FULL=1 with the counts of docs/security.md)
	$(BIN)/python -m experiments.red

models: $(READY) ## Train the bundled models again (DATA=cifar-10-batches-bin; about 5.5 hours on two cores)
	$(BIN)/python -m experiments.models $(DATA) --jobs 2

results: $(READY) ## Make docs/results from the bundled models (DATA=cifar-10-batches-bin; OOD='--ood NAME=PATH ...'; TINY=tiny20; PHOTOS=photos; about 1.5 hours)
	$(BIN)/python -m experiments.results $(DATA) $(OOD) $(if $(TINY),--tiny $(TINY)) $(if $(PHOTOS),--photos $(PHOTOS))

planes: $(READY) ## Make the decision planes and trajectories of the pages (DATA=cifar-10-batches-bin; TINY=tiny20; CLOTHES=clothing10; about an hour)
	$(BIN)/python -m experiments.planes $(DATA) $(TINY) $(CLOTHES)

clean: ## Remove everything that the other targets made, except models and results
	rm -rf .venv demo build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
