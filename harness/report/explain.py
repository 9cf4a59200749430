"""Where a request's time went, in words: stored waits by cause, which sum to its latency."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.experiment import slo as slos
from harness.experiment.slo import Judge
from harness.experiment.spec import Spec
from harness.experiment.sweep import Teller
from harness.policy.types import UserError
from harness.report.table import aligned
from harness.rows import metrics
from harness.rows.record import WAITS

if TYPE_CHECKING:
    import pyarrow as pa

CAUSES = {
    "held": "held back by the policy, in no batch, while its model's weights were in",
    "host": "in the engine's API, before the queue and after the last token",
    "load": "its model's weights were out, or on their way in",
    "kv": "no KV memory for its prompt",
    "move": "its KV was on the way",
    "turn": "its lane was closed, full, or in another step",
    "solo": "running, as long as it would have alone",
    "slow": "running, slowed by others on its GPU",
}
BASES = {  # where the seconds of a rule come from, by a part of its text
    "classes:": "seconds by class",
    "absolute:": "seconds for every model",
    "P95": "P95 measured on dedicated",
    "solo": "each request alone on an idle GPU",
    "released": "released with the model set",
}
SHOWN = 5  # of the latest misses


def judge(run: Path, spec: Spec, rule: str | None, default: str, teller: Teller) -> tuple[Judge, list[str]]:
    """The judge of a run under a rule (None: the one that judged it), and lines that say which and who else judged it.

    What judged the run stands in the tables beside it, or in its spec, where its policy read the SLO. A rule that is in
    neither, and `default` where there is none, is turned into seconds as a comparison would do.
    """
    stored = slos.rulings(run)
    found = [(one.under, f"as {one.table.name} judged this run") for one in stored]
    if spec.slo:
        seconds = {model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s} or None
        found.insert(0, (Judge(spec.slo, seconds), "which this run's policy read"))
    asked = None if rule is None else slos.located(rule)
    under, origin = next(((one, how) for one, how in found if asked in {None, one.rule}), (None, ""))
    if under is None:
        plain = replace(spec, slo="", slo_s=())
        under = slos.judge(plain, asked or default, run.parent, teller=teller)
        origin = "as asked for" if asked else "the default, for no comparison beside this run judged it"
    lines = [f"SLO {under.rule} ({_base(under.rule)}), {origin}"]
    others = [one for one in stored if asked is None and one.under.rule != under.rule]
    lines += [f"{one.table.name} judged it otherwise: --slo {shlex.quote(one.under.rule)}" for one in others]
    return under, lines


def _base(rule: str) -> str:
    return next(words for key, words in BASES.items() if key in rule)


def timeline(table: pa.Table, rid: int, slo: metrics.Slo) -> Iterator[str]:
    """Lines about one request. Raises UserError where there is none of that id."""
    if rid >= table.num_rows:
        raise UserError(f"no request {rid}: the ids of this run are 0 to {table.num_rows - 1}")
    q = table.slice(rid, 1).to_pylist()[0]
    rows = metrics.rows(table.slice(rid, 1))
    ttft_s, tpot_s = float(rows.ttft_s[0]), float(metrics.tpot_s(rows)[0])
    which = np.arange(table.num_rows) == rid
    limits = [float(x[0]) for x in metrics.limits(rows, slo.take(which) if isinstance(slo, metrics.Limits) else slo)]
    where = f"gpu {q['gpus']}" if q["gpus"] else "never ran"
    yield f"request {rid} · {q['model']} · {q['prompt_tokens']} in, {q['output_tokens']} out · {where} · {q['state']}"
    said = [_against("TTFT", ttft_s, limits[0], q["state"] == "done")]
    if q["output_tokens"] > 1:
        said.append(_against("TPOT", tpot_s, limits[1], q["state"] == "done"))
    yield "  " + "; ".join(said)
    total_s = sum(q[f"{wait}_ns"] for wait in WAITS) / 1e9
    stamps = [("arrived", 0), ("admitted", _since(q, "admit_ns")), ("first token", _since(q, "first_ns")),
              (q["state"], _since(q, "done_ns"))]  # fmt: skip
    lines = [(f"{ns / 1e9:10.4f}", name) for name, ns in stamps if ns is not None]
    yield from (f"  {at} s  {name}" for at, name in lines)
    yield f"  where its {total_s:.4f} s went{'' if q['done_ns'] is not None else ' until the run ended'}, by cause:"
    for wait in WAITS:
        seconds = q[f"{wait}_ns"] / 1e9
        if seconds:
            yield f"  {seconds:10.4f} s  {wait:<5} {100 * seconds / total_s:3.0f} %  {CAUSES[wait]}"
    if q["preemptions"]:
        yield f"  preempted {q['preemptions']} times: what was made is prefilled again"


def _since(q: dict[str, Any], stamp: str) -> int | None:
    return None if q[stamp] is None else q[stamp] - q["arrival_ns"]


def _against(name: str, value_s: float, limit_s: float, done: bool) -> str:
    if math.isnan(value_s):
        return f"{name}: never"
    met = "met" if done and value_s <= limit_s else "missed"
    limit = "no SLO" if math.isinf(limit_s) else f"SLO {limit_s:.4g} s"
    return f"{met} {name}: {value_s:.4g} s, {limit}" if limit != "no SLO" else f"{name}: {value_s:.4g} s, no SLO"


def misses(table: pa.Table, window_s: float, slo: metrics.Slo, definition: str, again: str) -> Iterator[str]:
    """Lines about all that missed: by model, what most were waiting for, and which to look at.

    A miss scores less than 1 by a definition of attainment; `again` is this command without what it asks.
    """
    rows = metrics.rows(table)
    offered = metrics.in_window(rows, window_s)
    ids = offered.nonzero()[0]
    rows = metrics.take(rows, offered)
    slo = metrics.limits(rows, slo.take(offered) if isinstance(slo, metrics.Limits) else slo)
    score = metrics.DEFINITIONS[definition](rows, slo)
    if score is None:
        raise UserError(f"this run has no token times, which {definition} needs (--definition names another)")
    missed = int((score < 1).sum())
    share = f"{100 * missed / max(1, len(rows)):.1f} %"
    part = f"; a request counts in part: attainment {100 * metrics.share(score):.1f} %"
    part *= definition in metrics.BY_TOKEN
    yield f"{missed} of {len(rows)} requests missed ({share}, {definition}){part}"
    if not missed:
        return
    shown = [wait for wait in WAITS if wait != "solo"]
    lines = [["model", "offered", "missed", "TTFT", "TPOT", *shown]]
    late = [score < 1, metrics.met_ttft(rows, slo) < 1, metrics.met_tpot(rows, slo) < 1]
    for i, model in [*enumerate(rows.models), (-1, "all")]:
        mine = rows.model == i if i >= 0 else np.ones(len(rows), bool)
        causes = metrics.causes(metrics.take(rows, mine), score[mine])
        shares = [f"{100 * causes[wait]:.0f} %" if causes and causes[wait] else "-" for wait in shown]
        lines.append([model, str(int(mine.sum())), *(str(int(x[mine].sum())) for x in late), *shares])
    yield from aligned(lines)
    yield "share of misses by their longest wait: " + "; ".join(f"{wait}: {CAUSES[wait]}" for wait in shown)
    latest = sorted((i for i in range(len(rows)) if score[i] < 1), key=lambda i: -rows.waits_s[i].sum())[:SHOWN]
    yield "longest: " + ", ".join(str(int(ids[i])) for i in latest)
    yield f"next: {again} --request {int(ids[latest[0]])}"
