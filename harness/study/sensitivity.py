"""Sensitivity of the order of two systems to constants of the hardware: the stored leads, and a caption on them.

One constant at a time is changed. SLOs keep the seconds that they have with the unchanged constants. `varying` runs the
changes. The table is stored next to that of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.rows import record
from harness.rows.estimate import Estimate
from harness.rows.sealed import Damaged
from harness.rows.stored import LEADS
from harness.study.constants import TURNS, Constant

if TYPE_CHECKING:
    import pyarrow as pa


class Lead(NamedTuple):
    """The lead of the first system under one change of a constant. If the lead is unknown, `note` has the reason."""

    constant: Constant
    setting: str
    lead: Estimate | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Leads:
    """The lead of one system over another, with the unchanged constants and under each change of a constant.

    It is a difference of attainment at one rate.
    """

    first: str
    second: str
    definition: str
    rate_scale: float
    base: Estimate
    rows: tuple[Lead, ...]

    def order(self, lead: Estimate) -> int:
        """Return 1 if the whole interval of the lead is above 0, -1 if it is below 0, and 0 if it contains 0."""
        return (lead.low is not None and lead.low > 0.0) - (lead.high is not None and lead.high < 0.0)

    def swing(self, constant: str) -> float:
        """Compute the largest minus the smallest lead, over the changes of a constant and its unchanged value."""
        seen = [self.base.mean, *(row.lead.mean for row in self.rows if row.constant.name == constant and row.lead)]
        return max(seen) - min(seen)

    @property
    def ranked(self) -> list[Constant]:
        """The constants by falling swing; those that were not varied are last."""
        tried = {row.constant.name for row in self.rows if row.lead}
        every = dict.fromkeys(row.constant for row in self.rows)
        return sorted(every, key=lambda constant: (constant.name not in tried, -self.swing(constant.name)))


# ------------------------------------------------------------------ the stored table


def read(folder: Path) -> Leads | None:
    """Read the sensitivity stored next to a comparison's table; return None if none is stored for that table."""
    path = folder / record.SENSITIVITY
    with suppress(FileNotFoundError, Damaged):  # an unreadable file counts as none
        about = LEADS.current(path, {"sweep": key_of(folder / record.SWEEP)})
        if about and len(about["rates"]) == 1:  # 0.3.0 could store a lead over several rates
            return leads_in(about, LEADS.read(path))
    return None


def key_of(table: Path) -> str:
    """Return the key that distinguishes a comparison's table from another of the same name."""
    return str(record.footer(table)["key"])


def leads_in(about: Mapping[str, Any], table: pa.Table) -> Leads:
    """Build the leads from a stored table and its metadata."""
    base, *rows = table.to_pylist()

    def lead(row: Mapping[str, Any]) -> Estimate | None:
        return None if row["mean"] is None else Estimate(*(row[x] for x in ("mean", "low", "high", "n", "sign")))

    known = (Constant(row["constant"], row["means"], row["value"], row["source"]) for row in rows)
    start = lead(base)
    assert start is not None
    changes = [Lead(of, row["setting"], lead(row), row["note"]) for of, row in zip(known, rows, strict=True)]
    (rate_scale,) = about["rates"]
    return Leads(about["first"], about["second"], about["definition"], rate_scale, start, tuple(changes))


# ------------------------------------------------------------------ in words


def lines(leads: Leads) -> Iterator[str | Sequence[Sequence[str]]]:
    """Yield a table of the leads by falling swing, then the meaning, value and source of each constant."""
    what = f"SLO attainment ({leads.definition}) at rate scale {leads.rate_scale:g}"
    yield f"lead of {leads.first} over {leads.second} in {what}, and its 95 % interval"
    cells = [("constant", "value", "change", "lead points", "", "swing")]
    cells.append(("as it is", "", "", _text(leads.base), "", ""))
    for constant in leads.ranked:
        name, value, swing = constant.name, constant.value, _swing(leads, constant.name)
        for row in leads.rows:
            if row.constant == constant and row.lead:
                cells.append((name, value, row.setting, _text(row.lead), _turn(leads, row.lead), swing))
                name = value = swing = ""
    yield cells
    for row in leads.rows:
        if row.note:
            name = row.constant.name
            yield f"{name} {row.setting}: {row.note}" if row.setting else f"{name}: not varied, {row.note}"
    yield from (f"{constant.name}: {constant.means}, {constant.value} ({constant.source})" for constant in leads.ranked)
    yield sentence(leads)


def sentence_of(folder: Path) -> str:
    """Return a caption on the sensitivity stored next to a comparison's table; empty if none is stored."""
    leads = read(folder)
    return "" if leads is None else sentence(leads)


def sentence(leads: Leads) -> str:
    """Return a caption on the lead of the first system.

    It says which constants reverse the order of the two systems, and which constant moves the lead most.
    """
    at = f"at rate scale {leads.rate_scale:g}"
    lead = f"the lead of {leads.first} over {leads.second} {at}, {_text(leads.base)} points,"
    tried = [(row, row.lead) for row in leads.rows if row.lead]
    if not tried:
        return f"Sensitivity: {lead} was tested with no constant."
    names = ", ".join(dict.fromkeys(row.constant.name for row, _ in tried))
    before = leads.order(leads.base)
    by_order: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    for row, value in tried:
        by_order[leads.order(value)].append(f"{row.constant.name} {row.setting} ({_text(value)})")
    if before:
        turned = by_order[-before]
        clause = f"is reversed by {_list(turned)}" if turned else "is reversed by no constant"
        clause += f"; it is not significant with {_list(by_order[0])}" if by_order[0] else ""
    else:
        decided = by_order[1] + by_order[-1]
        clause = f"is not significant, but is with {_list(decided)}" if decided else "is never significant"
    most = leads.ranked[0].name
    why = "".join(f" ({row.setting}: {row.note})" for row, _ in tried if row.constant.name == most and row.note)
    swing = f"Largest swing: {most}, {_swing(leads, most)}{why}."
    unknown = dict.fromkeys(
        row.constant.name for row, value in tried if row.constant.name in TURNS and leads.order(value) != before
    )
    verdict = f" Undecided (?): the order turns with {_list([*unknown])}, known on one GPU alone." if unknown else ""
    return f"Sensitivity ({names}, one at a time): {lead} {clause}. {swing}{verdict}"


def _list(clauses: Sequence[str]) -> str:
    return " and ".join([", ".join(clauses[:-1]), clauses[-1]]) if len(clauses) > 1 else clauses[0]


def _turn(leads: Leads, lead: Estimate) -> str:
    before, after = leads.order(leads.base), leads.order(lead)
    return "turned" if before * after < 0 else "no order" if before and not after else ""


def _text(lead: Estimate) -> str:
    """Render a lead with its interval, in percentage points: `+14.2 [+12.9, +15.5]`."""

    def shown(x: float | None) -> str:
        return "?" if x is None else f"{100 * x:+.1f}"

    sign = "" if lead.sign == "=" else f"{lead.sign} "
    bounded = lead.low is not None or lead.high is not None
    return f"{sign}{shown(lead.mean)}" + (f" [{shown(lead.low)}, {shown(lead.high)}]" if bounded else "")


def _swing(leads: Leads, constant: str) -> str:
    return f"{100 * leads.swing(constant):.1f} points"
