"""One run as one value: what is run, on what, with which numbers. Its hash is the run's name.

A `Spec` holds plain values only; whether a system, trace or GPU of that name exists is asked where it is looked up.
`None` stands for "not decided yet" (the trace's whole span, the profile's noise, ...); a resolved spec has none left
but the preset, the cost table, a closed loop's window, the longest request, a prefix cache where no ids are known, and
the memory and link rates that are the card's and the process's own; only a resolved one is hashed into results.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from harness.engines.costs.constants import CONSTANTS
from harness.policy import fields
from harness.policy.fields import meant
from harness.policy.types import Option, UserError

SCALINGS = ("none", "rotate", "replicate", "time", "clients")
PLANS = ("held-out", "window", "trace", "prefix")
ASSIGNS = ("released", "shuffled")
WORKLOADS = ("trace", "base")
PROCESSES = ("own", "model")
SHARINGS = ("own", "fluid", "turns")
LINKS = ("pcie_gbps", "nvlink_gbps", "net_gbps", "disk_gbps")
MACHINE = ("gpu", "host", "process", "process_bytes", "pool_bytes", "sharing", *LINKS)  # what a figure may name
HASH_CHARS = 8
UNSAID: Mapping[str, Any] = {  # fields that a spec leaves out where they stand at these defaults
    "served": None, "prefix_cache": None, "sharing": "own", "assign": "released", "placement": "", "homes": (),
    "pool_bytes": None,
}  # fmt: skip
# Keys of an earlier release, and the fields of engines that they are now.
MOVED = {"attach": "attach+urls", "key_env": "attach+key_env", "keep_s": "llamacpp+keep_s"}
# Ends the name of an engine's field that names an environment variable: where a key is, not what is run.
UNHASHED = "_env"


class Bound(NamedTuple):
    """The range of a number: at least `least`, or above it; at most `most`."""

    least: float = -math.inf
    most: float = math.inf
    open: bool = False

    def admits(self, value: float) -> bool:
        """Tell whether the value lies inside."""
        return (value > self.least if self.open else value >= self.least) and value <= self.most

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"in {'(' if self.open else '['}{self.least:g}, {self.most:g}]"
        return f"above {self.least:g}" if self.open else f"at least {self.least:g}"


NUMBER = Bound()
COUNT = Bound(1)
NATURAL = Bound(0)
POSITIVE = Bound(0, open=True)
SHARE = Bound(0, 1, open=True)


def _in(bound: Bound, default: Any) -> Any:
    return field(default=default, metadata={"bound": bound})


def _of(choices: Iterable[str], default: str) -> Any:
    return field(default=default, metadata={"choices": tuple(choices)})


@dataclass(frozen=True, slots=True)
class Spec:
    """A run. Raises UserError, naming the key, for a value of the wrong type or out of range."""

    system: str  # of systems/, or the path of a .py
    preset: str | None = None
    fields: tuple[tuple[str, Option], ...] = ()  # of the system, sorted
    engine: str = "sim"  # NAME[:PRESET][+FIELD=VALUE...] of harness/engines/, or the path of a .py in its place
    gpu: str = "h100"
    gpus: int = _in(COUNT, 2)
    node_gpus: int = _in(COUNT, 8)
    models: str = "heavy8"  # a set of workloads/sets/, the path of a .toml, or shapes
    trace: str = "arena-chat"  # of traces/manifest.toml, or the path of a .parquet
    trace_sha256: str = ""  # of the rows replayed
    served: int | None = _in(Bound(2), None)  # longest prompt + output that is served; None: as the trace needs
    prefix_cache: bool | None = None  # None: on where the trace tells ids of prompts' blocks; else there is none
    workload: str = _of(WORKLOADS, "trace")  # "base": as SLO bases are measured
    rate_scale: float = _in(POSITIVE, 1.0)
    scaling: str = _of(SCALINGS, "rotate")
    seed: int = _in(NATURAL, 0)
    window_s: float | None = _in(POSITIVE, None)  # None: the trace's span; of a closed loop, all of it
    warmup_s: float | None = _in(NATURAL, None)  # None: 60 s, or 5 % of the span if that is longer; a loop's first wave
    drain_s: float | None = _in(NATURAL, None)  # how long the run goes on after the window; None: until all have ended
    slo: str = "5xP95"  # "" where the system reads none: then it is applied when rows are scored
    slo_s: tuple[tuple[str, float, float], ...] = ()  # (model, TTFT, TPOT), resolved
    plan: str = _of(PLANS, "held-out")  # what offline planners see; of a replayed trace also what the window holds
    assign: str = _of(ASSIGNS, "released")  # of streams to models: as the set says, or drawn by the seed
    placement: str = ""  # one for all: a TOML of GPUs by model, or the system whose start it is; "": each its own
    homes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (model, GPUs), resolved
    host: str = "vllm-0.15"
    table: str | None = None  # path of a cost table that replaces committed quantities
    pcie_gbps: float | None = _in(POSITIVE, None)  # GPU and host, 1e9 bytes/s each way; None: the card's
    nvlink_gbps: float | None = _in(POSITIVE, None)  # GPU to GPU
    net_gbps: float | None = _in(POSITIVE, None)  # across nodes
    disk_gbps: float | None = _in(POSITIVE, None)  # of a node
    scaled: tuple[tuple[str, float], ...] = ()  # constants of the machine and their factors, sorted; 1 is left out
    block_tokens: int = _in(COUNT, 16)
    batch_cap: int = _in(COUNT, 256)
    chunk_tokens: int = _in(NATURAL, 2048)
    prefill_tokens: int = _in(COUNT, 16384)
    watermark: float = _in(Bound(0, 1), 0.01)
    mem_fraction: float = _in(SHARE, 0.90)
    process: str = _of(PROCESSES, "own")  # processes as the system's engine has them, or one a model for all
    process_bytes: int | None = _in(NATURAL, None)  # what each holds beside weights; None: from its parts
    pool_bytes: int | None = _in(COUNT, None)  # of a GPU for weights and KV, processes beside it; None: by mem_fraction
    sharing: str = _of(SHARINGS, "own")  # of a GPU by processes: the system's way, or one for all
    decision_s: float | None = _in(NATURAL, None)  # None: DECISION_S of the system's file
    control_s: float | None = _in(NATURAL, None)  # None: one call of the engine's API
    noise: float | None = _in(NATURAL, None)  # None: the profile's residual spread
    token_times: bool = False
    measured_on: str = ""  # the machine behind a `real` or `emulated` run; "" where time is simulated

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            object.__setattr__(self, name, _checked(name, kind, getattr(self, name)))
        if self.scaling == "none" and self.rate_scale != 1:
            raise UserError(f'rate_scale is {self.rate_scale:g}: scaling "none" takes the trace as it is, at 1')
        object.__setattr__(self, "fields", tuple(sorted(self.fields)))
        object.__setattr__(self, "slo_s", tuple(sorted(self.slo_s)))
        object.__setattr__(self, "homes", tuple(sorted(self.homes)))
        object.__setattr__(self, "scaled", tuple(sorted((name, by) for name, by in self.scaled if by != 1)))

    @property
    def label(self) -> str:
        """How tables and figures name the strategy: `static`, `static:equal`, `chunked+tau=256`."""
        stem = Path(self.system).stem if self.system.endswith(".py") else self.system
        return stem + (f":{self.preset}" if self.preset else "") + "".join(f"+{k}={v}" for k, v in self.fields)

    @property
    def folder(self) -> str:
        """The run's folder: `static-3f9c01ab`."""
        return f"{self.label.split(':')[0].split('+')[0]}-{self.hash8}"

    @property
    def hash8(self) -> str:
        """The identity: the first digits of the SHA-256 of `canonical`."""
        return digest(canonical(self))


def canonical(spec: Spec) -> str:
    """JSON with sorted keys and no spaces; floats as Python reads them back, no NaN or infinity."""
    return json.dumps(as_dict(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """The hash by which runs and sweeps are named."""
    return sha256(text.encode()).hexdigest()[:HASH_CHARS]


def as_dict(spec: Spec) -> dict[str, Any]:
    """The fields as JSON values; `from_dict` reads them back."""
    plain = dataclasses.asdict(spec)
    plain["engine"] = _identity(spec.engine)
    if not spec.measured_on:
        del plain["measured_on"]  # a simulated run is the same wherever it is made
    for name, default in UNSAID.items():
        if plain[name] == default:
            del plain[name]  # as it was before there was a choice
    plain["scaled"] = dict(spec.scaled)
    if not spec.scaled:
        del plain["scaled"]
    return (
        plain
        | {
            "fields": dict(spec.fields),
            "slo_s": {model: [ttft_s, tpot_s] for model, ttft_s, tpot_s in spec.slo_s},
        }
        | ({"homes": {model: list(gpus) for model, gpus in spec.homes}} if spec.homes else {})
    )


def _identity(engine: str) -> str:
    """An engine as asked for, without what does not change its runs."""
    given = fields.asked(engine)
    kept = {name: value for name, value in given.fields.items() if not name.endswith(UNHASHED)}
    return str(given._replace(fields=kept))


def from_dict(values: Mapping[str, Any]) -> Spec:
    """A spec from TOML or JSON values. Raises UserError for an unknown key, with a suggestion."""
    if moved := next((key for key in values if key in MOVED), None):
        raise UserError(f'{moved} is a field of the engine: engine = "{MOVED[moved]}=VALUE", or --engine the same')
    if unknown := next((key for key in values if key not in _KINDS), None):
        raise UserError(f'unknown key "{unknown}"{meant(unknown, _KINDS)}')
    if "system" not in values:
        raise UserError('the key "system" is missing, as in system = "static"')
    found = dict(values)
    found["fields"] = tuple(_table("fields", found.get("fields", {})).items())
    found["scaled"] = tuple(_table("scaled", found.get("scaled", {})).items())
    pairs = _table("slo_s", found.get("slo_s", {}))
    if bad := next((m for m, pair in pairs.items() if not isinstance(pair, list | tuple) or len(pair) != 2), None):
        raise UserError(f'slo_s."{bad}" is {pairs[bad]!r}, not [TTFT, TPOT] in seconds')
    found["slo_s"] = tuple((model, *pair) for model, pair in pairs.items())
    found["homes"] = tuple(_table("homes", found.get("homes", {})).items())
    return Spec(**found)


def stored(values: Mapping[str, Any]) -> Spec:
    """The spec of a stored run, also of one that was made when fields of engines had keys of their own."""
    given = {MOVED[key].partition("+")[2]: values[key] for key in MOVED if values.get(key)}
    rest = {key: value for key, value in values.items() if key not in MOVED}
    if given:
        rest["engine"] = str(fields.Asked(rest["engine"], fields=given))
    return from_dict(rest)


def read(path: Path) -> Spec:
    """A spec from a TOML file; UserError names the file and the key or line."""
    try:
        return from_dict(tomllib.loads(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def asked(text: str) -> dict[str, Any]:
    """NAME[:PRESET][+FIELD=VALUE...] as system, preset and fields of a spec; UserError for a field without a value."""
    given = fields.asked(text)
    return {"system": given.name, "preset": given.preset, "fields": dict(given.fields)}


def another(spec: Spec, text: str) -> Spec:
    """The same run of another system, as `asked` names it."""
    one = from_dict({"trace": spec.trace, **asked(text)})
    return replace(spec, system=one.system, preset=one.preset, fields=one.fields)


# ------------------------------------------------------------------ checks


class _Kind(NamedTuple):
    kind: type[Any]
    optional: bool
    bound: Bound
    choices: tuple[str, ...]


def _kinds() -> dict[str, _Kind]:
    hints = get_type_hints(Spec)
    found = {}
    for one in dataclasses.fields(Spec):
        parts = get_args(hints[one.name])
        optional = type(None) in parts
        kind = parts[0] if optional else hints[one.name]
        kind = kind if isinstance(kind, type) else tuple
        found[one.name] = _Kind(kind, optional, one.metadata.get("bound", NUMBER), one.metadata.get("choices", ()))
    return found


WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _checked(name: str, want: _Kind, value: Any) -> Any:
    if want.kind is tuple:
        checks: Mapping[str, Callable[[Any], Any]] = {
            "fields": _option,
            "slo_s": _seconds,
            "scaled": _factors,
            "homes": _places,
        }
        return checks[name](value)
    if value is None and want.optional:
        return None
    if want.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not want.kind:
        raise UserError(f"{name} is {value!r}, not {WORDS[want.kind]}")
    if isinstance(value, str) and want.choices and value not in want.choices:
        raise UserError(f'{name} is "{value}"{meant(value, want.choices)} ({", ".join(want.choices)})')
    if isinstance(value, int | float) and not (math.isfinite(value) and want.bound.admits(value)):
        raise UserError(f"{name} is {value!r}, not {want.bound}")
    return value


def _option(pairs: tuple[tuple[str, Option], ...]) -> tuple[tuple[str, Option], ...]:
    for name, value in pairs:
        if type(value) not in WORDS or (isinstance(value, float) and not math.isfinite(value)):
            raise UserError(f"fields.{name} is {value!r}, not a number, string or truth value")
    return tuple(pairs)


def _seconds(rows: tuple[tuple[str, float, float], ...]) -> tuple[tuple[str, float, float], ...]:
    for model, *pair in rows:
        if any(type(x) not in {int, float} or not math.isfinite(x) or x <= 0 for x in pair):
            raise UserError(f'slo_s."{model}" is {pair!r}, not two numbers of seconds above 0')
    return tuple((model, float(ttft_s), float(tpot_s)) for model, ttft_s, tpot_s in rows)


def _factors(pairs: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    for name, by in pairs:
        if name not in CONSTANTS:
            raise UserError(f'scaled has no constant "{name}"{meant(name, CONSTANTS)} ({", ".join(CONSTANTS)})')
        if type(by) not in {int, float} or not (math.isfinite(by) and by > 0):
            raise UserError(f"scaled.{name} is {by!r}, not a factor above 0")
    return tuple((name, float(by)) for name, by in pairs)


def _places(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    for model, gpus in pairs:
        if not isinstance(gpus, list | tuple) or not gpus or any(type(g) is not int or g < 0 for g in gpus):
            raise UserError(f'homes."{model}" is {gpus!r}, not a list of GPUs, as in [0]')
    return tuple((model, tuple(gpus)) for model, gpus in pairs)


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}, not a table ([{name}])")
    return value


_KINDS = _kinds()
