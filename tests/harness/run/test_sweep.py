"""Specs become runs: the same bytes in any order and number of processes, redone only when their sources changed."""

from __future__ import annotations

import json
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
import pytest

from harness.engines.costs import quantities
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import record
from harness.rows.scoring import Run, score
from harness.run import sweep
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup, load_trace
from harness.run.sources import code
from harness.run.spec import Spec, as_dict
from harness.run.teller import Left
from harness.study import receipt
from harness.study.compare import comparison
from harness.study.measure import Measured, measure
from tests.cases import cases

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
    left_open = "preset table pcie_gbps nvlink_gbps net_gbps disk_gbps process_bytes"
    assert [name for name, value in as_dict(spec).items() if value is None] == left_open.split()
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
        ({"preset": "equall"}, 'static has no preset "equall"; did you mean equal?'),
        ({"fields": (("sise", "rate"),)}, 'static has no field "sise"; did you mean size?'),
        ({"fields": (("size", "large"),)}, "field size is 'large'"),
        ({"fields": (("size", 3),)}, "field size is 3"),
        ({"trace_sha256": "00"}, "sha256"),
        ({"models": "llama-3.3-70b"}, "llama-3.3-70b/1 needs 136.3 GiB on each GPU, h100 has 71.3"),
        ({"models": "llama-3.2-1b*30"}, "30"),
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


# ------------------------------------------------------------------ sources


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

    @property
    def ran(self) -> int:
        """The steps that did work, but for planning, which every call does."""
        return sum(done < total for what, done, total in self.steps if what != "planning")


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
