"""Assignment of a trace's streams to the models of a set, and the rows of the trace that the models serve."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.policy.types import Prefix, UserError
from traces import drawing, synthetic
from traces.arrivals import rng
from traces.load import Trace, log
from traces.prefix import picked
from workloads.models import ModelSet, shape
from workloads.square import dealt, size_classes

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]
I8 = NDArray[np.int64]
Assign = Literal["released", "shuffled", "square"]
Rule = Literal["released", "by name", "in order", "by traffic", "shuffled", "square"]

FOLDS = 2
FOLDED_S = 7200.0  # from this span on every seed plans by the first fold, an earlier period


def window_fold(trace: Trace, seed: int, origin: str) -> int | None:
    """Return the fold (half) of a trace that a seed replays, 0 or 1; None if it replays the whole trace.

    A replayed trace has folds if `origin` is "held-out" (planners know only the other fold) or "window" (planners know
    only the fold that is replayed). Even seeds replay fold 1, so that their plans come from an earlier period, and odd
    seeds replay fold 0. If the trace lasts `FOLDED_S` or longer, every seed replays fold 1.
    """
    if origin not in {"held-out", "window"} or trace.maker is not None:
        return None
    return 1 - seed % 2 if _halved(trace) else 1


def _halved(trace: Trace) -> bool:
    """Tell whether even seeds replay the second half of the trace, and odd seeds the first half.

    In any other trace with folds, all seeds replay the second half.
    """
    return trace.maker is None and trace.span_s < FOLDED_S


class Assignment(NamedTuple):
    """The stream of each model of a set, the stream's shift in seconds, and the rule that chose the streams."""

    rule: Rule
    streams: tuple[tuple[str, float], ...]  # in the order of the set's models


def assigned(trace: Trace, models: ModelSet, seed: int = 0, assign: Assign = "released") -> Assignment:
    """Assign a stream to each model of the set, and name the rule used. Raises UserError if streams are too few.

    With `assign` "released", the first of the rules "released" to "by traffic" that applies is used. With `assign`
    "shuffled" or "square", the rule of that name is used.

    released    the streams that the set names, if the trace has them
    by name     a model whose name equals a stream's gets that stream; the other models follow the next two rules
    in order    the k-th model gets the k-th stream, if the trace is `ordered`
    by traffic  the most popular streams, as many as there are models, in an order that the seed draws
    shuffled    the streams that the rules above choose, in an order that the seed draws
    square      over the seeds of a square, each of the busiest streams goes once to each size class of models; see
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


def square_seeds(trace: Trace, models: ModelSet) -> int:
    """Return the number of seeds that make up one Latin square of `assign="square"`; the first square begins at seed 0.

    It is the number of size classes in the set, or twice that if even and odd seeds replay different halves of a trace.
    In that case seeds 2k and 2k + 1 use the same row of the square, so that each half gets a whole square.
    """
    return len(size_classes(models)) * (2 if _halved(trace) else 1)


def _named(trace: Trace, models: ModelSet, seed: int) -> Assignment:
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
        popular += [name for name in names if name not in {*trace.models, *equal}]  # streams without any request
        others = [""] * len(left)
        for stream, k in zip(popular, rng(seed, "streams").permutation(len(left)), strict=False):
            others[k] = stream
    of = dict(zip(left, others, strict=True)) | {name: name for name in equal}
    rule: Rule = "in order" if trace.ordered else "by traffic"
    return Assignment(
        "by name" if equal else rule, tuple((of[member.name], member.shift_s) for member in models.members)
    )


def _counts(trace: Trace) -> I8:
    """Count the requests of each stream."""
    counts = np.zeros(len(trace.models), np.int64)
    for piece in spilled.pieces(len(trace.model), trace.model):
        counts += np.bincount(trace.model[piece], minlength=len(counts))
    return counts


def _served(streams: list[str], names: Sequence[str], model: I4) -> tuple[I8, I4]:
    """Return the rows of `streams` in the order of the trace, and for each the index of the model that serves it.

    A row occurs once for each model that uses its stream. `names` are the trace's streams; `model` has each row's index
    into them.
    """
    index = {name: i for i, name in enumerate(names)}
    parts = [np.flatnonzero(model == index.get(stream, -1)) for stream in streams]
    row = np.concatenate(parts)
    member = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    order = np.lexsort((member, row))
    return row[order], member[order]


class Picked(NamedTuple):
    """The rows of a trace that a set serves."""

    arrival_s: F8
    model: I4  # index into the set
    turn: I4  # equal for models that use one stream, which get one offset
    prompt_tokens: I4
    output_tokens: I4
    tenant: I4 | None
    prefix: Prefix | None
    lap: I8  # -1 where a model's shift put the row past the end, to the start of the circle
    span_s: float  # length of the circle

    def only(self, kept: I8) -> Picked:
        """Select the rows at the indices `kept`."""
        columns = ("arrival_s", "model", "turn", "prompt_tokens", "output_tokens", "lap")
        return self._replace(
            **{name: getattr(self, name)[kept] for name in columns},
            tenant=None if self.tenant is None else self.tenant[kept],
            prefix=self.prefix and picked(self.prefix, kept),
        )


def in_pieces(trace: Trace) -> bool:
    """Tell whether a trace is read in pieces: it is too long for memory, is replayed, and has no shared prefixes."""
    return len(trace.model) > spilled.MOST_HELD and trace.maker is None and trace.prefix is None


class Picking(NamedTuple):
    """A trace, a model set, and the choices that decide which rows the models serve.

    Models' shifts apply after arrival times are divided by `time_scale`. `maker` replaces the trace's generator. The
    generator draws with the seed `drawn`, or with `seed` if `drawn` is None.
    """

    trace: Trace
    models: ModelSet
    seed: int
    time_scale: float = 1.0
    maker: str | None = None
    fold: int | None = None
    assign: Assign = "released"
    drawn: int | None = None

    def rows(self, *, whole: bool = False) -> Iterator[Picked]:
        """Yield the rows in order, in pieces if the trace is read in pieces and `whole` is false.

        Raises UserError for a request that is too long for its model.
        """
        trace, shared = self.trace, assigned(self.trace, self.models, self.seed, self.assign).streams
        if whole or not in_pieces(trace):
            yield _rows(self, shared, slice(0, None))
            return
        columns = trace.arrival_s, trace.model, trace.prompt_tokens, trace.output_tokens, trace.tenant
        for piece in spilled.pieces(len(trace.model), *columns):
            yield _rows(self, shared, piece)


def _rows(picking: Picking, shared: Sequence[tuple[str, float]], cut: slice) -> Picked:
    """Return the rows of the models' streams in a piece of the trace; a synthetic trace is drawn first.

    `shared` has the stream and the shift of each model. Raises UserError for a request that is too long for its model.
    """
    trace, models, seed, time_scale, maker, fold, _, drawn = picking
    tenant, prefix = trace.tenant, trace.prefix
    streams = [stream for stream, _ in shared]
    source: Trace | drawing.Drawn = trace
    if trace.maker is not None:
        source = drawing.draw(maker or trace.maker, seed if drawn is None else drawn)
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
    rows = Picked(
        when,
        model,
        turn,
        prompt,
        output,
        None if tenant is None else tenant[cut][row],
        prefix and picked(prefix, row),
        lap,
        span_s,
    )
    if fold is None:
        return rows
    part = np.minimum(when * FOLDS // span_s, FOLDS - 1)
    rows = rows.only(np.flatnonzero(part == fold))
    return rows._replace(arrival_s=rows.arrival_s - fold * span_s / FOLDS, span_s=span_s / FOLDS)


def _shorter(trace: Trace, models: ModelSet) -> str:
    least = min(member.shape.max_tokens for member in models.members)
    name = trace.name if trace.maker is None else synthetic.preset(trace.maker).name
    if log(name.partition("+")[0]):
        return (
            f"--trace {re.sub('[+]max_tokens=[0-9]+', '', name)}+max_tokens={least} leaves them out, and says how many"
        )
    return f"--trace {name}+max_tokens={least} cuts them"
