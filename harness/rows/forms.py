"""The forms of stored files: the type of each key's value, which `sealed.fault` checks, and the columns of tables.

A form does not say that a key must be present; the code that reads the key checks this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

TEXT = (str, None)
ANY: Any = (str, float, bool, None, [], {})
SPEC = {str: ANY}
AXES = frozenset({"rate_scale", "rate_rps", "slo_scale", "models", "gpus"})

RUN: Mapping[str, Any] = {  # requests.parquet
    "schema": int, "spec": {**SPEC, "window_s": (float, None)}, "spec_hash": str, "code_hash": str, "fidelity": str,
    "tier": TEXT, "fit": TEXT, "plan_origin": TEXT, "stats": {str: float}, "skipped": TEXT, "infeasible": TEXT,
    "refused": int, "first_refused": str, "counts": {str: int}, "end_s": (float, None), "departs": TEXT,
    "degrees": TEXT, "measured_on": {}, "verdict": ({"text": str, "reasons": [str]}, None),
    "wakes": ({"text": str}, None), "served": ({str: str}, None), "failures": ({str: int}, None), "arithmetic": TEXT,
}  # fmt: skip

PANEL = {
    "condition": str, "name": str, "kind": str, "other_end": bool, "origin": str, "source": str, "row": int,
    "column": int, "axis": AXES, "trace": str, "tier": str, "note": str, "models": str, "own": {}, "given": bool,
    "plan": str, "count": (int, None), "gpus": (int, None), "gpu": str, "host": str, "slo": str,
    "slo_scale": (float, None), "rate_rps": (float, None), "unit_rps": float, "rates_rps": [float], "xs": [float],
    "at": (float, None), "window_s": float, "seen": [[int]], "half": str, "halves": [[int]],
    "left_out": str, "server": str,
}  # fmt: skip
CLAIM = {
    "what": str, "system": str, "over": str, "definition": str, "on": {}, "paper": (float, str, [float], None),
    "why": str, "comparable": bool, "shape": str, "tp": int, "subject": str, "says": str, "metric": str, "bound": str,
    "even": (float, None), "at": float, "lacks": str, "input": str, "section": str, "name": str, "evidence": bool,
    "also": [{}], "measure": str, "model": str, "most": bool, "least": str, "headline": str,
}  # fmt: skip
SCORED: Mapping[str, Any] = {  # attainment.parquet
    "schema": int, "key": str, "study": str, "layout": str, "paper": str, "level": float, "definitions": [str],
    "slo": str, "titles": [str], "systems": [str], "texts": {str: str}, "controls": [str], "seeds": int,
    "sample": {"rule": str, "points": int, "each": str, "digits": int, "below": float}, "fuller": str,
    "setting": str, "headline": str, "shown": [str],
    "panels": [PANEL], "claims": [CLAIM], "values": [(float, None)], "notes": [str],
    "judges": [{"rule": str, "seconds": ({str: [float, float]}, None), "runs": [str]}], "runs": {str: str},
    "bound": ({"definition": str, "rate_scale": float, "gpus": int}, None),
}  # fmt: skip
LEADS: Mapping[str, Any] = {  # sensitivity.parquet
    "schema": int,
    "first": str,
    "second": str,
    "definition": str,
    "rates": [float],
    "sweep": str,
    "asked": [str],
}
TURNS: Mapping[str, Any] = {  # turns.parquet
    "schema": int,
    "spec": SPEC,
    "load_s": {str: [float, float]},
    "sms": int,
    "partitions": [[float, str, str, (int, None)]],
    "orders": [[float, str, str, str]],
}

ASKED = {
    "setting": SPEC,
    "kinds": [str],
    "least": int,
    "most": int,
    "systems": [str],
    "rule": str,
    "definition": str,
    "target": float,
    "prices": {str: {"usd_hour": float, "date": str, "source": str}},
    "spare": int,
    "node": int,
    "growth": [float],
    "windows": int,
}
SIZED: Mapping[str, Any] = {  # size.parquet
    "schema": int,
    "asked": ASKED,
    "best": ({"gpu": str, "system": str, "gpus": int}, None),
    "sentence": str,
    "setting": str,
    "cells": [[str]],
    "facts": [[str, str]],
    "views": [[str, str]],
}

SIZE_COLUMNS = pa.schema(
    [
        ("gpu", pa.string()),
        ("label", pa.string()),
        ("gpus", pa.int32()),
        *((name, pa.float64()) for name in ("usd_day", "pooled", "low", "high", "worst")),
        ("worst_model", pa.string()),
        ("unfit", pa.string()),  # why it could not run; "": it did
        ("answer", pa.bool_()),  # True for the fewest GPUs on which every model holds the target
        ("runs", pa.list_(pa.string())),  # folders beside this one
    ]
)
LEAD_COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("constant", "means", "value", "source", "setting")),
        *((name, pa.float64()) for name in ("mean", "low", "high")),
        ("n", pa.int32()),
        ("sign", pa.string()),
        ("note", pa.string()),
    ]
)
TURN_COLUMNS = pa.schema(
    [
        *((name, pa.string()) for name in ("gpus", "model", "phase", "why")),
        ("steps", pa.int64()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
    ]
)
