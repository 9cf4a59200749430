"""Constants of the machine scale where they act, 1 changes nothing, and a planted order turns where it must."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.engines.costs.constants import CONSTANTS
from harness.policy.types import UserError
from harness.rows import crossings, record
from harness.rows.estimate import Estimate
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec
from harness.study import sensitivity as sensitivity_text
from harness.study.bases import slo_target
from harness.study.constants import MEANS, Constant, Setting, constants, settings
from harness.study.sensitivity import Lead, Leads, read
from harness.study.varying import lead_of
from plots import fig_tornado
from tests.bench import bench, ok
from tests.harness.run.test_sweep import files
from tests.harness.study.measuring import DROPS
from tests.harness.study.study_table import point, table

ONE_RATE = "sensitivity --trace sample --models llama-3.2-1b*2 --seeds 1 --rate-scale 1 --no-plot".split()

# Loads the weights for each request and evicts them after it; a request comes when the last one has ended.
LOADS = '''
"""Swaps for every request."""

from dataclasses import dataclass

from harness.policy.actions import Admit, Evict, Load, Run
from harness.policy.events import Arrived, Done, Finished
from harness.policy.types import Batch, Cluster, Inst


@dataclass
class Loads:
    cluster: Cluster
    presets = {}
    hears = frozenset({Arrived, Finished})
    uses = frozenset({"Load", "Load.way:pool", "Evict", "Run", "Admit"})
    options = {"kv": "paged"}

    def on(self, event, view):
        if isinstance(event, Arrived):
            batch = Batch(Inst(event.request.model, (0,)))
            yield Load(batch.inst, "pool")
            yield Run(batch)
            yield Admit(event.request.id, batch)
        if isinstance(event, Finished) and event.batch is not None:
            yield Evict(event.batch.inst)
'''
HALF = DROPS % 0.5  # every second request


# ------------------------------------------------------------------ what stays


@pytest.mark.parametrize("rule", ["5xP95", "5xsolo"])
def test_the_slo_is_that_of_the_machine_as_it_is(tmp_path: Path, rule: str) -> None:
    spec = Spec("static", trace="sample", models="llama-3.2-1b*2", slo="")
    double = replace(spec, scaled=tuple((name, 2.0) for name in CONSTANTS))
    assert slo_target(double, rule, tmp_path) == slo_target(spec, rule, tmp_path)
    each = [np.arange(2, dtype=np.int32), np.array([8, 512], np.int32), np.array([4, 64], np.int32)]
    for ours, theirs in zip(Setup(resolve(double)).solo_s(*each), Setup(resolve(spec)).solo_s(*each), strict=True):
        assert ours.tolist() == theirs.tolist()


# ------------------------------------------------------------------ a planted order


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("planted")
    for name, source in (("loads", LOADS), ("half", HALF)):
        (folder / f"{name}.py").write_text(source)
    systems = f"{folder / 'half.py'},{folder / 'loads.py'}"
    trace = "closed+clients=1+requests=9+prompt=64+output=4+think_s=5"
    words = ["--systems", systems, "--trace", trace, "--models", "llama-3.2-1b", "--gpus", "1", "--seeds", "9",
             "--rate-scale", "1", "--slo", "absolute:ttft=1,tpot=1", "-o", str(folder / "out")]  # fmt: skip
    return folder / "out", words


@pytest.mark.full
def test_the_constant_that_must_turn_an_order_turns_it(planted: tuple[Path, list[str]]) -> None:
    """A swap of 0.7 s and a copy of 46 ms meets 1 s for every request, and twice that for none. The system that drops
    half of them meets it for the others.
    """
    out, words = planted
    output = ok("sensitivity", *words, "--constants", "swap,pcie")
    stored = read(next(out.glob("closed-*")))
    assert stored is not None
    leads = {(row.constant.name, row.setting): row.lead for row in stored.rows if row.lead}
    assert (stored.first, stored.second) == ("loads", "half")
    assert stored.base.mean == 0.5  # 8 requests in a window, all of 4
    assert {key: lead.mean for key, lead in leads.items()} == {
        ("pcie", "x 0.5"): 0.5,
        ("pcie", "x 2"): 0.5,
        ("swap", "x 0.5"): 0.5,
        ("swap", "x 2"): -0.5,
    }
    assert [stored.order(lead) for lead in leads.values()] == [1, 1, 1, -1]
    assert [constant.name for constant in stored.ranked][:2] == ["swap", "pcie"]
    last = sensitivity_text.sentence(stored)
    assert last == (
        "Sensitivity (pcie, swap, one at a time): the lead of loads over half at rate scale 1, +50.0 [+30.8, +69.2] "
        "points, is reversed by swap x 2 (-50.0 [-69.2, -30.8]). Largest swing: swap, 100.0 points."
    )
    lines = output.splitlines()
    assert last in lines
    assert any(line.split()[-2:] == ["-30.8]", "turned"] for line in lines)
    assert "net: not varied, not asked for" in lines
    assert any(line.startswith("swap: fixed seconds of a load") and "pool 0.7 s (" in line for line in lines)
    assert lines[-1].count("tornado-") == 2
    output = ok("compare", *words)
    assert last in output.splitlines()
    assert ok("plot", next(out.glob("closed-*")), "--figure", "compare", "-o", out / "again").count("again") == 3
    both = bench("plot", next(out.glob("closed-*")), "-o", out / "again")
    assert both.exit_code == 2
    assert both.stderr.splitlines()[-1].partition("; ")[2] == "name it by --figure compare or tornado"


def test_a_second_time_nothing_is_redone(planted: tuple[Path, list[str]]) -> None:
    out, words = planted
    args = ("sensitivity", *words, "--constants", "swap,pcie", "--no-plot")
    first = bench(*args)
    before, stamps = files(out), {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    second = bench(*args)
    assert first.stdout == second.stdout
    assert second.stderr == ""
    assert files(out) == before
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps


def test_as_it_is_is_the_comparison(planted: tuple[Path, list[str]]) -> None:
    out, words = planted
    ok("sensitivity", *words, "--constants", "pcie", "--no-plot")
    folder = next(out.glob("closed-*"))
    swept, stored = pq.read_table(folder / record.SWEEP), read(folder)
    assert stored is not None
    assert stored.base == crossings.difference(swept, "rate_scale", ("loads", "half"), "both", 1.0)


def test_what_is_kept_of_other_runs_is_not_said(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    out, words = planted
    ok("sensitivity", *words, "--constants", "pcie", "--no-plot")
    folder = next(out.glob("closed-*"))
    assert sensitivity_text.sentence_of(folder)
    table = pq.read_table(folder / record.SWEEP)
    for name in (record.SWEEP, record.SENSITIVITY):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    record.write_table(tmp_path / record.SWEEP, table, {"key": "another"})
    assert sensitivity_text.sentence_of(tmp_path) == ""
    assert sensitivity_text.sentence_of(tmp_path / "nowhere") == ""


def test_a_lead_over_several_rates_is_of_an_earlier_release(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    out, words = planted
    ok("sensitivity", *words, "--constants", "pcie", "--no-plot")
    folder = next(out.glob("closed-*"))
    (tmp_path / record.SWEEP).write_bytes((folder / record.SWEEP).read_bytes())
    about, leads = record.footer(folder / record.SENSITIVITY), pq.read_table(folder / record.SENSITIVITY)
    record.write_table(tmp_path / record.SENSITIVITY, leads, dict(about))
    assert read(tmp_path) is not None
    record.write_table(tmp_path / record.SENSITIVITY, leads, {**about, "rates": [1.0, 2.0]})
    assert read(tmp_path) is None
    with pytest.raises(UserError, match="a lead over several rates"):
        fig_tornado.read(tmp_path)


def test_what_does_not_fit_is_said_and_not_run(tmp_path: Path) -> None:
    args = ("sensitivity", "--systems", "static,chunked", "--trace", "sample", "--models", "llama-3.2-1b*2", "--seeds",
            "2", "--rate-scale", "1", "--no-plot", "--constants", "process", "-o", tmp_path)  # fmt: skip
    output = ok(*args, "--set", f"process_bytes={36 << 30}")
    assert re_line(output, "process x 2: llama-3.2-1b/1 needs 74.3 GiB")
    assert [line.split()[:5] for line in output.splitlines()][3] == ["process", "36.00", "GiB", "x", "0.5"]
    assert "process x 0.5" not in output  # it ran


def re_line(output: str, start: str) -> bool:
    return any(line.startswith(start) for line in output.splitlines())


def by_rate(attained: dict[str, float | None]) -> Any:
    """Return a panel's table at one rate: attainment by system; None where it has no room."""
    rows = [
        point("rates", 2.0, label, seed, share or 0.0, infeasible="no room" if share is None else None)
        for label, share in attained.items()
        for seed in range(2)
    ]
    return table(rows)


def test_a_lead_at_one_rate_is_a_difference_paired_by_block() -> None:
    lead = lead_of(by_rate({"a": 0.9, "b": 0.4}), ("a", "b"), "ttft")
    assert lead is not None
    assert (lead.mean, lead.n) == pytest.approx((0.5, 8))  # two windows of four blocks
    assert lead.low == pytest.approx(0.5 - 2.3646 * math.sqrt(0.5 / 1800), rel=1e-4)  # t of 7, of 900 misses more


def test_what_has_no_room_meets_nothing() -> None:
    def lead(ours: float | None, theirs: float | None) -> Estimate | None:
        return lead_of(by_rate({"a": ours, "b": theirs}), ("a", "b"), "ttft")

    assert lead(0.9, None) == Estimate(0.9, None, None, 1)
    assert lead(None, None) == Estimate(0.0, None, None, 1)


# ------------------------------------------------------------------ which are varied


def test_every_constant_is_varied_or_said_not_to_be() -> None:
    specs = [Spec("static"), Spec("prism")]
    changes, left = settings(specs)
    assert {change.constant for change in changes} | set(left) == set(MEANS)
    assert "net" in left
    tried = {name: [change.setting for change in changes if change.constant == name] for name in MEANS}
    assert set(tried["reserve"]) == {"x 0.5", "x 2"}
    assert set(tried["passes"]) == {"x 0.5", "x 1.5"}
    assert tried["decode_fill"] == ["x 0.875", "x 1.125", "x 1.25"]
    assert "beside others" in settings([replace(spec, sharing="turns") for spec in specs])[1]["passes"]
    assert "neither system has elastic KV memory" in settings([Spec("static"), Spec("dedicated")])[1]["reserve"]
    for constant in constants(specs):
        assert constant.means
        assert constant.value
        assert constant.source, constant.name
    with pytest.raises(UserError, match='there is no constant "swop"; did you mean swap'):
        settings(specs, ["swop"])


def test_a_change_multiplies_the_factor_that_a_spec_has() -> None:
    half = Setting("swap", "x 0.5", {"scaled": (("swap", 0.5),)})
    assert half.fields(Spec("static", scaled=(("swap", 2.0), ("disk", 3.0)))) == {"scaled": {"swap": 1.0, "disk": 3.0}}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--systems", "static,chunked", "--constants", "swop"], "did you mean swap"),
        (["--systems", "static"], "an order takes two systems"),
    ],
)
def test_wrong_words_are_one_line(tmp_path: Path, more: list[str], says: str) -> None:
    result = bench(*ONE_RATE, "-o", tmp_path, *more)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") <= 2


def test_a_dry_run_runs_nothing(tmp_path: Path) -> None:
    args = ("--systems", "static,prism", "--rate-scale", "2", "--seeds", "3", "-o", tmp_path)
    output = ok("sensitivity", *args, "--dry-run")
    changes = len(settings([Spec("static"), Spec("prism")])[0])
    assert f"then {changes} changes, each with the runs of two systems at one rate" in output
    assert re.search(r"^6 runs, about \d+ s on one core", output, re.MULTILINE)
    assert re_line(output, "net ")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ words and figure


def outcome(base: Estimate, **leads: tuple[Estimate, Estimate]) -> Leads:
    rows = [
        Lead(Constant(name, "m", "v", "s"), setting, lead)
        for name, pair in leads.items()
        for setting, lead in zip(("x 0.5", "x 2"), pair, strict=True)
    ]
    return Leads("a", "b", "both", 2.0, base, tuple(rows))


def lead(mean: float, half: float = 0.01) -> Estimate:
    return Estimate(mean, mean - half, mean + half, 3)


def test_alead_of_that_chance_explains_has_no_order() -> None:
    told = outcome(lead(0.1), swap=(lead(0.1), lead(0.005)), step=(lead(-0.02), lead(0.2)))
    assert [told.order(row.lead) for row in told.rows if row.lead] == [1, 0, -1, 1]
    assert [constant.name for constant in told.ranked] == ["step", "swap"]
    assert told.swing("step") == pytest.approx(0.22)
    text = sensitivity_text.sentence(told)
    assert "is reversed by step x 0.5 (-2.0 [-3.0, -1.0]); it is not significant with swap x 2 (+0.5 " in text
    assert "Undecided" not in text
    unknown = sensitivity_text.sentence(outcome(lead(0.1), passes=(lead(0.1), lead(0.005))))
    assert unknown.endswith("Undecided (?): the order turns with passes, known on one GPU alone.")
    none = outcome(lead(0.001), swap=(lead(0.001), lead(0.001)))
    assert "is never significant" in sensitivity_text.sentence(none)
    alone = outcome(Estimate(0.1, None, None, 1), swap=(Estimate(-0.1, None, None, 1), Estimate(0.1, None, None, 1)))
    assert [alone.order(row.lead) for row in alone.rows if row.lead] == [0, 0]  # one seed tells nothing
