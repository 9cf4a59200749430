"""ServeGen's clients (a folder with chunk-*-trace.csv and chunk-*-dataset.json, or of such): a synthetic trace.

The source is alibaba/ServeGen f891d11, data/. A row of a client's trace describes a window of 600 s: its begin,
requests/s, CV, and the law of its gaps (Gamma or Weibull, shape, scale). A client's dataset has distributions of prompt
and output lengths, each valid from its time until the next. Each folder is one model.

The hour with the most requests is drawn. All rates are scaled by one factor so that they add up to `rate_rps`, because
the service had up to 1,800 requests/s. Clients without lengths are left out; many copies lack the largest files.
"""

from __future__ import annotations

import ast
import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.types import UserError
from traces import arrivals, records, schema

FOLDER = True
WINDOW_S, HOUR_S = 600.0, 3600.0
RATE_RPS = 10.0


class Window(NamedTuple):
    """The arrivals of a client in one window, which lasts `WINDOW_S` seconds and begins at `at` seconds."""

    at: float
    rate_rps: float
    cv: float
    law: str
    shape: float


def read(
    path: Path, *, name: str | None = None, span_s: float = HOUR_S, rate_rps: float = RATE_RPS, jitter_seed: int = 0
) -> pa.Table:
    """Draw the requests of the busiest period of length `span_s`, which is cut to whole windows of `WINDOW_S`.

    Rates are scaled so that all models together get `rate_rps` requests per second. UserError names a bad file.
    """
    clients, unlike = _clients(path)
    span_s = max(WINDOW_S, WINDOW_S * math.floor(span_s / WINDOW_S))
    begin, whole = _busiest([window for _, _, windows, _ in clients for window in windows], round(span_s / WINDOW_S))
    if not whole:
        raise UserError(f"{path}: no client has requests")
    scale = rate_rps / whole
    arrivals.bounded(f"{path}: {rate_rps:g} requests/s", rate_rps * span_s, "a lower --rate-rps, or a shorter --span-s")
    when: list[NDArray[np.float64]] = []
    lengths: tuple[list[NDArray[np.int64]], ...] = ([], [])
    model: list[str] = []
    tenant: list[str] = []
    for k, (label, client, windows, shares) in enumerate(clients):
        draw = arrivals.rng(jitter_seed, "servegen", k)
        for window in windows:
            after, rate = window.at - begin, window.rate_rps * scale
            if not (0 <= after < span_s and rate):
                continue
            if window.law == "Weibull":
                came = arrivals.weibull(draw, rate, WINDOW_S, window.shape)
            else:
                came = arrivals.gamma(draw, rate, WINDOW_S, window.cv or 1.0)
            if not len(came):
                continue
            at = max((start for start in shares if start <= window.at), default=min(shares))
            when.append(after + came)
            model += [label] * len(came)
            tenant += [client] * len(came)
            for tokens, (values, weights) in zip(lengths, shares[at], strict=True):
                tokens.append(draw.choice(values, len(came), p=weights))
    if not when:
        raise UserError(f"{path}: no request is drawn at {rate_rps:g} requests/s in {span_s:g} s")
    arrival_s = np.concatenate(when)
    order = np.argsort(arrival_s, kind="stable")
    names, tenants = (pa.array(words).dictionary_encode().take(pa.array(order)) for words in (model, tenant))
    meta = {
        "name": name or f"servegen-{path.name}",
        "tier": "synthetic",
        "licence": "Apache-2.0",
        "source": path.name,
        "length_origin": "sampled",
        "span_s": span_s,
        "jitter_seed": jitter_seed,
        "streams": sorted(set(model)),
        "note": f"drawn of {len(clients)} clients from {begin:g} s on, rates times {scale:.3g}"
        + (f"; {unlike} clients without lengths left out" if unlike else ""),
    }
    prompt, output = (np.maximum(1, np.concatenate(tokens))[order] for tokens in lengths)
    return schema.requests(arrival_s[order], names, prompt, output, meta, tenant=tenants)


def _busiest(windows: Iterable[Window], count: int) -> tuple[float, float]:
    """Return the begin of the `count` consecutive windows with the most requests, and the mean request rate in them."""
    load: dict[float, float] = {}
    for window in windows:
        load[window.at] = load.get(window.at, 0.0) + window.rate_rps
    whole = {at: sum(load.get(at + k * WINDOW_S, 0.0) for k in range(count)) for at in load}
    begin = max(whole, key=lambda at: (whole[at], -at))
    return begin, whole[begin] / count


Lengths = dict[float, tuple[tuple[Any, Any], tuple[Any, Any]]]  # by begin, values and shares of prompts and outputs


def _clients(path: Path) -> tuple[list[tuple[str, str, list[Window], Lengths]], int]:
    files = sorted(file for suffix in ("csv", "csv.gz") for file in path.rglob(f"chunk-*-trace.{suffix}"))
    if not files:
        raise UserError(f"{path}: no chunk-*-trace.csv below it")
    clients, unlike = [], 0
    for file in files:
        stem = file.name.partition("-trace.")[0]
        data = min(file.parent.glob(f"{stem}-dataset.json*"), default=None)
        if lengths := _lengths(data) if data else {}:
            clients.append((file.parent.name, f"{file.parent.name}/{stem}", _windows(file), lengths))
        else:
            unlike += 1
    if not clients:
        raise UserError(f"{path}: no client has a dataset of lengths")
    return clients, unlike


def _windows(path: Path) -> list[Window]:
    windows = []
    with records.opened(path) as file:
        lines = file.read().decode("utf-8", "replace").splitlines()
    for number, row in enumerate(csv.reader(lines), 1):
        try:
            at, rate, cv, law, shape, *_ = row
            window = Window(float(at), float(rate), float(cv), law, float(shape))
        except ValueError:
            raise UserError(f"{path}:{number}: not begin, rate, CV, law, shape, scale") from None
        if not all(math.isfinite(x) and x >= 0 for x in (window.at, window.rate_rps, window.cv, window.shape)):
            raise UserError(f"{path}:{number}: a number that is negative or not finite")
        windows.append(window)
    return windows


def _lengths(path: Path) -> Lengths:
    """Read the distributions of prompt and output lengths by window; a window that lacks either is left out."""
    try:
        with records.opened(path) as file:
            data = json.loads(file.read())
        out: Lengths = {}
        for begin, each in data.items():
            prompts, outputs = (_shares(each[key]) for key in ("input_tokens", "output_tokens"))
            if prompts and outputs:
                out[float(begin)] = (prompts, outputs)
    except (OSError, EOFError, ValueError, SyntaxError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not shares of lengths: {str(error)[:80]}") from None
    return out


def _shares(text: str) -> tuple[Any, Any] | None:
    shares: Mapping[Any, Any] = ast.literal_eval(text)
    if not shares:
        return None
    values = np.array([int(value) for value in shares], np.int64)
    weights = np.array([float(weight) for weight in shares.values()])
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise ValueError("shares that do not add up")
    return values, weights / weights.sum()
