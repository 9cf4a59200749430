"""Synthetic traces fitted to measured ones: `draw(name, seed)` draws one, the same for the same seed; `table` as rows.

A name is a preset and what differs from it, as in "hyperbolic-like+models=18+span_s=7200":

hyperbolic-like        eight streams of Prism's Hyperbolic figure (digitised by us): counts and each stream's own kind
hyperbolic-like-drift  the same; popularity changes hands every 5 minutes, and two streams are stormed by herds
arena-like             stands in for Arena-Chat: its 27 streams, or the 4, 8 or 18 that Prism's released sets use
aegaeon-like           equal rates, Poisson, ShareGPT lengths: the kind of Aegaeon's released workloads
sample                 a minute to try things on
closed                 a closed loop: clients that each send the next request when the last one has ended
poisson                one Poisson stream, its lengths of a law of a data set's means (traces/laws.py)
power-law              Poisson streams, of which the k-th most popular has a rate in proportion to k^-alpha
hot-cold               two Poisson streams, cold at cold_rps and hot at rate_rps

A stream comes in clusters of geometric size while it is on; on and off times are lognormal. Herds are a crowd within
2.5 s, ticks a clock's. The streams of arena-like are Poisson from the first to the last use of each in Arena-Chat's ten
minutes, at one rate in each half of its use; a longer span repeats these uses with other requests. Each stream draws
from generators of its own: more models move no other's times. How near they come is measured against
`traces/targets.toml` whenever a trace is used, never assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import laws, poisson, schema
from traces.arrivals import MOST_REQUESTS, bounded, on_off, positive, rng, zipf
from traces.quantiles import LENGTHS, RANK_CORRELATION, Law, quantile, ranged

F8 = NDArray[np.float64]
I4 = NDArray[np.int32]
I8 = NDArray[np.int64]


class Drawn(NamedTuple):
    """A drawn trace: arrays of one element a request, sorted by arrival."""

    span_s: float
    models: tuple[str, ...]
    arrival_s: F8
    model: I4  # index into `models`
    prompt_tokens: I4
    output_tokens: I4


@dataclass(frozen=True, slots=True)
class Preset:
    """A generator's numbers; those with a bound in `FREE` may be changed by name. `str` gives the name back."""

    name: str
    models: int  # streams
    span_s: float = 600.0
    rate_rps: float = 0.0  # of each stream, where all have the same; else of the most popular
    alpha: float = 0.9  # exponent of popularity
    cold_rps: float = 1.0  # of the stream "cold"
    drift_s: float = 0.0  # streams exchange their popularity every so many seconds; 0: never
    herd_s: float = 0.0  # mean seconds between the herds of a stream that has them; 0: none come
    lengths: str = "arena"
    max_tokens: int = 8192  # longest prompt + output: what is longer loses the prompt's start
    clients: int = 0  # of each stream, in a closed loop; 0: requests come by themselves
    requests: int = 0  # of each stream's clients together; 0: `WAVES` a client
    prompt: int = 1024  # tokens of each request where lengths are "fixed"
    output: int = 256
    range_ratio: float = 0.0  # fixed lengths are drawn evenly within this share of both, as vLLM's bench does
    think_s: float = 0.0  # from the end of a request to the client's next

    def __str__(self) -> str:
        base = PRESETS[self.name]
        changed = [key for key in free(self.name) if getattr(self, key) != getattr(base, key)]
        if self.name in SIZED:  # says its size always: it is the model set's
            changed = ["models", *(key for key in changed if key != "models")]
        return self.name + "".join(f"+{key}={_plain(getattr(self, key))}" for key in changed)

    @property
    def label(self) -> str:
        """`str` without the number of streams, which is said beside it."""
        return str(self).replace(f"+models={self.models}", "") if self.name in SIZED else str(self)

    @property
    def rates(self) -> tuple[float, ...]:
        """Requests per second of each stream, where each has a rate of its own; else none."""
        match self.name:
            case "poisson":
                return (self.rate_rps,)
            case "hot-cold":
                return self.cold_rps, self.rate_rps
            case "power-law":
                return tuple(self.rate_rps * (k + 1) ** -self.alpha for k in range(self.models))
        return ()

    @property
    def longest_tokens(self) -> int:
        """No request has more tokens, whatever the seed."""
        if self.lengths in laws.NAMES:
            return self.max_tokens
        prompt, output = self.quantiles
        return min(self.max_tokens, math.floor(prompt.tokens[-1]) + math.floor(output.tokens[-1]))

    @property
    def quantiles(self) -> tuple[Law, Law]:
        """The laws of prompt and output."""
        if self.lengths == "fixed":
            return ranged(self.prompt, self.range_ratio), ranged(self.output, self.range_ratio)
        return LENGTHS[self.lengths]

    @property
    def sent(self) -> int:
        """Requests that the clients of a stream send, in a closed loop."""
        return self.requests or WAVES * self.clients

    @property
    def nominal_s(self) -> float:
        """Seconds that a client of a closed loop spends on a request, for forecasts that need a rate."""
        return self.think_s + NOMINAL_TPOT_S * float(quantile(np.array([0.5]), self.quantiles[1])[0])

    def times(self, scale: float) -> Preset:
        """Return the closed loop with `scale` times the clients, each of whom sends as many requests as before."""
        clients = max(1, round(scale * self.clients))
        return replace(self, clients=clients, requests=math.ceil(self.sent * clients / self.clients))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in the order of the models that they belong to."""
        if self.name == "arena-like":
            return tuple(stream.name for stream in _arena(self.models))
        if self.name == "hot-cold":
            return "cold", "hot"
        if self.name == "aegaeon-like":
            return tuple(f"synth_model_{k:02d}" for k in range(self.models))
        first, word = (0, "stream-") if self.name == "sample" else (1, "model_")
        return tuple(f"{word}{k + first}" for k in range(self.models))


# ------------------------------------------------------------------ streams


class Stream(NamedTuple):
    """Arrivals of one stream: requests in `PER_S`, and the shape of its time."""

    name: str
    requests: float
    duty: float = 1.0  # share of time in which it is used
    cycle_s: float = math.inf  # mean of an on and an off time together; infinite: one cycle in the span
    cluster: float = 1.0  # requests of a cluster
    gap_s: float = 1.0  # between them
    stray: float = 0.0  # share of the requests that come at any time, on or off
    even: bool = False  # one request in each equal part of the on-time, not anywhere in it
    herds: bool = False
    tick: bool = False  # by the clock
    use_s: tuple[float, float] | None = None  # Poisson from here to there of each `PER_S`; None: by the above
    early: float = 0.5  # of its requests, those in the first half of `use_s`


PER_S = 600.0
HERD_S, HERD = 2.5, (30, 41)  # seconds that a herd takes (a bar of the figure), requests of it: uniform, both ends in
TICK_S, TICK_JITTER_S = 120.0, 2.0  # of the clock, five a span; standard deviation, about that of a bar's 2.5 s
# Hyperbolic as digitised from the figure of Prism's notebook (prism-research 595ec1f, benchmark/multi-model/
# vtc_trace_vis.ipynb, cell 8: 600 s in bars of 2.5 s, 7 models, in its order). Model 4 is Poisson (CV of minutes .09),
# so is 5; 2 has bars of 35 and 41; 6 and 7 tick together, about every 124 s; 3 is used in six minutes on end (around
# the circle), 8 to 14 times a minute with next to no gap above 10 s, and 3 times in the others; 1 changes its rate by
# half within minutes (CV .30). Shares and cycles of 1 and 3 were read off so. The eighth, of 4 requests, is ours: sets
# have 8.
# With more models the streams are used again in this order, each drawn on its own.
HYPERBOLIC = (
    Stream("model_1", 250, duty=0.5, cycle_s=150.0, stray=0.6),
    Stream("model_2", 169, herds=True),
    Stream("model_3", 70, duty=0.6, stray=0.06, even=True),
    Stream("model_4", 1158),
    Stream("model_5", 40),
    Stream("model_6", 5, tick=True),
    Stream("model_7", 6, tick=True),
    Stream("model_8", 4, tick=True),
)
# Requests of rank 0 .. 26 in Arena-Chat's 600 s (the same file); 1,500 in all.
ARENA_COUNTS = (
    *(199, 40, 296, 22, 66, 120, 67, 56, 36, 23, 262, 26, 43, 44),
    *(22, 46, 25, 3, 12, 19, 31, 2, 19, 11, 2, 7, 1),
)
# Tens of seconds between which each rank is used there: those that hold its first and its last request.
ARENA_USE = (
    *((0, 59), (1, 58), (0, 60), (45, 59), (28, 60), (0, 60), (1, 59), (0, 60), (0, 60)),
    *((4, 58), (20, 60), (1, 59), (10, 58), (0, 60), (4, 27), (21, 59), (20, 60), (1, 3)),
    *((0, 15), (1, 15), (41, 60), (2, 7), (40, 58), (1, 9), (59, 60), (1, 12), (59, 60)),
)
# Its requests in the first half of that time.
ARENA_EARLY = (
    *(173, 11, 136, 10, 43, 72, 37, 22, 14, 6, 144, 11, 20, 22),
    *(14, 22, 13, 1, 5, 10, 11, 1, 7, 3, 2, 6, 1),
)
# Of the sample: of a stream's time, the share in which it is used, uniform; the hottest quarter is used always.
SAMPLE_DUTY, SAMPLE_ALWAYS_ON = (0.1, 1.0), 0.25
SAMPLE_CLUSTER, SAMPLE_GAP_S = 1.3, 1.0
# Ranks of Prism's released sets in the order of their models (prism-research 595ec1f, benchmark/multi-model/trace.py):
# `selected_ranks` of generate_tp_reqs, generate_e2e_benchmark_reqs and generate_e2e_benchmark_reqs_18m.
RELEASED: Mapping[int, tuple[int, ...]] = {
    4: (4, 14, 3, 10),
    8: (2, 14, 3, 10, 5, 19, 23, 24),
    18: (5, 10, 4, 17, 2, 10, 23, 2, 10, 14, 19, 14, 18, 14, 21, 2, 6, 19),
    27: tuple(range(27)),
}
# A rank's k-th reuse is the same stream, k times so much later (`backward_ranks`) or earlier (`forward_ranks`).
REUSE_S = {2: 10.0, 10: 10.0, 14: -10.0, 19: -10.0}


def popularity(models: int) -> F8:
    """Shares of the requests of hyperbolic-like's streams, in their order; they sum to 1."""
    counts = np.array([HYPERBOLIC[k % len(HYPERBOLIC)].requests for k in range(models)], np.float64)
    return np.asarray(counts / counts.sum(), np.float64)


def shifted(arrival_s: F8, shift_s: float, span_s: float) -> F8:
    """Stamps of a stream used again `shift_s` later on the circle [0, span_s); what falls before 0 comes at 0."""
    return np.asarray(np.maximum(arrival_s + shift_s, 0.0) % span_s, np.float64) if shift_s else arrival_s


class Reused(NamedTuple):
    """A stream of Arena-Chat as a released set uses it."""

    name: str
    rank: int
    shift_s: float


def _arena(models: int) -> tuple[Reused, ...]:
    """Return the streams of a released set; UserError where there is none of that size."""
    if models not in RELEASED:
        raise UserError(f"arena-like has {', '.join(map(str, RELEASED))} models, not {models}")
    ranks, streams = RELEASED[models], []
    for i, rank in enumerate(ranks):
        again = ranks[:i].count(rank)
        name = f"dummy-lora-7b-rank-8-{rank}" + (f"/{again + 1}" if again else "")  # its own, so that sets fit both
        streams.append(Reused(name, rank, again * REUSE_S.get(rank, 0.0)))
    return tuple(streams)


def released(models: int) -> tuple[tuple[str, float], ...]:
    """(Stream of Arena-Chat, shift in seconds) of each model of a released set; UserError where none is so large."""
    return tuple((f"dummy-lora-7b-rank-8-{stream.rank}", stream.shift_s) for stream in _arena(models))


# ------------------------------------------------------------------ presets, by name

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("hyperbolic-like", 8, herd_s=300.0, lengths="uniform"),  # two herds in 600 s
        Preset("hyperbolic-like-drift", 8, drift_s=300.0, herd_s=150.0, lengths="uniform"),
        Preset("arena-like", 27),
        Preset("aegaeon-like", 8, rate_rps=0.1, lengths="sharegpt", max_tokens=4096),  # the least context of its models
        Preset("sample", 8, span_s=60.0),
        Preset("closed", 1, lengths="fixed", clients=8),
        Preset("poisson", 1, rate_rps=1.0, lengths="geometric-sharegpt", max_tokens=2048),
        Preset("power-law", 8, rate_rps=1.0, lengths="geometric-sharegpt", max_tokens=2048),
        Preset("hot-cold", 2, rate_rps=10.0, lengths="geometric-sharegpt", max_tokens=2048),
    )
}
RATED = frozenset(name for name, preset in PRESETS.items() if preset.rates)  # streams have rates of their own
# as many streams as there are models
SIZED = frozenset({"hyperbolic-like", "hyperbolic-like-drift", "aegaeon-like", "closed", "power-law"})
FREE = ("models", "span_s", "rate_rps", "alpha", "cold_rps", "drift_s", "herd_s", "clients", "requests", "prompt",
        "output", "range_ratio", "think_s", "lengths", "max_tokens")  # fmt: skip
OPEN = frozenset(PRESETS) - {"closed"}
ONLY: Mapping[str, frozenset[str]] = {  # who else has it not
    "models": frozenset(PRESETS) - {"poisson", "hot-cold"},
    "rate_rps": RATED | {"aegaeon-like"},
    "alpha": frozenset({"power-law"}),
    "cold_rps": frozenset({"hot-cold"}),
    "herd_s": frozenset({"hyperbolic-like", "hyperbolic-like-drift"}),
    "span_s": OPEN,
    "drift_s": OPEN - RATED,
    **dict.fromkeys(("prompt", "output"), RATED | {"closed"}),
    **dict.fromkeys(("clients", "requests", "range_ratio", "think_s"), frozenset({"closed"})),
}
WAVES = 10  # requests of a client, unless said
NOMINAL_TPOT_S = 0.05  # only for forecasts of closed loops: about what readers are promised
MOST_MODELS, SAMPLE_REQUESTS = 1000, 200
MOST = 1e9  # of any number: as seconds, what nanoseconds in 63 bits can hold


def free(name: str) -> list[str]:
    """Return the keys of a preset's numbers that a trace's name may change."""
    return [key for key in FREE if name in ONLY.get(key, {name})]


def preset(text: str) -> Preset:
    """Read NAME+FIELD=VALUE...; UserError names an unknown preset or field, and a value out of range."""
    name, *pairs = text.split("+")
    if name not in PRESETS:
        raise UserError(f'no generator "{name}"{meant(name, PRESETS)} ({", ".join(PRESETS)})')
    p = PRESETS[name]
    kinds: dict[str, Any] = {field.name: type(getattr(p, field.name)) for field in fields(p)}
    keys = [pair.partition("=")[0] for pair in pairs]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise UserError(f"trace {text}: {twice} is there twice")
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in free(name) or not equals:
            raise UserError(f'trace {text}: "+{pair}" is not +FIELD=VALUE of {name} (fields: {", ".join(free(name))})')
        try:
            p = replace(p, **{key: kinds[key](value)})
        except ValueError:
            raise UserError(f'trace {text}: {key} is "{value}", not a number') from None
    _check(p, text)
    return replace(p, span_s=-(-p.sent // p.clients) * p.nominal_s) if p.clients else p


def _check(p: Preset, text: str) -> None:
    positive(f"trace {text}: span_s", p.span_s)
    if p.span_s > MOST:
        raise UserError(f"trace {text}: span_s is {p.span_s:g}, above {MOST:g}")
    known = (*laws.NAMES, "fixed") if p.rates else (*LENGTHS, *(("fixed",) if p.name == "closed" else ()))
    if p.lengths not in known:
        raise UserError(f'trace {text}: lengths is "{p.lengths}" ({", ".join(known)})')
    least_of = {"models": 1, "rate_rps": 0, "alpha": 0, "cold_rps": 0, "drift_s": 0, "herd_s": 0, "max_tokens": 2}
    if p.name == "closed":
        least_of |= {"clients": 1, "requests": 0, "think_s": 0}
    if p.lengths == "fixed":
        least_of |= {"prompt": 1, "output": 1}
    for key, least in least_of.items():
        value = getattr(p, key)
        if not least <= value <= MOST:
            raise UserError(
                f"trace {text}: {key} is {value}, {f'above {MOST:g}' if value > MOST else f'below {least}'}"
            )
    if p.models > MOST_MODELS:
        raise UserError(f"trace {text}: models is {p.models}, above {MOST_MODELS}")
    if p.clients and p.sent <= p.clients:
        raise UserError(f"trace {text}: {p.sent} requests of {p.clients} clients: the first of each is only warm-up")
    if not 0 <= p.range_ratio < 1:
        raise UserError(f"trace {text}: range_ratio is {p.range_ratio:g}, not a share from 0 to below 1")
    if p.range_ratio and p.lengths != "fixed":
        raise UserError(f"trace {text}: range_ratio is of fixed lengths, and lengths is {p.lengths}")
    prompt, output = (math.floor(length * (1 + p.range_ratio)) for length in (p.prompt, p.output))
    if p.lengths == "fixed" and prompt + output > p.max_tokens:
        raise UserError(f"trace {text}: {prompt} + {output} tokens are above max_tokens, {p.max_tokens}")
    if p.name == "arena-like":
        _arena(p.models)
    if p.rates or p.name == "aegaeon-like":
        positive(f"trace {text}: rate_rps", p.rate_rps)
    bounded(f"trace {text}", _expected(p), "fewer models, clients or seconds, or a lower rate")
    if p.drift_s:
        periods = p.span_s / p.drift_s
        if not periods * p.models <= MOST_REQUESTS:
            raise UserError(f"trace {text}: {periods:.3g} periods of drift_s (a longer drift_s)")


def _expected(p: Preset) -> float:
    """About how many requests there are."""
    match p.name:
        case "arena-like":
            return sum(ARENA_COUNTS) * p.span_s / PER_S
        case "sample":
            return SAMPLE_REQUESTS * p.span_s / 60.0
        case "aegaeon-like":
            return p.models * p.rate_rps * p.span_s
        case "closed":
            return float(p.models * p.sent)
        case _ if p.rates:
            return math.fsum(p.rates) * p.span_s
        case _:
            return sum(HYPERBOLIC[k % len(HYPERBOLIC)].requests for k in range(p.models)) * p.span_s / PER_S


def _plain(value: str | float) -> str:
    return f"{value:.12g}".replace("e+", "e") if isinstance(value, float) else str(value)  # a + begins a field


# ------------------------------------------------------------------ drawing


def draw(name: str | Preset, seed: int) -> Drawn:
    """Draw a preset's trace; UserError for a name that is none."""
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
    """Make a canonical table of what a generator draws; `fit` says how near it comes to what it is fitted to."""
    p = preset(name) if isinstance(name, str) else name
    drawn = draw(p, seed)
    columns = {
        "request_id": np.arange(len(drawn.arrival_s), dtype=np.uint64),
        "arrival_s": drawn.arrival_s,
        "model": pa.DictionaryArray.from_arrays(pa.array(drawn.model, pa.int32()), pa.array(drawn.models, pa.string())),
        "prompt_tokens": drawn.prompt_tokens,
        "output_tokens": drawn.output_tokens,
    }
    meta: dict[str, Any] = {"name": p.label, "maker": str(p), "tier": "synthetic", "licence": "Apache-2.0"}
    meta |= {"length_origin": "uniform" if p.lengths == "uniform" else "sampled", "span_s": drawn.span_s, "seed": seed}
    meta |= {"timestamp_resolution_s": None}
    meta |= {"ordered": True} if p.name in SIZED or p.rates else {}
    meta |= {"fit": fit} if fit else {}
    return schema.table(columns, meta)


def _loop(p: Preset, seed: int) -> Drawn:
    """Draw a closed loop's requests as a stream's clients send them, wave by wave, at nominal stamps."""
    wave = np.tile(np.arange(p.sent) // p.clients, p.models)
    model = np.repeat(np.arange(p.models, dtype=np.int32), p.sent)
    order = np.argsort(wave, kind="stable")
    prompt, output = _lengths(p, seed, len(wave))
    stamps_s = np.asarray(wave[order] * p.nominal_s, np.float64)
    return Drawn(p.span_s, p.streams, stamps_s, model[order], prompt, output)


def _poisson(p: Preset, seed: int) -> Drawn:
    """Draw streams with rates of their own; their lengths are of a law, or all equal."""

    def lengths(n: int, rng: np.random.Generator) -> I4:
        if p.lengths == "fixed":
            return np.tile(np.array((p.prompt, p.output), np.int32), (n, 1))
        return laws.draw(p.lengths, n, rng, p.max_tokens)

    drawn = poisson.draw(p.name, p.rates, p.span_s, lengths, seed)
    prompt, output = drawn.lengths.T
    return Drawn(p.span_s, p.streams, drawn.arrival_s, drawn.model, prompt.copy(), output.copy())


def _released(p: Preset, seed: int) -> Drawn:
    """Draw Arena-Chat's 27 streams, then use those that a released set uses."""
    streams = [
        Stream(f"dummy-lora-7b-rank-8-{rank}", count, use_s=(10.0 * begin, 10.0 * end), early=early / count)
        for rank, (count, (begin, end), early) in enumerate(zip(ARENA_COUNTS, ARENA_USE, ARENA_EARLY, strict=True))
    ]
    whole = _drawn(p, seed, streams, _counts(p, seed, streams, round(sum(ARENA_COUNTS) * p.span_s / PER_S)))
    if p.models == len(ARENA_COUNTS):
        return whole
    rows = [np.flatnonzero(whole.model == stream.rank) for stream in _arena(p.models)]
    shifts = [stream.shift_s for stream in _arena(p.models)]
    when = [shifted(whole.arrival_s[mine], by, p.span_s) for mine, by in zip(rows, shifts, strict=True)]
    model = np.repeat(np.arange(p.models, dtype=np.int32), [len(mine) for mine in rows])
    arrival_s, row = np.concatenate(when), np.concatenate(rows)
    order = np.argsort(arrival_s, kind="stable")
    row = row[order]
    return Drawn(
        p.span_s, p.streams, arrival_s[order], model[order], whole.prompt_tokens[row], whole.output_tokens[row]
    )


def _sample(p: Preset, seed: int) -> Drawn:
    """Draw streams of Zipf's popularity; each is used once a cycle for its duty, in clusters."""
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
    """Share out exactly `requests` among streams at random, by what each has in `PER_S`."""
    weight = np.array([stream.requests for stream in streams], np.float64)
    counts: list[int] = rng(seed, p.name, "counts").multinomial(requests, weight / weight.sum()).tolist()
    return counts


def _drawn(p: Preset, seed: int, streams: list[Stream], counts: list[int]) -> Drawn:
    """Draw the stamps of each stream, and lengths in order of arrival."""
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
    """Draw `count` stamps of stream `k`: herds first, the rest in its own way."""
    if stream.use_s is not None:
        return _in_use(rng(seed, p.name, "times", k), count, p.span_s, stream.use_s, stream.early)
    if stream.tick:
        return _ticks(rng(seed, p.name, "tick").uniform(0, TICK_S), rng(seed, p.name, "times", k), count, p.span_s)
    herd = _herds(p, rng(seed, p.name, "herds", k), count) if stream.herds and p.herd_s else np.empty(0)
    stray = rng(seed, p.name, "stray", k).uniform(0, p.span_s, round(stream.stray * (count - len(herd))))
    used = _clusters(rng(seed, p.name, "times", k), count - len(herd) - len(stray), p.span_s, stream)
    return np.concatenate([herd, stray, used])


def _in_use(draw: np.random.Generator, count: int, span_s: float, use_s: tuple[float, float], early: float) -> F8:
    """Stamps uniform over either half of the use, which every `PER_S` has; a span is cut into whole ones, stretched."""
    cycles = max(1, round(span_s / PER_S))
    cycle, share = np.divmod(draw.uniform(0, cycles, count), 1.0)
    at_s = np.interp(share, (0.0, early, 1.0), (use_s[0], sum(use_s) / 2, use_s[1]))
    return np.asarray((cycle * PER_S + at_s) * (span_s / (cycles * PER_S)), np.float64)


def _ticks(phase_s: float, draw: np.random.Generator, count: int, span_s: float) -> F8:
    """One request a tick of a clock that all such streams share, its ticks in random order; then round again."""
    ticks = max(1, round(span_s / TICK_S))
    order = np.argsort(draw.uniform(0, 1, ticks))
    nth = order[np.arange(count) % ticks]
    return np.asarray((phase_s + nth * (span_s / ticks) + draw.normal(0, TICK_JITTER_S, count)) % span_s, np.float64)


def _herds(p: Preset, draw: np.random.Generator, count: int) -> F8:
    """One herd in each `herd_s`, anywhere in it, so long as half of the requests at least come otherwise."""
    herds = round(p.span_s / p.herd_s)
    sizes = draw.integers(HERD[0], HERD[1], herds, endpoint=True)
    sizes = sizes[np.cumsum(sizes) <= count / 2]
    starts = (np.arange(herds)[: len(sizes)] + draw.uniform(0, 1, herds)[: len(sizes)]) * (p.span_s / max(1, herds))
    return np.asarray((np.repeat(starts, sizes) + draw.uniform(0, HERD_S, int(sizes.sum()))) % p.span_s, np.float64)


def _clusters(draw: np.random.Generator, count: int, span_s: float, stream: Stream) -> F8:
    """Draw `count` stamps: heads of clusters uniform over the on-time, the others an exponential gap after the last."""
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
    """Streams exchange their requests in every period of `drift_s` but the first; stamps and totals stay."""
    period = (arrival_s // p.drift_s).astype(np.int64)
    owner = [np.arange(p.models, dtype=np.int32)]
    owner += [rng(seed, p.name, "drift", k).permutation(owner[0]) for k in range(1, int(period.max(initial=0)) + 1)]
    return np.asarray(np.stack(owner)[period, model], np.int32)


def _lengths(p: Preset, seed: int, n: int) -> tuple[I4, I4]:
    """Pairs with the measured marginals and rank correlation, cut to `max_tokens` at the prompt's start."""
    r = 2 * np.sin(np.pi / 6 * RANK_CORRELATION[p.lengths])  # of the normals whose ranks correlate so
    a, b = rng(seed, p.name, "lengths").standard_normal((2, n))
    of_prompt, of_output = p.quantiles
    prompt, output = quantile(_cdf(a), of_prompt), quantile(_cdf(r * a + np.sqrt(1 - r * r) * b), of_output)
    output = np.minimum(output, p.max_tokens - 1)
    return np.minimum(prompt, p.max_tokens - output), output


def _cdf(x: F8) -> F8:
    """Return the standard normal's."""
    return 0.5 + 0.5 * np.fromiter(map(math.erf, (x / math.sqrt(2)).tolist()), np.float64, len(x))
