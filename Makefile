# `make demo` and `make test` set up everything on a new machine.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
# timm and torchvision have their own environment: next to a CPU build of torch, torchvision breaks Lightning.
ENCODERS ?= .venv-encoders
# What runs without torch, on another Python: make test-light PYTHON=python3.13
LIGHT ?= .venv-light
LIGHT_TESTS := atomic classification_metrics cohort config extraction folder_lock folds image_header isolated_file million_slides_benchmark patches predictions progress qc rare_signal regions scheduler slides tables tasks thumbnails tissue
# The documentation site: neither caprmil nor torch is installed there.
DOCS ?= .venv-docs
# torchmil, only for the benchmark of speed, with the dependencies that caprmil does not have.
TORCHMIL ?= .torchmil

# Without bytecode, every process would compile torch and Lightning again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo bench test test-slow test-encoders test-light torture docs notebooks check format lock clean

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1  /p' $(MAKEFILE_LIST)

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "caprmil needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.core  ## Generate a cohort, cross-validate three models on it, print a table and a plot.
	$(BIN)/caprmil demo

test: $(VENV)/.dev  ## Run the tests, without the slow ones. All of them: make test ALL=1
	$(BIN)/pytest $(if $(ALL),-m 'slow or not slow')

test-slow: $(VENV)/.dev  ## Run the slow tests.
	$(BIN)/pytest -m slow

torture: $(VENV)/.dev  ## Kills, damaged files, bombs, pickles, hostile requests, full disks: some 18 minutes on two cores (calculated).
	$(BIN)/python tests/torture $(TORTURE)

$(ENCODERS)/.done: pyproject.toml
	$(PYTHON) -m venv $(ENCODERS)
	$(ENCODERS)/bin/python -m pip install -qq --no-compile -e '.[encoders]' beartype pytest pytest-timeout pytest-xdist
	@touch $@

test-encoders: $(ENCODERS)/.done  ## Test the encoders of timm and transformers in their own environment.
	$(ENCODERS)/bin/pytest tests/encoders tests/test_encoders.py

$(LIGHT)/.done: pyproject.toml
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python tests/light_packages.py > $(LIGHT)/packages.txt
	$(LIGHT)/bin/python -m pip install -qq --no-compile -r $(LIGHT)/packages.txt
	@touch $@

test-light: $(LIGHT)/.done  ## Test what runs without torch, on the Python of PYTHON=python3.13.
	PYTHONPATH=src $(LIGHT)/bin/python -m pytest $(addprefix tests/test_,$(addsuffix .py,$(LIGHT_TESTS)))

$(DOCS)/.done: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -qq 'pip>=25.1'
	$(DOCS)/bin/python -m pip install -qq --no-compile --group docs
	@touch $@

# Not --quiet: it silences warnings, and then they are not errors.
docs: $(DOCS)/.done  ## Build the documentation site into public/. A warning, such as a broken link, is an error.
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# The kernel has the packages of both environments: nbclient is in one, caprmil and torch are in the other.
notebooks: $(VENV)/.core $(DOCS)/.done  ## Execute the notebooks in docs/notebooks and keep their outputs.
	PATH=$(abspath $(BIN)):$(PATH) $(DOCS)/bin/python website/run_notebooks.py $(VENV) docs/notebooks

$(TORCHMIL)/.done: $(VENV)/.core
	$(BIN)/python -m pip install -qq --no-deps --target $(TORCHMIL) torchmil tensordict pyvers cloudpickle orjson importlib_metadata zipp
	@touch $@

bench: $(VENV)/.core $(TORCHMIL)/.done  ## Speed and memory, also of the plain form and torchmil, and of whole commands; writes docs/performance.md.
	PYTHONPATH=$(TORCHMIL) $(BIN)/python benchmarks/speed.py $(BENCH)
	$(BIN)/python benchmarks/journey.py $(JOURNEY)

check: $(VENV)/.dev  ## Format, lint, types and import contracts.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## Format the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Local version tags (torch 2.13.0+cpu) are removed: 2.13.0 allows the CPU and the CUDA build.
lock: $(VENV)/.dev  ## Write the versions in the environment to constraints.txt.
	$(BIN)/python -m pip freeze --exclude-editable --exclude caprmil | sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*/\1/p' > constraints.txt.new
	mv constraints.txt.new constraints.txt
	@touch $(VENV)/.core $(VENV)/.dev

clean:  ## Remove environments and caches.
	rm -rf $(VENV) $(ENCODERS) $(TORCHMIL) $(DOCS) $(LIGHT) public .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
