"""A reproduced figure in words: crossings of each row, the claims beside the paper's, the controls."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.report import estimate
from harness.report.estimate import NONE
from harness.report.summary import dips
from harness.report.text_table import aligned
from harness.rows import statistics, tidy
from harness.rows.statistics import Crossing, Estimate
from harness.study.claims import SAYS, STYLES, at_text, of_panel, verdicts, where
from harness.study.compare import AA
from harness.study.figure import Claim
from harness.study.reproduce import Reproduced
from harness.study.sentences import departures

if TYPE_CHECKING:
    import pyarrow as pa

AXIS = {"rate_scale": "rate (req/s)", "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}


def lines(found: Reproduced) -> Iterator[str]:
    """What is printed: a block of crossings a row, the claims beside the paper's, the controls."""
    for row in sorted({panel["row"] for panel in found.about["panels"]}):
        yield from _block(found, [panel for panel in found.about["panels"] if panel["row"] == row])
        yield ""
    yield from departures(found.table)
    yield from _claims(found)
    yield from _copies(found)


def _block(found: Reproduced, panels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    about, axis = found.about, panels[0]["axis"]
    names = [d.upper() for d in about["definitions"]]
    each = [f"{panel['slo_scale']:g}x" for panel in panels if panel["slo_scale"]]
    rate = "at a given rate" if panels[0].get("given") else "at the rate that the first system holds"
    fixed = f"SLO {' and '.join(dict.fromkeys(each))}" if each else rate
    several = dict.fromkeys(panel["gpus"] for panel in panels)
    gpus = "" if axis == "gpus" else f", {' and '.join(map(str, several))} GPU{'s' * (list(several) != [1])}"
    level = f"{100 * about['level']:g} %"
    holds = "holds" if axis in {"rate_scale", "models"} else "reaches"
    own = "".join(f", {key}: {said}" for key, said in panels[0].get("own", {}).items())
    yield f"{AXIS[axis]} at which each system {holds} {level} ({fixed}{gpus}{own})"
    given = axis != "rate_scale"
    head = ["trace", "models", *["GPUs"] * (len(several) > 1)]
    head += [*["req/s each" if axis == "models" else "req/s"] * given, "system"]
    head += [cell for n in names for cell in (f"{level} {n}", "fails at", "dip %", "worst %")]
    unfit: dict[str, tuple[tidy.Unfit, list[str]]] = {}  # by label: why on its first panel, and on which
    rows = [[*head, "|", "at", *(f"{n} %" for n in names), "loads", "evicts", "moved"]]
    for panel in panels:
        own = of_panel(found.table, panel["panel"])
        shown = _named(own, panel)
        place = [panel["trace"], panel["models"], *[str(panel["gpus"])] * (len(several) > 1)]
        for label in about["systems"]:
            crossed = [where(own, panel, label, d, about["level"]) for d in about["definitions"]]
            if not any(crossed):
                continue  # not of this row
            cells = [f"{panel['rate_rps']:.3g}", shown[label]] if given else [shown[label]]
            if gone := tidy.unfit(own, label):
                some = "" if gone.every else f" with {gone.seeds} of {gone.of} seeds"
                unfit.setdefault(label, (gone, []))[1].append(", ".join(place) + some)
            if gone and gone.every:
                cells += [gone.word, *[NONE] * 3] * len(names)
                rows.append([*place, *cells, "|", *[NONE] * (1 + len(names) + len(tidy.WEIGHTS))])
                continue
            for d, c in zip(about["definitions"], crossed, strict=True):
                cells += _crossing(c, tidy.worst(own, axis, label, d, about["level"]), axis)
            rows.append([*place, *cells, "|", *_beside(own, panel, label, about)])
    columns = [x for x in zip(*rows, strict=True) if x[0] not in ASIDE or set(x[1:]) != {NONE}]
    yield from aligned(zip(*columns, strict=True))
    for label, (gone, places) in unfit.items():
        yield f"{label} {gone.word} ({'; '.join(places)}): {gone.why}"


ASIDE = ("fails at", "dip %", "worst %")  # columns that are left out where they say nothing


def _named(rows: pa.Table, panel: Mapping[str, Any]) -> dict[str, str]:
    """A panel's labels, with their GPUs where these are not the panel's."""
    took: dict[str, set[int]] = {}
    for label, gpus in zip(rows["label"].to_pylist(), rows["gpus"].to_pylist(), strict=True):
        took.setdefault(label, set()).add(gpus)
    own = tidy.own_gpus(took, panel["gpus"])
    return {label: tidy.with_gpus(label, counts) if label in own else label for label, counts in took.items()}


def _crossing(c: Crossing | None, worst: float | None, axis: str) -> list[str]:
    """A crossing, the first x that fails, the deepest dip where there is one, and the worst model."""
    if c is None:
        return [NONE] * 4
    fails = None if c.fails is None else Estimate(c.fails, None, None, c.at.n)
    dip = f"{100 * c.dip:.1f}" if dips(c) else NONE
    least = NONE if worst is None or math.isnan(worst) else f"{100 * worst:.1f}"
    return [at_text(c.at, axis), estimate.text(fails, STYLES[axis]), dip, least]


def _beside(rows: pa.Table, panel: Mapping[str, Any], label: str, about: Mapping[str, Any]) -> list[str]:
    """Attainment at a telling x, and how often weights came, went and moved there: means over seeds."""
    curves = {d: tidy.curves(rows, label, d, "x") for d in (*about["definitions"], *tidy.WEIGHTS)}
    xs = sorted(set().union(*(curve for curve in curves[about["definitions"][0]].values())))
    if not xs:
        return ["-"] * (1 + len(curves))
    at = panel["at"]
    if at is None:  # where the first system crosses
        first = where(rows, panel, about["systems"][0], about["definitions"][0], about["level"])
        at = first.at.mean if first else xs[-1]
    x = max((one for one in xs if one <= at), default=xs[0])
    unit = panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0
    cells = [f"{x * unit:.3g}"]
    for d, curve in curves.items():
        values = [one[x] for one in curve.values() if x in one and not math.isnan(one[x])]
        share = d in about["definitions"]
        mean = sum(values) / len(values) if values else math.nan
        cells.append("-" if not values else f"{100 * mean:.1f}" if share else f"{mean:.0f}")
    return cells


def claim_text(c: Claim, level: float) -> str:
    """What a claim is about."""
    what = f"{100 * level:g} % {c.definition.upper()}"
    kind = "rate" if c.axis == "rate_scale" else AXIS[c.axis]
    return f"{c.system} / {c.over}, {kind} at {what}" if c.over else f"{c.system}, {AXIS[c.axis]} for {what}"


def paper_text(c: Claim) -> str:
    """What the paper says."""
    numbers = c.paper if isinstance(c.paper, tuple) else (c.paper,)
    return "-".join(x if isinstance(x, str) else f"{x:g}{'x' if c.over else ''}" for x in numbers)


def _claims(found: Reproduced) -> Iterator[str]:
    every = verdicts(found)
    if not every:
        return
    rows = [[f"claim ({found.about['paper']})", "trace", "models", "paper", "here", "verdict", "agrees if"]]
    for one in every:
        c, panel = one.claim, one.panel
        on = f"{panel['models']}, row {panel['row'] + 1}" if c.row else panel["models"]
        said = claim_text(c, found.about["level"])
        rows.append([said, panel["trace"], on, paper_text(c), one.here, one.says, one.rule])
    yield from aligned(rows)
    for says, words in (("differs", "where it differs"), ("not comparable", "not comparable")):
        for why in dict.fromkeys(one.claim.why for one in every if one.claim.why and one.says == says):
            yield f"{words}: {why}"
    counts = {says: sum(one.says == says for one in every) for says in SAYS}
    yield "; ".join(f"{n} {says}: {SAYS[says]}" for says, n in counts.items() if n)


def _copies(found: Reproduced) -> Iterator[str]:
    """The A/A line: how often the first system differs from its copy on other seeds by more than chance."""
    label = found.about["systems"][0]
    covers, worst = [], 0.0
    for panel in found.about["panels"]:
        rows = of_panel(found.table, panel["panel"])
        for d in found.about["definitions"]:
            ours, theirs = (tidy.curves(rows, name, d, "x") for name in (label, label + AA))
            for x in sorted({x for curve in theirs.values() for x in curve}):
                pair = [[curve[x] for curve in side.values() if x in curve] for side in (ours, theirs)]
                gap = statistics.paired(*(dict(enumerate(values)) for values in pair))
                worst = max(worst, abs(gap.mean))
                if gap.low is not None and gap.high is not None:
                    covers.append(gap.low <= 0 <= gap.high)
    if covers:
        yield (
            f"A/A: {label} against its copy on other seeds: {sum(covers)} of {len(covers)} differences cover 0, "
            f"the largest is {100 * worst:.2f} points"
        )
