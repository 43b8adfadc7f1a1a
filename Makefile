# make demo | example | preferences | test | test-changed | test-cuda | test-liger | test-lm-eval | third-party | bench | peers-gpu | campaign | check ; each sets up what it needs from nothing.
PYTHON ?= python3
# By its exact version and first: a range would take the newest build and its CUDA packages.
TORCH ?= torch==2.13.0
VENV := .venv
PEERS := .venv-peers
GPU_PEERS := .venv-peers-gpu
LIGER := .venv-liger
LM_EVAL := .venv-lm-eval
BIN := $(VENV)/bin
WORKERS := 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, each of the many processes that tests start would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo example preferences dpo-example orm-example browser test test-changed test-cuda test-liger test-lm-eval third-party bench campaign peers peers-gpu check clean

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

# A Hugging Face folder, fine-tuned with ShareGPT files and exported; fails if what transformers then
# loads does not answer right.
example: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 bash examples/qwen.sh

# Preferences and a reward model of real text; each fails if it ends below what it promises. Both at a
# time, on one thread each.
preferences: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(MAKE) --jobs 2 --output-sync dpo-example orm-example

dpo-example orm-example: %-example:
	bash examples/$*.sh

# For the tests of pages: one that is installed, else Chromium by apt where this is root. Never an
# error: without one those tests are skipped, or fail where CI is set.
browser: venv
	$(BIN)/python scripts/browser.py

# Two workers, each with its own pool of ranks; the tests of a file stay together. One thread each, or
# they wait for one another's. The longest files first: the last ones are quick, so both end together.
# Of tests marked as exhaustive a covering sample: the rest is the campaign suite, see below.
test: venv browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# make test-changed BASE=main ; without BASE what differs from HEAD, or from the commit before it.
test-changed: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.changed_tests $(BASE)

# The same trials on a GPU, which their ranks share; what is skipped is listed with the reason. Each
# worker has ranks of its own: WORKERS=12 on 16 cores.
test-cuda: venv
	OMP_NUM_THREADS=1 ASCEND_RUN_TEST_PLATFORM=cuda ASCEND_RUN_TEST_SHARED_DEVICES=1 \
		$(BIN)/python -m pytest -rs --cases=all -n $(WORKERS) --dist worksteal tests/plugins tests/contract

# Liger's kernels by Triton's interpreter, on the CPU: 650 MB beside .venv, which has no Triton.
test-liger: venv $(LIGER)/.ready
	TRITON_INTERPRET=1 PYTHONPATH=$(LIGER) $(BIN)/python -m pytest tests/ops/kernels/liger_kernels.py

$(LIGER)/.ready: benchmarks/liger.txt
	rm -rf $(LIGER)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LIGER) --requirement benchmarks/liger.txt
	touch $@

# lm-evaluation-harness by its class for Hugging Face models, and by ours: 350 MB beside .venv.
test-lm-eval: venv $(LM_EVAL)/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(LM_EVAL) $(BIN)/python -m pytest tests/tools/evaluate/lm_eval_parity.py

$(LM_EVAL)/.ready: benchmarks/lm-eval.txt
	rm -rf $(LM_EVAL)
	$(BIN)/python -m pip install --quiet --no-deps --target $(LM_EVAL) --requirement benchmarks/lm-eval.txt
	touch $@

# Plugins outside the tree: wheels of them and of ours, installed into an empty environment under
# build/third_party and tested there; and a new package of each kind.
third-party: venv
	$(BIN)/python scripts/third_party.py --torch "$(TORCH)"

# A peer that cannot be installed leaves its rows unmeasured, which the table then says.
bench: venv
	-$(MAKE) peers
	-if command -v nvidia-smi; then $(MAKE) peers-gpu; fi
	$(BIN)/python -m benchmarks $(BENCH)

# make campaign NAME=plan-activation ; stopped at any moment, the same command goes on. NAME=suite runs
# the cases that `make test` leaves out: CAMPAIGN="--workers 2" for two processes.
campaign: venv
	$(BIN)/python -m benchmarks.campaigns $(NAME) $(CAMPAIGN)

peers: $(PEERS)/.ready

$(PEERS)/.ready: benchmarks/peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet "$(TORCH)"
	$(PEERS)/bin/python -m pip install --quiet --requirement benchmarks/peers.txt
	touch $@

peers-gpu: $(GPU_PEERS)/.ready

$(GPU_PEERS)/.ready: benchmarks/peers-gpu.txt
	test -x $(GPU_PEERS)/bin/python || $(PYTHON) -m venv $(GPU_PEERS)
	$(GPU_PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(GPU_PEERS)/bin/python -m pip install --quiet "$(TORCH)"
	$(GPU_PEERS)/bin/python -m pip install --quiet --requirement benchmarks/peers-gpu.txt
	touch $@

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/third_party_*/src
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.static_manifests --check
	$(BIN)/python scripts/plugin_table.py --check
	$(BIN)/python scripts/platform_table.py --check
	$(BIN)/python scripts/hook_table.py --check
	$(BIN)/python -m scripts.api_reference --check
	$(BIN)/python -m scripts.package_layers --check
	$(BIN)/python -m scripts.family_pages --check
	$(BIN)/python -m scripts.handler_table --check
	$(BIN)/python -m scripts.long_sequence_table --check
	$(BIN)/python -m scripts.preset_table --check
	$(BIN)/python -m scripts.field_words
	$(BIN)/towncrier build --draft >/dev/null

clean:
	rm -rf $(VENV) .venv-* data runs build dist
