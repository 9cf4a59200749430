"""The law of rounds: how much longer steps take when several lanes run on one GPU. Plain Python, without torch.

A lane is a stream of steps of one model. Kernels of lanes on the same SMs take turns. In its turn, a lane computes one
layer of a prefill, or a fixed number of layers of a decode. Lanes on disjoint partitions of the SMs share clocks, cache
and memory bandwidth. `Rounds` has the constants of a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SWEEPS = 3  # iterations that the fixed point of which lanes are present takes


class Lane(NamedTuple):
    """The properties of a lane that runs alone on its SMs; `duty` and `bandwidth` are fractions of 1."""

    layer_s: float  # GPU seconds of a layer
    prompts: bool  # its steps hold prompts: large GEMMs that fill the SMs
    duty: float = 1.0  # its kernels are on the GPU for this share of its step
    bandwidth: float = 0.0  # its share of the memory's bandwidth
    part: str = ""  # the partition of SMs that it runs on; "": all


class Rounds(NamedTuple):
    """The constants of the law of rounds for a card; the defaults are those of an H200."""

    passes: float = 2.0  # layers of decode in a turn, where a layer of prompts is one
    decode_fill: float = 0.80  # decode kernels keep this share of the GPU's time from others
    prompt_fill: float = 0.96
    apart: float = 1.37  # times as long beside a busy partition
    crowd: float = 1.17  # times the sum of bandwidth shares, if that is more than `apart`


def slowdown(lanes: Sequence[Lane], rounds: Rounds = Rounds()) -> list[float]:  # noqa: B008 - immutable
    """Return each lane's slowdown: the seconds of its step when all lanes run, divided by its seconds alone."""
    turn = [1.0 if lane.prompts else rounds.passes for lane in lanes]
    fill = [rounds.prompt_fill if lane.prompts else rounds.decode_fill for lane in lanes]
    slow = [1.0] * len(lanes)

    def present(k: int) -> float:
        u = lanes[k].duty
        return u * slow[k] / (1 - u + u * slow[k])

    for _ in range(SWEEPS):
        new = []
        for i, lane in enumerate(lanes):
            others = [k for k in range(len(lanes)) if k != i]
            apart = [k for k in others if lane.part and lanes[k].part and lane.part != lanes[k].part]
            met = [k for k in others if k not in apart]
            theirs = sum(present(k) * fill[k] * turn[k] * lanes[k].layer_s for k in met)
            s = max(1.0, fill[i] + theirs / (turn[i] * lane.layer_s))
            if apart:
                asked = lane.bandwidth + sum(lanes[k].bandwidth for k in apart)
                s = max(s, rounds.apart, rounds.crowd * asked)
            new.append(s)
        slow = new
    return [1 - lane.duty + lane.duty * s for lane, s in zip(lanes, slow, strict=True)]
