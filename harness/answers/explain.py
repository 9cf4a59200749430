"""The time of requests, explained in words: waits by cause, which sum to a latency, and one request's timeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.answers.table import aligned
from harness.policy.types import GIB, UserError
from harness.rows import causes, definitions, requests, tally
from harness.rows.definitions import DEFINITIONS
from harness.rows.record import WAITS
from harness.run.stretches import COUNTED, Part, by_cause

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.policy.types import Inst


class Cause(NamedTuple):
    """A cause of a miss (causes.CAUSES) in words."""

    phrase: str
    what: str
    excess: str = ""  # the same for the time of a miss that it explains (beyond the request alone), if different


CAUSES: Mapping[str, Cause] = {
    "admission": Cause("waiting for admission", "not admitted by the policy, in no batch, while its weights were in"),
    "host": Cause("host", "in the engine's API, before the queue and after the last token"),
    "load": Cause("waiting for weights", "its model's weights were out, or on their way in"),
    "kv": Cause("KV wait", "no KV memory for its prompt"),
    "transfer": Cause("KV transfer", "its KV was on the way"),
    "queue": Cause("queueing for a step", "its lane was closed, full, or in another step"),
    "compute": Cause(
        "running",
        "running, as long as its steps take on GPUs of their own",
        "running longer than alone: batched with others, computed again, or too slow by itself",
    ),
    "time_slice": Cause("others' time slices", "in a step, while other processes had its GPU"),
    "contention": Cause("contention", "running, slowed by work that runs on its GPU at the same time"),
    "failed": Cause("failed", "the server refused it, stopped early or was lost"),
}
REASONS = 3  # failures that are listed
SHOWN = 5  # misses that are listed, the longest first
SHOWN_NS = 50_000  # shorter parts round to 0.0000 s and are not shown
CARRYING = {"absent_s": "not asked for", "grant_s": "waiting for memory", "link_s": "on its links", "tail_s": "then"}
MISSED = {  # the part of a request's time that explains its miss, by Definition.part
    "limits": "until the first token where TTFT was missed, after it where TPOT was",
    "ttft": "until the first token",
    "decode": "after the first token",
    "longest gap": "in its longest gap between two tokens, or where it never ended in the part in which it stood",
    "whole": "from arrival to end",
    "first late token": "until the first token where that was late, else after it",
}


def row_of(table: pa.Table, rid: int) -> dict[str, Any]:
    """Return the row of a request. Raises UserError for an unknown id."""
    if rid >= table.num_rows:
        raise UserError(f"no request {rid}: the ids of this run are 0 to {table.num_rows - 1}")
    row: dict[str, Any] = table.slice(rid, 1).to_pylist()[0]
    return row


def request(
    table: pa.Table, rid: int, slo: requests.Slo, parts: Sequence[Part] = (), made_ns: int | None = None
) -> Iterator[str]:
    """Yield lines about one request: its SLO, the causes of a miss, its timeline, and its time by cause.

    `parts` are the consecutive parts of the timeline. If they are not known, only the stamps of arrival, admission,
    first token and end are shown. `made_ns` is the time at which the engine made the first token. If it is None, the
    row's `first_ns` is shown.
    """
    q = row_of(table, rid)
    rows = requests.rows(table.slice(rid, 1))
    ttft_s, tpot_s = float(rows.ttft_s[0]), float(requests.tpot_s(rows)[0])
    which = np.arange(table.num_rows) == rid
    limits_of = slo.take(which) if isinstance(slo, requests.Limits) else slo
    limits = [float(x[0]) for x in requests.limits(rows, limits_of)]
    where = f"gpu {q['gpus']}" if q["gpus"] else "never ran"
    against = [_against("TTFT", ttft_s, limits[0], q["state"] == "done")]
    if q["output_tokens"] > 1:
        against.append(_against("TPOT", tpot_s, limits[1], q["state"] == "done"))
    yield f"request {rid}: {'; '.join(against)}"
    yield f"  {q['model']} · {q['prompt_tokens']} tokens in, {q['output_tokens']} out · {where} · {q['state']}"
    if q["first_ns"] is not None and q["ttft_host_ns"] is not None:
        ttft = {wait: q[f"ttft_{wait}_ns"] for wait in WAITS}
        if ttft_s > limits[0]:
            yield f"  its TTFT: {made_of(ttft)}"
        if tpot_s > limits[1]:
            decode = {wait: q[f"{wait}_ns"] - ttft[wait] for wait in WAITS}
            yield f"  from its first token to its last: {made_of(decode)}"
        gap = {wait: q[f"gap_{wait}_ns"] for wait in WAITS if q[f"gap_{wait}_ns"] is not None}
        if sum(gap.values()) / 1e9 > limits[1]:
            yield f"  its longest gap between two tokens, {sum(gap.values()) / 1e9:.4g} s: {made_of(gap)}"
    total_s = sum(q[f"{wait}_ns"] for wait in WAITS) / 1e9
    first_ns = q["first_ns"] if made_ns is None else made_ns
    stamps = {"arrived": q["arrival_ns"], "admitted": q["admit_ns"], "first token": first_ns, q["state"]: q["done_ns"]}
    yield from timeline(parts, [(name, ns) for name, ns in stamps.items() if ns is not None], q["arrival_ns"])
    yield f"  where its {total_s:.4f} s went{'' if q['done_ns'] is not None else ' until the run ended'}, by cause:"
    for wait in WAITS:
        seconds = q[f"{wait}_ns"] / 1e9
        if seconds:
            yield f"  {seconds:10.4f} s  {wait:<10} {100 * seconds / total_s:3.0f} %  {CAUSES[wait].what}"
    if q["preemptions"]:
        yield f"  preempted {q['preemptions']} times: what was made is prefilled again"


def verdict(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on a run: whether it is valid, its failed requests, and the server of each model.

    Only runs on real servers are judged valid or not. Some stored runs also state how many servers woke by themselves.
    A fact that the run lacks has no line.
    """
    if validity := about.get("verdict"):
        yield validity["text"]
    if failures := failed([about]):
        yield failures
    if wakes := about.get("wakes"):
        yield wakes["text"]
    yield from (f"{model}: {by}" for model, by in (about.get("served") or {}).items())


def failed(abouts: Sequence[Mapping[str, Any]]) -> str:
    """Say how many requests of some runs failed, warm-up included, and why; empty if none did."""
    count = sum(about.get("counts", {}).get("failed", 0) for about in abouts)
    reasons = Counter[str]()
    for about in abouts:
        reasons.update(about.get("failures") or {})
    if not count:
        return ""
    total = sum(sum(about["counts"].values()) for about in abouts)
    left = len(reasons) - REASONS
    more = f"; and {left} reason{'s' * (left > 1)} more" * (left > 0)
    why = "; ".join(f"{n:,} {reason}" for reason, n in reasons.most_common(REASONS))
    return f"{count:,} of {total:,} requests failed{f': {why}{more}' if why else ''}"


def _against(name: str, value_s: float, limit_s: float, done: bool) -> str:
    if math.isnan(value_s):
        return f"{name}: never"
    if math.isinf(limit_s):
        return f"{name}: {value_s:.4g} s, no SLO"
    return f"{'met' if done and value_s <= limit_s else 'missed'} {name}: {value_s:.4g} s, SLO {limit_s:.4g} s"


def misses(table: pa.Table, window_s: float, slo: requests.Slo, definition: str, again: str) -> Iterator[str]:
    """Yield lines about all misses: by model, their main causes, and the longest ones.

    A miss is a request that scores less than 1 by a definition of attainment. `again` is the command that explains this
    run. The last line shows this command with --request added.
    """
    rows = requests.rows(table)
    offered = requests.in_window(rows, window_s)
    ids = offered.nonzero()[0]
    rows = requests.take(rows, offered)
    slo = requests.limits(rows, slo.take(offered) if isinstance(slo, requests.Limits) else slo)
    score = DEFINITIONS[definition].score(rows, slo)
    if score is None:
        raise UserError(f"this run has no token times, which {definition} needs (--definition names another)")
    missed = int((score < 1).sum())
    share = f"{100 * missed / max(1, len(rows)):.1f} %"
    in_part, weights = DEFINITIONS[definition].by_token, DEFINITIONS[definition].weights(rows)
    part = f"; a request counts in part: attainment {100 * tally.share(score, weights):.1f} %" if in_part else ""
    yield f"{missed} of {len(rows)} requests missed ({share}, {definition}){part}"
    if not missed:
        return
    why = causes.shares(rows, slo, definition, score)
    shown = [cause for cause in CAUSES if why[cause]]
    cells = [["model", "offered", "missed", "TTFT", "TPOT", *shown]]
    late = [score < 1, ~definitions.ttft(rows, slo), ~definitions.tpot(rows, slo)]
    for i, model in [*enumerate(rows.models), (-1, "all")]:
        mine = rows.model == i if i >= 0 else np.ones(len(rows), bool)
        why = causes.shares(requests.take(rows, mine), slo.take(mine), definition, score[mine])
        shares = [f"{100 * why[wait]:.0f} %" if why and why[wait] else "-" for wait in shown]
        cells.append([model, str(int(mine.sum())), *(str(int(x[mine].sum())) for x in late), *shares])
    yield from aligned(cells)
    meant = "; ".join(f"{wait}: {CAUSES[wait].excess or CAUSES[wait].what}" for wait in shown)
    time = f"{MISSED[DEFINITIONS[definition].part]}, beyond what a request takes alone"
    yield f"share of misses by cause ({time}): {meant}"
    spent = dict(zip(WAITS, rows.waits_s[score < 1].sum(axis=0).tolist(), strict=True))
    ns = {wait: round(1e9 * seconds) for wait, seconds in spent.items()}
    yield f"all misses together took {sum(spent.values()):.1f} s from arrival to end: {made_of(ns)}"
    latest = sorted((i for i in range(len(rows)) if score[i] < 1), key=lambda i: -rows.waits_s[i].sum())[:SHOWN]
    yield "longest: " + ", ".join(str(int(ids[i])) for i in latest)
    yield f"next: {again} --request {int(ids[latest[0]])}"


# ------------------------------------------------------------------ one request in order of time


def made_of(ns: Mapping[str, int]) -> str:
    """Render the seconds of each cause and its share of their sum, the longest first.

    A cause with at most 1/10,000 of the total time is left out.
    """
    total = sum(ns.values())
    longest = sorted(((value, cause) for cause, value in ns.items() if value > total / 10_000), key=lambda x: -x[0])
    shown = (f"{CAUSES[cause].phrase} {ns / 1e9:.4g} s ({100 * ns / total:.0f} %)" for ns, cause in longest)
    return ", ".join(shown)


def timeline(parts: Sequence[Part], stamps: Iterable[tuple[str, int]], arrival_ns: int) -> Iterator[str]:
    """Yield a line for each part of at least SHOWN_NS and for each stamp, in order of time since the arrival."""
    lines = [(ns, 0, f"{(ns - arrival_ns) / 1e9:10.4f} s  {name}") for name, ns in stamps]
    lines += [(part.start_ns, 1, _line(part, arrival_ns)) for part in parts if part.end_ns - part.start_ns >= SHOWN_NS]
    yield from (f"  {line}" for _, _, line in sorted(lines, key=lambda entry: entry[:2]))


def _line(part: Part, arrival_ns: int) -> str:
    name = part.doing
    if name == "queue":
        waited = [cause for cause in ("kv", "queue") if by_cause([part.ns]).get(cause)]
        name = waited[0] if len(waited) == 1 else "queue"
    took = f"{(part.start_ns - arrival_ns) / 1e9:10.4f} s    {name:<10}{(part.end_ns - part.start_ns) / 1e9:10.4f} s"
    details = "; ".join(_details(part))
    return f"{took}  {details}".rstrip()


def _details(part: Part) -> Iterator[str]:
    ns, facts = part.ns, part.facts
    place = "" if part.inst is None else f" {_place(part.inst)}"
    if part.doing in COUNTED:
        ran = ("compute", *(cause for cause in ("time_slice", "contention") if ns.get(cause)))
        yield ", ".join(f"{CAUSES[cause].phrase} {ns.get(cause, 0) / 1e9:.4f} s" for cause in ran)
    if part.doing in {*COUNTED, "queue"}:
        waits = {CAUSES["kv"].phrase: ns.get("kv", 0), CAUSES["queue"].phrase: ns.get("queue", 0)}
        waits["its lane closed"] = ns.get("closed", 0)
        named = {name: value for name, value in waits.items() if value}
        if part.gaps:
            yield f"{part.gaps} waits between steps"
        if part.doing != "queue" or len(named) > 1 or ns.get("closed"):
            yield from (f"{name} {value / 1e9:.4f} s" for name, value in named.items())
    if "ahead" in facts:
        yield f"behind {facts['ahead']:.0f} prompts of its batch" if facts["ahead"] else "first of its batch's prompts"
    if "need_bytes" in facts:
        free = f"{facts['free_bytes'] / GIB:.3g} GiB free on{place}"
        if "limit_bytes" in facts:
            limit = f"its limit of {facts['limit_bytes'] / GIB:.3g} GiB"
            free = f"{facts['used_bytes'] / GIB:.3g} of {limit} in use, {free}"
        yield f"its prompt takes {facts['need_bytes'] / GIB:.3g} GiB of KV, {free}"
    if part.doing in {"load", "transfer"}:
        if facts.get("size_bytes"):
            yield f"{facts['size_bytes'] / GIB:.3g} GiB"
        yield from (f"{name} {facts[key]:.4f} s" for key, name in CARRYING.items() if facts.get(key, 0.0) > 5e-5)


def _place(inst: Inst) -> str:
    place: Any = inst.place
    return f"gpu {'+'.join(map(str, place))}" if isinstance(place, tuple) else f"host {place.node}"
