"""Hashes of sources and files: which runs and scores a change makes stale."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from harness.loop.system import ROOT
from harness.rows import record
from harness.run import slo, sweep
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.sources import Task, closure, code, current, scoring
from harness.run.spec import Spec, canonical
from harness.run.teller import Silent
from tests.harness.run.test_sweep import SYSTEM, TINY, mine  # noqa: F401 - a fixture


def sources(spec: Spec) -> set[str]:
    engine = ROOT / "harness/engines/sim/__init__.py"
    policy = ROOT / f"systems/{spec.system}.py"
    paths = closure(ROOT / "harness/run/execute.py", engine, policy)
    return {str(path.relative_to(ROOT)) for path in paths}


def test_the_sources_of_a_run_are_what_it_imports() -> None:
    paths = sources(TINY)
    core = {f"harness/policy/{x}.py" for x in ("types", "events", "actions", "view", "placement")}
    core |= {f"harness/loop/{x}.py" for x in ("system", "engine", "replay")} | {"harness/rows/record.py"}
    core |= {f"harness/run/{x}.py" for x in ("spec", "setup", "execute")}  # what `resolve` decides is in the spec
    core |= {f"harness/engines/{x}.py" for x in ("machine", "rows", "sim/__init__", "sim/engine", "sim/state")}
    costs = ("coef", "coefficients", "kernels", "profile", "quantities")
    core |= {f"harness/engines/costs/{x}.py" for x in costs} | {"harness/engines/sim/jit.py"}
    core |= {f"harness/engines/sim/kernel/{x}.py" for x in ("__init__", "loop", "steps", "memory", "lanes", "peek")}
    core |= {"systems/static.py", "workloads/build.py", "workloads/models.py", "workloads/slo.py", "workloads/base.py"}
    assert core <= paths
    others = {f"harness/{x}.py" for x in ("cli/app", "rows/tidy", "check/new", "check/laws")}
    others |= {f"harness/run/{x}.py" for x in ("resolve", "sources", "sweep", "placement", "slo")}
    others |= {f"harness/study/{x}.py" for x in ("study", "measure")}
    others |= {f"harness/answers/{x}.py" for x in ("table", "explain")}
    assert not paths & (others | {"systems/chunked.py", "systems/dedicated.py", "harness/calibrate/kernels.py"})


def test_the_sources_of_a_score_are_what_it_imports() -> None:
    files = [ROOT / f"harness/study/{name}.py" for name in ("measure", "varying")]
    for file in files:
        paths = {str(path.relative_to(ROOT)) for path in closure(file)}
        assert {f"harness/run/{x}.py" for x in ("score", "slo", "spec")} <= paths
        assert {f"harness/rows/{x}.py" for x in ("requests", "scoring", "tidy", "record")} <= paths
        assert "workloads/slo.py" in paths
        assert not any(name.startswith(("systems/", "plots/", "harness/cli/")) for name in paths)
    assert len({scoring(str(file)) for file in files}) == 2


def test_editing_one_system_makes_only_its_rows_stale(mine: Path, tmp_path: Path) -> None:  # noqa: F811
    changed, other = resolve(replace(TINY, system=str(mine))), resolve(TINY)
    before = code(changed), code(other)
    for spec, source in zip((changed, other), before, strict=True):
        execute(spec, tmp_path, source)
    mine.write_text((SYSTEM % "") + "EDITED = True\n")
    os.utime(mine, ns=(1, 1))  # also where the clock is coarse
    after = code(changed), code(other)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert not current(Task.of(changed, after[0]), tmp_path)
    assert current(Task.of(other, after[1]), tmp_path)


def test_runs_of_another_arithmetic_are_taken_and_told(tmp_path: Path) -> None:
    lines = list[str]()
    told = type("Told", (Silent,), {"say": lambda _, line: lines.append(line)})()
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1, teller=told)
    assert lines == []
    record.restate(folder, {"arithmetic": "of another machine"})
    before = (folder / record.ROWS).read_bytes()
    sweep.sweep([TINY], tmp_path, workers=1, teller=told)
    assert [line.partition(" were made where arithmetic differs")[0] for line in lines] == ["1 of 1 stored runs"]
    assert (folder / record.ROWS).read_bytes() == before


ADDED = {"system": "EDITED = True\n", "models": '[[model]]\nshape = "llama-3.2-1b"\n'}


def test_files_enter_a_runs_hash_by_meaning(tmp_path: Path) -> None:
    """Wherever they lie; names of what is shipped stay names."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    given = {"system": "mine.py", "models": "set.toml"}
    texts = {"system": SYSTEM % "", "models": '[[model]]\nshape = "llama-3.2-1b"\ncopies = 3\n'}
    texts["models"] = (ROOT / "workloads/sets/heavy8.toml").read_text()
    for folder in ("a", "b"):
        for key, name in given.items():
            (tmp_path / folder / name).write_text(texts[key])
    for key, name in given.items():
        here, there = (replace(TINY, **{key: str(tmp_path / folder / name)}) for folder in ("a", "b"))  # type: ignore[arg-type]
        assert here.hash8 == there.hash8 != TINY.hash8
        (tmp_path / "b" / name).write_text(texts[key] + ADDED[key])
        assert here.hash8 != there.hash8
    assert "heavy8" in canonical(replace(TINY, models="heavy8"))
    rule, other = (slo.SloTarget(f"classes:{tmp_path / folder / 'set.toml'}", None) for folder in ("a", "b"))
    assert rule.identity != other.identity
    (tmp_path / "b/set.toml").write_text(texts["models"])
    assert rule.identity == slo.SloTarget(f"classes:{tmp_path / 'b/set.toml'}", None).identity


def test_a_folder_that_is_moved_is_current_and_two_versions_stand_side_by_side(tmp_path: Path) -> None:
    here, there, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    here.mkdir()
    (here / "mine.py").write_text(SYSTEM % "")
    asked = replace(TINY, system=str(here / "mine.py"))
    (folder,) = sweep.sweep([asked], out, workers=1)
    before = record.read(folder)
    here.rename(there)
    out.rename(tmp_path / "moved")
    moved = resolve(replace(asked, system=str(there / "mine.py")))
    assert current(Task.of(moved, code(moved)), tmp_path / "moved")
    (again,) = sweep.sweep([moved], tmp_path / "moved", workers=1)
    assert again.name == folder.name
    assert record.meta(again)["spec"]["system"] == str(there / "mine.py")  # and can be made again from there
    assert record.read(again).equals(before)
    (there / "mine.py").write_text((SYSTEM % "") + "EDITED = True\n")
    (new,) = sweep.sweep([moved], tmp_path / "moved", workers=1)
    assert new != again
    assert record.exists(again)
