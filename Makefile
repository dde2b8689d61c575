# Carpool: everything runs from .venv. `make install` builds it from packages pinned by hash in requirements.lock.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOCK   := requirements.lock
TOOLS  := tests/tools.lock
JOBS   ?= 6
# Without --no-compile, pip compiles thousands of files that are never imported. The pip that comes with Python 3.11
# takes twice the time for all packages, so it first installs a newer one.
PIP    := $(BIN)/pip install --no-compile --quiet --quiet --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help install tools demo test check docs pictures lock audit bench http fuzz profile soak chaos release compat clean

help: ## List these targets
	@printf 'Usage: make TARGET [PYTHON=python3.12]\n\n'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) \
	  | while IFS='|' read -r name text; do printf '  %-9s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## Create .venv and install Carpool in it, as .venv/bin/carpool

tools: install ## Add what tests of charts and of pages in a browser need, 130 MB; without it they are skipped
	@$(PIP) --require-hashes --requirement $(TOOLS)

demo: install ## Start Redis, a batcher and workers on this machine, and send requests to them
	@$(BIN)/carpool demo

# Without bytecode, each process would compile all tests again, for ten seconds.
test: install ## Run all tests in JOBS processes (default 6); print the slowest
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -q -n $(JOBS) --durations=10 --durations-min=1 tests

check: install ## Check style, format, types, and imports between layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install ## Write the reference of the Python interface, from its docstrings, into build/docs
	@cd tests && ../$(BIN)/python -m support.reference ../build/docs

pictures: tools ## Take the pictures of docs/console.md from a browser (Chromium)
	@cd tests && ../$(BIN)/python -m support.pictures

# The interpreter for all systems is the one of .venv, unless PYTHON is given. The grid runs in ops/bench.
GRID    = cd ops/bench && ../../$(BIN)/python -m
PYTHONS = $(if $(filter command environment,$(origin PYTHON)),--python $(PYTHON))
BENCH  ?= --write
bench: install ## Measure Carpool and others side by side (BENCH=--help)
	@$(GRID) grid $(PYTHONS) $(BENCH)

HTTP ?= --write
http: install ## Measure the gateway and other HTTP servers side by side (HTTP=--help)
	@$(GRID) grid.http_servers $(PYTHONS) $(HTTP)

FUZZ ?= --inputs 1000000
FUZZ_BATCHER ?= --entries 10000000
fuzz: install ## Try a million inputs on decoders, models and a gateway each, and ten million entries on a batcher
	@cd tests && ../$(BIN)/python -m support.fuzzing $(FUZZ)
	@cd tests && ../$(BIN)/python -m support.fuzzing_batcher $(FUZZ_BATCHER)
	@cd tests && ../$(BIN)/python -m support.fuzzing_models $(FUZZ_MODELS)
	@cd tests && ../$(BIN)/python -m support.fuzzing_gateway $(FUZZ_GATEWAY)

profile: install ## Write where each microsecond of a request goes into docs/profile.md
	@$(GRID) grid.profile $(PYTHONS) --write

CHAOS ?=
chaos: install ## Kill and freeze everything under load: is a request lost? (CHAOS=--help)
	@cd tests && ../$(BIN)/python -m support.chaos.main $(CHAOS)

SOAK_MINUTES ?= 60
soak: install ## Run a mixed load for SOAK_MINUTES (default 60): does memory grow?
	@$(GRID) grid.soak --minutes $(SOAK_MINUTES)

$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Carpool needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1 | head -1) ($(PYTHON))." >&2; \
	  echo 'Choose another Python: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	@echo "[1/3] Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo '$(PYTHON) -m venv failed. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@echo "[2/3] Installing $$(grep -c == $(LOCK)) pinned packages, which takes about half a minute"
	@sed -n '/^pip==/,/[^\]$$/p' $(LOCK) | $(PIP) --require-hashes --requirement /dev/stdin
	@$(PIP) --require-hashes --requirement $(LOCK)
	@echo '[3/3] Installing Carpool itself'
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
	@echo 'Ready: $(BIN)/carpool'

# The lock also has pip, and what building the project needs, because the install runs without build isolation.
# Images have locks of their own with the same versions: one for what runs in them, one for building the wheel. The
# extra `transformers` is in none: PyTorch is a hundred times as large as all others, and has a build for each GPU.
# Package sources that are configured on this machine are ignored, so that the hashes are those of the public files.
EXTRAS = console dev docs embedded gateway grpc onnx otel pages plot uvloop voice
COMPILE = env -u UV_INDEX -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS build/lock/bin/uv pip compile --no-config --quiet \
  --universal --python-version 3.11 --fork-strategy fewest --generate-hashes --no-strip-extras --no-annotate \
  --custom-compile-command 'make lock'
lock: ## Resolve the dependencies again and pin them by hash
	@echo '[1/2] Installing the resolver into build/lock'
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/pip install --quiet --quiet --disable-pip-version-check uv
	@echo '[2/2] Resolving'
	@printf 'hatchling\neditables\npip\n' | $(COMPILE) pyproject.toml - --output-file $(LOCK) --upgrade $(EXTRAS:%=--extra %)
	@$(COMPILE) pyproject.toml --extra tools --constraints $(LOCK) --upgrade --output-file $(TOOLS)
	@$(COMPILE) pyproject.toml --extra console --extra gateway --extra grpc --extra otel --constraints $(LOCK) --upgrade \
	  --output-file ops/docker/runtime.lock
	@printf 'hatchling\n' | $(COMPILE) - --constraints $(LOCK) --output-file ops/docker/build.lock --upgrade
	@echo "$(LOCK) pins $$(grep -c == $(LOCK)) packages"

audit: ## Check the pinned packages for known vulnerabilities
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/pip install --quiet --quiet --disable-pip-version-check pip-audit
	@for lock in $(LOCK) $(TOOLS) ops/docker/*.lock; do \
	  echo "$$lock"; build/audit/bin/pip-audit --disable-pip --require-hashes --requirement $$lock || exit 1; done

# Tools in an environment of their own, because what they need is not what Carpool needs.
release: install ## Build wheel and sdist into dist/, run them where there is no checkout, write an SBOM
	@$(PYTHON) -m venv build/release-tools
	@build/release-tools/bin/pip install --quiet --quiet --disable-pip-version-check cyclonedx-bom 'readme_renderer[md]' twine
	@cd tests && ../$(BIN)/python -m support.release ../dist

WHEEL ?=
compat: install ## Test a released wheel with these services, and the other way round (WHEEL=PATH)
	@env -u PYTHONDONTWRITEBYTECODE CARPOOL_RELEASED_WHEEL=$(abspath $(WHEEL)) $(BIN)/pytest -q tests/integration/released.py

clean: ## Remove .venv and all caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
