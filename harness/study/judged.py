"""The SLO that judges a stored run: the requested rule, the SLO of the run's policy, or that of a comparison."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from harness.rows import record
from harness.run import slo as slos
from harness.run.slo import SloTarget
from harness.run.spec import Spec
from harness.run.teller import Teller
from harness.study.bases import slo_target

BASES = {  # origin of a rule's seconds, by a part of its text
    "classes:": "seconds by class",
    "absolute:": "seconds for every model",
    "P95": "P95 measured on dedicated",
    "solo": "each request alone on an idle GPU",
    "released": "released with the model set",
}


def target(run: Path, spec: Spec, rule: str | None, default: str, teller: Teller) -> tuple[SloTarget, list[str]]:
    """Return the SLO target that judges a stored run, and lines that describe this target.

    If `rule` is None, the target is the SLO that the run's policy read. Without such an SLO, it is the target of a
    comparison stored next to the run, or else that of the rule `default`. The lines then also name the comparisons that
    judged the run by other rules.

    If `rule` is given and already judged the run, the seconds stored for this rule are used. The seconds of any other
    rule are computed as for a new comparison.
    """
    stored, lost = slos.rulings(run)
    candidates = [(ruling.under, f"as {ruling.table.name} judged this run") for ruling in stored]
    if spec.slo:
        seconds = {model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s} or None
        where = f"{run / record.ROWS}: spec"
        candidates.insert(0, (slos.stored_target(where, spec.slo, seconds), "which this run's policy read"))
    wanted = None if rule is None else slos.located(rule)
    under, origin = next(((slo, how) for slo, how in candidates if wanted in {None, slo.rule}), (None, ""))
    if under is None:
        plain = replace(spec, slo="", slo_s=())
        under = slo_target(plain, wanted or default, run.parent, teller=teller)
        origin = "as asked for" if wanted else "the default, for no comparison beside this run judged it"
    lines = [f"SLO {under.rule} ({_base(under.rule)}), {origin}"]
    others = [ruling for ruling in stored if wanted is None and ruling.under.rule != under.rule]
    lines += [f"{ruling.table.name} judged it otherwise: --slo {shlex.quote(ruling.under.rule)}" for ruling in others]
    return under, lines + lost * (wanted is None)


def _base(rule: str) -> str:
    return next(words for key, words in BASES.items() if key in rule)
