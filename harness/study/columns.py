"""Columns of a study's table besides attainment (its `measures`): values of a run, by model or over all models.

An early request arrives in the window, more than `LATE_S` before the window's end.

done_rps         requests per second that end in the window
throughput_rps   the mean of done_rps over models, weighted by the rates of the trace's generator
tpot_ms          mean TPOT of the early requests that end
tpot_p99_ms      P99 of TPOT over the same requests
tpot_tail_ms     P99 of TPOT minus its mean
ttft_s           mean TTFT of the same requests
ended            share of the early requests that end
decoding         mean number of requests in a decode step, by Little's law over the requests that end in the window
kv_used          share of the KV memory in use on the GPU where a model decodes, by the same law
batch            mean number of requests that hold KV
kv_tokens, kv_ahead, kv_over, kv_rest
                 shares of KV memory: filled by tokens, reserved for tokens that still come, reserved for tokens that
                 never come, and the remainder
within           share of the requests arriving in the window whose latency is at most `ALONE_X` times that of the same
                 request when it runs alone
decode_tps_B     tokens/s of decode steps of batch B on each of two GPUs, by the cost table
tp2_loss_B       share of these tokens/s that is lost with TP2
kvpr_above       largest KVPR of Prism's initial placement, divided by that of the best placement (`pressure.py`)
samples_N, beams_N
                 share of KV blocks saved because N samples or beams of a request share blocks (`sharing.py`), by the
                 trace's lengths
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.engines.machine import Config, Served, cluster, power_above
from harness.policy.chance import draw
from harness.policy.types import Inst, Shape
from harness.rows import record, requests, scoring
from harness.run.setup import Setup
from harness.run.spec import Spec, stored
from harness.study import pressure, sharing
from traces import laws, synthetic

F8 = NDArray[np.float64]
LATE_S = 40.0  # requests that come so shortly before the window's end may not end by then
ALONE_X = 8.0  # within: MuxServe does not state which multiple its claim is about, so this one is ours
TOKENS = (1024, 128)  # decode_tps_B: prompt and output of Weaver's table 1
SHARING = 64  # requests per seed whose blocks are counted


@dataclass(frozen=True)
class Ran:
    """A stored run, with the values from which its columns are computed."""

    spec: Spec
    rows: requests.Rows
    ids: Sequence[int]

    @classmethod
    def read(cls, folder: Path) -> Ran:
        """Read a stored run."""
        table = record.read(folder)
        return cls(stored(record.meta(folder)["spec"]), requests.rows(table), table["id"].to_pylist())

    @cached_property
    def setup(self) -> Setup:
        """The setup of the run: its hardware and models."""
        return Setup(self.spec)

    @cached_property
    def window_s(self) -> float:
        """Seconds of the window."""
        return self.spec.window_s or 0.0

    @cached_property
    def done_s(self) -> F8:
        """Seconds at which each request ends."""
        return self.rows.arrival_s + self.rows.e2e_s

    @cached_property
    def ended(self) -> NDArray[np.bool_]:
        """Tell for each request whether it ends in the window."""
        return self.rows.done & (self.done_s >= 0.0) & (self.done_s < self.window_s)

    @cached_property
    def early(self) -> NDArray[np.bool_]:
        """Tell for each request whether it arrives in the window, more than `LATE_S` before the window's end."""
        return (self.rows.arrival_s >= 0.0) & (self.rows.arrival_s < self.window_s - LATE_S)

    def after_s(self, wait: str) -> F8:
        """Return the seconds that each request waits after its first token for one reason, `wait` (`record.WAITS`)."""
        k = record.WAITS.index(wait)
        return self.rows.waits_s[:, k] - self.rows.ttft_waits_s[:, k]

    def of(self, model: str) -> NDArray[np.bool_]:
        """Tell for each request whether it is for this model; "" stands for all models."""
        if model not in self.rows.models:
            return np.full(len(self.rows), not model)
        return np.asarray(self.rows.model == self.rows.models.index(model))

    def by_model(self, value: Callable[[NDArray[np.bool_]], float]) -> dict[str, float]:
        """Compute a value over the requests of each model; the key "" has the value over all requests."""
        return {model: value(self.of(model)) for model in ("", *self.setup.models.names)}


Column = Callable[[Ran], Mapping[str, float]]


def values(folder: Path, names: Sequence[str]) -> Iterator[scoring.Value]:
    """Yield the values of some columns of a run: by model, and for all models together under the name "pooled"."""
    ran = Ran.read(folder)
    for name in names:
        for model, value in COLUMNS[name](ran).items():
            known = None if math.isnan(value) else value
            yield scoring.Value(name, "model" if model else "pooled", model or None, int(ran.of(model).sum()), known)


# ------------------------------------------------------------------ rates and latencies


def _done_rps(ran: Ran) -> dict[str, float]:
    return ran.by_model(lambda mine: float((ran.ended & mine).sum() / ran.window_s))


def _throughput_rps(ran: Ran) -> dict[str, float]:
    weights = np.array(synthetic.preset(ran.spec.trace).rates)
    done = _done_rps(ran)
    each_rps = np.array([done[name] for name in ran.setup.models.names])
    return {"": float(weights @ each_rps / weights.sum())}


def _latency(ran: Ran, of: Callable[[F8], float], seconds: Callable[[requests.Rows], F8]) -> dict[str, float]:
    whole = ran.early & ran.rows.done & (ran.rows.output_tokens > 1)
    values = seconds(ran.rows)
    return ran.by_model(lambda mine: of(values[whole & mine]) if (whole & mine).any() else math.nan)


def _tpot_ms(rows: requests.Rows) -> F8:
    return np.asarray((rows.e2e_s - rows.ttft_s) / np.maximum(rows.output_tokens - 1, 1) * 1e3, np.float64)


def _mean(x: F8) -> float:
    return float(x.mean())


def _p99(x: F8) -> float:
    return float(np.percentile(x, 99))


def _ended(ran: Ran) -> dict[str, float]:
    def share(mine: NDArray[np.bool_]) -> float:
        offered = ran.early & mine
        return float(ran.rows.done[offered].mean()) if offered.any() else math.nan

    return ran.by_model(share)


def _within(ran: Ran) -> dict[str, float]:
    rows, spec, names = ran.rows, ran.spec, ran.setup.models.names
    load = (spec.trace, spec.seed, spec.models, spec.gpu, spec.host)
    if load not in _ALONE:  # on as many GPUs as the model set gives its model
        model = np.array([names.index(name) for name in rows.models], np.int32)[rows.model]
        first_s, later_s = ran.setup.solo_s(model, rows.prompt_tokens, rows.output_tokens)
        _ALONE[load] = np.asarray(first_s + (rows.output_tokens - 1) * later_s, np.float64)
    within = (rows.done & (rows.e2e_s <= ALONE_X * _ALONE[load]))[requests.in_window(rows, ran.window_s)]
    return {"": float(within.mean())}


_ALONE: dict[tuple[object, ...], F8] = {}  # seconds of each request alone, keyed by load: the same for all systems


# ------------------------------------------------------------------ batches and KV memory


def _decoding(ran: Ran) -> dict[str, float]:
    in_steps_s = ran.after_s("compute") + ran.after_s("contention") + ran.after_s("time_slice")
    return ran.by_model(lambda mine: float(in_steps_s[ran.ended & mine].sum() / ran.window_s))


def _kv_used(ran: Ran) -> dict[str, float]:
    """Return, by model, the share of KV memory in use on the GPU on which that model decodes.

    The KV of all requests on this GPU counts, because Weaver offloads part of the hot model's KV to the GPU of the cold
    model.
    """
    rows, names = ran.rows, ran.setup.models.names
    here_s = rows.e2e_s - rows.ttft_s - ran.after_s("transfer") - ran.after_s("kv")
    token_s = np.where(ran.ended, here_s * (rows.prompt_tokens + rows.output_tokens / 2), 0.0)
    share = np.array([_token_share(ran.setup, name) for name in rows.models])[rows.model]
    token_seconds, at = token_s * share, np.array([names.index(name) for name in rows.models], np.int32)[rows.model]
    if ran.spec.system == "weaver":
        ratio = float(ran.setup.keywords.get("ratio", 0.45))
        far = np.array([draw(0, int(rid)) < ratio for rid in ran.ids]) & ran.of("hot")
        at[far] = names.index("cold")
    return {name: float(token_seconds[at == k].sum() / ran.window_s) for k, name in enumerate(names)}


def _token_share(setup: Setup, name: str) -> float:
    """Compute the share of a GPU's KV memory that one token of a model takes, if the model has the GPU to itself."""
    model = setup.cluster.models[name]
    return model.kv_token_bytes / (setup.cluster.gpus[0].mem_bytes - model.weight_bytes)


def _memory(ran: Ran, of: str) -> dict[str, float]:
    """Compute the mean batch, or a share of KV memory, in a run with one model.

    `of` names the quantity. A request counts from its first token to its end, or to the end of the window if it does
    not end. Its tokens are assumed to be spread evenly over that time. While it waits for KV after its first token, it
    uses no KV.
    """
    rows, window_s = ran.rows, ran.window_s
    (model,) = ran.setup.cluster.models.values()
    slots = (ran.setup.cluster.gpus[0].mem_bytes - model.weight_bytes) // model.kv_token_bytes
    first, last = rows.arrival_s + rows.ttft_s, np.where(rows.done, ran.done_s, window_s)
    in_ = (last > np.maximum(first, 0.0)) & (rows.made_tokens > 0)
    first, last, waited = first[in_], last[in_], ran.after_s("kv")[in_]
    prompt, output, made = (x[in_].astype(np.int64) for x in (rows.prompt_tokens, rows.output_tokens, rows.made_tokens))
    begin, span = np.maximum(first, 0.0), last - first
    part = (last - begin) * (1 - waited / span) / window_s  # share of the window in which it holds KV
    mean = prompt + 1 + (made - 1) * ((begin + last) / 2 - first) / span  # mean number of tokens meanwhile
    longest = np.full_like(prompt, ran.spec.served or 0)
    chunks = {"max": longest, "fastertransformer": longest}
    chunks |= {"oracle": prompt + output, "pow2": prompt + power_above(output)}
    reserved = chunks.get(ran.spec.preset or "")
    tokens = float(part @ mean) / slots
    ahead = 0.0 if reserved is None else float(part @ (prompt + output - mean)) / slots
    over = 0.0 if reserved is None else float(part @ (reserved - prompt - output)) / slots
    batch, rest = float(part.sum()), 1 - tokens - ahead - over
    return {"": {"batch": batch, "tokens": tokens, "ahead": ahead, "over": over, "rest": rest}[of]}


# ------------------------------------------------------------------ calculations, which need no run


@cache
def _tokens_per_s(shape: Shape, gpu: str, host: str, batch: int, tp: int) -> float:
    """Compute the decode throughput of two GPUs in tokens/s, as in Weaver's table 1.

    The GPUs run two instances with TP 1, or one with TP 2. Each instance has a batch of `batch` requests. Only decode
    steps count, because the paper's number is too high to include prefill. At batch 128 the paper has 8,011 tokens/s:
    128 requests of 128 tokens on each GPU take 4.1 s. Their prompts alone, 131,072 tokens of 2 x 6.98e9 FLOP, would
    take 5.9 s at the GPU's peak.
    """
    prompt, output = TOKENS
    config = Config((Served("m", shape, 1, degrees=(2,)),), gpu=gpu, gpus=2, host=host)
    inst, profile = Inst("m", tuple(range(tp))), cluster(config).profile
    seconds = sum(profile.step_s(inst, batch, batch * (prompt + k)) for k in range(1, output))
    return 2 / tp * batch * (output - 1) / seconds


def _tables(ran: Ran, batch: int, loss: bool) -> dict[str, float]:
    shape, spec = ran.setup.models.members[0].shape, ran.spec
    apart, together = (_tokens_per_s(shape, spec.gpu, spec.host, batch, tp) for tp in (1, 2))
    return {"": 1 - together / apart if loss else apart}


def _blocks(ran: Ran, sequences: int, beams: bool) -> dict[str, float]:
    preset = synthetic.preset(ran.spec.trace)
    return {"": _shared(preset.lengths, preset.max_tokens, sequences, beams, ran.spec.seed)}


@cache
def _shared(lengths: str, longest: int, sequences: int, beams: bool, seed: int) -> float:
    """Return the share of KV blocks that sharing saves, over `SHARING` requests whose lengths are drawn."""
    rng = np.random.default_rng(seed)
    return sharing.saved(laws.draw(lengths, SHARING, rng, longest), sequences, rng if beams else None)


COLUMNS: Mapping[str, Column] = {
    "done_rps": _done_rps,
    "throughput_rps": _throughput_rps,
    "tpot_ms": partial(_latency, of=_mean, seconds=_tpot_ms),
    "tpot_p99_ms": partial(_latency, of=_p99, seconds=_tpot_ms),
    "tpot_tail_ms": partial(_latency, of=lambda x: _p99(x) - _mean(x), seconds=_tpot_ms),
    "ttft_s": partial(_latency, of=_mean, seconds=lambda rows: rows.ttft_s),
    "ended": _ended,
    "within": _within,
    "decoding": _decoding,
    "kv_used": _kv_used,
    **{f"kv_{part}": partial(_memory, of=part) for part in ("tokens", "ahead", "over", "rest")},
    "batch": partial(_memory, of="batch"),
    "kvpr_above": lambda ran: {"": pressure.above(ran.setup)},
    **{f"decode_tps_{batch}": partial(_tables, batch=batch, loss=False) for batch in (16, 128)},
    **{f"tp2_loss_{batch}": partial(_tables, batch=batch, loss=True) for batch in (16, 128)},
    **{
        f"{word}_{n}": partial(_blocks, sequences=n, beams=word == "beams")
        for word in ("samples", "beams")
        for n in (2, 6)
    },
}
