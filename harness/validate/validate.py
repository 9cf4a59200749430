"""Errors of simulated end-to-end runs against measured runs of real engines (`measured`), by engine, GPU and metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from harness.engines.costs import quantities
from harness.rows import requests
from harness.rows.checked import checked
from harness.rows.record import WAITS
from harness.validate.loads import Batch, Closed, Poisson, Setting
from harness.validate.measured import MEANS, METRICS, Case
from harness.validate.replayed import replayed

Tell = Callable[[int, int], None]  # runs done, of how many
SLOW = 1.3
SEEDS = 8  # no two settings share a seed, so noise gives them no error in common
# Median and P95 in per cent, on rows that a refit left out. vLLM 0.15 has nine runs, too few for an aim.
AIMS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "vllm-0.12": {"tpot": (5, 15), "e2e": (5, 15)},
    "sglang-0.5": {"ttft": (10, 25), "tpot": (5, 15), "e2e": (5, 15)},
    "vllm-0.6": {"throughput": (6, 18)},
}

CONDITIONS = ("engine", "gpu", "model", "tp", "load", "flags", "stage", "metric")
COLUMNS = ("file", "row", *CONDITIONS, *"measured ours error spread fitted unscored group real_spread".split())
# Median and P95 in per cent of quantised models and mixtures, which no table and no host profile was fitted on.
GROUP_AIM = (8.0, 20.0)
GROUP_HEAD = ("engine", "gpu", "format", "model", "rows", "tpot %", "throughput %", "bias of tpot %", "ttft %", "aim")
WORST = 10
SPREADS = f"spread of {SEEDS} seeds %", "measured spread %"
HEAD = ("engine", "gpu", "metric", "rows", "cases", "median %", "P95 %", "bias %", *SPREADS)


def ours(
    cases: Sequence[Case],
    host: quantities.HostProfile | None = None,
    draw: int | None = None,
    tell: Callable[[int], None] | None = None,
) -> list[dict[str, float]]:
    """Simulate each case, and return its measures by the names of `METRICS`; equal settings run once.

    Without `draw`, steps have no noise, as in every fit. `draw` selects one of several seeds of each setting, which
    vary the noise and Poisson arrivals. `host` is a profile that a fit tries. It replaces the profiles of the settings,
    but is ignored if `draw` is given.
    """
    ran: dict[Setting, requests.Rows | None] = {}
    for setting in dict.fromkeys(case.setting for case in cases):
        if tell is not None:
            tell(len(ran))
        ran[setting] = _ran(setting, host, None if draw is None else SEEDS * len(ran) + draw)
    return [_measures(case.setting, case.stage, ran[case.setting]) for case in cases]


def _ran(setting: Setting, host: quantities.HostProfile | None, seed: int | None) -> requests.Rows | None:
    if setting.load is None:
        return None
    if seed is None:
        return replayed(setting.config, setting.load.jobs(), host=host)
    noise = quantities.noise(setting.gpu, setting.engine)
    jobs = setting.load.jobs(seed) if isinstance(setting.load, Poisson) else setting.load.jobs()
    return replayed(replace(setting.config, noise=noise, seed=seed), jobs)


def _measures(setting: Setting, stage: int | None, every: requests.Rows | None) -> dict[str, float]:
    load = setting.load
    if every is None:
        return {"kv_blocks": float(setting.kv_blocks)}
    if isinstance(load, Batch):  # there is no server between the batch and its engine
        host_s = every.waits_s[:, WAITS.index("host")]
        return {"throughput": (load.prompt + load.output) * load.size / float((every.e2e_s - host_s).max())}
    if isinstance(load, Closed):
        counted = np.arange(len(every)) >= (0 if load.first else load.clients)
    else:
        assert isinstance(load, Poisson)
        ends_s = np.cumsum([seconds for _, seconds in load.stages])
        counted = np.full(len(every), True)
        if stage is not None:
            counted = np.searchsorted(ends_s, every.arrival_s, "right") == stage
    taken = requests.take(every, counted)
    return {
        "ttft": float(taken.ttft_s.mean()),
        "tpot": float(requests.tpot_s(taken).mean()),
        "e2e": float(taken.e2e_s.mean()),
        **{
            f"{metric}_p{p}": float(np.percentile(seconds, p))
            for metric, seconds in (("ttft", taken.ttft_s), ("e2e", taken.e2e_s))
            for p in (90, 99)
        },
    }


def unscored(setting: Setting, metric: str) -> str:
    """Return the reason why a metric is left out of the scores; "" if it is scored.

    TTFT of a closed loop on vLLM is left out, unless the measured means include the first wave of requests. Whether the
    clients begin spread out or in a burst is unknown, and later waves would repeat this pattern. On SGLang, TTFT is
    scored, because the slots run in step either way.
    """
    waves = isinstance(setting.load, Closed) and not setting.load.first and setting.engine.startswith("vllm")
    return "start unknown" if waves and metric == "ttft" else ""


def points(cases: Sequence[Case], tell: Tell | None = None, seeds: int = SEEDS) -> pd.DataFrame:
    """Return measured and simulated values: a row for each case and metric, in the order of the cases.

    `ours` and `error` are of a simulation without noise. `spread` is the standard deviation of simulated values over
    seeds, relative to `ours`. `real_spread` is the standard deviation of measured values over rows of equal conditions,
    relative to their mean.
    """
    runs = len({case.setting for case in cases})
    told = tell or (lambda _done, _of: None)
    plain = ours(cases, tell=lambda done: told(done, runs * (1 + seeds)))
    drawn = [
        ours(cases, None, k, lambda done, k=k: told(runs * (1 + k) + done, runs * (1 + seeds)))  # type: ignore[misc]
        for k in range(seeds)
    ]
    told(runs * (1 + seeds), runs * (1 + seeds))
    lines = []
    for at, (case, values) in enumerate(zip(cases, plain, strict=True)):
        setting = case.setting
        for metric, measured in case.measured.items():
            each, why = [draw[at][metric] for draw in drawn], unscored(setting, metric)
            lines.append(
                {
                    "file": case.file,
                    "row": case.row,
                    "engine": setting.engine,
                    "gpu": setting.gpu,
                    "model": setting.model,
                    "tp": setting.tp,
                    "load": "" if setting.load is None else str(setting.load),
                    "flags": " ".join(f"{key}={value:g}" for key, value in setting.flags),
                    "stage": "" if case.stage is None else str(case.stage),
                    "metric": metric,
                    "measured": measured,
                    "ours": values[metric],
                    "error": values[metric] / measured - 1,
                    "spread": float(np.std(each, ddof=1)) / values[metric] if seeds > 1 else np.nan,
                    "fitted": case.fitted and not why,
                    "unscored": why,
                    "group": case.group,
                }
            )
    frame = pd.DataFrame(lines, columns=COLUMNS[:-1])
    alike = frame.groupby(list(CONDITIONS), sort=False)["measured"]
    return frame.assign(real_spread=alike.transform("std") / alike.transform("mean"))


BRIEF = 8  # first columns of HEAD, which are shown without --all
SIGNS = "rows: fitted: the engine's host profile was fitted on them; left out: it was not; --all adds spreads"


def answer(frame: pd.DataFrame) -> str:
    """Return the start of a sentence with the median errors of TTFT, TPOT, E2E and throughput.

    Each median is over all scored rows, fitted or not. Return "" if there are none.
    """
    told = []
    for metric in ("ttft", "tpot", "e2e", "throughput"):
        rows = frame[(frame["metric"] == metric) & (frame["unscored"] == "")]
        if len(rows):
            told.append(f"{metric} {100 * rows['error'].abs().median():.1f} %")
    return f"median error of {', '.join(told)}; " if told else ""


def scores(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return a table with a row for each engine, GPU and metric, separate for fitted rows and for others.

    A row has the number of cases, the median and P95 of the absolute error, and the mean error. Then it has the median
    spread over seeds, and the median spread over measured rows of equal conditions. A dash stands for a missing spread.
    """
    lines: list[tuple[str, ...]] = [HEAD]
    order = frame.assign(at=frame["metric"].map(METRICS.index))
    by = ["engine", "gpu", "at", "metric", "unscored", "fitted"]
    for (engine, gpu, _, metric, why, fitted), rows in order.groupby(by, sort=True):
        off = 100 * rows["error"].abs()
        which = str(why) or ("fitted" if fitted else "left out")
        numbers = f"{off.median():.1f}", f"{off.quantile(0.95):.1f}", f"{100 * rows['error'].mean():+.1f}"
        spreads = (_median(rows[column]) for column in ("spread", "real_spread"))
        told = ("-",) * 5 if why else (*numbers, *spreads)
        lines.append((str(engine), str(gpu), str(metric), which, str(len(rows)), *told))
    return lines


def _median(values: pd.Series[float]) -> str:
    known = values.dropna()
    return "-" if known.empty else f"{100 * known.median():.1f}"


def refits(frame: pd.DataFrame) -> list[str]:
    """Return a line for each engine: its aims, and the errors of refits on the rows that the refits left out."""
    lines = []
    for engine in sorted(frame["engine"].unique()):
        parts = []
        for metric, error in sorted(quantities.held(engine).items(), key=lambda item: METRICS.index(item[0])):
            aim = AIMS.get(engine, {}).get(metric)
            verdict = f" ({'met' if within(error, aim) else 'missed'}: {aim[0]}/{aim[1]})" if aim else ""
            parts.append(f"{metric} {100 * error['median']:.1f}/{100 * error['p95']:.1f}{verdict}")
        lines.append(f"{engine} on rows left out of a refit, median/P95 % (aim): {', '.join(parts)}")
    return lines


def groups(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return a table of quantised models and mixtures: median/P95 of the errors of TPOT and throughput, and a verdict.

    The verdict says whether the aim is met. Throughput is clients x output / E2E. The table is empty if there is no
    such row.
    """
    lines: list[tuple[str, ...]] = []
    for group, rows in frame[frame["group"] != ""].groupby("group", sort=True):
        tpot, e2e, ttft = (rows[rows["metric"] == metric]["error"] for metric in ("tpot", "e2e", "ttft"))
        off = [_off(errors) for errors in (tpot, 1 / (1 + e2e) - 1)]
        met = all(median <= GROUP_AIM[0] and p95 <= GROUP_AIM[1] for median, p95 in off)
        which = (*str(group).split(" | "), str(len(tpot)))
        both = (f"{median:.1f}/{p95:.1f}" for median, p95 in off)
        lines.append((*which, *both, f"{100 * tpot.mean():+.1f}", f"{_off(ttft)[0]:.1f}", "met" if met else "missed"))
    return [GROUP_HEAD, *lines] if lines else []


def _off(errors: pd.Series[float]) -> tuple[float, float]:
    """Return the median and P95 of absolute errors, in per cent."""
    return 100 * float(errors.abs().median()), 100 * float(errors.abs().quantile(0.95))


def furthest(frame: pd.DataFrame) -> list[str]:
    """Return lines on the rows of quantised models and mixtures with the largest TPOT errors, `WORST` at most."""
    rows = frame[(frame["group"] != "") & (frame["metric"] == "tpot")]
    rows = rows.reindex(rows["error"].abs().sort_values(ascending=False, kind="stable").index)[:WORST]
    return [
        f"{r['file']}:{r['row']}: {r['model']} on {r['tp']} x {r['gpu']}, {r['load']}: TPOT {1e3 * r['ours']:.1f} ms, "
        f"measured {1e3 * r['measured']:.1f} ({100 * r['error']:+.0f} %)"
        for r in rows.to_dict("records")
    ]


def within(error: Mapping[str, float], aim: tuple[float, float]) -> bool:
    """Tell whether median and P95 of an error are within an aim in per cent."""
    return 100 * error["median"] <= aim[0] and 100 * error["p95"] <= aim[1]


def sides(frame: pd.DataFrame) -> tuple[int, int, int]:
    """Count the cases that are much slower in the simulator than measured, those that are much faster, and all cases.

    "Much" is a factor of at least `SLOW` in E2E or throughput.
    """
    ratio = frame["ours"] / frame["measured"]
    longer = pd.concat([ratio[frame["metric"] == "e2e"], 1 / ratio[frame["metric"] == "throughput"]])
    return int((longer >= SLOW).sum()), int((longer <= 1 / SLOW).sum()), len(longer)


def worst(frame: pd.DataFrame, most: int = 10) -> pd.DataFrame:
    """Return the `most` cases with the largest errors, a row each.

    Errors are compared as ratios of simulated to measured means. A case is represented by its worst metric.
    """
    means = frame[frame["metric"].isin(MEANS) & (frame["unscored"] == "")]
    off = means.assign(off=np.abs(np.log(means["ours"] / means["measured"])))
    order = off.sort_values("off", ascending=False, kind="stable")
    return order.drop_duplicates(["file", "row"]).head(most).drop(columns="off")


def notes(frame: pd.DataFrame) -> list[str]:
    """List caveats of the scores: errors of refits, runs that are far off, conditions that are not checked."""
    slower, faster, of = sides(frame)
    percent = f"{100 * (SLOW - 1):.0f} %"
    new = sorted({(e, g) for e, g in zip(frame["engine"], frame["gpu"], strict=True) if not checked(g, e)})
    return [
        *refits(frame),
        f"{percent} slower: {slower}; {percent} faster: {faster}; of {of} cases, by E2E or throughput",
        *(f"{engine} on {gpu} is not in harness/rows/checked.toml" for engine, gpu in new),
    ]
