"""The notebooks: small, executed without errors, and each collected where CI executes them."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("01_compose", "02_invariance", "03_real_model", "04_compiled_models", "05_power")
PATHS = [ROOT / "notebooks" / f"{name}.ipynb" for name in NAMES]

notebooks = pytest.mark.parametrize("path", PATHS, ids=NAMES)


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def parsed(cell):
    return ast.parse("".join(line for line in cell["source"] if not line.startswith("%")))


def test_there_are_no_others():
    assert sorted(ROOT.glob("notebooks/**/*.ipynb")) == PATHS


@notebooks
def test_size(path):
    assert path.stat().st_size <= 300 * 1024
    assert len(json.loads(path.read_text())["cells"]) <= 20


@notebooks
def test_functions_are_short(path):
    for cell in code_cells(path):
        for node in ast.walk(parsed(cell)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 10, node.name


@notebooks
def test_sizes_are_set_in_the_first_cell(path):
    first, *others = map(parsed, code_cells(path))
    assert "torch.cuda.is_available()" in ast.unparse(first)
    assert not any("is_available" in ast.unparse(other) for other in others)


@notebooks
def test_was_executed_in_order(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    for output in outputs:
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"


@notebooks
def test_claims_are_asserted(path):
    asserting = re.compile(r"^\s*(assert |assert_close\()", re.M)
    assert sum(len(asserting.findall("".join(cell["source"]))) for cell in code_cells(path)) >= 5


@notebooks
def test_outputs_name_no_place_of_a_machine(path):
    for cell in code_cells(path):
        for output in cell["outputs"]:
            text = [*output.get("text", []), *output.get("data", {}).get("text/plain", [])]
            assert not re.search(r"(?<![\w.])/\w+/\w+|[A-Z]:\\\\", "".join(text))


def test_every_notebook_is_collected():
    """By the command that executes them, `make notebooks`."""
    command = (sys.executable, "-m", "pytest", "--nbmake", "notebooks", "--collect-only", "-q")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    collected = re.findall(r"notebooks/(\w+)\.ipynb::", result.stdout)
    assert sorted(collected) == list(NAMES)
