"""The waits and steps of one request in order of time. Their nanoseconds by cause sum to the request's latency."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from harness.policy.types import Inst

COUNTED = ("prefill", "decode")  # their waits between steps are counted, not listed


class Part(NamedTuple):
    """A part of a request's time, in whole nanoseconds from the window's start.

    The values of `ns` sum to its length.
    """

    doing: str  # host, admission, load, transfer, queue, prefill or decode
    start_ns: int
    end_ns: int
    ns: Mapping[str, int]  # keyed by cause (record.WAITS), and "closed": the part of "queue" with no lane open
    gaps: int = 0  # counts the waits between steps of a prefill or decode
    inst: Inst | None = None
    facts: Mapping[str, float] = {}  # facts about its wait: bytes, prompts ahead, seconds of transfers


def folded(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent parts of one kind. A queue between two prefill or two decode parts is joined with them.

    Other parts keep their order. A queue after the last prefill, or before a repeated prefill, remains a part of its
    own.
    """
    merged: list[Part] = []
    for part in parts:
        merged.append(part)
        gap = 0
        if len(merged) > 2 and part.doing in COUNTED and (merged[-3].doing, merged[-2].doing) == (part.doing, "queue"):
            gap = 1
        elif len(merged) < 2 or (merged[-2].doing, merged[-2].inst) != (part.doing, part.inst):
            continue
        joined = merged[-2 - gap :]
        del merged[-2 - gap :]
        ns = summed(stretch.ns for stretch in joined)
        facts = {**joined[-1].facts, **joined[0].facts}
        gaps = gap + sum(stretch.gaps for stretch in joined)
        merged.append(Part(part.doing, joined[0].start_ns, part.end_ns, ns, gaps, joined[0].inst, facts))
    return merged


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum the nanoseconds of several parts by cause."""
    total: dict[str, int] = {}
    for ns in parts:
        for cause, value in ns.items():
            total[cause] = total.get(cause, 0) + value
    return total


def by_cause(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum nanoseconds by the causes of record.WAITS. Time in the queue while no lane is open counts as queue."""
    total = summed(parts)
    if "closed" in total:
        total["queue"] = total.get("queue", 0) + total.pop("closed")
    return total
