"""The rules of the house: what imports what, what is documented, what the README shows."""

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
import power
import score_mods
from score_mods.catalogue import markdown_table

ROOT = Path(__file__).parents[1]
PACKAGES = {"score_mods": score_mods, "power": power, "analysis": analysis}
# What may be imported where, at the top of a file or inside a function.
ONLY_IN = {
    "matplotlib": ("analysis/plots/",),
    "triton": ("power/kernels/", "benchmarks/"),
    "transformers": ("huggingface.py", "benchmarks/"),
}


def sources():
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.split(".")[0] for name in names if name}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = path.relative_to(ROOT).as_posix()
    names = imported(path)
    forbidden = {
        "score_mods": {"power", "analysis"},
        "power": {"score_mods", "analysis"},
        "analysis": set(),
    }
    assert not names & (forbidden[here.split("/")[0]] | {"benchmarks", "notebooks", "tests"})
    for name, places in ONLY_IN.items():
        if name in names:
            assert any(place in here for place in places), f"{here} imports {name}"


@pytest.mark.parametrize("package", list(PACKAGES))
def test_import_is_cheap(package):
    """In a fresh process, beyond what torch loads by itself: no optional package, no compiler."""
    code = f"""
import sys, torch
before = set(sys.modules)
import {package}
print(*sorted(set(sys.modules) - before))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = {name.split(".")[0] for name in result.stdout.split()}
    assert not loaded & {"matplotlib", "triton", "transformers", "tqdm"}
    assert "torch._inductor.graph" not in result.stdout.split()
    if package != "analysis":
        assert not loaded & (set(PACKAGES) - {package})


@pytest.mark.parametrize("package", list(PACKAGES))
def test_public_names_are_documented(package):
    module = PACKAGES[package]
    for name in module.__all__:
        thing = getattr(module, name)
        if not callable(thing):
            continue
        text = inspect.getdoc(thing)
        # What other libraries own is documented there.
        if getattr(thing, "__module__", package).split(".")[0] not in PACKAGES:
            continue
        assert text, f"{package}.{name} has no docstring"
        if inspect.isfunction(thing):
            taken = [p for p in inspect.signature(thing).parameters if p not in ("args", "kwargs")]
            missing = [p for p in taken if not re.search(rf"\b{p}\b", text.split("Args:")[-1])]
            assert "Args:" in text or not taken, (
                f"{package}.{name} does not describe its arguments"
            )
            assert not missing, f"{package}.{name} does not describe {missing}"


@pytest.mark.parametrize("package", list(PACKAGES))
def test_doctests(package):
    ran = 0
    for info in pkgutil.walk_packages(PACKAGES[package].__path__, f"{package}."):
        if ".kernels" in info.name or info.name.endswith("__main__"):
            continue
        module = sys.modules.get(info.name) or importlib.import_module(info.name)
        module = sys.modules[info.name]
        outcome = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert outcome.failed == 0, info.name
        ran += outcome.attempted
    assert ran > 0


def test_readme_shows_the_catalogue():
    assert markdown_table() in (ROOT / "README.md").read_text()


def test_readme_examples_run(tmp_path, monkeypatch):
    """Every Python block, in order, in one namespace, but for those that need a GPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks:
        if "needs a GPU" not in block:
            exec(compile(block, "README.md", "exec"), namespace)


def test_readme_names_every_public_function():
    text = (ROOT / "README.md").read_text()
    for package, module in PACKAGES.items():
        for name in module.__all__:
            documented = inspect.getdoc(getattr(module, name))
            assert documented or name in text, (
                f"{package}.{name} is neither documented nor in the README"
            )


@pytest.mark.parametrize("package", list(PACKAGES))
def test_every_public_name_is_shown(package):
    """In the README or a notebook."""
    shown = (ROOT / "README.md").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            shown += "".join(cell["source"])
    names = PACKAGES[package].__all__
    assert not [name for name in names if not re.search(rf"\b{name}\b", shown)]
