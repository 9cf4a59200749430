"""The fewest GPUs by workload, system and SLO; behind them attainment over the numbers of GPUs that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.lines import Line2D

from harness.policy.types import UserError
from harness.rows import crossings
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from plots import overview, page, style
from plots.caption import brief, caption, definition, slos

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_IN, ROW_IN, WORDS = 1.0, 0.24, 5.5  # heights of a panel and of a system's row; type of the counts beside it
DROP: Any = (0, (1, 1))  # dashes at each answer
NEAR = 95.5  # percent of attainment from which on it is shown: where systems are told apart
MOST, ACROSS = 6, 3  # panels of the picture, and in a line of it
MARKS = ("o", "s", "^", "D", "v", "P")  # by SLO


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row a (condition, system, GPUs), the mean, least and most over seeds.

    `answer` marks the fewest GPUs that reach the level.
    """
    definition = facts.definitions[0]
    rows: list[dict[str, Any]] = []
    for panel in facts.panels:
        here = crossings.of_panel(table, panel)
        frame = here.select(["definition", "over", "value", "label", "gpus", "infeasible"]).to_pandas()
        frame = frame[(frame["definition"] == definition) & (frame["over"] == "pooled") & frame["value"].notna()]
        place = {key: panel[key] for key in ("condition", "trace", "rate_rps", "slo")}
        for (label, gpus), group in frame.groupby(["label", "gpus"], observed=True, sort=True):
            at = crossings.fewest(here, str(label), "", definition, facts.level)
            value = group["value"]
            rows.append({**place, "label": str(label), "gpus": int(gpus), "mean": value.mean(), "low": value.min(),
                         "high": value.max(), "n": len(group), "infeasible": bool(group["infeasible"].notna().any()),
                         "answer": at is not None and at.sign != ">" and at.mean == gpus})  # fmt: skip
    return pd.DataFrame(rows)


def pages(table: pa.Table, facts: About, note: str = "") -> list[Figure]:
    """Draw the fewest GPUs, and the curves on a page behind; call within `style.theme()`."""
    curves = draw(table, facts, note)  # raises where there is nothing
    return [_fewest(table, facts, note), curves]


Answers = Mapping[tuple[str, str], Estimate]  # by condition and system: the fewest GPUs that hold the level


def _fewest(table: pa.Table, facts: About, note: str) -> Figure:
    """Draw the fewest GPUs that hold the level: a panel a workload, a row a system, a mark an SLO."""
    by_load = list(_by_load(facts).values())[:MOST]
    rules = list(dict.fromkeys(map(_slo, facts.panels)))
    present = set(table["label"].unique().to_pylist())
    names = [label for label in facts.systems if label in present]
    called = [style.called(name) for name in names]
    answers = _answers(table, facts)
    handles = [page.mark(f"SLO {slos([rule])}", (page.BOTH["color"], sign))
               for rule, sign in zip(rules, MARKS, strict=False)]  # fmt: skip
    if any(at.sign != "=" for at in answers.values()):
        handles.append(page.mark("a bound: beyond what was run", hollow=True))
    if any(_papers(label, panel, answers, facts) for panel in facts.panels for label in names):
        handles.append(Line2D([], [], **overview.PAPER_MARK, label="where the paper's number puts it"))
    counts = [[_count([answers.get((panels[rule]["condition"], name)) if rule in panels else None for rule in rules])
               for name in names] for panels in by_load]  # fmt: skip
    figure, axes = page.panels(
        page.grid(len(by_load), ACROSS, ROW_IN * len(names)), left_in=page.names_in(called), above_in=0.22,
        beside_in=0.2 + max(page.words_in(words, WORDS) for panel in counts for words in panel), handles=handles,
        text=brief(table, facts, note, _held(facts), *_apart(table), slo=False),
    )  # fmt: skip
    looks = style.looks(names)
    for k, axis in enumerate(axis for line in axes for axis in line):
        page.rows(axis, called, labelled=k % ACROSS == 0, shaded=True)
        first = next(iter(by_load[k].values()))
        load = f"{first['trace'].partition('+')[0]}, {first['rate_rps']:.3g} req/s"
        page.title(axis, f"({page.LETTERS[k]}) {load}", pad=4)
        axis.set_xlabel("GPUs (lower is better)", fontsize=6, labelpad=1)
        ends = list[float]()
        for (y, name), (j, rule) in product(enumerate(names), enumerate(rules)):
            if rule in by_load[k]:
                ends += _mark(axis, y + 0.6 * ((j + 0.5) / len(rules) - 0.5), MARKS[j], looks[name],
                              answers.get((by_load[k][rule]["condition"], name)),
                              _papers(name, by_load[k][rule], answers, facts))  # fmt: skip
        page.ruler(axis.xaxis, min(ends), max(ends), log=True, whole=True, share=0.06)
        for y, words in enumerate(counts[k]):
            axis.text(1.05, y, words, transform=axis.get_yaxis_transform(), fontsize=WORDS, va="center")
    return figure


def _count(answers: Sequence[Estimate | None]) -> str:
    """Return a system's fewest GPUs by SLO in words; a bound has its sign."""
    signs = {"<": "≤", ">": ">", "=": ""}
    return " / ".join("-" if at is None else f"{signs[at.sign]}{at.mean:g}" for at in answers)


def _mark(axis: Axes, y: float, marker: str, look: style.Look, at: Estimate | None, papers: list[float]) -> list[float]:
    """Mark a system's answer, hollow where it is a bound, and where the paper's numbers put it; returns them."""
    if at is not None:
        axis.plot([at.mean], [y], linestyle="none", clip_on=False, zorder=3,
                  **look.marks(hollow=at.sign != "=") | {"marker": marker, "markersize": 3.4})  # fmt: skip
    for x in papers:
        axis.plot([x], [y], zorder=3.5, **overview.PAPER_MARK)
    return [*papers, *([at.mean] if at else [])]


def _papers(label: str, panel: Panel, answers: Answers, facts: About) -> list[float]:
    """Return where the paper's numbers put a system: on our count of another, divided by the paper's ratio of them."""
    marks = []
    for claim in overview.claims_of(panel, facts):
        systems, others = (overview.AND_OR.split(claim[key]) for key in ("system", "over"))
        known = (answers.get((panel["condition"], name)) for name in systems)
        theirs = next((at.mean for at in known if at is not None and at.sign == "="), None)
        if claim["what"] == "fewest" and label in others and theirs is not None:
            marks.append(theirs / float(claim["paper"]))
    return marks


def _answers(table: pa.Table, facts: About) -> Answers:
    """Return the fewest GPUs on which each system that was run holds the level."""
    parts = [(panel, crossings.of_panel(table, panel)) for panel in facts.panels]
    every = {(panel["condition"], name): crossings.fewest(part, name, "", facts.definitions[0], facts.level)
             for panel, part in parts for name in facts.systems}  # fmt: skip
    return {key: at for key, at in every.items() if at is not None}


def _by_load(facts: About) -> dict[tuple[Any, ...], dict[str, Panel]]:
    """Return the panels by workload, and then by SLO."""
    by_load: dict[tuple[Any, ...], dict[str, Panel]] = {}
    for panel in facts.panels:
        by_load.setdefault((panel["row"], panel["column"], panel["models"]), {})[_slo(panel)] = panel
    return by_load


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the curves, a page wide; call within `style.theme()`. Raises UserError if nothing is there."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no run of this study has a value")
    series = [label for label in facts.systems if label in set(frame["label"])]
    looks, lines = style.looks(series), _by_load(facts)
    rules = list(dict.fromkeys(map(_slo, facts.panels)))
    level = f"{100 * facts.level:g} %"
    drop = Line2D([], [], color="#404040", linewidth=0.9, linestyle=DROP, label=f"fewest GPUs for {level}")
    handles = [*(style.handle(label, looks[label]) for label in series), page.dashed(level), drop]
    figure, axes = page.panels(
        [(len(rules), PANEL_IN)] * len(lines), left_in=0.65, head_in=0.1, above_in=0.1, handles=handles, columns=6,
        text=brief(table, facts, note, _spread(facts), *_shown(facts)),
    )  # fmt: skip
    for line, panels in zip(axes, lines.values(), strict=True):
        for axis, slo in zip(line, rules, strict=True):
            if slo not in panels:
                axis.set_axis_off()
                continue
            _panel(axis, panels[slo], frame[frame["condition"] == panels[slo]["condition"]], looks, facts.level)
            if line is axes[0]:
                axis.set_title(f"SLO {slos([slo])}", pad=3, fontsize=6.5)
            axis.tick_params(labelleft=slo == next(iter(panels)))
        drawn = next(axis for axis in line if axis.axison)
        drawn.set_ylabel(_ylabel(next(iter(panels.values())), facts), fontsize=6)
        line[0].set_xlabel("GPUs", labelpad=1)
    return figure


def _slo(panel: Panel) -> str:
    return str(panel["slo"]) if panel["slo_scale"] is None else f"{panel['slo_scale']:g}x{panel['slo']}"


def _ylabel(panel: Panel, facts: About) -> str:
    name = panel["trace"].partition("+")[0]
    return f"{name}\n{panel['rate_rps']:.3g} req/s\n{definition(facts.definitions[0])} SLO met (%)"


def _panel(axis: Axes, panel: Panel, frame: pd.DataFrame, looks: Mapping[str, style.Look], level: float) -> None:
    """Curves over the counts that were sampled; a dotted drop at each answer."""
    axis.axhline(100 * level, color="#808080", linewidth=0.6, linestyle=page.LEVEL)
    ran = frame[~frame["infeasible"]].sort_values("gpus")
    for label, look in looks.items():
        curve = ran[ran["label"] == label]
        page.curve(axis, curve["gpus"], 100 * curve["mean"], look, 100 * curve["low"], 100 * curve["high"], bars=True,
                   least=NEAR)  # fmt: skip
        for gpus in curve.loc[curve["answer"], "gpus"]:
            axis.axvline(gpus, ymax=0.5, color=look.color, linewidth=0.9, linestyle=DROP, alpha=0.8)
    page.ruler(axis.xaxis, min(panel["xs"]), max(panel["xs"]), log=True, whole=True)
    page.ruler(axis.yaxis, NEAR, 100)


def told(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, which the CSV holds."""
    return caption(table, facts, "mean, least and most", *_shown(facts), note=note)


def _level(facts: About) -> str:
    return f"{100 * facts.level:g} % of {definition(facts.definitions[0])} SLOs"


def _held(facts: About) -> str:
    over = f"the mean of {facts.seeds} seeds" if facts.seeds > 1 else "one seed"
    return f"Fewest GPUs on which {over} meets {_level(facts)}, by bracketing; numbers in the order of SLOs."


def _apart(table: pa.Table) -> Iterator[str]:
    """Say how many GPUs a GPU for each model takes, if that was run."""
    rows = table.filter(pc.equal(table["label"].cast(pa.string()), "dedicated"))
    if len(rows):
        yield f"A GPU a model (dedicated) takes {pc.max(rows['gpus']).as_py()}."


def _spread(facts: About) -> str:
    return f"Markers and bars: mean, least and most of {facts.seeds} seeds."


def _shown(facts: About) -> Iterator[str]:
    yield f"Dotted: the fewest GPUs that reach {100 * facts.level:g} %, by bracketing."
    yield f"Only counts with a marker were run; points below {NEAR:g} % are not drawn."
