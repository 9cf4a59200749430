"""`bench list --matrix`: a cell is what `replay` refuses the pair for, and docs/matrix.md is what is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from harness.cli.app import main
from harness.cli.lists import page
from harness.engines.servers import host
from harness.loop import engine, strangers, system
from harness.loop.replay import replay
from harness.policy.types import Jobs, Unsupported
from harness.run import matrix
from harness.run.resolve import ROOMY, gaps, traits
from harness.run.setup import Setup
from harness.run.spec import Spec
from tests import ROOT
from tests.cases import cases

NOTHING = Jobs((), *(np.zeros(0, kind) for kind in (float, np.int32, np.int32, np.int32, float, float)))


@pytest.fixture(scope="module")
def rows() -> list[matrix.Coverage]:
    return list(matrix.rows())


def test_every_system_and_preset_has_a_cell_for_every_engine(rows: list[matrix.Coverage]) -> None:
    assert [(row.system, row.preset) for row in rows] == [
        (name, preset) for name in system.names() for preset in (None, *system.find(name).presets)
    ]
    assert all(tuple(row.lacks) == engine.names() for row in rows)
    assert {"sim", "torch"} <= set(engine.names())


def refusal(row: matrix.Coverage, where: str) -> str:
    """Return the refusal of a system by `replay` on an engine that cannot serve it."""
    spec = Spec(row.system, preset=row.preset, **ROOMY)
    policy = Setup(replace(spec, gpus=traits(spec).gpus)).policy
    made = Setup(replace(spec, engine=where)).make_engine(policy.options)
    with pytest.raises(Unsupported) as refused:
        replay(policy, made, NOTHING)
    return str(refused.value)


def test_a_cell_is_what_replay_refuses_the_pair_for(rows: list[matrix.Coverage], subtests: pytest.Subtests) -> None:
    for row in rows:
        for where, lack in row.lacks.items():
            with subtests.test(f"{row.system}:{row.preset} on {where}"):
                assert (lack == matrix.Lack()) == (gaps(row.system, row.preset, where) == ())
                assert not lack.names or refusal(row, where) == ", ".join(lack.names)


ENGINES = {"raises": "x = 1\nraise KeyError('m9')", "lacks": "def make(config, options, machine): return 1"}
SYSTEMS = {
    "raises": "x = {}\ny = x['m9']",
    "fails": "class A:\n    presets = {'a': 3}\n    def on(self, event, view): ...",
    "empty": "",
}


def test_a_broken_file_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(kind: str, texts: Mapping[str, str]) -> list[str]:
        paths = [tmp_path / f"{name}_{kind}.py" for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text)
        return [str(path) for path in paths]

    engines, systems = files("engine", ENGINES), files("system", SYSTEMS)
    monkeypatch.setattr(strangers, "known", lambda _: None)  # as of files that lie in systems/
    monkeypatch.setattr(engine, "names", lambda: (engines[0], "sim", engines[1]))
    monkeypatch.setattr(system, "names", lambda: [*systems[:2], "static", systems[2]])
    result = CliRunner().invoke(main, ["list", "systems"])
    assert result.exit_code == 0, result.output
    _, head, static, *_ = result.output.splitlines()
    assert (head.split()[:3], static.split()[:2]) == (["system", "runs", "on"], ["static", "sim"])
    printed_once = " ".join(result.output.split())  # lines are folded
    broken = [
        f"broken: {engines[0]}:2: KeyError ('m9')",
        f"broken: {engines[1]}: its engine has no `can` (harness/loop/engine.py)",
        f"broken: raises_system: KeyError at raises_system.py:2 ('m9'); bench check {systems[0]}",
        f"broken: fails_system: TypeError (A() takes no arguments); bench check {systems[1]}",
        f"broken: {systems[2]}: expected one class with a method `on`, found 0",
    ]
    assert [line for line in broken if line not in printed_once] == []
    assert {(row.system, *row.lacks) for row in matrix.rows()} == {("static", "sim")}


def test_words_fold_names_of_one_kind() -> None:
    lacks = matrix.Lack(("Move", "Move.to:gpu", "Run.phase:decode", "event TurnEnded", "option kv=elastic"))
    assert matrix._cell(lacks) == "no KV moves, turns, KV elastic"
    assert matrix._cell(matrix.Lack(why="room: no place for it")) == "no room"
    assert matrix._cell(matrix.Lack()) == "yes"


def test_the_page_is_what_its_systems_and_engines_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that it lists: a system or an engine is a file, and `make docs` adds it to the page at leisure."""
    monkeypatch.setattr(host, "card", lambda name: None)
    text = (ROOT / "docs/matrix.md").read_text(encoding="utf-8")
    (_, _, *engines, _), _, *shown = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")
    )
    systems = list(dict.fromkeys(cells[0] for cells in shown))
    assert {"prism", "static"} <= set(systems)
    assert {"sim", "llamacpp", "vllm"} <= set(engines)
    assert text == page(list(matrix.rows(systems, engines))), "make docs writes it anew"


def test_bench_list_prints_the_page(rows: list[matrix.Coverage]) -> None:
    result = CliRunner().invoke(main, ["list", "--matrix", "--markdown"])
    assert (result.exit_code, result.output) == (0, page(rows))


@cases("args", [("--markdown",), ("--matrix", "traces")])
def test_a_form_of_nothing_is_a_mistake(args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["list", *args])
    assert result.exit_code == 2
    assert "--matrix" in result.output
