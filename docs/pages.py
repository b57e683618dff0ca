"""Pages of the documentation that are files elsewhere in the repository, with their links turned.

MkDocs calls `on_files`. Nothing is kept twice: the home page is the README, the table of
mechanisms comes from the catalogue, the gallery from the folder that `make docs` draws it into.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

from score_mods.catalogue import markdown_table

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "reports" / "gallery"
PAGES = {
    "README.md": "index.md",
    "benchmarks/RESULTS.md": "results.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and figures that are not under `docs`."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=turned(text)))
    table = f"# Mechanisms\n\n{markdown_table()}\n"
    files.append(File.generated(config, "mechanisms.md", content=table))
    for path in (*sorted(GALLERY.glob("*.md")), *sorted(GALLERY.glob("*.png"))):
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.png")):
        place = path.relative_to(ROOT / "benchmarks").as_posix()
        files.append(File.generated(config, place, abs_src_path=str(path)))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(
            File(f"notebooks/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls)
        )
    return files


def turned(text: str) -> str:
    """The text with links to files of the repository turned into links to pages."""

    def page(link: re.Match[str]) -> str:
        target = link[1].removeprefix("docs/")
        return f"]({PAGES.get(target, target.removeprefix('benchmarks/'))}{link[2]})"

    return re.sub(r"\]\((?!https?:)([^)#]+)(#[^)]*|)\)", page, text)
