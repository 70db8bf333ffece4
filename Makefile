# Every command of the project. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/demo
BUNDLE ?= bundles/demo
PY := $(VENV)/bin/python
TRAIN_FLAGS ?=
SERVE_FLAGS ?=
TATOEBA ?= tatoeba/deu-eng.txt.gz
BENCH_FLAGS ?=
GALLERY ?= runs/gallery

# Where a GPU answers: ONNX Runtime for CUDA, torch as PyPI has it, and fp16 graphs beside those for the CPU.
ifneq ($(shell nvidia-smi -L 2>/dev/null),)
  RUNTIME ?= gpu
  PRECISIONS ?= fp32,int8,fp16
  TORCH_PIP_ARGS ?=
else
  RUNTIME ?= cpu
  PRECISIONS ?= fp32,int8
  # How pip finds torch's CPU build; PyPI's own is gigabytes of CUDA.
  TORCH_PIP_ARGS ?= --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
endif

# An environment that exists keeps its Python: another one that is asked for would be ignored.
USED_PYTHON := $(if $(filter clean wheel,$(MAKECMDGOALS)),,$(wildcard $(PY)))
ifneq ($(origin PYTHON),file)
  version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  ifneq ($(USED_PYTHON),)
    ifneq ($(call version_of,$(PY)),$(call version_of,$(PYTHON)))
      $(error $(VENV) has Python $(call version_of,$(PY)), and $(PYTHON) is $(call version_of,$(PYTHON)): remove $(VENV), \
        or name another one (VENV=...))
    endif
  endif
endif

# Three steps: what the demo needs, what unit tests need, and what the tests of deployments need (Ray, proxies, a
# browser's driver), which takes longer to install than the rest.
RUNTIME_INSTALLED := $(VENV)/.runtime-installed-$(RUNTIME)
INSTALLED := $(VENV)/.installed-$(RUNTIME)
DEPLOY_INSTALLED := $(VENV)/.deploy-installed-$(RUNTIME)

# Otherwise pytest recompiles every module on each run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help wheel demo gallery serve test test-all test-docker cuda-stub try-cuda-stub pytest coverage lint types bench figures stubs ptx lock install clean
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BUNDLE)/manifest.json ## install, train, export, serve, translate, show the metrics; a finished step is not repeated
	$(PY) -m benchmarks.demo $(BUNDLE) --run $(RUN)

gallery: $(RUNTIME_INSTALLED) ## train, export, serve and draw a small model of every family; a finished step is not repeated
	PYTHON=$(PY) sh benchmarks/gallery.sh $(GALLERY)

serve: $(BUNDLE)/manifest.json ## serve the demo bundle in the foreground
	$(PY) -m server $(BUNDLE) $(SERVE_FLAGS)

test: $(INSTALLED) lint ## lint, types, stubs, and the tests that each prove something new
	$(MAKE) --no-print-directory --jobs 2 types pytest

# The long tests, and many more examples of what quick ones try a few of.
test-all: export PYTEST_FLAGS = -m "not gpu and not docker" --hypothesis-profile thorough --verbose --durations 20
test-all: $(DEPLOY_INSTALLED) try-cuda-stub test ## the same and the long tests: what CI runs

cuda-stub: $(INSTALLED) ## build what tests of CUDA run on where there is no GPU: 340 MB in .cuda_stub
	$(PY) -m tests.cuda_stub.build

# Where it cannot be built, its tests are skipped, and say why.
try-cuda-stub: $(INSTALLED)
	-$(PY) -m tests.cuda_stub.build

# Each test has a limit of its own (tests/conftest.py). The one here ends a process that hangs in a fixture.
pytest: $(INSTALLED)
	$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		-o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true $(PYTEST_FLAGS)

test-docker: $(INSTALLED) ## build the image and run the stack; needs Docker, and base images
	$(PY) -m pytest -m docker --verbose tests/test_containers.py

coverage: $(DEPLOY_INSTALLED) try-cuda-stub ## statements and branches of bundle, server and client that test-all runs
	$(PY) -m coverage erase
	$(MAKE) --no-print-directory pytest PY="$(PY) -m coverage run" PYTEST_FLAGS='-m "not gpu and not docker"'
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

lint: $(INSTALLED) ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED) ## mypy, strict on all parts of the package
	$(PY) -m mypy

bench: $(INSTALLED) ## the benchmarks that need no GPU
	$(PY) -m pip install --quiet -e '.[bench]'
	$(PY) -m benchmarks.peers $(BENCH_FLAGS)
	$(PY) -m benchmarks.load --rounds 1 --seconds 5

# TATOEBA: English, tab, German on each line, as manythings.org/anki has them. The training takes half an hour.
figures: $(RUN)/summary.json runs/english/summary.json runs/pronouns/summary.json ## the pictures and numbers of docs/attention*.md anew
	$(PY) -m training attention $(RUN) "오늘은 금요일 입니다" --png docs/attention.png
	$(PY) -m training attention runs/english "The dog likes an apple. It has a long tail." --encoder \
		--json docs/heads.json --png docs/heads.png
	$(PY) -m training attention runs/pronouns "The animal didn't cross the street because it was too tired." --encoder \
		--json docs/it-tired.json --png docs/it.png
	$(PY) -m training attention runs/pronouns "The animal didn't cross the street because it was too wide." --encoder \
		--json docs/it-wide.json
	for page in docs/attention*.md; do $(PY) -m docs.page $$page || exit 1; done

runs/pronouns/summary.json: | $(INSTALLED)
	$(PY) -m docs.pronouns runs/pronouns.tsv
	$(PY) -m training train demo --out runs/pronouns --tsv runs/pronouns.tsv --max-steps 1000 \
		--set num_decoder_layers=1 eval_interval_steps=250

runs/english/summary.json: | $(INSTALLED)
	$(PY) -m training train demo --out runs/english --tsv $(TATOEBA) --vocab-size 8000 --max-steps 4000 \
		--set batch_tokens=1500 cooldown_share=0

stubs: $(INSTALLED) ## generate the gRPC stubs and the weightless graphs anew
	mkdir -p build
	$(PY) -m grpc_tools.protoc -I seq2seq_serve/protos=protos --python_out=build --pyi_out=build protos/*.proto
	$(PY) -m grpc_tools.protoc -I seq2seq_serve/protos=protos --grpc_python_out=build \
		--plugin=$(VENV)/bin/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:build $$(grep -l '^service' protos/*.proto)
	mv build/seq2seq_serve/protos/* protos
	$(PY) -m export.graphs.weightless

ptx: ## compile the CUDA kernels anew; needs CUDA's nvcc
	nvcc $$($(PY) -c 'from seq2seq_serve import kernels; print(*kernels.PTX_FLAGS)') -o kernels/cuda_kernels.ptx kernels/cuda_kernels.cu

lock: $(INSTALLED) ## choose anew the versions that the image has
	$(PY) -m pip install --quiet uv
	for runtime in cpu gpu; do $(PY) -m uv pip compile pyproject.toml --quiet --upgrade --universal --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	  --extra server --extra tracing --extra $$runtime -o deploy/requirements-$$runtime.txt || exit 1; done

wheel: ## build a wheel of everything, for this kind of machine, in dist/
	rm -rf build dist
	$(PYTHON) -m venv --clear $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build $(VENV)-wheel

install: $(INSTALLED) ## make the virtual environment, and install what `make test` needs

clean: ## remove the virtual environment, the demo's run and bundle, the CUDA stub, and caches
	rm -rf $(VENV) $(RUN) $(BUNDLE) .cuda_stub build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Torch and ONNX Runtime have no wheels for other versions of Python. An environment that exists keeps its own. The
# question is for pip, because Debian without python3-venv leaves an environment that lacks it.
$(RUNTIME_INSTALLED): pyproject.toml setup.py kernels/sources.py $(wildcard kernels/*.cpp kernels/*.h)
	@$(or $(wildcard $(PY)),$(PYTHON)) -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 14) and \
	  "Python 3.11 to 3.14 is needed, and %s is %d.%d: make PYTHON=python3.11 ..." % ((sys.executable,) + v))'
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install --quiet --no-deps $(TORCH_PIP_ARGS) torch==2.13.0
	rm -f kernels/_*operators*.so
	$(PY) -m pip install --quiet -e '.[training,export,server,$(RUNTIME)]'
	touch $@

# By its name the package is installed already: pip adds what the extra needs, and does not compile the operators again.
# All extras, because what `dev` needs may need older versions of what the others have.
$(INSTALLED): $(RUNTIME_INSTALLED)
	$(PY) -m pip install --quiet 'seq2seq-serve[training,export,server,$(RUNTIME),dev]'
	$(PY) -m pip install --quiet --no-deps 'faster-whisper>=1.2,<2' # the model of voice activity, without another ONNX Runtime
	touch $@

$(DEPLOY_INSTALLED): $(INSTALLED)
	$(PY) -m pip install --quiet 'seq2seq-serve[training,export,server,$(RUNTIME),dev-deploy]'
	touch $@

# A training that was stopped goes on where it stopped.
$(RUN)/summary.json: | $(RUNTIME_INSTALLED)
	$(PY) -m training train demo --out $(RUN) $(if $(wildcard $(RUN)/config.json),--resume) $(TRAIN_FLAGS)

$(BUNDLE)/manifest.json: $(RUN)/summary.json
	$(PY) -m export $(RUN) $(BUNDLE) --precision $(PRECISIONS) --overwrite
