"""A machine that was measured whole: a server timed from outside, as `bench calibrate --engine E` times it.

Its table carries all that a run is priced by, and stands for the GPU kind and the host profile of the run:

    kind, name           of the machine: a word, and what was measured on it
    [settings]           of a spec, under which it was measured; a run takes them where it does not say otherwise
    [spec.FIELD]         `value` and `source` of every number of `GpuSpec`
    [host]               `api_in_s` before a request is queued, `sigma` of steps around the table
    [steps."SHAPE"]      steps of a model
    [co_run]             `share` of the machine that a step asks for; `factor`: below
    [ladder.WAY]         `fixed_s` of a start or wake, and its `link`

    step = seconds(m) + seq_s (B + n) + ctx_s C + area_s area                  (m, B, n, C, area: coef.py)

`seconds` is a table over `tokens`, linear between them and beyond the last two. What of a step is the host's, or is
hidden behind it, cannot be told from outside; so nothing is hidden. Of k servers that step side by side each takes
1 + factor (max(1, k share) - 1) times as long: a factor above 1 is of servers that disturb each other beyond their
shares, each of which is then all of the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from harness.engines.costs import shapes
from harness.engines.costs.coef import COST, Tables
from harness.policy.types import Shape, UserError

Toml = Mapping[str, Any]
SECTIONS = ("kind", "name", "settings", "spec", "host", "steps", "co_run", "ladder")
SETTINGS = ("block_tokens", "batch_cap", "chunk_tokens", "prefill_tokens", "pool_bytes", "sharing")
SAID = ("source", "formula")
NUMBERS = {"seq_s": 0.0, "ctx_s": 0.0, "area_s": 0.0}  # of a model's steps, and the least that each may be


def is_whole(file: Toml) -> bool:
    """Whether a table carries its own machine."""
    return "spec" in file or "steps" in file


def check(file: Toml, path: str, fields: Sequence[str]) -> None:
    """Refuse a table that is not of the form above; `fields` are the numbers of a specification."""

    def bad(where: str, want: str) -> NoReturn:
        raise UserError(f"cost table {path}: {where} {want}")

    def section(at: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(at, Mapping):
            bad(where, "is missing" if at is None else "must be a table")
        return at

    def number(at: Mapping[str, Any], key: str, where: str, least: float = 0.0) -> None:
        value = at.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < np.inf:
            bad(f"{where}.{key}", "is missing" if value is None else f"= {value!r} must be a number from {least:g} up")

    def text(at: Mapping[str, Any], key: str, where: str) -> None:
        if not isinstance(at.get(key), str) or not at[key]:
            bad(f"{where}.{key}" if where else key, "must be text")

    for name in file:
        if name not in SECTIONS:
            bad(f"unknown section {name!r};", f"known: {', '.join(SECTIONS)}")
    text(file, "kind", "")
    text(file, "name", "")
    for name in section(file.get("settings", {}), "settings"):
        if name not in SETTINGS:
            bad(f"settings.{name}", f"is none of {', '.join(SETTINGS)}")
    for name in fields:
        at = section(section(file.get("spec"), "spec").get(name), f"spec.{name}")
        number(at, "value", f"spec.{name}")
        text(at, "source", f"spec.{name}")
    host = section(file.get("host"), "host")
    for name in ("api_in_s", "sigma"):
        number(host, name, "host")
    co_run = section(file.get("co_run"), "co_run")
    number(co_run, "share", "co_run")
    if not 0 < co_run["share"] <= 1:
        bad("co_run.share", f"= {co_run['share']!r} must be above 0, and at most 1")
    number(co_run, "factor", "co_run")
    steps = section(file.get("steps"), "steps")
    if not steps:
        bad("steps", "is of no model")
    for model, own in steps.items():
        where = f'steps."{model}"'
        at = section(own, where)
        for name, least in NUMBERS.items():
            number(at, name, where, least)
        tokens, seconds = at.get("tokens"), at.get("seconds")
        if not isinstance(tokens, list) or len(tokens) < 2 or tokens[0] != 1 or any(type(m) is not int for m in tokens):
            bad(f"{where}.tokens", "must be whole numbers from 1, at least two")
        if sorted({*tokens}) != tokens:
            bad(f"{where}.tokens", "must rise")
        if not isinstance(seconds, list) or len(seconds) != len(tokens):
            bad(f"{where}.seconds", "must hold a number for each of its tokens")
        for k, s in enumerate(seconds):
            number({"seconds": s}, "seconds", f"{where}[{k}]")
        if seconds[0] == 0.0 or sorted(seconds) != seconds:
            bad(f"{where}.seconds", "must be above 0, and never fall")
    for name, at in (("host", host), ("co_run", co_run), *((f'steps."{m}"', at) for m, at in steps.items())):
        for key in SAID:
            text(at, key, name)
    for way, rung in section(file.get("ladder"), "ladder").items():
        number(section(rung, f"ladder.{way}"), "fixed_s", f"ladder.{way}")
        text(rung, "link", f"ladder.{way}")
        text(rung, "source", f"ladder.{way}")
        if rung["link"] not in {"pcie", "disk"}:
            bad(f"ladder.{way}.link", 'is neither "pcie" nor "disk"')


def tables(rows: Sequence[tuple[Shape, int]], file: Toml) -> Tables:
    """Coefficients of (shape, tensor-parallel degree) pairs; UserError for a model that was not measured there."""
    steps = file["steps"]
    for shape, tp in rows:
        if shape.name not in steps:
            raise UserError(f'{file["kind"]} has no steps."{shape.name}" (measured were: {", ".join(steps)})')
        if tp != 1:
            raise UserError(f"{file['kind']} was measured on one GPU, and {shape.name} is cut over {tp}")
    grid = np.array(sorted({m for shape, _ in rows for m in steps[shape.name]["tokens"]}), dtype=np.int64)
    cost, gemm = np.zeros(len(rows), COST), np.empty((len(rows), len(grid)))
    for i, (shape, _) in enumerate(rows):
        own, c = steps[shape.name], cost[i]
        gemm[i] = _lines(grid, own["tokens"], own["seconds"])
        c["host1"], c["serial"], c["dec2"], c["pre2"] = own["seq_s"], 1, own["ctx_s"], own["area_s"]
        c["share"], c["flops"], c["hbm"] = file["co_run"]["share"], 1.0, 1.0
        c["layers"] = shape.layers
        c["query_bytes"] = shapes.BF16 * shape.layers * shape.head_dim * (shape.q_heads + 2 * shape.kv_heads)
        c["result_bytes"] = shapes.BF16 * shape.layers * shape.head_dim * shape.q_heads
    whole = np.ones(1)
    one = np.ones((len(rows), 1))
    return Tables(cost, grid, gemm, 0.0 * gemm, whole, whole, one[:, :, None], one, np.ones((len(rows), len(grid), 1)))


def _lines(x: np.ndarray[Any, np.dtype[np.int64]], tokens: Sequence[int], seconds: Sequence[float]) -> Any:
    """Linear between points, and beyond the last two."""
    slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
    return np.interp(x, tokens, seconds) + slope * np.maximum(0, x - tokens[-1])
