"""The generated pages say what is there: every command and option, system, key of a file, definition, trace, model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import click
import pytest
from annotated_types import Ge, Le

from harness.cli import reference
from harness.cli.app import COMMANDS, load
from harness.loop import system
from harness.policy.fields import domains
from harness.run.spec import Spec
from harness.study.study import Claim, Condition, Study
from harness.toml import Count, Pairs, Positive
from tests import ROOT
from tests.cases import cases
from workloads.models import Member


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in (ROOT / "docs/reference").iterdir()}


def options(command: click.Command) -> Iterator[str]:
    for param in command.params:
        shown = isinstance(param, click.Option) and not param.hidden
        yield from param.opts if shown else ()
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from options(inner)


def test_every_option_of_every_command_is_told(pages: dict[str, str]) -> None:
    parts = pages["commands.md"].split("\n## bench ")
    for name, part in zip(COMMANDS, parts[1:], strict=True):
        assert part.startswith(f"{name}\n")
        assert [flag for flag in options(load(name)) if not re.search(rf"[` ]{flag}[` ,]", part)] == []


@cases(
    ("page", "names"),
    [
        ("systems.md", system.names()),
        ("files.md", [field.name for kind in (Condition, Claim, Member) for field in fields(kind)]),
        ("files.md", [field.name for field in fields(Spec) if field.name not in reference.OF_RUNS]),
        ("files.md", [field.name for field in fields(Study) if field.name not in {"name", "base_engine"}]),
    ],
)
def test_every_name_is_told(pages: dict[str, str], page: str, names: list[str]) -> None:
    assert names
    assert [name for name in names if f"`{name}`" not in pages[page]] == []


def test_every_preset_and_field_of_a_system_is_told(pages: dict[str, str]) -> None:
    parts = dict(part.split("`\n", 1) for part in pages["systems.md"].split("\n## `")[1:])
    assert "| `prism:osdi26` |" in parts["prism"]
    for name, part in parts.items():
        assert [preset for preset in system.find(name).presets if f"`{name}:{preset}`" not in part] == []


@dataclass(frozen=True)
class Form:
    """A file."""

    rows: Count  # how many there are
    # what each is called,
    # in order
    names: tuple[str, ...] = ("a", "b")
    share: Annotated[float, Ge(0), Le(1)] | None = None  # None: all of it
    kind: Literal["x", "y"] = "x"
    by_name: Pairs[Positive] = ()
    also: tuple[Mapping[str, int], ...] = ()


@cases("name", system.names())
def test_what_a_decision_takes_and_what_is_left_open_is_told(name: str, pages: dict[str, str]) -> None:
    part = dict(part.split("`\n", 1) for part in pages["systems.md"].split("\n## `")[1:])[name]
    made = system.module(name)
    micros = re.search(r"A decision takes ([0-9.]+) \u00b5s\.", part)
    assert (float(micros[1]) * 1e-6 if micros else 0.0) == pytest.approx(made.DECISION_S)
    assert micros or "Decisions take no time." in part
    # measured on a day and a machine, or the reason why there is nothing to measure
    (why,) = re.findall(r"^DECISION_S = \S+  # (.+)$", inspect.getsource(made), re.MULTILINE)
    assert re.search(r"x86-64.*20\d\d-\d\d-\d\d|^as \w+\.py", why) if micros else "before the start" in why
    open_ = [key for key, domain in domains(system.find(name)).items() if domain.tuned]
    assert ("No open choice." in part) == (open_ == [])
    assert all(f"`{key}`" in part.partition("drawn by `bench tune`: ")[2].partition(".\n")[0] for key in open_)


def test_a_form_is_told_key_by_key() -> None:
    assert [line for line in reference._form(Form) if line.startswith("| `")] == [
        "| `rows` | whole number, at least 1 | required | how many there are |",
        '| `names` | list, each: string | `["a", "b"]` | what each is called, in order |',
        "| `share` | number, 0 or more, at most 1 | none | left out: all of it |",
        '| `kind` | `"x"` or `"y"` | `"x"` |   |',
        "| `by_name` | table, each: number, above 0 | none |   |",
        "| `also` | list, each: table, each: whole number | none |   |",
    ]


def test_every_key_of_a_file_is_explained(pages: dict[str, str]) -> None:
    rows = [line.split(" | ") for line in pages["files.md"].splitlines() if line.startswith("| `")]
    assert len(rows) > 120
    assert [row[0] for row in rows if not row[-1].strip(" |")] == []
