"""The laws of engines: the simulator keeps them, each wrong engine is told which one it breaks."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.check.engine import LAWS, OF_ENGINE, check, run
from harness.check.engine_cases import cases as every_case
from harness.loop import engine
from tests.cases import cases
from tests.harness.engines import constant


def test_the_simulator_conforms() -> None:
    assert check("sim") == []


@pytest.mark.torch
def test_the_engine_on_the_processor_conforms() -> None:
    pytest.importorskip("torch")
    assert check("torch") == []


CONSTANT = str(Path(constant.__file__))


def test_an_engine_of_one_file_conforms() -> None:
    assert check(CONSTANT) == []
    assert check(f"{CONSTANT}+step_s=0.0005") == []


def test_an_engine_whose_memory_is_never_limited_breaks_a_law_by_its_tokens_alone() -> None:
    for case in ("squeezed", "full"):  # by a Limit, by the GPU
        (failure,) = check(f"{CONSTANT}+limited=false", only="capacity", case=case)
        assert failure.message.startswith(f"case {case}: at ")
        assert failure.command.endswith(f"constant.py+limited=false --law capacity --case {case}")


def test_cases_are_as_hard_as_they_say() -> None:
    tried = {name: run("sim", case) for name, case in every_case().items()}
    assert sum(row["preemptions"] for row in tried["squeezed"].rows) > 0  # type: ignore[union-attr]
    assert {row["state"] for row in tried["squeezed"].rows} == {"done", "failed"}  # type: ignore[union-attr]
    assert {row["state"] for row in tried["dropped"].rows} == {"done", "dropped"}  # type: ignore[union-attr]
    assert {row["state"] for row in tried["sliced"].rows} == {"done", "dropped"}  # type: ignore[union-attr]
    assert sum(row["kv_ns"] > 0 for row in tried["full"].rows) > 12  # type: ignore[union-attr]
    assert tried["swapped"].engine.stats()["evicts"] > 2  # type: ignore[union-attr]
    assert all(row["arrival_ns"] > 0 for row in tried["closed"].rows[2:])  # type: ignore[union-attr]


HEAD = """
from harness.engines.sim.engine import Sim
from harness.policy.actions import *
from harness.policy.events import *
from dataclasses import replace
import numpy as np, pyarrow as pa, subprocess, sys

class Wrong(Sim):
%s

def make(config, options, machine):
    return Wrong(config, options, machine)
"""


def column(name: str, change: str) -> str:
    """Return a method `rows` that changes one column; `x` is its list."""
    return f'''
    def rows(self):
        for batch in super().rows():
            x = batch.column("{name}").to_pylist()
            at, field = batch.schema.get_field_index("{name}"), batch.schema.field("{name}")
            array = pa.array({change}, field.type if not pa.types.is_dictionary(field.type) else pa.string())
            array = array.cast(field.type) if array.type != field.type else array
            columns = [array if k == at else batch.column(k) for k in range(batch.num_columns)]
            yield pa.RecordBatch.from_arrays(columns, schema=batch.schema)
'''


WRONG = {
    "inert": "    fidelity = 'real'",
    "able": "    def do(self, action):\n        getattr(action, 'way', '') == 'no-such-way' or super().do(action)",
    "repeats": "    start = 0\n    def take(self, jobs):\n        Wrong.start += 1\n"
    "        super().take(replace(jobs, arrival_s=jobs.arrival_s + 1e-4 * Wrong.start))",
    "slices": "    def do(self, action):\n        sliced = getattr(action, 'slice_layers', None)\n"
    "        return super().do(replace(action, slice_layers=1) if sliced and sliced > 1 else action)",
    "ends": column("state", "[{'done': 'unfinished'}.get(s, s) for s in x]"),
    "tokens": column("made_tokens", "[max(0, n - 1) for n in x]"),
    "stamps": column("admit_ns", "[None if a is None else a + 10**10 for a in x]"),
    "waits": column("admission_ns", "[n + 100 for n in x]"),
    "ordered": "    def poll(self, until_s):\n        event = super().poll(until_s)\n"
    "        return replace(event, request=event.request._replace(arrival_s=1e6)) if type(event) is Arrived else event",
    "memory": "    def poll(self, until_s):\n        event = super().poll(until_s)\n        if self.names.insts:\n"
    "            self.S.insts['blocks'][-1] += 1\n        return event",
    "capacity": "    def __init__(self, config, options, machine):\n"
    "        super().__init__(config, {**options, 'memory': 'unlimited'}, machine)",
    "refusals": "    def do(self, action):\n        action == Drop(10**9) or super().do(action)",
    "view": "    def begin(self, hears, oracle, end_s):\n        super().begin(hears, True, end_s)",
    "rows": column("fidelity", "['real'] * len(x)"),
    "closes": "    def close(self):\n        CHILDREN.append(subprocess.Popen("
    "[sys.executable, '-c', 'input()'], stdin=subprocess.PIPE))\nCHILDREN = []",
}


@pytest.fixture
def wrong(tmp_path: Path) -> Callable[[str], str]:
    def write(law: str) -> str:
        path = tmp_path / f"wrong_{law}.py"
        path.write_text(HEAD % WRONG[law])
        return str(path)

    return write


def test_every_law_has_an_engine_that_breaks_it() -> None:
    assert set(WRONG) == set(LAWS)


@cases("law", sorted(set(LAWS) - {"closes"}))
def test_a_wrong_engine_is_told_the_law(law: str, wrong: Callable[[str], str]) -> None:
    name = wrong(law)
    (failure,) = check(name, only=law)
    words = shlex.split(failure.command)
    assert words[:6] == ["bench", "check", "--engine", name, "--law", law]
    assert ("--case" in words) != (law in OF_ENGINE)
    again = check(name, only=law, case=words[7] if "--case" in words else None)
    assert [failure.law for failure in again] == [law]


def test_a_process_that_outlives_its_engine_is_found(wrong: Callable[[str], str]) -> None:
    name = wrong("closes")
    try:
        (failure,) = check(name, only="closes", case="no-requests")
    finally:
        for child in engine.module(name).CHILDREN:
            child.communicate()
    assert "process" in failure.message
