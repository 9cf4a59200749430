"""Lower bounds of the GPU seconds that each kind of work takes in the steps of a cost table.

A step keeps other steps from its GPU for fill x kernel seconds (docs/semantics.md, Sharing a GPU). `Least` bounds this
time from below by a sum over the step's tokens and members. Added up over many steps, these bounds become sums over
requests.

Let E be the number of members that get a token in the step. Let p be the number of the step's prompt tokens, without
the last token of each prompt that the step completes. Let N be any number >= E, and `part` any of CUTS. Then

    fill x kernel seconds >= part x token_s p + (member_s(N) + head_s) E + seconds of the members' attention

A GEMM has a floor (the reading of weights) and a slope, and no single pair of prices is tight for both. So CUTS has
three values of `part`, and each gives a valid bound. Each prompt token is charged 1, 0.5 or 0 times the least seconds
of a token (`token_s`). What is left of the GEMMs' least seconds is charged to the members (`member_s`).

Tables are linear between grid points, so the least value of a ratio lies at a grid point. Fill rises with the prompt
tokens; each interval between grid points uses the fill of its lower end. No value is sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.coef import Tables

F8 = NDArray[np.float64]
CUTS = (1.0, 0.5, 0.0)  # parts of a token's least seconds that a prompt's tokens are charged


class Least(NamedTuple):
    """Lower bounds of the GPU seconds of work, from one row of a cost table; waits for the host are left out.

    GPU seconds are sums over all `tp` GPUs of the row's group.
    """

    token_s: float  # seconds that a token adds to a step, whatever else is in it
    member_s: F8  # (cuts, cap + 1) by N: of a member of a step that has at most N of them, its tokens of prompts aside
    head_s: float  # seconds that a sampled token adds
    decode_s: tuple[float, float]  # a token's attention takes the first, and the second for each token of its context
    piece_s: tuple[float, float, float]  # of a prompt's attention: once, for each new token, for each token^2 of area
    flop_s: tuple[float, float]  # seconds of the GPU's FLOP/s that a token, and a token^2 of area, take
    hbm_s: tuple[float, float]  # seconds of its bandwidth that the weights once, and a token of context, take
    wall_s: tuple[float, float]  # a step takes the first on the clock, and the second for each new token of a prompt
    duty: float  # the least part of a step in which its kernels run
    slow: float  # the least factor of the time that others add to a step, at most 1


def least(t: Tables, k: int, tp: int, cap: int, token_s: float | None = None) -> Least:
    """Return the lower bounds of row k, for a group of `tp` GPUs and steps of at most `cap` members.

    `token_s` is the seconds of one prompt token; each of CUTS charges prompts a fraction of these seconds. If None, the
    row's own least seconds of a token are used; a value passed must not exceed them. For bounds that are valid for
    several rows, pass the smallest of the rows' own values in each call.
    """
    c, gemm, head = t.cost[k], t.gemm[k], t.head[k]
    duties = [float(c[name]) for name in ("pre_duty", "dec_duty") if c[name] > 0.0]
    duty = min([1.0, *duties])
    here = _fill(c, np.zeros(1))[0] * duty  # any step keeps at least this part of its kernel seconds
    most = float(t.grid[-1])
    points = np.unique(np.concatenate([t.grid, cap + np.ceil([c["few"], c["many"]])])).astype(np.float64)
    each, fill = _at(t, gemm, points) / points, duty * _fill(c, np.maximum(0.0, points - cap))
    pieces = fill[:-1] * np.minimum(each[:-1], each[1:])
    lowest = float(min(pieces.min(initial=np.inf), fill[0] * each[0], fill[-1] * min(each[-1], _slope(t, gemm))))
    charged = lowest if token_s is None else token_s / tp
    members = np.arange(1.0, cap + 1)[:, None]
    edges = np.array([0.0, float(c["few"]), float(c["many"]), most])
    p = np.sort(np.concatenate([np.maximum(0.0, t.grid - members), np.tile(edges, (cap, 1))], axis=1), axis=1)
    whole = _at(t, gemm, p + members)
    filled = duty * _fill(c, p)
    by_cut = []
    for part in CUTS:
        left = filled[:, :-1] * whole[:, :-1] - part * charged * p[:, :-1]
        right = filled[:, :-1] * whole[:, 1:] - part * charged * p[:, 1:]
        low = np.minimum(left, right).min(axis=1) / members[:, 0]
        by_cut.append(np.concatenate([[np.inf], np.minimum.accumulate(np.maximum(0.0, low))]))
    seen = 1.0 if (busy := _duty(t, k, cap)) >= 1.0 else 0.5  # spans are shared at the power of two below their context
    floor = float(_at(t, gemm, np.ones(1))[0] + _at(t, head, np.ones(1))[0])
    floor += min(float(max(c["att0"] + c["att1"], c["dec0"] + c["dec1"])), float(c["pre0"] + c["pre1"]))
    host = float(c["host0"] + c["host1"])
    return Least(
        token_s=tp * lowest,
        member_s=tp * np.array(by_cut),
        head_s=tp * here * _ratio(t, head),
        decode_s=(tp * here * float(c["dec1"]), tp * here * seen * float(c["dec2"])),
        piece_s=(tp * here * float(c["pre0"]), tp * here * float(c["pre1"]), tp * here * float(c["pre2"])),
        flop_s=(
            tp * min(lowest, float(c["fl_tok"] / c["flops"])),
            tp * min(here * float(c["pre2"]), float(c["fl_area"] / c["flops"])),
        ),
        hbm_s=(
            tp * here * min(float(_at(t, gemm, np.ones(1))[0]), float(c["wbytes"] / c["hbm"])),
            tp * here * seen * min(float(c["dec2"]), float(c["kbytes"] / c["hbm"])),
        ),
        wall_s=(floor + host if c["serial"] else max(floor, host), _ratio(t, gemm)),
        duty=busy,
        slow=float(min(1.0, c["pre_slow"], c["dec_slow"])),
    )


def _fill(c: np.void, p: F8) -> F8:
    """Return the least fraction of the GPU's time that a step of `p` or more prompt tokens keeps from other steps."""
    few, many = float(c["few"]), float(c["many"])
    w = np.where((p > 0) & (p >= many), 1.0, np.clip((p - few) / max(many - few, 1e-300), 0.0, 1.0) * (p > few))
    fill: F8 = np.minimum(c["dec_fill"] + w * (c["pre_fill"] - c["dec_fill"]), c["pre_fill"])
    return fill


def _duty(t: Tables, k: int, cap: int) -> float:
    """Return the smallest fraction of a step's seconds in which its kernels run, among steps of 1 to `cap` members.

    The cost table may state the fraction. Otherwise it is computed from the host's seconds for E members and the least
    seconds of their kernels. These kernels are GEMMs of E tokens and, for each member, a sampled token or a piece of a
    prompt.
    """
    c = t.cost[k]
    stated = [float(c[name]) for name in ("pre_duty", "dec_duty")]
    if min(stated) > 0.0:
        return min(1.0, *stated)
    members = np.arange(1.0, cap + 1)
    each = min(_ratio(t, t.head[k]) + float(c["dec1"]), float(c["pre0"] + c["pre1"]))
    gpu, host = _at(t, t.gemm[k], members) + each * members, c["host0"] + c["host1"] * members
    part = gpu / (gpu + host if c["serial"] else np.maximum(gpu, host))
    return min(1.0, *(duty for duty in stated if duty > 0.0), float(part.min()))


def _ratio(t: Tables, f: F8) -> float:
    """Return the least value of f(m) / m over m >= 1."""
    return float(min((f / t.grid).min(), _slope(t, f)))


def _slope(t: Tables, f: F8) -> float:
    """Return the seconds that `f` grows by with each token beyond the end of the grid."""
    return float((f[-1] - f[-2]) / (t.grid[-1] - t.grid[-2]))


def _at(t: Tables, f: F8, m: F8) -> F8:
    """Return `f` at `m`, which is at least 1.

    `f` is linear between grid points. Beyond the last point it continues the line through the last two.
    """
    values: F8 = np.interp(m, t.grid, f) + _slope(t, f) * np.maximum(0.0, m - t.grid[-1])
    return values
