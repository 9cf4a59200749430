"""Seeing why: a request in order of time, what misses were made of, and a run as a trace for Perfetto."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.engines.sim.trace import Trace
from harness.policy.types import Inst
from harness.rows import record
from harness.run import perfetto as trace_event
from harness.run import retrace
from harness.run.stretches import Part, by_cause, folded
from plots import fig_causes
from tests.bench import bench, mistake, ok
from tests.cases import cases
from tests.harness.run.test_sweep import files
from tests.plots.test_style import lightness

SYSTEMS = "static,prism,qlm,aegaeon,muxserve:original"
SETTING = "--trace sample --models nemo-12b*4 --gpus 2 --seeds 1 --rate-scale 2,4 --no-plot".split()
NAMES = ("static", "prism", "qlm", "aegaeon", "muxserve")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results of a comparison at two rates."""
    folder = tmp_path_factory.mktemp("results")
    ok("compare", "--systems", SYSTEMS, *SETTING, "-o", folder)
    return folder


@pytest.fixture(scope="module")
def sweep(out: Path) -> Path:
    return next(out.glob("sample-*"))


def run_of(out: Path, system: str) -> Path:
    """Return the run of a system at the higher rate."""
    return max(out.glob(f"{system}-*"), key=lambda run: record.meta(run)["spec"]["rate_scale"])


Traced = Callable[[str], tuple[Path, pa.Table, Trace]]


@pytest.fixture(scope="module")
def traced(out: Path) -> Traced:
    """Return the run of a system, its rows and what happened in it."""

    @cache
    def of(system: str) -> tuple[Path, pa.Table, Trace]:
        run = run_of(out, system)
        stored = record.read(run)
        return run, stored, retrace.retrace(run, stored)

    return of


# ------------------------------------------------------------------ one request in order of time


@pytest.mark.full
@cases("system", NAMES)
def test_the_parts_of_every_request_sum_to_its_latency(system: str, traced: Traced) -> None:
    _, stored, trace = traced(system)
    rows = {row["id"]: row for row in stored.to_pylist()}
    seen = 0
    for short, parts in retrace.every(trace, stored):
        row = rows[short["id"]]
        latency_ns = sum(row[f"{wait}_ns"] for wait in record.WAITS)
        if not latency_ns:
            continue
        seen += 1
        assert sum(sum(part.ns.values()) for part in parts) == latency_ns
        assert [part.start_ns for part in parts] == [row["arrival_ns"], *(part.end_ns for part in parts[:-1])]
        assert all(sum(part.ns.values()) == part.end_ns - part.start_ns > 0 for part in parts)
        by_wait = by_cause(part.ns for part in parts)
        for wait in record.WAITS:  # each was rounded by itself, once a part
            assert by_wait.get(wait, 0) == pytest.approx(row[f"{wait}_ns"], abs=4 + 2 * len(parts)), (row["id"], wait)
        made_ns = retrace.first_ns(trace, row["id"])
        assert (made_ns is None) == (row["first_ns"] is None)
        until_ns = row["arrival_ns"] + latency_ns if made_ns is None else made_ns
        before = by_cause(part.ns for part in parts if part.end_ns <= until_ns)
        for wait in set(record.WAITS) - {"host"}:
            until_first = pytest.approx(row[f"ttft_{wait}_ns"], abs=4 + 2 * len(parts))
            assert before.get(wait, 0) == until_first, (row["id"], wait)
    assert seen == len(rows)


@cases("system", NAMES)
def test_one_request_alone_is_traced_as_among_all(system: str, traced: Traced) -> None:
    run, stored, whole = traced(system)
    rid = stored.num_rows // 2
    row, stretches = stored.slice(rid, 1).to_pylist()[0], retrace.by_request(whole)[rid]
    alone = retrace.retrace(run, stored, look_at=rid)
    assert {stretch.request for stretch in alone.stretches} == {rid}
    seen = [[part._replace(facts={}, ns={}) for part in retrace.parts(row, x)] for x in (alone.stretches, stretches)]
    assert seen[0] == seen[1]


def test_explain_shows_a_request_in_order_of_time(out: Path) -> None:
    run = run_of(out, "qlm")
    rows = record.read(run).to_pylist()
    row = max(rows, key=lambda q: (q["state"] == "done") * q["load_ns"])
    printed = ok("explain", run, "--request", row["id"], "--all").splitlines()
    lines = [line for line in printed if re.match(r" +\d+\.\d{4} s  ", line)]
    order = lines[: next(i for i, line in enumerate(printed) if "by cause" in line) - printed.index(lines[0])]
    starts = [float(line.split()[0]) for line in order]
    assert starts == sorted(starts)
    words = [line.split()[2] for line in order]
    assert words[0] == "arrived"
    assert words[-1] == "done"
    assert {"load", "prefill", "decode", "host"} <= set(words)
    took = sum(float(line.split()[3]) for line in order if re.search(r" s    \w+ +[\d.]+ s", line))
    assert took == pytest.approx((row["done_ns"] - row["arrival_ns"]) / 1e9, abs=1e-3)
    ttft = next(line for line in printed if line.startswith("  its TTFT: "))
    parts = [float(x) for x in re.findall(r"([\d.e+-]+) s \(", ttft)]
    assert sum(parts) == pytest.approx((row["first_ns"] - row["arrival_ns"]) / 1e9, rel=2e-3)
    assert parts == sorted(parts, reverse=True)
    load = next(line for line in order if line.split()[2] == "load" and "on its links" in line)
    named = [float(x) for x in re.findall(r"(?:asked for|memory|links|then) ([\d.]+) s", load)]
    assert sum(named) == pytest.approx(float(load.split()[3]), abs=3e-4)


def test_parts_of_a_kind_are_folded_and_counted() -> None:
    inst, other = Inst("m", (0,)), Inst("m", (1,))
    steps = "queue prefill queue prefill queue decode queue decode queue decode".split()
    kinds = [("host", None), *((doing, inst) for doing in steps), ("transfer", other), ("decode", other)]
    names = {"prefill": "compute", "decode": "contention"}
    parts = [
        Part(doing, 10 * i, 10 * i + 10, {names.get(doing, doing): 10}, 0, inst)
        for i, (doing, inst) in enumerate(kinds)
    ]
    shown = folded(parts)
    assert " ".join(f"{x.doing}:{x.gaps}" for x in shown) == (
        "host:0 queue:0 prefill:1 queue:0 decode:2 transfer:0 decode:0"
    )
    assert shown[4].ns == {"contention": 30, "queue": 20}
    assert [x.end_ns for x in shown[:-1]] == [x.start_ns for x in shown[1:]]
    assert sum(sum(x.ns.values()) for x in shown) == 10 * len(kinds)


@cases(
    ("fidelity", "later_ns", "says"),
    [("simulated", 1, "was made by other sources"), ("emulated", 0, "is emulated: only simulated runs")],
)
def test_a_run_that_cannot_be_made_again_is_explained_by_its_sums_alone(
    fidelity: str, later_ns: int, says: str, out: Path, tmp_path: Path
) -> None:
    run = run_of(out, "static")
    stored = record.read(run)
    column = pa.array([x + later_ns for x in stored["queue_ns"].to_pylist()], pa.int64())
    at = stored.schema.get_field_index("queue_ns")
    other = stored.set_column(at, stored.schema.field(at), column)
    about = record.meta(run) | {"fidelity": fidelity}
    del about["counts"]
    record.write(tmp_path / run.name, other.to_batches(), about)
    result = bench("explain", tmp_path / run.name, "--request", 3, "--slo", "absolute:ttft=1,tpot=1")
    assert result.exit_code == 0
    assert says in result.stderr
    assert "by cause:" in result.stdout
    failed = bench("timeline", tmp_path / run.name, "-o", tmp_path / "t.json")
    assert (failed.exit_code, failed.stderr.count("\n")) == (2, 1)
    assert says in failed.stderr


# ------------------------------------------------------------------ misses of a comparison


def test_misses_of_a_comparison_sum_to_their_latencies(sweep: Path, tmp_path: Path) -> None:
    answer, *lines = ok("explain", sweep, "--misses", "--all", "-o", tmp_path / "f.pdf").splitlines()
    assert re.match(r"\S+ misses [\d.]+ %.*; \S+ misses [\d.]+ %, mostly ", answer)
    assert lines[0].startswith(f"{sweep} · SLO 5xP95 (both) · misses at rate scale ")
    table = pq.read_table(sweep / record.SWEEP).to_pylist()
    points = pd.read_csv(tmp_path / "f.csv", comment="#")
    missing = 0
    for label in SYSTEMS.split(","):
        line = next(line.split() for line in lines if line.startswith(f"{label} "))
        rate = float(re.search(r"rate scale ([\d.]+)", lines[0])[1])  # type: ignore[index]
        key = ("label", "rate_scale", "definition", "over")
        (point,) = (r for r in table if [r[name] for name in key] == [label, rate, "both", "pooled"])
        missed, offered = (int(x.replace(",", "")) for x in line[2:4])
        assert (offered, missed) == (point["n"], round((1 - point["value"]) * point["n"]))
        if missed:
            missing += 1
            rows = record.read(sweep.parent / point["run"]).to_pylist()
            shares = points[points["label"] == label]
            assert shares["share"].sum() == pytest.approx(1)
            assert float(line[5]) == pytest.approx(shares["seconds"].sum(), rel=6e-3)
            assert shares["seconds"].sum() <= max(sum(q[f"{x}_ns"] for x in record.WAITS) for q in rows) / 1e9
    assert missing > 1
    assert {path.name for path in tmp_path.iterdir()} == {"f.pdf", "f.png", "f.csv"}
    assert (tmp_path / "f.csv").read_text().startswith(f"# bench explain {sweep} --misses\n")


def test_misses_of_one_system_go_by_rate_and_agree_with_its_run(sweep: Path, out: Path, tmp_path: Path) -> None:
    lines = ok("explain", sweep, "--misses", "--all", "--system", "qlm", "-o", tmp_path / "f").splitlines()[1:]
    assert "misses of qlm at each rate" in lines[0]
    assert [line.split()[0] for line in lines[2:4]] == ["2", "4"]
    alone = ok("explain", run_of(out, "qlm"), "--misses").splitlines()
    missed, offered = (int(x) for x in re.match(r"(\d+) of (\d+) requests", alone[0]).groups())  # type: ignore[union-attr]
    assert [int(x.replace(",", "")) for x in lines[3].split()[2:4]] == [missed, offered]
    whole = float(re.search(r"all misses together took ([\d.]+) s", "\n".join(alone))[1])  # type: ignore[index]
    points = pd.read_csv(tmp_path / "f.csv", comment="#")
    shares = points[points["rate_scale"] == 4]
    assert shares["seconds"].sum() * missed == pytest.approx(whole, abs=0.06)


def test_bars_of_causes_are_told_apart_in_grey() -> None:
    assert set(fig_causes.LOOKS) == set(record.WAITS)
    assert len({(look.color, look.hatch) for look in fig_causes.LOOKS.values()}) == len(record.WAITS)
    for hatch in {look.hatch for look in fig_causes.LOOKS.values()}:
        alike = sorted(lightness(look.color) for look in fig_causes.LOOKS.values() if look.hatch == hatch)
        assert all(b - a > 8 for a, b in pairwise(alike))


# ------------------------------------------------------------------ a run as trace events


@cases("system", NAMES)
def test_a_timeline_is_a_trace_that_perfetto_opens(system: str, traced: Traced, tmp_path: Path) -> None:
    run, stored, trace = traced(system)
    path = tmp_path / "t.json.gz"
    about = {"run": run.name}
    path.write_bytes(trace_event.document(trace_event.events(trace, stored), about, path))
    timeline = json.loads(gzip.decompress(path.read_bytes()))
    assert timeline["displayTimeUnit"] == "ms"
    assert timeline["otherData"] == about
    events = timeline["traceEvents"]
    named, rest = [e for e in events if e["ph"] == "M"], [e for e in events if e["ph"] != "M"]
    assert events == [*named, *rest]
    stamps = [e["ts"] for e in rest]
    assert stamps == sorted(stamps)
    host = 1e6 * 0.01  # the last token's way to the client lies behind the engine's end
    end_us = 1e6 * (trace.end_s - trace.start_s)
    assert stamps[0] >= 0
    assert max(e["ts"] + e.get("dur", 0) for e in rest) <= end_us + host
    for event in rest:
        assert {"ph", "ts", "pid", "tid", "name", "args"} <= set(event), event
        assert {"X": {"dur", "cat"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "C": set()}[event["ph"]] <= set(event)
    processes = {e["pid"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in named if e["name"] == "thread_name"}
    assert {e["pid"] for e in rest} == processes
    assert {(e["pid"], e["tid"]) for e in rest if e["ph"] == "X"} == threads
    _slices(rest)
    _nested(rest)
    _counters(rest, trace)
    loads = [e for e in rest if e["ph"] == "b" and e["name"].startswith("load ") and e["args"]["done"]]
    assert len(loads) == record.meta(run)["stats"]["loads"]
    moves = [e for e in rest if e["ph"] == "b" and e["name"].startswith(("move ", "swap ")) and e["args"]["done"]]
    assert len(moves) == record.meta(run)["stats"]["moves"]
    whole = [e for e in rest if e["ph"] == "b" and e["cat"] == "request" and "request" in e["args"]]
    assert sorted(e["args"]["request"] for e in whole) == stored["id"].to_pylist()


def _slices(events: list[dict[str, Any]]) -> None:
    """Check that slices of a track follow each other."""
    until: dict[tuple[int, int], float] = defaultdict(lambda: -math.inf)
    for event in events:
        if event["ph"] == "X":
            at = event["pid"], event["tid"]
            assert event["dur"] > 0
            assert event["ts"] >= until[at] - 2e-3  # a nanosecond or two of rounding
            until[at] = event["ts"] + event["dur"]


def _nested(events: list[dict[str, Any]]) -> None:
    """Check that each `b` has its `e`, the innermost first, and that the slices of an id nest."""
    opened: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            opened[event["cat"], event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert opened[event["cat"], event["id"]].pop() == event["name"]
    assert not any(opened.values())


def _counters(events: list[dict[str, Any]], trace: Trace) -> None:
    """Check that memory is never negative, nor above the GPU, and SMs no more than it has, a lane."""
    shown = Counter(e["name"] for e in events if e["ph"] == "C")
    assert shown["memory GiB"]
    for event in (e for e in events if e["ph"] == "C"):
        assert min(event["args"].values()) >= 0
        if event["name"] == "memory GiB":
            size = trace.gpu_bytes[event["pid"] - trace_event.FIRST_GPU]
            assert sum(event["args"].values()) <= size / 2**30 + 1e-9
        else:
            assert event["name"] == "SMs"
            assert max(event["args"].values()) <= trace.sms
    assert bool(shown["SMs"]) == any(step.sms >= 0 for step in trace.steps)


def test_partitions_are_counters_and_turns_are_tracks(out: Path, tmp_path: Path) -> None:
    path, before = tmp_path / "t.json", files(out)
    output = ok("timeline", run_of(out, "muxserve"), "-o", path)
    assert files(out) == before
    assert output.startswith(f"{path}: ")
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert {name.split()[-1] for name in names} == {"decode", "prompts", "turns"}
    splits = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "SMs"]
    assert len({tuple(sorted(split.values())) for split in splits}) > 2


# ------------------------------------------------------------------ mistakes


def mistakes(out: Path, sweep: Path) -> Iterator[tuple[tuple[object, ...], str]]:
    run = run_of(out, "static")
    yield ("explain", run, "--request", 10**6), "no request 1000000"
    yield ("explain", run, "--misses", "--system", "static"), "--system is for a comparison"
    yield ("explain", sweep, "--request", 1), "is a comparison"
    yield ("explain", sweep, "--misses", "--slo", "P95"), "is a comparison"
    yield ("explain", sweep, "--misses", "--system", "prizm"), "did you mean prism"
    yield ("explain", sweep, "--misses", "--definition", "qos"), "no token times"
    yield ("timeline", "nowhere", "-o", "t.json"), "nowhere"
    yield ("timeline", run, "-o", "t.txt"), ".json"


def test_mistakes_are_one_line(out: Path, sweep: Path) -> None:
    for args, says in mistakes(out, sweep):
        mistake(bench(*args), says)
