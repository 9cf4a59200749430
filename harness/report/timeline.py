"""The timeline of one request: its waits and steps, in lines whose parts sum to its latency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.policy.types import GIB
from harness.report.causes import CAUSES

if TYPE_CHECKING:
    from harness.policy.types import Inst

SHOWN_NS = 50_000  # shorter parts round to 0.0000 s and are not shown
COUNTED = ("prefill", "decode")  # their waits between steps are counted, not listed
CARRYING = {"absent_s": "not asked for", "grant_s": "waiting for memory", "link_s": "on its links", "tail_s": "then"}


class Part(NamedTuple):
    """A part of a request's time, in whole nanoseconds from the window's start. `ns` sums to its length."""

    doing: str  # host, admission, load, transfer, queue, prefill or decode
    start_ns: int
    end_ns: int
    ns: Mapping[str, int]  # by cause (record.WAITS), and "closed": the part of "queue" with no lane open
    gaps: int = 0  # of prefill and decode: waits between their steps
    inst: Inst | None = None
    facts: Mapping[str, float] = {}  # of its wait: bytes, prompts ahead, seconds of transfers


def folded(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent parts of one kind; a queue between two stretches of like steps is joined with them.

    All else keeps its order: a queue behind the last prefill, or before a recompute, stays in its place.
    """
    kept: list[Part] = []
    for part in parts:
        kept.append(part)
        gap = 0
        if len(kept) > 2 and part.doing in COUNTED and (kept[-3].doing, kept[-2].doing) == (part.doing, "queue"):
            gap = 1
        elif len(kept) < 2 or (kept[-2].doing, kept[-2].inst) != (part.doing, part.inst):
            continue
        joined = kept[-2 - gap :]
        del kept[-2 - gap :]
        ns = summed(stretch.ns for stretch in joined)
        facts = {**joined[-1].facts, **joined[0].facts}
        gaps = gap + sum(stretch.gaps for stretch in joined)
        kept.append(Part(part.doing, joined[0].start_ns, part.end_ns, ns, gaps, joined[0].inst, facts))
    return kept


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum the nanoseconds of several parts by cause."""
    total: dict[str, int] = {}
    for ns in parts:
        for cause, value in ns.items():
            total[cause] = total.get(cause, 0) + value
    return total


def by_cause(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum nanoseconds by the causes of record.WAITS; time before a closed lane counts as queue."""
    total = summed(parts)
    if "closed" in total:
        total["queue"] = total.get("queue", 0) + total.pop("closed")
    return total


def made_of(ns: Mapping[str, int]) -> str:
    """Render causes with their seconds and shares, the longest first; one below a ten-thousandth is left out."""
    total = sum(ns.values())
    longest = sorted(((value, cause) for cause, value in ns.items() if value > total / 10_000), key=lambda x: -x[0])
    return ", ".join(
        f"{CAUSES[cause].phrase} {value / 1e9:.4g} s ({100 * value / total:.0f} %)" for value, cause in longest
    )


def lines(parts: Sequence[Part], stamps: Iterable[tuple[str, int]], arrival_ns: int) -> Iterator[str]:
    """Yield a line for each part that shows in 0.1 ms, and for each stamp, by seconds since the arrival."""
    told = [(ns, 0, f"{(ns - arrival_ns) / 1e9:10.4f} s  {name}") for name, ns in stamps]
    told += [(part.start_ns, 1, _line(part, arrival_ns)) for part in parts if part.end_ns - part.start_ns >= SHOWN_NS]
    yield from (f"  {line}" for _, _, line in sorted(told, key=lambda entry: entry[:2]))


def _line(part: Part, arrival_ns: int) -> str:
    name = part.doing
    if name == "queue":
        waited = [cause for cause in ("kv", "queue") if by_cause([part.ns]).get(cause)]
        name = waited[0] if len(waited) == 1 else "queue"
    took = f"{(part.start_ns - arrival_ns) / 1e9:10.4f} s    {name:<10}{(part.end_ns - part.start_ns) / 1e9:10.4f} s"
    details = "; ".join(_details(part))
    return f"{took}  {details}".rstrip()


def _details(part: Part) -> Iterator[str]:
    ns, facts = part.ns, part.facts
    place = "" if part.inst is None else f" {_place(part.inst)}"
    if part.doing in COUNTED:
        yield ", ".join(
            f"{CAUSES[cause].phrase} {ns.get(cause, 0) / 1e9:.4f} s"
            for cause in ("compute", "time_slice", "contention")
            if cause == "compute" or ns.get(cause)
        )  # fmt: skip
    if part.doing in {*COUNTED, "queue"}:
        waits = {CAUSES["kv"].phrase: ns.get("kv", 0), CAUSES["queue"].phrase: ns.get("queue", 0)}
        waits["its lane closed"] = ns.get("closed", 0)
        named = {name: value for name, value in waits.items() if value}
        if part.gaps:
            yield f"{part.gaps} waits between steps"
        if part.doing != "queue" or len(named) > 1 or ns.get("closed"):
            yield from (f"{name} {value / 1e9:.4f} s" for name, value in named.items())
    if "ahead" in facts:
        yield f"behind {facts['ahead']:.0f} prompts of its batch" if facts["ahead"] else "first of its batch's prompts"
    if "need_bytes" in facts:
        free = f"{facts['free_bytes'] / GIB:.3g} GiB free on{place}"
        if "limit_bytes" in facts:
            free = (
                f"{facts['used_bytes'] / GIB:.3g} of its limit of {facts['limit_bytes'] / GIB:.3g} GiB in use, {free}"
            )
        yield f"its prompt takes {facts['need_bytes'] / GIB:.3g} GiB of KV, {free}"
    if part.doing in {"load", "transfer"}:
        if facts.get("size_bytes"):
            yield f"{facts['size_bytes'] / GIB:.3g} GiB"
        yield from (f"{name} {facts[key]:.4f} s" for key, name in CARRYING.items() if facts.get(key, 0.0) > 5e-5)


def _place(inst: Inst) -> str:
    place: Any = inst.place
    return f"gpu {'+'.join(map(str, place))}" if isinstance(place, tuple) else f"host {place.node}"
