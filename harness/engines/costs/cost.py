"""Cost tables: `tables/*.toml` (value, source, formula, error) become the coefficient arrays of `coef.Tables`.

One file a GPU kind (`h100.toml`: specification, kernels, ladder) and one for engines (`hosts.toml`).
Plain numpy, run once at start. Times are seconds, sizes bytes per GPU. A quantity is a TOML table with a `source` and a
`formula`; `fit` and `held` are its errors, and without them it is a roofline whose error is unknown. `python -m
harness.engines.costs.fit` writes what is fitted; a calibration on a GPU writes the same format, passed as `table`.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.engines.costs import shapes
from harness.engines.costs.coef import COST, Tables
from harness.policy.types import Host, Inst, Shape, UserError

F8 = NDArray[np.float64]
Toml = Mapping[str, Any]
Link = Literal["pcie", "spread", "disk"]

TABLES = Path(__file__).parent / "tables"
OPS = ("gemm", "small", "prefill", "decode", "share", "all_reduce")  # quantities of a GPU kind
ERRORS = ("fit", "held", "held_parts")
BF16 = 2  # bytes
CTX_TOKENS = 1024  # context a sequence at which the share curves are drawn: about Arena's P99 prompt + mean output
SHARES = np.array([0.06, 0.09, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
SEQS = np.array([1.0, 2, 4, 8, 16, 32, 64, 128, 256])
# Tokens of a step: every count that a small batch can have, both sides of each tile edge (128), then doubling.
GRID = np.array(
    sorted(
        {*range(1, 9), *range(12, 65, 4), *range(72, 129, 8), *(128 * i + j for i in range(1, 17) for j in (0, 1))}
        | {*(2048 + 512 * i for i in range(1, 13))}
        | {12_288, 16_384}
    ),
    dtype=np.int64,
)


class GpuSpec(NamedTuple):
    """A GPU kind. Rates per second; links in one direction, as achieved by large copies."""

    kind: str
    name: str
    mem_bytes: int
    sms: int
    sm_step: int  # granularity of hard SM partitions
    flops: float  # peak, dense bf16
    hbm: float  # peak bytes
    h2d: float
    d2h: float
    nvlink: float  # GPU to GPU in a node
    net: float  # across nodes
    disk: float
    host_bytes: int  # memory of a node's host


class HostProfile(NamedTuple):
    """What an engine adds to kernels. A step: `host0 + host1 x sequences`, added (serial) or hidden behind the GPU."""

    api_in_s: float  # before a request is queued
    api_out_s: float  # after its last token
    host0: float
    host1: float
    serial: bool
    scale_decode: float  # kernel seconds are multiplied by these
    scale_prefill: float
    host_tp: float = 0.0  # s a step for each doubling of the tensor-parallel group
    sample_s: float = 0.0  # s a sampled row and entry of the vocabulary, where the checkpoint asks for top-k or top-p
    lookahead_steps: int = 0  # steps scheduled ahead of the one that runs, which a new prompt cannot join any more


class Way(NamedTuple):
    """A rung of the load ladder: fixed seconds, then bytes over a link.

    "pcie": the GPU's own; "disk": the node's; "spread": an equal part over every PCIe link of the node, then NVLink.
    A loader slower than its PCIe link, `bytes_s`, leaves the link to others for the rest of its time.
    """

    fixed_s: float
    source: Link
    bytes_s: float = math.inf

    def after_s(self, size: float, link_bytes_s: float) -> float:
        """Seconds of a load once its bytes have had the link to themselves."""
        return self.fixed_s + max(0.0, size / self.bytes_s - size / link_bytes_s)


class Source(NamedTuple):
    """Where a quantity comes from and how wrong it is; `error` is one phrase."""

    quantity: str
    source: str
    formula: str
    error: str


# ---------------------------------------------------------------------------------------------------- files


@cache
def _read(path: Path) -> Toml:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(
            f"cost table {path}: {e.strerror}; --table takes a file as in harness/engines/costs/tables"
        ) from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"cost table {path}: {e}") from e


def forget() -> None:
    """Read the files anew after they were rewritten."""
    _read.cache_clear()
    _aliases.cache_clear()


@cache
def _aliases() -> Mapping[str, str]:
    files = sorted(p for p in TABLES.glob("*.toml") if p.stem != "hosts")
    return {name: p.stem for p in files for name in (p.stem, *_read(p).get("aliases", ()))}


def gpu_kinds() -> tuple[str, ...]:
    """Every GPU kind, by its short name."""
    return tuple(dict.fromkeys(_aliases().values()))


def _kind(kind: str) -> str:
    try:
        return _aliases()[kind.lower()]
    except KeyError:
        close = get_close_matches(kind.lower(), _aliases(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(gpu_kinds())}"
        raise UserError(f"unknown GPU kind {kind!r}; {hint}") from None


def quantities(kind: str, table: str | None = None) -> Toml:
    """A kind's file, over the kind it is `like`, under the user's own table."""
    own = _read(TABLES / f"{_kind(kind)}.toml")
    q = over(_read(TABLES / f"{own['like']}.toml"), own) if "like" in own else own
    if table is None:
        return q
    user = _read(Path(table))
    if (meant := user.get("kind", kind)) not in _aliases() or _kind(meant) != _kind(kind):
        raise UserError(f"cost table {table}: kind is {meant!r}, this run is on {_kind(kind)}")
    for name, section in user.items():
        if name not in {"kind", *OPS}:
            raise UserError(f"cost table {table}: unknown section {name!r}; known: kind, {', '.join(OPS)}")
        if name in OPS:
            _same_form(section, q[name], f"cost table {table}: {name}")
    return {**q, **user}


def _same_form(got: Any, like: Any, where: str) -> None:
    """Refuse a user's quantity whose keys or numbers are not of the form of the committed one."""
    if isinstance(like, Mapping):
        if not isinstance(got, Mapping):
            raise UserError(f"{where} must be a table")
        for key in like.keys() - {*ERRORS, "axes", "axes_of", "factors", "wire"}:
            if key not in got:
                raise UserError(f"{where} lacks {key!r}; harness/engines/costs/tables shows the form")
            _same_form(got[key], like[key], f"{where}.{key}")
        if got.get("factors") and len(got["factors"]) != np.prod([len(a) for a in got.get("axes", ())]):
            raise UserError(f"{where}.factors must hold one number for each point of its axes")
    elif isinstance(like, list):
        if not isinstance(got, list) or not got:
            raise UserError(f"{where} must be a list")
        for item in got:
            _same_form(item, like[0], where)
    elif isinstance(like, str):
        if not isinstance(got, str):
            raise UserError(f"{where} must be text")
    elif isinstance(got, bool) or not isinstance(got, int | float) or not 0 <= got < np.inf:
        raise UserError(f"{where} = {got!r} must be a number that is not negative")


def over(base: Toml, own: Toml) -> Toml:
    """A kind's quantities over those of the kind that it is `like`; what it rewrites loses the other's errors."""
    merged = dict(base)
    for key, q in own.items():
        inherits = isinstance(q, dict) and key in base
        merged[key] = {**{k: v for k, v in base[key].items() if k not in ERRORS}, **q} if inherits else q
    return merged


def gpu(kind: str) -> GpuSpec:
    """The specification of a GPU kind; `UserError` names the nearest one that exists."""
    file = _read(TABLES / f"{_kind(kind)}.toml")
    spec = file["spec"]
    return GpuSpec(_kind(kind), file["name"], **{k: spec[k]["value"] for k in GpuSpec._fields[2:]})


def ladder(kind: str) -> Mapping[str, Way]:
    """The ways to load a model on this kind of GPU, with the seconds that do not depend on its size."""
    ways = _read(TABLES / "hosts.toml")["ladder"]
    _kind(kind)
    return {name: Way(w["fixed_s"], w["link"], w.get("bytes_s", math.inf)) for name, w in ways.items()}


def hosts() -> tuple[str, ...]:
    """Names of the host profiles."""
    return tuple(_read(TABLES / "hosts.toml")["host"])


def _host(name: str, kind: str) -> Toml:
    known = _read(TABLES / "hosts.toml")["host"]
    if name not in known:
        raise UserError(f"unknown host profile {name!r}; known: {', '.join(known)}")
    profile = known[name]
    return {**profile, **profile.get("on", {}).get(_kind(kind), {})}


def host(name: str, kind: str) -> HostProfile:
    """An engine's host costs on a GPU kind."""
    q = _host(name, kind)
    return HostProfile(**{k: q[k] for k in HostProfile._fields if k in q or k not in HostProfile._field_defaults})


def fitted(name: str) -> Sequence[Toml]:
    """The measured rows that a host profile was fitted on: tables of a `file` and, by column, values that it has there.

    A row is one of them if any table holds.
    """
    rows: Sequence[Toml] = _read(TABLES / "hosts.toml")["host"][name].get("rows", ())
    return rows


def held(name: str) -> Mapping[str, Mapping[str, float]]:
    """A host profile's errors on measured rows that a refit left out, by metric."""
    parts: Toml = _read(TABLES / "hosts.toml")["host"][name].get("held_parts", {})
    return {part.removesuffix(" held"): error for part, error in parts.items() if part.endswith(" held")}


_host_profile = host  # `host` is also what callers call the name of one


def noise(kind: str, host: str) -> float:
    """Relative spread of a step's seconds around its prediction (1 sigma)."""
    sigma = _read(TABLES / "hosts.toml")["sigma"]
    return float(_host(host, kind).get("sigma", sigma.get(_kind(kind), sigma["other"])["value"]))


def sources(rows: Sequence[tuple[Shape, int]], kind: str, host: str, table: str | None = None) -> list[Source]:
    """Every quantity that `tables` with the same arguments rests on."""
    q, name, h = quantities(kind, table), _kind(kind), _host(host, kind)
    own = _read(TABLES / f"{name}.toml")
    user = _read(Path(table)) if table else {}

    def said(op: str) -> str:
        inherited = op not in own and op not in user
        return f"as {own['like']}, the same chip: {q[op]['source']}" if inherited else str(q[op]["source"])

    ops = [op for op in OPS if op != "all_reduce" or any(tp > 1 for _, tp in rows)]
    out = [Source(f"{name}.{op}", said(op), q[op]["formula"], error(q[op])) for op in ops]
    out.append(Source(f"host {host}", h["source"], h["formula"], error(h)))
    sigma = _read(TABLES / "hosts.toml")["sigma"]
    if "sigma" not in h:
        out.append(Source("noise", sigma.get(name, sigma["other"])["source"], f"sigma {noise(kind, host)}", "-"))
    spec = q["spec"]
    return out + [Source(f"{name}.{k}", spec[k]["source"], f"{spec[k]['value']:g}", "-") for k in GpuSpec._fields[2:]]


def error(q: Toml) -> str:
    """A quantity's errors in words."""

    def one(e: Toml) -> str:
        return f"median {e['median']:.1%}, P95 {e['p95']:.1%} (n {e['n']})"

    said = [f"{what} {one(q[key])}" for key, what in (("held", "held out"), ("fit", "fit")) if key in q]
    return "; ".join(said) or str(q.get("error", "roofline, error unknown"))


# ---------------------------------------------------------------------------------------------------- kernels


class Part(NamedTuple):
    """A part of a GPU, as fractions of its arithmetic and of its HBM bandwidth."""

    sms: float | F8 = 1.0
    hbm: float | F8 = 1.0


WHOLE = Part()


def gemm_s(q: Toml, spec: GpuSpec, m: ArrayLike, n: ArrayLike, k: ArrayLike, part: Part = WHOLE) -> F8:
    """Seconds of one bf16 GEMM, m tokens x n outputs x k inputs, weights in HBM.

    The library picks a tile shape and how often to split k; a choice costs whole waves of tiles over the SMs, or the
    bytes, whichever is more; we take the cheapest choice, and correct it by a coarse table over (m, n, k).
    """
    m, n, k = (np.asarray(x, dtype=np.float64) for x in (m, n, k))
    least = BF16 * (m * k + n * k + m * n) / (spec.hbm * part.hbm)
    stream, sms = least / q["hbm_frac"], spec.sms * part.sms
    best: F8 = np.full((), np.inf)
    for tm, tn, flops_frac in q["tiles"]:
        tile = 2 * tm * tn / (flops_frac * spec.flops / spec.sms)
        count = np.ceil(m / tm) * np.ceil(n / tn)
        for split in (1, 2, 4, 8):
            waves = np.ceil(count * split / sms) * (tile * k / split + q["fill_s"])
            partial = 4 * 2 * split * m * n / (spec.hbm * part.hbm) if split > 1 else 0.0  # fp32, out and back
            best = np.minimum(best, np.maximum(stream, waves) + partial)
    physics: F8 = np.maximum(least, 2 * m * n * k / (spec.flops * part.sms))
    seconds: F8 = (q["launch_s"] + best) * _correction(q, m, n, k)
    return np.maximum(seconds, physics)


def decode_s(
    q: Toml,
    spec: GpuSpec,
    B: ArrayLike,
    ctx: ArrayLike,
    heads: ArrayLike,
    kv: ArrayLike,
    d: ArrayLike,
    part: Part = WHOLE,
) -> F8:
    """Seconds of one layer's decode attention: B sequences of `ctx` tokens, per-GPU heads of `d` numbers.

    With one query head a KV head (`q["mha"]`) other kernels run than with grouped ones (`q["gqa"]`).
    """
    B, ctx, heads, kv, d = (np.asarray(x, dtype=np.float64) for x in (B, ctx, heads, kv, d))
    mha, gqa = (_decode_s(q[group], spec, B, ctx, heads, kv, d, part) for group in ("mha", "gqa"))
    return np.where(heads == kv, mha, gqa)


def _decode_s(q: Toml, spec: GpuSpec, B: F8, ctx: F8, heads: F8, kv: F8, d: F8, part: Part) -> F8:
    stream = 2 * BF16 * B * ctx * kv * d / (q["hbm_frac"] * spec.hbm * part.hbm)
    lone = q["lone_s"] * ctx * d / 128  # a block that reads its context alone
    arith = 4 * B * ctx * heads * d / (q["flops_frac"] * spec.flops * part.sms)
    blocks = B * (kv * q["kv_head_s"] + heads * q["head_s"]) / part.sms
    tail = q["tail_s"] * np.sqrt(ctx * d / 128) / (B * kv) ** q["tail_power"]  # few blocks, long contexts
    merge = q["merge_s"] * (ctx > 128)  # contexts beyond one block are split and merged
    whole = q["floor_s"] + merge + blocks + np.maximum(stream, lone) + arith + tail
    return cast("F8", whole * _correction(q, ctx, B * kv))


def prefill_s(
    q: Toml,
    spec: GpuSpec,
    n: ArrayLike,
    tokens: ArrayLike,
    heads: ArrayLike,
    kv: ArrayLike,
    d: ArrayLike,
    part: Part = WHOLE,
) -> F8:
    """Seconds of one layer's causal attention over n prompts of `tokens` tokens: tiles of 128 queries over the SMs."""
    n, L, heads, kv, d = (np.asarray(x, dtype=np.float64) for x in (n, tokens, heads, kv, d))
    frac = np.interp(np.log(d), np.log(np.array(q["head_dims"], dtype=np.float64)), q["flops_frac"])
    key_s = 4 * 128 * d / (frac * spec.flops / spec.sms)  # one tile against one key
    work = n * heads * np.ceil(L / 128) * (key_s * (L + 128) / 2 + q["tile_s"]) / (spec.sms * part.sms)
    longest = q["longest"] * (key_s * L + q["tile_s"])
    p = q["power"]
    stream = BF16 * n * L * 2 * (heads + kv) * d / (q["hbm_frac"] * spec.hbm * part.hbm)
    body = np.maximum((work**p + longest**p) ** (1 / p), stream)
    return cast("F8", (q["floor_s"] + body) * _correction(q, L, n * heads, heads / kv))


def _correction(q: Toml, *at: F8) -> F8:
    """What the mechanism misses: factors on a coarse log2 grid, interpolated linearly, constant beyond its edges."""
    if not q.get("factors"):
        return np.ones(())
    table = np.log(np.array(q["factors"], dtype=np.float64)).reshape([len(axis) for axis in q["axes"]])
    out: F8 = np.zeros(())
    corners: list[tuple[F8, tuple[NDArray[np.int64], ...]]] = [(np.ones(()), ())]
    for x, axis in zip(at, q["axes"], strict=True):
        knots = np.log2(np.array(axis, dtype=np.float64))
        u = np.interp(np.log2(np.maximum(x, 1.0)), knots, np.arange(len(knots), dtype=np.float64))
        i = np.minimum(u.astype(np.int64), len(knots) - 2)
        corners = [(w * v, (*at_, j)) for w, at_ in corners for v, j in ((1 - (u - i), i), (u - i, i + 1))]
    for w, index in corners:
        out = out + w * table[index]
    return np.exp(out)


def small_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8) -> F8:
    """Seconds a layer of the two norms, rope, activation and cache write of `m` tokens."""
    heads = shape.q_heads / tp + 2 * max(1.0, shape.kv_heads / tp)
    wide = (3 if shape.gated else 2) * shape.ffn / tp
    token = BF16 * (8 * shape.hidden + 2 * heads * shape.head_dim + wide)
    return cast("F8", np.maximum(q["floor_s"], m * token / (q["hbm_frac"] * spec.hbm)))


def all_reduce_s(q: Toml, tp: int, elements: ArrayLike) -> F8:
    """Seconds of one all-reduce of bf16 `elements` over `tp` GPUs: log-log between knots, linear beyond the last."""
    x, elements = np.array(q["elements"], dtype=np.float64), np.asarray(elements, dtype=np.float64)
    if tp == 1:
        return np.zeros_like(elements)
    if f"tp{tp}_s" not in q:
        raise UserError(f"no all-reduce times over {tp} GPUs; tensor parallelism is 1, 2, 4 or 8")
    y = np.array(q[f"tp{tp}_s"], dtype=np.float64)
    inner = np.exp(np.interp(np.log(elements), np.log(x), np.log(y)))
    # A link slower than the one measured: a ring over it, at least.
    ring = 2 * (tp - 1) / tp * BF16 * elements / float(q.get("wire", np.inf))
    table: F8 = np.where(elements > x[-1], y[-1] * elements / x[-1], inner)
    return np.maximum(table, ring)


class Gemms(NamedTuple):
    """A layer's four GEMMs as (n, k) per GPU."""

    qkv: tuple[float, float]
    out: tuple[float, float]
    up: tuple[float, float]
    down: tuple[float, float]


def gemms(shape: Shape, tp: int) -> Gemms:
    """QKV fused, gate and up fused; columns, then rows, split over `tp` GPUs."""
    heads, kv = shape.q_heads / tp, max(1.0, shape.kv_heads / tp)
    ffn = shape.ffn / tp
    return Gemms(
        ((heads + 2 * kv) * shape.head_dim, shape.hidden),
        (shape.hidden, heads * shape.head_dim),
        ((2 if shape.gated else 1) * ffn, shape.hidden),
        (shape.hidden, ffn),
    )


# ---------------------------------------------------------------------------------------------------- tables


def tables(rows: Sequence[tuple[Shape, int]], kind: str, host: str, table: str | None = None) -> Tables:
    """Coefficients of (shape, tensor-parallel degree) pairs on a GPU kind under a host profile.

    `table`: path of a TOML that replaces committed quantities. Raises `UserError` for unknown names.
    """
    return coefficients(rows, quantities(kind, table), gpu(kind), _host_profile(host, kind))


def coefficients(rows: Sequence[tuple[Shape, int]], q: Toml, spec: GpuSpec, h: HostProfile) -> Tables:
    """`tables` from quantities in hand: what a fit evaluates before it writes them."""
    cost = np.zeros(len(rows), dtype=COST)
    gemm, head = np.empty((2, len(rows), len(GRID)))
    dec_rate, pre_rate = np.empty((len(rows), len(SHARES), len(SEQS))), np.empty((len(rows), len(SHARES)))
    m = GRID.astype(np.float64)
    # A step of few tokens is a decode, one of many a prefill: their measured scales differ.
    scale = np.interp(m, (256, 512), (h.scale_decode, h.scale_prefill))
    # What HBM gives at best: to a large GEMM of one token, or to a model's own decode attention.
    large_gemm = BF16 * 16384.0**2 / float(gemm_s(q["gemm"], spec, 1, 16384, 16384))
    for i, (shape, tp) in enumerate(rows):
        if (same := rows.index((shape, tp))) < i:
            for table in (cost, gemm, head, dec_rate, pre_rate):
                table[i] = table[same]
            continue
        L, d = shape.layers, shape.head_dim
        c = cost[i]
        c["kbytes"] = shapes.kv_token_bytes(shape, tp)  # also refuses a degree that heads do not divide by
        heads, kv = shape.q_heads / tp, max(1.0, shape.kv_heads / tp)
        n, k = np.array(gemms(shape, tp)).T
        layer = gemm_s(q["gemm"], spec, m[:, None], n, k).sum(axis=1) + small_s(q["small"], spec, shape, tp, m)
        layer = layer + 2 * all_reduce_s(q["all_reduce"], tp, m * shape.hidden)
        gemm[i] = np.maximum.accumulate(L * layer * scale)
        head[i] = np.maximum.accumulate(h.scale_decode * gemm_s(q["gemm"], spec, m, shape.vocab / tp, shape.hidden))
        if shape.sampled:  # each GPU of a group samples from whole rows
            head[i] += h.sample_s * shape.vocab * m
        weights = float((n * k).sum()) * L
        c["host0"], c["host1"], c["serial"] = h.host0 + h.host_tp * math.log2(tp), h.host1, h.serial
        dec = h.scale_decode * L * _decode_lines(q["decode"], spec, heads, kv, d, layer)
        c["att0"], c["att1"], c["dec0"], c["dec1"], c["dec2"] = dec
        c["pre0"], c["pre1"], c["pre2"] = h.scale_prefill * L * _prefill_plane(q["prefill"], spec, heads, kv, d, layer)
        c["wbytes"] = BF16 * (weights + shape.vocab / tp * shape.hidden)
        c["fl_tok"], c["fl_area"] = 2 * weights, 4 * L * heads * d
        c["flops"] = q["gemm"]["best_flops_frac"] * spec.flops
        c["hbm"] = min(spec.hbm, max(large_gemm, h.scale_decode * c["kbytes"] / c["dec2"]))
        dec_rate[i], pre_rate[i] = _share_rates(q, spec, shape, tp, h)
    return Tables(cost, GRID, gemm, head, SHARES, SEQS, dec_rate, pre_rate)


def _decode_lines(q: Toml, spec: GpuSpec, heads: float, kv: float, d: int, layer: F8) -> F8:
    """The two planes of `coef` whose larger one is nearest to `decode_s`: att0, att1, dec0, dec1, dec2 of a layer.

    Errors count relative to the whole layer, whose other kernels take `layer` seconds on `GRID`.
    """
    B, ctx = (x.ravel() for x in np.meshgrid(SEQS, 2.0 ** np.arange(4, 15)))
    B, ctx = B[B * ctx <= 1 << 20], ctx[B * ctx <= 1 << 20]
    y = decode_s(q, spec, B, ctx, heads, kv, d)
    w = 1 / (y + np.interp(B, GRID, layer))
    one = np.ones_like(B)
    short, long = np.stack([one, B], axis=1), np.stack([one, B, B * ctx], axis=1)
    upper = ctx > 128
    for _ in range(4):
        att = nonnegative(short[~upper], y[~upper], w[~upper])
        dec = nonnegative(long[upper], y[upper], w[upper])
        now = long @ dec > short @ att
        if now.all() or not now.any() or (now == upper).all():
            break
        upper = now
    return np.concatenate([att, dec])


def _prefill_plane(q: Toml, spec: GpuSpec, heads: float, kv: float, d: int, layer: F8) -> F8:
    """pre0, pre1, pre2 of a layer, nearest to `prefill_s` relative to the whole layer."""
    n, L = (x.ravel() for x in np.meshgrid(2.0 ** np.arange(5), 2.0 ** np.arange(4, 15)))
    n, L = n[n * L <= 1 << 14], L[n * L <= 1 << 14]
    y = prefill_s(q, spec, n, L, heads, kv, d)
    w = 1 / (y + np.interp(n * L, GRID, layer))
    return nonnegative(np.stack([n, n * L, n * L * L / 2], axis=1), y, w)


def nonnegative(X: F8, y: F8, w: F8) -> F8:
    """Weighted least squares with coefficients >= 0: the worst negative one leaves until none is left."""
    use = np.ones(X.shape[1], dtype=bool)
    while True:
        got = np.linalg.lstsq(X[:, use] * w[:, None], y * w, rcond=None)[0]
        out = np.zeros(len(use))
        out[use] = got
        if out.min() >= 0:
            return out
        use[int(out.argmin())] = False


def part_of(q: Toml, share: F8) -> Part:
    """What a share of the SMs is worth: its arithmetic, and how much of HBM so few SMs can pull."""
    a, p = q["saturation"], q["power"]
    return Part(share ** q["arith_power"], ((1 + a**p) / (1 + (a / share) ** p)) ** (1 / p))


def decode_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, B: F8, ctx: float, part: Part = WHOLE) -> F8:
    """Seconds of a decode step's kernels on a part of each GPU; the launch floors do not shrink."""
    return _kernels_s(q, spec, shape, tp, B, B, part) + shape.layers * decode_s(
        q["decode"], spec, B, ctx, shape.q_heads / tp, max(1.0, shape.kv_heads / tp), shape.head_dim, part
    )


def prefill_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, n: F8, tokens: F8, part: Part = WHOLE) -> F8:
    """Seconds of a prefill step's kernels, n prompts of `tokens` tokens, on a part of each GPU."""
    return _kernels_s(q, spec, shape, tp, n * tokens, n, part) + shape.layers * prefill_s(
        q["prefill"], spec, n, tokens, shape.q_heads / tp, max(1.0, shape.kv_heads / tp), shape.head_dim, part
    )


def _kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: F8, out: F8, part: Part) -> F8:
    layer = sum((gemm_s(q["gemm"], spec, m, n, k, part) for n, k in gemms(shape, tp)), start=np.zeros(()))
    layer = layer + np.maximum(q["small"]["floor_s"], small_s(q["small"], spec, shape, tp, m) / part.hbm)
    layer = layer + 2 * all_reduce_s(q["all_reduce"], tp, m * shape.hidden)
    head = gemm_s(q["gemm"], spec, out, shape.vocab / tp, shape.hidden, part)
    return cast("F8", shape.layers * layer + head)


def layer_kernels_s(q: Toml, spec: GpuSpec, shape: Shape, tp: int, m: int) -> tuple[list[float], list[float]]:
    """Seconds of one layer's kernels for `m` tokens, in the order in which they run: before attention, and after it.

    Norm, QKV, rope, cache write; output, norm, gate and up, activation, down. The output and the down projection are
    each followed by an all-reduce where the layer is cut over GPUs. The five small ones count as equally long: in steps
    of few tokens each costs little more than its launch.
    """
    n, k = np.array(gemms(shape, tp)).T
    qkv, out, up, down = gemm_s(q["gemm"], spec, m, n, k).tolist()
    small = float(small_s(q["small"], spec, shape, tp, np.array(m))) / 5
    reduced = [float(all_reduce_s(q["all_reduce"], tp, m * shape.hidden))] * (tp > 1)
    return [small, qkv, small, small], [out, *reduced, small, up, small, down, *reduced]


def _share_rates(q: Toml, spec: GpuSpec, shape: Shape, tp: int, h: HostProfile) -> tuple[F8, F8]:
    """Speeds of decode and prefill steps at the shares of SMs, of 1; the host's part is the same at each."""

    def speed(kernels_s: F8, seqs: F8 | float) -> F8:
        host_s = h.host0 + h.host1 * seqs
        step = kernels_s + host_s if h.serial else np.maximum(kernels_s, host_s)
        return cast("F8", np.minimum.accumulate((step[-1] / step)[::-1])[::-1])  # never faster on fewer SMs

    part = part_of(q["share"], SHARES)
    wide = Part(*(np.asarray(x)[:, None] for x in part))
    decode = h.scale_decode * decode_kernels_s(q, spec, shape, tp, SEQS[None, :], CTX_TOKENS, wide)
    prefill = h.scale_prefill * prefill_kernels_s(q, spec, shape, tp, np.ones(()), np.array(2048.0), part)
    return speed(decode, SEQS), speed(prefill, 1.0)


# ---------------------------------------------------------------------------------------------------- reading


class Row(NamedTuple):
    """A row of `Tables`; what is read for each single step is in Python numbers, which cost a tenth of numpy's."""

    cost: Mapping[str, float]
    grid: list[int]
    gemm: list[float]
    head: list[float]
    share: F8
    seqs: F8
    dec_rate: F8
    pre_rate: F8


def row(t: Tables, i: int) -> Row:
    """Row i of coefficient tables."""
    numbers = dict(zip(COST.names or (), t.cost[i].item(), strict=True))
    grid, gemm, head = (x.tolist() for x in (t.grid, t.gemm[i], t.head[i]))
    return Row(numbers, grid, gemm, head, t.share, t.seqs, t.dec_rate[i], t.pre_rate[i])


def step_s(r: Row, B: int = 0, C: float = 0, p: int = 0, n: int = 0, area: float = 0, out: int | None = None) -> float:
    """Solo seconds of a step, as `coef` writes it; `out` defaults to B + n."""
    c = r.cost
    gpu_s = _at(r.grid, r.gemm, B + p) + _at(r.grid, r.head, B + n if out is None else out)
    gpu_s += attend_s(r, B, C)
    if n:
        gpu_s += c["pre0"] * n + c["pre1"] * p + c["pre2"] * area
    host_s = c["host0"] + c["host1"] * (B + n)
    return float(gpu_s + host_s if c["serial"] else max(gpu_s, host_s))


def attend_s(r: Row, B: int, C: float) -> float:
    """Seconds of all layers' decode attention in a step, as `coef` writes it."""
    c = r.cost
    return max(c["att0"] + c["att1"] * B, c["dec0"] + c["dec1"] * B + c["dec2"] * C) if B else 0.0


def _at(grid: list[int], f: list[float], x: int) -> float:
    """Linear between grid points and beyond the last two; f(0) = 0."""
    if x <= 0:
        return 0.0
    i = min(bisect_right(grid, x) - 1, len(grid) - 2)
    return f[i] + (f[i + 1] - f[i]) * (x - grid[i]) / (grid[i + 1] - grid[i])


@dataclass(frozen=True, slots=True)
class TableProfile:
    """`types.Profile` over cost tables: what a policy may ask. Solo seconds on idle links, no host API time."""

    rows: Mapping[tuple[str, int], Row]  # of (model, tensor-parallel degree)
    spec: GpuSpec
    ladder: Mapping[str, Way]
    weight_bytes: Mapping[tuple[str, int], int]  # per GPU
    shapes: Mapping[str, Shape]
    quantities: Toml  # from which the rows are: they tell how a step's seconds divide among its kernels
    node_gpus: int = 8

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        """Seconds of a prefill of one prompt alone on its GPUs."""
        r = self._row(inst)
        solo = step_s(r, p=tokens, n=1, area=tokens * tokens / 2)
        if sms is None:
            return solo
        return solo / float(np.interp(sms / self.spec.sms, r.share, r.pre_rate))

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Seconds of a decode step of `seqs` sequences with `ctx_tokens` tokens of context in all."""
        r = self._row(inst)
        solo = step_s(r, B=seqs, C=ctx_tokens)
        if sms is None:
            return solo
        at = [float(np.interp(seqs, r.seqs, rates)) for rates in r.dec_rate]
        return solo / float(np.interp(sms / self.spec.sms, r.share, at))

    def attend_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Seconds of one layer's attention in such a step, alone on its GPUs."""
        shape, tp = self.shapes[inst.model], _tp(inst)
        solo = attend_s(self._row(inst), seqs, ctx_tokens) / shape.layers
        if sms is None or seqs == 0:
            return solo
        heads, kv = shape.q_heads / tp, max(1.0, shape.kv_heads / tp)
        at = self.quantities["decode"], self.spec, seqs, ctx_tokens / seqs, heads, kv, shape.head_dim
        part = part_of(self.quantities["share"], np.array(sms / self.spec.sms))
        return solo * max(1.0, float(decode_s(*at, part) / decode_s(*at)))

    def kernels_s(self, inst: Inst, seqs: int, ctx_tokens: int) -> tuple[float, ...]:
        """Seconds of each kernel of such a step, layer by layer, then of the LM head; see `layer_kernels_s`.

        The row has the sum of a layer's kernels, scaled to its engine; what each takes of it is by the quantities.
        """
        if seqs == 0:
            return ()
        r, shape = self._row(inst), self.shapes[inst.model]
        before, after = layer_kernels_s(self.quantities, self.spec, shape, _tp(inst), seqs)
        scale = _at(r.grid, r.gemm, seqs) / shape.layers / (sum(before) + sum(after))
        attention_s = self.attend_s(inst, seqs, ctx_tokens)
        layer = [*(scale * s for s in before), attention_s, *(scale * s for s in after)]
        return (*(layer * shape.layers), _at(r.grid, r.head, seqs))

    def load_s(self, inst: Inst, way: str) -> float:
        """Seconds of a `Load` by `way` on idle links."""
        if way not in self.ladder:
            raise UserError(f"unknown way to load {way!r}; known: {', '.join(self.ladder)}")
        fixed_s, link, _ = rung = self.ladder[way]
        tp = _tp(inst)
        size = self.weight_bytes[inst.model, tp]
        match link:
            case "pcie":
                return size / self.spec.h2d + rung.after_s(size, self.spec.h2d)
            case "disk":
                return fixed_s + size * tp / self.spec.disk
            case "spread":  # parts cross PCIe while each GPU gathers what others have brought
                part = size * tp / self.node_gpus
                return fixed_s + max(part / self.spec.h2d, (size - part) / self.spec.nvlink)

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        """Seconds to move KV on an idle link."""
        if isinstance(src, Host) or isinstance(dst, Host):
            return kv_bytes / (self.spec.h2d if isinstance(src, Host) else self.spec.d2h)
        same = src // self.node_gpus == dst // self.node_gpus
        return kv_bytes / (self.spec.nvlink if same else self.spec.net)

    def _row(self, inst: Inst) -> Row:
        return self.rows[inst.model, _tp(inst)]


def _tp(inst: Inst) -> int:
    return 1 if isinstance(inst.place, Host) else len(inst.place)
