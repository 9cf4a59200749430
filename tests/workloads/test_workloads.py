"""Workloads: laws of building jobs, arrival processes, model sets and SLO rules."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.engines.costs.shapes import weight_bytes
from harness.policy.types import GIB, Jobs, Prefix, UserError
from harness.run.setup import load_trace
from tests.cases import cases
from traces import synthetic
from traces.arrivals import clusters, gamma, on_off, poisson, rng, weibull, zipf
from traces.load import trace as load
from workloads import slo
from workloads.build import SCALINGS, Scaling, build, idle_to_swap, plan
from workloads.models import ModelSet, Served, model_set, sets, shape, shapes

SPAN_S = 100.0
Purpose = tuple[int, *tuple[str | int, ...]]
Process = Callable[[np.random.Generator], NDArray[np.float64]]


@dataclass(frozen=True)
class Rows:
    """A trace drawn for a test; its prompts number its rows."""

    arrival_s: NDArray[np.float64]
    model: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    tenant: NDArray[np.int32] | None
    models: tuple[str, ...]
    span_s: float = SPAN_S
    name: str = "drawn"
    maker: str | None = None
    ordered: bool = False
    prefix: Prefix | None = None

    def where(self, row: int) -> str:
        return f"drawn:{row}"

    def first(self, n: int) -> Rows:
        columns = {name: getattr(self, name)[:n] for name in ("arrival_s", "model", "prompt_tokens", "output_tokens")}
        return replace(self, **columns, tenant=None, span_s=float(self.arrival_s[n]))


def drawn(n: int, streams: int = 3, seed: int = 0, clients: int = 4) -> Rows:
    g = np.random.default_rng(seed)
    when = np.sort(g.uniform(0, SPAN_S, n))
    tokens = np.arange(1, n + 1, dtype=np.int32)
    who = g.integers(0, clients, n).astype(np.int32)
    names = tuple(f"s{i}" for i in range(streams))
    return Rows(when, g.integers(0, streams, n).astype(np.int32), tokens, tokens[::-1].copy(), who, names)


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
def test_the_window_holds_every_row_once(rows: Rows, seed: int, scaling: Scaling) -> None:
    jobs = build(rows, fixed(len(rows.models)), seed=seed, scaling=scaling)
    window = inside(jobs)
    assert sorted(jobs.prompt_tokens[window]) == rows.prompt_tokens.tolist()
    assert (np.diff(jobs.arrival_s) >= 0).all()
    assert jobs.arrival_s[-1] < SPAN_S
    row = jobs.prompt_tokens - 1  # lengths stay paired and with their stream
    assert np.array_equal(jobs.output_tokens, rows.output_tokens[row])
    assert np.array_equal(jobs.model, rows.model[row])


@given(traces, seeds)
def test_each_stream_is_turned_as_a_whole(rows: Rows, seed: int) -> None:
    jobs = build(rows, fixed(len(rows.models)), seed=seed, warmup_s=0)
    turned = (jobs.arrival_s - rows.arrival_s[jobs.prompt_tokens - 1]) % SPAN_S
    for stream in np.unique(jobs.model):
        offsets = turned[jobs.model == stream]
        apart = np.abs(offsets - offsets[0])
        assert np.minimum(apart, SPAN_S - apart).max() < 1e-9


@given(traces, seeds, st.floats(0, 250))
def test_the_warm_up_is_the_end_of_the_circle(rows: Rows, seed: int, warmup_s: float) -> None:
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
def test_copies(rows: Rows, seed: int, n: int) -> None:
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
def test_time_scaling_divides_stamps(rows: Rows, seed: int, scale: float) -> None:
    models = fixed(len(rows.models))
    plain = build(rows, models, seed=seed, warmup_s=0)
    scaled = build(rows, models, seed=seed, rate_scale=scale, scaling="time", warmup_s=0)
    assert sorted(scaled.prompt_tokens) == sorted(plain.prompt_tokens)
    order = np.argsort(scaled.prompt_tokens)
    assert scaled.arrival_s[order] * scale == pytest.approx(plain.arrival_s[np.argsort(plain.prompt_tokens)])


@given(traces, seeds, st.floats(0.02, 2.98))
def test_a_fraction_is_exact_by_stream_and_even_in_time(rows: Rows, seed: int, scale: float) -> None:
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
    assert rows.tenant is not None
    kept = Counter(zip(jobs.model.tolist(), rows.tenant[row].tolist(), strict=True))
    whole = Counter(zip(rows.model.tolist(), rows.tenant.tolist(), strict=True))
    assert all(whole[client] == count for client, count in kept.items())
    assert len(jobs) / len(rows.model) == pytest.approx(0.4, abs=0.05)
    with pytest.raises(UserError, match="names no clients"):
        build(replace(rows, tenant=None), fixed(), scaling="clients")


@given(traces, seeds)
def test_a_seed_is_a_workload_and_names_are_only_names(rows: Rows, seed: int) -> None:
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
        sample = synthetic.draw("hyperbolic-like+models=3", seed)
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


def test_idle_to_swap() -> None:
    when = np.array([-5.0, 0, 20, 25, 65, 3, 4])
    which = np.array([0, 0, 0, 0, 0, 1, 1], np.int32)
    order = np.argsort(when)
    n, never = np.ones(7, np.int32), np.full(7, math.inf)
    jobs = Jobs(("a", "b"), when[order], which[order], n, n, never, never)
    assert idle_to_swap(jobs, 2.0) == pytest.approx(30 / 2)  # gaps above 10 s: 20 and 40


# ---------------------------------------------------------------- model sets


def test_the_released_sets() -> None:
    ranks = [2, 14, 3, 10, 5, 19, 23, 24]
    for name, gib in (("light8", 60), ("heavy8", 122)):
        members = model_set(name).members
        assert [member.stream for member in members] == [f"dummy-lora-7b-rank-8-{rank}" for rank in ranks]
        assert sum(weight_bytes(member.shape) for member in members) / GIB == pytest.approx(gib, abs=0.5)


def test_the_larger_sets_use_released_streams() -> None:
    for name, models in (("tp4", 4), ("light8", 8), ("prism18", 18)):
        used = tuple((member.stream, member.shift_s) for member in model_set(name).members)
        assert used == synthetic.released(models)
    shifts = [member.shift_s for member in model_set("prism18").members]
    assert shifts == [0, 0, 0, 0, 0, 10, 0, 10, 20, 0, 0, -10, 0, -20, 0, 20, 0, -10]
    shapes18 = [member.shape for member in model_set("prism18").members]
    assert all(2.0 < weight_bytes(shape) / GIB < 16 for shape in shapes18)  # 1 to 8B


def test_a_stream_used_again_turns_with_its_first_use() -> None:
    rows = drawn(200)
    first, *rest = fixed().members
    again = ModelSet("again", (first, *rest, replace(first, name="m9", shift_s=10.0)))
    for scaling, scale in (("rotate", 1.0), ("time", 4.0)):
        jobs = build(rows, again, seed=3, warmup_s=0, rate_scale=scale, scaling=scaling)  # type: ignore[arg-type]
        assert np.array_equal(
            np.sort(jobs.prompt_tokens[jobs.model == 3]), np.sort(jobs.prompt_tokens[jobs.model == 0])
        )
        at = {
            m: dict(zip(jobs.prompt_tokens[jobs.model == m], jobs.arrival_s[jobs.model == m], strict=True))
            for m in (0, 3)
        }
        later = np.array([(at[3][token] - at[0][token]) % (SPAN_S / scale) for token in at[0]])
        assert later == pytest.approx(10.0)  # after the scaling of time
    earlier = ModelSet("again", (first, *rest, replace(first, name="m9", shift_s=-10.0)))
    jobs = build(rows, earlier, seed=3, warmup_s=0)
    mine = rows.arrival_s[rows.model == 0]
    late = build(rows, fixed(), seed=3, warmup_s=0)
    assert len(jobs) == len(late) + len(mine)  # what would come before 0 comes at 0
    assert Counter(jobs.prompt_tokens[jobs.model == 3].tolist()) == Counter(
        (np.flatnonzero(rows.model == 0) + 1).tolist()
    )
    assert plan(rows, again)["m9"] == plan(rows, again)["m0"]


def test_an_ordered_trace_gives_its_kth_stream_to_the_kth_model() -> None:
    rows = replace(drawn(300, streams=5), ordered=True)
    models = model_set("llama-3.2-1b*3")
    for seed in range(3):
        jobs = build(rows, models, seed=seed, warmup_s=0)
        assert np.array_equal(rows.model[jobs.prompt_tokens - 1], jobs.model)


def test_arena_on_the_released_sets(traces_dir: Path) -> None:
    rows = load("arena-chat")
    for name in ("light8", "heavy8"):
        jobs = build(rows, model_set(name), seed=1)
        counts = np.bincount(jobs.model[inside(jobs)])
        assert counts.tolist() == [296, 22, 22, 262, 120, 19, 11, 2]
        rates = plan(rows, model_set(name))
        assert [round(planned.rate_rps * 600) for planned in rates.values()] == counts.tolist()
    whole = build(rows, model_set("prism18"), seed=1)
    assert inside(whole).sum() == 2059


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
    named = (
        "aegaeon",
        "agents8",
        "eight8b",
        "heavy8",
        "light8",
        "llama-3.1-8b-tp8",
        "llama-3.3-70b-tp8",
        "prism18",
        "prism58",
        "quant3",
        "today12",
        "tp4",
        "weaver",
        "weaver-tp2",
    )
    assert sets() == named
    for name, meant in (("heavy9", "heavy8"), ("lama-3.1-8b", "llama-3.1-8b"), ("phi-2,phi-22", "phi-2")):
        with pytest.raises(UserError, match=f"did you mean {meant}"):
            model_set(name)
    with pytest.raises(UserError, match="is not a count"):
        model_set("phi-2*x")
    assert next(iter(shapes())) == "llama-3.1-8b"


# ---------------------------------------------------------------- arrivals


def test_draws_are_named_by_their_purpose() -> None:
    assert rng(1, "a").integers(1 << 32) == rng(1, "a").integers(1 << 32)
    purposes: list[Purpose] = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), (1, "a", "0"), (-1, "a")]
    assert len({int(rng(*purpose).integers(1 << 62)) for purpose in purposes}) == len(purposes)
    assert rng(7, "pinned").integers(1 << 32, size=3).tolist() == PINNED


PINNED = [733260363, 1259725416, 1358109423]  # the same on every platform


@cases(
    ("process", "cv"),
    [
        (lambda g: poisson(g, 5, 20_000), 1.0),
        (lambda g: gamma(g, 5, 20_000, 2.0), 2.0),
        (lambda g: gamma(g, 5, 20_000, 0.5), 0.5),
        (lambda g: weibull(g, 5, 20_000, 1.0), 1.0),
        (lambda g: weibull(g, 5, 20_000, 0.5), math.sqrt(5)),  # cv^2 = 4! / 2!^2 - 1
        (lambda g: clusters(g, 5, 20_000), 1.0),
    ],
)
def test_renewal_processes_have_their_rate_and_variation(process: Process, cv: float) -> None:
    times = process(rng(3, "arrivals"))
    gaps = np.diff(times)
    assert ((times >= 0) & (times < 20_000)).all()
    assert (gaps >= 0).all()
    assert len(times) == pytest.approx(100_000, abs=5 * cv * math.sqrt(100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_clusters_keep_the_rate_and_burst() -> None:
    times = clusters(rng(4, "c"), 2.0, 50_000, size=5, gap_s=0.1, duty=0.3, on_s=500)
    assert len(times) == pytest.approx(100_000, rel=0.03)
    assert (np.diff(times) >= 0).all()
    seconds = np.bincount(times.astype(int), minlength=50_000)
    assert seconds.var() / seconds.mean() > 5  # Poisson has 1
    busy = np.bincount((times // 50).astype(int), minlength=1000) > 0
    assert busy.mean() < 0.6


@given(st.floats(0.05, 0.95), st.floats(1, 1000), seeds)
def test_on_time_is_spread_over_exactly_its_duty(duty: float, on_s: float, seed: int) -> None:
    span = 1000.0
    on_time = np.linspace(0, span * duty, 2001)[:-1]
    times = np.sort(on_off(rng(seed, "o"), on_time, span, duty, on_s))
    assert ((times >= 0) & (times < span)).all()
    assert len(times) == 2000
    periods = max(1, round(span * duty / on_s))
    gaps = np.sort(np.diff(np.append(times, times[0] + span)))  # all but the off-periods are one grid step
    step = span * duty / 2000
    assert (gaps[: 2000 - periods] <= step + 1e-6).all()


@given(st.integers(1, 300), st.floats(0, 3))
def test_popularity(models: int, s: float) -> None:
    share = zipf(models, s)
    assert share.sum() == pytest.approx(1)
    assert share[0] / share[-1] == pytest.approx(models**s)


def test_rates_that_are_no_rates() -> None:
    calls: list[Process] = [
        lambda g: poisson(g, 0, 1),
        lambda g: poisson(g, -1, 1),
        lambda g: gamma(g, 1, 1, 0),
        lambda g: weibull(g, math.nan, 1, 1),
        lambda g: clusters(g, 1, 1, duty=0),
        lambda g: clusters(g, 1, 1, size=0.5),
        lambda g: zipf(0, 1),
    ]
    for call in calls:
        with pytest.raises(UserError):
            call(rng(0, "x"))


# ---------------------------------------------------------------- SLO rules


def test_slo_rules() -> None:
    models = model_set("light8")
    bases = {name: (0.1 * (i + 1), 0.01) for i, name in enumerate(models.names)}
    assert slo.resolve(slo.parse("5/2xP95"), models, bases)["llama-3.2-3b/1"] == pytest.approx((1.0, 0.02))
    assert slo.resolve(slo.parse("5xreleased"), models)["llama-3.1-8b/1"] == pytest.approx(
        (0.2143485546, 0.05731449195)
    )
    assert slo.resolve(slo.parse("released"), models)["llama-3.1-8b/1"] == (0.04286971092, 0.01146289839)
    assert set(slo.resolve(slo.parse("absolute:ttft=0.5,tpot=0.05"), models).values()) == {(0.5, 0.05)}
    assert set(slo.resolve(slo.parse("0.3xabsolute:ttft=10,tpot=0.1"), models).values()) == {(3.0, 0.03)}
    with pytest.raises(UserError, match=r"no P95 was measured of llama-3\.2-3b/1"):
        slo.resolve(slo.parse("5xP95"), models, {"llama-3.1-8b/1": (1, 1)})
    with pytest.raises(UserError, match="set heavy8 has no released SLO base"):
        slo.resolve(slo.parse("5xreleased"), model_set("heavy8"))


def test_slo_of_the_requests_own_latency() -> None:
    jobs = build(drawn(30), fixed())
    rule = slo.parse("3/2xsolo")
    assert isinstance(rule, slo.Scaled)
    timed = slo.by_isolated(jobs, rule, 0.001 * jobs.prompt_tokens.astype(np.float64), np.full(len(jobs), 0.01))
    assert timed.ttft_slo_s == pytest.approx(0.003 * jobs.prompt_tokens)
    assert set(timed.tpot_slo_s) == {0.02}
    with pytest.raises(UserError, match="no seconds by model"):
        slo.resolve(rule, fixed())


def test_slo_classes(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        "[class.chat]\nttft_s = 0.5\ntpot_s = 0.05\n[class.batch]\nttft_s = 10\ntpot_s = 1\n"
        '[models]\n"llama-3.1-8b*" = "chat"\n"*" = "batch"\n'
    )
    seconds = slo.resolve(slo.parse(f"classes:{path}"), model_set("light8"))
    assert seconds["llama-3.1-8b/2"] == (0.5, 0.05)
    assert seconds["llama-3.2-1b/2"] == (10.0, 1.0)
    path.write_text('[class.chat]\nttft_s = 0.5\ntpot_s = 0.05\n[models]\n"x*" = "chat"\n')
    with pytest.raises(UserError, match="no SLO class for model"):
        slo.resolve(slo.parse(f"classes:{path}"), model_set("light8"))


def test_a_base_at_a_scale() -> None:
    seconds = "absolute:ttft=10,tpot=0.1"
    assert [slo.scaled(seconds, x) for x in (1, 0.5)] == [seconds, f"0.5x{seconds}"]
    assert (slo.scaled("P95", 5), slo.scaled("5/2xP95", 1)) == ("5xP95", "5/2xP95")
    assert (slo.scaled("P95@l40s", 5), slo.scaled("solo@mi300x", 2)) == ("5xP95@l40s", "2xsolo@mi300x")
    assert [slo.parse(text) for text in ("5xP95@l40s", "3/2xsolo@mi300x")] == [
        slo.Scaled("P95", 5.0, 5.0, "l40s"),
        slo.Scaled("solo", 3.0, 2.0, "mi300x"),
    ]
    assert [slo.by_request(text) for text in ("3xsolo@l40s", "3xP95@l40s", "3xreleased")] == [True, False, False]
    with pytest.raises(UserError, match='"5/2xP95" has no scale'):
        slo.scaled("5/2xP95", 2)


@cases("text", ["", "5", "xP95", "5xP99", "-1xP95", "0xP95", "5/0xP95", "absolute:ttft=1", "infxP95",
                "5xP95@", "P95@h100*2+l40s", "5xreleased@h100", "absolute:ttft=1,tpot=1@h100"])  # fmt: skip
def test_what_is_no_slo_rule(text: str) -> None:
    with pytest.raises(UserError):
        slo.parse(text)
