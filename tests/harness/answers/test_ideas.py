"""Ideas in worlds of their own: who wins, over whom, and what takes an idea's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.answers.ideas import Idea, ideas, parts
from harness.answers.table import Table
from harness.study.study import Claim
from tests.cases import cases
from tests.harness.study.study_table import about, met, panel, table

PANELS = [panel(name, k, "rate_scale", xs=(1.0, 4.0, 16.0)) for k, name in enumerate(("drift", "hog", "calm", "tiny"))]
KNEES = {  # the rate scale at which each crosses 99 %, by world; 0: it does not fit
    "drift": {"prism": 8.0, "static": 2.0, "shared": 0.0},
    "hog": {"prism": 8.0, "quotas": 2.0, "soft quotas": 4.0, "static": 1.5},
    "calm": {"prism": 4.0, "shared": 4.0, "static": 2.0},
    "tiny": {"prism": 0.0, "static": 2.0},
}
CLAIMS = [
    Claim("ratio", "prism", "static", on={"condition": "drift"}),
    Claim("ratio", "quotas or soft quotas", "prism", on={"condition": "hog"}, why="the hog starves"),
    Claim("ratio", "prism", "static", on={"condition": "calm"}),
    Claim("ratio", "prism", "static", on={"condition": "tiny"}),
    Claim("crossing", "prism", on={"condition": "drift"}),
]
ABOUT = about(PANELS, CLAIMS, layout="ideas", systems=["prism", "static", "shared", "quotas", "soft quotas"])


def runs() -> Iterator[dict[str, Any]]:
    for condition, knees in KNEES.items():
        for label, knee in knees.items():
            for seed in range(3):
                for x in (1.0, 2.0, 4.0, 8.0, 16.0):
                    none = None if knee else "no room"
                    share = met(x, knee) if knee else 0.0
                    row = {"condition": condition, "x": x, "label": label, "seed": seed, "infeasible": none}
                    yield row | {"ttft": share}


@pytest.fixture(scope="module")
def judged() -> dict[str, Idea]:
    return {idea.panel["name"]: idea for idea in ideas(table(list(runs()), windows=12), ABOUT)}


@cases(
    ("world", "verdict"),
    [
        ("drift", ("yes", "", ["static"])),  # ahead of all that fit
        ("hog", ("no", "prism", ["static"])),  # the fastest ahead takes its place
        ("calm", ("no", "shared", ["static"])),  # something else is equal
        ("tiny", ("no", "static", [])),  # it has no room
    ],
)
def test_an_idea_wins_that_is_ahead_of_all_that_fit(
    world: str, verdict: tuple[str, str, list[str]], judged: dict[str, Idea]
) -> None:
    assert (judged[world].wins, judged[world].instead, judged[world].over()) == verdict


def test_the_better_reading_stands_for_an_idea(judged: dict[str, Idea]) -> None:
    assert judged["hog"].system == "soft quotas"
    assert not {"quotas", "soft quotas"} & set(judged["hog"].others)
    assert judged["drift"].shown("shared") == "no room"


def test_the_screen_has_the_answer_a_row_an_idea_and_each_cause() -> None:
    made = table(list(runs()), windows=12)
    answer, _, first, *worlds = parts(ABOUT, made, every=False)
    assert answer == "of 4 ideas, each in its own world, 1 won (a); 3 did not (b, c and d)"
    assert isinstance(first, Table)
    assert [[*row[:2], row[3]] for row in first.rows] == [
        ["a  prism", "yes", "-"],
        ["b  soft quotas", "no", "prism"],
        ["c  prism", "no", "shared"],
        ["d  prism", "no", "static"],
    ]
    assert str(worlds[1]).endswith(": the hog starves")
    assert sum(isinstance(part, Table) for part in parts(ABOUT, made, every=True)) == 5
