# Each target sets up $(VENV) if need be. To use another interpreter than python3: make PYTHON=python3.12 demo
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
# pip and uv show what they download on a terminal, and say it in lines elsewhere.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# pip takes torch from where this machine has it (a CPU wheel, say); of the rest uv makes in half a minute what takes pip
# three. Where uv doesn't find its way (a mirror that only pip knows), pip installs all.
INSTALL = { $(PIP_INSTALL) torch uv \
	&& $(BIN)/uv pip install --python $(VENV) -c constraints.txt -e '.[$(EXTRAS)]'; } \
	|| $(PIP_INSTALL) -e '.[$(EXTRAS)]'
SAYS_WHAT_PIP_DOES = echo "Installing into $(VENV): some 70 packages, of which torch is by far the largest (200 MB for a \
CPU; with CUDA, which pip takes on Linux unless a CPU wheel is there, gigabytes). Minutes, once."
# Two processes that start at once would each compile what they import. What hardly anything imports is left to its import.
# Some packages bring files of other Python versions: their errors don't count.
RARELY_IMPORTED := /(tests|fontTools|kubernetes|mypyc?|setuptools|sympy|torch/testing/_internal|transformers/models)/
COMPILE = $(BIN)/python -W ignore -m compileall -q -q -j 0 -x '$(RARELY_IMPORTED)' $(VENV)/lib || true
FOR_USE := $(VENV)/.installed-for-use
FOR_WORK := $(VENV)/.installed-for-work

.PHONY: help demo check test fuzz kills soak bench test-lowest audit dist docs notebook tutorial wheel-test lint format constraints clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train a retriever, compare it with plain selectors, compose a prompt (two to five minutes on two cores)"
	@echo "make check        lint, then the fast tests (a minute, for use while you work)"
	@echo "make test         lint, then all tests (minutes; what continuous integration runs)"
	@echo "make fuzz         parsers, answers, checkpoints, filters, cache keys on made inputs (SECONDS=60)"
	@echo "make kills        runs killed again and again, which must end like an undisturbed one (KILLS=100)"
	@echo "make soak         a million questions, a thousand at once, 32 threads on a pool (COUNT=1000000)"
	@echo "make bench        what the calls cost beside LangChain's (minutes)"
	@echo "make lint         ruff and mypy"
	@echo "make test-lowest  the fast tests, and those of servers' faults, with the lowest versions that pyproject.toml allows"
	@echo "make audit        known vulnerabilities of what constraints.txt pins"
	@echo "make dist         wheel and source distribution"
	@echo "make format       let ruff fix what it can"
	@echo "make docs         build the documentation into site/, for reading without a network"
	@echo "make notebook     write examples/tutorial.ipynb again, from docs/tutorial.md"
	@echo "make tutorial     follow docs/tutorial.md word by word, in a fresh clone (minutes)"
	@echo "make wheel-test   build wheel and source distribution and serve a checkpoint with each from an empty environment (minutes)"
	@echo "make constraints  update the pinned versions in constraints.txt"
	@echo "make clean        remove $(VENV), caches and builds; runs/ and data/ stay"

# OpenMP threads sleep while they wait: busy waiting slows a run tenfold where other programs need the cores.
export OMP_WAIT_POLICY ?= PASSIVE

demo: export OMP_NUM_THREADS ?= 2
demo: $(FOR_USE)
	$(BIN)/rcr-train run examples/configs/demo.yaml --overwrite
	$(BIN)/python examples/quickstart.py

# One thread for each worker: more threads than cores slow linear algebra several-fold. Work stealing keeps the tests of
# a module together, so that its fixtures are built once.
check test: export OMP_NUM_THREADS := 1
# Not set, even where the shell sets it: without bytecode each worker compiles every module and rewrites every assert.
check test: export PYTHONDONTWRITEBYTECODE :=
check: lint
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow" --durations 5 --durations-min 2
test: lint
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

bench: $(FOR_WORK)
	mkdir -p build
	$(BIN)/python benchmarks/serving.py --sizes 440,3000 --out build/serving.json

SECONDS ?= 60
KILLS ?= 100
COUNT ?= 1000000
fuzz kills soak: export OMP_NUM_THREADS := 1
fuzz: $(FOR_WORK)
	$(BIN)/python tests/harness/fuzz.py --seconds $(SECONDS)
kills: $(FOR_WORK)
	$(BIN)/python tests/harness/kills.py --count $(KILLS)
soak: $(FOR_WORK)
	$(BIN)/python tests/harness/soak.py --count $(COUNT)

# Each has an environment of its own under build/, which `make clean` removes.
test-lowest: export OMP_NUM_THREADS := 1
test-lowest:
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet uv
	build/lowest/bin/uv pip install --quiet --python build/lowest --resolution lowest-direct -e '.[dev]'
	build/lowest/bin/pytest -n $(WORKERS) --dist worksteal -m "not slow"
	build/lowest/bin/pytest -n $(WORKERS) --dist worksteal tests/llm/test_llm_http*.py tests/llm/test_llm_processes.py tests/training/test_grpo_http.py

audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

dist:
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet build
	build/dist/bin/python -m build

# The first time mypy reads all libraries, which two processes do in half the time; with its cache one is quicker.
lint: $(FOR_WORK)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(wildcard .mypy_cache),,MYPY_NUM_WORKERS=$(WORKERS) )$(BIN)/mypy

format: $(FOR_WORK)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(FOR_WORK)
	$(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

notebook: $(FOR_WORK)
	$(BIN)/python docs/notebook.py

# What is committed: the page has the reader clone.
tutorial:
	rm -rf build/tutorial
	git clone --quiet . build/tutorial
	cd build/tutorial && $(PYTHON) tests/follow_page.py docs/tutorial.md

wheel-test: $(FOR_WORK)
	rm -rf build/wheel
	$(BIN)/python -m build --quiet --outdir build/wheel
	$(BIN)/python tests/try_wheel.py build/wheel/*.whl build/wheel/*.tar.gz

# The stamps are written last, so that a failed installation is repeated. The development set-up includes the user's.
$(FOR_USE): EXTRAS := train,offline
$(FOR_USE): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory venv
	@$(SAYS_WHAT_PIP_DOES)
	$(INSTALL)
	@$(COMPILE)
	@touch $@

$(FOR_WORK): EXTRAS := dev
$(FOR_WORK): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory venv
	@$(SAYS_WHAT_PIP_DOES)
	$(INSTALL)
	@$(COMPILE)
	@touch $(FOR_USE) $@

.PHONY: venv
venv:
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON). langchain-rcr needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "langchain-rcr needs Python 3.11 or newer, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Keeps the comment at the top. Drops local versions (+cpu) and the packages of CUDA's torch, which differ by machine.
constraints:
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet '.[dev]'
	{ grep '^#' constraints.txt; \
	  build/constraints/bin/python -m pip freeze --all --exclude pip --exclude langchain-rcr \
	  | sed -E -e 's/\+[a-z0-9.]+$$//' -e '/^(nvidia|triton|cuda)/d'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
