# Each target does all the set-up it needs; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_VENV := .venv-docs
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export GX_ANALYTICS_ENABLED := false
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: setup run test test-slow coverage lint docs bench clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Python 3.11 to 3.13 is needed, this is {v.major}.{v.minor}; name another with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

run: setup
	$(BIN)/rlhf run

test: setup
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow

coverage: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/unit tests/architecture --cov --cov-report=term --cov-report=html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site's tools have an environment of their own, so that the one under test does not grow.
docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@! grep -rnoE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//[^"]+' site --include='*.html' || (echo 'a page of site/ loads from another host'; exit 1)

$(DOCS_VENV)/.installed: requirements-docs.lock
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	@touch $@

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(DOCS_VENV) site htmlcov .coverage work workspaces ablation .rlhf .fingerprints data/raw data/clean data/docs data/quarantine.parquet \
	  models metrics gates plots history samples report.html mlflow.db mlartifacts
