# Every target sets up .venv first, from pinned versions: nothing but Python 3.11+, git, make and gcc is needed.
PYTHON ?= python3
# `make gpu` uses the Python that has a CUDA build of torch: the machine's own, not .venv.
GPU_PYTHON ?= python3
# `make test TORCH=2.15.0` tests that torch, in an environment of its own, in place of the pinned one.
TORCH ?=
VENV := .venv$(addprefix -,$(TORCH))
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# One more than there are cores: tests that start jobs wait a good part of their time.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PYTEST := $(RUN) -m pytest --numprocesses $(WORKERS) --maxprocesses 4
BY_FILE := --dist loadfile --no-loadscope-reorder
# Arguments for the experiment, as in: make train ARGS="--model mini --ranks 2"
ARGS ?=

.PHONY: help train test programs kernels chaos bits lint bert-recipe plots lion frontier stages bench bench-engine text-classification long-sequences long-documents layer-drop ethernet pipelines shards plan-accuracy redraw gpu docs wheel clean

help:
	@echo "make train           pretrain a small BERT with AdamW and with 1-bit Adam on ZeRO-1, and draw both (under 10 minutes)"
	@echo "make test            run the tests (under 7 minutes on 2 cores)"
	@echo "make programs        run those of whole programs: launched jobs, compiled models, command lines (about 4 minutes; CI always runs it)"
	@echo "make kernels         compile and emulate the kernels for GPUs, every form (about 10 minutes; CI runs it if kernels changed)"
	@echo "make chaos           damage, races and other faults by the thousand, each seeded (about 20 minutes)"
	@echo "make bits            run every optimizer in every form against the bits that were recorded of it (about 3 minutes)"
	@echo "make bert-recipe     the fastest published BERT pretraining's recipe with LAMB and 1-bit LAMB, scaled down (about 10 minutes)"
	@echo "make plots           reproduce the convergence plots"
	@echo "make lion            1-bit Lion beside Lion and AdamW, each at its best rate (about 10 minutes)"
	@echo "make frontier        loss against bytes and seconds, every optimizer at its best rate (hours; stopped, it goes on)"
	@echo "make stages          compare losses by ZeRO stage, sharded or not, resumed or not (about 20 minutes)"
	@echo "make bench           measure the CPU kernels against this machine's copy bandwidth"
	@echo "make bench-engine    measure the engine's step time and memory beside torch's"
	@echo "make text-classification  Hugging Face's Trainer with 1-bit Adam beside AdamW and DDP (under an hour)"
	@echo "make long-sequences  attention by length, dense and block-sparse (about 20 minutes)"
	@echo "make long-documents  BERT on long documents, sparse, dense and truncated (about an hour)"
	@echo "make layer-drop      BERT with and without progressive layer drop: loss, time, learning rates (about 40 minutes)"
	@echo "make ethernet        race DDP, PowerSGD and 1-bit Adam over slow links (as root on Linux; about half an hour)"
	@echo "make pipelines       time pipelines over slow links: idle stages, and tokens a second by codec (as root on Linux; about 20 minutes)"
	@echo "make shards          stage 3 over slow links: bytes between hosts and steps, exact and through codecs (as root on Linux; about 12 minutes)"
	@echo "make plan-accuracy   thinwire plan beside steps at settings it has not seen (as root on Linux; about 15 minutes)"
	@echo "make redraw          draw the pictures of recorded results again, from their JSON (ARGS=NAME for one)"
	@echo "make gpu             run the GPU tests and benchmarks on the NVIDIA GPU present, in stages of under 8 minutes"
	@echo "make docs            build these pages and the API reference as a site, into site/"
	@echo "make lint            ruff and mypy;  make wheel: build the wheel;  make clean: remove .venv* and build outputs"

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "thinwire needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Use: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	grep -vE '^($(if $(TORCH),torch|triton|setuptools,))==' requirements.txt > $(VENV)/requirements.txt
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $(VENV)/requirements.txt $(if $(TORCH),torch==$(TORCH) 'setuptools>=77')
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

train: $(READY)
	$(RUN) -m experiments.pretrain_bert $(ARGS)

# Bytecode is kept whatever the shell says: every worker, and most processes that tests start, would compile all again.
test programs: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	$(PYTEST) $(BY_FILE) $(ARGS)

programs: $(READY)
	$(PYTEST) --dist load -m programs $(ARGS)

kernels: $(READY)
	$(PYTEST) $(BY_FILE) -m kernels $(ARGS)

chaos: $(READY)
	$(RUN) -m tests.chaos $(ARGS)
	$(RUN) -m pytest -m chaos

bits: $(READY)
	$(RUN) -m tests.optim.recorded.record --check

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bert-recipe: $(READY)
	$(RUN) -m experiments.bert_recipe $(ARGS)

plots: $(READY)
	$(RUN) -m experiments.convergence $(ARGS)

lion: $(READY)
	$(RUN) -m experiments.lion $(ARGS)

frontier: $(READY)
	$(RUN) -m experiments.frontier $(ARGS)

stages: $(READY)
	$(RUN) -m experiments.stages $(ARGS)

bench: $(READY)
	$(RUN) -m experiments.benchmarks.kernels $(ARGS)

bench-engine: $(READY)
	$(RUN) -m experiments.benchmarks.engine $(ARGS)

text-classification: $(READY)
	$(RUN) -m experiments.text_classification $(ARGS)

long-sequences: $(READY)
	$(RUN) -m experiments.long_sequences $(ARGS)

long-documents: $(READY)
	$(RUN) -m experiments.long_documents $(ARGS)

layer-drop: $(READY)
	$(RUN) -m experiments.layer_drop $(ARGS)

ethernet: $(READY)
	$(RUN) -m experiments.ethernet $(ARGS)

pipelines: $(READY)
	$(RUN) -m experiments.ethernet.pipelines $(ARGS)

shards: $(READY)
	$(RUN) -m experiments.ethernet.shards $(ARGS)

plan-accuracy: $(READY)
	$(RUN) -m experiments.ethernet.unseen $(ARGS)

redraw: $(READY)
	$(RUN) -m experiments.redraw $(ARGS)

gpu:
	$(GPU_PYTHON) -m experiments.gpu $(ARGS)

# The variable silences a notice about another project.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict $(ARGS)

wheel: $(READY)
	$(RUN) -m build --wheel

clean:
	rm -rf .venv* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
