"""Workloads: laws of building jobs, arrival processes, model sets and SLO rules."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.policy.types import Jobs, UserError
from harness.run.setup import load_trace
from tests.cases import cases
from tests.there import there
from traces import drawing
from traces.load import Trace
from traces.load import trace as load
from workloads.build import SCALINGS, Scaling, build, plan
from workloads.models import ModelSet, Served, model_set, sets, shape, shapes

SPAN_S = 100.0


def drawn(n: int, streams: int = 3, seed: int = 0, clients: int = 4) -> Trace:
    """Draw a replayed trace whose prompts number its rows."""
    g = np.random.default_rng(seed)
    when = np.sort(g.uniform(0, SPAN_S, n))
    tokens = np.arange(1, n + 1, dtype=np.int32)
    who = g.integers(0, clients, n).astype(np.int32)
    model = g.integers(0, streams, n).astype(np.int32)
    names, rows = tuple(f"s{i}" for i in range(streams)), np.arange(n, dtype=np.int64)
    return Trace("drawn", names, when, model, tokens, tokens[::-1].copy(), rows, "drawn", SPAN_S, tenant=who)


def fixed(streams: int = 3) -> ModelSet:
    return ModelSet("test", tuple(Served(f"m{i}", shape("llama-3.1-8b"), stream=f"s{i}") for i in range(streams)))


def inside(jobs: Jobs) -> NDArray[np.bool_]:
    return jobs.arrival_s >= 0


def same(a: Jobs, b: Jobs) -> bool:
    return a.models == b.models and all(
        np.array_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a) if field.name != "models"
    )


traces = st.builds(drawn, st.integers(1, 120), st.integers(1, 4), st.integers(0, 99))
seeds = st.integers(0, 2**40)


# ---------------------------------------------------------------- build


@given(traces, seeds, st.sampled_from(SCALINGS))
def test_the_window_holds_every_row_once(rows: Trace, seed: int, scaling: Scaling) -> None:
    jobs = build(rows, fixed(len(rows.models)), seed=seed, scaling=scaling)
    window = inside(jobs)
    assert sorted(jobs.prompt_tokens[window]) == rows.prompt_tokens.tolist()
    assert (np.diff(jobs.arrival_s) >= 0).all()
    assert jobs.arrival_s[-1] < SPAN_S
    row = jobs.prompt_tokens - 1  # lengths stay paired and with their stream
    assert np.array_equal(jobs.output_tokens, rows.output_tokens[row])
    assert np.array_equal(jobs.model, rows.model[row])


@given(traces, seeds)
def test_each_stream_is_turned_as_a_whole(rows: Trace, seed: int) -> None:
    jobs = build(rows, fixed(len(rows.models)), seed=seed, warmup_s=0)
    turned = (jobs.arrival_s - rows.arrival_s[jobs.prompt_tokens - 1]) % SPAN_S
    for stream in np.unique(jobs.model):
        offsets = turned[jobs.model == stream]
        apart = np.abs(offsets - offsets[0])
        assert np.minimum(apart, SPAN_S - apart).max() < 1e-9


@given(traces, seeds, st.floats(0, 250))
def test_the_warm_up_is_the_end_of_the_circle(rows: Trace, seed: int, warmup_s: float) -> None:
    models = fixed(len(rows.models))
    jobs = build(rows, models, seed=seed, warmup_s=warmup_s)
    longer = build(rows, models, seed=seed, warmup_s=0, window_s=3 * SPAN_S)
    early = longer.arrival_s >= 3 * SPAN_S - warmup_s
    before = ~inside(jobs)
    assert abs(before.sum() - early.sum()) <= 1  # one at the very border may round either way
    if before.sum() == early.sum():
        assert np.array_equal(jobs.prompt_tokens[before], longer.prompt_tokens[early])
        assert jobs.arrival_s[before] + 3 * SPAN_S == pytest.approx(longer.arrival_s[early])


def test_the_default_warm_up() -> None:
    rows = drawn(2000)
    assert build(rows, fixed()).arrival_s[0] == pytest.approx(-60, abs=1)
    short = replace(rows, arrival_s=rows.arrival_s / 10, span_s=10.0)
    assert build(short, fixed()).arrival_s[0] == pytest.approx(-10, abs=0.1)
    long = replace(rows, arrival_s=rows.arrival_s * 100, span_s=10_000.0)
    assert build(long, fixed()).arrival_s[0] == pytest.approx(-500, abs=30)


@given(traces, seeds, st.integers(1, 4))
def test_copies(rows: Trace, seed: int, n: int) -> None:
    models = fixed(len(rows.models))
    for scaling in ("rotate", "clients", "replicate"):
        jobs = build(rows, models, seed=seed, rate_scale=n, scaling=scaling, warmup_s=0)
        assert Counter(jobs.prompt_tokens.tolist()) == dict.fromkeys(rows.prompt_tokens.tolist(), n)
    distinct = Counter(zip(jobs.prompt_tokens.tolist(), jobs.arrival_s.tolist(), strict=True))
    assert set(distinct.values()) == {n}  # replicated at equal stamps
    if n > 1:
        jobs = build(rows, models, seed=seed, rate_scale=n, scaling="rotate", warmup_s=0)
        assert len(set(zip(jobs.prompt_tokens.tolist(), jobs.arrival_s.tolist(), strict=True))) == len(jobs)


def test_rotated_copies_extend_the_smaller_scale() -> None:
    small, large = (build(drawn(50), fixed(), seed=3, rate_scale=n, warmup_s=0) for n in (2, 3))
    stamps = Counter(zip(small.prompt_tokens.tolist(), small.arrival_s.tolist(), strict=True))
    assert not stamps - Counter(zip(large.prompt_tokens.tolist(), large.arrival_s.tolist(), strict=True))


@given(traces, seeds, st.floats(0.05, 3.5))
def test_time_scaling_divides_stamps(rows: Trace, seed: int, scale: float) -> None:
    models = fixed(len(rows.models))
    plain = build(rows, models, seed=seed, warmup_s=0)
    scaled = build(rows, models, seed=seed, rate_scale=scale, scaling="time", warmup_s=0)
    assert sorted(scaled.prompt_tokens) == sorted(plain.prompt_tokens)
    order = np.argsort(scaled.prompt_tokens)
    assert scaled.arrival_s[order] * scale == pytest.approx(plain.arrival_s[np.argsort(plain.prompt_tokens)])


@given(traces, seeds, st.floats(0.02, 2.98))
def test_a_fraction_is_exact_by_stream_and_even_in_time(rows: Trace, seed: int, scale: float) -> None:
    models = fixed(len(rows.models))
    jobs = build(rows, models, seed=seed, rate_scale=scale, warmup_s=0)
    for stream, count in enumerate(np.bincount(rows.model, minlength=len(rows.models))):
        mine = jobs.prompt_tokens[jobs.model == stream]
        assert abs(len(mine) - scale * count) < 1 + 1e-6
        half = np.flatnonzero(rows.model == stream)[: count // 2]  # the first half of a stream is scaled as the whole
        assert abs(np.isin(mine, rows.prompt_tokens[half]).sum() - scale * len(half)) < 1 + 1e-6


def test_clients_are_kept_or_dropped_whole() -> None:
    rows = drawn(4000, clients=50)
    jobs = build(rows, fixed(), seed=5, rate_scale=0.4, scaling="clients", warmup_s=0)
    row = jobs.prompt_tokens - 1
    tenant = there(rows.tenant)
    kept = Counter(zip(jobs.model.tolist(), tenant[row].tolist(), strict=True))
    whole = Counter(zip(rows.model.tolist(), tenant.tolist(), strict=True))
    assert all(whole[client] == count for client, count in kept.items())
    assert len(jobs) / len(rows.model) == pytest.approx(0.4, abs=0.05)
    with pytest.raises(UserError, match="names no clients"):
        build(replace(rows, tenant=None), fixed(), scaling="clients")


@given(traces, seeds)
def test_a_seed_is_a_workload_and_names_are_only_names(rows: Trace, seed: int) -> None:
    models = fixed(len(rows.models))
    first = build(rows, models, seed=seed, rate_scale=1.5)
    assert same(first, build(rows, models, seed=seed, rate_scale=1.5))
    assert not np.array_equal(first.arrival_s, build(rows, models, seed=seed + 1, rate_scale=1.5).arrival_s)
    renamed = ModelSet("other", tuple(replace(member, name=f"x{i}") for i, member in enumerate(models.members)))
    assert same(build(rows, renamed, seed=seed, rate_scale=1.5), replace(first, models=renamed.names))


def test_slo_seconds_reach_their_requests() -> None:
    jobs = build(drawn(30), fixed(), slo={"m1": (0.5, 0.05)})
    assert set(jobs.ttft_slo_s[jobs.model == 1]) == {0.5}
    assert set(jobs.tpot_slo_s[jobs.model == 1]) == {0.05}
    assert set(jobs.ttft_slo_s[jobs.model != 1]) == {math.inf}


def test_a_model_without_requests() -> None:
    rows = drawn(30, streams=2)
    jobs = build(replace(rows, models=("s0", "s1", "s2")), fixed())
    assert jobs.models == ("m0", "m1", "m2")
    assert set(jobs.model.tolist()) == {0, 1}
    assert plan(replace(rows, models=("s0", "s1", "s2")), fixed())["m2"].rate_rps == 1 / rows.span_s  # the prior


@cases(
    ("how", "message"),
    [
        ({"rate_scale": 0}, "rate scale is 0, not above 0"),
        ({"rate_scale": -1}, "rate scale is -1, not above 0"),
        ({"rate_scale": math.nan}, "rate scale is nan"),
        ({"rate_scale": math.inf}, "rate scale is inf"),
        ({"window_s": 0}, "window is 0"),
        ({"warmup_s": -1}, "warm-up is -1 s"),
        ({"scaling": "stretch"}, 'no scaling "stretch"'),
        ({"scaling": "none", "rate_scale": 2.0}, "rate scale is 2: --scaling none takes the trace as it is, at 1"),
        ({"slo": {"m9": (1, 1)}}, 'SLO for "m9", which is not in set test'),
        ({"slo": {"m1": (0, 1)}}, "SLO of m1"),
    ],
)
def test_what_cannot_be_built(how: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(drawn(30), fixed(), **how)  # type: ignore[arg-type]


def test_scaling_none_is_the_trace_at_its_own_stamps() -> None:
    rows = drawn(300)
    runs = [build(rows, fixed(), scaling="none", seed=seed, warmup_s=0.0) for seed in (0, 1)]
    for jobs in runs:
        assert np.array_equal(jobs.arrival_s, rows.arrival_s)
        assert np.array_equal(jobs.prompt_tokens, rows.prompt_tokens)
        assert np.array_equal(jobs.model, rows.model)
    warm = build(rows, fixed(), scaling="none", warmup_s=20.0)
    assert np.array_equal(warm.arrival_s[warm.arrival_s >= 0], rows.arrival_s)
    late = rows.arrival_s >= SPAN_S - 20.0  # the circle: its end comes before its beginning
    np.testing.assert_allclose(warm.arrival_s[warm.arrival_s < 0], rows.arrival_s[late] - SPAN_S)


def test_scaling_none_of_a_synthetic_trace_is_what_its_seed_draws() -> None:
    trace, models = load_trace("hyperbolic-like+models=3"), model_set("llama-3.2-1b*3")
    for seed in (0, 7):
        sample = drawing.draw("hyperbolic-like+models=3", seed)
        jobs = build(trace, models, scaling="none", seed=seed, warmup_s=0.0)
        assert np.array_equal(jobs.arrival_s, sample.arrival_s)
        assert np.array_equal(jobs.output_tokens, sample.output_tokens)


def test_a_request_longer_than_its_model_serves_is_named() -> None:
    rows = drawn(30)
    rows.prompt_tokens[17] = 200_000
    says = r"drawn:17: 200000 prompt \+ 13 output tokens exceed the {} of m\d \(1 such rows; {}\)"
    with pytest.raises(UserError, match=says.format(131072, "bench trace convert --max-tokens drops them")):
        build(rows, fixed())
    with pytest.raises(UserError, match=says.format(8192, "--served raises it, to 131072 at most")):
        build(rows, fixed().serving(8192))


def test_a_set_serves_what_each_model_can() -> None:
    mixed = model_set("llama-3.1-8b,phi-2,qwen-3-32b")
    assert [member.shape.max_tokens for member in mixed.members] == [131072, 2048, 40960]
    assert [member.shape.max_tokens for member in mixed.serving(32768).members] == [32768, 2048, 32768]
    assert mixed.serving(1 << 20) == mixed


def test_streams_of_a_set() -> None:
    rows = drawn(300, streams=5)
    missing = ModelSet("odd", (*fixed(2).members, Served("m9", shape("phi-2"), stream="s9")))
    with pytest.raises(UserError, match='drawn has no stream "s9", which set odd names'):
        build(rows, missing)
    with pytest.raises(UserError, match=r"drawn has 5 models, set .* needs 6"):
        build(rows, model_set("llama-3.2-1b*6"))
    # without a map: the most popular streams, in an order that the seed draws
    counts = np.bincount(rows.model)
    hottest = set(np.argsort(-counts)[:3].tolist())
    orders = set()
    for seed in range(20):
        jobs = build(rows, model_set("llama-3.2-1b*3"), seed=seed, warmup_s=0)
        streams = tuple(int(rows.model[jobs.prompt_tokens[jobs.model == i][0] - 1]) for i in range(3))
        assert set(streams) == hottest
        orders.add(streams)
        rates = plan(rows, model_set("llama-3.2-1b*3"), seed=seed)
        assert [planned.rate_rps * SPAN_S for planned in rates.values()] == pytest.approx(counts[list(streams)])
    assert len(orders) > 1


def test_a_synthetic_trace_is_drawn_anew_for_each_seed() -> None:
    rows = load("sample")
    a, b = (build(rows, model_set("llama-3.2-1b*8"), seed=seed, warmup_s=0) for seed in (1, 2))
    assert len(a) == len(b) == 200
    assert Counter(a.prompt_tokens.tolist()) != Counter(b.prompt_tokens.tolist())


# ---------------------------------------------------------------- plans


def test_a_plan_is_rates_and_mean_lengths() -> None:
    rows = drawn(200)
    whole = plan(rows, fixed(), rate_scale=2.0)
    for i, name in enumerate(fixed().names):
        mine = rows.model == i
        assert whole[name].rate_rps == pytest.approx(2 * mine.sum() / SPAN_S)
        assert whole[name].prompt_tokens == pytest.approx(rows.prompt_tokens[mine].mean())
        assert whole[name].output_tokens == pytest.approx(rows.output_tokens[mine].mean())
        assert whole[name].origin == "trace"
    early = rows.arrival_s <= SPAN_S / 10
    prefix = plan(rows, fixed(), origin="prefix")
    assert sum(planned.rate_rps for planned in prefix.values()) == pytest.approx(early.sum() / (SPAN_S / 10))
    with pytest.raises(UserError, match="rate scale"):
        plan(rows, fixed(), rate_scale=0)


# ---------------------------------------------------------------- model sets


def test_sets_by_shape_and_by_path(tmp_path: Path) -> None:
    assert model_set("phi-2, llama-3.2-1b*2").names == ("phi-2/1", "llama-3.2-1b/1", "llama-3.2-1b/2")
    path = tmp_path / "mine.toml"
    path.write_text('[[model]]\nname = "a"\nshape = "llama-3.3-70b"\ntp = 4\n')
    assert model_set(str(path)) == ModelSet("mine", (Served("a", shape("llama-3.3-70b"), 4),))


def test_a_set_of_any_size_goes_round() -> None:
    ten, forty, part = (model_set(f"aegaeon{size}") for size in ("", "+models=40", "+models=7"))
    kinds = Counter(member.shape.name for member in forty.members)
    assert kinds == {"qwen-2.5-7b": 24, "yi-1.5-9b": 8, "llama-2-13b": 8}
    assert forty.members[:10] == ten.members
    assert part.members == ten.members[:7]
    assert forty.names[10] == "qwen-2.5-7b/7"  # the artifact's synth_model_10 is another Qwen
    assert len(set(forty.names)) == 40
    for name, says in {"aegaeon+models=x": "not a count", "light8+models=9": "names a stream for each"}.items():
        with pytest.raises(UserError, match=says):
            model_set(name)


def test_unknown_sets_get_a_suggestion() -> None:
    assert list(sets()) == sorted(sets())
    for name, meant in (("heavy9", "heavy8"), ("lama-3.1-8b", "llama-3.1-8b"), ("phi-2,phi-22", "phi-2")):
        with pytest.raises(UserError, match=f"did you mean {meant}"):
            model_set(name)
    with pytest.raises(UserError, match="is not a count"):
        model_set("phi-2*x")
    assert next(iter(shapes())) == "llama-3.1-8b"
