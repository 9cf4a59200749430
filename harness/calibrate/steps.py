"""Fit the table of a machine that was measured as a whole (engines/costs/whole.py), with linear step costs.

The fit takes rows of these kinds. Each line ends with the conditions and facts of a row that the fit reads:

    prefill  seconds to the first token of a prompt that is alone on its server (shape, tokens, held)
    decode   seconds of a step in which each stream of a server makes one token (shape, seqs, held, ctx_tokens)
    beside   seconds of a prefill or decode step while `servers` servers do the same (servers, seqs, alone_s)
    start    seconds from the start of a server to its first answer (shape)
    wake     seconds until a sleeping server has its memory again (shape, way)

`held` is true for held-out rows; `ctx_tokens` and `alone_s` are facts of a row, all others are conditions.

The seconds of a step are a sum of terms whose coefficients are not negative. One coefficient is for the first token of
a step, and one for each further token in each segment of KNOTS. The others are for each sequence, each token of
context, and each unit of attention area. A measured TTFT is the seconds of a step plus `api_in_s`, which all models
share; a measured decode is a step alone. The fit minimizes squared relative errors. It leaves out the held-out rows,
whose errors are stored separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.calibrate.rows import F8, Measurement, of
from harness.calibrate.tables import error
from harness.engines.costs import quantities
from harness.engines.costs.coefficients import nonnegative
from harness.engines.costs.quantities import sig
from harness.engines.costs.whole import SAID
from harness.policy.types import UserError

if TYPE_CHECKING:
    import pandas as pd

# The seconds of a further token may change here: a product with a vector, small matrices, large ones.
KNOTS = (1, 2, 4, 8, 32, 128, 512, 2048, 8192)
NOTHING = "not measured: nothing here reads it"
FORMULA = "seconds(m) + seq_s (B + n) + ctx_s C + area_s area"
PHASES = ("prefill", "decode")
LINE = ("seq_s", "ctx_s", "area_s")
LEAST_S = 1e-9  # the least time of a step
DIGITS = 5  # significant ones of a number in the table
SHARES = np.linspace(1.0, 0.01, 100)  # ties: the largest share wins
FACTORS = np.geomspace(1.01, 100.0, 400)


class Work(NamedTuple):
    """The work of a measured step."""

    seqs: int  # sequences that decode
    ctx_tokens: float  # summed over all that decode, on average
    prompt: int  # tokens of a prompt of which it is the whole prefill; its seconds are then those of a first token

    @property
    def tokens(self) -> int:
        """The number of tokens that the step computes."""
        return self.seqs + self.prompt


def work(row: Measurement) -> Work:
    """Return the work of a measured step."""
    return Work(row.at.get("seqs", 0), row.facts.get("ctx_tokens", 0.0), row.at.get("tokens", 0))


class Fitted(NamedTuple):
    """The result of a fit: sections of a cost table, and each measured step with its predicted seconds."""

    host: dict[str, Any]
    steps: dict[str, dict[str, Any]]
    points: list[tuple[Measurement, float]]


def knots(most: int) -> list[int]:
    """Return the token counts that bound the linear segments of a step's cost: KNOTS below `most`, then `most`.

    `most` is the number of tokens of the largest measured step.
    """
    return [*(k for k in KNOTS if k < most), most]


def fit(rows: Sequence[Measurement], source: str) -> Fitted:
    """Fit the host and the steps of each model. Raises UserError if the measured steps do not determine all numbers."""
    every = [row for row in rows if row.quantity in PHASES]
    models = list(dict.fromkeys(row.at["shape"] for row in every))
    grids = {model: knots(max(work(row).tokens for row in every if row.at["shape"] == model)) for model in models}
    if short := next((model for model, grid in grids.items() if len(grid) < 2), None):
        raise UserError(f"{short} was measured with one token a step alone")
    starts = np.cumsum([1, *(len(grids[m]) + len(LINE) for m in models)])  # where each model's columns start

    def features(some: Sequence[Measurement]) -> F8:
        X = np.zeros((len(some), starts[-1]))
        for x, row in zip(X, some, strict=True):
            step, at, grid = work(row), starts[models.index(row.at["shape"])], grids[row.at["shape"]]
            line = [step.seqs + (step.prompt > 0), step.ctx_tokens, step.prompt**2 / 2]
            values = [*ramps(step.tokens, grid), *line]
            x[0], x[at : at + len(values)] = step.prompt > 0, values
        return X

    used = [row for row in every if not row.held_out]
    y = np.array([row.seconds for row in used])
    if np.linalg.matrix_rank(features(used) / y[:, None]) < starts[-1]:
        raise UserError(f"{len(used)} measured steps do not tell {starts[-1]} numbers apart")
    solution = nonnegative(features(used), y, 1 / y)
    points = list(zip(every, (features(every) @ solution).tolist(), strict=True))
    origin = {"source": source, "formula": FORMULA}
    sections = {}
    for at, model in zip(starts[:-1], models, strict=True):
        grid, pairs = grids[model], [pair for pair in points if pair[0].at["shape"] == model]
        slopes, line = solution[at : at + len(grid)], solution[at + len(grid) : at + len(grid) + len(LINE)]
        seconds = [max(LEAST_S, float(ramps(m, grid) @ slopes)) for m in grid]
        numbers = {name: sig(x, DIGITS) for name, x in zip(LINE, line.tolist(), strict=True)}
        sections[model] = {
            "tokens": grid,
            "seconds": [sig(s, DIGITS) for s in np.maximum.accumulate(seconds)],
            **numbers,
            **origin,
            **errors(pairs),
        }
    off = np.array([abs(math.log(row.seconds / max(LEAST_S, ours))) for row, ours in points])
    host = {
        "api_in_s": sig(float(solution[0]), DIGITS),
        "sigma": sig(1.4826 * float(np.median(off)), 2),
        "source": source,
        "formula": "first token of a prompt - its step; sigma: 1.4826 x median |ln error| of the steps",
    }
    return Fitted(host, sections, points)


def ramps(m: int, grid: Sequence[int]) -> F8:
    """Return the features of a step of m tokens: 1 for its first token, then its further tokens in each segment.

    The last segment has no end.
    """
    ends = [*grid[1:-1], math.inf]
    return np.array([1.0, *(min(max(0.0, m - a), b - a) for a, b in zip(grid[:-1], ends, strict=True))])


def errors(points: Sequence[tuple[Measurement, float]]) -> dict[str, Any]:
    """Return the errors on the fitted rows and on the held-out rows, for all steps and for each kind of step."""
    by_group = dict[str, Any]()
    for what in ("", "prefill ", "decode "):
        for group in ("fit", "held"):
            some = [(row, ours) for row, ours in points if row.held_out == (group == "held")]
            here = [(row.seconds, ours) for row, ours in some if what.strip() in {"", row.quantity}]
            if here:
                y, x = np.array(here).T
                by_group[f"{what}{group}"] = error(x, y)
    whole = {name: by_group.pop(name) for name in ("fit", "held") if name in by_group}
    return whole | {"held_parts": by_group}


def co_run(rows: Sequence[Measurement], source: str) -> dict[str, dict[str, Any]]:
    """Fit two numbers for the slowdown of servers that run side by side: one for prefills, one for decode steps.

    Each number is fitted to its own kind of rows. Raises UserError if one of the two kinds has no rows.
    """
    beside = list(of(rows, "beside"))
    kinds = {what: [row for row in beside if bool(row.at["seqs"]) == (what == "decode")] for what in PHASES}
    if lacking := [what for what, some in kinds.items() if not some]:
        raise UserError(f"no {lacking[0]} was measured side by side")
    return {what: _co_run(some, source) for what, some in kinds.items()}


def _co_run(rows: Sequence[Measurement], source: str) -> dict[str, Any]:
    """Fit one number to the slowdown of servers that run side by side: a share from SHARES or a factor from FACTORS.

    The fit chooses the number with the least squared relative error. A share, at most 1, is the part of the machine
    that a step needs. A factor describes servers whose slowdown is greater than a share of 1 explains.
    """
    y = np.array([row.seconds / row.facts["alone_s"] for row in rows])
    k = np.array([float(row.at["servers"]) for row in rows])
    candidates = [*((float(share), 1.0) for share in SHARES), *((1.0, float(factor)) for factor in FACTORS)]
    share, factor = min(candidates, key=lambda candidate: float(((slowdown(k, *candidate) / y - 1) ** 2).sum()))
    deviation = error(slowdown(k, share, factor), y)
    formula = "seconds beside k - 1 servers that do the same / seconds alone = 1 + factor (max(1, k share) - 1)"
    numbers = {"share": sig(share, DIGITS), "factor": sig(factor, DIGITS)}
    return {**numbers, **dict(zip(SAID, (source, formula), strict=True)), "fit": deviation}


def slowdown(servers: F8, share: float, factor: float) -> F8:
    """Return the factor by which steps take longer when `servers` servers run side by side."""
    return np.asarray(1.0 + factor * (np.maximum(1.0, servers * share) - 1.0), np.float64)


def specification(kind: str) -> dict[str, tuple[float, str]]:
    """Return the numbers of a GPU kind's specification, each with its source."""
    known, sources = quantities.gpu(kind), {s.quantity: s.source for s in quantities.sources([], kind, "none")}
    return {name: (getattr(known, name), sources[f"{kind}.{name}"]) for name in quantities.GpuSpec._fields[2:]}


class About(NamedTuple):
    """Facts about the machine of a cost table that are not fitted to measured steps."""

    kind: str
    name: str
    source: str
    settings: Mapping[str, Any]
    spec: Mapping[str, tuple[float, str]]  # value and source by field
    ways: Sequence[str]  # rungs of the ladder that are a start of the server
    weight_bytes: Mapping[str, int]  # a server's, keyed by shape


def table(rows: Sequence[Measurement], about: About) -> tuple[dict[str, Any], Fitted]:
    """Fit a cost table to rows, and return it with the result of the fit."""
    fitted = fit(rows, about.source)
    file = {
        "kind": about.kind,
        "name": about.name,
        "settings": dict(about.settings),
        "spec": {name: {"value": value, "source": source} for name, (value, source) in about.spec.items()},
        "host": fitted.host,
        "steps": fitted.steps,
        "co_run": co_run(rows, about.source),
        "ladder": ladder(rows, about),
    }
    return file, fitted


def ladder(rows: Sequence[Measurement], about: About) -> dict[str, dict[str, Any]]:
    """Return the cost of each way to load weights: the seconds of a start or a wake without the copy of the weights.

    The simulator adds the seconds of that copy itself.
    """
    h2d = about.spec["h2d"][0]

    def rung(spans: Sequence[Measurement], what: str) -> dict[str, Any]:
        beside = [max(0.0, row.seconds - about.weight_bytes[row.at["shape"]] / h2d) for row in spans]
        source = f"{about.source}: {what}" if beside else "servers that ran already"
        return {"fixed_s": sig(float(np.median(beside)), DIGITS) if beside else 0.0, "link": "pcie", "source": source}

    starts, wakes = list(of(rows, "start")), list(of(rows, "wake"))
    rungs = {way: rung(starts, "from the start to the first answer") for way in about.ways}
    for way in dict.fromkeys(row.at["way"] for row in wakes):
        rungs[way] = rung(list(of(wakes, "wake", way=way)), "from the order to wake to its answer")
    return rungs


def notes(file: Mapping[str, Any]) -> list[str]:
    """List the fitted numbers of steps and of their slowdown when servers run side by side, with their errors."""
    host, co_run = file["host"], file["co_run"]
    texts = [f"before a request is queued: {1e3 * host['api_in_s']:.3g} ms; spread of steps {host['sigma']:.1%}"]
    for model, q in file["steps"].items():
        texts.append(f"{model}: {quantities.error(q)}")
        parts = ((part, quantities.error({"fit": e}).removeprefix("fit ")) for part, e in q["held_parts"].items())
        texts += [f"  {part}: {text}" for part, text in parts]
    for phase in PHASES:
        beside = co_run[phase]
        demand = f"{beside['share']:.0%} of the machine, beside others {beside['factor']:.3g} x what that tells"
        texts.append(f"a step of {phase} asks for {demand}: {quantities.error(beside)}")
    return texts


def points(fitted: Fitted) -> pd.DataFrame:
    """Return a table with the measured seconds and the fitted seconds of each step."""
    import pandas as pd

    columns = ["model", "what", "seqs", "prompt", "ctx_tokens", "held", "measured_s", "fitted_s"]
    lines = [
        (row.at["shape"], row.quantity, step.seqs, step.prompt, step.ctx_tokens, row.held_out, row.seconds, ours)
        for row, ours in fitted.points
        for step in [work(row)]
    ]
    return pd.DataFrame(lines, columns=columns)
