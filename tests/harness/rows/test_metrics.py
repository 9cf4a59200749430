"""Worked numbers, and laws that every definition keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rows import by_window, requests, scoring, summaries, tally, tidy
from harness.rows.definitions import DEFINITIONS
from harness.rows.record import SCHEMA, STATES, WAITS, write_table
from harness.rows.requests import Rows, in_window
from harness.rows.requests import rows as arrays
from tests.cases import cases

INF = math.inf
ByModel = Mapping[str, tuple[float, float]]


def table(*requests: dict[str, Any]) -> pa.Table:
    """Return rows from a few facts each, in seconds: arrival, first, done, made, tokens; the rest has defaults."""
    lines = []
    for i, r in enumerate(requests):
        arrival, tokens = r.get("arrival", 0.0), r.get("tokens")
        first = r.get("first", arrival + tokens[0] if tokens else None)
        done = arrival + tokens[-1] if tokens else r.get("done")
        made = r.get("made", 0 if tokens is None else len(tokens))
        line = {
            "id": i,
            "model": r.get("model", "a"),
            "prompt_tokens": 10,
            "output_tokens": r.get("asked", max(made, 1)),
            "made_tokens": made,
            "arrival_ns": ns(arrival),
            "admit_ns": None,
            "first_ns": ns(first),
            "done_ns": ns(done),
            "first_tokens": r.get("first_tokens", int(first is not None)),
            "state": r.get("state", "unfinished" if done is None else "done"),
            **{f"{wait}_ns": ns(r.get(wait, 0.0) + r.get(f"ttft_{wait}", 0.0)) for wait in WAITS},
            **{f"ttft_{wait}_ns": ns(r.get(f"ttft_{wait}", 0.0)) for wait in WAITS},
            **{f"gap_{wait}_ns": ns(r.get(f"gap_{wait}", 0.0 if "gap_compute" in r else None)) for wait in WAITS},
            "alone_prefill_ns": ns(r.get("alone_prefill")),
            "alone_decode_ns": ns(r.get("alone_decode")),
            "preemptions": 0,
            "gpus": "0",
            "fidelity": "simulated",
            "token_ns": None if tokens is None else [ns(t) for t in tokens],
        }
        lines.append(line)
    plain = pa.schema([pa.field(f.name, pa.string()) if pa.types.is_dictionary(f.type) else f for f in SCHEMA])
    return pa.Table.from_pylist(lines, schema=plain).cast(SCHEMA)


def ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def rows(*requests: dict[str, Any]) -> Rows:
    return arrays(table(*requests))


def met(name: str, r: Rows, slo: requests.Slo) -> Any:
    return None if (scores := DEFINITIONS[name].score(r, slo)) is None else scores.tolist()


def measures(r: Rows, slo: requests.Slo, window_s: float) -> dict[str, float]:
    """Return the measures beside attainment of requests that were all offered."""
    sums = tally.Tally(r.models, window_s, len(r), ())
    sums.measure(r, requests.limits(r, slo), by_model=False)
    return sums.pooled.values(window_s, sums.quantiles())


def per_model(r: Rows, scores: Any, weights: Any = None) -> dict[str, float]:
    """Average the scores of each model that was offered requests, each by its weight (1)."""
    weights = np.ones(len(r)) if weights is None else weights
    which = {name: r.model == k for k, name in enumerate(r.models)}
    return {name: float(np.average(scores[w], weights=weights[w])) for name, w in which.items() if weights[w].sum()}


# ------------------------------------------------------------------ worked numbers


def test_latencies_by_hand() -> None:
    """16 tokens, first after 50 ms, then one each 10 ms; arrival at 2 s."""
    request = rows({"arrival": 2.0, "first": 2.05, "done": 2.2, "made": 16})
    assert request.ttft_s == pytest.approx([0.05])
    assert requests.tpot_s(request) == pytest.approx([0.010])
    assert request.e2e_s == pytest.approx([0.2])
    assert requests.norm_s(request) == pytest.approx([0.0125])


def test_tokens_of_the_first_chunk_take_no_gap() -> None:
    """5 tokens in the first chunk, 10 after it in 1 s: TPOT 0.1 s, not 1/14."""
    request = rows({"first": 1.0, "done": 2.0, "made": 15, "first_tokens": 5})
    assert requests.tpot_s(request) == pytest.approx([0.1])


def test_one_token_has_no_tpot_and_meets_it_if_it_finished() -> None:
    r = rows(
        {"first": 1.0, "done": 1.0, "made": 1},
        {"first": 1.0, "made": 1, "asked": 1},
        {"first": 1.0, "done": 3.0, "made": 3},
    )
    assert np.isnan(requests.tpot_s(r)).tolist() == [True, True, False]
    assert met("tpot", r, {"a": (INF, 0.5)}) == [1, 0, 0]
    assert measures(r, {}, 10.0)["undefined_tpot"] == pytest.approx(1 / 3)
    # the unfinished one counts as infinite beside 1.0, the undefined does not
    assert measures(r, {}, 10.0)["tpot_p50_s"] == INF


def test_without_token_times_what_needs_them_is_null() -> None:
    r = rows({"first": 1.0, "done": 2.0, "made": 3})
    assert {name: met(name, r, {}) is None for name in DEFINITIONS} == {k: x.by_token for k, x in DEFINITIONS.items()}


def test_gaps_between_tokens_by_hand() -> None:
    r = rows({"tokens": [3, 4, 6, 7]}, {"tokens": [9]}, {"tokens": [3, 4], "state": "unfinished"}, {"tokens": []})
    for limit, share in ((0.5, 0), (1, 2 / 3), (2, 1)):  # gaps of 1, 2 and 1
        assert met("itl", r, {"a": (INF, limit)}) == pytest.approx([share, 1, 0, 0])


@cases(
    ("tokens", "slo", "share", "fraction"),
    [
        ([3, 6, 7, 8], (3, 2), 3 / 4, 5 / 8),  # published: (0, 3) and (6, 8)
        ([3, 4, 5, 6], (3, 2), 1, 1),
        ([4, 5, 6, 7], (3, 2), 3 / 4, 3 / 7),  # the first token alone is late: its 4 s are lost
        # late at 10 (allowed 5): 3 counted; from 10, 1 <= 7 in time, 20 > 9 late: 7 counted; then nothing follows
        ([3, 10, 11, 30], (3, 2), 1 / 4, 10 / 30),
        ([9], (3, 2), 0, 0),
        ([9], (INF, INF), 1, 1),
        ([3, 60], (3, INF), 1, 1),
        ([4, 60], (3, INF), 1 / 2, 56 / 60),
    ],
)
def test_token_definitions_by_hand(
    tokens: list[float], slo: tuple[float, float], share: float, fraction: float
) -> None:
    r = rows({"tokens": tokens}, {"tokens": tokens[:1], "state": "unfinished"}, {"tokens": []})
    assert met("token_mean", r, {"a": slo}) == pytest.approx([share, 0, 0])
    assert met("qos", r, {"a": slo}) == pytest.approx([fraction, 0, 0])


def test_tokens_are_pooled_or_counted_by_request() -> None:
    """One of one in time, 4 of 9 in time, and a request that asked for 10 and was dropped: 5 of 20, or 13 / 9 of 3."""
    slow = [1.0, 2.0, 3.0, 4.0, *(10.0 + k for k in range(5))]
    r = rows({"tokens": [0.5]}, {"tokens": slow}, {"tokens": [], "state": "dropped", "asked": 10})
    slo = {"a": (1.0, 1.0)}
    assert met("token", r, slo) == met("token_mean", r, slo) == pytest.approx([1, 4 / 9, 0])
    shares = {name: np.average(met(name, r, slo), weights=DEFINITIONS[name].weights(r)) for name in DEFINITIONS}
    assert shares["token"] == pytest.approx(5 / 20)
    assert shares["token_mean"] == pytest.approx(13 / 27)
    alike = [name for name, definition in DEFINITIONS.items() if definition.weights(r).tolist() == [1, 1, 1]]
    assert alike == [name for name in DEFINITIONS if name != "token"]


def test_attainment_definitions_by_hand() -> None:
    """TTFT 1 s, TPOT 0.1 s; the end-to-end deadline of 11 tokens is 2 s."""
    r = rows(
        {"first": 0.9, "done": 1.8, "made": 11},  # both
        {"first": 1.1, "done": 1.9, "made": 11},  # late first token, made up for: e2e alone, and TPOT
        {"first": 0.5, "done": 1.9, "made": 11},  # slow tokens: TTFT and e2e
        {"first": 0.5, "made": 5, "asked": 11},  # never ended: a miss for all
        {"done": 0.1, "state": "dropped", "asked": 11},
        {"done": 0.1, "state": "failed", "asked": 11},
    )
    slo = {"a": (1.0, 0.1)}
    assert met("ttft", r, slo) == [1, 0, 1, 0, 0, 0]
    assert met("tpot", r, slo) == [1, 1, 0, 0, 0, 0]
    assert met("both", r, slo) == [1, 0, 0, 0, 0, 0]
    assert met("e2e", r, slo) == [1, 1, 1, 0, 0, 0]
    assert measures(r, slo, 2.0)["goodput_rps"] == 0.5
    assert np.mean(met("both", r, {})) == 0.5  # no SLO: finishing is enough


def test_limits_are_by_model() -> None:
    r = rows({"model": "b", "first": 1.0, "done": 1.0, "made": 1}, {"model": "a", "first": 1.0, "done": 1.0, "made": 1})
    scores = met("ttft", r, {"a": (2.0, 1.0), "b": (0.5, 1.0)})
    assert scores == [0, 1]
    assert per_model(r, np.array(scores)) == {"a": 1.0, "b": 0.0}


def test_limits_may_be_by_request() -> None:
    r = rows({"first": 1.0, "done": 3.0, "made": 3}, {"first": 1.0, "done": 3.0, "made": 3})
    limits = requests.Limits(np.array([1.0, 0.9]), np.array([0.5, 1.0]))
    assert met("ttft", r, limits) == [1, 0]
    assert met("tpot", r, limits) == [0, 1]
    assert met("e2e", r, limits) == [0, 0]
    t = scoring.scores([replace(run("r"), slo_s=requests.Limits(np.array([0.0, 1.0, 9.0]), np.full(3, 1.0)))])
    assert value(t, "both") == 1.0  # of the two in the window


def test_window_holds_its_start_and_not_its_end() -> None:
    r = rows(*({"arrival": t} for t in (-1e-9, 0.0, 9.999999999, 10.0)))
    assert in_window(r, 10.0).tolist() == [False, True, True, False]


@cases(
    ("values", "q", "expected"),
    [
        ([1, 2, 3, 4, 5], 0.5, 3),
        ([1, 2, 3, 4, 5], 0.95, 4.8),
        ([1, math.nan], 0.5, INF),
        ([1, 2, math.nan], 0.5, 2),
        ([math.nan, math.nan], 0.5, INF),
        ([7], 0.99, 7),
    ],
)
def test_a_latency_that_never_came_is_infinite(values: list[float], q: float, expected: float) -> None:
    assert requests.quantile(np.array(values, float), q) == pytest.approx(expected)


def test_jain_by_hand() -> None:
    assert tally.jain([1, 1, 1]) == 1
    assert tally.jain([1, 0, 0, 0]) == 0.25
    assert tally.jain([0.9, 0.3]) == pytest.approx(1.44 / (2 * 0.9))
    assert math.isnan(tally.jain([0, 0]))


def test_busy_time_by_hand() -> None:
    """[0, 2] and [1, 3] overlap; [5, 6] stands alone; the last never ends, its waits reach 8."""
    r = rows(
        {"arrival": 0.0, "first": 1.0, "done": 2.0, "made": 4},
        {"arrival": 1.0, "first": 2.5, "done": 3.0, "made": 4},
        {"arrival": 5.0, "done": 6.0, "state": "dropped"},
        {"arrival": 7.0, "admission": 1.0},
    )
    assert tally.busy(r)[0] == pytest.approx(5.0)
    assert measures(r, {}, 10.0)["throughput_tps"] == pytest.approx(8 / 5)


# ------------------------------------------------------------------ laws

REQUEST = st.fixed_dictionaries(
    {
        "arrival": st.integers(0, 50).map(float),
        "model": st.sampled_from("abc"),
        "tokens": st.lists(st.sampled_from([0.25, 0.5, 1.0, 4.0]), min_size=1, max_size=6).map(
            lambda gaps: np.cumsum(gaps).tolist()
        ),
        "state": st.sampled_from(STATES),
    }
)
REQUESTS = st.lists(REQUEST, min_size=1, max_size=8)
SLO = st.tuples(*[st.tuples(st.sampled_from([0.5, 2.0, INF]), st.sampled_from([0.25, 1.0, INF]))] * 3).map(
    lambda pairs: dict(zip("abc", pairs, strict=True))
)


def scores(r: Rows, slo: requests.Slo) -> dict[str, Sequence[float]]:
    return {name: x for name in DEFINITIONS if (x := met(name, r, slo)) is not None}


SCALED = {name for name, entry in DEFINITIONS.items() if entry.judges}  # others have a limit in seconds of their own


@given(requests=REQUESTS, slo=SLO, seed=st.randoms())
def test_order_of_rows_changes_nothing(requests: list[dict[str, Any]], slo: requests.Slo, seed: Any) -> None:
    order = list(range(len(requests)))
    seed.shuffle(order)
    first, second = scores(rows(*requests), slo), scores(rows(*(requests[i] for i in order)), slo)
    assert first.keys() == second.keys()
    for name in first:
        assert [first[name][i] for i in order] == list(second[name])
    a, b = (measures(rows(*x), slo, 60.0) for x in (requests, [requests[i] for i in order]))
    assert a == pytest.approx(b, nan_ok=True)


@given(requests=REQUESTS, slo=SLO)
def test_twice_as_slow_against_twice_the_limits_is_the_same(requests: list[dict[str, Any]], slo: ByModel) -> None:
    slow = [{**r, "arrival": 2 * r["arrival"], "tokens": [2 * t for t in r["tokens"]]} for r in requests]
    twice = {name: (2 * a, 2 * b) for name, (a, b) in slo.items()}
    fast_scores, slow_scores = scores(rows(*requests), slo), scores(rows(*slow), twice)
    assert {name: fast_scores[name] for name in SCALED} == {name: slow_scores[name] for name in SCALED}
    first, second = measures(rows(*requests), slo, 60.0), measures(rows(*slow), twice, 120.0)
    for name in first:
        factor = 2 if name.endswith("_s") else 0.5 if name.endswith(("_rps", "_tps")) else 1
        assert second[name] == pytest.approx(factor * first[name], nan_ok=True)


@given(requests=REQUESTS, slo=SLO, extra=REQUEST)
def test_a_request_that_never_finishes_never_helps(
    requests: list[dict[str, Any]], slo: requests.Slo, extra: dict[str, Any]
) -> None:
    more = [*requests, {**extra, "state": "unfinished"}]
    first, second = scores(rows(*requests), slo), scores(rows(*more), slo)
    for name in first:
        assert np.mean(second[name]) <= np.mean(first[name])
    a, b = (measures(rows(*x), slo, 60.0) for x in (requests, more))
    assert b["goodput_rps"] <= a["goodput_rps"]
    assert not b["e2e_p99_s"] < a["e2e_p99_s"]


@given(requests=REQUESTS, slo=SLO)
def test_scores_are_shares_and_grow_with_the_limits(requests: list[dict[str, Any]], slo: ByModel) -> None:
    r = rows(*requests)
    tight, loose = scores(r, slo), scores(r, {name: (2 * a, 2 * b) for name, (a, b) in slo.items()})
    for name in tight:
        assert all(0 <= x <= 1 for x in tight[name])
        if name != "qos":  # a segment cut late counts its allowance: by the released rule more can be less
            assert all(a <= b for a, b in zip(tight[name], loose[name], strict=True))
    assert all(x <= min(a, b) for x, a, b in zip(tight["both"], tight["ttft"], tight["tpot"], strict=True))
    free = scores(r, {})
    assert all(free[name] == [float(d) for d in r.done] for name in SCALED)


@given(requests=REQUESTS, slo=SLO, other=SLO)
def test_a_part_that_is_not_judged_changes_nothing(
    requests: list[dict[str, Any]], slo: ByModel, other: ByModel
) -> None:
    r = rows(*requests)
    for name, entry in DEFINITIONS.items():
        ttft, tpot = ((slo if part in entry.judges else other) for part in ("ttft", "tpot"))
        mixed = {model: (ttft[model][0], tpot[model][1]) for model in slo}
        assert met(name, r, slo) == met(name, r, mixed), name


def released_qos(stamps: Sequence[float], ttft: float, tpot: float) -> float:
    """Judge token by token as Aegaeon's artifact does (plots/plot_e2e.py)."""
    good = start = reached = 0.0
    target = ttft
    for t in stamps:
        in_time = t - start <= target
        good, start, reached = (good, start, target) if in_time else (good + reached, t, 0.0)
        target += tpot
    return (good + min(target, stamps[-1] - start)) / stamps[-1]


def paper_share(stamps: Sequence[float], ttft: float, tpot: float) -> float:
    return sum(t <= (ttft + k * tpot if k else ttft) for k, t in enumerate(stamps)) / len(stamps)


@given(requests=REQUESTS, slo=SLO)
def test_token_definitions_agree_with_the_rules_token_by_token(requests: list[dict[str, Any]], slo: ByModel) -> None:
    scored = scores(rows(*requests), slo)
    for name, rule in (("token", paper_share), ("token_mean", paper_share), ("qos", released_qos)):
        one_by_one = [(r["state"] == "done") * rule(r["tokens"], *slo[r["model"]]) for r in requests]
        assert scored[name] == pytest.approx(one_by_one)


@given(requests=REQUESTS, slo=SLO)
def test_models_add_up(requests: list[dict[str, Any]], slo: requests.Slo) -> None:
    r = rows(*requests)
    for name, each in scores(r, slo).items():
        weights = DEFINITIONS[name].weights(r)
        by_model = per_model(r, np.array(each), weights)
        counts = {model: float(weights[r.model == r.models.index(model)].sum()) for model in by_model}
        assert sum(by_model[k] * counts[k] for k in counts) == pytest.approx(float(weights @ each)), name
        worst, mean = min(by_model.values()), np.average(each, weights=weights)
        assert worst <= mean + 1e-12
        assert math.isnan(index := tally.jain(by_model.values())) or 1 / len(by_model) - 1e-9 <= index <= 1 + 1e-9


# ------------------------------------------------------------------ the tidy table


def run(name: str, seed: int = 0, **more: Any) -> scoring.Run:
    spec = {
        "system": "static",
        "trace": "t",
        "models": "heavy8",
        "gpu": "h100",
        "gpus": 2,
        "rate_scale": 2.0,
        "seed": seed,
        "window_s": 10.0,
        "slo": "5xP95",
        "engine": "sim",
        "scaling": "rotate",
    }
    stats = {
        "kv_byte_s": 30.0,
        "kv_cap_bytes": 4.0,
        "gpus": 2.0,
        "span_s": 15.0,
        "gpu_busy_s": 6.0,
        "loads": 3.0,
        "cap_bound": 0.03,
        "chunk_bound": 0.01,
        "prefill_bound": 0.0,
    }
    late = {"arrival": 2.0, "first": 8.0, "done": 9.0, "made": 3, "model": "b", "ttft_kv": 5.0}
    good = {"arrival": 1.0, "first": 1.5, "done": 2.0, "made": 3}
    warm = {"arrival": -1.0, "first": 8.0, "done": 9.0, "made": 3}
    meta = {"spec": spec, "fidelity": "simulated", "tier": "replayed", "stats": stats}
    return scoring.Run(name, meta, table(warm, good, late), {"a": (1.0, 1.0), "b": (1.0, 1.0)}, **more)


def value(t: pa.Table, definition: str, over: str = "pooled", model: str | None = None) -> float | None:
    lines = [x for x in t.to_pylist() if (x["definition"], x["over"], x["model"]) == (definition, over, model)]
    assert len(lines) == 1, (definition, over, model, lines)
    number: float | None = lines[0]["value"]
    return number


def test_the_table_of_one_run_by_hand() -> None:
    t = scoring.scores([run("static-1")])
    assert t.schema.equals(tidy.TABLE_SCHEMA)
    assert value(t, "both") == 0.5
    assert value(t, "tpot") == 1.0
    assert (value(t, "both", "model", "a"), value(t, "both", "model", "b")) == (1.0, 0.0)
    assert (value(t, "both", "mean"), value(t, "both", "worst"), value(t, "both", "jain")) == (0.5, 0.0, 0.5)
    assert value(t, "token") is None
    assert value(t, "offered_rps") == 0.2
    assert value(t, "goodput_rps") == 0.1
    assert value(t, "ttft_p50_s") == pytest.approx(3.25)
    assert value(t, "missed_both_kv") == 1.0
    assert value(t, "kv_used") == 0.5
    assert value(t, "gpu_busy") == 0.2
    assert [value(t, name) for name in tidy.CAPS] == [0.03, 0.01, 0.0]
    assert {x["n"] for x in t.to_pylist() if x["over"] == "pooled"} == {2}


def test_table_order_is_that_of_the_specs(tmp_path: Path) -> None:
    ordered = scoring.scores([run("r-a", 1), run("r-b", 0)])
    assert ordered.equals(scoring.scores([run("r-b", 0), run("r-a", 1)]))
    assert ordered.column("seed").unique().to_pylist() == [0, 1]
    for name, t in (("one", ordered), ("two", scoring.scores([run("r-b", 0), run("r-a", 1)]))):
        write_table(tmp_path / name, t, {})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_skipped_and_infeasible_runs_stay_visible() -> None:
    base = run("x")
    empty = SCHEMA.empty_table()
    skipped = replace(base, name="s", label="s", table=empty, meta={**base.meta, "skipped": "no Move"})
    hollow = replace(base, name="i", label="i", table=empty, meta={**base.meta, "infeasible": "70B does not fit"})
    t = scoring.scores([skipped, hollow, base])
    lines = t.to_pylist()
    assert {x["value"] for x in lines if x["run"] == "s"} == {None}
    assert {x["value"] for x in lines if x["run"] == "i"} == {0.0}
    s = summaries.summary(t, ["both"])
    assert dict(zip(s["label"], s["mean"], strict=True)) == {"i": 0.0, "static": 0.5}
    assert dict(zip(s["label"], s["infeasible"], strict=True)) == {"i": True, "static": False}
    assert by_window.curves(t, "i", "both", "rate_scale") == {0: {2.0: 0.0}}
    assert by_window.curves(t, "static", "ttft", "rate_scale") == {0: {2.0: 0.5}}


def test_summary_over_seeds() -> None:
    t = scoring.scores([run(f"r-{s}", s) for s in range(3)])
    s = summaries.summary(t, ["both", "ttft_p95_s"], ["pooled", "worst"])
    assert len(s) == 3
    both = s[(s["definition"] == "both") & (s["over"] == "pooled")].iloc[0]
    assert (both["mean"], both["low"], both["high"], both["n"]) == (0.5, 0.5, 0.5, 3)


def test_a_cap_binds_in_more_than_a_hundredth_of_the_steps_in_the_mean_over_seeds() -> None:
    base = run("r")

    def at(rate: float, cap: float, chunk: float, seed: int) -> scoring.Run:
        spec, stats = base.meta["spec"], base.meta["stats"]
        meta = {
            "spec": {**spec, "rate_scale": rate, "seed": seed},
            "stats": {**stats, "cap_bound": cap, "chunk_bound": chunk},
        }
        return replace(base, name=f"r-{rate}-{seed}", meta={**base.meta, **meta})

    runs = [at(1.0, 0.0, 0.01, 0), at(2.0, 0.005, 0.01, 0), at(2.0, 0.025, 0.01, 1), at(4.0, 0.5, 0.0, 0)]
    (bound,) = summaries.bound(scoring.scores(runs))
    assert bound._replace(share=0.0) == summaries.Bound("batch_cap", "static", 0.2, 0.0, 0.5)
    assert bound.share == pytest.approx(0.015)
    assert summaries.bound(scoring.scores(runs[:1])) == []


def test_nothing_offered_is_nothing_claimed() -> None:
    t = scoring.scores([replace(run("x"), table=SCHEMA.empty_table())])
    assert value(t, "both") is None
    assert scoring.scores([]).num_rows == 0
