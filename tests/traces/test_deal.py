"""A log dealt to models: whole units, every request once, stated shares, the same bytes; and what a name may ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.policy.types import UserError
from harness.run.resolve import resolve
from harness.run.setup import Setup, load_trace
from harness.run.spec import Spec
from tests.cases import cases
from tests.there import there
from traces import readers, schema
from traces.arrivals import zipf
from traces.convert import convert
from traces.deal import IDLE, TOGETHER, Asked, dealt, owners, parsed, spread, units
from traces.kept import canonical
from traces.load import Trace, of_table, present, sized, trace
from traces.stats import stats
from traces.synthetic import HYPERBOLIC, popularity
from workloads.build import build
from workloads.models import model_set
from workloads.picking import assigned

LOGS = ("azure-conv", "azure-code", "fineserve-30-100b", "mooncake-conversation", "mooncake-synthetic")


def log(arrival_s: list[float], chains: list[list[int]] | None = None) -> pa.Table:
    n = len(arrival_s)
    columns: dict[str, Any] = {
        "request_id": np.arange(n),
        "arrival_s": np.array(arrival_s, float),
        "model": ["one"] * n,
        "prompt_tokens": np.arange(1, n + 1) if chains is None else [max(1, 4 * len(chain)) for chain in chains],
        "output_tokens": np.ones(n, int),
    }
    if chains is not None:
        columns["prefix_hashes"] = pa.array(chains, pa.list_(pa.uint64()))
    return schema.table(columns, {"name": "log", "span_s": max(arrival_s) + 1, "block_tokens": 4})


def model_of(rows: pa.Table) -> NDArray[np.int64]:
    return np.asarray(rows["model"].combine_chunks().indices.to_numpy(), np.int64)


# ---------------------------------------------------------------- what stays together


def test_bursts_end_where_a_gap_is_longer_than_the_mean() -> None:
    assert units(log([0, 0.1, 0.2, 5, 5.1, 10]))[0].tolist() == [0, 0, 0, 1, 1, 2]  # the mean gap is 2 s
    assert units(log([0, 1, 2, 3]))[0].tolist() == [0, 0, 0, 0]  # none is longer
    assert units(log([7.0]))[0].tolist() == [0]


def test_sessions_share_a_block_beyond_those_of_all() -> None:
    chains = [[9, 1], [9, 2], [9, 1, 3], [9, 4], [9, 2, 5], [9, 1, 3, 6], [9]]
    times = [float(k) for k in range(7)]
    assert units(log(times[:6], chains[:6]))[0].tolist() == [0, 1, 0, 2, 1, 0]
    assert units(log(times, chains))[0].tolist() == [0, 1, 0, 2, 1, 0, 3]  # the last has no block of its own
    assert units(log(times[:3], [[9], [9], [9]]))[0].tolist() == [0, 1, 2]
    assert units(log(times[:3], [[1], [2], [1, 3]]))[0].tolist() == [0, 1, 0]  # there is no common beginning


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 20), st.integers(0, 2**31))
def test_each_share_is_met_but_for_one_unit(sizes: list[int], models: int, number: int) -> None:
    each, shares = np.array(sizes, np.int64), popularity(models)
    owner = owners(each, shares, number)
    got = np.bincount(owner, each, minlength=models)
    assert got.sum() == each.sum()
    assert (np.abs(got - shares * each.sum()) <= each.max() + 1e-6).all()
    assert np.array_equal(owner, owners(each, shares, number))


def test_shares_are_those_of_the_fitted_streams() -> None:
    assert popularity(8) == pytest.approx(np.array([250, 169, 70, 1158, 40, 5, 6, 4]) / 1702)
    assert popularity(18).sum() == pytest.approx(1)
    assert popularity(18)[11] / popularity(18)[0] == pytest.approx(HYPERBOLIC[3].requests / HYPERBOLIC[0].requests)


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(2, 300))
def test_every_request_is_dealt_once_and_no_unit_is_split(number: int, models: int, n: int) -> None:
    draw = np.random.default_rng(number)
    rows = log(np.cumsum(draw.gamma(0.3, 1, n)).tolist())
    dealt_rows = dealt(rows, Asked("", models, deal=number))[0]
    for column in ("request_id", "arrival_s", "prompt_tokens", "output_tokens"):
        assert dealt_rows[column].equals(rows[column])
    unit, model = dealt_rows["session_id"].to_numpy(), model_of(dealt_rows)
    assert np.array_equal(unit, units(rows)[0])
    assert len(set(zip(unit.tolist(), model.tolist(), strict=True))) == unit.max() + 1
    assert dealt_rows.equals(dealt(rows, Asked("", models, deal=number))[0])
    assert dealt_rows.schema.metadata == dealt(rows, Asked("", models, deal=number))[0].schema.metadata


# ---------------------------------------------------------------- names


@cases("name", ["azure-conv", "azure-conv+models=8", "mooncake-conversation+models=8+deal=3+max_tokens=8192"])
def test_a_name_is_read_back(name: str) -> None:
    assert str(parsed(name)) == sized(name, 8) == name
    assert parsed("azure-conv+deal=0+models=8") == Asked("azure-conv", 8)  # and so they are one run


@cases(
    ("name", "message"),
    [
        (
            "azure-conv+span_s=5",
            r'"\+span_s=5" is not \+FIELD=VALUE of a log \(models, zipf, idle, together, deal, max_tokens\)',
        ),
        ("azure-conv+models", 'models is "", not a whole number from 1 on'),
        ("azure-conv+models=0", 'models is "0", not a whole number from 1 on'),
        ("azure-conv+models=1e3", 'models is "1e3"'),
        ("azure-conv+models=²", 'models is "²"'),
        ("azure-conv+models=99999", "models is 99999, above 1000"),
        ("azure-conv+models=8+max_tokens=1", 'max_tokens is "1", not a whole number from 2 on'),
        ("azure-conv+models=8+models=9", "models is there twice"),
        ("azure-conv+deal=1", "deal without models"),
    ],
)
def test_a_wrong_name_is_told_so(name: str, message: str) -> None:
    for read in (parsed, trace):
        with pytest.raises(UserError, match=message) as caught:
            read(name)
        assert "\n" not in str(caught.value)


@cases(
    ("name", "more", "file"),
    [("azure-conv", "+models=8", "Azure"), ("mooncake-conversation", "", "conversation_trace")],
)
def test_without_the_log_nothing_stands_in(
    name: str, more: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    if present(name) is not None:
        pytest.skip("traces/data/ holds the real one")
    with pytest.raises(UserError, match=f"trace {name} is not here, and nothing stands in for it: put {file}"):
        trace(name + more)


# ---------------------------------------------------------------- readers


def test_rows_without_a_stamp_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "Dense_1to2B.csv"
    path.write_text(
        "input_length,output_length,latency,timestamp\n5,6,1,0.0\n7,8,,\n9,0,1,2000000.0\n3,4,1,3500000.0\n"
    )
    rows = readers.read("fineserve", path)
    assert rows["arrival_s"].to_pylist() == [0.0, 3.5]
    assert rows["src_row"].to_pylist() == [2, 5]
    meta = schema.metadata(rows)
    assert meta["dropped"] == {"without time": 1, "without output tokens": 1}
    assert meta["name"] == "fineserve-1-2b"
    columns = {"arrival_s": "timestamp", "prompt_tokens": "input_length", "output_tokens": "output_length"}
    with pytest.raises(UserError, match=r'Dense_1to2B\.csv:3: column "timestamp" is "", not a time'):
        convert(path, columns, model="m", time_unit="us")
    path.write_text("input_length,output_length,timestamp\n5,6,\n")
    with pytest.raises(UserError, match="no row is left of 1: 1 without time"):
        readers.read("fineserve", path)


@cases(
    ("name", "golden"),
    [
        ("azure-conv", (19_366, 14_089, 3501.903, 1154.697, 211.055)),
        ("azure-code", (8_819, 7_841, 3436.338, 2047.803, 27.887)),
        ("fineserve-30-100b", (21_043, 67_487, 28_798.518, 1638.0, 310.0)),
    ],
)
def test_logs_are_the_published_ones(traces_dir: Path, name: str, golden: tuple[float, ...]) -> None:
    """Requests, longest, seconds, and means of prompt and output as published, or measured on the published file."""
    published = trace(name)
    assert (len(published), published.longest_tokens) == golden[:2]
    assert published.span_s == pytest.approx(golden[2], abs=6e-4)
    assert published.prompt_tokens.mean() == pytest.approx(golden[3], rel=0.005)
    assert published.output_tokens.mean() == pytest.approx(golden[4], rel=0.005)
    assert published.name == name


# ---------------------------------------------------------------- the real logs, dealt


@pytest.fixture(scope="module")
def logs(traces_dir: Path) -> dict[str, Trace]:
    return {name: trace(f"{name}+models=8") for name in LOGS}


@cases(
    ("name", "count", "largest"),
    [
        ("azure-conv", 6_871, 24),
        ("azure-code", 499, 456),
        ("fineserve-30-100b", 6_964, 22),
        ("mooncake-conversation", 7_373, 43),
        ("mooncake-synthetic", 2_211, 24),
    ],
)
def test_the_logs_are_dealt_by_their_shares(logs: dict[str, Trace], name: str, count: int, largest: int) -> None:
    whole, mixed = trace(name), logs[name]
    assert (mixed.name, mixed.tier, mixed.ordered, len(mixed)) == (f"{name}+models=8", "composed", True, len(whole))
    assert np.array_equal(mixed.arrival_s, whole.arrival_s)
    assert mixed.span_s == whole.span_s
    got = np.bincount(mixed.model, minlength=8)
    assert np.abs(got - popularity(8) * len(mixed)).max() <= largest
    assert mixed.sha256 == trace(f"{name}+models=8").sha256 != trace(f"{name}+models=8+deal=1").sha256
    path = there(present(name))
    reader = {"azure": "azure", "fineserve": "fineserve", "mooncake": "mooncake"}[name.partition("-")[0]]
    size = np.bincount(units(readers.read(reader, path))[0])
    assert (len(size), size.max()) == (count, largest)


def test_conversations_find_their_blocks_wherever_they_are_dealt(logs: dict[str, Trace]) -> None:
    """But for the block that all prompts begin with, which each model has to compute once."""
    whole = trace("mooncake-conversation")
    hits, all_hits = stats(logs["mooncake-conversation"])["hit_share"], stats(whole)["hit_share"]
    assert (all_hits - hits) * whole.prompt_tokens.sum() == pytest.approx(7 * 512)


def test_what_is_beyond_a_bound_is_counted(traces_dir: Path) -> None:
    kept = trace("mooncake-conversation+models=8+max_tokens=8192")
    assert kept.longest_tokens <= 8192
    assert len(kept) == 6461
    assert kept.left_out == "5,570 of 12,031 requests beyond 8,192 tokens"
    assert f"{kept.left_out} left out" in kept.note
    assert trace("mooncake-conversation+models=8").left_out == ""


def test_a_bound_is_asked_for_where_a_model_serves_less(logs: dict[str, Trace]) -> None:
    bound = r"such rows; --trace azure-conv\+models=1\+max_tokens=2048 leaves them out, and says how many\)$"
    with pytest.raises(UserError, match=rf"exceed the 2048 of phi-2.*{bound}"):
        build(trace("azure-conv+models=1"), model_set("phi-2"))
    says = r"azure-conv has 1 models, set light8 needs 8 .*\+models=8 on the trace's name"
    with pytest.raises(UserError, match=says):
        assigned(trace("azure-conv"), model_set("light8"))
    assert assigned(logs["azure-conv"], model_set("light8")).rule == "in order"


def test_a_dealt_log_is_replayed(traces_dir: Path) -> None:
    log = "fineserve-30-100b+deal=1+models=8+max_tokens=8192"
    spec = resolve(Spec("static", trace=log, models="light8", window_s=600.0))
    assert spec.trace == "fineserve-30-100b+models=8+deal=1+max_tokens=8192"
    assert spec.trace_sha256 == load_trace(spec.trace).sha256
    jobs = Setup(spec).jobs()
    assert jobs.arrival_s.max() < 600
    assert len(json.dumps(spec.trace)) < 100


# ---------------------------------------------------------------- logs of one's own


def test_sessions_then_clients_stay_together() -> None:
    rows = log([0.0, 1.0, 2.0, 3.0])
    with_clients = rows.append_column("tenant", pa.array(["a", "b", "a", "b"]).dictionary_encode())
    with_sessions = with_clients.append_column("session_id", pa.array([5, 5, 5, 9], pa.uint64()))
    assert [units(each)[1] for each in (rows, with_clients, with_sessions)] == ["bursts", "clients", "sessions"]
    assert units(with_clients)[0].tolist() == [0, 1, 0, 1]
    assert units(with_sessions)[0].tolist() == [0, 0, 0, 1]


def test_a_spread_says_what_the_log_does_not_tell() -> None:
    bursts = log([0.0, 0.1, 9.0, 9.1, 20.0])
    assert dealt(bursts, spread("2:zipf=1"))[1] == (
        "split among 2 models by bursts, shares ~ rank^-1; no sessions in the log: correlation assumed"
    )
    named = bursts.append_column("session_id", pa.array(range(5), pa.uint64()))
    rows, note = dealt(named, spread("2:idle=some,together=pairs"))
    says = "split among 2 models by sessions, with the shares of hyperbolic-like, some of the time idle, in pairs"
    assert note == says
    assert schema.metadata(rows)["tier"] == "composed"


@cases(("idle", "together"), [(idle, together) for idle in ("none", "some", "much") for together in TOGETHER])
def test_a_spread_keeps_shares_and_whole_sessions(idle: str, together: str) -> None:
    draw = np.random.default_rng(3)
    session = draw.integers(0, 800, 4000)
    begin = np.sort(draw.uniform(0, 36_000, 800))
    order = np.argsort(when := begin[session] + draw.exponential(60, 4000))
    rows = log(when[order].tolist()).append_column("session_id", pa.array(session[order], pa.uint64()))
    out = dealt(rows, spread(f"6:zipf=1.2,idle={idle},together={together},deal=1"))[0]
    model = model_of(out)
    for each in np.unique(session):
        assert len(set(model[session[order] == each])) == 1
    share = np.bincount(model, minlength=6) / 4000
    assert share == pytest.approx(zipf(6, 1.2), abs=0.03)
    assert out.equals(dealt(rows, spread(f"6:zipf=1.2,idle={idle},together={together},deal=1"))[0])


def test_models_that_rest_are_idle_for_longer() -> None:
    when = np.sort(np.random.default_rng(4).uniform(0, 36_000, 6000)).tolist()
    rows = log(when).append_column("session_id", pa.array(range(6000), pa.uint64()))
    spreads = [dealt(rows, spread(f"8:zipf=1,idle={idle}"))[0] for idle in IDLE]
    active = [stats(of_table(rows, "x"))["active_fraction"] for rows in spreads]
    assert active[0] > active[1] > active[2]


def test_a_log_is_converted_once_and_kept(tmp_path: Path) -> None:
    path, folder = tmp_path / "log.csv", tmp_path / "kept"
    lines = [f"{k}.5,a,{k + 1},5,s{k // 4}" for k in range(40)]
    path.write_text("\n".join(["time,model,prompt_tokens,output_tokens,session", *lines]))
    first, report = canonical(path, folder)
    stamp = first.stat().st_mtime_ns
    assert report.startswith("log.csv read as a table, times guessed to be seconds")
    assert canonical(path, folder) == (first, report)
    assert first.stat().st_mtime_ns == stamp
    other, report = canonical(path, folder, spread("4:zipf=1"))
    assert other != first
    assert "split among 4 models by bursts" in report
    assert trace(str(other)).tier == "composed"
    assert canonical(first, folder) == (first, "")


@cases(
    ("text", "why"),
    [
        ("x", "models is"),
        ("0", "models is"),
        ("2:zipf=x", "zipf is"),
        ("2:idle=lots", "idle is"),
        ("2:nope=1", "is not FIELD=VALUE"),
        ("2:deal=0,deal=1", "there twice"),
        ("9999999", "above"),
    ],
)
def test_a_wrong_spread_is_told_so(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        spread(text)
