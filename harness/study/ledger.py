"""One ledger: every claim of every paper that is held against runs here, a row each, whatever experiment holds it.

A source runs its own experiment (stored runs that are current are kept) and puts its verdicts, which are all by
`claims.judged`, into rows. Nothing is judged here but the ends of a bridge, by the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.report.estimate import NONE
from harness.report.text_table import laid
from harness.rows import ratios as ratio_rows
from harness.rows import tidy
from harness.rows.statistics import Estimate
from harness.run import toml_tables
from harness.run.teller import Silent, Teller
from harness.study import (
    ablation,
    claims,
    conditions,
    fewest,
    fewest_text,
    figure,
    figure_text,
    ratios,
    reproduce,
    weaving,
)
from harness.study.claims import SAYS

UNTESTED = "not testable"
LEGEND = {**SAYS, UNTESTED: "a datum is missing, which is named"}
UNKNOWN = "the cause is not isolated"
FULL = "only --full runs its row"


class Row(NamedTuple):
    """A claim beside what came out, in words."""

    paper: str
    claim: str
    conditions: str  # trace, models, GPUs, SLO, definition
    says: str  # the paper
    here: str
    verdict: str  # of LEGEND
    why: str  # the cause where it differs, or what it lacks
    rule: str  # when it agrees


HEAD = ("paper", "claim", "conditions", "the paper", "here", "verdict", "cause, or what is missing", "agrees if")


class Held(NamedTuple):
    """The rows of a source, and the systems that left it."""

    rows: tuple[Row, ...]
    failed: Mapping[str, str]  # as Failed has them


class Ledger(NamedTuple):
    """All rows, and what is not among them: by source, why."""

    rows: tuple[Row, ...]
    missing: Mapping[str, str]


Source = Callable[[Path, int | None, Teller], Held]  # results folder, processes, who hears


def sources() -> dict[str, Source]:
    """What holds claims, by the name that --only takes, in order of its kind."""
    return {
        **{name: partial(of_figure, name) for name in figure.names()},
        **{name: partial(of_fleet, name) for name in toml_tables.names(fewest.FLEETS)},
        **{f"ablate-{name}": partial(of_ablation, name) for name in toml_tables.names(ablation.ABLATIONS)},
        **{f"bridge-{name}": partial(of_bridge, name) for name in toml_tables.names(conditions.HERE / "bridges")},
        "weaver": of_weaver,
    }


def ledger(
    only: Sequence[str] | None, out: Path, *, workers: int | None = None, teller: Teller | None = None
) -> Ledger:
    """Run every source, or those that are named; one that cannot run is said in a line and the others go on.

    Raises UserError for a name that is none.
    """
    have, teller = sources(), teller or Silent()
    names = list(dict.fromkeys(have if only is None else only))
    if unknown := next((name for name in names if name not in have), None):
        raise UserError(f'no claims of "{unknown}"{meant(unknown, have)} (there are: {", ".join(have)})')
    rows, missing = list[Row](), dict[str, str]()
    for name in names:
        teller.say(f"claims of {name}")
        try:
            held = have[name](out, workers, teller)
        except UserError as error:
            missing[name] = " ".join(str(error).split())
            teller.say(f"{name}: {missing[name]}")
            continue
        rows += held.rows
        missing |= {f"{name}, {label}": why for label, why in held.failed.items()}
    return Ledger(tuple(rows), missing)


def cause(verdict: str, why: str) -> str:
    """What a verdict other than `agrees` is due to."""
    if verdict == "differs":
        return why or UNKNOWN
    return why if verdict in {"not comparable", "does not fit", "not run", UNTESTED} else ""


# ------------------------------------------------------------------ sources


def of_figure(name: str, out: Path, workers: int | None, teller: Teller) -> Held:
    """A figure's claims on each panel that they are about, and those whose rows are not run."""
    asked = figure.figure(name)
    found = reproduce.reproduce(asked, out / asked.name, workers=workers, teller=teller)
    rows = [_of_panel(one, asked, found) for one in claims.verdicts(found)]
    for one in asked.claims:
        if one.row and (row := asked.rows[one.row - 1]).extra:
            traces, sets = ("; ".join(names) for names in (row.traces or asked.traces, row.models))
            about = f"{traces}, {sets}, {' to '.join(map(str, ends(row.gpus)))} x {asked.gpu}, {asked.host}"
            said = figure_text.claim_text(one, asked.level), about, figure_text.paper_text(one)
            rows.append(Row(asked.paper, *said, NONE, "not run", FULL, NONE))
    return Held(tuple(rows), found.failed)


def ends(counts: Sequence[int]) -> tuple[int, ...]:
    """The least and the most of counts, or the only one."""
    return tuple(dict.fromkeys((min(counts), max(counts))))


def _of_panel(one: claims.Verdict, asked: figure.Figure, found: reproduce.Reproduced) -> Row:
    """A verdict of a figure."""
    claim, panel, why = one.claim, one.panel, one.claim.why
    if one.says == "does not fit":
        own = claims.of_panel(found.table, panel["panel"])
        who = [label for label in (claim.system, claim.over) if label]
        why = "; ".join(f"{label}: {gone.why}" for label in who if (gone := tidy.unfit(own, label)) and gone.every)
    level = found.about["level"]
    said = figure_text.claim_text(claim, level), _panel_text(panel, asked, found), figure_text.paper_text(claim)
    return Row(asked.paper, *said, one.here, one.says, cause(one.says, why), one.rule)


def _panel_text(panel: Mapping[str, Any], asked: figure.Figure, found: reproduce.Reproduced) -> str:
    """The conditions of a panel; what runs along its axis is left out."""
    parts = [
        f"{panel['trace']} ({panel['tier']})",
        panel["models"],
        f"{panel['gpus']} x {asked.gpu}" if panel["gpus"] else asked.gpu,
        asked.host,
        f"SLO {panel['slo_scale']:g} x {asked.slo}" if panel["slo_scale"] else f"SLO x {asked.slo}",
        f"{panel['rate_rps']:.3g} req/s{' each' * (panel['axis'] == 'models')}" if panel["rate_rps"] else "",
        *(f"{key} {said}" for key, said in panel["own"].items()),
        _seeds(found.about["seeds"]),
    ]
    return ", ".join(filter(None, parts))


def of_fleet(name: str, out: Path, workers: int | None, teller: Teller) -> Held:
    """The fewest GPUs that a paper states, on each workload."""
    asked = fewest.fleet(name)
    found = fewest.fewest(asked, out / asked.name, workers=workers, teller=teller)
    facts = {(one["trace"], one["rate_scale"]): one for one in found.about["workloads"]}
    rows = []
    for one in fewest.verdicts(found):
        its = facts[one.workload.trace, one.workload.rate_scale]
        at = (
            f"{its['name']} ({its['tier']}) at {its['rate_rps']:.3g} req/s, {asked.spec.get('models', '')}, "
            f"{asked.gpus[0]} to {asked.gpus[1]} GPUs, {100 * asked.level:g} % {asked.definition.upper()}, "
            f"{_seeds(asked.seeds)}"
        )
        said = fewest_text.claim_text(one.claim), at, fewest_text.paper_text(one.claim), fewest_text.here_text(one)
        rule = fewest_text.rule_text(one.claim)
        rows.append(Row(asked.paper, *said, one.says, cause(one.says, one.claim.why), rule))
    return Held(tuple(rows), found.failed)


def of_ablation(name: str, out: Path, workers: int | None, teller: Teller) -> Held:
    """What parts add where the paper has a number, and activations."""
    asked = ablation.ablation(name)
    found = ablation.ablate(asked, out / f"ablate-{asked.name}", workers=workers, teller=teller)
    traces = " and ".join(dict.fromkeys(one.trace for one in asked.workload))
    at = (
        f"{traces}, {asked.spec.get('models', '')}, {asked.spec.get('gpus', '')} GPUs, SLO {asked.slo}, "
        f"{asked.definition.upper()}, {_seeds(asked.seeds)}"
    )
    links = "idle links of a whole node"
    alone = {one.what for one in ablation.activations(asked)}
    rows = [
        Row(
            asked.paper,
            one.what,
            links if one.what in alone else at,
            one.paper,
            one.here,
            one.says,
            cause(one.says, one.why),
            one.rule,
        )
        for one in ablation.numbers(found)
    ]
    return Held(tuple(rows), found.failed)


def of_bridge(name: str, out: Path, workers: int | None, teller: Teller) -> Held:
    """A paper's ratios at both ends of a bridge: the fair default, and all of its assumptions."""
    study = conditions.study("bridge", name)
    found = ratios.measure(study, out, workers=workers, teller=teller)
    held = [row for row in found.table.to_pylist() if row["over"] is not None and row["paper"] is not None]
    last = max((row["condition"] for row in held if row["kind"] == "cumulative"), default=None)
    spec, about = study.spec, found.about
    whys = {(one.first, one.over): one.why for one in study.ratios}
    rows = []
    for one in held:
        if one["kind"] != "base" and one["condition"] != last:
            continue
        setting = conditions.START if one["kind"] == "base" else "all assumptions of the bridge"
        at = (
            f"{spec.get('trace', '')}, {spec.get('models', '')}, {spec.get('gpus', '')} GPUs, SLO {about['slo']}, "
            f"{setting}, {_seeds(about['seeds'])}"
        )
        what = f"{one['first']} / {one['over']}, rate at {100 * about['level']:g} % {about['definition'].upper()}"
        verdict, rule = _of_ratio(one)
        said = at, f"{one['paper']:g}x", ratio_rows.text(one), verdict
        why = whys[one["first"], one["over"]] if verdict == "differs" else one["note"]
        rows.append(Row(study.paper, what, *said, cause(verdict, why), rule))
    return Held(tuple(rows), {})


def _of_ratio(row: Mapping[str, Any]) -> tuple[str, str]:
    """A verdict and its rule for a row of `harness.rows.ratios`."""
    if row["mean"] is None:  # a system has no room, or no rate tells the two apart
        return ("does not fit" if "infeasible" in row["note"] else "open"), NONE
    here = Estimate(row["mean"], row["low"], row["high"], row["n"], row["sign"])
    return claims.judged(row["paper"], here), claims.rule(row["paper"], here)


def of_weaver(out: Path, workers: int | None, teller: Teller) -> Held:  # noqa: ARG001 - a source; its runs are in turn
    """Weaver's claims, which are about TPOT, batches and memory."""
    at = f"two {weaving.MODEL}, lengths of {Path(weaving.LENGTHS).stem}, {weaving.HOST}, {_seeds(weaving.SEEDS)}"
    rows = [
        Row(f"{weaving.PAPER}, section {one.section}", one.says, at, weaving.number(one.paper),
            weaving.here_text(one.here), one.verdict, cause(one.verdict, one.why),
            NONE if one.here is None else claims.rule(one.paper, one.here))
        for one in weaving.lines(out=out, teller=teller)
    ]  # fmt: skip
    return Held(tuple(rows), {})


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


# ------------------------------------------------------------------ as Markdown


def markdown(found: Ledger) -> Iterator[str]:
    """The ledger as a page: how many of each verdict, what a verdict means, a row a claim, what did not run."""
    yield "# Claims"
    yield ""
    yield "Made by `bench claims` (`make claims`): what papers say, beside what came out here, by one rule for all."
    yield ""
    said = [one.verdict for one in found.rows]
    yield from (f"- {said.count(word)} {word}: {means}" for word, means in LEGEND.items() if word in said)
    yield from laid([HEAD, *([escaped(cell) for cell in one] for one in found.rows)], markdown=True)
    if found.missing:
        yield "Not among them:"
        yield ""
        yield from (f"- {escaped(name)}: {escaped(why)}" for name, why in found.missing.items())


def escaped(text: str) -> str:
    """Text as a cell of Markdown; `laid` takes care of bars."""
    return re.sub(r"([\\*<~])", r"\\\1", " ".join(text.split()))


def counted(rows: Iterable[Row]) -> str:
    """How many of each verdict, in a line."""
    said = [one.verdict for one in rows]
    return ", ".join(f"{said.count(word)} {word}" for word in LEGEND if word in said) or "no claims"
