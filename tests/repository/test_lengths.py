"""README, the results, and the documentation without reference and papers are short enough to be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

DOCS = ROOT / "docs"
LOOKED_UP = ("The papers", "Reference")  # sections of the index that nobody reads from top to bottom
MOST_WORDS = 20_000  # two hours of reading


def _pages(page: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield a page and those that only it leads to: pages of its folder, where that is not the root of the docs."""
    if page in seen:
        return
    seen.add(page)
    yield page
    if page.parent != DOCS:
        for other in re.findall(r"\]\((\w+\.md)\)", page.read_text("utf-8")):
            yield from _pages(page.parent / other, seen)


def _words(page: Path) -> int:
    """Return the words of a page, with those of the files that it includes."""
    text = page.read_text("utf-8")
    included = re.findall(r"```\{include\} (\S+)", text)
    return len(text.split()) + sum(len((page.parent / name).read_text("utf-8").split()) for name in included)


def test_the_docs_are_read_in_two_hours() -> None:
    first, *sections = re.split(r"(?m)^## ", (DOCS / "index.md").read_text("utf-8"))
    read = [section for section in sections if not section.startswith(LOOKED_UP)]
    assert len(read) == len(sections) - len(LOOKED_UP), "the index lacks a section"
    seen: set[Path] = set()
    links = re.findall(r"\]\(([\w/-]+\.md)\)", "".join(read))
    pages = [page for link in links for page in _pages(DOCS / link, seen)]
    assert len(first.split()) + sum(map(_words, pages)) <= MOST_WORDS, {page.name: _words(page) for page in pages}


@pytest.mark.parametrize(("name", "most"), [("README.md", 110)])
def test_a_first_page_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= most


def test_the_results_are_read_in_ten_minutes() -> None:
    assert len((ROOT / "results/README.md").read_text("utf-8").split()) <= 2_500
