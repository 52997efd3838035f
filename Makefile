# GNU make and a POSIX shell. `make help` lists the targets.

VENV ?= .venv
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.11 python3.12 python3 python; do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
		>/dev/null 2>&1; then echo "$$p"; break; fi; done)
endif

PY := $(VENV)/bin/python
# Written last, so that an install that broke off is done again. .ci/run compares the content.
STAMP := $(VENV)/constraints.sha256
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help install demo serve test test-long test-models lint unit docs site lint-docker clean

help:
	@echo "make demo      install into $(VENV), then serve a tiny model on attention and FFN ranks (CPU)"
	@echo "make serve     the same, and keep the server up"
	@echo "make test      quality gates, then the tests that need no GPU"
	@echo "make test-long the tests that take longer; writes test/results/long.json"
	@echo "make test-models  every MoE family against colocated; writes test/results/models.json"
	@echo "make lint      quality gates only;  make unit: tests only"
	@echo "make docs      write the generated pages of docs/ again"
	@echo "make site      build docs/ as a web site into site/, with .venv-docs"
	@echo "make lint-docker  lint docker/, with .venv-lint"
	@echo "make install   make $(VENV) from constraints.txt, with the package editable"
	@echo "make clean     remove builds and caches; $(VENV) stays"
	@echo
	@echo "PYTHON=python3.12 picks the interpreter, VENV=dir the environment,"
	@echo "ARGS='...' is passed to the demo or to pytest."

install: $(STAMP)

$(STAMP): python/pyproject.toml sgl-kernel/pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: SGLang-AFD needs Python 3.11 or 3.12, and neither is on PATH." >&2; \
		echo "make: install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' || { \
		echo "make: PYTHON=$(PYTHON) does not run, or is not Python 3.11 or 3.12." >&2; exit 1; }
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	@echo "Installing SGLang and PyTorch: about 9 GB the first time, minutes on a fast link."
	$(PY) -m pip install -c constraints.txt setuptools
	$(PY) -m pip install -c constraints.txt --no-build-isolation -e 'python[test]'
	$(PY) -m pip install --no-deps --no-build-isolation -e sgl-kernel
	$(PY) -m pip check
	sha256sum constraints.txt | cut -d ' ' -f 1 >$@

demo: $(STAMP)
	$(PY) examples/demo.py $(ARGS)

serve: $(STAMP)
	$(PY) examples/demo.py --serve $(ARGS)

test: lint unit

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/copied.py

unit: $(STAMP)
	$(PY) -m pytest -m 'not gpu and not long and not models' --durations=15 $(ARGS)

test-long: $(STAMP)
	$(PY) -m pytest -m long --results=test/results/long.json $(ARGS)

test-models: $(STAMP)
	$(PY) -m pytest test/afd/models --results=test/results/models.json $(ARGS)

docs: $(STAMP)
	$(PY) scripts/patch_table.py docs
	@for generator in scripts/gen_*.py; do \
		[ -e "$$generator" ] || continue; \
		echo "$(PY) $$generator"; "$(PY)" "$$generator" || exit 1; done

# Each tool set has an environment of its own, so that constraints.txt stays what the server needs.
# Written last, like STAMP, and holds the requirements, so that a changed line installs again.
.venv-docs/requirements.txt: docs/requirements.txt
.venv-lint/requirements.txt: docker/lint-requirements.txt
.venv-docs/requirements.txt .venv-lint/requirements.txt:
	"$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r $<
	cp $< $@

site: .venv-docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

lint-docker: .venv-lint/requirements.txt
	.venv-lint/bin/hadolint docker/Dockerfile docker/cpu.Dockerfile
	.venv-lint/bin/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.*.yaml
	for version in 1.28 1.37; do .venv-lint/bin/kubernetes-validate --strict --quiet \
		-k $$version docker/kubernetes/*.yaml || exit 1; done
	.venv-lint/bin/python scripts/check_dashboard.py

clean:
	rm -rf site python/build python/dist python/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find python scripts test examples -type d -name __pycache__ -prune -exec rm -rf {} +
