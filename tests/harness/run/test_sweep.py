"""Specs become runs: the same bytes in any order and number of processes, redone only when their sources changed.

Over 600 lines: what tests share (a tiny spec, a grid, a system) is made here once.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.engines.costs import quantities
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import record, requests
from harness.rows.scoring import Run, score
from harness.run import estimates, slo, sweep
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup, load_models, load_trace
from harness.run.sources import Task, closure, code, current, scoring
from harness.run.spec import Spec, as_dict, canonical
from harness.run.teller import Left, Silent
from harness.study import receipt
from harness.study.bases import TUNING_SEEDS, base_specs, bases, slo_target
from harness.study.compare import comparison
from harness.study.measure import Measured, measure
from harness.study.study import AA_SEED
from tests.cases import cases
from workloads.base import DRAWN, RARE
from workloads.build import build

TINY = Spec("static", trace="sample", models="llama-3.2-1b*3", gpus=1, slo="", drain_s=64.0)

SYSTEM = '''
"""A system of a test."""

from dataclasses import dataclass

from harness.policy.actions import Admit, Load, Run
from harness.policy.events import Woke
from harness.policy.fields import choice, number
from harness.policy.types import Batch, Cluster, Inst

DECISION_S = 0.004


@dataclass
class Mine:
    cluster: Cluster
    tau: int = number(3, 0, 10)
    share: float = 0.5
    kind: str = choice("a", "b")
    presets = {"slow": {"tau": 9}}
    hears = frozenset({Woke})
    uses = frozenset({"Load", "Run", "Admit"%s})
    options = {"kv": "paged"}

    def __post_init__(self):
        self.names = list(self.cluster.models)

    def on(self, event, view):
        if event == Woke("start"):
            for name in self.names:
                batch = Batch(Inst(name, (0,)))
                yield Load(batch.inst)
                yield Run(batch)
                yield Admit(name, batch)
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SYSTEM % "")
    return path


def files(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder that is part of results, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {record.SIDE, receipt.FILE}
    }


# ------------------------------------------------------------------ resolve


def test_a_resolved_spec_is_closed_and_resolving_again_changes_nothing() -> None:
    spec = resolve(TINY)
    assert resolve(spec) == spec
    assert [name for name, value in as_dict(spec).items() if value is None] == [
        "preset",
        "table",
        "pcie_gbps",
        "nvlink_gbps",
        "net_gbps",
        "disk_gbps",
        "process_bytes",  # the machine's own
    ]
    assert spec.trace_sha256 == load_trace("sample").sha256
    assert (spec.window_s, spec.warmup_s) == (60.0, 60.0)  # the longer of 60 s and 5 %, at most the span


def test_aliases_name_the_same_run() -> None:
    assert resolve(replace(TINY, gpu="H100-80G")) == resolve(replace(TINY, gpu="h100"))


def test_time_scaling_shortens_the_window() -> None:
    assert resolve(replace(TINY, scaling="time", rate_scale=4.0)).window_s == 15.0


def test_a_system_that_brings_its_gpus_gets_them() -> None:
    assert resolve(replace(TINY, system="dedicated")).gpus == 3
    assert resolve(replace(TINY, system="dedicated", models="heavy8", trace="arena-like")).gpus == 8


def test_thinking_time_is_the_constant_of_the_systems_file(mine: Path) -> None:
    spec = resolve(replace(TINY, system=str(mine)))
    assert spec.decision_s == 0.004
    assert spec.control_s == quantities.host(spec.host, spec.gpu).api_in_s  # one call of the engine's API
    assert resolve(replace(TINY, system=str(mine), decision_s=0.0)).decision_s == 0.0


def test_slo_seconds_count_only_for_who_reads_them(tmp_path: Path) -> None:
    blind, reader = tmp_path / "blind.py", tmp_path / "reader.py"
    blind.write_text(SYSTEM % "")
    reader.write_text(SYSTEM % ', "Request.slo"')
    for path, reads in ((blind, False), (reader, True)):
        loose, tight = (
            resolve(replace(TINY, system=str(path), slo="absolute:ttft=1,tpot=1", slo_s=((model, x, x),)))
            for model, x in (("llama-3.2-1b/1", 1.0), ("llama-3.2-1b/1", 2.0))
        )
        assert (loose.hash8 != tight.hash8) is reads
        assert bool(loose.slo) is reads
        assert np.isfinite(Setup(loose).jobs().ttft_slo_s).any() == reads


@cases(
    ("change", "says"),
    [
        ({"system": "statik"}, 'no system "statik"; did you mean static?'),
        ({"system": "./gone.py"}, "gone.py"),
        ({"preset": "equall"}, 'static has no preset "equall"; did you mean equal?'),
        ({"fields": (("sise", "rate"),)}, 'static has no field "sise"; did you mean size?'),
        ({"fields": (("size", "large"),)}, "field size is 'large'"),
        ({"fields": (("size", 3),)}, "field size is 3"),
        ({"engine": "simm"}, 'no engine "simm"; did you mean sim?'),
        ({"gpu": "h1000"}, "h100"),
        ({"host": "vllm-grap"}, "vllm-graph"),
        ({"trace": "sampel"}, "did you mean sample?"),
        ({"trace": "gone.parquet"}, "gone.parquet"),
        ({"trace_sha256": "00"}, "sha256"),
        ({"models": "heavy"}, "did you mean heavy8?"),
        ({"models": "llama-3.3-70b"}, "llama-3.3-70b/1 needs 136.3 GiB on each GPU, h100 has 71.3"),
        ({"models": "llama-3.2-1b*30"}, "30"),
        ({"table": "gone.toml"}, "gone.toml"),
    ],
)
def test_what_does_not_exist_is_one_line(change: dict[str, object], says: str) -> None:
    wrong = replace(TINY, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        Setup(resolve(wrong)).jobs()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fields_are_checked_against_the_system(mine: Path) -> None:
    def fields(*pairs: tuple[str, object]) -> dict[str, object]:
        spec = replace(TINY, system=str(mine), fields=pairs)  # type: ignore[arg-type]
        return dict(Setup(spec).keywords)

    assert fields(("share", 1), ("tau", 4)) == {"share": 1.0, "tau": 4}
    for pair, says in ((("tau", 11), "[0, 10]"), (("tau", 1.5), "kind"), (("kind", "c"), "(a, b)"), (("x", 1), "tau")):
        with pytest.raises(UserError, match=re.escape(says)):
            fields(pair)
    assert Setup(replace(TINY, system=str(mine), preset="slow")).keywords == {"tau": 9}


def test_a_system_that_is_not_python_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=r"bad\.py:2: invalid syntax"):
        resolve(replace(TINY, system=str(path)))


# ------------------------------------------------------------------ sources


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
    others = {f"harness/{x}.py" for x in ("cli/app", "rows/scoring", "check/new", "check/laws")}
    others |= {f"harness/run/{x}.py" for x in ("resolve", "sources", "sweep", "placement", "slo")}
    others |= {f"harness/study/{x}.py" for x in ("study", "measure")}
    others |= {f"harness/answers/{x}.py" for x in ("table", "explain")}
    assert not paths & (others | {"systems/chunked.py", "systems/dedicated.py", "harness/calibrate/kernels.py"})


def test_the_sources_of_a_score_are_what_it_imports() -> None:
    files = [ROOT / f"harness/study/{name}.py" for name in ("measure", "varying")]
    for file in files:
        paths = {str(path.relative_to(ROOT)) for path in closure(file)}
        assert {f"harness/run/{x}.py" for x in ("score", "slo", "spec")} <= paths
        assert {f"harness/rows/{x}.py" for x in ("requests", "attainment", "tidy", "record")} <= paths
        assert "workloads/slo.py" in paths
        assert not any(name.startswith(("systems/", "plots/", "harness/cli/")) for name in paths)
    assert len({scoring(str(file)) for file in files}) == 2


@cases("harm", ["cut", "foreign", "older scoring"])
def test_a_table_that_no_longer_holds_is_scored_anew(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compared(tmp_path, "static").folder / record.SWEEP
    whole = path.read_bytes()
    match harm:
        case "cut":
            path.write_bytes(whole[:-20])
        case "foreign":
            path.write_bytes(b"nothing of ours")
        case _:
            with monkeypatch.context() as patch:
                for name in ("scoring", "tree"):  # by which tables and receipts hold
                    patch.setattr(f"harness.run.sources.{name}", lambda *_: "other sources")
                compared(tmp_path, "static")
    assert path.read_bytes() != whole
    compared(tmp_path, "static")
    assert path.read_bytes() == whole


def test_editing_one_system_makes_only_its_rows_stale(mine: Path, tmp_path: Path) -> None:
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


def test_a_files_name_and_place_do_not_enter_the_code(tmp_path: Path) -> None:
    hashes = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(SYSTEM % "")
        hashes.add(code(resolve(replace(TINY, system=str(path)))))
    assert len(hashes) == 1


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


# ------------------------------------------------------------------ runs


def test_a_drawn_trace_has_its_size_in_the_spec_and_its_mark_in_the_run(tmp_path: Path) -> None:
    asked = Spec("static", trace="hyperbolic-like", models="light8", slo="", drain_s=1.0, window_s=5.0, warmup_s=0.0)
    spec = resolve(asked)
    assert spec.trace == "hyperbolic-like+models=8"
    assert resolve(replace(asked, trace=spec.trace)) == spec == resolve(spec)
    assert resolve(replace(asked, models="prism18")).trace == "hyperbolic-like+models=18"
    folder = execute(spec, tmp_path, code(spec))
    assert record.meta(folder)["fit"] == "within"
    assert record.meta(execute(resolve(TINY), tmp_path, ""))["fit"] is None


def test_a_run_holds_its_spec_and_every_request(tmp_path: Path) -> None:
    spec = resolve(TINY)
    folder = execute(spec, tmp_path, code(spec))
    about, table, jobs = record.meta(folder), record.read(folder), Setup(spec).jobs()
    assert folder == tmp_path / spec.folder
    assert about["spec"] == json.loads(json.dumps(as_dict(spec)))
    assert (about["spec_hash"], about["tier"], about["fidelity"]) == (spec.hash8, "synthetic", "simulated")
    assert table.num_rows == len(jobs) == sum(about["counts"].values())
    assert about["stats"]["gpus"] == 1.0
    assert about["end_s"] <= 60.0 + 64.0
    side = json.loads((folder / record.SIDE).read_text())
    assert side["requests"] == len(jobs)


def test_results_hold_no_date_and_no_machine(tmp_path: Path) -> None:
    spec = resolve(TINY)
    first, second = (execute(spec, tmp_path / x, code(spec)) for x in "ab")
    assert (first / record.ROWS).read_bytes() == (second / record.ROWS).read_bytes()


def test_what_cannot_be_held_is_an_infeasible_run(tmp_path: Path) -> None:
    spec = resolve(Spec("static", trace="arena-like", models="heavy8", gpus=1, slo="", drain_s=1.0))
    folder = execute(spec, tmp_path, code(spec))
    about = record.meta(folder)
    assert "GiB" in about["infeasible"]
    assert record.read(folder).num_rows == 0
    scored = score(Run(folder.name, about, record.read(folder), {})).to_pylist()
    assert {row["value"] for row in scored if row["definition"] == "both"} == {0.0}


def test_what_an_engine_cannot_do_is_a_skipped_run(tmp_path: Path) -> None:
    path = tmp_path / "turns.py"
    path.write_text(SYSTEM % ', "Load.way:tape"')
    spec = resolve(replace(TINY, system=str(path)))
    folder = execute(spec, tmp_path, code(spec))
    assert record.meta(folder)["skipped"] == "Load.way:tape"
    assert record.read(folder).num_rows == 0


def test_all_systems_share_each_seed(tmp_path: Path) -> None:
    arrivals = []
    for name in ("static", "chunked", "unshared", "dedicated"):
        spec = resolve(replace(TINY, system=name, seed=3))
        table = record.read(execute(spec, tmp_path, code(spec)))
        arrivals.append(table.select(["model", "arrival_ns", "prompt_tokens", "output_tokens"]).to_pylist())
    assert all(rows == arrivals[0] for rows in arrivals)


# ------------------------------------------------------------------ sweeps


GRID = [replace(TINY, system=name, rate_scale=rate) for name in ("static", "chunked") for rate in (1.0, 3.0)]


def test_any_order_and_number_of_processes_gives_the_same_bytes(tmp_path: Path) -> None:
    orders = {"one": (GRID, 1), "two": (GRID, 2), "back": (GRID[::-1], 1)}
    got = {}
    for name, (specs, workers) in orders.items():
        folders = sweep.sweep(specs, tmp_path / name, workers=workers)
        assert [folder.name for folder in folders] == [resolve(spec).folder for spec in specs]
        got[name] = files(tmp_path / name)
    assert got["one"] == got["two"] == got["back"]
    assert len(got["one"]) == len(GRID)


@pytest.mark.slow
def test_the_hash_seed_of_python_does_not_matter(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom harness.run import estimates, sweep\n"
        "from tests.harness.run.test_sweep import GRID\n"
        "sweep.sweep(GRID, Path(sys.argv[1]), workers=1)\n"
    )
    got = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script, str(tmp_path / seed)], check=True, env=env, cwd=ROOT)
        got.append(files(tmp_path / seed))
    assert got[0] == got[1] != {}


class Heard:
    """A teller that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[str, int, int]] = []
        self.left: list[Left | None] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, what: str, done: int, total: int, left: Left | None = None) -> None:
        self.left.append(left)
        self.steps.append((what, done, total))


def test_what_is_current_is_not_run_again(tmp_path: Path) -> None:
    first, again = Heard(), Heard()
    sweep.sweep(GRID[:2], tmp_path, workers=1, teller=first)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    sweep.sweep([*GRID[:2], GRID[0]], tmp_path, workers=1, teller=again)
    assert first.steps == [("runs", 0, 2), ("runs", 1, 2), ("runs", 2, 2)]
    assert again.steps == [("runs", 2, 2)]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == stamps


@cases("harm", ["cut", "foreign", "absent", "stale"])
def test_what_is_not_whole_or_not_current_is_run_again(harm: str, tmp_path: Path) -> None:
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1)
    whole = files(tmp_path)
    path = folder / record.ROWS
    match harm:
        case "cut":
            path.write_bytes(path.read_bytes()[:-20])
        case "foreign":
            path.write_bytes(b"nothing of ours")
        case "absent":
            path.unlink()
        case _:
            execute(resolve(TINY), tmp_path, "another hash")
    assert files(tmp_path) != whole
    sweep.sweep([TINY], tmp_path, workers=1)
    assert files(tmp_path) == whole


def bug(folder: Path) -> Path:
    path = folder / "bug.py"
    path.write_text((SYSTEM % "").replace("for name in", "raise ValueError('planted')\n            for name in"))
    return path


@cases(("workers", "first"), product((1, 2), (True, False)))
def test_a_bug_of_a_system_is_told_when_all_others_are_done_and_leaves_nothing(
    workers: int, first: bool, tmp_path: Path
) -> None:
    path, heard, out = bug(tmp_path), Heard(), tmp_path / "out"
    wrong = [replace(TINY, system=str(path), seed=seed) for seed in (1, 2, 3)]
    right = [replace(TINY, seed=seed) for seed in (1, 2, 3)]
    with pytest.raises(Failed) as caught:
        sweep.sweep([*wrong, *right] if first else [*right, *wrong], out, workers=workers, teller=heard)
    (line,) = str(caught.value).splitlines()
    told = "bug: ValueError at bug.py:30 (planted), t = -60 s, Woke(key='start')"
    assert line == f"{told}; bench check {path}"
    assert set(files(out)) == {f"{resolve(spec).folder}/{record.ROWS}" for spec in right}
    assert not list(out.rglob("*.part"))
    assert max(done for _, done, _ in heard.steps) == len(right)
    path.write_text(path.read_text().replace("raise ValueError('planted')", "pass"))
    assert len(sweep.sweep([*wrong, *right], out, workers=1)) == 6


def test_a_system_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    path, tries = bug(tmp_path), tmp_path / "tries"
    note = f"with open({str(tries)!r}, 'a') as log: log.write('.')\n            raise "
    path.write_text(path.read_text().replace("raise ", note))
    wrong = [replace(TINY, system=str(path), rate_scale=rate) for rate in (1.0, 2.0, 3.0)]
    with pytest.raises(Failed):
        sweep.sweep([*wrong, TINY], tmp_path / "out", workers=1)
    assert tries.read_text() == "."


def test_an_entry_that_fails_leaves_the_comparison_as_if_it_had_not_been_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    text = (SYSTEM % "").replace("import Woke", "import Arrived, Woke").replace("{Woke}", "{Woke, Arrived}")
    path.write_text(text.replace("if event ==", "if view.now_s > 5: 1 / 0\n        if event =="))
    rates, rule = (1.0, 2.0), "absolute:ttft=1,tpot=1"
    left = compared(tmp_path / "both", "static", str(path), rates=rates, rule=rule)
    alone = compared(tmp_path / "one", "static", rates=rates, rule=rule)
    assert list(left.failed) == ["late"]
    assert left.about.systems == ("static",)
    assert (left.folder.name, left.table) == (alone.folder.name, alone.table)
    assert files(tmp_path / "both") == files(tmp_path / "one")
    with pytest.raises(Failed, match=r"^late: "):
        compared(tmp_path / "both", str(path))


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    path = tmp_path / "dies.py"
    path.write_text((SYSTEM % "").replace("for name in", "import os; os._exit(7)\n            for name in"))
    wrong = [replace(TINY, system=str(path), seed=seed) for seed in (1, 2)]
    with pytest.raises(UserError, match=r"a worker died while running dies-.*exit code 7"):
        sweep.sweep([TINY, *wrong], tmp_path / "out", workers=2)


def test_a_disk_that_refuses_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("in the way")
    for out in (path, path / "below", Path("/proc/none")):
        with pytest.raises(UserError) as caught:
            sweep.sweep([TINY], out, workers=1)
        assert str(out) in str(caught.value)
    assert path.read_text() == "in the way"


# ------------------------------------------------------------------ SLO bases


def test_bases_are_the_same_for_every_system_rate_seed_and_gpu_count() -> None:
    specs = base_specs(TINY)
    for change in ({"system": "chunked"}, {"rate_scale": 9.0}, {"seed": 4}, {"gpus": 4}, {"chunk_tokens": 64}):
        assert base_specs(replace(TINY, **change)) == specs
    for other in ({"models": "light8"}, {"trace": "arena-like"}, {"gpu": "a100-80g"}, {"host": "none"}):
        assert base_specs(replace(TINY, **other)) != specs  # type: ignore[arg-type]
    assert [spec.seed for spec in specs] == list(TUNING_SEEDS)
    assert not set(TUNING_SEEDS) & set(range(AA_SEED + 100))
    assert all(
        (spec.system, spec.rate_scale, spec.workload, spec.slo) == ("dedicated", 1.0, "base", "") for spec in specs
    )


def test_rare_models_are_measured_on_drawn_arrivals_at_their_rate() -> None:
    spec = resolve(replace(base_specs(TINY)[0], models="llama-3.2-1b*8"))
    jobs, trace = Setup(spec).jobs(), load_trace("sample")
    assert np.isinf(jobs.ttft_slo_s).all()
    assert np.all(np.diff(jobs.arrival_s) >= 0)
    anew = np.bincount(build(trace, load_models(spec.models), seed=spec.seed, warmup_s=0.0).model)  # drawn anew
    counts: list[float] = []
    pairs = set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    for i in range(8):
        mine = jobs.model == i
        inside = int((mine & (jobs.arrival_s >= 0)).sum())
        if inside != DRAWN:
            assert inside >= RARE
            continue
        drawn = set(zip(jobs.prompt_tokens[mine].tolist(), jobs.output_tokens[mine].tolist(), strict=True))
        assert drawn <= pairs
        counts.append(DRAWN / jobs.arrival_s[mine].max() * 60)
    rare = sorted(n for n in anew if n < RARE)
    assert sorted(counts) == pytest.approx(rare, rel=5 / math.sqrt(DRAWN))


def test_bases_are_the_p95_of_all_runs_together(tmp_path: Path) -> None:
    folders = sweep.sweep(base_specs(TINY), tmp_path, workers=1)
    by_model = bases(folders)
    for model, (ttft_s, tpot_s) in by_model.items():
        rows = [row for f in folders for row in record.read(f).to_pylist() if row["model"] == model]
        rows = [row for row in rows if row["arrival_ns"] >= 0]
        ttft = [(row["first_ns"] - row["arrival_ns"]) / 1e9 for row in rows]
        tpot = [
            (row["done_ns"] - row["first_ns"]) / 1e9 / (row["output_tokens"] - 1)
            for row in rows
            if row["output_tokens"] > 1
        ]
        assert ttft_s == pytest.approx(np.quantile(ttft, 0.95))
        assert tpot_s == pytest.approx(np.quantile(tpot, 0.95))
        assert len(rows) >= 5 * RARE


def test_the_rule_scales_the_bases_and_the_drain_covers_the_longest_request(tmp_path: Path) -> None:
    tight, loose = (slo_target(TINY, f"{x}xP95", tmp_path, workers=1) for x in (1, 5))
    assert tight.seconds is not None
    assert loose.seconds is not None
    for model, (ttft_s, tpot_s) in tight.seconds.items():
        assert loose.seconds[model] == pytest.approx((5 * ttft_s, 5 * tpot_s))
    longest = int(load_trace("sample").output_tokens.max())
    largest = max(ttft_s + (longest - 1) * tpot_s for ttft_s, tpot_s in loose.seconds.values())
    assert 10 * largest <= loose.drain_s < 20 * largest
    assert math.log2(loose.drain_s).is_integer()
    assert loose.spec(replace(TINY, drain_s=3.0)).drain_s == 3.0


def test_a_rule_by_the_requests_own_latency_has_limits_of_each(tmp_path: Path) -> None:
    under = slo_target(TINY, "4xsolo", tmp_path)
    assert under.seconds is None
    assert under.definition == "e2e"
    assert list(tmp_path.iterdir()) == []  # nothing to measure
    (folder,) = sweep.sweep([under.spec(TINY)], tmp_path, workers=1)
    limits = own_limits(folder, "4xsolo")
    jobs = Setup(replace(resolve(under.spec(TINY)), slo="4xsolo")).jobs()  # as a policy that reads them has them
    assert np.array_equal(limits.ttft_s, jobs.ttft_slo_s)
    assert np.array_equal(limits.tpot_s, jobs.tpot_slo_s)
    order = np.argsort(jobs.prompt_tokens, kind="stable")
    assert np.all(np.diff(limits.ttft_s[order]) >= -1e-12)  # one shape: longer prompts get more


def own_limits(folder: Path, rule: str) -> requests.Limits:
    limits = slo.limits(folder, slo.SloTarget(rule, None))
    assert isinstance(limits, requests.Limits)
    return limits


def test_what_requests_take_alone_is_stored_once_for_all_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1)
    rows = (folder / record.ROWS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("workloads.build.build", None)  # neither the workload nor its trace is needed
        patch.setattr("traces.load.trace", None)
        two = own_limits(folder, "2xsolo")
    stored = (folder / record.SOLO).stat().st_mtime_ns
    monkeypatch.setattr(Setup, "solo_s", None)  # nor the cost table any more
    four, mixed = own_limits(folder, "4xsolo"), own_limits(folder, "4/2xsolo")
    assert np.array_equal(four.ttft_s, 2 * two.ttft_s)
    assert np.array_equal(four.tpot_s, 2 * two.tpot_s)
    assert np.array_equal(mixed.ttft_s, four.ttft_s)
    assert np.array_equal(mixed.tpot_s, two.tpot_s)
    assert (folder / record.SOLO).stat().st_mtime_ns == stored
    assert (folder / record.ROWS).read_bytes() == rows
    assert sweep.sweep([TINY], tmp_path, workers=1) == [folder]  # still current


@cases("harm", ["cut", "foreign", "another", "fewer"])
def test_what_is_not_of_these_rows_is_derived_anew(harm: str, tmp_path: Path) -> None:
    folder, other = sweep.sweep([TINY, replace(TINY, seed=1)], tmp_path, workers=1)
    limits = own_limits(folder, "1xsolo")
    path = folder / record.SOLO
    whole = path.read_bytes()
    match harm:
        case "cut":
            path.write_bytes(whole[:-20])
        case "foreign":
            path.write_bytes(b"nothing of ours")
        case "another":
            own_limits(other, "1xsolo")
            path.write_bytes((other / record.SOLO).read_bytes())
        case _:
            of = json.loads(pq.read_metadata(path).metadata[b"of"])
            record.write_table(path, pq.read_table(path).slice(1), {"of": of})
    assert path.read_bytes() != whole
    again = own_limits(folder, "1xsolo")
    assert np.array_equal(again.ttft_s, limits.ttft_s)
    assert path.read_bytes() == whole


def test_a_run_of_other_sources_takes_what_its_requests_take_alone_with_it(tmp_path: Path) -> None:
    (folder,) = sweep.sweep([TINY], tmp_path, workers=1)
    own_limits(folder, "1xsolo")
    execute(resolve(TINY), tmp_path, "other sources")
    assert not (folder / record.SOLO).exists()


# ------------------------------------------------------------------ comparison

SETTING = {"trace": "sample", "models": "llama-3.2-1b*3", "gpus": 1}


def compared(
    out: Path, *systems: str, rates: Sequence[float] = (1.0,), rule: str = "5xP95", workers: int = 1, **options: Any
) -> Measured:
    """Return a comparison of systems: one seed at several rates, two at one."""
    asked = comparison(systems, SETTING, rates=rates, seeds=1 if len(rates) > 1 else 2, rule=rule)
    return measure(asked, out, workers=workers, **options)


def test_a_comparison_is_one_tidy_table_and_its_bytes_hold(tmp_path: Path) -> None:
    measured = compared(tmp_path / "a", "static", "chunked")
    path = measured.folder / record.SWEEP
    before = path.read_bytes(), path.stat().st_mtime_ns
    again = compared(tmp_path / "a", "static", "chunked")
    assert (again.folder, again.table) == (measured.folder, measured.table)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    other = compared(tmp_path / "b", "static", "chunked")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert other.folder.name == measured.folder.name
    labels = set(measured.table.column("label").to_pylist())
    assert labels == {"static", "chunked"}
    assert set(measured.table.column("slo").to_pylist()) == {"5xP95"}
    assert {path.name for path in record.runs(measured.folder)} == set(measured.table.column("run").to_pylist())


def test_another_rule_scores_the_same_runs(tmp_path: Path) -> None:
    heard = Heard()
    five = compared(tmp_path, "static")
    runs = {path.name for path in record.runs(five.folder)}
    six = compared(tmp_path, "static", rule="6xP95", teller=heard)
    assert {path.name for path in record.runs(six.folder)} == runs
    assert six.folder != five.folder
    assert [step for step in heard.steps if step[0] == "comparison"] == [("comparison", 2, 2)]


def cost(folder: Path, cpu_s: float, requests: int = 100) -> Path:
    """Write the side facts of a run that took so long, on a machine of which it had half a core."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / record.SIDE).write_text(json.dumps({"cpu_s": cpu_s, "wall_s": 2 * cpu_s, "requests": requests}))
    return folder


def test_costs_grow_with_the_rate_and_learn_from_stored_runs(tmp_path: Path) -> None:
    unknown = estimates.Costs()
    assert unknown.cpu_s(replace(TINY, rate_scale=9.0)) > unknown.cpu_s(TINY) > estimates.RUN_S
    assert not estimates.Costs.of(tmp_path)
    sweep.sweep([TINY], tmp_path, workers=1)
    assert estimates.Costs.of(tmp_path).heard("static")
    costs, requests = estimates.Costs(), estimates.requests_in(TINY)
    costs.learn(replace(TINY, rate_scale=1.0), cost(tmp_path / "a", estimates.RUN_S + 1.0))  # 10 ms a request
    costs.learn(replace(TINY, rate_scale=4.0), cost(tmp_path / "b", estimates.RUN_S + 3.0))  # 30 ms
    for rate_scale, request_s in ((0.5, 0.01), (1.0, 0.01), (2.0, 0.02), (4.0, 0.03), (8.0, 0.03)):
        expected = estimates.RUN_S + rate_scale * requests * request_s
        assert costs.cpu_s(replace(TINY, rate_scale=rate_scale)) == pytest.approx(expected)
    elsewhere = costs.cpu_s(replace(TINY, gpus=7))  # in the mean over all runs of the system
    assert elsewhere == pytest.approx(estimates.RUN_S + requests * 4.0 / 200)


def test_what_is_left_of_a_sweep_is_the_cost_of_its_runs(tmp_path: Path) -> None:
    specs = [
        replace(TINY, system=name, rate_scale=x, seed=seed)
        for name in ("static", "chunked")
        for x in (1.0, 4.0)
        for seed in (0, 1)
    ]
    todo = sweep.tasks(specs)
    ahead = estimates.Ahead(todo, estimates.Costs(), later=1000.0, slots=2)
    order = ahead.longest(todo)
    assert {(task.spec.system, task.spec.rate_scale) for task in order[:4]} == {(s.system, s.rate_scale) for s in specs}
    assert sorted(task.spec.folder for task in order) == sorted(task.spec.folder for task in todo)
    per = {"static": 0.01, "chunked": 0.02}
    cpu_s = {t: estimates.RUN_S + per[t.spec.system] * estimates.requests_in(t.spec) for t in todo}
    for number, task in enumerate(order):
        cost(tmp_path / task.spec.folder, cpu_s[task])
        ahead.ended(task, tmp_path)
        left, rest = ahead._summed(), order[number + 1 :]
        if {t.spec.system for t in rest} <= {t.spec.system for t in order[: number + 1]}:
            assert left.cpu_s == pytest.approx(sum(cpu_s[t] for t in rest))
            assert left.share == 0.5  # cost() says so
            assert left.most_s is not None
            assert left.seconds is not None
            assert left.most_s - left.seconds == pytest.approx(1000 * per["chunked"] / (2 * 0.5))  # of the slowest
        else:
            assert left.seconds is None
    assert left.seconds == 0.0


def test_a_sweep_tells_what_is_left_of_it(tmp_path: Path) -> None:
    heard = Heard()
    sweep.sweep(GRID[:2], tmp_path, workers=1, teller=heard, later=math.inf)
    first, *_, last = heard.left
    assert first is not None
    assert first.seconds is None  # no run of it is stored
    assert last is not None
    assert (last.cpu_s, last.seconds, last.most_s) == (0.0, 0.0, math.inf)
    assert 0 < last.share <= 1
