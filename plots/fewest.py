"""The fewest GPUs on which systems reach the level: a panel per workload, a row per system, a mark per SLO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.rows import crossings
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from plots import page, style
from plots.caption import AND_OR, brief, claims_of, definition, parts_of, slos

LOADS, LOADS_ACROSS = 6, 3  # panels, and panels in a line
LOAD_ROW_IN, COUNT_POINTS = 0.24, 5.5  # height of a system's row; type of the counts beside it
MARKS = ("o", "s", "^", "D", "v", "P")  # a marker for each SLO
Answers = Mapping[tuple[str, str], Estimate]  # keyed by condition and system: the fewest GPUs that hold the level


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the fewest GPUs on which systems reach the level of attainment.

    Each workload has a panel, each system a row, and each SLO a mark.
    """
    by_load = list(_by_load(facts).values())[:LOADS]
    rules = list(dict.fromkeys(map(_slo, facts.panels)))
    present = set(table["label"].unique().to_pylist())
    names = [label for label in facts.systems if label in present]
    called = [style.called(name) for name in names]
    answers = _answers(table, facts)
    handles = [page.mark(f"SLO {slos([rule])}", (page.GREY, sign)) for rule, sign in zip(rules, MARKS, strict=False)]
    if any(at.sign != "=" for at in answers.values()):
        handles.append(page.mark("a bound: beyond what was run", hollow=True))
    if any(_papers_of(label, panel, answers, facts) for panel in facts.panels for label in names):
        handles.append(page.stated_key())
    counts = [
        [
            _count([answers.get((panels[rule]["condition"], name)) if rule in panels else None for rule in rules])
            for name in names
        ]
        for panels in by_load
    ]
    figure, axes = page.panels(
        page.grid(len(by_load), LOADS_ACROSS, LOAD_ROW_IN * len(names)),
        left_in=page.names_in(called),
        above_in=0.22,
        beside_in=0.2 + max(page.words_in(words, COUNT_POINTS) for panel in counts for words in panel),
        handles=handles,
        text=brief(table, facts, note, _criterion(facts), *_apart(table), slo=False),
    )
    looks = style.looks(names)
    for k, axis in enumerate(axis for line in axes for axis in line):
        page.rows(axis, called, labelled=k % LOADS_ACROSS == 0, shaded=True)
        first = next(iter(by_load[k].values()))
        load = f"{first['trace'].partition('+')[0]}, {first['rate_rps']:.3g} req/s"
        page.title(axis, f"({page.LETTERS[k]}) {load}", pad=4)
        axis.set_xlabel("GPUs (lower is better)", fontsize=6, labelpad=1)
        ends = list[float]()
        for (y, name), (j, rule) in product(enumerate(names), enumerate(rules)):
            if (panel := by_load[k].get(rule)) is not None:
                at, papers = answers.get((panel["condition"], name)), _papers_of(name, panel, answers, facts)
                look, up = looks[name]._replace(marker=MARKS[j]), 0.6 * ((j + 0.5) / len(rules) - 0.5)
                ends += _answered(axis, y + up, look, at, papers)
        page.ruler(axis.xaxis, min(ends), max(ends), log=True, whole=True, share=0.06)
        for y, words in enumerate(counts[k]):
            axis.text(1.05, y, words, transform=axis.get_yaxis_transform(), fontsize=COUNT_POINTS, va="center")
    return figure


def _count(answers: Sequence[Estimate | None]) -> str:
    """Return a system's fewest GPUs for each SLO as text; a sign comes before a number that is only a bound."""
    signs = {"<": "≤", ">": ">", "=": ""}
    return " / ".join("-" if at is None else f"{signs[at.sign]}{at.mean:g}" for at in answers)


def _answered(axis: Axes, y: float, look: style.Look, at: Estimate | None, papers: list[float]) -> list[float]:
    """Mark a system's fewest GPUs (hollow if only a bound) and the paper's numbers; return the x of all marks."""
    if at is not None:
        marks = look.marks(hollow=at.sign != "=", size=3.4)
        axis.plot([at.mean], [y], linestyle="none", clip_on=False, zorder=3, **marks)
    for x in papers:
        page.stated(axis, [x], [y])
    return [*papers, *([at.mean] if at else [])]


def _papers_of(label: str, panel: Panel, answers: Answers, facts: About) -> list[float]:
    """Return the GPU counts that a paper's claims imply for a system.

    A claim states a ratio of the fewest GPUs of two systems. The implied count of one is our result for the other,
    divided by that ratio.
    """
    marks = []
    for claim in claims_of(panel, facts):
        systems, others = (AND_OR.split(claim[key]) for key in ("system", "over"))
        known = (answers.get((panel["condition"], name)) for name in systems)
        theirs = next((at.mean for at in known if at is not None and at.sign == "="), None)
        if claim["what"] == "fewest" and label in others and theirs is not None:
            marks.append(theirs / float(claim["paper"]))
    return marks


def _answers(table: pa.Table, facts: About) -> Answers:
    """Return the fewest GPUs on which attainment reaches the level, for each condition and system that was run."""
    parts = [(panel, crossings.of_panel(table, panel)) for panel in facts.panels]
    every = {
        (panel["condition"], name): crossings.fewest(part, name, "", facts.definitions[0], facts.level)
        for panel, part in parts
        for name in facts.systems
    }
    return {key: at for key, at in every.items() if at is not None}


def _by_load(facts: About) -> dict[tuple[Any, ...], dict[str, Panel]]:
    """Return the panels by workload, and then by SLO."""
    by_load: dict[tuple[Any, ...], dict[str, Panel]] = {}
    for panel in facts.panels:
        by_load.setdefault((panel["row"], panel["column"], panel["models"]), {})[_slo(panel)] = panel
    return by_load


def answers(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return the fewest GPUs as a frame with a row for each (condition, system) that was run."""
    every = _answers(table, facts).items()
    return pd.DataFrame([{"condition": key, "label": label} | parts_of("crossing", at) for (key, label), at in every])


def by_slo(facts: About) -> About:
    """Arrange a study's panels for drawing: a column for each SLO, and a line for each workload.

    Return the facts with these panels and with titles of the columns.
    """
    rules = list(dict.fromkeys(map(_slo, facts.panels)))
    panels = tuple(
        {**panel, "row": k, "column": rules.index(_slo(panel)), "slo": "", "slo_scale": None}
        for k, load in enumerate(_by_load(facts).values())
        for panel in load.values()
    )
    return replace(facts, panels=panels, titles=tuple(f"SLO {slos([rule])}" for rule in rules))


def _slo(panel: Panel) -> str:
    return str(panel["slo"]) if panel["slo_scale"] is None else f"{panel['slo_scale']:g}x{panel['slo']}"


def _criterion(facts: About) -> str:
    over = f"the mean of {facts.seeds} seeds" if facts.seeds > 1 else "one seed"
    met = f"{100 * facts.level:g} % of {definition(facts.definitions[0])} SLOs"
    return f"Fewest GPUs on which {over} meets {met}, by bracketing; numbers in the order of SLOs."


def _apart(table: pa.Table) -> Iterator[str]:
    """Yield a sentence on the GPUs of the system `dedicated`, which has one for each model, if it was run."""
    rows = table.filter(pc.equal(table["label"].cast(pa.string()), "dedicated"))
    if len(rows):
        yield f"A GPU a model (dedicated) takes {pc.max(rows['gpus']).as_py()}."
