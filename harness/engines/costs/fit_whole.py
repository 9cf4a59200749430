"""Fit the table of a machine that was measured whole (`whole.py`) on timings of its servers from outside.

A step's seconds are linear in numbers that are not negative: those of a step of one token, those of each token more by
segment of KNOTS, and those of a sequence, a token of context and of area. `api_in_s` is common to all models. A TTFT
is `api_in_s` and a step, a decode measurement a step alone. The fit minimizes squared relative errors. Held-out rows
are in no fit, and have errors of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.coefficients import nonnegative
from harness.engines.costs.fit import error
from harness.engines.costs.quantities import sig
from harness.engines.costs.whole import SAID
from harness.policy.types import UserError

F8 = NDArray[np.float64]
Line = Mapping[str, Any]  # of a journal (engines/servers/probe.py)
# Where the seconds of a token more may change: a product with a vector, small matrices, large ones.
KNOTS = (1, 2, 4, 8, 32, 128, 512, 2048, 8192)
FORMULA = "seconds(m) + seq_s (B + n) + ctx_s C + area_s area"
LINE = ("seq_s", "ctx_s", "area_s")
LEAST_S = 1e-9  # of a step
DIGITS = 5  # significant ones of a number in the table
SHARES = np.linspace(1.0, 0.01, 100)  # of those that explain the same the largest
FACTORS = np.geomspace(1.01, 100.0, 400)


class Step(NamedTuple):
    """A measured step: the median of its seconds, and what was in it."""

    model: str
    seconds: float
    seqs: int = 0  # that decode
    ctx_tokens: float = 0.0  # of all that decode, on average
    prompt: int = 0  # tokens of a prompt of which it is the whole prefill; its seconds are then those of a first token
    held: bool = False  # in no fit

    @property
    def tokens(self) -> int:
        """All tokens of the step."""
        return self.seqs + self.prompt

    @property
    def what(self) -> str:
        """The kind of the step: prefill or decode."""
        return "prefill" if self.prompt else "decode"


class Beside(NamedTuple):
    """Seconds of a step with `servers` running the same concurrently, itself among them, and alone."""

    what: str  # prefill or decode
    servers: int
    seconds: float
    alone_s: float


class Fitted(NamedTuple):
    """Sections of a table, and each step with its predicted seconds."""

    host: dict[str, Any]
    steps: dict[str, dict[str, Any]]
    points: list[tuple[Step, float]]


def knots(most: int) -> list[int]:
    """Return the knots below the most tokens of a measured step, and that number."""
    return [*(k for k in KNOTS if k < most), most]


def fit(steps: Sequence[Step], source: str) -> Fitted:
    """Fit the host and the steps of each model. Raises UserError where too few steps tell the numbers apart."""
    models = list(dict.fromkeys(step.model for step in steps))
    grids = {model: knots(max(s.tokens for s in steps if s.model == model)) for model in models}
    if short := next((model for model, grid in grids.items() if len(grid) < 2), None):
        raise UserError(f"{short} was measured with one token a step alone")
    starts = np.cumsum([1, *(len(grids[m]) + len(LINE) for m in models)])  # of each model's columns, behind the first

    def features(rows: Sequence[Step]) -> F8:
        X = np.zeros((len(rows), starts[-1]))
        for row, step in zip(X, rows, strict=True):
            at, grid = starts[models.index(step.model)], grids[step.model]
            area = step.prompt**2 / 2
            values = [*ramps(step.tokens, grid), step.seqs + (step.prompt > 0), step.ctx_tokens, area]
            row[0], row[at : at + len(values)] = step.prompt > 0, values
        return X

    used = [step for step in steps if not step.held]
    y = np.array([step.seconds for step in used])
    if np.linalg.matrix_rank(features(used) / y[:, None]) < starts[-1]:
        raise UserError(f"{len(used)} measured steps do not tell {starts[-1]} numbers apart")
    solution = nonnegative(features(used), y, 1 / y)
    points = list(zip(steps, (features(steps) @ solution).tolist(), strict=True))
    origin = {"source": source, "formula": FORMULA}
    sections = {}
    for at, model in zip(starts[:-1], models, strict=True):
        grid, pairs = grids[model], [pair for pair in points if pair[0].model == model]
        slopes, line = solution[at : at + len(grid)], solution[at + len(grid) : at + len(grid) + len(LINE)]
        seconds = [max(LEAST_S, float(ramps(m, grid) @ slopes)) for m in grid]
        numbers = {name: sig(x, DIGITS) for name, x in zip(LINE, line.tolist(), strict=True)}
        sections[model] = {
            "tokens": grid, "seconds": [sig(s, DIGITS) for s in np.maximum.accumulate(seconds)], **numbers, **origin,
            **errors(pairs),
        }  # fmt: skip
    off = np.array([abs(math.log(step.seconds / max(LEAST_S, ours))) for step, ours in points])
    host = {
        "api_in_s": sig(float(solution[0]), DIGITS),
        "sigma": sig(1.4826 * float(np.median(off)), 2),
        "source": source,
        "formula": "first token of a prompt - its step; sigma: 1.4826 x median |ln error| of the steps",
    }
    return Fitted(host, sections, points)


def ramps(m: int, grid: Sequence[int]) -> F8:
    """Return the features of a step of m tokens: one for its first token, then its tokens in each segment.

    The last segment is open.
    """
    ends = [*grid[1:-1], math.inf]
    return np.array([1.0, *(min(max(0.0, m - a), b - a) for a, b in zip(grid[:-1], ends, strict=True))])


def errors(points: Sequence[tuple[Step, float]]) -> dict[str, Any]:
    """Return the errors of the fitted and of the held-out rows, and of each kind of step in both."""
    groups = {
        which: [(step.what, step.seconds, x) for step, x in points if step.held == (which == "held")]
        for which in ("fit", "held")
    }
    by_group = {which: _off([(y, x) for _, y, x in rows]) for which, rows in groups.items()}
    for what in ("prefill", "decode"):
        by_group |= {f"{what} {k}": _off([(y, x) for of, y, x in rows if of == what]) for k, rows in groups.items()}
    there = {name: numbers for name, numbers in by_group.items() if numbers["n"]}
    whole = {name: there.pop(name) for name in ("fit", "held") if name in there}
    return whole | {"held_parts": there}


def _off(pairs: Sequence[tuple[float, float]]) -> dict[str, float | int]:
    """Return the error of pairs of measured and predicted seconds."""
    if not pairs:
        return {"n": 0}
    y, x = np.array(pairs).T
    return error(x, y)


def co_run(measured: Sequence[Beside], source: str) -> dict[str, dict[str, Any]]:
    """Fit one number for prefills and one for decode steps, each on its own measurements.

    Raises UserError where a kind has none.
    """
    kinds = {what: [row for row in measured if row.what == what] for what in ("prefill", "decode")}
    if lacking := [what for what, rows in kinds.items() if not rows]:
        raise UserError(f"no {lacking[0]} was measured side by side")
    return {what: _co_run(rows, source) for what, rows in kinds.items()}


def _co_run(measured: Sequence[Beside], source: str) -> dict[str, Any]:
    """Fit the one number, of SHARES or FACTORS, that gives servers' slowdown with the least squared relative error.

    Up to a share of 1 it is the share of the machine that a step asks for; beyond, servers disturb each other more.
    """
    y = np.array([row.seconds / row.alone_s for row in measured])
    k = np.array([float(row.servers) for row in measured])
    candidates = [*((float(share), 1.0) for share in SHARES), *((1.0, float(factor)) for factor in FACTORS)]
    share, factor = min(candidates, key=lambda candidate: float(((slowdown(k, *candidate) / y - 1) ** 2).sum()))
    deviation = error(slowdown(k, share, factor), y)
    formula = "seconds beside k - 1 servers that do the same / seconds alone = 1 + factor (max(1, k share) - 1)"
    numbers = {"share": sig(share, DIGITS), "factor": sig(factor, DIGITS)}
    return {**numbers, **dict(zip(SAID, (source, formula), strict=True)), "fit": deviation}


def slowdown(servers: F8, share: float, factor: float) -> F8:
    """Return the factor by which steps take longer with so many servers side by side."""
    return np.asarray(1.0 + factor * (np.maximum(1.0, servers * share) - 1.0), np.float64)


class About(NamedTuple):
    """Facts of a table's machine beside the measurements."""

    kind: str
    name: str
    source: str
    settings: Mapping[str, Any]
    spec: Mapping[str, tuple[float, str]]  # value and source by field
    ways: Sequence[str]  # rungs of the ladder that are a start of the server
    weight_bytes: Mapping[str, int]  # by shape, of a server's


def steps(lines: Iterable[Line]) -> list[Step]:
    """Read the prefill and decode steps from a journal's lines."""
    parsed = []
    for line in lines:
        at, seconds = line["params"], line["p50"]
        if line["what"] == "prefill":
            parsed.append(Step(at["shape"], seconds, prompt=at["tokens"], held=at["held"]))
        elif line["what"] == "decode":
            parsed.append(Step(at["shape"], seconds, at["seqs"], line["facts"]["ctx_tokens"], held=at["held"]))
    return parsed


def besides(lines: Iterable[Line]) -> list[Beside]:
    """Read the steps of servers side by side from a journal's lines."""
    parsed = []
    for line in lines:
        if line["what"] == "beside":
            what = "decode" if line["params"]["seqs"] else "prefill"
            parsed.append(Beside(what, line["params"]["servers"], line["p50"], line["facts"]["alone_s"]))
    return parsed


def table(lines: Sequence[Line], about: About) -> tuple[dict[str, Any], Fitted]:
    """Fit the table that the lines of a journal give, and return it with the fit behind it."""
    fitted = fit(steps(lines), about.source)
    file = {
        "kind": about.kind,
        "name": about.name,
        "settings": dict(about.settings),
        "spec": {name: {"value": value, "source": source} for name, (value, source) in about.spec.items()},
        "host": fitted.host,
        "steps": fitted.steps,
        "co_run": co_run(besides(lines), about.source),
        "ladder": ladder(lines, about),
    }
    return file, fitted


def ladder(lines: Sequence[Line], about: About) -> dict[str, dict[str, Any]]:
    """Return a rung for each way: the seconds that a start or a wake takes beside the copy of the weights.

    A run adds the seconds of that copy.
    """
    h2d = about.spec["h2d"][0]

    def rung(spans: Sequence[Line], what: str) -> dict[str, Any]:
        beside = [max(0.0, line["p50"] - about.weight_bytes[line["params"]["shape"]] / h2d) for line in spans]
        source = f"{about.source}: {what}" if beside else "servers that ran already"
        return {"fixed_s": sig(float(np.median(beside)), DIGITS) if beside else 0.0, "link": "pcie", "source": source}

    starts = [line for line in lines if line["what"] == "start"]
    wakes = [line for line in lines if line["what"] == "wake"]
    rungs = {way: rung(starts, "from the start to the first answer") for way in about.ways}
    for way in dict.fromkeys(line["params"]["way"] for line in wakes):
        rungs[way] = rung(
            [line for line in wakes if line["params"]["way"] == way], "from the order to wake to its answer"
        )
    return rungs
