"""Summaries of a table of scores: points over seeds, engine limits that bound steps, and why some runs did not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.rows.definitions import DEFINITIONS
from harness.rows.memo import once
from harness.rows.statistics import interval
from harness.rows.tidy import CAPS

if TYPE_CHECKING:
    import pandas as pd

BINDS = 0.01  # above this share a cap is part of the result, and reported


@once
def invalid(table: pa.Table) -> dict[str, str]:
    """Return a text for each label with an invalid run: the first reason and the number of such runs."""
    frame = table.select(["label", "run", "invalid"]).to_pandas().drop_duplicates("run")
    return _reasons(frame, "invalid", lambda bad, runs: f"{bad} of {runs} runs: " if runs > 1 else "")


def infeasible(table: pa.Table) -> dict[str, str]:
    """Return a text for each label with an infeasible run: the first reason, and how many runs if not all."""
    point = ["label", "rate_scale", "seed"]
    frame = table.select([*point, "infeasible"]).to_pandas().drop_duplicates(point).sort_values(point)
    return _reasons(frame, "infeasible", lambda bad, runs: f"in {bad} of {runs} runs: " if bad < runs else "")


def _reasons(frame: pd.DataFrame, name: str, of: Callable[[int, int], str]) -> dict[str, str]:
    """Return a text for each label that has a run with a reason in the column `name`.

    The text is `of(number of these runs, number of all runs)`, followed by the first reason.
    """
    reasons = {}
    for label, runs in frame.groupby("label", observed=True, sort=False):
        if bad := runs[name].dropna().tolist():
            reasons[str(label)] = of(len(bad), len(runs)) + bad[0]
    return reasons


def own_gpus(took: Mapping[str, Collection[int]], asked: int | None) -> set[str]:
    """Return the labels of a panel whose systems set their own number of GPUs (`dedicated`: one per model).

    `took` has the numbers of GPUs that each label's runs took, `asked` the panel's number. A label that took any other
    number set its own. If GPUs are the panel's axis, `asked` is None. Then a label set its own number if all its runs
    took the same, and other labels took others.
    """
    several = len(set().union(*took.values())) > 1
    return {
        label
        for label, counts in took.items()
        if (several and len(counts) == 1 if asked is None else set(counts) != {asked})
    }


def with_gpus(label: str, counts: Collection[int]) -> str:
    """Append to a label the numbers of GPUs that its runs took: `dedicated (8 and 18 GPUs)`."""
    every = sorted(counts)
    text = " and ".join(map(str, every)) if len(every) < 3 else f"{every[0]} to {every[-1]}"
    return f"{label} ({text} GPUs)"


_SAME = ["trace", "models", "gpu", "engine", "scaling", "slo", "tier", "fidelity", "plan_origin"]

POINT = [*_SAME, "label", "system", "gpus", "rate_scale", "over", "model", "definition"]


def summary(
    table: pa.Table, definitions: Sequence[str], over: Sequence[str] = ("pooled",), by: Sequence[str] = POINT
) -> pd.DataFrame:
    """Estimate each point from its seeds: a frame with the columns `by`, mean, low, high, n, infeasible.

    A point is a group of rows with the same values in the columns `by`; the last of these columns is the definition.
    The mean is NaN for a point without a value. The bounds low and high are NaN for a point without an interval.
    """
    import pandas as pd

    wanted = pc.and_(
        pc.is_in(table.column("definition").cast(pa.string()), pa.array(list(definitions), pa.string())),
        pc.is_in(table.column("over").cast(pa.string()), pa.array(list(over), pa.string())),
    )
    frame = table.filter(pc.and_(wanted, pc.is_null(table.column("skipped")))).to_pandas()
    points = []
    for key, group in frame.groupby(list(by), dropna=False, observed=True, sort=True):
        values = group["value"].to_numpy(np.float64)
        bounds = (0.0, 1.0) if key[-1] in DEFINITIONS else (0.0, math.inf)
        e = interval(values, bounds)
        hollow = bool(group["infeasible"].notna().any())
        points.append((*key, e.mean, *(math.nan if x is None else x for x in (e.low, e.high)), e.n, hollow))
    return pd.DataFrame(points, columns=[*by, "mean", "low", "high", "n", "infeasible"])


class Bound(NamedTuple):
    """An engine cap that limited more than the share `BINDS` of a system's steps at some rate, as a mean over seeds.

    A cap is a setting such as the largest number of tokens or of sequences in a step.
    """

    cap: str  # the field of the spec
    label: str
    offered_rps: float  # the lowest rate at which it did
    share: float  # is a share of steps at that rate
    most: float  # is the largest share of steps at a point


def bound(table: pa.Table) -> list[Bound]:
    """Return the caps that limited a system's steps, in the order of `CAPS`, then by the system's name."""
    names = pa.array([*CAPS, "offered_rps"])
    pooled = pc.equal(table.column("over").cast(pa.string()), "pooled")
    wanted = pc.and_(pooled, pc.is_in(table.column("definition").cast(pa.string()), names))
    frame = table.filter(wanted).to_pandas()
    by = [*(name for name in ("condition", "x") if name in frame), *POINT]  # a study has panels
    means = frame.groupby(by, dropna=False, observed=True)["value"].mean().reset_index()
    means = means.sort_values(["label", "rate_scale"], kind="stable")
    offered = (
        means[means["definition"] == "offered_rps"].groupby(["label", "rate_scale"], observed=True)["value"].mean()
    )
    bounds = []
    for name, cap in CAPS.items():
        binds = means[(means["definition"] == name) & (means["value"] > BINDS)]
        for label, points in binds.groupby("label", observed=True):
            first = points.iloc[0]
            rate = float(offered.get((label, first["rate_scale"]), math.nan))
            bounds.append(Bound(cap, str(label), rate, float(first["value"]), float(points["value"].max())))
    return bounds
