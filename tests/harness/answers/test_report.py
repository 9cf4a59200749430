"""Words of a scored sweep: an estimate as text, the table of systems, and its sentences."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.answers import comparison, notes, table
from harness.answers.comparison import next_command
from harness.answers.verdict import verdict
from harness.rows import record, summaries, tidy
from harness.run.slo import SloTarget
from harness.study.measure import Measured
from harness.study.summary import Summary, summarize
from tests.cases import cases
from tests.harness.study.study_table import counted, met

# ------------------------------------------------------------------ the table of systems


def scored(values: dict[str, dict[float, list[float]]], **named: dict[str, dict[float, list[float]]]) -> pa.Table:
    """Return a tidy table of pooled attainment by label, rate and seed, and of other definitions by name.

    Each seed stands for six windows of 150 requests, which miss alike.
    """
    common = {name: name for name in ("trace", "models", "gpu", "engine", "scaling", "slo", "tier", "fidelity")}
    rows = []
    for definition, of in {"both": values, **named}.items():
        for label, rates in of.items():
            for rate, seeds in rates.items():
                for seed, value in enumerate(value for value in seeds for _ in range(6)):
                    run = {"run": f"{label}-{rate}-{seed}", "label": label, "rate_scale": rate, "seed": seed}
                    about = common | run | {"system": label, "gpus": 2, "over": "pooled", "n": 150}
                    told = {"definition": definition, "value": value}
                    rows.append(about | told | counted(definition, value, about))
                    if definition == "both":
                        rows.append(about | {"definition": "offered_rps", "value": 2 * rate})
    return tabled(rows)


def tabled(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=record.plain(tidy.TABLE_SCHEMA)).cast(tidy.TABLE_SCHEMA)


def shown(of: pa.Table, *labels: str, controls: tuple[str, ...] = ()) -> Summary:
    return summarize(of, labels, "both", 0.99, controls=controls)


def curve(knee: float, slope: float = 4.0, seeds: int = 3) -> dict[float, list[float]]:
    """Return attainment by rate scale of a system that crosses 99 % at the knee: 2 x that in requests per second."""
    return {x: [met(x, knee, slope)] * seeds for x in (1.0, 2.0, 4.0, 8.0, 16.0)}


LESS = "attainment of a minus that of b, in points by req/s:"
APART = {"a": curve(10.0), "b": curve(2.5)}


def test_the_shown_rate_is_the_highest_that_a_contestant_still_meets() -> None:
    of = scored({"a": {1.0: [1.0], 2.0: [0.995], 4.0: [0.2]}, "b": {1.0: [1.0], 2.0: [0.9], 4.0: [0.1]}})
    assert shown(of, "a", "b").rate_scale == 2.0
    assert shown(of, "a", "b").offered_rps == 4.0
    assert shown(of, "a", "b", controls=("a",)).rate_scale == 1.0
    assert shown(scored({"a": {2.0: [0.1], 1.0: [0.2]}}), "a").rate_scale == 1.0  # none meets: the lowest


def test_the_best_of_a_column_is_bold_on_a_terminal_only_and_controls_never_win() -> None:
    met = {"a": 0.9, "b": 0.8, "c": 1.0}
    view = shown(scored({name: {1.0: [share] * 2} for name, share in met.items()}), *met, controls=("c",))
    bold = "\n".join(comparison.terminal(view, bold=True))
    assert bold.count(table.BOLD) == 1
    assert f"{table.BOLD}90.0" in bold
    plain = "\n".join(comparison.terminal(view, bold=False))
    assert bold.replace(table.BOLD, "").replace(table.PLAIN, "") == plain
    assert "**90.0 [" in "\n".join(comparison.whole(view).markdown())
    assert r"\textbf{90.0 [" in "\n".join(comparison.narrow(view).latex())


def test_a_system_with_gpus_of_its_own_is_shown_and_contends_for_nothing() -> None:
    of = scored({**APART, "each": curve(40.0)})
    gpus = pc.if_else(pc.equal(of["label"].cast(pa.string()), "each"), 8, of["gpus"]).cast(of["gpus"].type)
    view = shown(of.set_column(of.schema.get_field_index("gpus"), "gpus", gpus), "each", "a", "b")
    assert [(system.label, system.judged) for system in view.systems] == [("each", False), ("a", True), ("b", True)]
    assert view.rate_scale == shown(scored(APART), "a", "b").rate_scale
    assert view.gpus == 2
    assert view.name(view.systems[0]) == "each (8 GPUs)"
    assert shown(of, "each", "a", "b").systems[0].judged


def test_intervals_give_way_where_there_is_little_room() -> None:
    of = scored({"a": {1.0: [0.9, 0.8]}}, ttft_p95_s={"a": {1.0: [0.1, 0.2]}})
    wide, tight = (comparison.terminal(shown(of, "a"), bold=False, room=room) for room in (200, 40))
    assert wide[-1].count("[") == 2
    assert tight[-1].count("[") == 1


@cases(
    ("values", "says"),
    [
        (APART, "a keeps 99 % up to 20.0 req/s (pooled); that is 4.00x [3.38, 4.74] the rate of b"),
        (
            {"a": curve(10.0), "b": curve(8.5)},
            "a keeps 99 % up to 20.0 req/s (pooled); that is 1.18x [1.00, 1.40] the rate of b, not decided",
        ),
        (
            {"a": curve(10.0), "b": curve(9.7), "c": curve(3.0)},
            ("a keeps 99 % up to 20.0 req/s (pooled), b within 25 % of it; that is 3.33x [2.81, 4.01] the rate of c"),
        ),
        (  # the first that is named is the subject, also where others serve more
            {"a": curve(3.0), "b": curve(9.7), "c": curve(9.0), "d": curve(1.2)},
            (
                "a keeps 99 % up to 6.00 req/s (pooled); that is 2.50x [2.08, 2.96] the rate of d; "
                "b keeps it up to 19.4 req/s (3.23x [2.73, 3.88] that of a)"
            ),
        ),
        (
            {"a": curve(100.0), "b": curve(4.0)},
            ("a keeps 99 % at all rates that ran, up to 32.0 req/s (pooled); that is >4.00x [3.64, inf] the rate of b"),
        ),
        (
            {"a": curve(100.0), "b": curve(80.0)},
            (
                f"a keeps 99 % at all rates that ran, up to 32.0 req/s (pooled); both hold 99 % at 32 req/s; {LESS} "
                "0.00 [-0.08, 0.08] at 2.00, 0.00 [-0.08, 0.08] at 8.00, "
                "0.00 [-0.08, 0.08] at 32.0 (equal within 0.5 points)"
            ),
        ),
        (
            {"a": curve(0.5), "b": curve(0.4)},
            (
                f"a keeps 99 % at no rate that ran, from 2.00 req/s on; neither holds 99 % at 2 req/s; {LESS} "
                "+23.06 [21.11, 25.01] at 2.00, 0.00 [-0.08, 0.08] at 8.00, "
                "0.00 [-0.08, 0.08] at 32.0 (ahead)"
            ),
        ),
        (  # the flat curve is worse below the level and better above
            {"a": curve(4.0, 0.5), "b": curve(4.0)},
            (
                f"a keeps 99 % up to 8.00 req/s (pooled); a ratio of rates at 99 % does not decide; {LESS} "
                "-0.50 [-0.78, -0.21] at 2.00, 0.00 [-0.08, 0.08] at 8.00, "
                "+48.00 [45.19, 50.81] at 32.0 (ahead at one rate and behind at another)"
            ),
        ),
        (
            {"a": {1.0: [0.9, 0.8, 0.85]}, "b": {1.0: [0.7, 0.6, 0.65]}},
            "a meets 85.0 % of SLOs at 2.00 req/s (pooled), +20.00 [18.18, 21.82] points more than b",
        ),
        (
            {"a": {1.0: [0.7, 0.6, 0.65]}, "b": {1.0: [0.9, 0.8, 0.85]}},
            "a meets 65.0 % of SLOs at 2.00 req/s (pooled); b +20.00 [18.18, 21.82] points more",
        ),
        (
            {"a": {1.0: [0.9, 0.6]}, "b": {1.0: [0.7, 0.7]}},
            "a meets 75.0 % of SLOs at 2.00 req/s (pooled), +5.00 [-4.95, 14.95] points more than b (not decided)",
        ),
        ({"a": {1.0: [0.9]}, "b": {1.0: [0.9]}}, "a meets 90.0 % of SLOs at 2.00 req/s (pooled), as b does"),
        ({"a": curve(8.0)}, "a keeps 99 % up to 16.0 req/s (pooled)"),
    ],
)
def test_the_verdict_claims_no_more_than_the_interval(values: dict[str, dict[float, list[float]]], says: str) -> None:
    of = scored(values)
    assert verdict(of, shown(of, *values), "both") == says


def by_model(shares: dict[str, dict[str, dict[float, float]]]) -> pa.Table:
    """Return a tidy table of labels whose models have equal traffic, from attainment by label, model and rate."""
    pooled = {
        label: {x: [sum(of[x] for of in models.values()) / len(models)] * 3 for x in next(iter(models.values()))}
        for label, models in shares.items()
    }
    every = scored(pooled).to_pylist()
    for row in [row for row in every if row["definition"] == "both"]:
        for model, of in shares[row["label"]].items():
            about = row | {"over": "model", "model": model, "value": of[row["rate_scale"]], "n": 75}
            every.append(about | counted("both", about["value"], about))
    return tabled(every)


XS = (1.0, 2.0, 4.0, 8.0, 16.0)


def test_a_rate_is_called_pooled_unless_each_model_holds_the_level_there() -> None:
    alike = {model: {x: met(x, 10.0) for x in XS} for model in "xy"}
    apart = {"x": {x: met(x, 10.0) for x in XS}, "y": {x: met(x, 3.0) for x in XS}}
    of = by_model({"a": alike, "b": apart})
    assert str(verdict(of, shown(of, "a", "b"), "both")).startswith("a keeps 99 % up to 20.0 req/s; that is 2.8")
    told = str(verdict(of, shown(of, "b", "a"), "both"))
    assert told.startswith("b keeps 99 % up to 7.12 req/s (pooled; worst model 6.00); a keeps it up to 20.0 req/s (2.8")
    head, row, *_ = comparison.records(shown(of, "b")).records()[0], comparison.terminal(shown(of, "b"), bold=False)[-1]
    assert head["worst_rate_rps"] == pytest.approx(6.0)
    assert " 6.00 " in row


def test_another_level_that_turns_the_order_is_said() -> None:
    """b misses 2 % at any rate, and a steep curve later than a's: behind at 99 %, ahead at 97 %."""
    a, b = curve(4.0, 8.0, seeds=6), {x: [0.985 if x < 16 else 0.95] * 6 for x in XS}
    of = scored({"a": a, "b": b})
    told = str(verdict(of, shown(of, "a", "b"), "both"))
    assert "keeps 99 % up to 8.00 req/s" in told
    at_90 = shown(of, "a", "b").systems[1].values["rate_90"]
    assert at_90 is not None
    assert at_90.sign == ">"  # b never fell so low in what ran
    assert "; at 97 % b keeps it up to " in told
    assert "at 90 %" not in told  # which b did not cross: how far it leads is not known


def test_rates_at_other_levels_are_those_of_the_seeds_that_ran_so_far() -> None:
    """Seeds that came later ran near 99 % alone."""
    of = scored({"a": {1.0: [0.999] * 3, 2.0: [0.985] * 3, 4.0: [0.92] * 3, 8.0: [0.8] * 3}})
    later = pc.and_(pc.greater_equal(of["seed"], 9), pc.greater(of["rate_scale"], 2.0))
    few = of.filter(pc.invert(later))
    whole, cut = (shown(table, "a").systems[0].values for table in (of, few))
    assert (cut["rate_99"] and cut["rate_99"].n, cut["rate_90"] and cut["rate_90"].n) == (18, 9)
    assert cut["rate_90"] is not None
    assert whole["rate_90"] is not None
    assert cut["rate_90"].sign == "="
    assert cut["rate_90"].mean == pytest.approx(whole["rate_90"].mean)


def test_the_level_is_the_one_that_is_asked_for() -> None:
    of = scored({"a": curve(8.0), "b": curve(2.0)})
    view = summarize(of, ["a", "b"], "both", 0.95)
    a, _ = comparison.records(view).records()
    assert a["rate_95_rps"] == pytest.approx(2 * 8 * 5**0.25, rel=0.01)
    assert {"rate_99_rps", "rate_97_rps", "rate_90_rps"} < {*a}
    assert str(verdict(of, view, "both")).startswith("a keeps 95 % up to 23.")


def test_a_system_that_serves_some_model_nothing_has_a_mark() -> None:
    """Of ten models one is left out by a; b falls to 0 only where it is overloaded."""
    served = {f"m{k}": {x: met(x, 10.0) for x in XS} for k in range(9)}
    rare = {"a": dict.fromkeys(XS, 0.0), "b": {x: 1.0 if x < 8 else 0.0 for x in XS}}
    of = by_model({label: {**served, "rare": shares} for label, shares in rare.items()})
    view = shown(of, "a", "b")
    lines = comparison.terminal(view, bold=False)
    assert [line.split()[0] for line in lines[-3:-1]] == ["a†", "b"]
    assert lines[-1] == "† a: 1 of 10 models at 0 % at the lowest rate that ran"
    assert str(verdict(of, view, "both")).startswith("a (1 of 10 models at 0 %) keeps 99 % at no rate that ran")
    assert any(line.startswith("a† & ") for line in comparison.narrow(view).latex())
    assert [row["unserved"] for row in comparison.records(view).records()] == ["1 of 10 models at 0 %", ""]


def test_few_windows_have_no_interval() -> None:
    of = scored(APART)
    of = of.filter(pc.less(of["seed"], 7))
    text = verdict(of, shown(of, "a", "b"), "both")
    says = "a keeps 99 % up to 20.0 req/s (pooled); that is 4.00x the rate of b, not decided"
    assert text == f"{says}, 7 windows, and 8 name a side"


def test_what_fails_and_dips_stands_beside_the_crossing() -> None:
    """a dips at the lowest rate and holds up to 4; b falls without a dip."""
    dips = {1.0: [0.984], 2.0: [0.997], 4.0: [0.995], 8.0: [0.5]}
    of = scored({"a": dips, "b": {1.0: [0.999], 2.0: [0.99], 4.0: [0.9], 8.0: [0.1]}})
    view = shown(of, "a", "b")
    head = " ".join(comparison.terminal(view, bold=False)[1].split())
    assert "pooled 97 % 90 % P95" in head
    a, b = comparison.records(view).records()
    fitted = (0.016 * 0.003 * 0.005) ** (1 / 3)  # misses up to 4: by their logarithms
    assert a["rate_99_rps"] == pytest.approx(2 * 4 * 2 ** (math.log(0.01 / fitted) / math.log(0.5 / fitted)))
    assert (a["rate_99_rps_sign"], a["fails_rps"], a["flat"]) == ("=", 2.0, False)
    assert a["dip_pct"] == pytest.approx(0.8)
    assert b["rate_99_rps"] == pytest.approx(4.0)  # 1 % are missed at rate scale 2
    assert b["slope"] == pytest.approx(math.log(0.1 / 0.001) / math.log(4))
    assert (b["fails_rps"], b["dip_pct"]) == (8.0, None)
    smooth = shown(scored({"b": {1.0: [1.0], 2.0: [0.98]}}), "b")
    assert "dip" not in comparison.records(smooth).records()[0]  # no column without a dip


def test_the_verdict_leaves_controls_out() -> None:
    of = scored(APART)
    assert verdict(of, shown(of, "a", "b", controls=("b",)), "both") == "a keeps 99 % up to 20.0 req/s (pooled)"


def test_why_names_the_cause_of_most_misses() -> None:
    causes = {"missed_both_kv": {"b": {1.0: [0.7, 0.5]}}, "missed_both_load": {"b": {1.0: [0.3, 0.5]}}}
    of = scored({"a": {1.0: [1.0, 1.0]}, "b": {1.0: [0.5, 0.5]}}, **causes)
    assert notes.why(of, shown(of, "a", "b"), "both") == "Why requests miss: b 60 % KV wait"
    assert notes.why(of, shown(of, "a"), "both") == ""


def test_caps_that_bind_are_told_with_the_rate_and_how_to_lift_them() -> None:
    rates = {"a": {1.0: [1.0] * 2, 2.0: [1.0] * 2}, "b": {1.0: [1.0] * 2, 2.0: [1.0] * 2}}
    cap = {"a": {1.0: [0.02, 0.04], 2.0: [0.5, 0.5]}, "b": {1.0: [0.0, 0.02], 2.0: [0.1, 0.3]}}
    chunk = {"a": {1.0: [0.0, 0.0], 2.0: [0.01, 0.01]}}
    values = {"batch_cap": 256, "chunk_tokens": 2048, "prefill_tokens": 16384}
    says = "batch_cap = 256 bound more than 1 % of steps: a from 2.00 req/s (3.0 %), b from 4.00 req/s (20.0 %)"
    binding = summaries.bound(scored(rates, cap_bound=cap, chunk_bound=chunk))
    assert notes.caps(binding, values) == [f"{says}; --set batch_cap=512"]
    assert summaries.bound(scored(rates)) == []


def test_the_aa_line_says_whether_0_is_covered() -> None:
    of = scored({"a": {1.0: [0.9, 0.8, 0.85]}, "x": {1.0: [0.85, 0.86, 0.84]}, "y": {1.0: [0.7, 0.6, 0.65]}})
    assert "covers 0, as it should" in notes.same(of, "a", "x", 1.0, "both")
    assert "does not cover 0" in notes.same(of, "a", "y", 1.0, "both")


def marked(of: pa.Table, column: str, label: str, reason: str, rates: tuple[float, ...] = (1.0, 2.0, 4.0)) -> pa.Table:
    """Return the table with a reason in a column of a label's runs at some rates."""
    rows = of.to_pylist()
    for row in rows:
        if row["label"] == label and row["rate_scale"] in rates:
            row[column] = reason
    return tabled(rows)


NO_ROOM = {"a": {1.0: [1.0] * 3, 2.0: [0.5] * 3}, "b": {1.0: [0.0] * 3, 2.0: [0.0] * 3}}


@cases("rates", [(1.0, 2.0), (2.0,)])
def test_nothing_is_said_of_a_system_that_did_not_run(rates: tuple[float, ...]) -> None:
    """Of b no run, or not one of its rates, had room: no sentence, no value in any export, a reason in its row."""
    of = marked(scored(NO_ROOM), "infeasible", "b", "1.0 GiB short on GPU 8", rates)
    view = shown(of, "a", "b")
    assert str(verdict(of, view, "both")).startswith("a keeps 99 % up to 2.")
    told = str(verdict(of, shown(of, "b", "a"), "both"))  # who asks is told so
    assert told.startswith("b does not fit; a keeps 99 % up to 2.")
    assert "b " not in notes.why(of, view, "both")
    a, b = comparison.records(view).records()
    assert (a["infeasible"], b["infeasible"]) == (False, True)
    assert {b[key] for key in ("both_pct", "mean_pct", "rate_99_rps", "rate_99_rps_low", "fails_rps")} == {None}
    lacks = "does not fit: 1.0 GiB short on GPU 8 (fits with --gpus 9)"
    lines = comparison.terminal(view, bold=False, unfit={"b": lacks})
    assert lines[-1] == f"b  {lacks}"
    assert len(lines) == 4  # two heads, a, and why not b
    assert any(line.startswith(r"b (does not fit) & - & ") for line in comparison.narrow(view).latex())
    alone = shown(of.filter(pc.equal(of["label"].cast(pa.string()), "b")), "b")
    assert comparison.terminal(alone, bold=False, unfit={"b": "does not fit"}) == ["b  does not fit"]


def test_an_invalid_run_gives_no_sentence_and_wins_no_column() -> None:
    of = marked(scored(APART), "invalid", "a", "other processes took 0.5 cores, the limit 0.2")
    view = shown(of, "a", "b")
    assert verdict(of, view, "both") == "a has invalid runs; b keeps 99 % up to 5.00 req/s (pooled)"
    assert "a (invalid)" in "\n".join(comparison.terminal(view, bold=True))
    assert table.BOLD not in "\n".join(comparison.terminal(view, bold=True))


@cases(
    ("why", "says"),
    [
        (
            "2 of 4 runs: other processes took 0.61 cores, the limit 0.2",
            "end what else runs on this machine, then bench compare --systems a -o {again}",
        ),
        (
            "lag P99 is 9.1 ms, the limit 5 ms",
            "a rate at which the client keeps up: bench compare --systems a --rate-scale 0.125 -o {again}",
        ),
        ("the load of other processes was not measured", "let the client read the load of this machine (/proc), then "),
    ],
)
def test_what_makes_runs_valid_is_asked_next(why: str, says: str, tmp_path: Path) -> None:
    """A stored run stays as it is, so the next ones go elsewhere."""
    of = marked(scored(APART), "invalid", "a", why)
    measured = SimpleNamespace(table=of, xs=(0.25, 0.5), folder=tmp_path / "x")
    words = ["compare", "--systems", "a", "--rate-scale", "0.25,0.5"] if "lag" in why else ["compare", "--systems", "a"]
    command = next_command(cast("Measured", measured), shown(of, "a", "b"), "both", words)
    assert command.startswith(says.format(again=tmp_path / "again"))


def test_the_next_command_explains_the_asker_s_system_by_folder_and_name(tmp_path: Path) -> None:
    """a holds 99 % up to 20 req/s and b up to 5: the table is at 16 req/s."""
    of = scored(APART)
    reference, target = SimpleNamespace(scaling="rotate"), SimpleNamespace(definition="both")
    measured = SimpleNamespace(table=of, xs=XS, folder=tmp_path / "of it", reference=reference, target=target)
    for subject in "ab":
        view = summarize(of, ["a", "b"], "both", 0.99, subject=subject)
        words = shlex.split(next_command(cast("Measured", measured), view, "both", ["compare"]))
        assert words == ["bench", "explain", str(tmp_path / "of it"), "--misses", "--system", subject]
        assert str(verdict(of, view, "both")).startswith(f"{subject} keeps 99 % up to ")


def test_a_curve_whose_misses_hardly_grow_is_flat() -> None:
    of = scored({"a": curve(4.0, 1.0), "b": curve(4.0)})
    view = shown(of, "a", "b")
    assert [system.flat for system in view.systems] == [True, False]
    a, b = comparison.records(view).records()
    assert (a["flat"], b["flat"]) == (True, False)
    assert (a["slope"], b["slope"]) == (pytest.approx(1.0), pytest.approx(4.0))


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=2, max_size=5))
def test_no_export_has_a_rate_below_0(seeds: list[list[float]]) -> None:
    of = scored({"a": {2.0**k: [seed[k] for seed in seeds] for k in range(3)}})
    view = shown(of, "a")
    records = comparison.records(view)
    for row in (*records.records(), *json.loads(records.json("systems", {}))["systems"]):
        assert all(value is None or value >= 0 for key, value in row.items() if key.endswith(("_rps", "_rps_low")))
    (line,) = csv.DictReader(io.StringIO(records.csv()))
    assert not any(value.startswith("-") for key, value in line.items() if not key.startswith("slope"))
    screen, page, paper = comparison.terminal(view, bold=False), comparison.whole(view), comparison.narrow(view)
    assert not any("[-" in line for line in (*screen, *page.markdown(), *paper.latex()))


def test_a_paper_has_few_columns_and_bold_only_where_intervals_lie_apart() -> None:
    near = shown(scored({"a": {1.0: [0.90, 0.80, 0.95]}, "b": {1.0: [0.89, 0.81, 0.94]}}), "a", "b")
    far = shown(scored({"a": {1.0: [0.99] * 3}, "b": {1.0: [0.30] * 3}}), "a", "b")
    (share,) = (c for c in near.columns if c.key == "both")
    assert near.best(share) == {"a"}
    assert near.decided(share) == set()
    assert far.decided(share) == {"a"}
    for view, bold in ((near, False), (far, True)):
        lines = list(comparison.narrow(view).latex())
        heads = next(line for line in lines if line.startswith("system & "))
        assert heads.count(" & ") < comparison.MOST_COLUMNS
        assert (r"\textbf{" in "\n".join(lines)) is bold
        assert ("**" in "\n".join(comparison.whole(view).markdown())) is bold


def test_a_base_taken_past_the_knee_is_warned_of() -> None:
    for ttft_s, rule, warned in [(70.0, "5xP95", True), (50.0, "5xP95", False), (70.0, "absolute:ttft=70", False)]:
        measured = SimpleNamespace(target=SloTarget(rule, {"a": (1.0, 0.1), "b": (ttft_s, 0.1)}))
        warnings = list(comparison._loose(cast("Measured", measured)))
        assert [line.startswith("The SLO lets b wait 70 s for") for line in warnings] == [True] * warned
