"""The verdict on a run: whether its times are those of its devices and, if not, what disturbed the devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

MOST_CORES = 0.05  # share of a core that the run's process may take, and of each core that other processes may
SHARE_OFF = 0.10  # most difference between the share of a device that a lane got and the one it asked for
LEAST_S = 0.5  # seconds of steps that a lane needs for its share to be judged


class Share(NamedTuple):
    """A lane with a share of its device: the share asked for, and the CPU and wall-clock seconds of its steps."""

    model: str
    asked: float
    spent_s: float
    all_s: float

    @property
    def got(self) -> float:
        """The share of the device that the lane's steps really had."""
        return self.spent_s / self.all_s

    @property
    def text(self) -> str:
        """The share that the lane had, and the share asked for, in words."""
        return f"{self.model} got {self.got:.0%} of its device, asked were {self.asked:.0%}"


def verdict(here: float, others: float, cores: int, devices: int, lanes: Iterable[Share]) -> dict[str, Any]:
    """Judge whether a run's times are those of its devices, by processor load and by the shares that lanes had.

    `here` is the number of cores that the run's main process kept busy. `others` is the number of cores that processes
    outside the engine kept busy.
    """
    shares = [share for share in lanes if share.all_s >= LEAST_S]
    reasons = list(_reasons(here, others, cores, devices, shares))
    text = f"own process {here:.1%} of a core, others {others:.1%}" + "".join(f", {share.text}" for share in shares)
    return {
        "text": f"invalid: {'; '.join(reasons)}" if reasons else f"valid: {text}",
        "reasons": reasons,
        "policy_core": here,
        "other_cores": others,
        "shares": [[s.model, s.asked, s.got] for s in shares],
    }


def _reasons(here: float, others: float, cores: int, devices: int, shares: Iterable[Share]) -> Iterator[str]:
    limit = f"of a core, the limit {MOST_CORES:.0%}"
    if here > MOST_CORES:
        yield f"the run's own process took {here:.1%} {limit}"
    if others > MOST_CORES * cores:
        yield f"other processes took {others:.1%} {limit} of each of {cores}"
    yield from (share.text for share in shares if abs(share.got - share.asked) > SHARE_OFF)
    if devices > cores:
        yield f"{devices} devices share {cores} cores"
