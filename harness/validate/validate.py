"""Measured end-to-end runs of real engines (`measured`) beside ours: errors by engine, GPU and metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from harness.engines.costs import quantities
from harness.rows import attainment, requests
from harness.rows.checked import checked
from harness.rows.record import WAITS
from harness.validate.measured import METRICS, Batch, Case, Closed, Poisson, Setting
from harness.validate.replayed import replayed

Tell = Callable[[int, int], None]  # settings that ran, of how many
SLOW = 1.3
# Median and P95 in per cent, on rows that a refit left out. vLLM 0.15 has nine runs, too few for an aim.
AIMS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "vllm-0.12": {"tpot": (5, 15), "e2e": (5, 15)},
    "sglang-0.5": {"ttft": (10, 25), "tpot": (5, 15), "e2e": (5, 15)},
    "vllm-0.6": {"throughput": (6, 18)},
}


def ours(
    found: Sequence[Case], host: quantities.HostProfile | None = None, tell: Tell | None = None
) -> list[dict[str, float]]:
    """What our engine makes of each case, by the names of `METRICS`; equal settings run once.

    `host` replaces the settings' own profile, in steps without noise: what a fit tries.
    """
    waiting = dict.fromkeys(case.setting for case in found)
    ran: dict[Setting, requests.Rows | None] = {}
    for setting in waiting:
        if tell is not None:
            tell(len(ran), len(waiting))
        ran[setting] = None if setting.load is None else replayed(setting.config, setting.load.jobs(), host=host)
    if tell is not None:
        tell(len(ran), len(waiting))
    return [_measures(case.setting, case.stage, ran[case.setting]) for case in found]


def _measures(setting: Setting, stage: int | None, every: requests.Rows | None) -> dict[str, float]:
    load = setting.load
    if every is None:
        return {"kv_blocks": float(setting.kv_blocks)}
    if isinstance(load, Batch):  # there is no server between the batch and its engine
        host_s = every.waits_s[:, WAITS.index("host")]
        return {"throughput": (load.prompt + load.output) * load.size / float((every.e2e_s - host_s).max())}
    if isinstance(load, Closed):
        counted = np.arange(len(every)) >= load.clients
    else:
        assert isinstance(load, Poisson)
        ends_s = np.cumsum([seconds for _, seconds in load.stages])
        counted = np.full(len(every), True)
        if stage is not None:
            counted = np.searchsorted(ends_s, every.arrival_s, "right") == stage
    taken = requests.take(every, counted)
    return {
        "ttft": float(taken.ttft_s.mean()),
        "tpot": float(attainment.tpot_s(taken).mean()),
        "e2e": float(taken.e2e_s.mean()),
    }


def points(found: Sequence[Case], tell: Tell | None = None) -> pd.DataFrame:
    """Measured beside ours: a line for each case and metric, in the order of the cases."""
    lines = []
    for case, values in zip(found, ours(found, tell=tell), strict=True):
        setting = case.setting
        for metric, measured in case.measured.items():
            lines.append(
                {
                    "file": case.file,
                    "row": case.row,
                    "engine": setting.engine,
                    "gpu": setting.gpu,
                    "model": setting.model,
                    "tp": setting.tp,
                    "load": "" if setting.load is None else str(setting.load),
                    "stage": "" if case.stage is None else str(case.stage),
                    "metric": metric,
                    "measured": measured,
                    "ours": values[metric],
                    "error": values[metric] / measured - 1,
                    "fitted": case.fitted,
                }
            )
    return pd.DataFrame(lines)


def scores(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    """By engine, GPU, metric and whether fitted: cases, median and P95 of the absolute error, and its mean."""
    lines: list[tuple[str, ...]] = [("engine", "gpu", "metric", "rows", "cases", "median %", "P95 %", "bias %")]
    order = frame.assign(at=frame["metric"].map(METRICS.index))
    for (engine, gpu, _, metric, fitted), own in order.groupby(["engine", "gpu", "at", "metric", "fitted"], sort=True):
        off = 100 * own["error"].abs()
        which = "fitted" if fitted else "left out"
        numbers = f"{off.median():.1f}", f"{off.quantile(0.95):.1f}", f"{100 * own['error'].mean():+.1f}"
        lines.append((str(engine), str(gpu), str(metric), which, str(len(own)), *numbers))
    return lines


def refits(frame: pd.DataFrame) -> list[str]:
    """A line for each engine: errors on rows that a refit of its host profile left out, beside the aims."""
    lines = []
    for engine in sorted(frame["engine"].unique()):
        parts = []
        for metric, error in sorted(quantities.held(engine).items(), key=lambda item: METRICS.index(item[0])):
            aim = AIMS.get(engine, {}).get(metric)
            verdict = f" ({'met' if within(error, aim) else 'missed'}: {aim[0]}/{aim[1]})" if aim else ""
            parts.append(f"{metric} {100 * error['median']:.1f}/{100 * error['p95']:.1f}{verdict}")
        lines.append(f"{engine} on rows left out of a refit, median/P95 % (aim): {', '.join(parts)}")
    return lines


def within(error: Mapping[str, float], aim: tuple[float, float]) -> bool:
    """Whether median and P95 of an error are within an aim in per cent."""
    return 100 * error["median"] <= aim[0] and 100 * error["p95"] <= aim[1]


def slow(frame: pd.DataFrame) -> tuple[int, int]:
    """Cases that take `SLOW` times as long here or longer, by their E2E or throughput; and cases that have either."""
    ratio = frame["ours"] / frame["measured"]
    longer = pd.concat([ratio[frame["metric"] == "e2e"], 1 / ratio[frame["metric"] == "throughput"]])
    return int((longer >= SLOW).sum()), len(longer)


def notes(frame: pd.DataFrame) -> list[str]:
    """What a reader of the scores must know: errors of refits, runs that are far slower here, what is not checked."""
    many, of = slow(frame)
    new = sorted({(e, g) for e, g in zip(frame["engine"], frame["gpu"], strict=True) if not checked(g, e)})
    return [
        *refits(frame),
        f"at least {100 * (SLOW - 1):.0f} % slower here than measured: {many} of {of} cases",
        *(f"{engine} on {gpu} is not in harness/rows/checked.toml" for engine, gpu in new),
    ]
