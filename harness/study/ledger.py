"""The ledger of claims: every statement of a paper that is compared with runs, once for all studies that test it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.policy import mix
from harness.policy.types import UserError
from harness.rows import setting
from harness.rows.about import Panel
from harness.rows.estimate import NONE
from harness.run.teller import Silent, Teller
from harness.study import claims
from harness.study import load as studies
from harness.study import measured as measures
from harness.study.claims import Verdict
from harness.study.measure import Measured, measure
from harness.study.rule import CLASSES, DECIDED, SAYS, Reading, of_statement
from harness.study.study import START, Claim, Condition, Study, refuse_unknown

FULL = "`bench study NAME --full` runs it"


class Evidence(NamedTuple):
    """A comparison for a statement of a paper: it judges the statement, or is only shown as further evidence."""

    what: str
    where: str  # trace, models, GPUs, SLO
    here: str  # the result
    says: str  # a word of SAYS
    note: str = ""  # missing data, or limits
    weak: str = ""  # why it rests on too little
    evidence: bool = False  # stands beside the statement and does not judge it
    reading: Reading = frozenset()  # options taken of what the paper leaves open: systems, and place


class Statement(NamedTuple):
    """A statement of a paper, and the comparisons that judge it."""

    paper: str
    section: str
    says: str  # the class in words
    number: str  # the paper's
    lines: tuple[Evidence, ...]
    why: str = ""  # a sufficient cause of the paper's number, the constant that it is, or the missing datum
    name: str = ""  # name that claims of several studies share

    @property
    def verdict(self) -> str:
        """The class of the statement, or the reason why it has no class."""
        return of_statement([(line.says, line.reading) for line in self.lines if not line.evidence])

    @property
    def stands(self) -> bool:
        """Tell whether any comparison judges the statement; further evidence does not."""
        return any(not line.evidence for line in self.lines)


class Source(NamedTuple):
    """The statements that a study tests, and the systems that were dropped because their policies failed."""

    statements: tuple[Statement, ...]
    failed: Mapping[str, str]  # keyed by label: why, as in Failed


class Ledger(NamedTuple):
    """All statements, and the reason for each study or system whose statements are missing."""

    statements: tuple[Statement, ...]
    missing: Mapping[str, str]
    left: tuple[str, ...] = ()  # sources of claims that were not asked for


def sources() -> list[str]:
    """Return the names of the studies with claims, as --only takes them."""
    return [name for name in studies.names() if any(c.paper is not None for c in studies.study(name).claim)]


def ledger(
    only: Sequence[str] | None, out: Path, *, workers: int | None = None, teller: Teller | None = None
) -> Ledger:
    """Run the named sources (None: all) and collect their statements.

    A source that cannot run is reported in a line, and the others still run. Raises UserError for an unknown name.
    """
    names, teller = named(only), teller or Silent()
    statements, missing = list[Statement](), dict[str, str]()
    for name in names:
        teller.say(f"claims of {name}")
        try:
            source = of_study(name, out, workers, teller)
        except UserError as error:
            missing[name] = " ".join(str(error).split())
            teller.say(f"{name}: {missing[name]}")
            continue
        statements += source.statements
        missing |= {f"{name}, {label}": why for label, why in source.failed.items()}
    return Ledger(tuple(merged(statements)), missing, tuple(name for name in sources() if name not in names))


def named(only: Sequence[str] | None) -> list[str]:
    """Return the named sources (None: all), each once. Raises UserError for an unknown name."""
    have = sources()
    names = list(dict.fromkeys(have if only is None else only))
    refuse_unknown("no claims of", names, have)
    return names


def merged(statements: Iterable[Statement]) -> list[Statement]:
    """Merge the statements that share a name; the wording is that of a statement which some comparison judges."""
    by_name = dict[str, Statement]()
    for i, statement in enumerate(statements):
        key = statement.name or str(i)
        if (other := by_name.get(key)) is None:
            by_name[key] = statement
            continue
        first, second = (statement, other) if statement.stands and not other.stands else (other, statement)
        whys, numbers = (
            dict.fromkeys(filter(None, pair))
            for pair in ((first.why, second.why), (first.number, *([second.number] if second.stands else [])))
        )
        lines = (*first.lines, *second.lines)
        why = ". ".join(why.rstrip(".") for why in whys)
        by_name[key] = first._replace(lines=lines, why=why, number="; ".join(numbers))
    return list(by_name.values())


def of_study(name: str, out: Path, workers: int | None, teller: Teller) -> Source:
    """Judge the claims of a study on each panel that they are about.

    A claim is listed without a result if its condition is one that only --full runs.
    """
    study = studies.study(name)
    measured = measure(study, out / name, workers=workers, teller=teller)
    of_claim = _lines if study.layout != "claims" else lambda measured, i, _: _measured(measured, i)
    statements = [
        statement(study, claim, of_claim(measured, i, claim))
        for i, claim in enumerate(claims.claims_of(measured.about))
        if claim.paper is not None
    ]
    extra = {condition.name: condition for condition in study.condition if condition.extra}
    left = [claim for claim in study.claim if claim.paper is not None and claim.on.get("condition") in extra]
    statements += [statement(study, c, [_not_run(study, c, extra[c.on["condition"]])]) for c in left]
    return Source(tuple(s for s in statements if s.lines), measured.failed)


def statement(asked: Study, claim: Claim, lines: Sequence[Evidence]) -> Statement:
    """Make the statement of a claim from `lines`, its comparisons."""
    says = claim.says or claims.claim_text(claim, asked, "rate_rps")
    number = claims.paper_text(claim) + (f" ({claim.metric})" if claim.metric else "")
    why = claim.input or (f"lacks {claim.lacks}" if claim.lacks else claim.why)
    return Statement(asked.paper, claim.section, says, number, tuple(lines), why, claim.name)


def _lines(measured: Measured, i: int, claim: Claim) -> list[Evidence]:
    """List the comparisons of the i-th claim; for a cumulative study, only those at its two ends.

    If a system of the claim was not in the study, or if nothing ran for the claim, the first entry of the list says so.
    """
    verdicts = [v for v in claims.of_claim(measured.table, measured.about, i) if v.says in SAYS and _stated(v)]
    lines = [_line(measured, verdict) for verdict in verdicts]
    if claim.evidence or claim.what in {"value", "measure"}:
        return lines
    gone = claims.lacking(claim, measured.about)
    if gone or not any(not line.evidence for line in lines):
        facts = ", ".join(f"{key} {value}" for key, value in claim.on.items())
        why = f"{' and '.join(gone)} took no part" if gone else f"nothing ran with {facts}"
        what = claims.claim_text(claim, measured.about, _axis(claim, measured))
        lines.insert(0, Evidence(what, "", NONE, "not run", why))
    return lines


def _axis(claim: Claim, measured: Measured) -> str:
    """Return the axis of a claim's panels, or the axis of the study if no panel fits the claim."""
    panels = claims.concerned(claim, measured.about)
    return str(panels[0]["axis"]) if panels else measured.study.along


def _stated(verdict: Verdict) -> bool:
    """Tell whether a verdict counts in the class of the paper's statement.

    In a cumulative study, a verdict of class "open" counts only if it was judged by a rule. All other verdicts count.
    """
    step = verdict.panel is not None and bool(verdict.panel["kind"])
    return verdict.rule != NONE or verdict.says != "open" or not step


def _line(measured: Measured, verdict: Verdict) -> Evidence:
    claim, panel, about = verdict.claim, verdict.panel, measured.about
    what = claims.claim_text(claim, about, panel["axis"] if panel else "")
    where = _everywhere(claim, measured) if panel is None else panel_text(panel, measured)
    where = "" if claim.what == "measure" else where
    reading = verdict.reading | ({("where", where)} if where else set())
    return Evidence(
        what, where, verdict.text, verdict.says, verdict.note, claims.weak(verdict), claim.evidence, reading
    )


def panel_text(panel: Panel, measured: Measured) -> str:
    """Describe the conditions of a panel, without the field along its axis."""
    scaled = panel["slo_scale"] or panel["axis"] == "slo_scale"
    slo = f"{panel['slo_scale']:g} x {panel['slo']}" if panel["slo_scale"] else f"x {panel['slo']}"
    gpus = mix.told(panel["gpu"], panel["gpus"]) if panel["gpus"] else panel["gpu"]
    if panel["axis"] == "gpus" and panel["xs"]:
        gpus = f"{min(panel['xs']):g} to {max(panel['xs']):g} x {panel['gpu']}"
    half = f", {panel['half']} half" if panel.get("half") else ""
    parts = [
        f"{panel['trace']} ({panel['tier']}{half})",
        panel["models"],
        gpus,
        panel["host"],
        f"SLO {slo if scaled else panel['slo']}",
        f"{panel['rate_rps']:.3g} req/s{' each' * (panel['axis'] == 'models')}" if panel["rate_rps"] else "",
        (setting.machine(panel["own"]) or "") if not panel["kind"] else "",
        {"base": START, "cumulative": "all assumptions of the bridge"}.get(panel["kind"], ""),
        _seeds(measured.about.seeds),
    ]
    return ", ".join(filter(None, parts))


def _everywhere(claim: Claim, measured: Measured) -> str:
    """Describe the conditions of a claim that is about all panels together."""
    if claim.what == "value":
        return "idle links of a whole node"
    first = measured.about.panels[0]
    traces = " and ".join(dict.fromkeys(panel["trace"] for panel in measured.about.panels))
    gpus = mix.told(first["gpu"], first["gpus"]) if first["gpus"] else first["gpu"]
    return f"{traces}, {first['models']}, {gpus}, SLO {first['slo']}, {_seeds(measured.about.seeds)}"


def _not_run(asked: Study, claim: Claim, condition: Condition) -> Evidence:
    """Return the entry for a claim about a condition that only --full runs; the entry states that nothing was run."""
    traces = "; ".join(asked.varied(condition).get("trace", (asked.settings(condition).get("trace", ""),)))
    where = ", ".join(filter(None, (traces, "; ".join(asked.sets(condition)), condition.name)))
    what = claims.claim_text(claim, asked, asked.axis(condition))
    return Evidence(what, where, NONE, "full form", FULL.replace("NAME", asked.name), evidence=claim.evidence)


def _measured(measured: Measured, i: int) -> list[Evidence]:
    """List the comparisons of the i-th claim about a measure: one for each law of lengths."""
    where = f"{measured.study.setting}, {_seeds(measured.about.seeds)}"
    lines = []
    for verdict in claims.of_claim(measured.table, measured.about, i):
        claim, law = verdict.claim, measures.law(verdict.panel)
        what = claim.says if claim.evidence else f"{law} lengths" if law else ""
        note = verdict.note if verdict.says in CLASSES else ""
        reading: Reading = frozenset({("lengths", law)} if law else ())
        lines.append(
            Evidence(what, where, verdict.text, verdict.says, note, claims.weak(verdict), claim.evidence, reading)
        )
    return lines


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def weak(ledger: Ledger) -> list[str]:
    """List the statements whose class is based on too few misses or windows.

    Each comparison that decides the class is listed with the reason.
    """
    return [
        f"{s.paper}: {s.says}: {' '.join(filter(None, (line.what, line.says)))}: {line.weak}"
        for s in ledger.statements
        for line in s.lines
        if line.weak
        and not line.evidence
        and s.verdict in DECIDED
        and (s.verdict != "contradicted" or line.says == "contradicted")
    ]
