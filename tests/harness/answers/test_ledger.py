"""Statements of papers, and the page that has each of them once."""

from __future__ import annotations

import re

import pytest

from harness.answers import ledger as words
from harness.study import load
from harness.study.ledger import Evidence, Ledger, Statement, merged

LINE = Evidence("static / chunked", "llama-3.1-8b*3", "1.5x [1.2, 1.9]", "direction", "ours is <it>")


ROW = Statement("P, figure 1", "2.1", "it holds 2x", "2x", (LINE,), "sufficient: ~line\nbreak")


def test_a_statement_of_several_studies_is_one() -> None:
    mine = ROW._replace(name="shared")
    lines = (LINE._replace(says="contradicted", evidence=True),)
    beside = Statement("P, figure 7", "", "another wording", "2x", lines, "sufficient: quotas.", "shared")
    for order in ((mine, beside), (beside, mine)):
        (statement,) = merged(order)
        assert (statement.says, statement.verdict, len(statement.lines)) == ("it holds 2x", "direction", 2)
        assert statement.why.startswith("sufficient: ~line")
        assert statement.why.endswith("break. sufficient: quotas")
    assert [s.stands for s in merged([beside])] == [False]
    both = merged([mine, mine._replace(lines=(LINE._replace(says="contradicted"),), number="3x")])
    assert [(s.verdict, s.number) for s in both] == [("contradicted", "2x; 3x")]
    assert len(merged([ROW, ROW])) == 2  # without a name each is its own


def test_a_page_begins_with_a_table_by_paper_and_class() -> None:
    sized = ROW._replace(paper="Q, figure 2", lines=(LINE._replace(says="size"),))
    below = sized._replace(number="up to 1.6x", lines=(LINE._replace(says="up to"),))
    page = list(words.markdown(Ledger((ROW, sized, sized, below), {})))
    head = page.index("| paper | size | up to | direction | contradicted | open | input |")
    assert page[head + 1] == "|---|---:|---:|---:|---:|---:|---:|"
    assert page[head + 2 : head + 5] == ["| P |  |  | 1 |  |  |  |", "| Q | 2 | 1 |  |  |  |  |", ""]
    assert not any(line.startswith(("- **", "## ")) for line in page[:head])


def test_a_page_counts_its_classes_and_has_each_statement_once() -> None:
    weaker = LINE._replace(what="prism / chunked", says="open", evidence=True, where="elsewhere", weak="9 misses")
    page = list(words.markdown(Ledger((ROW._replace(lines=(LINE, weaker)),), {"fig7": "no trace\nhere"})))
    counts = [line.split("**")[1] for line in page if line.startswith("- **")]
    assert counts == ["0 size", "0 up to", "1 direction", "0 contradicted", "0 open", "0 input"]
    text = "\n".join(page)
    assert text.count("it holds 2x") == 1
    assert "\n## P\n" in text
    assert "**direction** · it holds 2x (2.1). The paper: 2x." in page
    assert r"- on llama-3.1-8b\*3" in page
    assert r"  - static / chunked: 1.5x [1.2, 1.9] (direction); ours is \<it>" in page
    assert "- beside it, on elsewhere" in page
    assert "  - prism / chunked: 1.5x [1.2, 1.9] (open); ours is \\<it>; but only 9 misses" in page
    assert r"- sufficient: \~line break" in page
    assert page[-1] == "- fig7: no trace here"
    assert words.counted([ROW, ROW._replace(lines=(LINE._replace(says="open"),))]) == "1 direction, 1 open"


def test_nothing_is_said_of_what_nobody_ran() -> None:
    lacks = ROW._replace(lines=(LINE._replace(says="not testable", here="-", note=""),), why="lacks its trace")
    assert list(words.block(lacks))[1:] == ["", "- lacks its trace"]


@pytest.mark.parametrize("verdict", ["size", "up to", "direction", "contradicted", "open", "input", "not run"])
def test_what_a_class_is_due_to_is_called_sufficient_never_the_cause(verdict: str) -> None:
    told = "\n".join(words.block(ROW._replace(lines=(LINE._replace(says=verdict),))))
    assert ("sufficient" in told) == (verdict not in {"size", "up to"})
    none = "\n".join(words.block(ROW._replace(lines=(LINE._replace(says=verdict),), why="")))
    assert (words.UNKNOWN in none) == (verdict == "contradicted")


def test_statements_of_the_studies_are_told_once_and_causes_are_sufficient() -> None:
    every = [claim for name in load.names() for claim in load.study(name).claim if claim.paper is not None]
    judged = [claim for claim in every if not claim.evidence]
    heads = [claim for claim in judged if claim.says]
    assert len({(claim.says, claim.name) for claim in heads}) == len({claim.name or claim.says for claim in heads})
    names = {claim.name for claim in judged if claim.name}
    assert all(claim.says or claim.name in {head.name for head in heads} for claim in judged)
    assert {claim.name for claim in every if claim.evidence} <= names
    assert all(claim.section for claim in heads)
    assert not any(re.search(r"\b(the|its) cause\b", claim.why) for claim in every)
    decided = [claim for claim in judged if claim.why and claim.comparable and not claim.measure]
    assert all("sufficient" in claim.why.lower() or "kernels take turns" in claim.why for claim in decided)
    assert {claim.paper for claim in judged} >= {"ahead", "met", "missed", "never", "reached"}
    ratios = [claim.paper for claim in every if isinstance(claim.paper, tuple) and claim.what == "ratio"]
    assert not [paper for paper in ratios if paper[1] >= 100 > paper[0]]
