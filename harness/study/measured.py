"""Values of claims about measures, by seed.

A value is a column of one system, or the ratio or difference of a column between two systems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from harness.policy.fields import asked
from harness.rows import crossings
from harness.rows.about import About, Panel
from harness.study.study import Claim
from traces import laws, synthetic

HELD_RPS = "held_rps"
WITHIN = "within"
Seeds = Mapping[int, float]


def law(panel: Panel | None) -> str:
    """Return the law of lengths from which a panel's trace is drawn; empty if it is not drawn from a law."""
    preset = None if panel is None else _preset(panel)
    return "" if preset is None else laws.law(preset.lengths)


def of_claim(table: pa.Table, about: About, claim: Claim) -> Iterator[tuple[Panel | None, list[float]]]:
    """Yield, for each verdict of a claim, its panel (None: all panels together) and the claim's value for each seed."""
    panels = [panel for panel in crossings.concerned(about.panels, claim.on) if _rps(panel) >= claim.at]
    if claim.measure == HELD_RPS:
        compared = [(group[0], _compared(about, table, group, claim)) for group in crossings.by_condition(panels)]
    else:
        compared = [(panel, _compared(about, table, [panel], claim)) for panel in panels]
    compared = [(panel, seeds) for panel, seeds in compared if seeds]
    if claim.most:
        seeds = sorted(set.intersection(*({*seeds} for _, seeds in compared))) if compared else []
        yield None, [max(values[seed] for _, values in compared) for seed in seeds]
        return
    for panel, values in compared:
        yield panel, [values[seed] for seed in sorted(values)]


def _compared(about: About, table: pa.Table, panels: Sequence[Panel], claim: Claim) -> Seeds:
    """Return the value of a claim by seed, over the given panels; empty if a system has no runs on them.

    The value is a measure of one system, or the ratio or difference of the measures of two systems. If `claim.least` is
    set, it is the value of that field of the systems (`_least`).
    """
    if claim.least:
        return _least(about, table, panels[0], claim)
    ours = column(about, table, panels, claim.system, claim.measure, claim.model)
    if not claim.over:
        return ours
    theirs = column(about, table, panels, claim.over, claim.measure, claim.model)
    shared = [seed for seed in ours if seed in theirs]
    if claim.even == 0.0:
        return {seed: ours[seed] - theirs[seed] for seed in shared}
    return {seed: ours[seed] / theirs[seed] for seed in shared}


def column(about: About, table: pa.Table, panels: Sequence[Panel], system: str, measure: str, model: str = "") -> Seeds:
    """Return a measure of a system by seed.

    It is read from the first panel. For the measure HELD_RPS, it is the highest rate at which the system reaches the
    level, over all `panels` (`_highest_rates`).
    """
    if measure == HELD_RPS:
        return _highest_rates(about, table, panels, system)
    rows = _rows(table, panels[0], system, measure, model)
    values = rows["value"].fill_null(math.nan).to_pylist()
    return dict(zip(rows["seed"].to_pylist(), values, strict=True))


def _rows(table: pa.Table, panel: Panel, system: str, measure: str, model: str) -> pa.Table:
    rows = crossings.of_panel(table, panel)
    wanted = {"label": system, "definition": measure, "over": "model" if model else "pooled"}
    if model:
        wanted["model"] = model
    for name, word in wanted.items():
        rows = rows.filter(pc.equal(rows[name].cast(pa.string()), word))
    return rows


def _least(about: About, table: pa.Table, panel: Panel, claim: Claim) -> Seeds:
    """Return, by seed, the value of the field `claim.least` with which the claim's measure is smallest.

    All systems of the study that set this field are compared.
    """
    best: dict[int, tuple[float, float]] = {}
    for name, text in about.texts.items():
        if (value := asked(text).fields.get(claim.least)) is not None:
            for seed, measured in column(about, table, [panel], name, claim.measure, claim.model).items():
                best[seed] = min(best.get(seed, (math.inf, 0.0)), (measured, float(value)))
    return {seed: value for seed, (_, value) in best.items()}


def _highest_rates(about: About, table: pa.Table, panels: Sequence[Panel], system: str) -> Seeds:
    """Return, by seed, the highest rate in req/s at which the share in column `WITHIN` is at least the level.

    The failing rate is the first rate at which the share is below the level. The result is interpolated between the
    failing rate and the rate before it. If the lowest rate fails, the result is that rate. If no rate fails, it is the
    highest rate.
    """
    ordered = sorted(panels, key=_rps)
    rates = [_rps(panel) for panel in ordered]
    columns = [column(about, table, [panel], system, WITHIN) for panel in ordered]
    held: dict[int, float] = {}
    for seed in columns[0] if columns else ():
        shares = [by_seed[seed] for by_seed in columns]
        k = next((k for k, share in enumerate(shares) if share < about.level), len(rates))
        if k in {0, len(rates)}:
            held[seed] = rates[max(k - 1, 0)]
        else:
            part = (shares[k - 1] - about.level) / (shares[k - 1] - shares[k])
            held[seed] = float(rates[k - 1] * (rates[k] / rates[k - 1]) ** part)
    return held


def _preset(panel: Panel) -> synthetic.Preset | None:
    name = str(panel["trace"])
    return synthetic.preset(name) if name.partition("+")[0] in synthetic.RATED else None


def _rps(panel: Panel) -> float:
    """Return the rate in req/s of the most popular stream of a panel's trace.

    It is 0 for a trace that is not drawn by a generator with such a rate.
    """
    preset = _preset(panel)
    return preset.rate_rps if preset is not None else 0.0
