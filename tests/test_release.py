"""What a release says of itself, in one voice: version, date, what is in the archives."""

import ast
import re
from pathlib import Path

import pytest
import yaml

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version():
    version = PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(.+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert citation["version"] == version
    assert (version, str(citation["date-released"])) == released[0]


def test_citation_has_what_the_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert citation["license"] == PROJECT["project"]["license"]
    papers = {reference["url"] for reference in citation["references"]}
    assert papers == {f"https://arxiv.org/abs/{number}" for number in ("2505.17083", "2507.04239")}


def test_every_direct_dependency_is_pinned():
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    groups = (
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
    )
    asked = {re.match(r"[\w.-]+", requirement)[0] for group in groups for requirement in group}
    assert not asked - pinned


@pytest.mark.parametrize("package", ["score_mods", "power", "analysis"])
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()
    assert package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_the_documentation_has_every_module():
    """A public module is on a page of the documentation, itself or through its package."""
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.M))
    for name in shown:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
    for path in ROOT.glob("*/huggingface.py"):
        assert f"{path.parent.name}.huggingface" in shown
    for package in ("score_mods", "power", "analysis"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        assert ast.get_docstring(tree)
        assert package in shown
