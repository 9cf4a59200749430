"""One ledger: every claim of every paper that is held against runs here, a row each, whatever study holds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.report.text_table import laid
from harness.rows.crossings import Panel
from harness.rows.estimate import NONE
from harness.run.teller import Silent, Teller
from harness.study import claims, weaving
from harness.study import load as studies
from harness.study.claims import SAYS, Verdict
from harness.study.measure import Measured, measure
from harness.study.study import START, Claim, Study

UNTESTED = "not testable"
LEGEND = {**SAYS, UNTESTED: "a datum is missing, which is named"}
UNKNOWN = "the cause is not isolated"
FULL = "only --full runs its condition"


class Line(NamedTuple):
    """A claim beside what came out, in words."""

    paper: str
    claim: str
    conditions: str  # trace, models, GPUs, SLO
    says: str  # the paper
    here: str
    verdict: str  # of LEGEND
    why: str  # the cause where it differs, or what it lacks
    rule: str  # when it agrees


HEAD = ("paper", "claim", "conditions", "the paper", "here", "verdict", "cause, or what is missing", "agrees if")


class Source(NamedTuple):
    """The lines of a study, and the systems that left it."""

    lines: tuple[Line, ...]
    failed: Mapping[str, str]  # as Failed has them


class Ledger(NamedTuple):
    """All lines, and what is not among them: by study, why."""

    lines: tuple[Line, ...]
    missing: Mapping[str, str]


def sources() -> dict[str, Callable[[Path, int | None, Teller], Source]]:
    """What holds claims, by the name that --only takes."""
    with_claims = [name for name in studies.names() if any(c.paper is not None for c in studies.study(name).claim)]
    return {**{name: partial(of_study, name) for name in with_claims}, "weaver": of_weaver}


def ledger(
    only: Sequence[str] | None, out: Path, *, workers: int | None = None, teller: Teller | None = None
) -> Ledger:
    """Run every source, or those that are named; one that cannot run is told in a line and the others go on.

    Raises UserError for a name that is none.
    """
    have, teller = sources(), teller or Silent()
    names = list(dict.fromkeys(have if only is None else only))
    if unknown := next((name for name in names if name not in have), None):
        raise UserError(f'no claims of "{unknown}"{meant(unknown, have)} (there are: {", ".join(have)})')
    lines, missing = list[Line](), dict[str, str]()
    for name in names:
        teller.say(f"claims of {name}")
        try:
            source = have[name](out, workers, teller)
        except UserError as error:
            missing[name] = " ".join(str(error).split())
            teller.say(f"{name}: {missing[name]}")
            continue
        lines += source.lines
        missing |= {f"{name}, {label}": why for label, why in source.failed.items()}
    return Ledger(tuple(lines), missing)


def of_study(name: str, out: Path, workers: int | None, teller: Teller) -> Source:
    """A study's claims on each panel that they are about, and those whose conditions are only for --full."""
    asked = studies.study(name)
    measured = measure(asked, out / name, workers=workers, teller=teller)
    verdicts = [v for v in claims.verdicts(measured.table, measured.about) if v.says in SAYS and _stated(v)]
    lines = [_line(asked, measured, verdict) for verdict in verdicts]
    lines += [_not_run(asked, claim) for claim in asked.claim if claim.paper is not None and _extra(asked, claim)]
    return Source(tuple(lines), measured.failed)


def _stated(verdict: Verdict) -> bool:
    """Tell whether a verdict is on a number of the paper; of a cumulative study at its ends alone."""
    return verdict.claim.paper is not None and (verdict.rule != NONE or verdict.says != "open" or not _step(verdict))


def _step(verdict: Verdict) -> bool:
    return verdict.panel is not None and bool(verdict.panel["kind"])


def _line(asked: Study, measured: Measured, verdict: Verdict) -> Line:
    claim, panel, about = verdict.claim, verdict.panel, measured.about
    what = claims.claim_text(claim, about, panel["axis"] if panel else "")
    where = _everywhere(claim, measured) if panel is None else panel_text(panel, measured)
    why = verdict.note if verdict.says == "does not fit" else claim.why
    return Line(
        asked.paper, what, where, claims.paper_text(claim), verdict.text, verdict.says, cause(verdict.says, why),
        verdict.rule,
    )  # fmt: skip


def cause(verdict: str, why: str) -> str:
    """What a verdict other than `agrees` is due to."""
    if verdict == "differs":
        return why or UNKNOWN
    return why if verdict in {"not comparable", "does not fit", "not run", UNTESTED} else ""


def panel_text(panel: Panel, measured: Measured) -> str:
    """The conditions of a panel; what runs along its axis is left out."""
    scaled = panel["slo_scale"] or panel["axis"] == "slo_scale"
    slo = f"{panel['slo_scale']:g} x {panel['slo']}" if panel["slo_scale"] else f"x {panel['slo']}"
    gpus = f"{panel['gpus']} x {panel['gpu']}" if panel["gpus"] else panel["gpu"]
    if panel["axis"] == "gpus" and panel["xs"]:
        gpus = f"{min(panel['xs']):g} to {max(panel['xs']):g} x {panel['gpu']}"
    parts = [
        f"{panel['trace']} ({panel['tier']})",
        panel["models"],
        gpus,
        panel["host"],
        f"SLO {slo if scaled else panel['slo']}",
        f"{panel['rate_rps']:.3g} req/s{' each' * (panel['axis'] == 'models')}" if panel["rate_rps"] else "",
        *(f"{key} {value}" for key, value in (panel["own"] if not panel["kind"] else {}).items()),
        {"base": START, "cumulative": "all assumptions of the bridge"}.get(panel["kind"], ""),
        _seeds(measured.seeds),
    ]
    return ", ".join(filter(None, parts))


def _everywhere(claim: Claim, measured: Measured) -> str:
    """The conditions of a claim about all panels together."""
    if claim.what == "value":
        return "idle links of a whole node"
    first = measured.about["panels"][0]
    traces = " and ".join(dict.fromkeys(panel["trace"] for panel in measured.about["panels"]))
    return (
        f"{traces}, {first['models']}, {first['gpus']} x {first['gpu']}, SLO {first['slo']}, {_seeds(measured.seeds)}"
    )


def _extra(asked: Study, claim: Claim) -> bool:
    """Tell whether a claim is about conditions that only --full runs."""
    return any(one.extra for one in asked.condition if one.name == claim.on.get("condition"))


def _not_run(asked: Study, claim: Claim) -> Line:
    condition = next(one for one in asked.condition if one.name == claim.on["condition"])
    traces = "; ".join(asked.varied(condition).get("trace", (asked.settings(condition).get("trace", ""),)))
    about = {"level": asked.level, "definitions": asked.definitions}
    where = f"{traces}, {'; '.join(asked.sets(condition))}, {condition.name}"
    what = claims.claim_text(claim, about, asked.axis(condition))
    return Line(asked.paper, what, where, claims.paper_text(claim), NONE, "not run", FULL, NONE)


def of_weaver(out: Path, workers: int | None, teller: Teller) -> Source:  # noqa: ARG001 - a source; its runs are in turn
    """Weaver's claims, which are about TPOT, batches and memory."""
    at = f"two {weaving.MODEL}, lengths of {Path(weaving.LENGTHS).stem}, {weaving.HOST}, {_seeds(weaving.SEEDS)}"
    lines = [
        Line(f"{weaving.PAPER}, section {one.section}", one.verdict.claim.subject, at,
             claims.paper_text(one.verdict.claim), one.verdict.text, one.verdict.says,
             cause(one.verdict.says, one.verdict.note or one.verdict.claim.why), one.verdict.rule)
        for one in weaving.lines(out=out, teller=teller)
    ]  # fmt: skip
    return Source(tuple(lines), {})


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


# ------------------------------------------------------------------ as Markdown


def markdown(found: Ledger) -> Iterator[str]:
    """The ledger as a page: how many of each verdict, what a verdict means, a row a claim, what did not run."""
    yield "# Claims"
    yield ""
    yield "Made by `bench claims` (`make claims`): what papers say, beside what came out here, by one rule for all."
    yield ""
    verdicts = [line.verdict for line in found.lines]
    yield from (f"- {verdicts.count(word)} {word}: {means}" for word, means in LEGEND.items() if word in verdicts)
    yield from laid([HEAD, *([escaped(cell) for cell in line] for line in found.lines)], markdown=True)
    if found.missing:
        yield "Not among them:"
        yield ""
        yield from (f"- {escaped(name)}: {escaped(why)}" for name, why in found.missing.items())


def escaped(text: str) -> str:
    """Text as a cell of Markdown; `laid` takes care of bars."""
    return re.sub(r"([\\*<~])", r"\\\1", " ".join(text.split()))


def counted(lines: Iterable[Line]) -> str:
    """How many of each verdict, in a line."""
    verdicts = [line.verdict for line in lines]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in LEGEND if word in verdicts) or "no claims"
