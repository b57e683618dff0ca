"""The README's tables are those of RESULTS.md."""

import re

import pytest

from benchmarks.readme import EXPERIMENTS, README, RESULTS, ROOT, TABLES, filled


def test_readme_is_what_the_command_writes():
    readme = README.read_text()
    assert filled(readme, RESULTS.read_text()) == readme


@pytest.mark.parametrize("name", ["score_mods", "power"])
def test_a_changed_result_changes_the_readme(name):
    readme, results = README.read_text(), RESULTS.read_text()
    made = TABLES[name](results)
    number = re.findall(r"\d+\.\d\d", made)[-1]
    changed = filled(readme, results.replace(number, "123.45"))
    assert "123.45" in changed
    assert "123.45" not in readme


def test_every_number_is_in_the_results():
    results = RESULTS.read_text()
    for made in TABLES.values():
        assert all(number in results for number in re.findall(r"\d+\.\d\d", made(results)))


def test_missing_markers_and_tables_are_errors():
    with pytest.raises(ValueError, match="marker <!-- score_mods -->"):
        filled("no markers", RESULTS.read_text())
    with pytest.raises(ValueError, match="must have a table in score_mods"):
        filled(README.read_text(), "no tables")


def test_every_experiment_is_asked_and_shown():
    results = "".join(
        f"\n## {name}\n\nOn a GPU.\n\n| | loss |\n|---|---|\n| `{name}-0` | 1.234 |\n"
        for name in EXPERIMENTS
    )
    shown = TABLES["quality"](results)
    for name, (option, asked) in EXPERIMENTS.items():
        assert f"| `{name} {option}` | {asked} |" in shown
        assert f"`{name}`:\n\n|  | loss |\n| --- | ---: |\n| `{name}-0` | 1.234 |" in shown


def test_every_experiment_is_a_benchmark():
    for name in EXPERIMENTS:
        assert (ROOT / "benchmarks" / name / "__init__.py").is_file()
