"""A sensitivity in words: the table of leads, the constants behind it, and one sentence for under a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.report.text_table import aligned
from harness.rows.statistics import Estimate
from harness.study.search import LEVEL
from harness.study.sensitivity import Found, read


def lines(found: Found) -> Iterator[str]:
    """A table of the leads by falling swing, and what each constant is, is worth and comes from."""
    where = f"at {100 * LEVEL:g} %" if found.many else f"at rate scale {found.rates[0]:g}"
    what = "rate ratio" if found.many else "SLO attainment"
    yield f"lead of {found.first} over {found.second} in {what} ({found.definition}) {where}, and its 95 % interval"
    cells = [("constant", "value", "change", f"lead {_unit(found)}", "", "swing")]
    cells.append(("as it is", "", "", _text(found, found.base), "", ""))
    for one in found.ranked:
        for row in found.rows:
            if row.constant == one and row.lead:
                first = cells[-1][0] != one.name and all(cell[0] != one.name for cell in cells)
                own = (one.name, one.value) if first else ("", "")
                cells.append((*own, row.setting, _text(found, row.lead), _turn(found, row.lead),
                              _swing(found, one.name) if first else ""))  # fmt: skip
    yield from aligned(cells)
    for row in found.rows:
        if row.note:
            yield f"{row.constant.name} {row.setting}: {row.note}" if row.setting else (
                f"{row.constant.name}: not varied, {row.note}")  # fmt: skip
    yield from (f"{one.name}: {one.means}, {one.value} ({one.source})" for one in found.ranked)
    yield sentence(found)


def kept(folder: Path) -> str:
    """The sentence of the sensitivity that is kept beside a comparison's table; empty where there is none."""
    found = read(folder)
    return "" if found is None else sentence(found)


def sentence(found: Found) -> str:
    """What stands under a figure: which constants turn the order, or that none does, and which moves it most."""
    at = f"in the rate at {100 * LEVEL:g} %" if found.many else f"at rate scale {found.rates[0]:g}"
    lead = f"the lead of {found.first} over {found.second} {at}, {_text(found, found.base)} {_unit(found)},"
    tried = [(row, row.lead) for row in found.rows if row.lead]
    if not tried:
        return f"Sensitivity: {lead} was held against no constant."
    names = ", ".join(dict.fromkeys(row.constant.name for row, _ in tried))
    before = found.order(found.base)
    by_order: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    for row, value in tried:
        by_order[found.order(value)].append(f"{row.constant.name} {row.setting} ({_text(found, value)})")
    if before:
        turned = by_order[-before]
        said = f"is turned by {_list(turned)}" if turned else "is turned by none of them"
        said += f"; it is not told from chance with {_list(by_order[0])}" if by_order[0] else ""
    else:
        told = by_order[1] + by_order[-1]
        said = f"is not told from chance, but is with {_list(told)}" if told else "is never told from chance"
    most = found.ranked[0].name
    why = "".join(f" ({row.setting}: {row.note})" for row, _ in tried if row.constant.name == most and row.note)
    return f"Sensitivity ({names}, one at a time): {lead} {said}. Largest swing: {most}, {_swing(found, most)}{why}."


def _list(said: Sequence[str]) -> str:
    return " and ".join([", ".join(said[:-1]), said[-1]]) if len(said) > 1 else said[0]


def _turn(found: Found, lead: Estimate) -> str:
    before, after = found.order(found.base), found.order(lead)
    return "turned" if before * after < 0 else "no order" if before and not after else ""


def _unit(found: Found) -> str:
    return "x" if found.many else "points"


def _text(found: Found, lead: Estimate) -> str:
    """A lead with its interval, in points or as a ratio: `+14.2 [+12.9, +15.5]`, `1.74 [1.10, 2.76]`."""

    def shown(x: float | None) -> str:
        return "?" if x is None else f"{x:.2f}" if found.many else f"{100 * x:+.1f}"

    sign = "" if lead.sign == "=" else f"{lead.sign} "
    bounded = lead.low is not None or lead.high is not None
    return f"{sign}{shown(lead.mean)}" + (f" [{shown(lead.low)}, {shown(lead.high)}]" if bounded else "")


def _swing(found: Found, constant: str) -> str:
    by = found.swing(constant)
    return f"{math.exp(by):.2f} x" if found.many else f"{100 * by:.1f} points"
