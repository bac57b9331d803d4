# Everything here runs from a fresh clone with Python 3.11 to 3.13, git and make; Java only if you have one.

.DEFAULT_GOAL := help

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# The demo needs a part of it; where all is installed, that part is.
READY := $(or $(wildcard $(STAMP)),$(VENV)/.stamp-demo)

# What pyproject.toml's requires-python says, and able to make a virtual environment.
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

# Dozens of Python processes start here; where this is set, each compiles all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

# Tests' files lie in memory where there is plenty: their databases would wait for a disk, which proves nothing there.
MEMORY = $(shell [ -w /dev/shm ] && df -Pk /dev/shm | awk 'NR == 2 && $$4 > 8000000 { print "TMPDIR=/dev/shm" }' | \
  if awk '/^MemAvailable:/ { exit $$2 < 12000000 }' /proc/meminfo; then cat; fi)

.PHONY: help venv docs demo demo-clean demo-fraud demo-kafka test test-long s3 lint ui matrix schedules nexmark soak soak-doors memory mutants mutants-changed picture release lock bounds bench bench-epoch bench-state bench-windows bench-async

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv as requirements.lock says, with all parts; make demo alone installs fewer
	@$(PY) --version

demo: $(READY) ## Run the flights pipeline on real data
	@$(PY) -m infra.demo

demo-clean: $(READY) ## Remove what the demo left
	@$(PY) -m infra.demo --clean

demo-fraud: $(STAMP) ## Run the card_fraud pipeline on generated payments, and compare its alerts with DuckDB's
	@$(PY) -m infra.demo_fraud

demo-kafka: $(STAMP) ## Run the clickstream pipeline on a Kafka broker of its own
	@$(PY) -m infra.demo_kafka

test: $(STAMP) ## Run the tests, of those that take long a sample (10 minutes on two cores)
	@$(MEMORY) $(PY) -m pytest tests -m "not s3 and not long" -n 4 --pin-workers --dist loadfile --no-loadscope-reorder

test-long: $(STAMP) ## Run the rest of those that take long: whole days at Dagster's pages, all kills, all playbooks (three quarters of an hour)
	@$(MEMORY) $(PY) -m pytest tests -m long -n 4 --pin-workers --dist loadfile --no-loadscope-reorder

s3: $(STAMP) ## Run a pipeline with Spark on S3 (moto's server)
	@$(PY) -m pytest tests/storage -m s3

lint: $(STAMP) ## Check style, format, types and the direction of imports
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

docs: $(STAMP) ## Build the documentation's site into .weir/docs, and check all links within it
	@$(PY) -m sphinx -c docs/site -b html --quiet --fail-on-warning --keep-going --fresh-env --write-all . .weir/docs
	@echo "The site begins at .weir/docs/index.html"

ui: $(READY) ## Open Dagster on the demo's pipeline
	@$(PY) -m weir.local.ui

matrix: $(STAMP) ## Kill and disturb a run at every single call, and compare what recovers with a replay (35 minutes)
	@$(PY) -m tests.recovery.matrix
	@$(PY) -m tests.recovery.matrix --unaligned --sample
	@$(PY) -m tests.recovery.matrix --deploys --sample
	@$(PY) -m tests.recovery.matrix --rewinds --sample
	@$(PY) -m tests.recovery.matrix --rewinds --calls 190 --only kill
	@$(PY) -m tests.recovery.matrix --promotions --sample

schedules: $(STAMP) ## Play 1,000 random orders of overlapping epochs' steps, with faults and kills; FROM=N: the next (half an hour)
	@WEIR_SCHEDULES=1000 $(PY) -m pytest -n 2 tests/recovery/test_schedules.py

nexmark: $(STAMP) ## Run Nexmark's queries over a million events at parallelism 1, 2 and 5, kill each run three times, and compare
	@WEIR_NEXMARK=1000000 $(PY) -m pytest -n 2 -q tests/nexmark/test_matrix.py

soak: $(STAMP) ## Run 3,000 epochs while coordinators are killed and frozen; SEED=N repeats one (25 minutes)
	@$(PY) -m tests.soak
	@$(PY) -m tests.soak --unaligned --epochs 1000 --long 300

soak-doors: $(STAMP) ## Kill each source and each sink on Spark at random, 20 runs each, and compare with the input (an hour)
	@$(PY) -m tests.soak.doors

memory: $(STAMP) ## Show a worker's memory while its state is 20 times the budget, RocksDB's alone and keyed tasks', skewed keys too (6 minutes)
	@$(PY) -m tests.tools.memory

mutants: $(STAMP) ## Break the code on purpose and see that the tests notice
	@$(PY) -m tests.tools.mutants

mutants-changed: $(STAMP) ## The same for what the last commit, or what is not committed, changes; SINCE=REF: since another one
	@$(PY) -m tests.tools.mutants --changed --since $(or $(SINCE),HEAD~1)

bench: $(STAMP) ## Measure incremental against full snapshots; about ten minutes
	@$(PY) -m benchmarks.storage.incremental

bench-epoch: $(STAMP) ## Measure where the time of an epoch goes, with rows and without; three minutes
	@$(PY) -m benchmarks.epoch_profile

bench-state: $(STAMP) ## Measure keyed aggregation beside Spark's, Flink's and Bytewax's; hours, can be interrupted
	@$(PY) -m benchmarks.state.run --full

bench-windows: $(STAMP) ## Measure windows, sessions and deduplication beside Spark's; about five minutes
	@$(PY) -m benchmarks.state.run --quick --scenario 'window-1m,session-1m,deduplicate-1m' --results benchmarks/results/state-windows

bench-async: $(STAMP) ## Measure checkpoints on slow storage, and latency beside Spark's; a quarter of an hour, can be interrupted
	@$(PY) -m benchmarks.asynchronous.run

picture: $(STAMP) ## Make the README's picture anew, of Dagster on the pipeline of make demo (a minute)
	@$(PY) docs/site/picture.py

release: $(STAMP) ## Build the sdist and the wheel, check what is in them, and run the tutorial's pipeline on the wheel (3 minutes)
	@$(PY) -m infra.release $(if $(TAG),--tag $(TAG))

lock: $(STAMP) ## Resolve pyproject.toml into the lock files again; versions in them stay where they can
	@$(LOCK) --all-extras pyproject.toml -o requirements.lock
	@printf 'pytest\npytest-timeout\nsetuptools\nuv\n' | $(LOCK) --extra demo pyproject.toml - -c requirements.lock -o requirements-demo.lock

LOCK = $(VENV)/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-annotate --no-header \
  --no-emit-index-url

$(STAMP): requirements.lock pyproject.toml
	$(install)

$(VENV)/.stamp-demo: requirements-demo.lock pyproject.toml
	$(install)

# What a pipeline keeps, reads, judges and shows, without a broker or a server.
BOUNDS = tests/state_ops/schema tests/state_ops/backends tests/state_ops/checkpoints tests/weir/gates/test_gates.py \
  tests/weir/inspection tests/weir/execution/test_direct_read.py tests/weir/execution/test_spark_executor.py \
  tests/weir/dagster/test_definitions.py tests/weir/dagster/test_history.py tests/test_settings.py tests/weir/cli/test_extras.py

bounds: $(STAMP) ## Run a part of the tests at both ends of the ranges in pyproject.toml, each in a .venv of its own (15 minutes)
	@mkdir -p .weir/bounds
	@for end in lowest-direct highest; do \
	  at=.weir/bounds/$$end && echo "== $$end" && \
	  $(VENV)/bin/uv pip compile --quiet --resolution $$end --extra all --extra demo --no-annotate --no-header \
	    --no-emit-index-url pyproject.toml -o $$at.txt && \
	  $(VENV)/bin/uv venv --quiet --clear --python $(PY) $$at && \
	  VIRTUAL_ENV=$$at $(VENV)/bin/uv pip install --quiet -r $$at.txt && \
	  VIRTUAL_ENV=$$at $(VENV)/bin/uv pip install --quiet -c $$at.txt flask flask-cors hypothesis jsonschema 'moto[s3]' \
	    pytest pytest-timeout && \
	  $$at/bin/python -m pytest -q -m "not long and not s3" $(BOUNDS) || exit 1; \
	done

# Rerunning after any failure is safe: the stamp is written last.
define install
	@if ! { $(PY) -c '$(FITS)' && $(PY) -m pip --version; } >/dev/null 2>&1; then \
	  for python in python3 python3.13 python3.12 python3.11 none; do \
	    if [ $$python = none ]; then \
	      echo "Weir needs Python 3.11, 3.12 or 3.13 with the venv module, and found none." >&2; \
	      echo "  where: python3 is: $$(python3 --version 2>&1 | head -n 1); tried python3.13, python3.12, python3.11 too" >&2; \
	      echo "  next:  install one (on Debian or Ubuntu: apt install python3 python3-venv), then make again" >&2; \
	      exit 1; \
	    fi; \
	    if $$python -c '$(FITS)' >/dev/null 2>&1; then break; fi; \
	  done; \
	  echo "Making $(VENV)"; \
	  $$python -m venv --clear $(VENV); \
	fi
	@$(PY) infra/install.py $<
	@touch $@
endef
