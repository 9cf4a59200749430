"""A made-up study's table: what claims, texts and figures read of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from harness.rows.about import About
from harness.rows.definitions import DEFINITIONS
from harness.study.study import Claim, Sample
from harness.study.table import schema

TRACE = "hyperbolic-like"


def panel(key: str, row: int, axis: str, **facts: Any) -> dict[str, Any]:
    """Return facts of a panel as `grid.facts` has them."""
    usual = {"kind": "", "origin": "", "source": "", "column": 0, "tier": "synthetic", "note": "", "models": "heavy8",
             "own": {}, "given": True, "plan": "trace", "half": "", "halves": [],
             "count": 8, "gpus": 2, "gpu": "h100", "host": "vllm",
             "slo": "P95", "slo_scale": 5.0, "rate_rps": None, "unit_rps": 1.5, "rates_rps": (), "xs": (), "at": None,
             "window_s": 600.0, "seen": [], "trace": TRACE, "name": key}  # fmt: skip
    return {"condition": key, "row": row, "axis": axis} | usual | facts


PANELS = [
    panel("rates", 0, "rate_scale", at=4.0, given=False),
    panel("SLOs", 1, "slo_scale", slo_scale=None, rate_rps=6.0, at=5.0),
    panel("counts", 2, "gpus", gpus=None, rate_rps=1.5, xs=(2.0, 3.0, 4.0, 5.0)),
]
AT = {entry["condition"]: {"condition": entry["condition"]} for entry in PANELS}
CLAIMS = [
    Claim("ratio", "prism", "static", on={"axis": "rate_scale", "trace": "hyper"}, paper=2.3),
    Claim("ratio", "prism", "static", on=AT["rates"], paper=4.0),
    Claim("ratio", "prism", "static", on={"axis": "rate_scale", "trace": "arena"}, paper=4.0),
    Claim("crossing", "prism", on=AT["SLOs"], paper="reached"),
    Claim("crossing", "static", on=AT["SLOs"], paper="never"),
    Claim("fewest", "prism", on=AT["counts"], paper=4),
    Claim("fewest", "prism", on=AT["counts"], paper=7, comparable=False, why="no rate is stated"),
    Claim("fewest", "static", on=AT["counts"], paper="never"),
]


def about(panels: Sequence[Mapping[str, Any]] = PANELS, claims: Sequence[Claim] = CLAIMS, **facts: Any) -> About:
    """Return facts of a study as its table's metadata has them."""
    usual = {
        "study": "fig7",
        "layout": "lines",
        "paper": "A paper, figure 7",
        "level": 0.99,
        "slo": "P95",
        "definitions": ["ttft", "tpot"],
        "titles": [],
        "systems": ["prism", "static"],
        "texts": {"prism": "prism", "static": "static"},
        "controls": ["dedicated", "unshared", "prism (A/A)"],
        "seeds": 3,
        "sample": asdict(Sample()),
        "fuller": "",
        "notes": ["hyperbolic-like: windows cut to 600 of 7200 s."],
        "judges": [],
        "runs": {},
        "key": "x",
    }
    stored = {"panels": list(panels), "claims": [asdict(claim) for claim in claims], "values": [None] * len(claims)}
    return About.of(usual | stored | facts)


def met(x: float, knee: float, slope: float = 4.0) -> float:
    """Return attainment at a rate of a system that crosses 99 % at the knee; misses grow by this power of the rate."""
    return 1.0 - min(0.5, 0.01 * math.pow(x / knee, slope))


def point(condition: str, x: float, label: str, seed: int, ttft: float, **more: Any) -> dict[str, Any]:
    """Return a made-up score of a system at a point of a panel, as `table` takes it; `more` are further columns."""
    return {"condition": condition, "x": x, "label": label, "seed": seed, "ttft": ttft} | more


def cells() -> Iterator[dict[str, Any]]:
    """Return made-up scores: prism crosses 99 % at 4 x static's rate, from SLO scale 2 on 4 GPUs; static never."""
    for label, knee, infeasible in (("prism", 10.0, None), ("static", 2.5, "no room")):
        for seed in range(3):
            for x in (1.0, 2.0, 4.0, 8.0, 16.0):
                yield point("rates", x, label, seed, met(x, knee))
            for x in (1.0, 2.0, 5.0):
                yield point("SLOs", x, label, seed, met(2.0, x) if label == "prism" else 0.8)
            for x in (2.0, 3.0, 4.0, 5.0):
                holds = label == "prism" and x >= 4
                none = infeasible if x == 2 else None
                share = 1.0 if holds else 0.0 if none else 0.8
                yield point("counts", x, label, seed, share, infeasible=none, gpus=int(x))
    for seed in range(3):  # a GPU a model, whatever is asked
        yield point("rates", 1.0, "dedicated", seed, 1.0, gpus=8)
        yield point("counts", 8.0, "dedicated", seed, 1.0, gpus=8)
    for label in ("unshared", "prism (A/A)"):
        for seed in range(3):
            for x in (1.0, 16.0):
                yield point("rates", x, label, seed, 1.0)


def counted(name: str, value: float | None, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return missed and offered requests of a run, in two stretches; nothing of what is no attainment."""
    if name not in DEFINITIONS or value is None or base.get("infeasible") or base["over"] not in {"pooled", "model"}:
        return {}
    each = base["n"] / 2
    return {"missed": [each * (1.0 - value)] * 2, "offered": [each] * 2}


def table(rows: Sequence[Mapping[str, Any]], windows: int = 4) -> pa.Table:
    """Return rows of a study's table, as `table.Scores.table` makes them; `ttft` is a point's attainment.

    Each row stands for windows of 900 requests in all, which miss alike: seed 1 for windows 4 to 7, if there are four.
    A row may have `windows` of its own.
    """
    columns = schema()
    plain = pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in columns])
    out = list[dict[str, Any]]()
    for row in rows:
        count = row.get("windows", windows)
        for k in range(count):
            out += _window(row, count, k)
    return pa.Table.from_pylist(out, schema=plain).cast(columns)


def _window(row: Mapping[str, Any], count: int, k: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of window k of as many as a row stands for."""
    base = {
        "run": "r",
        "system": row["label"],
        "trace": TRACE,
        "models": "heavy8",
        "gpu": "h100",
        "gpus": 2,
        "scaling": "rotate",
        "rate_scale": 1.0,
        "slo": "5xP95",
        "tier": "synthetic",
        "n": 900 // count,
        "fidelity": "simulated",
        "plan_origin": "trace",
        "over": "pooled",
    }
    base |= {key: value for key, value in row.items() if key not in {"ttft", "windows"}}
    base["seed"] = count * row["seed"] + k
    values = {"ttft": row["ttft"], "tpot": 1.0, "both": row["ttft"], "loads": 7.0, "evicts": 6.0, "migrations": 2.0}
    for name, value in values.items():
        yield base | {"definition": name, "value": value} | counted(name, value, base)
