# make demo | test | test-exhaustive | check | docs | guard | bench | gpu | fuzz | chaos | clients: each sets everything up first (once; `make clean` forgets it).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEMO := runs/demo
DOCS := .venv-docs
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # else each of a thousand processes compiles the package anew

.PHONY: help demo test test-exhaustive check docs guard bench gpu fuzz chaos clients clean
help:
	@echo "make demo   train a small GPT on this machine, about three minutes; results in $(DEMO)"
	@echo "make test   every test that needs no GPU, but those of make test-exhaustive"
	@echo "make test-exhaustive  further cases of rules that make test checks with fewer"
	@echo "make check  format, lint, types and the quick tests, under a minute"
	@echo "make docs   build the pages of docs/ into build/site, in a venv of its own"
	@echo "make guard  the distributed tests under guarded memory, with every order of ends of messages; ONLY=fence|heap"
	@echo "make bench  rewrite benchmarks/results"
	@echo "make gpu    tests/gpu and a GPT beside FSDP2 on every GPU of this host: benchmarks/results/gpu.md"
	@echo "make clients  tests with packages that train on shardwise, in an environment of their own (.venv-clients)"
	@echo "make chaos  break random jobs, MINUTES=30 SEED=0: every rank must end with a named error or the numbers of a whole run"
	@echo "make fuzz   train random programs beside one process, MINUTES=10 RANKS=4 SEED=0 AREA=all; scripts of failures in found"

.stamp-setup: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "shardwise needs Python >= 3.10; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "could not create $(VENV): is the venv module installed (python3-venv)?" >&2; exit 1; }
	@echo "installing torch and the other requirements into $(VENV) ..."
	$(PIP) "$$(grep '^torch==' requirements.txt)"
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --config-settings editable_mode=compat --editable .  # a path that type checkers follow
	@touch $@

.stamp-dev: .stamp-setup requirements-dev.txt
	$(PIP) -r requirements-dev.txt
	@touch $@

demo: .stamp-setup
	@if [ -e $(DEMO) ]; then mv $(DEMO) $(DEMO)-$$(date +%Y%m%d-%H%M%S); fi
	$(BIN)/shardwise train --out $(DEMO) --steps 240 --eval-every 40 --save-every 80
	@echo
	@echo "Pictures:    $(DEMO)/report.html"
	@echo "Curves:      $(BIN)/tensorboard --logdir $(DEMO)"
	@echo "Go on:       $(BIN)/shardwise train --resume $(DEMO) --steps 480 --nproc 1"

test: .stamp-dev
	$(BIN)/python -m pytest -m "not gpu and not chaos and not clients and not exhaustive" -n 3 --dist loadfile

test-exhaustive: .stamp-dev
	$(BIN)/python -m pytest -m "exhaustive and not gpu and not chaos and not clients" -n 3 --dist loadfile

check: .stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest $(wildcard tests/pure tests/inproc tests/test_*.py)

.stamp-docs: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

docs: .stamp-docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean  # --quiet would count no warnings
	@echo "The site: build/site/index.html"

guard: .stamp-dev
	$(BIN)/python tests/guard/run.py $(if $(ONLY),--only $(ONLY)) --timeout 1500 \
		--deselect tests/dist/collectives/test_guarded.py tests/dist tests/inproc

bench: .stamp-dev
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/pictures.py

gpu: .stamp-dev
	$(BIN)/python benchmarks/gpu.py

MINUTES ?= 10
RANKS ?= 4
SEED ?= 0
fuzz: .stamp-dev
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) --ranks $(RANKS) --seed $(SEED) $(if $(AREA),--area $(AREA))

chaos: MINUTES = 30
chaos: MUTATIONS = 10000
chaos: .stamp-dev
	MUTATIONS=$(MUTATIONS) SEED=$(SEED) $(BIN)/python -m pytest -m chaos
	PYTHONPATH=tests $(BIN)/python -m chaos --minutes $(MINUTES) --seed $(SEED)

# The constraint keeps every package from choosing another torch.
CLIENTS := .venv-clients/bin
.stamp-clients: requirements.txt requirements-clients.txt pyproject.toml
	$(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements.txt)"
	$(CLIENTS)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.txt \
		-r requirements.txt -r requirements-clients.txt
	$(CLIENTS)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clients: .stamp-clients
	$(CLIENTS)/python -m pytest -m clients tests/clients

clean:
	rm -rf $(VENV) $(DOCS) .venv-clients build/site .stamp-setup .stamp-dev .stamp-docs .stamp-clients
