"""Equal models on one card with split or shared memory, measured (by kvcached, on an unnamed AMD card) and simulated.

A CSV with the columns of `COLUMNS` has one row per instance; each model on the card is one instance. A `set` of the
form `sweep...-baseline` means a static split of memory, and `sweep...-kvcached` means elastic memory. A file may have
either or both. Rows with the same model and lengths form one `Load`. A column `model` names the model. If the model is
unknown, its shape comes from columns or from the caller. kvcached's own files have a column `size_b` instead, in which
7 means Qwen2.5-7B. A `peak` is the highest rate of a model's ramp, in requests per second (`workloads/ramps.py`).

The measured results are in ovg-project/kvcached 88b6753, benchmarks/bench_latency_benefit. Their settings are in
bench-config-amd-7b-6inst.yaml of that folder (50b8c51) and in its -baseline variant (22f605a). The engine is vLLM 0.14
without a prefix cache. The static split gives each of six models .15 of the card (gpu-memory-utilization). Elastic
memory gives all six together .90 (kvcached_gpu_utilization). On a card of this size, vLLM's defaults are at most 1,024
sequences and 8,192 tokens per step.

The card was not named. The simulator uses the table of an MI300X (`engines/costs/tables/mi300x.toml`) and a fitted
speed (`unnamed_card`). The bytes that a process needs besides weights are estimated from the first instance of the
static split (`process`). The estimates at several peaks give an interval. If no row allows an estimate, the bytes are
the sum of a process's parts. The models are plain processes, without MPS, so they take turns on the card
(`sharing=turns`). Nothing else is fitted; in particular, the memory reserve and the page size are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq

from harness.engines import machine
from harness.engines.costs import quantities
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.machine import Config, Served
from harness.policy.types import GIB, Jobs, Plan, Shape, UserError
from harness.rows import requests
from harness.validate import names
from harness.validate.measured import CsvRow, contents, lines
from harness.validate.names import Skipped, UnknownName
from harness.validate.replayed import replayed
from workloads.models import shape
from workloads.ramps import ramps

SYSTEMS = {"baseline": "static", "kvcached": "elastic"}  # keyed by the end of `set`
FIELDS: Mapping[str, Mapping[str, Any]] = {"static": {"size": "equal"}, "elastic": {}}
METRICS = {
    "mean_ttft_s": "mean_ttft_ms",
    "median_ttft_s": "median_ttft_ms",
    "p99_ttft_s": "p99_ttft_ms",
    "mean_tpot_s": "mean_tpot_ms",
    "mean_e2e_s": "mean_e2el_ms",
}
COLUMNS = (*"set peak prompt completion inst completed out_tokens".split(), *METRICS.values())
SCORED = {"mean_ttft_s": "TTFT", "mean_tpot_s": "TPOT", "mean_e2e_s": "E2E"}
KEYS = ["system", "peak", "instance"]  # these identify a row
GPU, HOST, SHARE = "mi300x", "vllm-0.14", 0.90
SIZES = {"7": "qwen-2.5-7b"}  # `size_b`
FITTED = ("qwen-2.5-7b", 6, 256, 1024)  # model, models, prompt, cap of the only set that constants are fitted on
FEW = 5  # lowest peaks used, of those at which the first static instance queues; it ends before its neighbours count
LOW_S = 1.0  # a mean, median or P99 TTFT above it is a queue
AIM = 0.30  # the static split's simulated mean TTFT is off by at most this share of the measured, at:
AIM_PEAKS = (25, 30, 36, 40)
REPORTED = (35, 36, 40)  # peaks at which elastic memory is reported, without an aim
TPOT_PEAKS = (("elastic", 5), ("elastic", 25), ("elastic", 33), ("static", 25))
Tell = Callable[[int, int], None]  # runs done, of how many


class Load(NamedTuple):
    """Equal models that share a card, with the lengths of their requests."""

    shape: Shape
    models: int
    prompt: int
    cap: int  # most output tokens
    output: float  # tokens in the mean

    def __str__(self) -> str:
        return f"{self.models} x {self.shape.name}, {self.prompt} tokens in and at most {self.cap} out"

    @property
    def fitted(self) -> bool:
        """True for the load to which the card's constants were fitted."""
        return (self.shape.name, self.models, self.prompt, self.cap) == FITTED

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, in the order of their instances."""
        return tuple(f"m{k}" for k in range(1, self.models + 1))


class Measured(NamedTuple):
    """A load and its measured rows: one for each system, peak and instance, with `METRICS` in seconds."""

    load: Load
    rows: pd.DataFrame


class Read(NamedTuple):
    """Measured loads of a file, and the rows that were skipped."""

    measured: list[Measured]
    skipped: list[Skipped]


class Held(NamedTuple):
    """Bytes of a process besides weights: the least, mean and largest estimate, and the peaks that gave them."""

    low: float
    mean: float
    high: float
    peaks: tuple[int, ...] = ()  # empty where the bytes are the sum of a process's parts


# ------------------------------------------------------------------ measured


def files(folder: Path) -> list[Path]:
    """Return the CSVs with the columns in `COLUMNS`: those in a folder and its subfolders, or the file itself."""
    paths = [folder] if folder.is_file() else sorted((*folder.glob("*.csv"), *folder.glob("*/*.csv")))
    return [path for path in paths if set(COLUMNS) <= set(_header(path))]


def _header(path: Path) -> list[str]:
    try:
        return contents(path)[0]
    except UserError:
        return []  # the error is raised again where the file is read


def read(path: Path, shapes: Mapping[str, Shape] | None = None) -> Read:
    """Read the measured loads of a file. Raises UserError if the file cannot be read.

    Rows with a bad value, an unknown model or another card are skipped; `shapes` adds models.
    """
    skipped: list[Skipped] = []
    by: dict[tuple[Shape, int, int], list[dict[str, Any]]] = {}
    for row in lines(path, shapes or {}, *contents(path)):
        if isinstance(row, Skipped):
            skipped.append(row)
            continue
        try:
            key, values = (_shape(row), row.count("prompt"), row.count("completion")), _row(row)
        except UserError as error:
            skipped.append(row.skipped(error))
            continue
        by.setdefault(key, []).append(values)
    return Read([_measured(*key, pd.DataFrame(rows)) for key, rows in by.items()], skipped)


def _shape(row: CsvRow) -> Shape:
    if "gpu" in row.values and names.gpu(row.values["gpu"]) != GPU:
        raise UnknownName(f'GPU "{row.values["gpu"]}": ramps of models that share a card are priced on {GPU} alone')
    size = row.values.get("size_b", "")
    name = row.values.get("model") or SIZES.get(size)
    if name is None:
        raise UnknownName(f'size_b "{size}" names no model; a column `model` does')
    chosen = row.given(name) or shape(names.model(name, row.shapes))
    return chosen._replace(max_tokens=max(chosen.max_tokens, row.count("prompt") + row.count("completion")))


def _row(row: CsvRow) -> dict[str, Any]:
    end, tokens = row.values["set"].rpartition("-")[2], row.count("out_tokens")
    if end not in SYSTEMS:
        raise row.bad("set", f"...-{' or ...-'.join(SYSTEMS)}")
    if not row.count("completed") <= tokens <= row.count("completed") * row.count("completion"):
        raise row.bad("out_tokens", "1 to `completion` for each of `completed`")
    keys = SYSTEMS[end], row.count("peak"), row.count("inst")
    seconds = {ours_: row.number(theirs) / 1e3 for ours_, theirs in METRICS.items()}
    counts = {"requests": row.count("completed"), "output_tokens": tokens}
    return {**dict(zip(KEYS, keys, strict=True)), **seconds, **counts}


def _measured(its: Shape, prompt: int, cap: int, rows: pd.DataFrame) -> Measured:
    """Return a measured load, with the mean of rows that repeat the same system, peak and instance.

    The mean is justified: the repeats' total tokens differ no more than if all repeats were drawn from one curve.
    """
    output = float(rows["output_tokens"].sum() / rows["requests"].sum())
    load = Load(its, int(rows["instance"].max()), prompt, cap, output)
    return Measured(load, rows.groupby(KEYS, as_index=False).mean().drop(columns=["requests", "output_tokens"]))


# ------------------------------------------------------------------ simulated


def config(load: Load, peak: int, process_bytes: float | None) -> Config:
    """Return the configuration of the card and its models."""
    plan = {name: Plan(peak / 2, load.prompt, load.output, "ramps") for name in load.names}
    return Config(
        tuple(Served(name, load.shape) for name in load.names),
        gpu=GPU,
        host=HOST,
        batch_cap=1024,
        chunk_tokens=8192,
        mem_fraction=SHARE,
        process_bytes=None if process_bytes is None else round(process_bytes),
        noise=quantities.noise(GPU, HOST),
        plan=plan,
    )


def ours(
    load: Load,
    name: str,
    peak: int,
    process_bytes: float,
    *,
    models: int | None = None,
    host: quantities.HostProfile | None = None,
    sharing: Literal["turns", "fluid"] = "turns",
    quantum_s: float | None = None,
) -> pd.DataFrame:
    """Simulate one peak under the system `name`, `static` or `elastic`; return a row per instance, with `METRICS`.

    If `models` is given, only the first `models` of the load's models get requests. `host` replaces the committed
    profile, and steps then have no noise. `quantum_s` replaces the committed seconds of a turn.
    """
    asked = ramps(peak, models or load.models, load.prompt, load.cap, load.output)
    never = np.full(len(asked.arrival_s), np.inf)
    jobs = Jobs(load.names, asked.arrival_s, asked.model, asked.prompt_tokens, asked.output_tokens, never, never)
    shared = replace(config(load, peak, process_bytes), sharing=sharing)
    rows = replayed(shared, jobs, name, FIELDS[name], host=host, quantum_s=quantum_s)
    return _measures(rows).assign(system=name, peak=peak)


def _measures(rows: requests.Rows) -> pd.DataFrame:
    each = pd.DataFrame(
        {
            "instance": [int(rows.models[code][1:]) for code in rows.model],
            "ttft_s": rows.ttft_s,
            "tpot_s": requests.tpot_s(rows),
            "e2e_s": rows.e2e_s,
        }
    )
    by = each.groupby("instance")
    ttft_s, means_s = by["ttft_s"], by[["ttft_s", "tpot_s", "e2e_s"]].mean().add_prefix("mean_")
    return means_s.assign(median_ttft_s=ttft_s.median(), p99_ttft_s=ttft_s.quantile(0.99)).reset_index()


def process(run: Measured) -> Held:
    """Estimate the bytes that a process needs besides weights, at several peaks.

    With these bytes, the simulated mean TTFT of the first instance of the static split equals the measured one. If no
    bytes achieve this at any peak, the result is the sum of the process's parts.
    """
    load, rows = run.load, run.rows
    queued = (rows["system"] == "static") & (rows["instance"] == 1) & (rows["mean_ttft_s"] > LOW_S)
    few = rows[queued].sort_values("peak").head(FEW)
    most = _most_bytes(load) / GIB
    bytes_by_peak: dict[int, float] = {}
    for peak, want in zip(few["peak"].tolist(), few["mean_ttft_s"].tolist(), strict=True):

        def excess(gib: float, peak: int = peak, want: float = want) -> float:
            got = ours(load, "static", peak, gib * GIB, models=1, host=quantities.host(HOST, GPU))
            return float(got["mean_ttft_s"].iloc[0]) - want

        if most > 0 and excess(0.0) < 0 < excess(most):
            bytes_by_peak[peak] = brentq(excess, 0.0, most, xtol=0.02) * GIB
    if not bytes_by_peak:
        parts = machine.parts(config(load, 1, None), Served("m1", load.shape))
        beside = (1 - SHARE) * quantities.gpu(GPU).mem_bytes / load.models
        return Held(*(parts.inside + max(0.0, parts.outside - beside),) * 3)
    held = list(bytes_by_peak.values())
    return Held(min(held), float(np.mean(held)), max(held), tuple(bytes_by_peak))


def _most_bytes(load: Load) -> float:
    """Return the upper limit of the estimated bytes of a process besides weights.

    The models share `SHARE` of the card's memory equally. The limit is 99 % of what the weights and the KV of the
    longest request leave of one model's part. It is negative if these two do not fit.
    """
    share = SHARE * quantities.gpu(GPU).mem_bytes / load.models
    return 0.99 * (share - weight_bytes(load.shape) - load.shape.max_tokens * kv_token_bytes(load.shape))


def points(run: Measured, held: Held, tell: Tell | None = None) -> pd.DataFrame:
    """Return measured and simulated rows with the columns of `ours`, and `who`: measured, ours, low, high or fluid.

    `ours` is simulated with the mean bytes of `held`, `low` with the least and `high` with the most. `fluid` is `ours`,
    but processes share the GPU as under MPS instead of taking turns. Only instances that were measured have simulated
    rows.
    """
    there = run.rows[KEYS]
    whos: Mapping[str, tuple[float, Literal["turns", "fluid"]]] = {
        "ours": (held.mean, "turns"),
        "low": (held.low, "turns"),
        "high": (held.high, "turns"),
        "fluid": (held.mean, "fluid"),
    }
    ways = list(dict.fromkeys(whos.values()))
    todo = [
        (name, peak, way)
        for name, peak in dict.fromkeys(zip(there["system"], there["peak"], strict=True))
        for way in ways
    ]
    parts = [run.rows.assign(who="measured")]
    for done, (name, peak, way) in enumerate(todo):
        if tell is not None:
            tell(done, len(todo))
        got = ours(run.load, name, peak, way[0], sharing=way[1]).merge(there, on=KEYS)
        parts += [got.assign(who=who) for who, its in whos.items() if its == way]
    if tell is not None:
        tell(len(todo), len(todo))
    return pd.concat(parts, ignore_index=True)


# ------------------------------------------------------------------ aims


def _at(frame: pd.DataFrame, who: str, name: str, peak: int) -> pd.DataFrame:
    return frame[(frame["who"] == who) & (frame["system"] == name) & (frame["peak"] == peak)]


def mean_ttft_s(frame: pd.DataFrame, who: str, name: str, peak: int) -> float:
    """Return the mean TTFT at a peak in seconds: the mean of the instances' means.

    Instances have equal weights, because each gets about the same number of requests.
    """
    return float(_at(frame, who, name, peak)["mean_ttft_s"].mean())


def tpot_s(frame: pd.DataFrame, who: str, name: str, peak: int) -> NDArray[np.float64]:
    """Return the mean TPOT of each instance at a peak, in seconds, in the order of the instances' numbers."""
    return _at(frame, who, name, peak).sort_values("instance")["mean_tpot_s"].to_numpy(np.float64)


def congested(frame: pd.DataFrame, who: str, peak: int) -> int:
    """Count the instances of the static split with a median TTFT above a second."""
    return int((_at(frame, who, "static", peak)["median_ttft_s"] > LOW_S).sum())


def knee(frame: pd.DataFrame, who: str) -> int | None:
    """Return the lowest peak at which an instance of elastic memory has a P99 TTFT above a second; None if none has."""
    rows = frame[(frame["who"] == who) & (frame["system"] == "elastic") & (frame["p99_ttft_s"] > LOW_S)]
    return None if rows.empty else int(rows["peak"].min())


def scores(frame: pd.DataFrame) -> list[str]:
    """Return a line for each system: the median and P95 of the errors of its rows, in per cent.

    A row has an error for mean TTFT, mean TPOT and mean E2E: the absolute value of simulated / measured - 1.
    """
    told = []
    for name, rows in frame[frame["who"] == "measured"].groupby("system", sort=False):
        both = rows.merge(frame[frame["who"] == "ours"], on=KEYS, suffixes=("", "_ours"))
        off = {label: 100 * (both[f"{metric}_ours"] / both[metric] - 1).abs() for metric, label in SCORED.items()}
        each = ", ".join(f"{label} {error.median():.1f}/{error.quantile(0.95):.1f}" for label, error in off.items())
        told.append(f"{name}, {len(both)} rows, median/P95 % of the error of means: {each}")
    return told


def notes(load: Load, frame: pd.DataFrame, held: Held) -> list[str]:
    """Return lines on a load: its conditions, errors, and measured and simulated values.

    Aims judge only the values of the load to which the card's constants were fitted.
    """
    there = dict.fromkeys(frame.loc[frame["who"] == "measured", ["system", "peak"]].itertuples(index=False, name=None))
    lines = [*_behind(load, held), *scores(frame)]

    def compared(name: str, peak: int) -> str:
        got, low, high, fluid = (mean_ttft_s(frame, who, name, peak) for who in ("ours", "low", "high", "fluid"))
        want, digits = mean_ttft_s(frame, "measured", name, peak), 1 if load.fitted else 3
        return (
            f"{name} mean TTFT at peak {peak}: measured {want:.{digits}f} s, ours {got:.{digits}f} "
            f"[{min(low, high):.{digits}f} - {max(low, high):.{digits}f}], fluid {fluid:.{digits}f}"
        )

    last = list[str]()
    if any(name == "elastic" for name, _ in there):
        knees = (knee(frame, who) or "none" for who in ("measured", "ours"))
        last = ["elastic knee: measured {}, ours {}: no aim".format(*knees)]
    if not load.fitted:
        return [*lines, *(f"{compared(*cell)}: no aim" for cell in there), *last]
    missed = 0
    for peak in AIM_PEAKS:
        if ("static", peak) in there:
            error = mean_ttft_s(frame, "ours", "static", peak) / mean_ttft_s(frame, "measured", "static", peak) - 1
            missed += abs(error) > AIM
            lines.append(f"{compared('static', peak)}: {verdict(abs(error) <= AIM)} (within {100 * AIM:.0f} %)")
    for peak in range(25, 31):
        if ("static", peak) in there:
            want, got = (congested(frame, who, peak) for who in ("measured", "ours"))
            missed += abs(got - want) > 1
            lines.append(
                f"static instances with a median TTFT above 1 s at peak {peak}: measured {want}, ours {got}:"
                f" {verdict(abs(got - want) <= 1)} (within 1)"
            )
    lines += [f"{compared('elastic', peak)}: no aim" for peak in REPORTED if ("elastic", peak) in there]
    lines += [_tpots(frame, *cell) for cell in TPOT_PEAKS if cell in there]
    lines += last
    if missed:
        lines.append(
            "not modelled here: a static instance that lacks memory takes longer a token than its batch explains, also"
            " the first, before it has neighbours. The library kvcached keeps up to 20 freed pages mapped in each"
            " process, not 5"
        )
    return lines


def _tpots(frame: pd.DataFrame, name: str, peak: int) -> str:
    """Return a line with the measured and simulated mean TPOT of each instance at a peak."""
    each = {who: tpot_s(frame, who, name, peak) for who in ("measured", "ours", "fluid")}
    times_ms = ", ".join(f"{who} {'/'.join(f'{1e3 * x:.0f}' for x in times)}" for who, times in each.items())
    return f"{name} TPOT at peak {peak}, by instance: {times_ms} ms: no aim"


def _behind(load: Load, held: Held) -> list[str]:
    """Describe the load, its card, and the fitted constants."""
    card = f"{quantities.gpu(GPU).name}, a guess: the card is not named, and is scaled to measured rows"
    if held.peaks:
        ends = f"[{held.low / GIB:.1f} - {held.high / GIB:.1f}], by the first static instance"
    else:
        ends = "by its parts: no static row tells"
    host, band = quantities.host(HOST, GPU), quantities.band(HOST, GPU)

    def ranged(name: str, times: float = 1) -> str:
        low, high = band[name]
        return f"{times * getattr(host, name):.3g} [{times * low:.3g} - {times * high:.3g}]"

    kernels = f"{ranged('scale_decode')} times their table's in decode steps and {ranged('scale_prefill')} in prefill"
    api, turns = f"{ranged('api_in_s', 1e3)} ms", f"turns last {1e3 * quantities.quantum_s():g} ms or a step"
    fitted = f"fitted on one set of {FITTED[0]}{'' if load.fitted else ', unchecked for others'}"
    return [
        f"{load} on {card}; a process holds {held.mean / GIB:.1f} GiB beside weights {ends}",
        f"kernels take {kernels}, the API {api}, and {turns}: {fitted}; [ ] is the range over fits without a peak each",
    ]


def verdict(met: bool) -> str:
    """Return "met" or "not met"."""
    return "met" if met else "not met"


def met(notes: Sequence[str]) -> str:
    """Say how many aims are met, counted in the notes on a load."""
    aims = [note for note in notes if re.search(r": (not )?met\b", note)]
    return f"{sum(': met' in note for note in aims)} of {len(aims)} aims met" if aims else "it has no aims"
