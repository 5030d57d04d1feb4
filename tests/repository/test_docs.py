"""Pages of the documentation: links lead somewhere, and lines of prose fit a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
READMES = ("README.md", "benchmarks/README.md", "calibration/demo/model/README.md")
RESULTS = tuple(f"benchmarks/results/{name}.md" for name in ("instructions", "judged", "predictions", "quantizer"))
AT_THE_TOP = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "RELEASING.md")
PAGES = [*(ROOT / name for name in (*READMES, *RESULTS, *AT_THE_TOP)), *DOCS]
WIDTH = 120
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_fit_a_screen(page: Path) -> None:
    prose = FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
    too_wide = [line for line in prose if len(line) >= WIDTH and not line.startswith(("|", "    "))]
    assert not too_wide, f"{page.name} has lines of {WIDTH} characters or more:\n" + "\n".join(too_wide)


def test_readme_links_to_every_page_of_the_documentation() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in DOCS if f"(docs/{page.name})" not in readme] == []


@pytest.mark.parametrize(
    "page", [*DOCS, *(ROOT / name for name in READMES)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_files_that_a_page_names_are_there(page: Path) -> None:
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob("[!.]*/**/*.py")]
    named = set(re.findall(r"\b[\w/]+\.py\b", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []
