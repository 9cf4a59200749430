"""Quantities of GPUs and engines, read from `tables/*.toml`: value, source, formula, error.

There is one file for each GPU kind (`h100.toml`: specification and kernels) and one for engines and ways to load
(`hosts.toml`). Times are in seconds, sizes in bytes per GPU. A quantity is a TOML table with a `source` and a
`formula`. `fit` and `held` are its errors; a quantity without them is a roofline whose error is unknown. `bench
calibrate profiles` writes fitted quantities. A calibration on a GPU writes a file of the same format, which is passed
as `table`. A table that describes a machine of its own (`whole.py`) replaces the GPU kind and the host profile,
whatever these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from harness import toml
from harness.engines.costs import forms, whole
from harness.policy import fields
from harness.policy.types import Shape, UserError

F8 = NDArray[np.float64]
Toml = Mapping[str, Any]
Link = Literal["pcie", "spread", "disk"]
TABLES = Path(__file__).parent / "tables"
SHOWN = "harness/engines/costs/tables"  # names that folder in messages
OPS = ("gemm", "small", "prefill", "decode", "share", "all_reduce")  # quantities of a GPU kind
EXCHANGES = ("all_gather", "reduce_scatter")  # between the groups of data-parallel attention
ERRORS = ("fit", "fit_parts", "held", "held_parts", "parallel_parts")
CHIP = ("sms", "flops", "hbm")
USUAL = "h100"  # whose file has every key that others may have, as far as it is checked
TURNS_OF = "h200"  # the kind on which turns of kernels were measured
# The kind whose rows tell what a sort of the vocabulary takes. On cards of less bandwidth it takes longer by as much,
# which nobody measured. On those of more it takes no less: vLLM PR 40376, whose hardware is a B200 (its servers run on
# B200 and H200), has the same seconds, 1.36e-10 a row and entry.
SORTED_ON = "h100"


class GpuSpec(NamedTuple):
    """The specification of a GPU kind.

    Rates are per second. Rates of links are for one direction, as large copies achieve them.
    """

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
    """The host costs of an engine.

    The host time of a step is `host0 + host1 x sequences`. If `serial`, it is added to the GPU's time; otherwise the
    longer of the two counts.
    """

    api_in_s: float  # before a request is queued
    api_out_s: float  # after its last token
    host0: float
    host1: float
    serial: bool
    scale_decode: float  # kernel seconds are multiplied by these
    scale_prefill: float
    host_tp: float = 0.0  # s per step for each doubling of the tensor-parallel group
    sample_s: float = 0.0  # s per sampled row and entry of the vocabulary, where requests ask for top-k or top-p
    lookahead_steps: int = 0  # steps scheduled ahead of the one that runs, which a new prompt cannot join any more


class Way(NamedTuple):
    """A way to load weights: fixed seconds, and a copy of their bytes over the link `source`.

    "pcie" is the GPU's own link, and "disk" the node's disk. With "spread", an equal part crosses every PCIe link of
    the node, and then NVLink. A loader that is slower than its PCIe link copies `bytes_s` bytes a second, and other
    copies may use the rest of the link.
    """

    fixed_s: float
    source: Link
    bytes_s: float = math.inf

    def after_s(self, size: float, link_bytes_s: float) -> float:
        """Return the further seconds of a load after its bytes have crossed the link at the link's full rate."""
        return self.fixed_s + max(0.0, size / self.bytes_s - size / link_bytes_s)


class Source(NamedTuple):
    """The source and error of a quantity; `error` is one phrase."""

    quantity: str
    source: str
    formula: str
    error: str


_read = cache(toml.tables)


@cache
def _user(table: str) -> Toml:
    """Read and check a user's table, and return its contents unchanged. Raises UserError."""
    try:
        file = toml.tables(Path(table))
    except UserError as error:
        form = "" if Path(table).is_file() else "; --table takes a file as in harness/engines/costs/tables"
        raise UserError(f"cost table {error}{form}") from None
    if {"aliases", "like"} & file.keys() or {"spec", *OPS} <= file.keys():
        raise UserError(
            f"cost table {table}: this describes a GPU kind: put it into {SHOWN} and name "
            "it by --gpu; --table takes quantities of a kind, such as [gemm]"
        )
    toml.convert(file, whole.Machine if whole.is_whole(file) else forms.Table, f"cost table {table}: ")
    return file


def sig(x: float, digits: int = 4) -> float:
    """Round a number to `digits` significant digits."""
    return float(f"{x:.{digits}g}")


def forget() -> None:
    """Forget the files read so far, so that rewritten ones are read again."""
    for read in (_read, _user, _aliases, _committed, machine):
        read.cache_clear()


@cache
def _aliases() -> Mapping[str, str]:
    files = sorted(p for p in TABLES.glob("*.toml") if p.stem != "hosts")
    listed = {p.stem: _read(p).get("aliases") for p in files}
    # Tables are checked where they are used.
    rest = {kind: names if isinstance(names, list) else [] for kind, names in listed.items()}
    return {name: kind for kind, names in rest.items() for name in (kind, *names)}


def gpu_kinds() -> tuple[str, ...]:
    """Return every GPU kind, by its short name."""
    return tuple(dict.fromkeys(_aliases().values()))


def _kind(kind: str) -> str:
    try:
        return _aliases()[kind.lower()]
    except KeyError:
        hint = fields.meant(kind.lower(), _aliases()) or f"; known: {', '.join(gpu_kinds())}"
        raise UserError(f"unknown GPU kind {kind!r}{hint}") from None


@cache
def machine(table: str | None) -> whole.Machine | None:
    """Return the machine that a user's table describes; None if it describes no machine, or there is no table.

    Raises UserError if the machine has the name of a GPU kind.
    """
    if table is None or not whole.is_whole(file := _user(table)):
        return None
    timed = toml.convert(file, whole.Machine)
    if timed.kind.lower() in _aliases():
        raise UserError(f'cost table {table}: kind is "{timed.kind}", which is a GPU kind; it carries its own [spec]')
    return timed


def settings(table: str | None) -> dict[str, Any]:
    """Return the fields of a spec that were set when a table's machine was measured.

    The result is empty if the table describes no machine, or if there is no table.
    """
    return {} if (measured := machine(table)) is None else {str(key): value for key, value in measured.settings.items()}


def quantities(kind: str, table: str | None = None) -> Toml:
    """Return the quantities of a GPU kind, with those of the user's table in place of the committed ones.

    The result is empty if the table describes a machine that was measured whole. Raises UserError if the table is of
    another kind.
    """
    if machine(table) is not None:
        return {}
    q = _committed(_kind(kind))
    q = {**q, "co_run": _turns(q)}
    if table is None:
        return q
    user = _user(table)
    if (meant := user.get("kind", kind)) not in _aliases() or _kind(meant) != _kind(kind):
        raise UserError(f'cost table {table}: kind is "{meant}", this run is on {_kind(kind)}')
    return {**q, **user}


@cache
def _committed(kind: str) -> Toml:
    """Return the committed quantities of a GPU kind, as its file states them.

    If the file names another kind in `like`, all quantities that the file lacks are inherited from that kind, and their
    sources say so. If the two kinds differ in SMs or peak rates, inherited coefficients count as unmeasured and lose
    their errors. Raises UserError for a key that is missing or of a wrong type.
    """
    path = TABLES / f"{kind}.toml"
    file = _read(path)
    if wrong := _fault(file, {**_read(TABLES / f"{USUAL}.toml"), "like": USUAL}):
        raise UserError(f"{path}: {wrong}, as in {USUAL}.toml")
    if "like" not in file:
        stated = {**file, **{f"spec.{key}": q for key, q in file.get("spec", {}).items()}}
        if gone := {"kind", "name", *OPS, *(f"spec.{key}" for key in GpuSpec._fields[2:])} - stated.keys():
            raise UserError(f'{path}: {min(gone)} is missing: state it, or like = "KIND" to take it from another kind')
        return file
    base, like = _committed(_kind(file["like"])), file["like"]
    merged = over(base, file)
    spec = merged["spec"]
    same = all(spec[name]["value"] == base["spec"][name]["value"] for name in CHIP)
    on_trust = {"source": f"roofline: coefficients of {like} at this card's own peaks, unmeasured"}
    for op in (*OPS, *EXCHANGES):
        if op not in file:
            stated = {"source": f"as {like}, the same chip: {base[op]['source']}"}
            kept = {key: value for key, value in base[op].items() if same or key not in ERRORS}
            merged[op] = {**kept, **(stated if same else on_trust)}
    inherited = {name: q for name, q in spec.items() if name not in file.get("spec", {})}
    sourced = {name: {**q, "source": f"as {like}: {q['source']}"} for name, q in inherited.items()}
    return {**merged, "spec": {**spec, **sourced}}


def _fault(value: Any, usual: Any, key: str = "") -> str:
    """Say which key of a GPU's file has a value of another type than in the file of `USUAL`; "" if none has.

    A kind may state quantities that the file of `USUAL` lacks, so no dataclass of `forms` checks the file.
    """
    if _type(value) != _type(usual):
        return f"{key} is {toml.shown(value)}, not {_type(usual)}"
    if isinstance(value, dict):
        inside = ((member, usual[name], f"{key}.{name}".lstrip(".")) for name, member in value.items() if name in usual)
        return next((wrong for pair in inside if (wrong := _fault(*pair))), "")
    if isinstance(value, list) and usual:
        return next((wrong for item in value if (wrong := _fault(item, usual[0], f"an item of {key}"))), "")
    return ""


def _type(value: Any) -> str:
    match value:
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "a table"


def _turns(q: Toml) -> Toml:
    """Return the constants by which kernels take turns on a GPU kind.

    Constants that the kind's file does not state are taken from the kind `TURNS_OF`.
    """
    base, stated = _committed(TURNS_OF)["co_run"], q.get("co_run", {})
    if q["kind"] == TURNS_OF:
        return cast("Toml", base)
    source = f"{stated['source']}; else " if stated else ""
    return {**base, **stated, "source": f"{source}from an H200: {base['source']}"}


def over(base: Toml, file: Toml) -> dict[str, Any]:
    """Return the quantities of a GPU kind's `file`, completed by `base`, the quantities of the kind in its `like`.

    If `file` states only a part of a quantity, the rest is taken from `base`, but without the errors.
    """
    merged = dict(base)
    for key, q in file.items():
        inherits = isinstance(q, dict) and key in base
        merged[key] = {**{k: v for k, v in base[key].items() if k not in ERRORS}, **q} if inherits else q
    return merged


def gpu(kind: str, table: str | None = None) -> GpuSpec:
    """Return the specification of a GPU kind. Raises UserError for an unknown kind; the message suggests known ones."""
    if (measured := machine(table)) is not None:
        numbers = {name: getattr(measured.spec, name).value for name in GpuSpec._fields[2:]}
        return GpuSpec(measured.kind, measured.name, **numbers)
    file = _committed(_kind(kind))
    return GpuSpec(file["kind"], file["name"], **{k: file["spec"][k]["value"] for k in GpuSpec._fields[2:]})


def ladder(kind: str, table: str | None = None) -> Mapping[str, Way]:
    """Return the ways to load a model on a GPU kind, with the fixed seconds of each."""
    if machine(table) is None:
        _kind(kind)
    return {name: Way(w["fixed_s"], w["link"], w.get("bytes_s") or math.inf) for name, w in _ladder(table).items()}


def ladder_sources(table: str | None = None) -> Mapping[str, str]:
    """Return the sources of the fixed seconds of each way to load."""
    return {name: str(way["source"]) for name, way in _ladder(table).items()}


def _ladder(table: str | None) -> Toml:
    if (measured := machine(table)) is not None:
        return {name: asdict(rung) for name, rung in measured.ladder.items()}
    ways: Toml = _read(TABLES / "hosts.toml")["ladder"]
    return ways


def hosts() -> tuple[str, ...]:
    """Return the names of the host profiles."""
    return tuple(_read(TABLES / "hosts.toml")["host"])


def _host(name: str, kind: str) -> Toml:
    known = _read(TABLES / "hosts.toml")["host"]
    if name not in known:
        raise UserError(f"unknown host profile {name!r}; known: {', '.join(known)}")
    profile = known[name]
    return {**profile, **profile.get("on", {}).get(_kind(kind), {})}


def host(name: str, kind: str, table: str | None = None) -> HostProfile:
    """Return an engine's host costs on a GPU kind. Raises UserError if they were not measured on that kind.

    The seconds in which the sampler sorts were measured on `SORTED_ON`. On a card with less HBM bandwidth, they are
    multiplied by the ratio of bandwidths. On a machine that was measured whole, steps include the host costs, so that
    only `api_in_s` is above 0.
    """
    if (measured := machine(table)) is not None:
        return HostProfile(
            float(measured.host.api_in_s), 0.0, 0.0, 0.0, serial=True, scale_decode=1.0, scale_prefill=1.0
        )
    q = _host(name, kind)
    if "host0" not in q:
        have = ", ".join(_read(TABLES / "hosts.toml")["host"][name]["on"])
        raise UserError(f'host profile "{name}" was not measured on {_kind(kind)} (it was on: {have})')
    profile = HostProfile(**{k: q[k] for k in HostProfile._fields if k in q or k not in HostProfile._field_defaults})
    return profile._replace(sample_s=profile.sample_s * max(1.0, gpu(SORTED_ON).hbm / gpu(kind).hbm))


def fitted(name: str) -> Sequence[Toml]:
    """Return selectors of the measured rows on which a host profile was fitted.

    Each selector names a `file` and has values by column. A row of that file was used if it has the values of at least
    one selector.
    """
    rows: Sequence[Toml] = _read(TABLES / "hosts.toml")["host"][name].get("rows", ())
    return rows


def held(name: str) -> Mapping[str, Mapping[str, float]]:
    """Return a host profile's errors, by metric, on the measured rows that a refit left out."""
    parts: Toml = _read(TABLES / "hosts.toml")["host"][name].get("held_parts", {})
    return {part.removesuffix(" held"): error for part, error in parts.items() if part.endswith(" held")}


def band(name: str, kind: str) -> Mapping[str, Sequence[float]]:
    """Return the least and the largest value of each constant of a host profile, by name.

    The range is over refits, each of which left out a part of the measured rows.
    """
    ends: Mapping[str, Sequence[float]] = _host(name, kind).get("band", {})
    return ends


def noise(kind: str, host: str, table: str | None = None) -> float:
    """Return the relative spread of a step's seconds around its prediction (1 sigma)."""
    if (measured := machine(table)) is not None:
        return float(measured.host.sigma)
    sigma = _read(TABLES / "hosts.toml")["sigma"]
    return float(_host(host, kind).get("sigma", sigma.get(_kind(kind), sigma["other"])["value"]))


def quantum_s() -> float:
    """Return the least seconds for which a process keeps a GPU when processes take turns on it without MPS."""
    return float(_read(TABLES / "hosts.toml")["turns"]["quantum_s"])


def switching() -> float:
    """Return the seconds of a switch to the next process, as a fraction of a process's time slice.

    The switch is not a part of the slice: its seconds come after those of the slice.
    """
    return float(_read(TABLES / "hosts.toml")["turns"]["switching"])


def poll_s() -> float:
    """Return the seconds that a step spends after each kernel to check whether other GPUs ask it for attention.

    The number is stated under `[poll]` in `hosts.toml`.
    """
    return float(_read(TABLES / "hosts.toml")["poll"]["poll_s"])


def sources(rows: Sequence[tuple[Shape, int]], kind: str, host: str, table: str | None = None) -> list[Source]:
    """List the source of every quantity that `coefficients.tables` uses with the same arguments."""
    if (measured := machine(table)) is not None:
        return _measured_sources(measured)
    q, name, h = quantities(kind, table), _kind(kind), _host(host, kind)
    ops = [op for op in OPS if op != "all_reduce" or any(tp > 1 for _, tp in rows)]
    ops += [op for op in EXCHANGES if any(shape.dp > 1 for shape, _ in rows)]
    out = [Source(f"{name}.{op}", str(q[op]["source"]), q[op]["formula"], error(q[op])) for op in ops]
    turns = q["co_run"]
    out.append(Source(f"{name}.co_run", turns["source"], turns["formula"], error(turns)))
    out.append(Source(f"host {host}", h["source"] + _elsewhere(host, name), h["formula"], error(h)))
    sigma = _read(TABLES / "hosts.toml")["sigma"]
    if "sigma" not in h:
        out.append(Source("noise", sigma.get(name, sigma["other"])["source"], f"sigma {noise(kind, host)}", "-"))
    spec = q["spec"]
    return out + [Source(f"{name}.{k}", spec[k]["source"], f"{spec[k]['value']:g}", "-") for k in GpuSpec._fields[2:]]


def _elsewhere(host: str, kind: str) -> str:
    """Return a note if a host profile's seconds were measured with H100s, and not with `kind`; else ""."""
    file = _read(TABLES / "hosts.toml")["host"][host]
    known = kind in {USUAL, *file.get("on", ())} or not file.get("host0")
    return "" if known else f". Its seconds on the host are those beside {USUAL}, unmeasured beside {kind}"


def _measured_sources(measured: whole.Machine) -> list[Source]:
    parts: Mapping[str, forms.Quantity] = {
        f"host {measured.kind}": measured.host,
        f"{measured.kind}.co_run.prefill": measured.co_run.prefill,
        f"{measured.kind}.co_run.decode": measured.co_run.decode,
        **{f'{measured.kind}.steps."{model}"': steps for model, steps in measured.steps.items()},
    }
    out = [Source(what, q.source, q.formula, error(_stated(q))) for what, q in parts.items()]
    spec = {name: getattr(measured.spec, name) for name in GpuSpec._fields[2:]}
    return out + [Source(f"{measured.kind}.{name}", n.source, f"{n.value:g}", "-") for name, n in spec.items()]


def _stated(q: forms.Quantity) -> Toml:
    """Return a quantity's errors under the keys that a file of a cost table has for them, without empty ones."""
    return {key: value for key in ("fit", "held", "error") if (value := getattr(q, key))}


def error(q: Toml) -> str:
    """Return a quantity's errors in words."""

    def text(e: Toml) -> str:
        return f"median {e['median']:.1%}, P95 {e['p95']:.1%} (n {e['n']})"

    texts = [f"{what} {text(q[key])}" for key, what in (("held", "held out"), ("fit", "fit")) if key in q]
    return "; ".join(texts) or str(q.get("error", "roofline, error unknown"))
