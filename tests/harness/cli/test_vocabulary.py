"""docs/vocabulary.md says all that a policy may say, and each example of it works."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from harness.check.check import check
from harness.check.purity import impure
from harness.check.trial import ACTIONS, EVENTS, QUERIES, READS, USES
from harness.cli import vocabulary
from harness.engines.machine import Config
from harness.engines.sim.engine import Sim
from harness.policy import actions, events
from harness.policy.options import OPTIONS
from harness.policy.view import View
from tests import ROOT
from tests.cases import cases


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/vocabulary.md").read_text("utf-8")


def test_the_page_has_every_action_event_and_query(page: str) -> None:
    assert set(ACTIONS) == set(get_args(actions.Action))
    assert set(EVENTS) | {events.Freed} == set(get_args(events.Event))
    assert [kind.__name__ for kind in (*ACTIONS, *EVENTS) if f"### `{kind.__name__}`\n" not in page] == []
    assert [name for name in QUERIES if f"### `view.{name}" not in page] == []


@cases("kind", [*ACTIONS, *EVENTS])
def test_the_example_of_an_action_or_an_event_is_one(kind: type) -> None:
    made = vocabulary.eval_example(vocabulary.example(kind))
    assert type(made) is kind
    assert made == vocabulary.eval_example(repr(made))


@cases("query", sorted(QUERIES))
def test_the_example_of_a_query_asks_it(query: str) -> None:
    method: Any = vars(View)[query]
    line = vocabulary.example(method.fget if isinstance(method, property) else method)
    asked = [
        node.attr
        for node in ast.walk(ast.parse(line))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "view"
    ]
    assert asked == [query]


@cases("kind", [*ACTIONS, *EVENTS, *vocabulary.NOUNS, *vocabulary.FACTS, *vocabulary.STATES])
def test_every_field_has_a_type_and_a_meaning(kind: type) -> None:
    rows = vocabulary.rows(kind)
    assert rows
    assert [row for row in rows if not row.type or not row.note] == []


def test_a_field_is_told_with_its_default_and_its_name_in_uses(page: str) -> None:
    move = "`Move.to:gpu`, `Move.to:host`, `Move.to:none`"
    for line in (
        '| `way` | `str` | `"host"` | how the weights come, which decides the seconds | `Load.way:WAY` |',
        "| `steps` | `int \\| None` | `None` | ... or in steps; 0 closes the lane | `Run.steps`, `Run.steps:0` |",
        f"| `to` | `Gpus \\| Host \\| None` |   | None: discard the KV; it is computed again | {move} |",
    ):
        assert f"\n{line}\n" in page
    names = re.findall(r"`((?:Load|Evict|Run|Move)\.[\w:]+)`", page)
    assert len(set(names)) > 10
    assert [name for name in names if not re.fullmatch(USES, name)] == []


def test_options_are_those_of_the_simulator() -> None:
    offers = Sim(Config(())).offers
    assert {option: tuple(values) for option, values in OPTIONS.items()} == dict(offers)


def test_reads_are_those_that_bench_check_knows() -> None:
    assert set(vocabulary.READS) == {*READS.replace("\\", "").split("|")[:-1], "view.oracle_tokens"}


def example(page: str) -> str:
    """Return the file that the page begins with."""
    return page.partition("```python\n")[2].partition("```")[0]


def test_the_file_of_the_page_is_pure(page: str) -> None:
    assert "class OnDemand" in example(page)
    assert list(impure(example(page))) == []


@pytest.mark.slow
def test_the_file_of_the_page_conforms(page: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(example(page), "utf-8")
    assert check(str(tmp_path / "mine.py"), twice=False) == []
