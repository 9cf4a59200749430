"""The cost profile that policies query: seconds of steps, kernels, loads and moves, computed from the cost tables."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from harness.engines.costs import shapes
from harness.engines.costs.coef import COST, Tables
from harness.engines.costs.kernels import decode_s, layer_kernels_s, part_of
from harness.engines.costs.quantities import F8, GpuSpec, Toml, Way
from harness.policy.parameters import alike
from harness.policy.types import Gpus, Host, Inst, Shape, UserError


class Row(NamedTuple):
    """A row of `Tables`.

    Values that are needed for each single step are Python numbers, since numpy's take ten times as long to read.
    """

    cost: Mapping[str, float]
    grid: list[int]
    gemm: list[float]
    head: list[float]
    share: F8
    seqs: F8
    dec_rate: F8
    pre_rate: F8


def row(t: Tables, i: int) -> Row:
    """Return row i of coefficient tables."""
    numbers = dict(zip(COST.names or (), t.cost[i].item(), strict=True))
    grid, gemm, head = (x.tolist() for x in (t.grid, t.gemm[i], t.head[i]))
    return Row(numbers, grid, gemm, head, t.share, t.seqs, t.dec_rate[i], t.pre_rate[i])


def step_s(r: Row, B: int = 0, C: float = 0, p: int = 0, n: int = 0, area: float = 0, out: int | None = None) -> float:
    """Return the seconds of a step alone on its GPUs, by the formula of `coef`; `out` defaults to B + n."""
    c = r.cost
    gemm_s = _at(r.grid, r.gemm, B + p) * (c["pre_x"] if n else 1.0)
    gpu_s = gemm_s + _at(r.grid, r.head, B + n if out is None else out) + attend_s(r, B, C)
    if n:
        gpu_s += c["pre0"] * n + c["pre1"] * p + c["pre2"] * area
    host_s = c["host0"] + c["host1"] * (B + n)
    return float(gpu_s + host_s if c["serial"] else max(gpu_s, host_s))


def attend_s(r: Row, B: int, C: float) -> float:
    """Return the seconds of all layers' decode attention in a step, by the formula of `coef`."""
    c = r.cost
    return max(c["att0"] + c["att1"] * B, c["dec0"] + c["dec1"] * B + c["dec2"] * C) if B else 0.0


def _at(grid: list[int], f: list[float], x: int) -> float:
    """Return `f` at `x`; f(0) = 0.

    `f` is linear between grid points. Beyond the last point it continues the line through the last two.
    """
    if x <= 0:
        return 0.0
    i = min(bisect_right(grid, x) - 1, len(grid) - 2)
    return f[i] + (f[i + 1] - f[i]) * (x - grid[i]) / (grid[i + 1] - grid[i])


@dataclass(frozen=True, slots=True)
class TableProfile:
    """`types.Profile` over cost tables: seconds of work alone on its GPUs and on idle links, without host API time."""

    rows: Mapping[tuple[str, int], Row]  # (model, tensor-parallel degree) maps to its row
    spec: GpuSpec
    ladder: Mapping[str, Way]
    weight_bytes: Mapping[tuple[str, int], int]  # per GPU
    shapes: Mapping[str, Shape]
    quantities: Toml  # the rows are made from them; they divide a step's seconds among its kernels
    node_gpus: int = 8
    # A layer's kernels by (model, degree, sequences), kept once computed: each takes 1 ms, and Weaver asks often.
    layers: dict[tuple[str, int, int], tuple[list[float], list[float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Speeds of decode steps at the shares of SMs by (model, degree, sequences), likewise.
    rates: dict[tuple[str, int, int], list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        """Return the seconds of a prefill of one prompt alone on its GPUs."""
        r = self._row(inst)
        solo = step_s(r, p=tokens, n=1, area=tokens * tokens / 2)
        if sms is None:
            return solo
        return solo / float(np.interp(sms / self.spec.sms, r.share, r.pre_rate))

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Return the seconds of a decode step of `seqs` sequences with `ctx_tokens` tokens of context in all."""
        r = self._row(inst)
        solo = step_s(r, B=seqs, C=ctx_tokens)
        if sms is None:
            return solo
        key = inst.model, _tp(inst), seqs
        if key not in self.rates:
            self.rates[key] = [float(np.interp(seqs, r.seqs, rates)) for rates in r.dec_rate]
        return solo / float(np.interp(sms / self.spec.sms, r.share, self.rates[key]))

    def attend_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """Return the seconds of one layer's attention in the decode step that `step_s` prices, alone on its GPUs."""
        shape, tp = self.shapes[inst.model], _tp(inst)
        solo = attend_s(self._row(inst), seqs, ctx_tokens) / shape.layers
        if sms is None or seqs == 0:
            return solo
        if not self.quantities:  # measured whole
            return solo / float(np.interp(sms / self.spec.sms, self._row(inst).share, self._row(inst).pre_rate))
        shape = alike(shape)[-1]
        heads, kv = shapes.heads_of(shape, tp)
        at = self.quantities["decode"], self.spec, seqs, ctx_tokens / seqs, heads, kv, shape.head_dim
        part = part_of(self.quantities["share"], np.array(sms / self.spec.sms))
        return solo * max(1.0, float(decode_s(*at, part) / decode_s(*at)))

    def kernels_s(self, inst: Inst, seqs: int, ctx_tokens: int) -> tuple[float, ...]:
        """Return the seconds of each kernel of a decode step, layer by layer, then the LM head; see `layer_kernels_s`.

        The cost table has only the sum of a layer's kernels without attention, scaled to its engine. The sum is divided
        among the kernels in proportion to the seconds that the quantities give each. On a machine that was measured
        whole (`whole.py`), it is divided in proportion to the kernels' weights.
        """
        if seqs == 0:
            return ()
        r, shape = self._row(inst), self.shapes[inst.model]
        if self.quantities:
            key = inst.model, _tp(inst), seqs
            if key not in self.layers:
                parts = layer_kernels_s(self.quantities, self.spec, shape, key[1], seqs)
                self.layers[key] = [*map(float, parts[0])], [*map(float, parts[1])]
            before, after = self.layers[key]
        else:
            before, after = shapes.parts_by_weights(shape)
        scale = _at(r.grid, r.gemm, seqs) / shape.layers / (sum(before) + sum(after))
        attention_s = self.attend_s(inst, seqs, ctx_tokens)
        layer = [*(scale * s for s in before), attention_s, *(scale * s for s in after)]
        return (*(layer * shape.layers), _at(r.grid, r.head, seqs))

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        """Return the seconds of a `Load` by `way` on idle links.

        With `from_disk`, the weights are not in host memory and come from the disk.
        """
        if way not in self.ladder:
            raise UserError(f"unknown way to load {way!r}; known: {', '.join(self.ladder)}")
        fixed_s, link, _ = rung = self.ladder[way]
        tp = _tp(inst)
        size = self.weight_bytes[inst.model, tp]
        if from_disk and link != "disk":
            rate = min(self.spec.h2d, self.spec.disk / tp)
            return size / rate + rung.after_s(size, rate)
        match link:
            case "pcie":
                return size / self.spec.h2d + rung.after_s(size, self.spec.h2d)
            case "disk":
                return fixed_s + size * tp / self.spec.disk
            case "spread":  # parts cross PCIe while each GPU gathers what others have brought
                part = size * tp / self.node_gpus
                return fixed_s + max(part / self.spec.h2d, (size - part) / self.spec.nvlink)

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        """Return the seconds to move KV on an idle link."""
        if isinstance(src, Host) or isinstance(dst, Host):
            return kv_bytes / (self.spec.h2d if isinstance(src, Host) else self.spec.d2h)
        same = src // self.node_gpus == dst // self.node_gpus
        return kv_bytes / (self.spec.nvlink if same else self.spec.net)

    def _row(self, inst: Inst) -> Row:
        return self.rows[inst.model, _tp(inst)]


@dataclass(frozen=True, slots=True)
class MixedProfile:
    """`types.Profile` over GPUs of several kinds: the seconds of an instance are those of its GPUs' kind.

    A host has the profile of the first GPU of its node. KV moves between GPUs at the rate of the sending GPU.
    """

    on: Sequence[TableProfile]  # one per GPU
    nodes: Sequence[int]  # one per GPU

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        """See `Profile`."""
        return self._of(inst.place).prefill_s(inst, tokens, sms)

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """See `Profile`."""
        return self._of(inst.place).step_s(inst, seqs, ctx_tokens, sms)

    def attend_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        """See `Profile`."""
        return self._of(inst.place).attend_s(inst, seqs, ctx_tokens, sms)

    def kernels_s(self, inst: Inst, seqs: int, ctx_tokens: int) -> tuple[float, ...]:
        """See `Profile`."""
        return self._of(inst.place).kernels_s(inst, seqs, ctx_tokens)

    def load_s(self, inst: Inst, way: str, *, from_disk: bool = False) -> float:
        """See `Profile`."""
        return self._of(inst.place).load_s(inst, way, from_disk=from_disk)

    def move_s(self, kv_bytes: int, src: int | Host, dst: int | Host) -> float:
        """See `Profile`."""
        gpu = dst if isinstance(src, Host) else src
        sending = self.on[gpu] if isinstance(gpu, int) else self._of(gpu)
        if isinstance(src, Host) or isinstance(dst, Host):
            return sending.move_s(kv_bytes, src, dst)
        return kv_bytes / (sending.spec.nvlink if self.nodes[src] == self.nodes[dst] else sending.spec.net)

    def _of(self, place: Gpus | Host) -> TableProfile:
        return self.on[self.nodes.index(place.node) if isinstance(place, Host) else place[0]]


def _tp(inst: Inst) -> int:
    return 1 if isinstance(inst.place, Host) else len(inst.place)
