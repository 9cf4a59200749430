"""A stand-in for a card with DEVICE=cpu: the law of rounds predicts the times of duels, so that duels can be tried.

The seconds of a layer are rounded from the first measurements of an H200. Nothing is measured, and `hello` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probe import law
from probe.duels import Ran, Work

SMS = 132
HBM = 4.8e12  # bytes a second
LAYERS = {"1B": 16, "3B": 28, "8B": 32}
DECODE_S = {"1B": 6.61e-5, "3B": 1.0e-4, "8B": 1.498e-4}  # one layer, one sequence
PREFILL_S = {"1B": 3.0e-4, "3B": 8.0e-4, "8B": 1.701e-3}  # one layer, 2,048 tokens
MIXED = 128  # prompt tokens above which a mixed step counts as one of prompts
ROUNDS = law.Rounds()


def hello() -> dict[str, Any]:
    """Return the facts of a machine; see rig.hello."""
    return {"name": "no card (DEVICE=cpu)", "short": "dry", "sms": SMS, "packages": {}}


def tidy() -> None:
    """Do nothing: there is nothing to clean up."""


def sms(work: Work) -> int:
    """Return the number of SMs of a lane's partition."""
    n = int(work.part.rstrip("-") or SMS)
    return SMS - n if work.part.endswith("-") else n


def layer_s(work: Work) -> float:
    """Return the seconds of one layer of a lane that runs alone on its partition.

    The seconds of a prefill layer are inversely proportional to the number of SMs. So are those of a decode layer on
    less than half of the card's SMs; on more SMs they are constant.
    """
    share = sms(work) / SMS
    if work.act in {"spin", "copy"}:
        return 1e-3
    if work.act == "decode":
        return float(DECODE_S[work.of] * (1 + 0.008 * (work.size - 1)) * max(1.0, 0.5 / share))
    return float(PREFILL_S[work.of] * max(0.1, (work.size + 32 * (work.act == "mixed")) / 2048) / share)


def prompts(work: Work) -> bool:
    """Tell whether the law of rounds counts a lane's steps as prefills.

    These are prefills, and mixed steps of more than MIXED tokens.
    """
    return work.act == "prefill" or (work.act == "mixed" and work.size > MIXED)


def build(work: Work, twin: int) -> float:
    """Return a tiny number of seconds, because there is nothing to prepare (see Device)."""
    assert twin >= 0
    assert work.act in {"decode", "prefill", "mixed", "spin", "copy"}
    return 1e-6


def duel(cell: Sequence[tuple[Work, int]], seconds: float) -> list[Ran]:
    """Return lanes with the seconds that the law of rounds predicts (see Device)."""
    alone = [_alone(work) for work, _ in cell]
    slow = law.slowdown([lane for lane, _ in alone], ROUNDS)
    out = []
    for (work, _), (_, unit_s), times in zip(cell, alone, slow, strict=True):
        out.append(Ran([unit_s * times] * max(2, min(100, int(seconds / (unit_s * times)))), sms(work)))
    return out


def _alone(work: Work) -> tuple[law.Lane, float]:
    busy_s = layer_s(work) * facts(work)["layers"]
    unit_s = busy_s + 1e-3 * work.gap_ms
    bandwidth = facts(work)["bytes"] / busy_s / HBM
    return law.Lane(layer_s(work), prompts(work), busy_s / unit_s, bandwidth, work.part), unit_s


def timeline(cell: Sequence[tuple[Work, int]], seconds: float) -> list[tuple[int, str, float, float]]:
    """Return kernels as if lanes took turns on the GPU (see Device).

    In a turn, a lane computes one layer of prefill or two layers of decode. Each layer is one kernel.
    """
    events, now = list[tuple[int, str, float, float]](), 0.0
    while now < seconds:
        for k, (work, _) in enumerate(cell):
            for _ in range(1 if prompts(work) else 2):
                events.append((k, f"{work.act} layer", now, layer_s(work)))
                now += layer_s(work)
    return events


def facts(work: Work) -> dict[str, float]:
    """Return the number of layers in a lane's unit, and the bytes that the unit reads and writes (see Device)."""
    layers = LAYERS.get(work.of, 1)
    per_layer = {"decode": 0.7 * DECODE_S.get(work.of, 0.0), "copy": 0.9e-3}.get(work.act, 1e-5)
    return {"layers": layers, "bytes": HBM * layers * per_layer}


def clocks() -> dict[str, float]:
    """Return no clocks, as there is no card (see Device)."""
    return {}
