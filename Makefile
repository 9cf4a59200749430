# Everything runs in .venv; each step prints one line with its seconds. `make help` lists the targets.
.NOTPARALLEL:
.SUFFIXES:
.DEFAULT_GOAL := compare
MAKEFLAGS += --no-print-directory
unexport PYTHONDONTWRITEBYTECODE  # without the modules' bytecode each of many processes compiles them anew: 4 CPU-s

PYTHON = python3
MINUTES = 8
DEVICE = cuda
CORES = 2
TORCH = torch==2.13.0
KERNELS = triton==3.6.0 cuda-bindings==13.0.3
BESIDE = transformers==5.23.0 safetensors==0.8.0
SYSTEMS = prism,elastic,static:equal,static:rate,muxserve,qlm,unshared
TRACE = hyperbolic-like+span_s=300
SETTINGS = --set chunk_tokens=2048 --set batch_cap=256 --set mem_fraction=0.9 --set admission=prompt
FULL =
ENGINE =

PY := .venv/bin/python
BENCH := $(PY) -m harness
LOCK := $(shell { sha256sum requirements.lock || shasum -a 256 requirements.lock; } 2>/dev/null | cut -c1-16)
IMPORTS := import torch, triton, cuda.bindings.driver
NODES := import ray, pyarrow
DOCUMENTED = .venv/.docs-$(shell cksum <requirements-docs.lock | cut -d' ' -f1)-$(LOCK)
TORCHED = .venv/.torch-$(LOCK)-$(shell echo '$(TORCH) $(KERNELS) $(BESIDE)' | cksum | cut -d' ' -f1)
SERVERS := harness/engines/servers
# $(call pinned,name,lists): the marker of an environment, named by the pins of all that it holds
pinned = .venv-$(1)/.pins-$(shell { cat $(2:%=$(SERVERS)/%.txt); echo '$(TORCH)'; } | cksum | cut -d' ' -f1)
VLLM := $(call pinned,vllm,vllm)
SGLANG := $(call pinned,sglang,vllm sglang)
CLUSTERED := .venv-cluster/.pins-$(shell cat requirements-cluster.lock requirements.lock | cksum | cut -d' ' -f1)
HERE := $(shell { pwd; cat pyproject.toml; } | cksum | cut -d' ' -f1)
LOCKED := .venv/.lock-$(LOCK)
READY := .venv/.package-$(LOCK)-$(HERE)
MAKES = $(PYTHON) .ci/stages.py

# Packages come by uv, which .venv has from its hashed pin; PIP=1 where uv has no wheel. Both look where pip is told to.
UV = .venv/bin/uv pip install --system-certs --python
PIPS = -m pip install --disable-pip-version-check
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
# $(call new,folder): an empty environment; $(call into,folder): the command that installs into it
new = $(PYTHON) -m venv --clear $(if $(PIP),,--without-pip) $(1)
into = $(if $(PIP),$(1)/bin/python $(PIPS),$(UV) $(1)/bin/python)
# $(call sees,folder,other): an environment that finds the packages of another too
SITE = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
sees = $(call new,$(1)) && $(2)/bin/python $(SITE) >"$$($(1)/bin/python $(SITE))/other.pth"

# $(call quiet,name,command): a step that prints its seconds; the end of its log shows only if it fails
define quiet
@mkdir -p .make; from=$$(date +%s); echo '$(1) ... (.make/$(1).log)'; \
($(2)) >.make/$(1).log 2>&1 </dev/null || { tail -n 20 .make/$(1).log >&2; echo 'failed: $(1)' >&2; exit 1; }; \
printf '%-12s %4d s\n' '$(1)' $$(($$(date +%s) - from))
endef

# What a paper's figures take: studies by the name of the target, which is the study's own where none stand here.
STUDIES-fig12 := fig12 prism-ablations
STUDIES-pdmux := pdmux pdmux-70b
RUN = for study in $(or $(STUDIES-$*),$*); do $(BENCH) study $$study $(if $(FULL),--full) $(if $(ONLY),--only "$(ONLY)") || exit; done
# Whether the paper's claims hold is the end of its answer, where all of it ran.
RUN-fig7 = { $(RUN); } $(if $(ONLY),,&& $(BENCH) claims --only fig7)
# Figure 7 on the torch engine's devices: what they cost, what the simulator says by that table, and the devices.
TORCH_AT = results/cpu/torch/fig7
SHAPES = nemo-12b,llama-3.1-8b,mistral-7b,llama-3.2-3b
STUDY = $(BENCH) study fig7-torch --markdown --gpus 2 --table $(TORCH_AT)/torch-cpu.toml $(if $(FULL),--full)
# $(call beside,side,engine): the study on it, whose tables are kept beside the cost table
beside = $(STUDY) --engine $(2) -o results/fig7-torch-$(1) >$(TORCH_AT)/$(1).md && \
	cp results/fig7-torch-$(1)/fig7-torch.csv $(TORCH_AT)/$(1).csv && echo && cat $(TORCH_AT)/$(1).md
RUN-fig7-torch = $(MAKE) torch && $(BENCH) calibrate torch+wide=4 --models $(SHAPES) -o $(TORCH_AT) && \
	$(call beside,simulator,sim) && $(call beside,devices,torch)
RUN-weaver = $(BENCH) study weaver --full
reproduce-%: $(READY) FORCE ## a paper's figures: fig7, fig12, aegaeon, pdmux, weaver, or any of `bench study`; ONLY=CONDITION; FULL=1: more; fig7 ENGINE=torch
	@$(or $(RUN-$*$(ENGINE:%=-%)),$(if $(ENGINE),$(error ENGINE=$(ENGINE) runs no $*; fig7 runs with ENGINE=torch)),$(RUN-$*),$(RUN))

# What `bench study` lists, but for the torch engine's devices and what another of these targets runs as well.
STUDIES = $(PY) -c 'from harness.study import load; print(*load.names())'
EVERY = $(filter-out fig7-torch prism-ablations pdmux-70b,$(shell $(STUDIES)))
reproduce-all: $(READY) ## every study that the bench has, its table in .make/tables/; hours; a second call goes on; FULL=1: more
	@mkdir -p .make/tables; for study in $(EVERY); do from=$$(date +%s); to=.make/tables/$$study$(if $(FULL),-full).txt; \
	$(MAKE) reproduce-$$study >.make/part && mv .make/part $$to || exit; \
	printf '%-18s %5d s  %s\n' $$study $$(($$(date +%s) - from)) "$$(head -n 1 $$to)"; done

claims: $(READY) ## every paper's claims beside what comes out here, as .make/claims.md; runs what is not stored
	@$(BENCH) claims

compare: $(READY) ## (plain `make`) compare seven systems on a trace: table and figure
	@$(BENCH) compare --systems $(SYSTEMS) --trace $(TRACE) $(SETTINGS)

help: ## this list
	@awk -F':.*## ' '/^[a-z0-9%-]+:.*## / {printf "%-17s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## .venv from requirements.lock; does nothing while the lock is unchanged
	@echo "environment  .venv, $$($(PY) --version), requirements.lock $(LOCK)"

$(LOCKED):
	@command -v $(PYTHON) >/dev/null || \
	{ echo 'error: no $(PYTHON) here; name a Python >= 3.11: make PYTHON=/path/to/python3' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(call quiet,environment,$(PYTHON) -m venv --clear .venv && \
	$(if $(PIP),,$(PY) $(PIPS) --require-hashes -r requirements-uv.lock &&) \
	$(call into,.venv) --require-hashes -r requirements.lock && touch $@)

$(READY): $(LOCKED)
	$(call quiet,package,$(call into,.venv) --no-deps --no-build-isolation -e . && rm -f .venv/.package-* && touch $@)

test: ## the tests that need no server and no torch; make ci-full has more
	@$(MAKES) setup:600 test-fast:2400 test-slow:3000

# Each target collects the files that have tests of its kind, and of those its tests.
PYTEST = $(PY) -m pytest -q
files = $(sort $(shell grep -lrE 'mark\.($(1))' tests --include='test_*.py'))
FAST = not (slow or torch or servers or cluster)
SHORT_OF_FULL = $(if $(BENCH_FULL),, and not full)

test-fast: $(READY) ## tests that take seconds
	@$(PYTEST) -n $(CORES) --dist loadfile -m "$(FAST)" --ignore=tests/servers --ignore=tests/cluster

compile: $(READY) ## the simulator, as tests use it: one process compiles, and others would wait for it
	@$(PY) -c 'from tests.harness.engines.sim import compiled; compiled.once()'

test-slow: $(READY) ## tests that take minutes: kills, two processes, the commands of the documents; BENCH_FULL=1: mutations, refits
	@$(PYTEST) -n $(CORES) --dist loadfile -m "slow and not torch$(SHORT_OF_FULL)" $(call files,slow|full)

test-torch: torch ## tests that need torch, on a CPU: the engine on it; a GPU's kernels compiled and interpreted
	@$(PYTEST) -n $(CORES) --dist loadfile -m "torch$(SHORT_OF_FULL)" $(call files,torch)

torch: $(TORCHED) ## torch, triton, cuda-bindings and transformers into .venv, beside the lock, for test-torch

# Apart: torch's CUDA builds name a triton of their own, its CPU builds none; what is compiled here needs no GPU.
$(TORCHED): | $(READY)
	$(call quiet,torch,$(call into,.venv) $(TORCH) && $(call into,.venv) $(KERNELS) $(BESIDE) && \
	$(PY) -c '$(IMPORTS)' && rm -f .venv/.torch-* && touch $@)

test-servers: servers-llamacpp servers-vllm servers-sglang ## tests with real servers on a CPU: llama.cpp, vLLM; SGLang's own parsers
	@$(PYTEST) -n 1 -m servers tests/servers

test-llamacpp: servers-llamacpp ## those of test-servers with llama.cpp
	@$(PYTEST) -n 1 -m servers $(wildcard tests/servers/*llamacpp.py)

servers-vllm: $(VLLM)
servers-sglang: $(SGLANG)

# .venv-NAME of a server engine: all that its list pins and nothing else. A line `# import X` of the list is then tried.
servers-%: | $(READY) ## .venv-NAME with a kind of server: llamacpp (0.2 GB), vllm (2.3 GB, minutes), sglang (0.9 GB over vllm)
	$(if $(wildcard $(SERVERS)/$*.txt),,$(error no list of pins $(SERVERS)/$*.txt))
	$(if $(wildcard $(call pinned,$*,$*)),,$(call quiet,$*,$(call new,.venv-$*) && \
	$(call into,.venv-$*) --no-deps -r $(SERVERS)/$*.txt && \
	sed -n 's/^# import /import /p' $(SERVERS)/$*.txt | .venv-$*/bin/python - && touch $(call pinned,$*,$*)))

$(VLLM): | $(READY)
	$(call quiet,vllm,$(call new,.venv-vllm) && $(call into,.venv-vllm) $(TORCH) && \
	$(call into,.venv-vllm) --no-deps -r $(SERVERS)/vllm.txt && .venv-vllm/bin/python -c 'import vllm' && touch $@)

# It has triton alone: vLLM would take to it.
$(SGLANG): $(VLLM) | $(READY)
	$(call quiet,sglang,$(call sees,.venv-sglang,.venv-vllm) && $(call into,.venv-sglang) --no-deps -r $(SERVERS)/sglang.txt && \
	.venv-sglang/bin/python -c 'import sglang.srt.multiplex.pdmux_context' && touch $@)

test-cluster: cluster ## tests on clusters of this machine: two nodes of Ray; workers, nodes and heads are killed
	@.venv-cluster/bin/python -m pytest -q -p no:xdist -m cluster tests/cluster

cluster: $(CLUSTERED) ## .venv-cluster: Ray beside .venv, for --executor (0.3 GB)

# Its own packages are those of the lock that .venv has not.
$(CLUSTERED): requirements-cluster.lock | $(READY)
	$(call quiet,cluster,$(call sees,.venv-cluster,.venv) && \
	$(call into,.venv-cluster) --no-deps --require-hashes -r requirements-cluster.lock && \
	.venv-cluster/bin/python -c '$(NODES)' && touch $@)

gpu: ## what this machine's GPU does (MINUTES=8): needs CUDA torch, no .venv; again goes on
	@DEVICE=$(DEVICE) $(PYTHON) -m probe --minutes $(MINUTES)
	@$(PYTHON) -m probe.order

# On a card: vLLM in .venv-vllm in place of that for processors. Every step keeps what stands, so a second call goes on.
CARD = $(shell nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 | tr 'A-Z ' 'a-z-')
KIND = $(filter $(subst -, ,$(CARD)),$(notdir $(basename $(wildcard harness/engines/costs/tables/*.toml))))
GPUS = $(words $(shell nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null))
GPU_MODEL = llama-3.2-1b
GPU_SYSTEMS = static:equal,static:rate,elastic,swap:sleep
CARDED = .venv-vllm/.card-$(shell cat $(SERVERS)/vllm-gpu.txt $(SERVERS)/kvcached.txt | cksum | cut -d' ' -f1)
AT = results/$(CARD)
# OFFLINE=1 PYTHON=...: no network, and an interpreter that has the packages of the bench, of vLLM and of kvcached
gpu-servers: BENCH := $(if $(OFFLINE),$(PYTHON),$(PY)) -m harness
TABLE = $(AT)/vllm-$(KIND).toml

gpu-servers: ## vLLM on this machine's GPU, into results/<gpu>/: calibrate, validate, figure 7; again goes on
	@[ -n '$(CARD)' ] || { echo 'error: make gpu-servers needs a GPU, and nvidia-smi finds none here' >&2; exit 2; }
	@[ -n '$(KIND)' ] || { echo 'error: no cost table has a word of $(CARD) as its name: make gpu-servers KIND=h100' >&2; exit 2; }
	@$(if $(OFFLINE),,$(MAKE) $(READY) $(CARDED))
	@echo 'calibrate    $(GPU_MODEL): prefill, decode, start, sleep and wake, of one server and of several'
	@$(BENCH) calibrate vllm --gpu $(KIND) --models $(GPU_MODEL) --rounds 1 -o $(AT)
	@echo 'validate     the same runs on vLLM and on the simulator with that table'
	@$(BENCH) validate --engine vllm --table $(TABLE) --models $(GPU_MODEL) --counts 2,4 --systems $(GPU_SYSTEMS) --runs $(AT)/runs -o $(AT)/validate
	@echo 'figure 7     what of it runs on $(GPUS) GPUs'
	@$(BENCH) study fig7 --engine vllm --gpus $(GPUS) --seeds 1 -o $(AT)/fig7

$(CARDED): | $(READY)
	$(call quiet,vllm-gpu,$(call new,.venv-vllm) && $(call into,.venv-vllm) -r $(SERVERS)/vllm-gpu.txt && \
	.venv-vllm/bin/python -c 'import vllm')
	@$(call into,.venv-vllm) --no-build-isolation -r $(SERVERS)/kvcached.txt \
	>.make/kvcached.log 2>&1 || echo 'kvcached is not built (.make/kvcached.log): what needs elastic KV is skipped'
	@touch $@

lint: $(READY) ## ruff: rules and format
	@$(PY) -m ruff check -q . && $(PY) -m ruff format -q --check .

types: $(READY) ## mypy --strict
	@$(PY) -m mypy --no-error-summary

smoke: $(READY) ## the whole path on the committed sample, with every system, under a minute
	@rm -rf .make/smoke
	@$(BENCH) compare --systems all --trace sample --rate-scale 1 --seeds 1 -o .make/smoke

first-screen: ## README's table and minutes, by `make` in a fresh clone
	@$(PYTHON) -m tests.tools.first_screen

bare: ## what a newcomer does: a fresh clone, an empty environment, no data; `make`, and the tests that would read data
	@$(PYTHON) -m tests.tools.bare

bench: $(READY) ## speed: simulated requests per second, memory, first table; how the load client keeps its times
	@$(PY) -m tests.tools.speed && $(PY) -m tests.tools.client_speed

fuzz: $(READY) ## bad input to every command: thousands of cases, each of which must end in one line
	@$(PY) -m tests.fuzz --workers $(CORES)

fit-hosts: $(READY) ## fit the cost tables (PROFILES_DIR) and then what engines add to kernels (MEASURED_DIR) again; minutes
	@mkdir -p plots/gallery
	@$(BENCH) calibrate profiles && cp plots/out/cost_fit.png plots/gallery/ && $(BENCH) calibrate measured

validate: $(READY) ## measured end-to-end runs of real engines beside ours: docs/validation.md (needs MEASURED_DIR)
	@mkdir -p plots/gallery
	@$(BENCH) validate --page docs/validation.md && for f in validate staggered; do [ ! -f plots/out/$$f.png ] || cp plots/out/$$f.png plots/gallery/; done

docs: $(DOCUMENTED) ## docs/ as pages in .make/docs/, without network; what is generated from the code among them
	@$(BENCH) list --matrix --markdown >.make/matrix.md && mv .make/matrix.md docs/matrix.md && \
	$(PY) -m harness.cli.generated && $(PY) -m sphinx -q -W --keep-going docs .make/docs
	@echo '.make/docs/index.html'

# Beside the lock, which whoever only runs the bench installs.
$(DOCUMENTED): | $(READY)
	$(call quiet,sphinx,$(call into,.venv) --no-deps --require-hashes -r requirements-docs.lock && rm -f .venv/.docs-* && touch $@)

ci: ## what .ci/run runs
	@BENCH_BARE=1 $(MAKES) setup:600 lint:480 bare:3000+compile:1200+types:1800+docs:1800 test-fast:2400 \
	torch:900 servers-llamacpp:900 test-slow:3000+test-torch:2400+test-llamacpp:1800

ci-full: ## all of it and more: conformance at length, whole fuzz, servers of other projects; hours. By hand, and each night
	@BENCH_FULL=1 $(MAKES) setup:600 lint:480 types:900 docs:900 bare:2400 test-fast:4800 test-slow:7200 smoke:480 \
	fuzz:7200 torch:900 test-torch:3600 servers-sglang:1800 test-servers:1800 cluster:900 test-cluster:1500

EXTRA = import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
RESOLVE = .venv/bin/uv --system-certs pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command 'make lock'
lock: $(READY) ## resolve all requirements*.lock anew
	echo uv | $(RESOLVE) --no-deps -o requirements-uv.lock -
	$(RESOLVE) --extra dev -o requirements.lock pyproject.toml
	$(PYTHON) -c '$(EXTRA)' docs | $(RESOLVE) -c requirements.lock -o requirements-docs.lock -
	$(PYTHON) -c '$(EXTRA)' cluster | $(RESOLVE) -c requirements.lock -o requirements-cluster.lock -

clean: ## remove .venv, caches and logs; results/ stays
	@rm -rf .venv .venv-* .make .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist plots/out *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

FORCE:

.PHONY: FORCE bare compile first-screen ci-full test-llamacpp compare claims cluster test-cluster help setup test test-fast test-slow test-torch torch test-servers servers-vllm servers-sglang gpu gpu-servers lint types smoke bench fuzz fit-hosts validate docs ci lock clean
