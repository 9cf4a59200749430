"""Jobs from a trace and a set of models: streams are mapped to models, rotated, scaled and cut to a window.

A replayed trace is circular. A seed gives every stream its own start offset, so that runs of one trace differ. A window
as long as the trace has every row once. The warm-up before the window, at t < 0, repeats rows from the end of the
circle.

Planners must not know the window. So a replayed trace is cut into two folds, each of which is a circle: a seed replays
one fold, and planners see the other. For a synthetic trace, planners see what another seed draws.

A prompt shares blocks only with prompts of the same model, the same copy of the trace and the same pass through it.
Copies and repetitions represent other users of the same kind. So a higher rate or a longer window brings no prefix hits
that the trace does not have. If clients have different offsets, prompts may use a shared block in another order than in
the trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.policy.types import Jobs, Plan, Prefix, UserError
from traces import synthetic
from traces.arrivals import MOST_IN_FILES, MOST_REQUESTS, bounded, positive, rng
from traces.load import Trace
from traces.prefix import numbered, picked
from workloads.models import ModelSet
from workloads.picking import FOLDS, Assign, Picked, Picking, in_pieces, window_fold

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]
I8 = NDArray[np.int64]
Scaling = Literal["none", "rotate", "replicate", "time", "clients"]
Origin = Literal["held-out", "window", "trace", "prefix"]
SCALINGS: tuple[Scaling, ...] = ("none", "rotate", "replicate", "time", "clients")

WARMUP_S, WARMUP_SHARE = 60.0, 0.05  # the longer of the two, at most the span
PLAN_SEED = 10_000  # seeds from here on draw the synthetic traces that planners see
PRIOR = 1  # requests that a plan assumes of a model that it does not see
PREFIX = 0.1  # share of the span that `plan(origin="prefix")` may see
ROUNDING = 1e-9  # a scale this close to a whole number counts as whole
FIRST_S = 1e-6  # a closed loop begins this long before 0, so that its first wave is warm-up
MOST_FILES = 256  # requests of a long workload wait in these to be sorted


def build(
    trace: Trace,
    models: ModelSet,
    *,
    rate_scale: float = 1.0,
    scaling: Scaling = "rotate",
    seed: int = 0,
    window_s: float | None = None,
    warmup_s: float | None = None,
    slo: Mapping[str, tuple[float, float]] | None = None,
    fold: int | None = None,
    assign: Assign = "released",
) -> Jobs:
    """Make the jobs that arrive in the window [0, window_s) and in the `warmup_s` before it; ids follow arrival order.

    `scaling` says how the trace is scaled by `rate_scale`:

    none       the trace at its own times; the rate scale must be 1, and there is no warm-up unless it is asked for
    rotate     ceil(rate_scale) copies of the trace; each stream of each copy has its own random offset on the circle
    replicate  as many copies as rotate; a stream has the same offset in every copy
    time       one copy, whose arrival times and span are divided by rate_scale
    clients    as rotate, but whole clients are copied and shifted; the trace must name its clients

    A rate scale of 2.25 takes two whole copies, and the fraction f = 0.25 of a third. Each stream of that copy keeps
    every (1/f)-th request, from a random one on. So f is the same at all times, and a stream's number of requests is
    right to within one. With `clients`, the last copy has some of the clients, with all their requests.

    In a closed loop the rate scale multiplies the clients, and neither window nor warm-up cuts the requests: see
    `_loop`. `slo` gives TTFT and TPOT in seconds by model; a model that `slo` lacks has no SLO. `fold` (see
    `window_fold`) is the part of the trace that is replayed; None replays all of it. UserError names what is wrong.
    """
    positive("rate scale", rate_scale)
    if scaling not in SCALINGS:
        raise UserError(f'no scaling "{scaling}" ({", ".join(SCALINGS)})')
    if scaling == "none" and rate_scale != 1:
        raise UserError(f"rate scale is {rate_scale:g}: --scaling none takes the trace as it is, at 1 (rotate scales)")
    ttft_slo_s, tpot_slo_s = _slo(models, slo or {})
    if (loop := closed(trace)) is not None:
        warmup_s = FIRST_S if warmup_s is None else warmup_s
        jobs = _loop(trace, models, loop.times(rate_scale), scaling, seed, warmup_s, assign)
        return replace(jobs, ttft_slo_s=ttft_slo_s[jobs.model], tpot_slo_s=tpot_slo_s[jobs.model])
    if scaling == "clients":
        _named_clients(trace, trace.tenant)
    span_s = trace.span_s if fold is None else trace.span_s / FOLDS
    span_s = span_s / rate_scale if scaling == "time" else span_s
    if window_s is None:
        window_s = span_s
    positive("window", window_s)
    if warmup_s is None:
        warmup_s = 0.0 if scaling == "none" else min(span_s, max(WARMUP_S, WARMUP_SHARE * span_s))
    if not 0 <= warmup_s < np.inf:
        raise UserError(f"warm-up is {warmup_s} s, not 0 or more")
    picking = Picking(trace, models, seed, rate_scale if scaling == "time" else 1.0, fold=fold, assign=assign)
    at = _Window(rate_scale, scaling, seed, span_s, -warmup_s, window_s)
    if in_pieces(trace) and scaling != "clients":
        return _by_pieces(picking, at, ttft_slo_s, tpot_slo_s)
    (rows,) = picking.rows(whole=True)
    when, row, copy, lap = at.requests(rows)
    order = np.argsort(when, kind="stable")
    row = row[order]
    model = rows.model[row]
    return Jobs(
        models.names,
        when[order],
        model,
        rows.prompt_tokens[row],
        rows.output_tokens[row],
        ttft_slo_s[model],
        tpot_slo_s[model],
        prefix=_shared(rows.prefix, row, model, copy[order], lap[order]),
    )


REQUEST = np.dtype(  # form in which requests of a long workload wait to be sorted; equal stamps are sorted by key
    [("arrival_s", "f8"), ("key", "i8"), ("model", "i4"), ("prompt_tokens", "i4"), ("output_tokens", "i4")]
)


def _by_pieces(picking: Picking, at: _Window, ttft_slo_s: F8, tpot_slo_s: F8) -> Jobs:
    """Build the jobs of a trace that is read in pieces.

    Each request is written to a temporary file for its stretch of time, and each file is then sorted in memory. The
    result is as if all requests were sorted at once. Equal times are ordered by copy, then by row of the trace.
    """
    trace, names, thinned = picking.trace, picking.models.names, dict[int, I8]()
    length_s = at.end_s - at.begin_s
    expected = len(trace.model) * max(1.0, at.rate_scale) * length_s / trace.span_s
    with ExitStack() as files:
        stretches = [
            files.enter_context(TemporaryFile())
            for _ in range(min(MOST_FILES, 1 + int(expected / spilled.MOST_HELD * 4)))
        ]
        before, n = 0, 0
        for rows in picking.rows():
            when, row, copy, _ = at.requests(rows, thinned)
            requests = np.zeros(len(when), REQUEST)
            requests["arrival_s"], requests["model"] = when, rows.model[row]
            requests["key"] = copy * (len(trace.model) * len(names)) + before + row
            requests["prompt_tokens"], requests["output_tokens"] = rows.prompt_tokens[row], rows.output_tokens[row]
            where = ((when - at.begin_s) * (len(stretches) / length_s)).astype(np.int64).clip(0, len(stretches) - 1)
            for k in np.unique(where).tolist():
                stretches[k].write(requests[where == k].tobytes())
            before, n = before + len(rows.model), n + len(when)
        arrival_s, ttft_s, tpot_s = (spilled.like(n, np.float64) for _ in range(3))
        model, prompt, output = (spilled.like(n, np.int32) for _ in range(3))
        begin = 0
        for file in stretches:
            file.seek(0)
            requests = np.frombuffer(file.read(), REQUEST)
            requests = requests[np.lexsort((requests["key"], requests["arrival_s"]))]
            here = slice(begin, begin + len(requests))
            begin = here.stop
            arrival_s[here], model[here] = requests["arrival_s"], requests["model"]
            prompt[here], output[here] = requests["prompt_tokens"], requests["output_tokens"]
            ttft_s[here], tpot_s[here] = ttft_slo_s[requests["model"]], tpot_slo_s[requests["model"]]
            spilled.release(arrival_s, model, prompt, output, ttft_s, tpot_s)
    return Jobs(names, arrival_s, model, prompt, output, ttft_s, tpot_s)


def closed(trace: Trace) -> synthetic.Preset | None:
    """Return the generator of a trace that is a closed loop; None for any other trace."""
    made = None if trace.maker is None else synthetic.preset(trace.maker)
    return made if made is not None and made.clients else None


def hold(trace: Trace, rate_scale: float, scaling: str, window_s: float | None, warmup_s: float) -> None:
    """Raise UserError if a run, or the copies of the trace from which it is cut, would have too many requests.

    The limit is `MOST_REQUESTS`, or `MOST_IN_FILES` for jobs that are built in pieces. Also raise the error if whole
    clients are to be copied and the trace names none.
    """
    if scaling == "clients" and closed(trace) is None:
        _named_clients(trace, trace.tenant)
    most = MOST_IN_FILES if in_pieces(trace) and scaling != "clients" else MOST_REQUESTS
    what, way, times = f"rate scale {rate_scale:g} of {trace.name}", "a lower one", float(scaling != "time")
    if window_s is not None:
        span_s = window_s + warmup_s
        what, way = f"{what} over {span_s:g} s", "a lower one, or a shorter window_s and warmup_s"
        times = max(times, span_s / trace.span_s)
    bounded(what, len(trace.model) * rate_scale * times, way, most)


def _named_clients(trace: Trace, tenant: I4 | None) -> None:
    if tenant is None:
        raise UserError(f"{trace.name} names no clients: --scaling clients cannot be used (rotate can)")


def window_span_s(trace: Trace, origin: str) -> float:
    """Return the period, in seconds, of the part of the trace that a seed replays."""
    return trace.span_s if window_fold(trace, 0, origin) is None else trace.span_s / FOLDS


def _loop(
    trace: Trace, models: ModelSet, loop: synthetic.Preset, scaling: Scaling, seed: int, warmup_s: float, assign: Assign
) -> Jobs:
    """Make a closed loop's jobs: the rows of a model go to its clients in turn, one row to each client per round.

    All clients send their first request at -`warmup_s` seconds. A client sends each further request `think_s` seconds
    after its previous request has ended.
    """
    if scaling in {"replicate", "time"}:
        raise UserError(f"{trace.name} is a closed loop: --scaling {scaling} has no stamps to scale (clients has)")
    (rows,) = Picking(trace, models, seed, maker=str(loop), assign=assign).rows()
    after = np.full(len(rows.model), -1, np.int32)
    for i in range(len(models.members)):
        mine = np.flatnonzero(rows.model == i)
        after[mine[loop.clients :]] = mine[: -loop.clients]
    arrival_s = np.where(after < 0, -warmup_s, np.inf)  # sorted: rows are in the order of waves
    never = np.full(len(after), np.inf)
    think_s = np.full(len(after), loop.think_s)
    return Jobs(
        models.names,
        arrival_s,
        rows.model,
        rows.prompt_tokens,
        rows.output_tokens,
        never,
        never,
        after=after,
        think_s=think_s,
    )


def plan(
    trace: Trace,
    models: ModelSet,
    rate_scale: float = 1.0,
    origin: Origin = "trace",
    seed: int = 0,
    assign: Assign = "released",
) -> dict[str, Plan]:
    """Return each model's rate and mean lengths, as an offline planner knows them.

    `origin` names the requests from which they are computed:

    held-out  the other fold of a replayed trace; for a synthetic trace, what another seed draws
    window    the fold or the draw that the seed itself replays: an upper bound, because no planner knows the future
    trace     the whole trace
    prefix    the first tenth of the trace

    A model without any of these requests gets the rate of one request in their span, and the mean lengths of all
    models.
    """
    positive("rate scale", rate_scale)
    seen = _seen(trace, models, origin, seed, assign)
    whole = seen.counts.sum()
    means = []
    for sums in (seen.prompt_tokens, seen.output_tokens):
        overall = float(sums.sum() / whole) if whole else 0.0
        means.append(np.where(seen.counts > 0, sums / np.maximum(seen.counts, 1), overall))
    rate = np.maximum(seen.counts, PRIOR) / seen.span_s * rate_scale
    return {
        name: Plan(float(rate[i]), float(means[0][i]), float(means[1][i]), origin)
        for i, name in enumerate(models.names)
    }


def requests_seen(
    trace: Trace, models: ModelSet, origin: Origin, seed: int = 0, assign: Assign = "released"
) -> list[int]:
    """Count the requests of each model that planners see; for `origin` see `plan`."""
    return [int(n) for n in _seen(trace, models, origin, seed, assign).counts]


class _Seen(NamedTuple):
    """Requests that planners see: their number and tokens by model, and the seconds over which they arrived."""

    counts: I8
    prompt_tokens: F8
    output_tokens: F8
    span_s: float


def _seen(trace: Trace, models: ModelSet, origin: Origin, seed: int, assign: Assign) -> _Seen:
    fold, drawn = window_fold(trace, seed, origin), seed
    if origin == "held-out":
        fold, drawn = None if fold is None else 1 - fold, PLAN_SEED + seed
    n = len(models.members)
    counts, prompt, output, span_s = np.zeros(n, np.int64), np.zeros(n), np.zeros(n), 0.0
    for rows in Picking(trace, models, seed, fold=fold, assign=assign, drawn=drawn).rows():
        span_s = rows.span_s
        if origin == "prefix":
            span_s *= PREFIX
            early = rows.only(np.flatnonzero(rows.arrival_s <= span_s))
        else:
            early = rows
        counts += np.bincount(early.model, minlength=n)
        prompt += np.bincount(early.model, early.prompt_tokens, n)
        output += np.bincount(early.model, early.output_tokens, n)
    return _Seen(counts, prompt, output, span_s)


def rate_rps(trace: Trace, models: ModelSet, seed: int = 0, origin: Origin = "trace") -> float:
    """Return the requests per second of all models at rate scale 1.

    If the trace's generator states rates, their sum is returned; otherwise the rate of the rows that are replayed.
    """
    made = None if trace.maker is None else synthetic.preset(trace.maker)
    if made is not None and made.rate_rps:
        return math.fsum(made.rates) or made.rate_rps * len(models.members)
    every = [
        (len(r.model), r.span_s) for r in Picking(trace, models, seed, fold=window_fold(trace, seed, origin)).rows()
    ]
    return sum(count for count, _ in every) / every[0][1]


def _shared(prefix: Prefix | None, row: I8, model: I4, copy: I8, lap: I8) -> Prefix | None:
    """Renumber the prefix blocks of rows from 0, so that no two models, copies or laps share a block.

    A lap is one pass through the circular trace.
    """
    if prefix is None:
        return None
    blocks = picked(prefix, row)
    apart = np.repeat(numbered(model, copy, lap), np.diff(blocks.offsets))
    return blocks._replace(ids=numbered(apart, blocks.ids))


class _Window(NamedTuple):
    """The seconds that are replayed, and how a trace is scaled to fill them."""

    rate_scale: float
    scaling: Scaling
    seed: int
    span_s: float  # length of the circle, scaled
    begin_s: float
    end_s: float

    def requests(self, rows: Picked, thinned: dict[int, I8] | None = None) -> tuple[F8, I8, I8, I8]:
        """Return the arrival times of all requests in the window, and the row, copy and lap of each.

        A lap is one pass through the circle. A row may give several requests, or none. For a trace in pieces, `thinned`
        has for each copy the number of rows of each model in earlier pieces. The rows of this piece are added to it.
        """
        when, row, copy, lap = _copies(
            rows, self.rate_scale, self.scaling, self.seed, {} if thinned is None else thinned
        )
        if self.scaling == "time":
            when = when / self.rate_scale
        when, image, period = _unroll(when, self.span_s, self.begin_s, self.end_s)
        return when, row[image], copy[image], lap[image] + period


def _copies(
    rows: Picked, rate_scale: float, scaling: Scaling, seed: int, thinned: dict[int, I8]
) -> tuple[F8, I8, I8, I8]:
    """Copy the rows, and shift each copy on the circle; return times in [0, span_s), and the row, copy and lap of each.

    A row that is shifted past the end of the circle continues at the start, with a lap that is less by 1. `thinned`:
    see `_Window.requests`.
    """
    unit, turn = rows.model, rows.turn  # rows of a unit are thinned together, rows of a turn share an offset
    if scaling == "clients" and rows.tenant is not None:
        pair = rows.model * (rows.tenant.max(initial=0) + 1).astype(np.int64) + rows.tenant
        unit = turn = np.unique(pair, return_inverse=True)[1].astype(np.int32)
    scale = 1.0 if scaling == "time" else rate_scale
    parts: list[tuple[F8, I8, I8, I8]] = []
    for copy in range(max(1, math.ceil(scale - ROUNDING))):
        share, keep = scale - copy, np.arange(len(unit))
        if share < 1 - ROUNDING:
            draw = rng(seed, "thin", copy)
            if scaling == "clients":
                keep = _some_clients(draw, share, rows.model, unit)
            else:
                keep, thinned[copy] = _thin(draw, share, unit, thinned.get(copy, np.zeros(0, np.int64)))
        draw = rng(seed, "offset", 0 if scaling == "replicate" else copy)
        offset_s = draw.uniform(0, 0.0 if scaling == "none" else rows.span_s, turn.max(initial=0) + 1)
        turned = rows.arrival_s[keep] + offset_s[turn[keep]]
        lap = rows.lap[keep] - (turned // rows.span_s).astype(np.int64)
        parts.append((np.mod(turned, rows.span_s), keep, np.full(len(keep), copy), lap))
    when, row, copies, laps = (np.concatenate(column) for column in zip(*parts, strict=True))
    return when, row, copies, laps


def _unroll(when: F8, span_s: float, begin_s: float, end_s: float) -> tuple[F8, I8, I8]:
    """Repeat arrival times with the period `span_s` over [begin_s, end_s).

    Return the new times, and for each the index of its original and the number of its period.
    """
    first = np.ceil((begin_s - when) / span_s)
    times = (np.ceil((end_s - when) / span_s) - first).astype(np.int64)
    image = np.repeat(np.arange(len(when)), times)
    period = first[image] + np.arange(len(image)) - np.repeat(np.cumsum(times) - times, times)
    return when[image] + period * span_s, image, period.astype(np.int64)


def _slo(models: ModelSet, slo: Mapping[str, tuple[float, float]]) -> tuple[F8, F8]:
    if unknown := next((name for name in slo if name not in models.names), None):
        raise UserError(f'SLO for "{unknown}", which is not in set {models.name}')
    if bad := next((name for name, pair in slo.items() if not min(pair) > 0), None):
        raise UserError(f"SLO of {bad} is {slo[bad]}, not above 0")
    pairs = np.array([slo.get(name, (np.inf, np.inf)) for name in models.names], np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _thin(draw: np.random.Generator, share: float, unit: I4, before: I8) -> tuple[I8, I8]:
    """Return the rows that remain if each unit (a model) keeps the fraction `share` of its requests, evenly spaced.

    Also return each unit's number of requests up to the end of this piece of the trace. `before` has these numbers up
    to the begin of the piece.
    """
    order = np.argsort(unit, kind="stable")
    counts = np.bincount(unit, minlength=len(before))
    before = np.pad(before, (0, len(counts) - len(before)))
    nth = np.empty(len(unit), np.int64)
    nth[order] = np.arange(len(unit)) - np.repeat(np.cumsum(counts) - counts, counts)
    nth += before[unit]
    phase = draw.uniform(0, 1, len(counts))[unit]
    return np.flatnonzero(np.floor(phase + share * (nth + 1)) > np.floor(phase + share * nth)), before + counts


def _some_clients(draw: np.random.Generator, share: float, served: I4, unit: I4) -> I8:
    """Return all rows of clients chosen at random, about as many as give each model `share` of its rows."""
    counts = np.bincount(unit)
    owner = np.zeros(len(counts), np.int32)
    owner[unit] = served
    rows = np.bincount(owner, counts)
    order = np.lexsort((draw.permutation(len(counts)), owner))
    before = np.cumsum(counts[order]) - counts[order]
    before -= (np.cumsum(rows) - rows).astype(np.int64)[owner[order]]
    kept = np.zeros(len(counts), bool)
    kept[order] = before + counts[order] / 2 <= share * rows[owner[order]]
    return np.flatnonzero(kept[unit])
