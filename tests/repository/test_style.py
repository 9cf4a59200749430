"""The house's style as limits: none of them yields, each may only be lowered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools import style
from tests.tools.style import PRODUCT, Comment, code_lines, files, fragments, skips

# Lines of code: no blank lines, comments and docstrings. `python -m tests.tools.lines harness ...` counts them.
MOST_CODE = {PRODUCT: 57_324, ("tests",): 40_099}
# `python -m tests.tools.style` lists these two.
MOST_FRAGMENTS = {PRODUCT: 97, ("tests",): 116}
MOST_SKIPS = 50
MOST_LINES = 500
LONG = {  # files that are longer, each with its reason
    "systems/muxserve.py": "a system is one file, with the paper's two optimisers",
    "systems/prism.py": "a system is one file, with the paper's placement, order and eviction",
    "tests/harness/engines/sim/oracle.py": "a second simulator, read from top to bottom beside nothing else",
}
RIDDLES = """
Return the study without some systems; None where none is left that is in every condition, to stand first
with which load rises along an axis of EASES
a card is in nobody's way, and its kernels in none of a processor's accounts
by which an asker attends to KV here by itself for the rest of its step
which is mapped, as what nobody has may not be
granules of those that have left
tokens whose KV is there
it will be refused
after which runs of so many requests may follow, and note which stand
The number of runs that stand so far
Give a request its first n blocks in an account, of which others hold so many
Learn from a stored run of so many requests, or as many as it says itself
a second that all SLOs are relaxed weighs as so many of penalty
the seeds of a point hold at least so many together
one that has not arrived is none of an engine's business
most of its SMs, by MPS, whose daemon must run
Return the type of what a key or an index leads to
a row a place and a column a part, whose change is doubtful where its interval covers 0
somebody is on the way out or in: nobody else is chosen until then
of those that explain the same the largest
""".strip().splitlines()  # sentences that only their author understands

SIDES = pytest.mark.parametrize("folders", [PRODUCT, ("tests",)], ids=["product", "tests"])


@SIDES
def test_code_does_not_grow(folders: tuple[str, ...]) -> None:
    assert code_lines(*folders) <= MOST_CODE[folders], "more code than the limit: take as much away elsewhere"


@SIDES
def test_the_formatter_lays_out_the_code(folders: tuple[str, ...]) -> None:
    assert len(skips(*folders)) <= MOST_SKIPS


@SIDES
def test_comments_are_clauses(folders: tuple[str, ...]) -> None:
    assert len(fragments(*folders)) <= MOST_FRAGMENTS[folders]


def test_a_file_is_read_in_one_sitting() -> None:
    lines = {path.relative_to(ROOT).as_posix(): text.count("\n") for path, text in texts().items()}
    long = {name for name, count in lines.items() if count > MOST_LINES}
    assert long - {*LONG} == set(), f"more than {MOST_LINES} lines"
    assert {*LONG} - long == set(), "no longer long, or gone: take it off the list"


def texts() -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in files(*PRODUCT, "tests")}


def test_riddles_are_solved() -> None:
    plain = {path: re.sub(r"[\s#]+", " ", text) for path, text in texts().items() if path != Path(__file__)}
    left = {
        path.relative_to(ROOT).as_posix(): riddle
        for riddle in RIDDLES
        for path, text in plain.items()
        if riddle in text
    }
    assert left == {}


def test_planted_habits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.py").write_text(
        "x = 1  # of a run\n# says what x is\n# of a run\n\n# in seconds\ny = (1,\n 2)  # fmt: skip\nz = '# of it'\n"
    )
    assert [comment.place for comment in fragments("mine")] == ["mine/a.py:1", "mine/a.py:5"]
    assert [Comment(tmp_path / "mine/a.py", 7, "# fmt: skip")] == skips("mine")
    assert code_lines("mine") == 4
