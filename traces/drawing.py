"""Drawing of synthetic traces: `draw(name, seed)` returns arrays, `table` returns a canonical table.

The same seed gives the same trace. Each stream has random generators of its own for its arrival times, except in the
Poisson presets. The presets are in synthetic.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces import laws, schema
from traces.arrivals import on_off, rng, zipf
from traces.quantiles import RANK_CORRELATION, quantile
from traces.synthetic import (
    ARENA_COUNTS,
    ARENA_EARLY,
    ARENA_USE,
    HYPERBOLIC,
    PER_S,
    SAMPLE_REQUESTS,
    SIZED,
    Preset,
    Stream,
    arena,
    preset,
    shifted,
)

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]
HERD_S, HERD = 2.5, (30, 41)  # seconds that a herd takes (a bar of the figure), requests of it: uniform, both ends in
TICK_S, TICK_JITTER_S = 120.0, 2.0  # the clock ticks five times a span; standard deviation, about that of a bar's 2.5 s
# The share of its time in which a stream of `sample` is used is uniform; the hottest quarter is used always.
SAMPLE_DUTY, SAMPLE_ALWAYS_ON = (0.1, 1.0), 0.25
SAMPLE_CLUSTER, SAMPLE_GAP_S = 1.3, 1.0


class Drawn(NamedTuple):
    """A drawn trace as arrays with one element per request, sorted by arrival."""

    span_s: float
    models: tuple[str, ...]
    arrival_s: F8
    model: I4  # index into `models`
    prompt_tokens: I4
    output_tokens: I4


def draw(name: str | Preset, seed: int) -> Drawn:
    """Draw a preset's trace; UserError for an unknown name."""
    p = preset(name) if isinstance(name, str) else name
    match p.name:
        case "arena-like":
            return _released(p, seed)
        case "sample":
            return _sample(p, seed)
        case "aegaeon-like":
            mean = p.rate_rps * p.span_s
            counts = [int(rng(seed, p.name, "count", k).poisson(mean)) for k in range(p.models)]
            return _drawn(p, seed, [Stream(name, n) for name, n in zip(p.streams, counts, strict=True)], counts)
        case "closed":
            return _loop(p, seed)
        case _ if p.rates:
            return _poisson(p, seed)
        case _:
            laws = [HYPERBOLIC[k % len(HYPERBOLIC)]._replace(name=name) for k, name in enumerate(p.streams)]
            if p.name == "hyperbolic-like-drift":  # the two in the middle of popularity
                laws = [law._replace(herds=law.requests in {250, 169}) for law in laws]
            return _drawn(p, seed, laws, [round(law.requests * p.span_s / PER_S) for law in laws])


def table(name: str | Preset, seed: int = 0, fit: str | None = None) -> pa.Table:
    """Draw a preset's trace as a canonical table.

    `fit`, the verdict of `traces.realism` on the preset, goes into the table's metadata.
    """
    p = preset(name) if isinstance(name, str) else name
    drawn = draw(p, seed)
    model = pa.DictionaryArray.from_arrays(pa.array(drawn.model, pa.int32()), pa.array(drawn.models, pa.string()))
    meta: dict[str, Any] = {"name": p.label, "maker": str(p), "tier": "synthetic", "licence": "Apache-2.0"}
    meta |= {"length_origin": "uniform" if p.lengths == "uniform" else "sampled", "span_s": drawn.span_s, "seed": seed}
    meta |= {"timestamp_resolution_s": None}
    meta |= {"ordered": True} if p.name in SIZED or p.rates else {}
    meta |= {"fit": fit} if fit else {}
    return schema.requests(drawn.arrival_s, model, drawn.prompt_tokens, drawn.output_tokens, meta)


def _loop(p: Preset, seed: int) -> Drawn:
    """Draw a closed loop's requests in waves; a wave has one request of every client.

    The arrival times are nominal: waves are `nominal_s` apart. The real ones depend on when answers end.
    """
    wave = np.tile(np.arange(p.sent) // p.clients, p.models)
    model = np.repeat(np.arange(p.models, dtype=np.int32), p.sent)
    order = np.argsort(wave, kind="stable")
    prompt, output = _lengths(p, seed, len(wave))
    stamps_s = np.asarray(wave[order] * p.nominal_s, np.float64)
    return Drawn(p.span_s, p.streams, stamps_s, model[order], prompt, output)


def _poisson(p: Preset, seed: int) -> Drawn:
    """Draw Poisson streams, each with its own rate; lengths follow a law of `traces.laws`, or are all equal.

    All draws come from one generator. Stored results depend on the order of the draws, so each preset keeps its order:

    hot-cold   the count and then the times of each stream in turn; then lengths
    power-law  all counts, at least 1 each, then all times; then lengths
    poisson    the count of its one stream, then lengths, then times
    """
    draw = np.random.default_rng(seed)

    def lengths(n: int) -> I4:
        if p.lengths == "fixed":
            return np.tile(np.array((p.prompt, p.output), np.int32), (n, 1))
        return laws.draw(p.lengths, n, draw, p.max_tokens)

    early: I4 | None = None
    if p.name == "hot-cold":
        times = [np.sort(draw.uniform(0, p.span_s, draw.poisson(rate * p.span_s))) for rate in p.rates]
    elif p.name == "power-law":
        counts = [max(1, int(draw.poisson(rate * p.span_s))) for rate in p.rates]
        times = np.split(draw.uniform(0, p.span_s, sum(counts)), np.cumsum(counts)[:-1])
    else:
        count = int(draw.poisson(p.rates[0] * p.span_s))
        early = lengths(count)
        times = [np.sort(draw.uniform(0, p.span_s, count))]
    arrival_s = np.concatenate(times)
    model = np.repeat(np.arange(len(times), dtype=np.int32), [len(each) for each in times])
    order = np.argsort(arrival_s, kind="stable")
    prompt, output = (lengths(len(order)) if early is None else early).T
    return Drawn(p.span_s, p.streams, arrival_s[order], model[order], prompt.copy(), output.copy())


def _released(p: Preset, seed: int) -> Drawn:
    """Draw Arena-Chat's 27 streams; return those that the released set of `p.models` models uses.

    A released set may use a stream several times, each time with a different shift in time.
    """
    streams = [
        Stream(f"dummy-lora-7b-rank-8-{rank}", count, use_s=(10.0 * begin, 10.0 * end), early=early / count)
        for rank, (count, (begin, end), early) in enumerate(zip(ARENA_COUNTS, ARENA_USE, ARENA_EARLY, strict=True))
    ]
    whole = _drawn(p, seed, streams, _counts(p, seed, streams, round(sum(ARENA_COUNTS) * p.span_s / PER_S)))
    if p.models == len(ARENA_COUNTS):
        return whole
    rows = [np.flatnonzero(whole.model == stream.rank) for stream in arena(p.models)]
    shifts = [stream.shift_s for stream in arena(p.models)]
    when = [shifted(whole.arrival_s[mine], by, p.span_s) for mine, by in zip(rows, shifts, strict=True)]
    model = np.repeat(np.arange(p.models, dtype=np.int32), [len(mine) for mine in rows])
    arrival_s, row = np.concatenate(when), np.concatenate(rows)
    order = np.argsort(arrival_s, kind="stable")
    row = row[order]
    return Drawn(
        p.span_s, p.streams, arrival_s[order], model[order], whole.prompt_tokens[row], whole.output_tokens[row]
    )


def _sample(p: Preset, seed: int) -> Drawn:
    """Draw the preset `sample`: streams of Zipf popularity, whose requests come in clusters.

    A stream is in use for the same share of every cycle. This share is random for each stream, and 1 for the hottest
    quarter of the streams.
    """
    streams = [Stream(name, weight) for name, weight in zip(p.streams, zipf(p.models, 1.0), strict=True)]
    counts = _counts(p, seed, streams, round(SAMPLE_REQUESTS * p.span_s / 60.0))
    duty = rng(seed, p.name, "duty").uniform(*SAMPLE_DUTY, len(streams))
    duty[: round(len(streams) * SAMPLE_ALWAYS_ON)] = 1.0
    cycle_s = min(PER_S, p.span_s)
    laws = [
        stream._replace(duty=float(share), cycle_s=cycle_s, cluster=SAMPLE_CLUSTER, gap_s=SAMPLE_GAP_S)
        for stream, share in zip(streams, duty, strict=True)
    ]
    return _drawn(p, seed, laws, counts)


def _counts(p: Preset, seed: int, streams: list[Stream], requests: int) -> list[int]:
    """Divide `requests` among streams at random, in proportion to the streams' own fields `requests`.

    The counts add up to the argument `requests`.
    """
    weight = np.array([stream.requests for stream in streams], np.float64)
    counts: list[int] = rng(seed, p.name, "counts").multinomial(requests, weight / weight.sum()).tolist()
    return counts


def _drawn(p: Preset, seed: int, streams: list[Stream], counts: list[int]) -> Drawn:
    """Draw `counts[k]` arrival times of each stream k, and then the lengths of all requests in order of arrival."""
    times = [_times(p, seed, k, stream, n) for k, (stream, n) in enumerate(zip(streams, counts, strict=True))]
    arrival_s = np.concatenate(times)
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order]
    model = np.repeat(np.arange(len(streams), dtype=np.int32), counts)[order]
    if p.drift_s:
        model = _drift(p, seed, arrival_s, model)
    prompt, output = _lengths(p, seed, len(arrival_s))
    return Drawn(p.span_s, tuple(stream.name for stream in streams), arrival_s, model, prompt, output)


def _times(p: Preset, seed: int, k: int, stream: Stream, count: int) -> F8:
    """Draw `count` arrival times of stream `k`, as the stream's fields say.

    If the stream has `use_s`, all arrivals lie in that period. If it has `tick`, they lie near the ticks of a clock. In
    any other stream some arrivals are in herds, some are at uniform times, and the rest are in clusters.
    """
    if stream.use_s is not None:
        return _in_use(rng(seed, p.name, "times", k), count, p.span_s, stream.use_s, stream.early)
    if stream.tick:
        return _ticks(rng(seed, p.name, "tick").uniform(0, TICK_S), rng(seed, p.name, "times", k), count, p.span_s)
    herd = _herds(p, rng(seed, p.name, "herds", k), count) if stream.herds and p.herd_s else np.empty(0)
    stray = rng(seed, p.name, "stray", k).uniform(0, p.span_s, round(stream.stray * (count - len(herd))))
    used = _clusters(rng(seed, p.name, "times", k), count - len(herd) - len(stray), p.span_s, stream)
    return np.concatenate([herd, stray, used])


def _in_use(draw: np.random.Generator, count: int, span_s: float, use_s: tuple[float, float], early: float) -> F8:
    """Draw `count` arrival times within a period of use, `use_s` = (begin, end), which repeats every `PER_S` seconds.

    Each lies in the first half of the period with the probability `early`, and is uniform within its half. The cycles
    of `PER_S` are stretched so that a whole number of them fills the span.
    """
    cycles = max(1, round(span_s / PER_S))
    cycle, share = np.divmod(draw.uniform(0, cycles, count), 1.0)
    at_s = np.interp(share, (0.0, early, 1.0), (use_s[0], sum(use_s) / 2, use_s[1]))
    return np.asarray((cycle * PER_S + at_s) * (span_s / (cycles * PER_S)), np.float64)


def _ticks(phase_s: float, draw: np.random.Generator, count: int, span_s: float) -> F8:
    """Draw `count` arrival times near the ticks of the clock that all streams with `tick` share.

    The first tick is at `phase_s`. Ticks are used in random order, and each is used once before any is used again.
    """
    ticks = max(1, round(span_s / TICK_S))
    order = np.argsort(draw.uniform(0, 1, ticks))
    nth = order[np.arange(count) % ticks]
    return np.asarray((phase_s + nth * (span_s / ticks) + draw.normal(0, TICK_JITTER_S, count)) % span_s, np.float64)


def _herds(p: Preset, draw: np.random.Generator, count: int) -> F8:
    """Draw the arrival times of herds: groups of requests that arrive nearly at once.

    In each interval of `herd_s` one herd begins, at a random time. The herds stop before they have more than half of
    the `count` requests.
    """
    herds = round(p.span_s / p.herd_s)
    sizes = draw.integers(HERD[0], HERD[1], herds, endpoint=True)
    sizes = sizes[np.cumsum(sizes) <= count / 2]
    starts = (np.arange(herds)[: len(sizes)] + draw.uniform(0, 1, herds)[: len(sizes)]) * (p.span_s / max(1, herds))
    return np.asarray((np.repeat(starts, sizes) + draw.uniform(0, HERD_S, int(sizes.sum()))) % p.span_s, np.float64)


def _clusters(draw: np.random.Generator, count: int, span_s: float, stream: Stream) -> F8:
    """Draw `count` arrival times that come in clusters.

    Clusters begin at uniform times in the stream's on-time. If `even` is true, the on-time is cut into equal parts, and
    one cluster begins in each part. Within a cluster each request follows the previous one after an exponential gap.
    """
    head = draw.uniform(0, 1, count) < 1 / stream.cluster
    head[:1] = True
    gaps = np.where(head, 0.0, draw.exponential(stream.gap_s, count))
    since = np.cumsum(gaps)
    on_s = stream.duty * min(stream.cycle_s, span_s)
    heads = int(head.sum())
    at = draw.uniform(0, span_s * stream.duty, heads)
    if stream.even:
        at = (np.arange(heads) + at / (span_s * stream.duty)) * (span_s * stream.duty / max(1, heads))
    starts = on_off(draw, at, span_s, stream.duty, on_s)
    cluster = np.cumsum(head) - 1
    return np.asarray((starts[cluster] + since - since[head][cluster]) % span_s, np.float64)


def _drift(p: Preset, seed: int, arrival_s: F8, model: I4) -> I4:
    """Return each request's model after the models have swapped their streams at random.

    Time is cut into periods of `drift_s`. In the first period no streams are swapped. Each later period has its own
    random permutation of the models.
    """
    period = (arrival_s // p.drift_s).astype(np.int64)
    owner = [np.arange(p.models, dtype=np.int32)]
    owner += [rng(seed, p.name, "drift", k).permutation(owner[0]) for k in range(1, int(period.max(initial=0)) + 1)]
    return np.asarray(np.stack(owner)[period, model], np.int32)


def _lengths(p: Preset, seed: int, n: int) -> tuple[I4, I4]:
    """Draw the prompt and output tokens of n requests from the preset's distributions.

    Prompt and output have the measured rank correlation. Outputs are cut to `max_tokens` - 1. Prompts are cut so that
    prompt + output is at most `max_tokens`.
    """
    r = 2 * np.sin(np.pi / 6 * RANK_CORRELATION[p.lengths])  # correlation of the normals whose ranks correlate so
    a, b = rng(seed, p.name, "lengths").standard_normal((2, n))
    of_prompt, of_output = p.quantiles
    prompt, output = quantile(_cdf(a), of_prompt), quantile(_cdf(r * a + np.sqrt(1 - r * r) * b), of_output)
    output = np.minimum(output, p.max_tokens - 1)
    return np.minimum(prompt, p.max_tokens - output), output


def _cdf(x: F8) -> F8:
    """Return the distribution function of the standard normal at x."""
    return 0.5 + 0.5 * np.fromiter(map(math.erf, (x / math.sqrt(2)).tolist()), np.float64, len(x))
