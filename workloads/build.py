"""A trace and a set of models become jobs: streams are mapped, rotated, scaled and cut to a window.

A replayed trace is circular. A seed gives every stream its own start offset, so that runs of one trace differ; a window
of the trace's own span holds every row once, and the seconds before it wrap around to t < 0.

So that planners do not know the window, a replayed trace is cut into two folds, each a circle of its own: a seed
replays one of them, and planners see the other. Of a synthetic trace they see what another seed draws.

A prompt shares blocks with prompts of its own model, copy and pass through the trace, and with no others: copies and
repetitions stand for other users of the same kind, so that a higher rate or a longer window brings no hits that the
trace does not have. Clients that are turned apart may share in another order than theirs in the trace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryFile
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.policy.types import Jobs, Plan, Prefix, UserError
from traces import synthetic
from traces.arrivals import MOST_IN_FILES, MOST_REQUESTS, bounded, positive, rng
from traces.load import log
from traces.prefix import numbered, picked
from workloads.models import ModelSet, shape
from workloads.square import dealt, square_order

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]
I8 = NDArray[np.int64]
Scaling = Literal["none", "rotate", "replicate", "time", "clients"]
Origin = Literal["held-out", "window", "trace", "prefix"]
Assign = Literal["released", "shuffled", "square"]
Rule = Literal["released", "by name", "in order", "by traffic", "shuffled", "square"]
SCALINGS: tuple[Scaling, ...] = ("none", "rotate", "replicate", "time", "clients")

WARMUP_S, WARMUP_SHARE = 60.0, 0.05  # the longer of the two, at most the span
FOLDS = 2
FOLDED_S = 7200.0  # from here on plans are of the first fold for every seed: always of an earlier period
PLAN_SEED = 10_000  # from here on synthetic traces are drawn for planners
PRIOR = 1  # requests that a plan takes a model to have which it does not see
PREFIX = 0.1  # share of the span that `plan(origin="prefix")` may see
ROUNDING = 1e-9  # a scale so close to a whole number is one
FIRST_S = 1e-6  # before 0, so that a closed loop's first wave is its warm-up
MOST_FILES = 256  # in which the requests of a long workload wait to be sorted
IDLE_S = 10.0  # the shortest gap that counts as idle (Prism)


class Rows(Protocol):
    """Rows of a trace: arrays of one element a request, sorted by arrival."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def maker(self) -> str | None:
        """The generator that draws it anew for each seed; none: it is replayed."""

    @property
    def ordered(self) -> bool:
        """Its k-th stream belongs to a set's k-th model."""

    @property
    def span_s(self) -> float:
        """The period after which the trace repeats."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the trace's streams."""

    @property
    def arrival_s(self) -> F8: ...  # noqa: D102
    @property
    def model(self) -> I4:
        """Index into `models`."""

    @property
    def prompt_tokens(self) -> I4: ...  # noqa: D102
    @property
    def output_tokens(self) -> I4: ...  # noqa: D102
    @property
    def tenant(self) -> I4 | None:
        """The client of each request, where known."""

    @property
    def prefix(self) -> Prefix | None:
        """Prefixes that prompts share, where known."""

    def where(self, row: int) -> str:
        """`file:row` of a request, for messages."""

    def first(self, n: int) -> Rows:
        """Return the first n requests, without shared prefixes, as a trace that repeats when the next would come."""


def build(
    trace: Rows,
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
    """Make the jobs of the window [0, window_s) and of the `warmup_s` before it; ids are positions in arrival order.

    none       the trace at its own stamps: the rate scale is 1
    rotate     ceil(rate_scale) copies, every stream of every copy at its own circular offset
    replicate  the same copies at equal stamps
    time       one copy, its stamps divided by rate_scale (and the span with them)
    clients    as rotate, but whole clients are copied and offset; the trace must name them

    Of a last copy that counts for a fraction f, each stream keeps every (1/f)-th request, from a seeded phase: the
    share is the same at all times and the count is exact to one. `clients` keeps whole clients instead.
    Of a closed loop the rate scale multiplies the clients, and neither window nor warm-up cut it: see `_loop`.
    `slo` gives (TTFT, TPOT) seconds by model; a model without has none. `fold` (see `window_fold`) is the part of the
    trace that is replayed; None: all of it. UserError names what is wrong.
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
        warmup_s = min(span_s, max(WARMUP_S, WARMUP_SHARE * span_s))
    if not 0 <= warmup_s < np.inf:
        raise UserError(f"warm-up is {warmup_s} s, not 0 or more")
    picking = _Picking(trace, models, seed, rate_scale if scaling == "time" else 1.0, fold=fold, assign=assign)
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


REQUEST = np.dtype(  # of a long workload, while it waits to be sorted; of equal stamps the lower key comes first
    [("arrival_s", "f8"), ("key", "i8"), ("model", "i4"), ("prompt_tokens", "i4"), ("output_tokens", "i4")]
)


def _by_pieces(picking: _Picking, at: _Window, ttft_slo_s: F8, tpot_slo_s: F8) -> Jobs:
    """Build the workload of a trace that is taken in pieces: requests are dealt to stretches of time, and sorted there.

    The order is that of a sort of all: ties go by copy, then by row of the trace.
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
            found = np.zeros(len(when), REQUEST)
            found["arrival_s"], found["model"] = when, rows.model[row]
            found["key"] = copy * (len(trace.model) * len(names)) + before + row
            found["prompt_tokens"], found["output_tokens"] = rows.prompt_tokens[row], rows.output_tokens[row]
            where = ((when - at.begin_s) * (len(stretches) / length_s)).astype(np.int64).clip(0, len(stretches) - 1)
            for k in np.unique(where).tolist():
                stretches[k].write(found[where == k].tobytes())
            before, n = before + len(rows.model), n + len(when)
        arrival_s, ttft_s, tpot_s = (spilled.like(n, np.float64) for _ in range(3))
        model, prompt, output = (spilled.like(n, np.int32) for _ in range(3))
        begin = 0
        for file in stretches:
            file.seek(0)
            found = np.frombuffer(file.read(), REQUEST)
            found = found[np.lexsort((found["key"], found["arrival_s"]))]
            here = slice(begin, begin + len(found))
            begin = here.stop
            arrival_s[here], model[here] = found["arrival_s"], found["model"]
            prompt[here], output[here] = found["prompt_tokens"], found["output_tokens"]
            ttft_s[here], tpot_s[here] = ttft_slo_s[found["model"]], tpot_slo_s[found["model"]]
            spilled.release(arrival_s, model, prompt, output, ttft_s, tpot_s)
    return Jobs(names, arrival_s, model, prompt, output, ttft_s, tpot_s)


def closed(trace: Rows) -> synthetic.Preset | None:
    """Return the generator of a closed loop; None where requests come by themselves."""
    made = None if trace.maker is None else synthetic.preset(trace.maker)
    return made if made is not None and made.clients else None


def window_fold(trace: Rows, seed: int, origin: str) -> int | None:
    """Return the fold that a seed replays where planners see another fold, or its window alone; None for all.

    Even seeds replay the second fold, so that their plans are of an earlier period; odd ones the first. Of a trace of
    `FOLDED_S` and more every seed replays the second.
    """
    if origin not in {"held-out", "window"} or trace.maker is not None:
        return None
    return 1 - seed % 2 if _halved(trace) else 1


def _halved(trace: Rows) -> bool:
    """Tell whether even seeds replay another half than odd ones."""
    return trace.maker is None and trace.span_s < FOLDED_S


def hold(trace: Rows, rate_scale: float, scaling: str, window_s: float | None, warmup_s: float) -> None:
    """UserError where a run, or the copies that it is cut from, would be of more requests than can be held.

    Also where its clients are to be scaled and the trace names none.
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


def _named_clients(trace: Rows, tenant: I4 | None) -> None:
    if tenant is None:
        raise UserError(f"{trace.name} names no clients: --scaling clients cannot be used (rotate can)")


def window_span_s(trace: Rows, origin: str) -> float:
    """Seconds after which what a seed replays repeats."""
    return trace.span_s if window_fold(trace, 0, origin) is None else trace.span_s / FOLDS


def _loop(trace: Rows, models: ModelSet, loop: synthetic.Preset, scaling: Scaling, seed: int, warmup_s: float,
          assign: Assign) -> Jobs:  # fmt: skip
    """Each model has its own clients: they all begin `warmup_s` before 0, and send the model's rows in turn.

    A client's next request comes `think_s` after it has the end of its last one.
    """
    if scaling in {"replicate", "time"}:
        raise UserError(f"{trace.name} is a closed loop: --scaling {scaling} has no stamps to scale (clients has)")
    (rows,) = _Picking(trace, models, seed, maker=str(loop), assign=assign).rows()
    after = np.full(len(rows.model), -1, np.int32)
    for i in range(len(models.members)):
        mine = np.flatnonzero(rows.model == i)
        after[mine[loop.clients :]] = mine[: -loop.clients]
    arrival_s = np.where(after < 0, -warmup_s, np.inf)  # sorted: rows are in the order of waves
    never = np.full(len(after), np.inf)
    think_s = np.full(len(after), loop.think_s)
    return Jobs(
        models.names, arrival_s, rows.model, rows.prompt_tokens, rows.output_tokens, never, never,
        after=after, think_s=think_s,
    )  # fmt: skip


def plan(
    trace: Rows,
    models: ModelSet,
    rate_scale: float = 1.0,
    origin: Origin = "trace",
    seed: int = 0,
    assign: Assign = "released",
) -> dict[str, Plan]:
    """Tell what offline planners may know of each model: rate and mean lengths.

    held-out  of the other fold of a replayed trace; of a synthetic one, of what another seed draws
    window    of the fold that the seed replays, or of what it draws: a bound, for nobody knows the future
    trace     of the whole trace
    prefix    of its first tenth

    A model that the plan does not see gets the prior of one request, with the mean lengths of all models.
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
    trace: Rows, models: ModelSet, origin: Origin, seed: int = 0, assign: Assign = "released"
) -> list[int]:
    """Count the requests of each model that planners see."""
    return [int(n) for n in _seen(trace, models, origin, seed, assign).counts]


class _Seen(NamedTuple):
    """What planners see: the requests of each model, their tokens summed, and the seconds in which they came."""

    counts: I8
    prompt_tokens: F8
    output_tokens: F8
    span_s: float


def _seen(trace: Rows, models: ModelSet, origin: Origin, seed: int, assign: Assign) -> _Seen:
    fold, drawn = window_fold(trace, seed, origin), seed
    if origin == "held-out":
        fold, drawn = None if fold is None else 1 - fold, PLAN_SEED + seed
    n = len(models.members)
    counts, prompt, output, span_s = np.zeros(n, np.int64), np.zeros(n), np.zeros(n), 0.0
    for rows in _Picking(trace, models, seed, fold=fold, assign=assign, drawn=drawn).rows():
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


def rate_rps(trace: Rows, models: ModelSet, seed: int = 0, origin: Origin = "trace") -> float:
    """Return requests per second at rate scale 1: as the generator means them, or as counted where a seed replays."""
    if trace.maker is not None and (each := synthetic.preset(trace.maker).rate_rps):
        return each * len(models.members)
    every = [
        (len(r.model), r.span_s) for r in _Picking(trace, models, seed, fold=window_fold(trace, seed, origin)).rows()
    ]
    return sum(count for count, _ in every) / every[0][1]


def idle_to_swap(jobs: Jobs, swap_s: float) -> float:
    """Divide the median idle gap (> 10 s between a model's requests in the window) by a swap's seconds; nan without."""
    positive("swap_s", swap_s)
    inside = (jobs.arrival_s >= 0) & (jobs.arrival_s < np.inf)
    order = np.argsort(jobs.model[inside], kind="stable")
    model, when = jobs.model[inside][order], jobs.arrival_s[inside][order]
    gaps = np.diff(when)[np.diff(model) == 0]
    idle = gaps[gaps > IDLE_S]
    return float(np.median(idle)) / swap_s if len(idle) else float("nan")


class Assignment(NamedTuple):
    """Stream of each model of a set, and the seconds by which it comes later."""

    rule: Rule
    streams: tuple[tuple[str, float], ...]  # by model


def assigned(trace: Rows, models: ModelSet, seed: int = 0, assign: Assign = "released") -> Assignment:
    """Give each model of the set its stream, and name the rule that did. UserError where there are too few.

    released    as the set names them, where the trace has its streams
    by name     else a model whose name equals a stream's has that one (the rest: by the rules below)
    in order    else the k-th stream for the k-th model, where the trace is ordered so
    by traffic  else the most popular streams, as many as there are models, in an order that the seed draws
    shuffled    `assign="shuffled"`: the seed draws the order of all these
    square      `assign="square"`: in a square of seeds each of the busiest of them meets each size class once; see
                `square_seeds` and workloads/square.py
    """
    assigned = _named(trace, models, seed)
    if assign == "released":
        return assigned
    if assign == "square":
        counts = dict(zip(trace.models, _counts(trace).tolist(), strict=True))
        busiest = sorted(assigned.streams, key=lambda stream: (-counts.get(stream[0], 0), *stream))
        owner = dealt(models, seed // 2 if _halved(trace) else seed)
        of = dict(zip(owner, busiest, strict=True))
        return Assignment("square", tuple(of[k] for k in range(len(of))))
    order = rng(seed, "assign").permutation(len(assigned.streams))
    return Assignment("shuffled", tuple(assigned.streams[k] for k in order))


def square_seeds(trace: Rows, models: ModelSet) -> int:
    """Tell how many seeds make a whole square of `assign="square"`; the first begins at seed 0, each next behind it.

    As many as the set has size classes. Of a replayed trace of which even and odd seeds have a half each, twice as
    many: seeds 2k and 2k + 1 are one row of the square, so that either half has a whole square by itself.
    """
    return square_order(models) * (2 if _halved(trace) else 1)


def _named(trace: Rows, models: ModelSet, seed: int) -> Assignment:
    names = trace.models if trace.maker is None else synthetic.preset(trace.maker).streams
    named = [(member.stream, member.shift_s) for member in models.members if member.stream is not None]
    if len(named) == len(models.members) and any(stream in names for stream, _ in named):
        if missing := next((stream for stream, _ in named if stream not in names), None):
            raise UserError(f'{trace.name} has no stream "{missing}", which set {models.name} names')
        return Assignment("released", tuple(named))
    if len(names) < len(models.members):
        fits = ""
        if trace.maker is not None and synthetic.preset(trace.maker).name in synthetic.SIZED:
            fits = f"; +models={len(models.members)} on the trace's name draws more"
        elif log(trace.name.partition("+")[0]):
            fits = f"; +models={len(models.members)} on the trace's name splits it among as many"
        raise UserError(
            f"{trace.name} has {len(names)} models, set {models.name} needs {len(models.members)} "
            f"(--models lists fewer{fits})"
        )
    equal = set(names) & set(models.names)
    left = [name for name in models.names if name not in equal]
    if not left:
        others: list[str] = []
    elif trace.ordered:
        others = [name for name in names if name not in equal][: len(left)]
    else:
        counts = _counts(trace)
        popular = [trace.models[k] for k in np.argsort(-counts, kind="stable") if trace.models[k] not in equal]
        popular += [name for name in names if name not in {*trace.models, *equal}]  # of which none was drawn
        others = [""] * len(left)
        for stream, k in zip(popular, rng(seed, "streams").permutation(len(left)), strict=False):
            others[k] = stream
    of = dict(zip(left, others, strict=True)) | {name: name for name in equal}
    rule: Rule = "in order" if trace.ordered else "by traffic"
    return Assignment(
        "by name" if equal else rule, tuple((of[member.name], member.shift_s) for member in models.members)
    )


def _counts(trace: Rows) -> I8:
    """Count the requests of each stream."""
    counts = np.zeros(len(trace.models), np.int64)
    for piece in spilled.pieces(len(trace.model), trace.model):
        counts += np.bincount(trace.model[piece], minlength=len(counts))
    return counts


def _served(streams: list[str], names: Sequence[str], model: I4) -> tuple[I8, I4]:
    """Rows of the models' streams in their order, and each one's model: a row for each that uses its stream.

    `names` are those of the trace's streams, which `model` indexes.
    """
    index = {name: i for i, name in enumerate(names)}
    parts = [np.flatnonzero(model == index.get(stream, -1)) for stream in streams]
    row = np.concatenate(parts)
    member = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    order = np.lexsort((member, row))
    return row[order], member[order]


class _Rows(NamedTuple):
    """The rows of a trace that a set serves."""

    arrival_s: F8
    model: I4  # index into the set
    turn: I4  # what turns together: models that use one stream
    prompt_tokens: I4
    output_tokens: I4
    tenant: I4 | None
    prefix: Prefix | None
    lap: I8  # -1 where a model's shift put the row past the end, to the start of the circle
    span_s: float  # of the circle

    def only(self, kept: I8) -> _Rows:
        """Select the rows at the indices `kept`."""
        return self._replace(
            arrival_s=self.arrival_s[kept],
            model=self.model[kept],
            turn=self.turn[kept],
            prompt_tokens=self.prompt_tokens[kept],
            output_tokens=self.output_tokens[kept],
            tenant=None if self.tenant is None else self.tenant[kept],
            prefix=self.prefix and picked(self.prefix, kept),
            lap=self.lap[kept],
        )


def in_pieces(trace: Rows) -> bool:
    """Tell whether a trace is too long for memory, and is taken in pieces: of a file without shared prefixes."""
    return len(trace.model) > spilled.MOST_HELD and trace.maker is None and trace.prefix is None


class _Picking(NamedTuple):
    """The rows of a trace that a set serves, and how they are picked.

    A model's shift holds after stamps are divided by `time_scale`. `maker` is the generator, if not the trace's own,
    `drawn` the seed of what it draws, if not that of the run.
    """

    trace: Rows
    models: ModelSet
    seed: int
    time_scale: float = 1.0
    maker: str | None = None
    fold: int | None = None
    assign: Assign = "released"
    drawn: int | None = None

    def rows(self, *, whole: bool = False) -> Iterator[_Rows]:
        """Yield the rows in order: all at once, or in pieces. UserError for a row that is too long."""
        trace, shared = self.trace, assigned(self.trace, self.models, self.seed, self.assign).streams
        if whole or not in_pieces(trace):
            yield _rows(self, shared, slice(0, None))
            return
        columns = trace.arrival_s, trace.model, trace.prompt_tokens, trace.output_tokens, trace.tenant
        for piece in spilled.pieces(len(trace.model), *columns):
            yield _rows(self, shared, piece)


def _rows(picking: _Picking, shared: Sequence[tuple[str, float]], cut: slice) -> _Rows:
    """Pick rows of the streams from a piece; a synthetic trace is drawn anew first. UserError for a row too long."""
    trace, models, seed, time_scale, maker, fold, _, drawn = picking
    tenant, prefix = trace.tenant, trace.prefix
    streams = [stream for stream, _ in shared]
    source: Rows | synthetic.Drawn = trace
    if trace.maker is not None:
        source = synthetic.draw(maker or trace.maker, seed if drawn is None else drawn)
        tenant, prefix = None, None
    row, model = _served(streams, source.models, source.model[cut])
    prompt, output = source.prompt_tokens[cut][row], source.output_tokens[cut][row]
    most = np.array([member.shape.max_tokens for member in models.members])[model]
    long = np.flatnonzero(prompt.astype(np.int64) + output > most)
    if len(long):
        i = int(long[0])
        way = "bench trace convert --max-tokens drops them"
        if most[i] < (can := shape(models.members[model[i]].shape.name).max_tokens):
            way = f"--served raises it, to {can} at most"
        elif trace.maker is not None or "/" in trace.name or log(trace.name.partition("+")[0]):
            way = _shorter(trace, models)
        where = trace.where(cut.start + int(row[i])) if trace.maker is None else trace.name
        raise UserError(
            f"{where}: {prompt[i]} prompt + {output[i]} "
            f"output tokens exceed the {most[i]} of {models.names[model[i]]} ({len(long)} such rows; {way})"
        )
    when = source.arrival_s[cut][row]
    lap = np.zeros(len(row), np.int64)
    for i, (_, shift_s) in enumerate(shared):
        if shift_s:
            mine = model == i
            lap[mine] = -((when[mine] + shift_s * time_scale) // trace.span_s).clip(0)
            when[mine] = synthetic.shifted(when[mine], shift_s * time_scale, trace.span_s)
    turn = np.array([streams.index(stream) for stream in streams], np.int32)[model]
    span_s = trace.span_s
    rows = _Rows(
        when, model, turn, prompt, output, None if tenant is None else tenant[cut][row], prefix and picked(prefix, row),
        lap, span_s,
    )  # fmt: skip
    if fold is None:
        return rows
    part = np.minimum(when * FOLDS // span_s, FOLDS - 1)
    rows = rows.only(np.flatnonzero(part == fold))
    return rows._replace(arrival_s=rows.arrival_s - fold * span_s / FOLDS, span_s=span_s / FOLDS)


def _shared(prefix: Prefix | None, row: I8, model: I4, copy: I8, lap: I8) -> Prefix | None:
    """Renumber the blocks of rows from 0, so that each model, copy and lap has blocks of its own."""
    if prefix is None:
        return None
    blocks = picked(prefix, row)
    apart = np.repeat(numbered(model, copy, lap), np.diff(blocks.offsets))
    return blocks._replace(ids=numbered(apart, blocks.ids))


def _shorter(trace: Rows, models: ModelSet) -> str:
    least = min(member.shape.max_tokens for member in models.members)
    name = trace.name if trace.maker is None else synthetic.preset(trace.maker).name
    if log(name.partition("+")[0]):
        return (
            f"--trace {re.sub('[+]max_tokens=[0-9]+', '', name)}+max_tokens={least} leaves them out, and says how many"
        )
    return f"--trace {name}+max_tokens={least} cuts them"


class _Window(NamedTuple):
    """The seconds that are replayed, and how a trace is scaled to fill them."""

    rate_scale: float
    scaling: Scaling
    seed: int
    span_s: float  # of the circle, scaled
    begin_s: float
    end_s: float

    def requests(self, rows: _Rows, thinned: dict[int, I8] | None = None) -> tuple[F8, I8, I8, I8]:
        """Return the stamps of the requests that rows become, and the row, the copy and the lap of each.

        Of a trace in pieces `thinned` counts by copy the rows of earlier pieces, by model.
        """
        when, row, copy, lap = _copies(
            rows, self.rate_scale, self.scaling, self.seed, {} if thinned is None else thinned
        )
        if self.scaling == "time":
            when = when / self.rate_scale
        when, image, period = _unroll(when, self.span_s, self.begin_s, self.end_s)
        return when, row[image], copy[image], lap[image] + period


def _copies(
    rows: _Rows, rate_scale: float, scaling: Scaling, seed: int, thinned: dict[int, I8]
) -> tuple[F8, I8, I8, I8]:
    """Turn copies of the rows around the circle: stamps in [0, span_s), and the row, the copy and the lap of each.

    Those that were turned past the end, to the start of the circle, are in the lap before. `thinned` is as above.
    """
    unit, turn = rows.model, rows.turn  # what is thinned, and what turns, as a whole
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
    """Repeat stamps with period `span_s` over [begin_s, end_s): the new stamps, each one's old index and its period."""
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
    """Rows of which every stream keeps `share`, evenly along its requests; and its requests so far.

    `before` are those of the rows before these, by stream.
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
    """Rows of whole clients, in random order until each model has `share` of its rows."""
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
