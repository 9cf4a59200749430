"""Specs: a spec describes a run by its system, machine, workload and numbers. Its hash is in the run's name.

A `Spec` has plain values only. The code that looks up a system, trace or GPU checks whether it exists. `None` stands
for "not decided yet" (the trace's whole span, the profile's noise, ...). In a resolved spec, only a few fields may be
None. These are the preset, the cost table, a closed loop's window, the longest request, and a prefix cache if no ids
are known. Memory of the card, of the process and of the host, and link rates may be None too. The machine's own values
are then used.

If a spec leaves open the tokens and sequences of a step and the share of the card, the host profile's release sets them
(`engines/costs/servers.toml`). Results store the hashes of resolved specs only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from harness import toml
from harness.engines.costs.constants import CONSTANTS, GONE
from harness.loop import meaning, strangers
from harness.policy import fields
from harness.policy.fields import meant
from harness.policy.types import Option, UserError
from harness.rows.sealed import Facts
from harness.toml import TABLE, Count, Natural, Pairs, Positive, Seconds, Share, Span
from workloads import checkpoint
from workloads.models import with_files
from workloads.usual import TRACE, WORLD, memory

LINKS = ("pcie_gbps", "nvlink_gbps", "net_gbps", "disk_gbps")
# Fields that a figure may name.
MACHINE = ("gpu", "host", "process", "process_bytes", "pool_bytes", "host_bytes", "sharing", *LINKS)
HASH_CHARS = 8
# Limits that a run can hold in memory: links are between GPUs, and a sequence of a batch takes 1.3 kB of state.
MOST_GPUS = 4096
MOST_BATCH = 1 << 16
Rate = Annotated[float, Gt(0), Le(1e6)]  # 1e9 bytes/s: up to a petabyte in a second
UNSAID: Mapping[str, Any] = {  # fields that a spec's JSON leaves out where they have these values
    "served": None,
    "prefix_cache": None,
    "sharing": "own",
    "assign": "released",
    "placement": "",
    "homes": (),
    "pool_bytes": None,
    "host_bytes": None,
    "profile": "",
    "sampling": "checkpoint",
    "admission": "prompt",
}
# Fields that may name a file, and how its name ends (`slo`: classes:FILE).
FILES: Mapping[str, str] = {
    "system": ".py",
    "engine": ".py",
    "models": ".toml",
    "table": ".toml",
    "placement": ".toml",
    "slo": ".toml",
    "trace": ".parquet",
    "profile": ".json",
}
# Ending of an engine's field that names an environment variable: it locates a key and changes no run.
UNHASHED = "_env"


@dataclass(frozen=True, slots=True)
class Spec:
    """The description of a run. Raises UserError, naming the key, for a value of the wrong type or out of range."""

    system: str  # name in systems/, or the path of a .py
    preset: str | None = None  # preset of the system
    fields: Pairs[Option] = ()  # fields of the system, sorted
    # NAME[:PRESET][+FIELD=VALUE...] of harness/engines/, or the path of a .py in its place
    engine: str = WORLD["engine"]
    gpu: str = WORLD["gpu"]  # a kind, or a mix of kinds (policy/mix.py), of which `gpus` is a whole number of copies
    gpus: Annotated[int, Ge(1), Le(MOST_GPUS)] = WORLD["gpus"]  # how many
    node_gpus: Annotated[int, Ge(1), Le(MOST_GPUS)] = 8  # GPUs of a node
    models: str = WORLD["models"]  # a set of workloads/sets/, the path of a .toml, or models by name or path
    trace: str = TRACE  # name in traces/manifest.toml, or the path of a .parquet
    trace_sha256: str = ""  # digest of the rows replayed
    # Longest prompt + output that is served; None: as the trace needs.
    served: Annotated[int, Ge(2), Le(toml.MOST_INT)] | None = None
    prefix_cache: bool | None = None  # None: on where the trace tells ids of prompts' blocks; else there is none
    workload: Literal["trace", "base"] = "trace"  # "base": as SLO bases are measured
    rate_scale: Positive = 1.0  # multiple of the trace's rate
    # how the rate is scaled: copies of each stream, at different offsets (rotate) or none (replicate); shorter gaps
    # (time); more clients (clients); not at all (none)
    scaling: Literal["none", "rotate", "replicate", "time", "clients"] = "rotate"
    seed: Natural = 0  # seed of all draws
    window_s: Span | None = None  # None: the trace's span; of a closed loop, all of it
    warmup_s: Seconds | None = None  # None: 60 s, or 5 % of the span if that is longer; a loop's first wave
    drain_s: Seconds | None = None  # seconds of the run after the window; None: until all have ended
    slo: str = "5xP95"  # "" where the system reads none: then it is applied when rows are scored
    slo_s: Annotated[tuple[tuple[str, Positive, Positive], ...], TABLE] = ()  # (model, TTFT, TPOT), resolved
    # requests that offline planners see; of a replayed trace also the choice of the window
    plan: Literal["held-out", "window", "trace", "prefix"] = "held-out"
    # streams go to models as the set says, by the seed, or stratified over squares of seeds
    assign: Literal["released", "shuffled", "square"] = "released"
    # one for all: a TOML of GPUs by model, the system whose start it is, "first-fit" or "random"; "": each its own
    placement: str = ""
    homes: Pairs[Annotated[tuple[Natural, ...], MinLen(1)]] = ()  # (model, GPUs), resolved
    host: str = "vllm-0.15"  # host profile
    # Tokens are sampled by a checkpoint's defaults, whose top-p and top-k engines may sort for; or greedily: that sorts
    # nothing, also wherever all rows of the trace say so.
    sampling: Literal["checkpoint", "greedy"] = "checkpoint"
    table: str | None = None  # path of a cost table that replaces committed quantities
    profile: str = ""  # path of a JSON of measured steps that policies see; "": they see the cost table's
    pcie_gbps: Rate | None = None  # GPU and host, 1e9 bytes/s each way; None: the card's
    nvlink_gbps: Rate | None = None  # GPU to GPU
    net_gbps: Rate | None = None  # across nodes
    disk_gbps: Rate | None = None  # GB/s of a node's disk
    scaled: Pairs[Positive] = ()  # constants of the machine and their factors, sorted; 1 is left out
    block_tokens: Count = 16  # tokens of a KV block
    # most sequences of a step; None: as the host profile's server on this card
    batch_cap: Annotated[int, Ge(1), Le(MOST_BATCH)] | None = None
    chunk_tokens: Natural | None = None  # tokens of a step with chunked prefill, 0: whole prompts; None: as that server
    prefill_tokens: Count | None = None  # most prompt tokens of a step, where prompts go whole; None: as that server
    watermark: Annotated[float, Ge(0), Le(1)] = 0.01  # share of KV memory that admission of a prompt leaves free
    # KV that a prompt needs to be let in: its own, its next piece's, or up to its last token; None: as the server
    admission: Literal["prompt", "chunk", "output"] | None = None
    mem_fraction: Share | None = None  # share of the card that engines may use; None: as that server
    process: Literal["own", "model"] = "own"  # processes as the system's engine has them, or one a model for all
    process_bytes: Natural | None = None  # bytes of each beside weights; None: from its parts
    pool_bytes: Count | None = None  # bytes a GPU has for weights and KV beside processes; None: mem_fraction sets them
    host_bytes: Natural | None = None  # bytes of a node's memory for weights, others lie on its disk; None: it has all
    sharing: Literal["own", "fluid", "turns"] = "own"  # how processes share a GPU: the system's way, or one for all
    decision_s: Seconds | None = None  # None: DECISION_S of the system's file
    control_s: Seconds | None = None  # None: one call of the engine's API
    noise: Annotated[float, Ge(0), Le(10)] | None = None  # None: the profile's residual spread
    token_times: bool = False  # store the time of each token
    measured_on: str = ""  # the machine behind a `real` or `emulated` run; "" where time is simulated

    def __post_init__(self) -> None:
        for name, value in toml.checked(self).items():
            object.__setattr__(self, name, value)
        if gone := next((name for name, _ in self.scaled if name in GONE), None):
            raise UserError(f"scaled.{gone} is no constant any more: {GONE[gone]}")
        if unknown := next((name for name, _ in self.scaled if name not in CONSTANTS), None):
            raise UserError(f'scaled has no constant "{unknown}"{meant(unknown, CONSTANTS)} ({", ".join(CONSTANTS)})')
        if self.scaling == "none" and self.rate_scale != 1:
            raise UserError(f'rate_scale is {self.rate_scale:g}: scaling "none" takes the trace as it is, at 1')
        object.__setattr__(self, "fields", tuple(sorted(self.fields)))
        object.__setattr__(self, "slo_s", tuple(sorted(self.slo_s)))
        object.__setattr__(self, "homes", tuple(sorted(self.homes)))
        object.__setattr__(self, "scaled", tuple(sorted((name, by) for name, by in self.scaled if by != 1)))

    @property
    def label(self) -> str:
        """The strategy's name in tables and figures: `static`, `static:equal`, `chunked+tau=256`."""
        stem = Path(self.system).stem if self.system.endswith(".py") else self.system
        return stem + (f":{self.preset}" if self.preset else "") + "".join(f"+{k}={v}" for k, v in self.fields)

    @property
    def folder(self) -> str:
        """The run's folder: `static-3f9c01ab`."""
        return f"{self.label.split(':')[0].split('+')[0]}-{self.hash8}"

    @property
    def hash8(self) -> str:
        """The hash that identifies the run: the first digits of the SHA-256 of `canonical`."""
        return digest(canonical(self))


def canonical(spec: Spec) -> str:
    """Serialize a spec as JSON: files by their content, not path; sorted keys, no spaces, no NaN or infinity."""
    return json.dumps(by_content(as_dict(spec)), sort_keys=True, separators=(",", ":"), allow_nan=False)


def by_content(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each file's path in a spec's fields by the hash of its content; names of shipped objects stay."""
    named = dict(values)
    for key, suffix in FILES.items():
        name = named.get(key) or ""
        if key == "engine":
            given = fields.asked(name)
            if given.name.endswith(suffix):
                named[key] = str(given._replace(name=_content(given.name)))
        elif name.endswith(suffix):
            rule, colon, path = name.rpartition("classes:")
            named[key] = f"{rule}{colon}{_content(path)}"
    if "models" in named:
        named["models"] = with_files(named["models"], _checkpoint)
    return named


def _checkpoint(path: str) -> str:
    """Return an identity for a checkpoint: the hash of the data read from it, or its path if it cannot be read."""
    try:
        return sha256(repr(checkpoint.read(path)).encode()).hexdigest()
    except UserError:
        return path


def _content(path: str) -> str:
    """Return an identity for a file: the digest of its meaning and its ending, or its path if the file is missing.

    For a trace this is its ending alone, because a trace's rows have a hash of their own.
    """
    file = Path(path)
    if file.suffix == ".parquet":
        return file.suffix
    if not file.is_file():
        return path
    try:
        return f"{meaning.digest(file)}{file.suffix}"
    except UserError:  # not Python, which is reported where it is loaded; stored runs are found by this hash too
        return f"{content_hash(file, file.stat().st_mtime_ns)}{file.suffix}"


@cache
def content_hash(path: Path, stamp: int) -> str:  # noqa: ARG001 - the stamp is part of the key
    """Return the SHA-256 of a file."""
    return sha256(path.read_bytes()).hexdigest()


def digest(text: str) -> str:
    """Return the hash by which runs and sweeps are named."""
    return sha256(text.encode()).hexdigest()[:HASH_CHARS]


def as_dict(spec: Spec) -> dict[str, Any]:
    """Return a spec's fields as JSON values; `from_dict` reads them back."""
    plain = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    plain["engine"] = _identity(spec.engine)
    if not spec.measured_on:
        del plain["measured_on"]  # a simulated run is the same wherever it is made
    for name, default in UNSAID.items():
        if plain[name] == default:
            del plain[name]  # as in specs from before the field existed
    plain["scaled"] = dict(spec.scaled)
    if not spec.scaled:
        del plain["scaled"]
    return (
        plain
        | {"fields": dict(spec.fields), "slo_s": {model: [ttft_s, tpot_s] for model, ttft_s, tpot_s in spec.slo_s}}
        | ({"homes": {model: list(gpus) for model, gpus in spec.homes}} if spec.homes else {})
    )


def _identity(engine: str) -> str:
    """Return the text for an engine without the fields that do not change its runs."""
    given = fields.asked(engine)
    kept = {name: value for name, value in given.fields.items() if not name.endswith(UNHASHED)}
    return str(given._replace(fields=kept))


def from_dict(values: Mapping[str, Any], where: str = "") -> Spec:
    """Build a spec from TOML or JSON values. The message of UserError begins with `where`.

    For an unknown key, the message suggests a known one.
    """
    return toml.convert(values, Spec, where)


def stored(values: Mapping[str, Any]) -> Spec:
    """Rebuild the spec of a stored run. If `values` are facts of a file, the message of UserError names that file."""
    where = f"{values.where}: " if isinstance(values, Facts) else ""
    return from_dict({"admission": UNSAID["admission"], **values}, where)  # stored without it: this, not the server's


def read(path: Path) -> Spec:
    """Read a user's spec from a TOML file, with `usual.memory`; UserError names the file and the key or line."""
    given = toml.tables(path)
    made = from_dict({**given, **memory(given)}, f"{path}: ")
    strangers.name(made.system, made.engine)
    return made


def asked(text: str) -> dict[str, Any]:
    """Parse NAME[:PRESET][+FIELD=VALUE...] to system, preset and fields of a spec.

    Raises UserError for a field without a value.
    """
    given = fields.asked(text)
    return {"system": given.name, "preset": given.preset, "fields": dict(given.fields)}


def another(spec: Spec, text: str) -> Spec:
    """Return the spec with another system, preset and fields, as `text` names them (see `asked`)."""
    other = from_dict({"trace": spec.trace, **asked(text)})
    return replace(spec, system=other.system, preset=other.preset, fields=other.fields)
