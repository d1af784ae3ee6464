# Everything here sets itself up: it needs Python 3.10 or later, make and git (and Go for backends,
# Node and Chromium for the page).

PYTHON ?= python3
TESTS ?=
OURS := not blobs and not install and not hooked and not backend and not scale and not phoenix and not framework and not trainer and not tracker and not server and not agent and not browser and not fuzz
OFFLINE := HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True
JOBS ?= auto# tests at once: as many as there are cores; 0 is one after the other, to debug
ROOM ?=# of quick: rooms, instead of those that the change touches

# Tests start hundreds of programs: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXPORTERS := $(wildcard exporters/*/pyproject.toml)
READERS := ./formats exporters/atif exporters/nemo_gym# of others' files, which the core's tests read
PAGE := otel_rollout/view/page

.PHONY: demo quick most test fuzz dist test-install test-versions test-frameworks test-trainers test-ray test-blobs test-newest test-trackers test-servers test-agents test-hooked test-view test-backends test-scale test-soak test-phoenix backends scale-backends page check-page check check-types format docs bench instructions check-instructions pins clean

demo: hello $(READY)  ## the main job: an agent's runs become trajectories
	$(BIN)/python examples/quickstart.py

.PHONY: hello
hello:
	@echo "demo: runs examples/quickstart.py: an agent asks a model server of its own, and its runs become trajectories."
	@test -e $(READY) || echo "demo: first $(VENV) is made with the pinned packages, which takes a minute or two; nothing is installed elsewhere."

test: $(READY)  ## everything that needs no foreign program
	$(BIN)/python -m pytest -n $(JOBS) -m "$(OURS)" $(TESTS)

quick: $(READY)  ## under a minute for a room: the rooms that the change touches, or ROOM="record look"
	tests="$(or $(TESTS),$$($(BIN)/python -m tests.kit.changed $(ROOM)))" && \
	echo "quick: $$tests" && $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and $(OURS)" $$tests

most: $(READY)  ## minutes: all but what is marked slow
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and $(OURS)" $(TESTS)

fuzz: $(READY)  ## spans, lines, files and texts that are changed at random, for an hour (needs Debian's chromium)
	$(BIN)/python -m pytest -q -n $(JOBS) -m fuzz $(TESTS)

dist: .venv-dist/.ready  ## wheels of the core and of every exporter, into dist/
	rm -rf dist
	.venv-dist/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation -w dist . ./formats $(EXPORTERS:%/pyproject.toml=./%)

test-install: $(READY) dist  ## the lines that install, and the commands of all pages, in empty environments
	$(BIN)/python -m pytest -m "install$(if $(MARKS), and $(MARKS))" $(or $(TESTS),tests/test_install.py)

# Other versions differ in the clients and the SDK: the tests of what touches those.
VERSIONED := tests/test_configure.py tests/look tests/trajectory/test_media.py tests/wire/test_servers.py \
	$(addprefix tests/record/,anthropic clients endings privacy/test_content.py privacy/test_secrets.py processor/test_processor.py) \
	$(patsubst %,tests/record/rollouts/test_%.py,live_trajectory nested_rollouts rollout tool)

MARKS ?=# of test-versions and test-install: "not slow" is a third of the time
test-versions: .venv-openai2/.ready .venv-openai1/.ready .venv-lowest/.ready  ## the other versions that we support
	set -e; for name in openai2 openai1 lowest; do \
		echo "== $$name"; .venv-$$name/bin/python -m pytest -q -n $(JOBS) -m "$(MARKS)" $(or $(TESTS),$(VERSIONED) $(addprefix --ignore=tests/,record/clients/test_other_model_apis.py look/test_tool_spans.py)); \
	done

test-frameworks: .venv-frameworks/.ready  ## agents of other frameworks; their warnings are theirs
	.venv-frameworks/bin/python -m pytest -W ignore -n $(JOBS) -m framework $(or $(TESTS),tests/frameworks tests/record/transports)

NEWEST ?=# of test-newest: "--python 3.12 exporters" is a part of it
test-trainers: .venv-trainers/.ready  ## exporters/, each against its real trainer; their warnings are theirs
	MYPYPATH=$(subst $(eval) ,:,$(EXPORTERS:/pyproject.toml=)) .venv-trainers/bin/mypy --cache-dir .venv-trainers/mypy exporters/*/otel_rollout_*
	.venv-trainers/bin/mypy --cache-dir .venv-trainers/mypy exporters/*/tests
	# A process each: ART changes transformers for all that runs in its process, verl other things.
	printf '%s\n' $(or $(TESTS),$(EXPORTERS:/pyproject.toml=)) | $(OFFLINE) xargs -P 2 -I TESTS sh -c ' \
		out=$$(.venv-trainers/bin/python -m pytest -q -W ignore -m "not ray" TESTS 2>&1) || failed=1; \
		echo "$$out"; exit $${failed:-0}'

test-ray: .venv-trainers/.ready  ## exporters/ on a real Ray of this machine; minutes; not in .ci/run
	$(OFFLINE) .venv-trainers/bin/python -m pytest -q -W ignore -m ray $(or $(TESTS),$(EXPORTERS:/pyproject.toml=))

test-blobs: .venv-blobs/.ready  ## large values beside the spans, in the S3 that moto serves
	.venv-blobs/bin/python -m pytest -q -m blobs $(or $(TESTS),tests/otlp/test_blobs.py)

test-newest: $(READY)  ## clients, frameworks and exporters with the newest releases, on Python 3.12 and 3.13; writes docs/compatibility.json
	$(BIN)/python tools/newest.py $(NEWEST)

test-servers: .venv-servers/.ready .venv-trainers/.ready  ## agents on the real vLLM and llama.cpp, and what trainers get of them
	rm -rf build/served
	OTEL_ROLLOUT_SERVED=build/served .venv-servers/bin/python -m pytest -W ignore -m server $(or $(TESTS),tests/servers)
	set -e; for tests in $(if $(TESTS),,$(wildcard exporters/*/tests/test_*_served.py)); do \
		OTEL_ROLLOUT_SERVED=build/served $(OFFLINE) .venv-trainers/bin/python -m pytest -q -W ignore $$tests; \
	done

test-agents: $(READY) .agents/.ready .venv-agents/.ready  ## agents and clients of other languages, through the gateway (needs Node 20, Go, Java 17 and Maven)
	$(BIN)/python -m pytest -m agent $(or $(TESTS),tests/agents)

test-hooked: .venv-hooked/.ready build/suites/.ready  ## the own tests of requests, httpx and openai, each request recorded
	.venv-hooked/bin/python -m pytest -q -s -p no:xdist -m hooked $(or $(TESTS),tests/hooked)

test-view: $(READY)  ## the page of `otel-rollout view` in a real browser (needs Debian's chromium)
	$(BIN)/python -m pytest -n $(JOBS) -m "browser and not fuzz" $(or $(TESTS),tests/view)

page: $(PAGE)/node_modules $(READY)  ## write its types, format and build the page that is committed (needs Node 20.19 or later)
	$(BIN)/python tools/page_types.py > $(PAGE)/src/types.ts
	cd $(PAGE) && npm run --silent format && npm run --silent build

check-page: $(PAGE)/node_modules $(READY)  ## lint it, write its types and build it anew, and compare with what is committed
	$(BIN)/python tools/page_types.py | diff $(PAGE)/src/types.ts -
	rm -rf build/page
	cd $(PAGE) && npm run --silent check && OTEL_ROLLOUT_PAGE=$(CURDIR)/build/page npm run --silent build
	diff -r $(PAGE)/built build/page

$(PAGE)/node_modules: $(PAGE)/package.json $(PAGE)/package-lock.json
	cd $(PAGE) && npm ci --silent
	@touch $@

backends:  ## build the real Jaeger and the real collector into .tools/ (needs Go)
	$(MAKE) --no-print-directory -C tools -j 2

test-trackers: .venv-trackers/.ready  ## examples/track_*.py with the real W&B, MLflow and trackio, offline
	.venv-trackers/bin/python -m pytest -W ignore -m tracker $(or $(TESTS),tests/trackers)

test-backends: $(READY) backends  ## the tests against them
	OTEL_ROLLOUT_REQUIRE_BACKENDS=1 $(BIN)/python -m pytest -m backend $(TESTS)

scale-backends:  ## what many hosts need besides: the collector with more parts, and Kafka (needs Go, Maven and Java 17)
	$(MAKE) --no-print-directory -C tools -j 2 scale

test-scale: $(READY) scale-backends  ## collectors on several hosts, and the real Kafka; minutes; not in .ci/run
	OTEL_ROLLOUT_REQUIRE_BACKENDS=1 $(BIN)/python -m pytest -m scale $(or $(TESTS),tests/backends tests/receive)

N ?= 30000# of test-soak: rollouts
test-soak: $(READY) scale-backends  ## the same for hours: N=30000 rollouts over collectors and receivers, a tenth as many over Kafka
	OTEL_ROLLOUT_REQUIRE_BACKENDS=1 SCALE_ROLLOUTS=$(N) $(BIN)/python -m pytest -s -m scale -k silence tests/backends/test_tiers.py
	OTEL_ROLLOUT_REQUIRE_BACKENDS=1 SCALE_ROLLOUTS=$$(($(N) / 10)) $(BIN)/python -m pytest -s -m scale -k silence tests/backends/test_kafka.py

test-phoenix: $(READY) .venv-phoenix/.ready  ## the tests against the real Phoenix and MLflow
	OTEL_ROLLOUT_REQUIRE_BACKENDS=1 $(BIN)/python -m pytest -m phoenix $(or $(TESTS),tests/backends)

check: $(READY)  ## lint and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-types: $(READY) .venv-types/.ready  ## what mypy and pyright see of a user's project
	$(BIN)/python tests/typing/check.py .venv-types/bin/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv-docs/.ready  ## the documentation as a site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	! grep -rlE '<(script|link rel="stylesheet"|img)[^>]* (src|href)="https?:' build/site  # it works without a network

bench: $(READY)  ## what it costs; see docs/performance.md
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/transports.py
	$(BIN)/python benchmarks/rebuild.py
	$(BIN)/python benchmarks/blobs.py
	$(BIN)/python benchmarks/workflows.py

instructions: $(READY)  ## what capture costs, in instructions (needs Debian's valgrind): a quarter of an hour
	$(BIN)/python benchmarks/instructions.py

check-instructions: $(READY)  ## its cheapest columns, against benchmarks/instructions.json
	$(BIN)/python benchmarks/instructions.py --check

# Environments, each of the pins of requirements/NAME.txt. The uv of .venv installs them in a fifth of
# pip's time; where it cannot, as with a mirror that only pip's configuration names, pip does.
OWN := lowest openai1 openai2 frameworks trainers trackers servers hooked blobs# the others import nothing of ours
LOOSE := frameworks trainers trackers servers phoenix agents docs# their packages contradict each other in bounds
PIP := -m pip --disable-pip-version-check install --quiet
install = VIRTUAL_ENV=$(CURDIR)/$(1) $(BIN)/uv pip install --quiet $(2) 2>/dev/null || $(1)/bin/python $(PIP) $(2)

$(READY): requirements/newest.txt pyproject.toml $(READERS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"otel-rollout needs Python 3.10 or later, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	-@awk '/^[a-z]/ {wanted = /^uv==/} wanted' $< > $(VENV)/uv.txt && $(BIN)/python $(PIP) --require-hashes -r $(VENV)/uv.txt
	@$(call install,$(VENV),--require-hashes -r $<)
	@$(call install,$(VENV),--no-deps --no-build-isolation -e . $(READERS:%=-e %))
	@touch $@

.venv-%/.ready: requirements/%.txt | $(READY)
	$(PYTHON) -m venv .venv-$*
	@$(call install,.venv-$*,$(if $(filter $*,$(LOOSE)),--no-deps) --require-hashes -r $<)
	@$(if $(filter $*,$(OWN)),$(call install,.venv-$*,--no-deps --no-build-isolation -e . $(patsubst %,-e %,$(sort $(READERS) $(if $(filter trainers,$*),$(EXPORTERS:%/pyproject.toml=%))))))
	@touch $@

$(OWN:%=.venv-%/.ready): pyproject.toml $(READERS:%=%/pyproject.toml)
.venv-trainers/.ready: $(EXPORTERS)

.agents/.ready: tests/agents/package.json $(wildcard tests/agents/clients/*/*)
	mkdir -p .agents
	cp $< .agents/
	cd .agents && npm install --no-audit --no-fund
	cd tests/agents/clients/go && go build -mod=readonly -o $(CURDIR)/.agents/go_agent .
	mvn -q -f tests/agents/clients/java/pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.agents/java
	@touch $@

build/suites/.ready: .venv-hooked/.ready  # their source archives have their tests
	mkdir -p build/suites
	awk '/^[a-z]/ {wanted = /^(requests|httpx|openai)(\[.*)?==/} wanted' requirements/hooked.txt > build/suites/suites.txt
	.venv-hooked/bin/python -m pip --disable-pip-version-check download --quiet --no-deps --no-build-isolation \
		--no-binary :all: --require-hashes -d build/suites -r build/suites/suites.txt
	set -e; for archive in build/suites/*.tar.gz; do tar xzf $$archive -C build/suites; done
	@touch $@

COMPILE := $(BIN)/uv pip compile --quiet --generate-hashes --no-header --no-annotate \
	--prerelease if-necessary-or-explicit --group pyproject.toml:dev pyproject.toml
UV := $(COMPILE) --universal --python-version 3.10

pins:  ## write requirements/*.txt anew
	test -x $(BIN)/uv || { $(PYTHON) -m venv $(VENV) && $(BIN)/python $(PIP) uv; }
	$(UV) --upgrade --extra gateway --extra genai --extra kafka --extra receive --extra view --group pyproject.toml:look \
		--constraint requirements/overrides/newest.in -o requirements/newest.txt
	for name in openai2 openai1; do \
		$(UV) --upgrade --extra gateway --extra genai --constraint requirements/overrides/$$name.in -o requirements/$$name.txt || exit 1; \
	done
	$(UV) --upgrade --extra gateway --resolution lowest-direct -o requirements/lowest.txt
	$(COMPILE) --upgrade --universal --python-version 3.11 --group pyproject.toml:frameworks \
		--override requirements/overrides/frameworks.in -o requirements/frameworks.txt
	$(COMPILE) --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--override requirements/overrides/trainers.in requirements/trainers.in -o requirements/trainers.txt
	$(COMPILE) --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--override requirements/overrides/servers.in requirements/servers.in -o requirements/servers.txt
	$(COMPILE) --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		requirements/trackers.in -o requirements/trackers.txt
	$(subst --group pyproject.toml:dev pyproject.toml,,$(COMPILE)) --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--override requirements/overrides/agents.in requirements/agents.in -o requirements/agents.txt
	$(COMPILE) --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		requirements/hooked.in -o requirements/hooked.txt
	$(COMPILE) --upgrade --extra blobs --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		requirements/blobs.in -o requirements/blobs.txt
	$(subst --group pyproject.toml:dev pyproject.toml,,$(COMPILE)) --upgrade --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 requirements/phoenix.in -o requirements/phoenix.txt
	for name in dist types; do \
		$(subst --group pyproject.toml:dev pyproject.toml,,$(UV)) --upgrade requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done
	$(subst --group pyproject.toml:dev pyproject.toml,,$(COMPILE)) --upgrade --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 requirements/docs.in -o requirements/docs.txt

clean:
	rm -rf .venv .venv-* .agents .tools $(PAGE)/node_modules build dist
