"""Ideas, each on the condition that was made for it (its world): whether it is ahead there, and which systems beat it.

An idea is a system for which a study claims a ratio on one condition. If a claim names several systems with " or ",
these are variants of one idea, and the variant with the highest rate represents it. The idea is compared with every
other system that ran there, whether or not the claim names that system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import pyarrow as pa

from harness.answers.table import Table, joined
from harness.rows import by_window, crossings, memo, ranking
from harness.rows.about import About, Panel
from harness.rows.estimate import NONE
from harness.rows.ranking import NO_ROOM, Standing, verdict_text
from harness.rows.statistics import Crossing
from harness.study.study import systems_of

WINS = {"yes": "won", "no": "did not", "open": "open"}  # word in an idea's row, and word in the answer's counts


class Idea(NamedTuple):
    """An idea on the condition that was made for it (its world), compared with the other systems there.

    An idea is the system that a claim about a ratio names.
    """

    claim: Mapping[str, Any]  # as the study's facts have it
    panel: Panel
    system: str  # the reading that stands for it
    rates: Mapping[str, Crossing | None]  # keyed by system: where it crosses the level; None: no room
    others: Mapping[str, Standing]  # keyed by system: the standing of the idea beside it

    @property
    def wins(self) -> str:
        """Return "yes", "no" or "open": whether the idea wins in its world.

        It is "yes" if the idea is ahead of all systems that fit. It is "no" if the idea does not fit. It is also "no"
        if some system is equal to the idea, or is ahead of the idea at one or more rates.
        """
        sides = {s.says.split()[0].strip(",") for s in self.others.values() if s.says != NO_ROOM}
        if self.rates[self.system] is None or sides & {"behind", "equal", "turns"}:
            return "no"
        return "yes" if sides == {"ahead"} else "open"

    @property
    def instead(self) -> str:
        """The system to use instead of the idea; empty if there is none.

        Systems ahead of the idea are preferred, then those ahead at one rate and behind at another, then equal ones. If
        there are none of these, and the idea does not fit, any system that fits is eligible. Among systems of the same
        preference, the one with the highest rate is chosen.
        """
        for word in ("behind", "turns", "equal"):
            if names := [name for name, standing in self.others.items() if standing.says.startswith(word)]:
                return max(names, key=self._rate)
        fit = [name for name in self.others if self.rates[name] is not None]
        return max(fit, key=self._rate, default="") if self.rates[self.system] is None else ""

    def over(self) -> list[str]:
        """List the systems that the idea is ahead of, the highest rate first."""
        return sorted((n for n, s in self.others.items() if s.says.startswith("ahead")), key=self._rate, reverse=True)

    def _rate(self, name: str) -> float:
        return -1.0 if (crossing := self.rates[name]) is None else crossing.at.mean

    def shown(self, name: str) -> str:
        """Render the rate of a system."""
        return "no room" if (crossing := self.rates[name]) is None else crossing.at.text(spread=False)


def ideas(table: pa.Table, about: About) -> list[Idea]:
    """Judge every idea of a study on the condition that was made for it.

    All verdicts are corrected together for multiple comparisons.
    """
    each = list[Idea]()
    for claim in about.claims:
        definition = claim["definition"] or about.definitions[0]
        for panel in crossings.concerned(about.panels, claim["on"]) if claim["what"] == "ratio" else ():
            rows = crossings.of_panel(table, panel)
            ran = set(memo.column(rows, "label"))
            rates = dict[str, Crossing | None]()
            for name in (name for name in about.systems if name in ran):
                gone = by_window.unfit(rows, name)
                none = gone is not None and gone.every
                rates[name] = None if none else crossings.crossing(rows, panel, name, definition, about.level)
            readings = [name for part in systems_of(claim["system"]) for name in part if name in rates]
            if not readings:
                continue
            best = max(readings, key=lambda name: -1.0 if (at := rates[name]) is None else at.at.mean)
            beside = {
                name: ranking.side_by_side(rows, panel, (best, name), definition, about.level)
                for name in rates
                if name not in readings
            }
            each.append(Idea(claim, panel, best, rates, beside))
    judged = iter(ranking.corrected([standing for idea in each for standing in idea.others.values()]))
    return [idea._replace(others={name: next(judged) for name in idea.others}) for idea in each]


def parts(about: About, table: pa.Table, *, every: bool) -> Iterator[str | Table]:
    """Yield the answer, a table with a row per idea, and a line on each idea's world and the cause of its result.

    An idea's world is the condition that was made for it. With `every`, yield all verdicts on each idea too.
    """
    named = list(zip(ascii_lowercase, ideas(table, about), strict=False))
    counts = {word: [letter for letter, idea in named if idea.wins == word] for word in WINS}
    results = "; ".join(f"{len(of)} {WINS[word]} ({joined(of)})" for word, of in counts.items() if of)
    yield f"of {len(named)} {about.headline or 'ideas'}, each in its own world, {results}"
    met = f"{100 * about.level:g} % of SLOs met ({about.definitions[0]})"
    yield f"req/s with {met}, pooled over models; {about.seeds} seeds"
    head = ["", "wins", "req/s", "in its place", "req/s", "ahead of"]
    yield Table(head, [_row(letter, idea) for letter, idea in named])
    yield from (f"{letter}  {_world(idea, every=every)}" for letter, idea in named)
    for letter, idea in named if every else ():
        rows = [[name, idea.shown(name), verdict_text(s)] for name, s in idea.others.items()]
        first = [idea.system, idea.shown(idea.system), NONE]
        yield Table(["system", "req/s", "over it"], [first, *rows], title=f"{letter}  {idea.panel['name']}:")


def _row(letter: str, idea: Idea) -> Sequence[str]:
    instead = [idea.instead, idea.shown(idea.instead)] if idea.instead else [NONE, NONE]
    ahead_of = ", ".join(idea.over()) or NONE
    return [f"{letter}  {idea.system}", idea.wins, idea.shown(idea.system), *instead, ahead_of]


def _world(idea: Idea, *, every: bool) -> str:
    """Describe an idea's world (its condition) and the cause of its result there.

    With `every`, also name the SLO of that condition.
    """
    panel, why = idea.panel, idea.claim["why"]
    slo = f", SLO {panel['slo']}" if every else ""
    place = f"{panel['name']} ({panel['models']} on {panel['gpus']} {panel['gpu']}{slo})"
    return f"{place}: {why}" if why else place
