"""A fleet in words: the fewest GPUs by system and SLO, a block a workload, and the claims beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.report.estimate import NONE
from harness.report.text_table import laid
from harness.rows.statistics import Estimate
from harness.study.claims import SAYS, rule
from harness.study.fewest import Answer, Claim, Found, Verdict, verdicts
from harness.study.rates import Workload


def lines(found: Found, *, markdown: bool = False) -> Iterator[str]:
    """What is printed: a block a workload, then the claims."""
    yield "by SLO: GPUs, what is attained on so many, also by the worst model (means over seeds); CPU s of all runs"
    for workload in dict.fromkeys(one.workload for one in found.answers):
        yield from _block(found, workload, markdown)
        yield ""
    yield from _claims(found, markdown)


def _block(found: Found, workload: Workload, markdown: bool) -> Iterator[str]:
    about = found.about
    facts = next(
        x for x in about["workloads"] if (x["trace"], x["rate_scale"]) == (workload.trace, workload.rate_scale)
    )
    own = [one for one in found.answers if one.workload == workload]
    goal = f"{100 * about['level']:g} % {about['definition'].upper()}"
    yield (
        f"fewest GPUs of {about['gpus'][0]} to {about['gpus'][1]} for {goal} · {facts['name']} ({facts['tier']}) "
        f"at {facts['rate_rps']:.3g} req/s · {_seeds(about['seeds'])}"
    )
    slos = [slo for slo in about["slos"] if any(one.slo == slo for one in own)]
    head = ["system"]
    for slo in slos:
        head += [slo, "met %", "worst %"]
    rows = [[*head, "CPU s"]]
    for label in (*about["systems"], *about["bounds"]):
        mine = [one for slo in slos for one in own if (one.slo, one.label) == (slo, label)]
        if mine:
            cells = [cell for one in mine for cell in _cells(one)]
            rows.append([label, *cells, f"{sum(one.cpu_s for one in mine):.0f}"])
    yield from laid(rows, markdown=markdown)


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"mean of {n} seeds [each alone, where they differ]"


def _cells(one: Answer) -> list[str]:
    share, worst = (NONE if math.isnan(x) else f"{100 * x:.1f}" for x in (one.attained, one.worst))
    return [count(one.at) + spread(one.seeds), share, worst]


def count(e: Estimate) -> str:
    """A number of GPUs; "≤" and ">" where it lies at an end of what was tried."""
    return f"{ {'<': '≤', '>': '>'}.get(e.sign, '') }{e.mean:.0f}"


def spread(seeds: Sequence[Estimate]) -> str:
    """The seeds' own counts from the least to the most, where they differ."""
    every = sorted(seeds, key=lambda e: (e.sign == ">", e.mean))
    ends = dict.fromkeys(count(e) for e in (every[0], every[-1])) if every else {}
    return f" [{' - '.join(ends)}]" if len(ends) > 1 else ""


def claim_text(c: Claim) -> str:
    """What a claim is about."""
    return f"{f'{c.system} / {c.over}' if c.over else c.system}, GPUs at SLO {c.slo}"


def paper_text(c: Claim) -> str:
    """What the paper says."""
    unit = "x" if c.over else ""
    return " - ".join(f"{x:g}{unit}" for x in (c.paper if isinstance(c.paper, tuple) else (c.paper,)))


def here_text(one: Verdict) -> str:
    """What came out: a count or a ratio of counts."""
    return NONE if one.here is None else f"{one.here.mean:.2f}x" if one.claim.over else count(one.here)


def rule_text(c: Claim) -> str:
    """When a claim agrees."""
    return rule(c.paper, None) if c.comparable else NONE


def _claims(found: Found, markdown: bool) -> Iterator[str]:
    every = verdicts(found)
    if not every:
        return
    rows = [[f"claim ({found.about['paper']})", "workload", "paper", "here", "verdict", "agrees if"]]
    for one in every:
        at = f"{one.workload.trace} x {one.workload.rate_scale:g}"
        rows.append([claim_text(one.claim), at, paper_text(one.claim), here_text(one), one.says, rule_text(one.claim)])
    yield from laid(rows, markdown=markdown)
    for says, words in (("differs", "where it differs"), ("not comparable", "not comparable")):
        for why in dict.fromkeys(one.claim.why for one in every if one.claim.why and one.says == says):
            yield f"{words}: {why}"
    counts = {says: sum(one.says == says for one in every) for says in SAYS}
    yield "; ".join(f"{n} {says}: {SAYS[says]}" for says, n in counts.items() if n)
