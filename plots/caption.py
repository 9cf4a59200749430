"""Captions of studies, written from a study's table and facts alone, and equal for every layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from harness.policy import mix
from harness.rows import crossings
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from harness.rows.ranking import Standing
from harness.rows.setting import fidelities, left_out
from plots import style

WORDS = 64  # words in a picture's caption
CORRECTED = "Verdicts are corrected together (Holm)."


def caption(table: pa.Table, facts: About, spread: str, *told: str, note: str = "") -> str:
    """Write the full caption: the setting of the runs, the sentences in `told`, and all that could mislead a reader.

    `spread` says how the results of several seeds are drawn, for example "mean and 95 % interval". `told` has sentences
    on this kind of figure.
    """
    runs = table.filter(table.column("skipped").is_null()).to_pandas()
    shown = runs[~runs["label"].isin(facts.controls)]
    simulated = "simulated" in set(shown["fidelity"])
    parts = [
        f"After {facts.paper}." if facts.paper else "",
        _setting(shown, facts, spread),
        *told,
        unfit(shown),
        style.caps(table),
        style.departs(shown),
        style.degrees(shown),
        style.invalid(shown),
        style.unserved(),
        left_out(facts.panels),
        style.unvetted(runs),
        *facts.notes,
        note,
        style.TAILS if simulated else "",
    ]
    return " ".join(part for part in parts if part)


def brief(table: pa.Table, facts: About, *told: str, slo: bool = True) -> str:
    """Write a short caption: the setting, then other sentences, in order, that fit into `WORDS` words in all.

    The setting says: simulated or real, checked or not, GPUs, SLO and windows. Without `slo` it leaves out the SLO,
    which a legend then states. The CSV that is stored with the picture has the full `caption`.
    """
    runs = table.filter(table.column("skipped").is_null()).to_pandas()
    shown = runs[~runs["label"].isin(facts.controls)]
    kinds = fidelities(shown["fidelity"].unique()).capitalize()
    setting = [
        ", ".join(filter(None, [kinds, style.unchecked(shown)])),
        mix.all_told(shown["gpus"].unique(), shown["gpu"].unique()),
        f"SLO {slos(shown['slo'].unique())}" * slo,
        windows(shown, facts.panels),
        "preliminary (--full has more)" if facts.fuller else "",
    ]
    first = (" · ".join(filter(None, setting)) + ".", style.invalid(shown), style.unserved(), left_out(facts.panels))
    return within(WORDS, *first, *told)


def unfit(runs: pd.DataFrame) -> str:
    """Name the systems whose models did not fit in some run; such runs are not drawn."""
    names = [style.called(str(name)) for name in dict.fromkeys(runs.loc[runs["infeasible"].notna(), "label"])]
    return f"Not drawn where the models do not fit: {', '.join(names)}." * bool(names)


def flat(standings: Iterable[Standing], panels: Iterable[Panel]) -> str:
    """Say that differences of attainment are shown instead of ratios where curves are flat; "" if none are shown.

    If all these differences are at the same rates, the text lists the rates; otherwise it says "three rates". If an
    axis is not the rate, the text lists values on that axis, or says "three places of each axis".
    """
    undecided = (standing for standing in standings if standing.decisive is None)
    rates = {tuple(x for x, _ in standing.differences) for standing in undecided if standing.differences}
    rated = {panel["axis"] for panel in panels} <= crossings.RATED
    several = f"at three {'rates' if rated else 'places of each axis'}"
    at = f"at {', '.join(f'{x:.3g}' for x in next(iter(rates)))}{' req/s' * rated}" if len(rates) == 1 else several
    return f"Points: differences of attainment {at}, where curves are flat." * bool(rates)


def within(words: int, *parts: str) -> str:
    """Join parts in order, up to `words` words in all; parts that would exceed this number are left out."""
    listed: list[str] = []
    for part in parts:
        if part and len(" ".join([*listed, part]).split()) <= words:
            listed.append(part)
    return " ".join(listed)


def windows(runs: pd.DataFrame, panels: Sequence[Panel]) -> str:
    """Say how many windows each point has, and how many seconds a window lasts.

    Each half of a real trace is one window. If the study has only halves, the text says so.
    """
    whole = [panel for panel in panels if not panel.get("half")]
    mine = runs[runs["condition"].isin([panel["condition"] for panel in whole])]
    if not len(mine):
        return "one window a half, no interval"
    counts = mine.groupby(["condition", "label"], observed=True)["seed"].nunique()
    lengths = sorted({panel["window_s"] for panel in whole if panel.get("window_s")})
    of = f" of {lengths[0]:,.0f}{f' to {lengths[-1]:,.0f}' * (len(lengths) > 1)} s" if lengths else ""
    return f"{style.span(counts)} window{'s' * (int(counts.max()) > 1)}{of}"


def _setting(runs: pd.DataFrame, facts: About, spread: str) -> str:
    """Write the setting of a study's runs."""
    text = f"{spread} of {facts.seeds} seeds" if facts.seeds > 1 else "one run, no interval"
    text += f" · preliminary (--full: {facts.fuller})" if facts.fuller else ""
    return style.setting(
        runs,
        text,
        trace=_listed(_traces(runs, facts.panels)),
        machine=_machine(runs, facts.panels),
        models=f"models: {_listed(panel['models'] for panel in facts.panels)}",
        slo=f"SLO {slos(runs['slo'].unique())}",
        gpus=mix.all_told(runs["gpus"].unique(), runs["gpu"].unique()),
    )


def _traces(runs: pd.DataFrame, panels: Sequence[Panel]) -> Iterator[str]:
    """Yield each trace with its tier and, for a generated trace, how well it fits the real one."""
    fits = {key: style.listed(rows, "fit") for key, rows in runs.groupby("condition", observed=True)}
    for panel in panels:
        fit = fits.get(panel["condition"])
        note = f": {panel['note']}" if panel["tier"] == "composed" and panel.get("note") else ""
        yield f"{panel['trace']} ({panel['tier']}{note}{f', fit {fit}' if fit else ''})"


def _machine(runs: pd.DataFrame, panels: Sequence[Panel]) -> str:
    """Name the machine of the runs that have the first panel's setting.

    Panels with other settings name them on their axes.
    """
    apart = {panel["condition"] for panel in panels if panel["own"] != panels[0]["own"]}
    machines = runs.loc[~runs["condition"].isin(apart), "machine"].dropna().unique()
    return "memory and processes by condition" if len(machines) > 1 else _listed(machines)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(x) for x in dict.fromkeys(values))


def definition(name: str) -> str:
    """Return the latencies that a definition of attainment limits: "both" is "TTFT and TPOT"."""
    return "TTFT and TPOT" if name == "both" else name.upper()


def slos(rules: Iterable[str]) -> str:
    """Describe SLO rules in few words: each base with the range of its scales, and rules in seconds unchanged.

    A P95 base is described as "P95 alone", because it is measured on a model served alone. If the rule names a kind of
    GPU, the description does so too.
    """
    of: dict[str, list[float]] = {}
    for scale, base in map(scale_base, sorted(rules, key=lambda rule: (len(rule), rule))):
        of.setdefault(base, []).append(scale)
    return _listed(
        f"{style.span(x or 1.0 for x in scales)} x {_base(base)}" if any(scales) else _base(base)
        for base, scales in of.items()
    )


def _base(rule: str) -> str:
    """Describe the base of an SLO rule in words, or a whole rule that has no single scale."""
    if two := re.fullmatch(r"([\d.]+)/([\d.]+)x(.+)", rule):
        return f"TTFT {two[1]} x, TPOT {two[2]} x {_base(two[3])}"
    if seconds := re.fullmatch(r"absolute:ttft=([\d.]+),tpot=([\d.]+)", rule):
        return f"TTFT {seconds[1]} s, TPOT {seconds[2]} s"
    if alone := re.fullmatch(r"(P\d+|solo)(?:@(.+))?", rule):
        return alone[1] + " alone" * (alone[1] != "solo") + (f" on {alone[2]}" if alone[2] else "")
    return rule


def scale_base(rule: str) -> tuple[float, str]:
    """Split an SLO rule into scale and base.

    For a rule in seconds, or with different scales for TTFT and TPOT, the scale is 0 and the base is the whole rule.
    """
    scale, x, base = rule.partition("x")
    return (float(scale), base) if x and scale.replace(".", "").isdigit() else (0.0, rule)


def sampling(table: pa.Table, facts: About) -> Iterator[str]:
    """Yield sentences on how rates were chosen, and on the smallest number of requests that any point has."""
    sample, panels = facts.sample, facts.panels
    given = next((rates for panel in panels if (rates := _rates_rps(panel))), None)
    if given and sample["rule"] == "bisect":
        fixed = ", ".join(f"{rps:g}" for rps in given)
        yield f"Rates: {fixed} req/s, then by bisection of each {sample['each']}'s crossing."
    by = ["condition", "label", "x", *["seed"] * (sample["each"] == "seed")]
    runs = table.select([*dict.fromkeys([*by, "over", "definition", "n", "infeasible"])]).to_pandas()
    counted = runs[(runs["over"] == "pooled") & (runs["definition"] == facts.definitions[0])]
    points = counted.groupby(by, observed=True)
    whole = points["n"].sum()[points["infeasible"].count() == 0]  # all seeds ran
    if len(whole):
        yield f"At least {int(whole.min()):,} requests a {'run' if 'seed' in by else 'point, over its seeds'}."


def _rates_rps(panel: Panel) -> Sequence[float]:
    """Return the rates that the study fixes for a panel, in requests per second; empty if it fixes none."""
    return panel["rates_rps"] or (panel["xs"] if panel["axis"] == "rate_rps" else ())


def seen(panels: Sequence[Panel]) -> Iterator[str]:
    """Yield a sentence on how many requests of each model planners saw, if panels have held-out plans."""
    sets: dict[str, dict[str, None]] = {}
    for panel in panels:
        if panel["plan"] == "held-out" and panel["axis"] != "models":
            counts = " or ".join(" ".join(map(str, fold)) for fold in panel["seen"])
            sets.setdefault(f"{panel['trace']}: {counts}", {})[panel["models"]] = None
    if sets:
        listed = "; ".join(f"{', '.join(models)} on {counts}" for counts, models in sets.items())
        none = any(not all(fold) for panel in panels for fold in panel["seen"])
        prior = " Where planners saw 0 requests, a prior of one decides." * none
        yield (
            "A seed replays one half of a replayed trace, planners see the other; synthetic traces are planned from "
            f"another seed's draw. Requests that planners saw of each model, by popularity: {listed}.{prior}"
        )


# ------------------------------------------------------------------ what a paper states

AND_OR = re.compile(" and | or ")  # between the systems of a claim


def claims_of(panel: Panel, facts: About) -> list[Mapping[str, Any]]:
    """Return the claims in which a paper states a number that a panel can be compared with."""
    return [
        claim
        for claim in facts.claims
        if claim["what"] in {"crossing", "ratio", "fewest"}
        and not isinstance(claim["paper"], str | None)
        and claim.get("comparable", True)
        and not any(claim.get(key) for key in ("evidence", "lacks", "input"))
        and panel in crossings.concerned([panel], claim["on"])
    ]


def floats(e: Estimate) -> dict[str, float]:
    """Return the mean and the ends of the interval of an estimate; an end that does not exist is NaN."""
    ends = {"mean": e.mean, "low": e.low, "high": e.high}
    return {end: math.nan if x is None else x for end, x in ends.items()}


def ends_of(name: str, e: Estimate) -> dict[str, Any]:
    """Return the mean and the interval of an estimate as cells of a table, in columns named after `name`."""
    return {name: e.mean, f"{name}_low": e.low, f"{name}_high": e.high}


def parts_of(name: str, e: Estimate | None) -> dict[str, Any]:
    """Return an estimate as cells of a table, with a sign if it is only a bound; no cells for None."""
    return {} if e is None else ends_of(name, e) | {f"{name}_is": e.sign}


def differences(name: str, standing: Standing) -> dict[str, Any]:
    """Return a standing's differences of attainment as cells of a table.

    Each difference has two groups of cells: the rate (or other x) at which attainment is compared, and the difference
    in percentage points with its interval.
    """
    cells = dict[str, Any]()
    for k, (x, gap) in enumerate(standing.differences, 1):
        cells |= {f"at_{k}": x} | ends_of(f"{name}_{k}", gap.times(100))
    return cells
