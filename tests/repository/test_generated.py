"""Documents that are written from the code are those that it would write now; Markdown files have whole links."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.cli import generated
from harness.cli.lists import summary
from harness.loop import system
from harness.rows import estimate
from tests import ROOT
from tests.cases import cases
from tests.repository.test_layers import ARCHITECTURE
from tests.repository.test_repo import FENCE, files, text

LINK = re.compile(r"\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]\(([^()\s]+)\)")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return generated.documents()


def test_documents_are_those_that_the_code_writes(made: dict[str, str], subtests: pytest.Subtests) -> None:
    for name, content in made.items():
        with subtests.test(name):
            assert (ROOT / name).read_bytes() == content.encode(), f"rewrite it: {generated.COMMAND}"


def test_a_document_depends_on_no_folder_terminal_or_trace(made: dict[str, str], tmp_path: Path) -> None:
    script = (
        "import sys; from harness.cli import generated; sys.stdout.write('\\0'.join(generated.documents().values()))"
    )
    env = {"PATH": "", "HOME": str(tmp_path), "TRACES_DIR": str(tmp_path), "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, check=True)
    assert run.stdout.decode().split("\0") == [*made.values()]


def test_a_part_is_written_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = f"before\n<!-- Written by `{generated.COMMAND}`: part -->\n\nold\n<!-- to here -->\nafter\n"
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(marked)
    assert generated.filled("README.md", {"part": "new\n"}) == marked.replace("old", "new")
    (tmp_path / "README.md").write_text("before")
    with pytest.raises(ValueError, match=r"README\.md: no lines <!-- Written by"):
        generated.filled("README.md", {})


def test_every_module_of_the_harness_stands_in_its_readme(made: dict[str, str]) -> None:
    modules = {path.relative_to(ROOT / "harness") for path in (ROOT / "harness").rglob("*.py")}
    parts = re.split(r"^### `(.+)/`$", made["harness/README.md"], flags=re.MULTILINE)
    listed = {
        Path("" if folder == "harness" else folder) / name: what
        for folder, part in zip(parts[1::2], parts[2::2], strict=True)
        for name, what in re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", part, re.MULTILINE)
    }
    assert set(listed) == {path for path in modules if path.name != "__init__.py"}
    assert [path for path, what in listed.items() if not what.strip()] == []
    assert [listed[Path("rows/estimate.py")]] == (estimate.__doc__ or "").splitlines()[:1]


def test_folders_stand_in_the_order_in_which_they_may_import() -> None:
    boxes = [folder.replace("/", ".") for folder in generated.FOLDERS]
    assert [box for box in boxes if box in ARCHITECTURE] == [
        box for box in ARCHITECTURE if (ROOT / "harness" / box.replace(".", "/")).is_dir()
    ]
    packages = {path.parent.relative_to(ROOT / "harness").as_posix() for path in (ROOT / "harness").rglob("*.py")}
    assert {*generated.FOLDERS} == packages - {"."}
    assert all(summary(ROOT / "harness" / folder / "__init__.py") != "-" for folder in generated.FOLDERS)


@cases(
    ("docstring", "described"),
    [
        (
            'Swap: on request. More.\n\nLi et al., "A\nTitle", OSDI 2023, and its code.',
            ("Swap: on request.", "Li et al., *A Title*, OSDI 2023"),
        ),
        ("It.\n\nOf a/b 12ab34c (b/c.go 12ab34c), a/b 12ab34d, d/llama.cpp 12ab34c.", ("It.", "a/b, d/llama.cpp")),
        ("It.", ("It.", "none")),
    ],
)
def test_a_system_is_described_by_its_docstring(docstring: str, described: tuple[str, str]) -> None:
    assert generated.described(docstring) == described


def test_every_system_has_a_section_on_its_deviations() -> None:
    assert sorted(re.findall(r"^### `(\w+)`$", text(ROOT / "systems/README.md"), re.MULTILINE)) == system.names()


# ------------------------------------------------------------------ Markdown


class Link(NamedTuple):
    """A link of a Markdown file."""

    place: str
    text: str
    target: str


@cache
def documents() -> tuple[Path, ...]:
    return tuple(path for path in files() if path.suffix == ".md")


def links(place: str, content: str) -> Iterator[Link]:
    """Yield the links of a Markdown text; code has none."""
    prose = CODE.sub(lambda code: "x" if "\n\n" not in code[0] else code[0], FENCE.sub("", content))
    yield from (Link(place, *match.groups()) for match in LINK.finditer(prose))


def lost(link: Link, tracked: set[Path]) -> bool:
    """Tell whether a relative link leads to nothing that a clone has, file or folder."""
    if re.match(r"[a-z]+:|#", link.target):
        return False
    path = (ROOT / link.place).parent.joinpath(link.target.partition("#")[0]).resolve()
    return path not in tracked and not any(path in file.parents for file in tracked)


def test_every_link_has_a_text_and_leads_to_a_file_of_the_repository() -> None:
    every = [link for path in documents() for link in links(path.relative_to(ROOT).as_posix(), text(path))]
    assert len(every) > 100
    assert [link for link in every if not link.text.strip()] == []
    assert [link for link in every if lost(link, set(files()))] == []


def test_each_system_has_a_card_and_regret_is_of_the_defaults() -> None:
    cards = tomllib.loads((ROOT / "systems" / "cards.toml").read_text("utf-8"))
    assert sorted(cards) == system.names()
    assert all(set(card) == {"best", "departs", "wins"} and all(card.values()) for card in cards.values())
    leans = re.compile(r"for it|against it|unknown|^none$|a bound|either way")
    assert all(leans.search(card["departs"]) for card in cards.values())
    drawn = [{"fields": {"placement": place}, "held": held} for place, held in (("even", 0.5), ("rate", 0.75))]
    assert generated.regret("elastic", None) == ""
    assert generated.regret("elastic", {"draw": drawn}) == "0.0"
    assert generated.regret("elastic", {"draw": [drawn[1] | {"held": 0.25}, drawn[0]]}) == "25.0"
    assert generated.regret("elastic", {"draw": drawn[:1]}) == "not drawn"
    assert generated.regret("elastic", {"draw": [drawn[1] | {"held": 0.0}]}) == "no draw holds any"
