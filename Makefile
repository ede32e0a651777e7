# What a fresh machine needs: make, a C compiler, and python3 (3.11 or newer). All else goes into .venv.

VENV   := .venv
PYTHON := $(VENV)/bin/python
SAMPLE := samples/mlp.py
TYPES  := build/typecheck
BUILT  := pyproject.toml setup.py $(wildcard cudatool/*.c cudatool/*/*.c cudatool/*/*.h cudatool/*/*.map)

.PHONY: demo test test-again test-asan test-install test-pythons test-ray lint docs site wheels clean

demo: $(VENV)/installed
	@mkdir -p demo
	$(VENV)/bin/cudatool run --force -o demo/mlp.ctrace --html demo/mlp.html $(SAMPLE)
	@echo
	@echo "Trace:  $(CURDIR)/demo/mlp.ctrace"
	@echo "Page:   $(CURDIR)/demo/mlp.html   (open it in a browser)"

test: $(VENV)/installed-dev
	@# Without -q, for the header: it has the seed of the order, with which a failure can be repeated.
	@mkdir -p build
	$(PYTHON) -m pytest -n auto; status=$$?; echo $$status > build/tested; exit $$status

# What failed in the last run, one test after the other. Not if that run was cut short (a status other than 1).
test-again: $(VENV)/installed-dev
	@test "$$(cat build/tested)" = 1
	@echo "Failed beside others, now alone. What passes here waits for others or for time, and must be fixed:"
	$(PYTHON) -m pytest -v -p no:randomly --last-failed --last-failed-no-failures none

test-asan: $(VENV)/installed-dev
	PYTHON=$(CURDIR)/$(PYTHON) tests/security/asan.sh

test-install:
	.ci/install

# Needs root, and Debian's apt.
test-pythons:
	.ci/pythons

# Not part of the suite: Ray is 200 MB, starts a dozen processes, and gives them so many seconds.
test-ray: $(VENV)/installed-dev
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	CUDATOOL_TEST_RAY=1 $(PYTHON) -m pytest -n 0 tests/fleet/test_ray.py

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	@# cli/ and viz/ install as cudatool.cli and cudatool.viz, which mypy sees only where they lie so.
	@rm -rf $(TYPES)/cudatool && mkdir -p $(TYPES)/cudatool
	@ln -s $(addprefix $(CURDIR)/,$(wildcard cudatool/*) cli viz) $(TYPES)/cudatool/
	cd $(TYPES) && $(CURDIR)/$(VENV)/bin/mypy --config-file $(CURDIR)/pyproject.toml --strict -p cudatool

docs: $(VENV)/installed-dev
	$(PYTHON) docs/generate_api.py
	$(PYTHON) tests/peers/torch_cuda.py

# Strict: a link that leads nowhere is an error.
site: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "Site:   $(CURDIR)/build/site/index.html"

# PYTHONS names the interpreters to build wheels for.
wheels:
	.ci/wheels $(or $(PYTHONS),python3)

clean:
	rm -rf $(VENV) build demo dist *.egg-info cudatool/*.so cudatool/*/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(PYTHON):
	@python3 -c 'import sys; sys.exit("cudatool needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	python3 -m venv $(VENV)

# Stamps: installing again is needed only if what is installed, or the C that is built, has changed.
$(VENV)/installed: $(BUILT) | $(PYTHON)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/installed-dev: $(BUILT) | $(PYTHON)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/installed
