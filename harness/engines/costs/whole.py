"""A machine that was measured whole: its server was timed from outside, as `bench calibrate ENGINE` does.

Its table has all numbers that price a run, and replaces the GPU kind and the host profile of the run:

    kind, name           of the machine: one word, and the name of its card or processor
    [settings]           fields of a spec, as set for the measurement; a run uses them unless its spec states others
    [spec.FIELD]         `value` and `source` of every number of `GpuSpec`
    [host]               `api_in_s`: seconds before a request is queued; `sigma`: spread of steps around the table
    piece_bytes          bytes that a link copies before a more urgent copy can take over; if absent, as on a GPU
    [networks."SHAPE"]   dimensions of the smaller network that is served under a shape's name, if there is one
    [pages]              pages of elastic KV: `buffer_bytes`, a page's bytes in each layer, once for K and once for V;
                         `kept`, the number of pages that a model keeps mapped while its weights are in
    [steps."SHAPE"]      steps of a model
    [co_run.PHASE]       PHASE is `prefill` (steps with prompt tokens) or `decode` (steps without). `share`: the part
                         of the machine that a step needs; `factor`: see below; `duty`, by shape: the part of a
                         step's seconds in which its kernels run
    [co_run.turns]       only for a GPU whose kernels take turns (`forms.Turns`)
    [ladder.WAY]         `fixed_s` of a start or wake, and its `link`

    step = seconds(m) + seq_s (B + n) + ctx_s C + area_s area                  (m, B, n, C, area: coef.py)

`seconds` is a table over `tokens`, linear between them and beyond the last two. Measurements from outside cannot tell
host time from GPU time, so no host time counts as hidden. If k servers run steps at the same time, each step takes 1 +
factor (max(1, k share) - 1) times as long as alone. A factor above 1 is fitted if servers slow each other down more
than shares of 1 explain; their `share` is then 1.

Without [co_run.turns], the steps of different servers take turns of equal length, as a scheduler gives them. With
[co_run.turns], their kernels take turns. Steps then have the fills of that section, and a duty of share / fill unless a
duty is stated. If lanes can get parts of the machine (`sm_step` below `sms`), a step on a share s of the machine takes
1 / s times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from harness.engines.costs import shapes
from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.forms import Number, Quantity, Text, Turns
from harness.policy.types import Option, Shape, UserError
from harness.toml import Gt, Le, MinLen

SAID = ("source", "formula")
Positive = Annotated[int, Gt(0)]
Setting = Literal["block_tokens", "batch_cap", "chunk_tokens", "prefill_tokens", "pool_bytes", "sharing"]


@dataclass(frozen=True, slots=True)
class Value:
    """A number of a GPU's specification, with its source."""

    value: Number
    source: Text


@dataclass(frozen=True, slots=True)
class Network:
    """A section [networks."SHAPE"]: fields of `Shape`."""

    layers: Positive
    hidden: Positive
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive
    ffn: Positive
    vocab: Positive
    number_bytes: Literal[2, 4]  # bytes of a weight and a number of KV: bf16 or float32


@dataclass(frozen=True, slots=True)
class Pages:
    """The section [pages]: the pages of elastic KV memory."""

    buffer_bytes: Positive
    kept: Number


@dataclass(frozen=True, slots=True)
class Card:
    """The numbers of `GpuSpec` in a file of a cost table, each in a section [spec.FIELD]."""

    mem_bytes: Value
    sms: Value
    sm_step: Value
    flops: Value
    hbm: Value
    h2d: Value
    d2h: Value
    nvlink: Value
    net: Value
    disk: Value
    host_bytes: Value


@dataclass(frozen=True, kw_only=True)
class Host(Quantity):
    """The section [host]: the seconds before a request is queued, and the spread of steps around the table."""

    api_in_s: Number
    sigma: Number


@dataclass(frozen=True, kw_only=True)
class Steps(Quantity):
    """A section [steps."SHAPE"]: the seconds of a model's steps."""

    tokens: Annotated[tuple[int, ...], MinLen(2)]
    seconds: tuple[Number, ...]
    seq_s: Number
    ctx_s: Number
    area_s: Number

    def __post_init__(self) -> None:
        if self.tokens[0] != 1 or sorted({*self.tokens}) != [*self.tokens]:
            raise ValueError("tokens must rise from 1")
        if len(self.seconds) != len(self.tokens):
            raise ValueError("seconds must hold a number for each of its tokens")
        if self.seconds[0] == 0 or sorted(self.seconds) != [*self.seconds]:
            raise ValueError("seconds must be above 0, and never fall")


@dataclass(frozen=True, kw_only=True)
class Beside(Quantity):
    """A section [co_run.PHASE]: a step's share of the machine, and the slowdown by steps that run at the same time."""

    share: Annotated[int | float, Gt(0), Le(1)]
    factor: Number
    duty: Mapping[str, Annotated[int | float, Gt(0), Le(1)]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CoRun:
    """The sections under [co_run]: the shares, slowdowns and turns of steps that run at the same time."""

    prefill: Beside
    decode: Beside
    turns: Turns | None = None


@dataclass(frozen=True, slots=True)
class Rung:
    """A section [ladder.WAY]: the seconds and the link of a way to load."""

    fixed_s: Number
    link: Literal["pcie", "disk", "spread"]
    source: Text
    bytes_s: Annotated[int | float, Gt(0)] | None = None  # None: as fast as the link


@dataclass(frozen=True, slots=True)
class Machine:
    """The table of a machine that was measured whole; the module's docstring describes its sections."""

    kind: Text  # one word, in figures
    name: Text  # name of the card or processor
    spec: Card
    host: Host
    steps: Annotated[Mapping[str, Steps], MinLen(1)]  # times of steps, keyed by shape
    co_run: CoRun
    ladder: Mapping[str, Rung]  # ways to load, keyed by rung
    settings: Mapping[Setting, Option] = field(default_factory=dict)  # fields of a spec that hold on this machine
    networks: Mapping[str, Network] = field(default_factory=dict)
    pages: Pages | None = None
    piece_bytes: Positive | None = None  # size of a copy's piece, which no other overtakes; none: as on a GPU

    def served(self, shape: Shape) -> Shape:
        """Return the network served under a shape's name: the one in `networks` if there is one, else `shape`."""
        network = self.networks.get(shape.name)
        if network is None:
            return shape
        dimensions = asdict(network)
        numbers = dimensions.pop("number_bytes")
        dense = shape._replace(
            **dimensions, experts=None, latent=None, sliding=None, keys_as_values=False, other_bytes=0
        )
        return shapes.in_numbers(dense, numbers)


def is_whole(file: Mapping[str, Any]) -> bool:
    """Tell whether a table describes a machine of its own, rather than quantities of a GPU kind."""
    return "spec" in file or "steps" in file


def tables(rows: Sequence[tuple[Shape, int]], machine: Machine) -> Tables:
    """Return coefficients of (shape, tensor-parallel degree) pairs on a machine that was measured whole.

    Raises UserError for a model that was not measured there, and for a model on several GPUs.
    """
    steps = machine.steps
    for shape, tp in rows:
        if shape.dp > 1 or shape.ep > 1:
            raise UserError(f"{machine.kind} was measured whole, without {shapes.beyond_dense(shape)} ({shape.name})")
        if shape.name not in steps:
            raise UserError(f'{machine.kind} has no steps."{shape.name}" (measured were: {", ".join(steps)})')
        if tp != 1:
            raise UserError(f"{machine.kind} was measured on one GPU, and {shape.name} is cut over {tp}")
    grid = np.array(sorted({m for shape, _ in rows for m in steps[shape.name].tokens}), dtype=np.int64)
    cost, gemm = np.zeros(len(rows), COST), np.empty((len(rows), len(grid)))
    for i, (shape, _) in enumerate(rows):
        fitted, c = steps[shape.name], cost[i]
        gemm[i] = _lines(grid, fitted.tokens, fitted.seconds)
        c["host1"], c["serial"], c["dec2"], c["pre2"] = fitted.seq_s, 1, fitted.ctx_s, fitted.area_s
        c["pre_x"] = 1.0
        _set_turns(c, machine.co_run, shape.name)
        c["flops"], c["hbm"] = 1.0, 1.0
        c["layers"] = shape.layers
        c["query_bytes"] = shapes.BF16 * shape.layers * shape.head_dim * (shape.q_heads + 2 * shape.kv_heads)
        c["result_bytes"] = shapes.BF16 * shape.layers * shape.head_dim * shape.q_heads
    sms, parted = int(machine.spec.sms.value), machine.spec.sm_step.value < machine.spec.sms.value
    share = np.arange(1, sms + 1) / sms if parted else np.ones(1)
    rate = np.tile(share, (len(rows), 1))
    parts = np.array([np.concatenate(shapes.parts_by_weights(shape)) for shape, _ in rows])
    kernels = np.tile(parts[:, None], (1, len(grid), 1))
    return Tables(cost, grid, gemm, 0.0 * gemm, share, np.ones(1), rate[:, :, None], rate, kernels)


def _set_turns(c: np.void, co_run: CoRun, model: str) -> None:
    """Set the coefficients by which a row's steps take turns: kernel by kernel, or in a scheduler's equal turns."""
    turns = co_run.turns
    c["passes"], c["apart"], c["many"], c["equal"] = 1.0, 1.0, 1.0, turns is None
    if turns is not None:
        c["passes"], c["apart"], c["crowd"] = turns.passes, turns.apart, turns.crowd
        c["few"], c["many"] = turns.few_tokens, turns.many_tokens
    fills = (turns.prompt_fill, turns.decode_fill) if turns else (None, None)
    for phase, beside, fill in zip(("pre", "dec"), (co_run.prefill, co_run.decode), fills, strict=True):
        c[f"{phase}_fill"] = beside.share if fill is None else fill
        c[f"{phase}_duty"] = beside.duty.get(model, min(1.0, beside.share / (fill or beside.share)))
        c[f"{phase}_slow"] = beside.factor


def _lines(x: np.ndarray[Any, np.dtype[np.int64]], tokens: Sequence[int], seconds: Sequence[float]) -> Any:
    """Return the seconds at `x`, interpolated linearly between the points of `tokens`.

    Beyond the last point they continue the line through the last two.
    """
    slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
    return np.interp(x, tokens, seconds) + slope * np.maximum(0, x - tokens[-1])
