"""Presets of synthetic traces fitted to measured ones, and their streams; drawing.py draws them.

A trace's name is a preset and the parameters that differ from it, as in "hyperbolic-like+models=18+span_s=7200":

hyperbolic-like        seven streams digitised from Prism's Hyperbolic figure, and one more stream that is invented
hyperbolic-like-drift  the same, but streams swap their popularity every 5 minutes, and two streams have herds
arena-like             stands in for Arena-Chat: its 27 streams, or the 4, 8 or 18 that Prism's released sets use
aegaeon-like           Poisson streams of equal rates with ShareGPT's lengths, like Aegaeon's released workloads
sample                 a minute to try things on
closed                 a closed loop: each client sends its next request when its previous one has ended
poisson                one Poisson stream, whose lengths follow a law with a data set's means (traces/laws.py)
power-law              Poisson streams; the k-th most popular has a rate proportional to k^-alpha
hot-cold               two Poisson streams, cold at cold_rps and hot at rate_rps

While a stream is on, its requests come in clusters of geometric size; on and off times are lognormal. A herd is a crowd
of requests within 2.5 s. A stream with ticks sends requests near the ticks of a clock. A stream of arena-like is
Poisson between its first and last use in Arena-Chat's ten minutes, with one rate in each half of that time. In a longer
span these ten minutes repeat, each time with newly drawn requests. Whenever a trace is used, its distance from the
measured values of `traces/targets.toml` is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.policy.fields import meant
from harness.policy.types import UserError
from traces import laws
from traces.arrivals import MOST_REQUESTS, bounded, positive
from traces.quantiles import LENGTHS, Law, quantile, ranged

F8 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Preset:
    """A generator's parameters; a trace's name may change those in `FREE`. `str` gives the name."""

    name: str
    models: int  # streams
    span_s: float = 600.0
    rate_rps: float = 0.0  # each stream's, where all have the same; else the most popular one's
    alpha: float = 0.9  # exponent of popularity
    cold_rps: float = 1.0  # rate of the stream "cold"
    drift_s: float = 0.0  # seconds after which streams exchange their popularity; 0: never
    herd_s: float = 0.0  # mean seconds between the herds of a stream that has them; 0: none come
    lengths: str = "arena"
    max_tokens: int = 8192  # longest prompt + output: a longer request loses the prompt's start
    clients: int = 0  # of each stream of a closed loop; 0: requests come by themselves
    requests: int = 0  # that each stream's clients send together; 0: `WAVES` a client
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
        """The preset's name without its number of streams."""
        return str(self).replace(f"+models={self.models}", "") if self.name in SIZED else str(self)

    @property
    def rates(self) -> tuple[float, ...]:
        """The requests per second of each Poisson stream; empty for a preset whose streams are drawn in another way."""
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
        """An upper bound of the prompt + output tokens of a request, for every seed."""
        if self.lengths in laws.NAMES:
            return self.max_tokens
        prompt, output = self.quantiles
        return min(self.max_tokens, math.floor(prompt.tokens[-1]) + math.floor(output.tokens[-1]))

    @property
    def quantiles(self) -> tuple[Law, Law]:
        """The distributions of prompt tokens and of output tokens."""
        if self.lengths == "fixed":
            return ranged(self.prompt, self.range_ratio), ranged(self.output, self.range_ratio)
        return LENGTHS[self.lengths]

    @property
    def sent(self) -> int:
        """The number of requests that all clients of one stream of a closed loop send in total."""
        return self.requests or WAVES * self.clients

    @property
    def nominal_s(self) -> float:
        """The seconds that a closed loop's client is assumed to spend on a request, for forecasts that need a rate."""
        return self.think_s + NOMINAL_TPOT_S * float(quantile(np.array([0.5]), self.quantiles[1])[0])

    def times(self, scale: float) -> Preset:
        """Return the closed loop with `scale` times the clients; each of them sends as many requests as before."""
        clients = max(1, round(scale * self.clients))
        return replace(self, clients=clients, requests=math.ceil(self.sent * clients / self.clients))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in the order of the models that they belong to."""
        if self.name == "arena-like":
            return tuple(stream.name for stream in arena(self.models))
        if self.name == "hot-cold":
            return "cold", "hot"
        if self.name == "aegaeon-like":
            return tuple(f"synth_model_{k:02d}" for k in range(self.models))
        first, word = (0, "stream-") if self.name == "sample" else (1, "model_")
        return tuple(f"{word}{k + first}" for k in range(self.models))


# ------------------------------------------------------------------ streams


class Stream(NamedTuple):
    """The arrivals of one stream: its requests in `PER_S` seconds, and how they are spread over time."""

    name: str
    requests: float
    duty: float = 1.0  # share of time in which it is used
    cycle_s: float = math.inf  # mean of an on and an off time together; infinite: one cycle in the span
    cluster: float = 1.0  # requests of a cluster
    gap_s: float = 1.0  # mean gap between them
    stray: float = 0.0  # share of the requests that come at any time, on or off
    even: bool = False  # one request in each equal part of the on-time, not anywhere in it
    herds: bool = False
    tick: bool = False  # requests come by the clock
    use_s: tuple[float, float] | None = None  # Poisson between these times of each `PER_S`; None: by the above
    early: float = 0.5  # this share of its requests comes in the first half of `use_s`


PER_S = 600.0
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
    """Return the shares of requests that the streams of hyperbolic-like get, in order of the streams; the sum is 1."""
    counts = np.array([HYPERBOLIC[k % len(HYPERBOLIC)].requests for k in range(models)], np.float64)
    return np.asarray(counts / counts.sum(), np.float64)


def shifted(arrival_s: F8, shift_s: float, span_s: float) -> F8:
    """Delay a stream's arrivals by `shift_s` seconds; an arrival past `span_s` wraps around to the start.

    A negative shift does not wrap around: an arrival that would be before 0 is moved to 0.
    """
    return np.asarray(np.maximum(arrival_s + shift_s, 0.0) % span_s, np.float64) if shift_s else arrival_s


class Reused(NamedTuple):
    """One use of an Arena-Chat stream in a released set: the stream delayed by `shift_s` seconds."""

    name: str
    rank: int
    shift_s: float


def arena(models: int) -> tuple[Reused, ...]:
    """Return the streams of the released set with this number of models; UserError if there is no such set."""
    if models not in RELEASED:
        raise UserError(f"arena-like has {', '.join(map(str, RELEASED))} models, not {models}")
    ranks, streams = RELEASED[models], []
    for i, rank in enumerate(ranks):
        again = ranks[:i].count(rank)
        name = f"dummy-lora-7b-rank-8-{rank}" + (f"/{again + 1}" if again else "")  # its own, so that sets fit both
        streams.append(Reused(name, rank, again * REUSE_S.get(rank, 0.0)))
    return tuple(streams)


def released(models: int) -> tuple[tuple[str, float], ...]:
    """Return the Arena-Chat stream of each model of a released set, and its shift in seconds.

    Raises UserError if no set has `models` models.
    """
    return tuple((f"dummy-lora-7b-rank-8-{stream.rank}", stream.shift_s) for stream in arena(models))


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
# These have as many streams as there are models.
SIZED = frozenset({"hyperbolic-like", "hyperbolic-like-drift", "aegaeon-like", "closed", "power-law"})
FREE = ("models", "span_s", "rate_rps", "alpha", "cold_rps", "drift_s", "herd_s", "clients", "requests", "prompt",
        "output", "range_ratio", "think_s", "lengths", "max_tokens")  # fmt: skip
OPEN = frozenset(PRESETS) - {"closed"}
ONLY: Mapping[str, frozenset[str]] = {  # presets that have a field; a field that is not here is of all
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
WAVES = 10  # requests of a client, unless `requests` is set
NOMINAL_TPOT_S = 0.05  # only for forecasts of closed loops: about what readers are promised
MOST_MODELS, SAMPLE_REQUESTS = 1000, 200
MOST = 1e9  # largest number: as many seconds, in nanoseconds, fit 63 bits


def free(name: str) -> list[str]:
    """Return the parameters of a preset that a trace's name may set."""
    return [key for key in FREE if name in ONLY.get(key, {name})]


def preset(text: str) -> Preset:
    """Parse NAME+FIELD=VALUE...; UserError names an unknown preset or field, or a value out of range."""
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
    """Raise UserError for a parameter that is out of its bounds, and for parameters that exclude each other."""
    where = f"trace {text}"
    positive(f"{where}: span_s", p.span_s)
    if wrong := next(chain(_out_of_bounds(p), _unfit(p)), None):
        raise UserError(f"{where}: {wrong}")
    if p.name == "arena-like":
        arena(p.models)
    if p.rates or p.name == "aegaeon-like":
        positive(f"{where}: rate_rps", p.rate_rps)
    bounded(where, _expected(p), "fewer models, clients or seconds, or a lower rate")
    if p.drift_s and not (periods := p.span_s / p.drift_s) * p.models <= MOST_REQUESTS:
        raise UserError(f"{where}: {periods:.3g} periods of drift_s (a longer drift_s)")


def _out_of_bounds(p: Preset) -> Iterator[str]:
    if p.span_s > MOST:
        yield f"span_s is {p.span_s:g}, above {MOST:g}"
    known = (*laws.NAMES, "fixed") if p.rates else (*LENGTHS, *(("fixed",) if p.name == "closed" else ()))
    if p.lengths not in known:
        yield f'lengths is "{p.lengths}" ({", ".join(known)})'
    least_of = {"models": 1, "rate_rps": 0, "alpha": 0, "cold_rps": 0, "drift_s": 0, "herd_s": 0, "max_tokens": 2}
    least_of |= {"clients": 1, "requests": 0, "think_s": 0} if p.name == "closed" else {}
    least_of |= {"prompt": 1, "output": 1} if p.lengths == "fixed" else {}
    for key, least in least_of.items():
        value = getattr(p, key)
        if not least <= value <= MOST:
            yield f"{key} is {value}, {f'above {MOST:g}' if value > MOST else f'below {least}'}"
    if p.models > MOST_MODELS:
        yield f"models is {p.models}, above {MOST_MODELS}"


def _unfit(p: Preset) -> Iterator[str]:
    """Yield a message for each conflict between parameters, and for a `range_ratio` that is not in [0, 1)."""
    if p.clients and p.sent <= p.clients:
        yield f"{p.sent} requests of {p.clients} clients: the first of each is only warm-up"
    if not 0 <= p.range_ratio < 1:
        yield f"range_ratio is {p.range_ratio:g}, not a share from 0 to below 1"
    if p.range_ratio and p.lengths != "fixed":
        yield f"range_ratio is of fixed lengths, and lengths is {p.lengths}"
    prompt, output = (math.floor(length * (1 + p.range_ratio)) for length in (p.prompt, p.output))
    if p.lengths == "fixed" and prompt + output > p.max_tokens:
        yield f"{prompt} + {output} tokens are above max_tokens, {p.max_tokens}"


def _expected(p: Preset) -> float:
    """Return the approximate number of requests that a preset draws."""
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
