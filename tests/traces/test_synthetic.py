"""The generator: exact counts, laws of every preset, and how near each comes to what was measured."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.policy.types import UserError
from harness.run.setup import load_models, load_trace
from tests.cases import cases
from tests.there import there
from traces import drawing, laws, readers, realism, schema, synthetic
from traces.drawing import Drawn, draw
from traces.load import Trace, of_table, sized, trace
from traces.realism import fit_of
from traces.stats import stats
from traces.synthetic import preset
from workloads.build import build, rate_rps

F8 = NDArray[np.float64]
NAMES = (*sorted(synthetic.OPEN), "hyperbolic-like+models=18", "arena-like+models=18", "arena-like+models=8")
seeds = st.integers(0, 2**40)


def of(drawn: Drawn, stream: int) -> F8:
    return np.asarray(drawn.arrival_s[drawn.model == stream])


def same(a: Drawn, b: Drawn) -> bool:
    return a.models == b.models and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in a._fields if name != "models"
    )


# ---------------------------------------------------------------- laws


@cases("name", NAMES)
def test_a_seed_is_a_trace(name: str) -> None:
    a, p = draw(name, 7), preset(name)
    assert same(a, draw(name, 7))
    assert not np.array_equal(a.arrival_s, draw(name, 8).arrival_s)
    assert (np.diff(a.arrival_s) >= 0).all()
    assert 0 <= a.arrival_s[0] <= a.arrival_s[-1] < a.span_s == p.span_s
    assert a.models == p.streams
    assert len(set(a.models)) == p.models
    assert min(a.prompt_tokens.min(), a.output_tokens.min()) >= 1
    assert (a.prompt_tokens + a.output_tokens).max() <= p.longest_tokens


@given(seeds)
def test_hyperbolic_counts_are_the_figures(seed: int) -> None:
    counts = np.bincount(draw("hyperbolic-like", seed).model, minlength=8)
    assert counts.tolist() == [250, 169, 70, 1158, 40, 5, 6, 4]
    longer = draw("hyperbolic-like+models=18+span_s=1200", seed)
    assert np.bincount(longer.model).tolist() == [2 * counts[k % 8] for k in range(18)]


@given(seeds, st.integers(1, 30))
def test_more_models_move_no_other(seed: int, models: int) -> None:
    whole = draw("hyperbolic-like+models=30", seed)
    some = draw(f"hyperbolic-like+models={models}", seed)
    assert all(np.array_equal(of(whole, k), of(some, k)) for k in range(models))


def test_herds_come_and_can_be_left_out() -> None:
    def crowd(name: str, stream: int, seed: int) -> int:
        """Return the most requests within 2.5 s."""
        times = of(draw(name, seed), stream)
        return int((np.searchsorted(times, times + drawing.HERD_S, "right") - np.arange(len(times))).max())

    for seed in range(20):
        assert 30 <= crowd("hyperbolic-like", 1, seed) <= 90  # two may meet
        assert crowd("hyperbolic-like+herd_s=0", 1, seed) < 12
        assert crowd("hyperbolic-like", 0, seed) < 20  # the stream of 250 has none in the figure
        assert crowd("hyperbolic-like-drift+drift_s=0", 0, seed) >= 30


def test_ticks_keep_time_together() -> None:
    drawn = draw("hyperbolic-like", 3)
    a, b = of(drawn, 5), of(drawn, 7)
    assert np.diff(a) == pytest.approx(np.full(4, 120.0), abs=8 * drawing.TICK_JITTER_S)
    apart = np.abs(b[:, None] - a[None, :])
    assert np.minimum(apart, 600 - apart).min(axis=1).max() < 8 * drawing.TICK_JITTER_S


@given(seeds, st.floats(50, 700))
def test_drift_leaves_stamps_lengths_and_totals(seed: int, drift_s: float) -> None:
    still = draw("hyperbolic-like", seed)
    moved = draw(f"hyperbolic-like+drift_s={drift_s}", seed)
    assert same(moved._replace(model=still.model), still)
    first = still.arrival_s < drift_s
    assert np.array_equal(moved.model[first], still.model[first])
    for begin_s in np.arange(0, 600, drift_s):  # within a period streams are renamed, no more
        here = (still.arrival_s >= begin_s) & (still.arrival_s < begin_s + drift_s)
        ours, theirs = (sorted(np.bincount(drawn.model[here], minlength=8)) for drawn in (moved, still))
        assert ours == theirs


def test_aegaeon_rates_are_equal() -> None:
    drawn = draw("aegaeon-like+models=40+span_s=3600+rate_rps=0.5", 1)
    counts = np.bincount(drawn.model, minlength=40)
    assert counts.mean() == pytest.approx(1800, rel=0.02)
    assert counts.var() == pytest.approx(1800, rel=0.6)  # Poisson's
    gaps = np.diff(of(drawn, 3))
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.1)


def test_arena_sets_are_cut_from_the_same_draw() -> None:
    whole, some = draw("arena-like", 5), draw("arena-like+models=18", 5)
    for k, (stream, shift_s) in enumerate(synthetic.released(18)):
        times = np.sort(np.maximum(of(whole, whole.models.index(stream)) + shift_s, 0) % 600)
        assert np.array_equal(of(some, k), times)
    long = draw("arena-like+span_s=3000", 5)
    assert len(long.arrival_s) == 5 * 1500
    assert long.span_s == 3000


def test_lengths() -> None:
    uniform = draw("hyperbolic-like+span_s=6000", 0)
    for tokens in (uniform.prompt_tokens, uniform.output_tokens):
        assert (tokens.min(), tokens.max()) == (8, 512)
        assert tokens.mean() == pytest.approx(260, rel=0.02)
    share = draw("aegaeon-like+models=80+span_s=6000", 0)
    assert np.median(share.prompt_tokens) == pytest.approx(589, rel=0.05)
    assert np.median(share.output_tokens) == pytest.approx(265, rel=0.05)
    assert share.output_tokens.mean() == pytest.approx(294, rel=0.05)
    cut = draw("aegaeon-like+models=80+span_s=6000+max_tokens=2048", 0)
    assert (cut.prompt_tokens + cut.output_tokens).max() == 2048
    assert np.array_equal(cut.output_tokens, share.output_tokens)
    arena = draw("hyperbolic-like+lengths=arena", 0)
    assert np.array_equal(arena.arrival_s, draw("hyperbolic-like", 0).arrival_s)
    assert np.median(arena.prompt_tokens) == pytest.approx(40, rel=0.2)


# ---------------------------------------------------------------- names


@cases("name", NAMES)
def test_a_name_is_read_back(name: str) -> None:
    assert preset(str(preset(name))) == preset(name)


@cases(
    ("name", "message"),
    [
        ("hyperbolik-like", "did you mean hyperbolic-like"),
        ("hyperbolic-like+model=3", r'"\+model=3" is not \+FIELD=VALUE of hyperbolic-like'),
        ("hyperbolic-like+rate_rps=3", "rate_rps=3"),
        ("hyperbolic-like+models=x", 'models is "x", not a number'),
        ("hyperbolic-like+models=0", "models is 0, below 1"),
        ("hyperbolic-like+span_s=0", "span_s is 0.0, not above 0"),
        ("hyperbolic-like+span_s=nan", "span_s is nan"),
        ("hyperbolic-like+drift_s=-1", "drift_s is -1.0, below 0"),
        ("hyperbolic-like+lengths=long", 'lengths is "long"'),
        ("aegaeon-like+rate_rps=0", "rate_rps is 0.0, not above 0"),
        ("aegaeon-like+models=9999", "above 1000"),
        ("arena-like+models=9", "arena-like has 4, 8, 18, 27 models, not 9"),
        ("poisson+models=2", r'"\+models=2" is not'),
        ("hot-cold+alpha=1", r'"\+alpha=1" is not'),
        ("power-law+lengths=sharegpt", 'lengths is "sharegpt"'),
        ("poisson+lengths=fixed+prompt=4000", "4000 . 256 tokens are above max_tokens, 2048"),
    ],
)
def test_a_wrong_name_is_told_so(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        preset(name)
    assert "\n" not in str(caught.value)


def test_only_generators_take_fields() -> None:
    for name in ("arena-chat+models=8", "hyperbolic+span_s=5"):
        with pytest.raises(UserError, match="is no generator"):
            load_trace(name)
    with pytest.raises(UserError, match="did you mean hyperbolic-like"):
        load_trace("hyperbolic-lik+models=8")


# ---------------------------------------------------------------- with sets


@cases(("models", "n"), [("light8", 8), ("heavy8", 8), ("prism18", 18), ("tp4", 4)])
def test_a_generator_has_as_many_streams_as_the_set(models: str, n: int) -> None:
    name = sized("hyperbolic-like", n)
    assert name == f"hyperbolic-like+models={n}"
    loaded = load_trace(name)
    jobs = build(loaded, load_models(models), seed=3, warmup_s=0)
    again = draw(name, 3)
    assert np.bincount(jobs.model).tolist() == np.bincount(again.model).tolist()  # the k-th stream, the k-th model
    assert loaded.longest_tokens == 1024
    assert str(fit_of(loaded, load_models(models).streams)).startswith("off: idle P75" if n == 4 else "within")
    assert sized(f"hyperbolic-like+models={n + 1}", n) == f"hyperbolic-like+models={n + 1}"


def test_arena_is_judged_by_the_streams_that_a_set_uses() -> None:
    loaded = load_trace("arena-like")
    for models, n in (("light8", 8), ("prism18", 18), ("tp4", 4)):
        expected = there(realism.realism(f"arena-like+models={n}"))
        assert fit_of(loaded, load_models(models).streams) == expected.verdict
    whole = there(realism.realism("arena-like"))
    assert fit_of(loaded, load_models("llama-3.2-1b*3").streams) == whole.verdict


# Mean of the draws: shares of the hottest, of the bottom 60 % and active, in points off the target; the quartiles of
# idle time and of CV as ratios to it.
ARENA_FIT = {
    "arena-like": [-0.3, -0.1, -1.0, 1.05, 0.94, 0.97, 0.94, 1.00, 1.04],
    "arena-like+models=18": [-0.2, -0.1, -1.1, 0.95, 0.97, 0.89, 0.86, 1.12, 1.08],
    "arena-like+models=8": [-0.3, -0.4, -0.2, 0.93, 0.97, 0.89, 0.86, 1.03, 1.01],
    "arena-like+models=4": [0.9, -1.1, -0.4, 1.13, 1.18, 1.20, 1.06, 1.15, 1.12],
    "arena-like+span_s=3600": [0.2, -0.2, -0.3, 1.04, 0.94, 0.99, 0.93, 0.97, 1.02],
    "arena-like+models=8+span_s=1800": [0.3, 0.1, 0.2, 0.96, 1.01, 0.95, 0.86, 1.03, 1.00],
}


@cases("name", sorted(ARENA_FIT))
def test_arena_like_is_within_its_bounds_for_every_set_and_in_long_windows(name: str) -> None:
    checked = there(realism.realism(name))
    assert checked.verdict == "within"
    far = realism.off(checked.mean, checked.target)
    points = [100 * x for row, x in far.items() if row.judged and row.points]
    ratios = [1 + x for row, x in far.items() if row.judged and not row.points]
    assert points == pytest.approx(ARENA_FIT[name][:3], abs=0.06)
    assert ratios == pytest.approx(ARENA_FIT[name][3:], abs=0.006)


@given(seeds)
def test_arena_streams_come_while_arena_chats_do(seed: int) -> None:
    drawn = draw("arena-like+span_s=1800", seed)
    for rank, (begin, end) in enumerate(synthetic.ARENA_USE):
        times = of(drawn, rank) % 600
        assert ((10 * begin <= times) & (times <= 10 * end)).all()
    short = draw("arena-like+span_s=60", seed)
    assert (of(short, 3) >= 45).all()  # stretched: used from 450 s of 600 on


def test_without_the_counts_the_fitted_ones_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    load_trace.cache_clear()
    stand_in = load_trace("hyperbolic")
    assert stand_in.name == "hyperbolic-like"
    assert "hyperbolic is not here: using hyperbolic-like, synthetic" in there(stand_in.notice)
    assert sized("hyperbolic", 18) == "hyperbolic-like+models=18"
    load_trace.cache_clear()


# ---------------------------------------------------------------- targets


def test_the_verdict() -> None:
    target = realism.targets()["hyperbolic-like.8"]
    assert realism.verdict(target.values, target) == "within"
    rows = {(row.key, row.at): row for row in target.values}
    far = dict(target.values)
    far[rows["idle_median_s", 2]] *= 1.48
    far[rows["minute_cv_models", 0]] *= 1.29
    far[rows["switches_per_hour", None]] *= 9  # not judged
    assert realism.verdict(far, target) == "off: idle P75 +48 %"
    far[rows["top1_share", None]] -= 0.031
    assert realism.verdict(far, target) == "off: idle P75 +48 %, share of the hottest -3.1 points"


def test_a_longer_trace_is_judged_by_windows() -> None:
    long = there(realism.realism("hyperbolic-like+models=18+span_s=7200"))
    assert long.verdict == "within"
    assert realism.realism("sample") is None


def test_the_mark_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    schema.write(drawing.table("hyperbolic-like", 4, "off: idle P75 +48 %"), path)
    loaded = trace(str(path))
    assert (loaded.fit, loaded.ordered, loaded.maker) == ("off: idle P75 +48 %", True, "hyperbolic-like+models=8")
    assert (loaded.length_origin, loaded.tier) == ("uniform", "synthetic")


def close(measured: dict[str, object], name: str) -> None:
    """Check every number of a target against `measured`, to its last digit."""
    target = realism.targets()[name]
    for row, value in target.values.items():
        assert realism.pick(measured[row.key], row) == pytest.approx(value, abs=6e-5), (name, row.name)


def table(like: Trace, span_s: float, streams: tuple[str, ...], times: list[F8]) -> Trace:
    when, model = np.concatenate(times), np.repeat(np.arange(len(times), dtype=np.int32), [len(x) for x in times])
    order = np.argsort(when, kind="stable")
    tokens = np.ones(len(when), np.int32)
    short = replace(like, prompt_tokens=tokens, output_tokens=tokens)
    return replace(short, span_s=span_s, models=streams, arrival_s=when[order], model=model[order])


@cases("models", sorted(synthetic.RELEASED))
def test_arena_targets_are_the_traces(traces_dir: Path, models: int) -> None:
    arena = trace("arena-chat")
    times = [
        synthetic.shifted(arena.arrival_s[arena.model == arena.models.index(stream)], shift_s, 600.0)
        for stream, shift_s in synthetic.released(models)
    ]
    if models == 27:
        close(stats(arena), "arena-like.27")
    else:
        close(stats(table(arena, 600.0, preset(f"arena-like+models={models}").streams, times)), f"arena-like.{models}")


def counts_csv(traces_dir: Path) -> Path:
    return traces_dir / "hyperbolic_fig_digitised" / "hyperbolic_10min_7models_counts.csv"


@cases(("name", "streams"), [("hyperbolic-like.8", 7), ("hyperbolic-like", 7), ("hyperbolic-like.4", 4)])
def test_hyperbolic_targets_are_the_figures(traces_dir: Path, name: str, streams: int) -> None:
    every = []
    for seed in range(100):
        drawn = of_table(readers.read("hyperbolic", counts_csv(traces_dir), jitter_seed=seed), "x")
        times = [drawn.arrival_s[drawn.model == k] for k in range(streams)]
        every.append(stats(table(drawn, 600.0, drawn.models[:streams], times)))
    target = realism.targets()[name]
    close({row.key: np.mean([values[row.key] for values in every], axis=0).tolist() for row in target.values}, name)


def test_hyperbolic_counts(traces_dir: Path) -> None:
    rows = trace("hyperbolic")
    assert np.bincount(rows.model).tolist() == [250, 169, 70, 1158, 40, 5, 6, 4]
    assert (rows.tier, rows.length_origin, rows.ordered, rows.resolution_s) == ("composed", "uniform", True, 2.5)
    with counts_csv(traces_dir).open() as file:
        counts = np.array([row[2:] for row in list(csv.reader(file))[1:]], int)
    bins = (rows.arrival_s // 2.5).astype(int)
    assert all(np.array_equal(np.bincount(bins[rows.model == k], minlength=240), counts[:, k]) for k in range(7))
    assert (rows.prompt_tokens.min(), rows.prompt_tokens.max()) == (8, 512)
    assert rows.models == preset("hyperbolic-like").streams


@cases("row", ["0,2.5,1.5", "0,2.5,-1", "2.5,0,1", "0,2.5,x"])
def test_counts_that_are_none(tmp_path: Path, row: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(f"bin_start_s,bin_end_s,model_1\n0,2.5,3\n{row}\n")
    with pytest.raises(UserError, match=r"c\.csv"):
        readers.read("hyperbolic", path)


@cases(("models", "rate", "span_s"), [(n, *drawn) for n in (8, 18) for drawn in (("0.1", 120.0), ("0.5", 60.0))])
def test_aegaeon_targets_are_the_released_files(traces_dir: Path, models: int, rate: str, span_s: float) -> None:
    def released(n: int) -> Trace:
        path = traces_dir / "aegaeon_synth" / f"synth-{n}-{rate}-1.0-1.0.csv.gz"
        with gzip.open(path, "rt") as file:
            rows = list(csv.reader(file))[1:]
        at = np.array([[float(x) for x in row[0].split(":")] for row in rows]) @ (3600.0, 60.0, 1.0)
        names = np.array([row[1] for row in rows])
        streams = tuple(sorted(set(names.tolist())))
        return table(trace("sample"), span_s, streams, [np.sort(at[names == stream]) for stream in streams])

    measured = stats(released(models)) | {"idle_median_s": stats(released(80))["idle_median_s"]}
    close(measured, f"aegaeon-like.{models}x{rate}")


# ---------------------------------------------------------------- streams with rates and laws of lengths


def test_the_kth_most_popular_stream_has_a_rate_in_proportion_to_k_to_minus_alpha() -> None:
    name = "power-law+models=4+rate_rps=40+alpha=1.3+span_s=500"
    p, drawn = preset(name), draw(name, 3)
    assert p.rates == pytest.approx([40 / (k + 1) ** 1.3 for k in range(4)])
    counts = np.bincount(drawn.model, minlength=4)
    assert (abs(counts - 500 * np.array(p.rates)) < 5 * np.sqrt(500 * np.array(p.rates))).all()
    assert (draw("power-law+rate_rps=0.001+span_s=1", 0).model == np.arange(8)).sum() <= 8
    assert sorted(draw("power-law+rate_rps=0.001+span_s=1", 0).model.tolist()) == [*range(8)]  # at least one of each
    assert rate_rps(trace(name), load_models("llama-3.2-1b*4")) == pytest.approx(sum(p.rates))


def test_hot_and_cold_are_streams_of_these_names() -> None:
    drawn = draw("hot-cold+rate_rps=20+cold_rps=2+lengths=fixed+prompt=512+output=1024+span_s=400", 1)
    assert drawn.models == ("cold", "hot")
    cold, hot = np.bincount(drawn.model)
    assert (cold / 400, hot / 400) == (pytest.approx(2.0, rel=0.2), pytest.approx(20.0, rel=0.1))
    assert {*zip(drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)} == {(512, 1024)}


@cases(("data", "law"), [(data, law) for data in laws.MEANS for law in laws.LAWS])
def test_lengths_of_a_law_have_the_data_sets_means_and_fit(data: str, law: str) -> None:
    name = f"poisson+rate_rps=20+span_s=1000+lengths={law}-{data}"
    drawn = draw(name, 5)
    both = np.stack([drawn.prompt_tokens, drawn.output_tokens], 1)
    assert both.mean(0) == pytest.approx(laws.MEANS[data], rel=0.04)
    assert both.min() >= 1
    assert both.sum(1).max() <= preset(name).longest_tokens == 2048
    assert laws.law(f"{law}-{data}") == law


def test_lengths_beyond_the_bound_are_left_out_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / laws.CONV
    path.parent.mkdir()
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023,700,240\n" * 400 + "2023,2000,240\n2023,9,0\n")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    laws.rows.cache_clear()
    assert (len(laws.rows(2048)), np.unique(laws.rows(2048), axis=0).tolist()) == (400, [[700, 240]])
    laws.rows.cache_clear()
