"""The laws that every system must keep: about its file, about each trial, and about two processes that must agree."""

from __future__ import annotations

import ast
import inspect
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from harness.check.cases import cases
from harness.check.findings import Breach
from harness.check.purity import impure
from harness.check.trial import ACTIONS, EVENTS, USES, Lent, Stale, Trial, patience_s, run, subject
from harness.engines.costs import quantities
from harness.loop import system
from harness.loop.guard import Endless, Fault, error_text, quiet
from harness.loop.recorder import Decision, Read
from harness.loop.replay import Livelock
from harness.policy.actions import Wake, brief
from harness.policy.events import Arrived, Woke
from harness.policy.fields import Domain, domains
from harness.policy.types import Cluster, Infeasible, Inst, Jobs, UserError

# ------------------------------------------------------------------ of a file


def starts(name: str) -> Iterator[Breach]:
    """Check that the file can be imported, that its presets build a system, and that its fields are explained."""
    try:
        make = system.find(name)
    except UserError as error:
        if not _source(name):
            raise
        yield Breach(str(error))
        return
    except Fault as fault:
        yield Breach(f"cannot be imported: {fault}" if fault.__cause__ else str(fault))
        return
    source, text = _source(name) or "", inspect.getdoc(inspect.getmodule(make)) or ""
    if not text:
        yield Breach("the file has no docstring that says what the system does")
    takes = domains(make)
    if not all(isinstance(rule(make, preset), str) for preset in (None, *make.presets)):
        yield Breach("`leaves_idle` is no text: quote the rule by which GPUs stay empty, and where it stands")
    yield from _fields(make, takes, f"{text} {make.__doc__}", source)
    yield from _built(make)


def _fields(make: Any, takes: Mapping[str, Domain], text: str, source: str) -> Iterator[Breach]:
    """Yield a breach for each preset that sets no field, and each field that no docstring or comment explains."""
    for preset, values in make.presets.items():
        if unknown := sorted(set(values) - set(takes)):
            yield Breach(f"preset {preset} sets {unknown[0]}, which is no field")
    for field, domain in takes.items():
        word = rf"\b{re.escape(field)}\b"
        if not (re.search(word, text) or re.search(rf"{word}.*#", source) or domain.stated):
            yield Breach(
                f"field {field} is explained nowhere: say in the file's docstring what users set by it, or "
                "declare it as the policy's state by field(init=False)"
            )


def _built(make: Any) -> Iterator[Breach]:
    """Yield a breach for each preset that does not build a system, or whose `hears` or `uses` has an unknown name."""
    for preset in (None, *make.presets):
        try:
            policy = subject(make, preset, "calm", cases()["calm"]).assemble()[0]
        except Infeasible:
            continue
        except Fault as fault:
            yield Breach(f"{f'preset {preset}' if preset else 'its default'} does not build: {fault}")
            continue
        for kind in policy.hears - {*EVENTS, *ACTIONS}:
            yield Breach(f"hears {kind!r}, which is no event")
        for use in sorted(policy.uses):
            if not re.fullmatch(USES, use):
                yield Breach(f'uses "{use}", which names no action, field or query')


def pure(name: str) -> Iterator[Breach]:
    """Check that the file is pure policy: no clock, randomness, threads or I/O, no engine, no other system."""
    try:
        yield from (Breach(f"line {line}: {what}") for line, what in impure(_source(name) or ""))
    except (SyntaxError, ValueError):  # ValueError: null bytes
        return  # `starts` says so


def named(name: str) -> Iterator[Breach]:
    """Check that the name of every action that the file builds is a string in the file, because `uses` must list it.

    Lines that no case runs are checked too.
    """
    try:
        tree = ast.parse(_source(name) or "")
    except (SyntaxError, ValueError):
        return  # `starts` says so
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    declared = {re.split("[.:]", text)[0] for text in texts} | {Wake.__name__}
    kinds = {kind.__name__ for kind in ACTIONS} - declared
    lines = {
        call.func.id: call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in kinds
    }
    yield from (Breach(f'line {line} builds {kind}, but "{kind}" is not in uses') for kind, line in lines.items())


def _source(name: str) -> str | None:
    """Return a system's source; None if there is no file."""
    path = Path(name) if name.endswith(".py") else system.ROOT / "systems" / f"{name}.py"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


# ------------------------------------------------------------------ of a trial


def declared(trial: Trial) -> Iterator[Breach]:
    """Check that `uses` lists the actions, queries and SLOs that a system uses, and `hears` the events it receives."""
    yield from _noted(trial, "declared")
    if trial.error or "Request.slo" in trial.uses:
        return
    case = trial.subject.case
    served = tuple(m._replace(ttft_slo_s=1e-3, tpot_slo_s=1e-3) for m in case.config.models)
    strict = np.full(len(trial.jobs), 1e-3)
    other = run(
        trial.subject._replace(case=case._replace(config=replace(case.config, models=served))),
        replace(trial.jobs, ttft_slo_s=strict, tpot_slo_s=strict),
        watched=False,
    )
    k = _differ([(d.reads, d.actions) for d in trial.decisions], [(d.reads, d.actions) for d in other.decisions])
    if k is not None and _steady(trial):
        yield Breach('other SLOs change its decisions, but "Request.slo" is not in uses', k)


def fresh_view(trial: Trial) -> Iterator[Breach]:
    """Check that a view is used only in the decision that it was given for."""
    yield from _noted(trial, "fresh-view")


def livelock(trial: Trial) -> Iterator[Breach]:
    """Check that time passes: each answer is finite, and the number of decisions stays below a limit.

    The limit is 1,000, plus 100 for each request, plus 500 for each second.
    """
    if isinstance(trial.error, Livelock | Endless):
        yield Breach(str(trial.error), len(trial.decisions))


def survives(trial: Trial) -> Iterator[Breach]:
    """Check that the system raises no error, whichever actions are refused."""
    if trial.error and not trial.notes and not isinstance(trial.error, Livelock | Endless):
        what = str(trial.error) if isinstance(trial.error, Fault) else f"raised {error_text(trial.error)}"
        yield Breach(what, len(trial.decisions))


def stands(trial: Trial) -> Iterator[Breach]:
    """Check that actions that were refused for now are issued again, oldest first, when a resource comes free.

    Actions of the type Run are exempt.
    """
    yield from _noted(trial, "stands")


def patient(trial: Trial) -> Iterator[Breach]:
    """Check that the system does not answer a timer with an action that was refused for now and that is still pending.

    The loop itself issues that action again. Actions with which the system also answers timers in a run without
    refusals are exempt.
    """
    if not trial.repeats:
        return
    spared = run(
        trial.subject._replace(case=trial.subject.case._replace(refuse=0)), trial.jobs, watched=False
    ).decisions
    always = {a for d in spared if isinstance(d.event, Woke) and d.event.key != "start" for a in d.actions}
    for k, action in trial.repeats:
        if action not in always:
            yield Breach(f"answered {brief(action)} to a timer, while the loop had it to issue again", k)


def memory(trial: Trial) -> Iterator[Breach]:
    """Check that GPU memory in use is between 0 and capacity, and that no KV is left once all requests have ended.

    No Limit may exceed a GPU's memory either, and the weights loaded at the start must fit.
    """
    yield from _noted(trial, "memory")
    if trial.kv_bytes and all(row["state"] != "unfinished" for row in trial.rows):
        yield Breach(f"{trial.kv_bytes} bytes of KV are held although every request has ended")


def served(trial: Trial) -> Iterator[Breach]:
    """Check that every request ends once, whichever actions are refused for now.

    It ends with all its tokens, or because the system dropped it, or because memory is too small for it.
    """
    yield from _noted(trial, "served")
    for row in trial.rows:
        made, asked = row["made_tokens"], row["output_tokens"]
        if made > asked or (row["state"] == "done" and made != asked):
            yield _about(trial, row, f"is {row['state']} with {made} of {asked} tokens")
        if row["state"] == "failed" and trial.subject.case.ample:
            yield _about(trial, row, "failed although there was memory for it")
    yield from _lost(trial)


def idle(trial: Trial) -> Iterator[Breach]:
    """Check that no request waits longer than `transfers_s` for a load while GPUs for its model are empty.

    Cases in which actions are refused or decisions take time are exempt. So is a system that quotes a rule by which it
    leaves GPUs empty (`leaves_idle`).
    """
    case = trial.subject.case
    if trial.error or case.refuse or case.decision_s or rule(trial.subject.make, trial.subject.preset):
        return
    cluster = trial.subject.assemble()[1].cluster
    limit_s = transfers_s(cluster, trial.uses)
    for row in trial.rows:
        if (row["admission_ns"] + row["load_ns"]) / 1e9 <= limit_s:
            continue
        m, arrival_s, first_ns = row["model"], row["arrival_ns"] / 1e9, row["first_ns"] or row["done_ns"]
        first_s = math.inf if first_ns is None else first_ns / 1e9
        since_s: dict[int, float] = {}  # empty GPUs, and since when, while the model is loaded nowhere
        for now, after in pairwise(trial.held):
            from_s, to_s = max(now.from_s, arrival_s), min(after.from_s, first_s)
            if from_s >= to_s:
                continue
            since_s = {} if m in now.models else {g: since_s.get(g, from_s) for g in now.empty}
            for node in sorted({cluster.gpus[g].node for g in since_s}):
                free = sorted((at_s, g) for g, at_s in since_s.items() if cluster.gpus[g].node == node)
                free = free[: cluster.models[m].tp]
                if len(free) == cluster.models[m].tp and (waits_s := to_s - free[-1][0]) > limit_s:
                    here = ", ".join(map(str, sorted(g for _, g in free)))
                    what = f"waits {waits_s:.2f} s until its weights are asked for, while GPU {here} holds nothing"
                    yield _about(trial, row, f"{what} (the weights of all models pass a link in {limit_s:.2f} s)")
                    return


def transfers_s(cluster: Cluster, uses: frozenset[str]) -> float:
    """Return the seconds to transfer the weights of all models over one link, one after another.

    The time is that of the slowest way to load that `uses` declares. If `uses` declares none, it is the time of the way
    from host memory. Fixed costs of a load are left out.
    """
    ladder, models = quantities.ladder(cluster.gpus[0].kind), cluster.models
    ways = [way for way in ladder if f"Load.way:{way}" in uses] or ["host"]
    insts = [Inst(m, tuple(range(model.tp))) for m, model in models.items()]
    return max(sum(cluster.profile.load_s(inst, way) - ladder[way].fixed_s for inst in insts) for way in ways)


def rule(make: Any, preset: str | None = None) -> str:
    """Return the rule by which a system leaves GPUs without work, quoted from its source; "" if it states no rule.

    A class states one rule for all its presets, or a rule for each preset by name.
    """
    stated = getattr(make, "leaves_idle", "")
    return stated.get(preset, "") if isinstance(stated, Mapping) else stated


def replayed(trial: Trial) -> Iterator[Breach]:
    """Check that a fresh policy makes the same queries and actions if it gets the same events and answers."""
    if trial.error or trial.notes:
        return
    policy, _ = trial.subject.assemble()
    for k, d in enumerate(trial.decisions):
        tape = deque(d.reads)

        def ask(query: str, *args: Any, tape: deque[Read] = tape) -> Any:
            if not tape or (tape[0].query, tape[0].args) != (query, args):
                raise Stale(query)
            return tape.popleft().answer

        lent: Any = Lent(ask, lambda _: None)
        try:
            with quiet():
                actions = tuple(policy.on(d.event, lent))
        except Stale as query:
            yield Breach(f"a fresh policy, told the same, asks {query} here", k)
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            yield Breach(f"a fresh policy, told the same, raises {error_text(error)} here", k)
            return
        if actions != d.actions or tape:
            yield Breach(f"a fresh policy, told the same, {'asks less' if tape else 'answers otherwise'} here", k)
            return


def blind(trial: Trial) -> Iterator[Breach]:
    """Check that no decision before a time t depends on arrivals or output lengths after t."""
    yield from _noted(trial, "blind")
    jobs = trial.jobs
    if trial.error or trial.notes:
        return
    for t_s in sorted({float(jobs.arrival_s[len(jobs) * k // 4]) for k in range(4)} if len(jobs) else ()):
        until = run(trial.subject, jobs, t_s, watched=False)
        other = run(trial.subject, otherwise(until), t_s, watched=False)
        before = ([_to_the_nanosecond(d) for d in x.decisions if d.now_s < t_s] for x in (trial, other))
        if (k := _differ(*before)) is not None and _steady(trial):
            yield Breach(f"what comes after {t_s:.6f} s changes this decision", k)
            return


def otherwise(until: Trial) -> Jobs:
    """Return a workload with the same past as a stopped trial, and another future.

    Requests that had not arrived come later, and their models, prompts and gaps come in reversed order. Requests that
    were not done get a new output length, above the number of tokens that they had made. Requests that were done keep
    theirs. If the system reads true output lengths, no length changes.
    """
    jobs, n = until.jobs, until.seen
    model, prompt, output = jobs.model.copy(), jobs.prompt_tokens.copy(), jobs.output_tokens.copy()
    arrival_s = jobs.arrival_s.copy()
    most = until.subject.case.config.models[0].shape.max_tokens
    if n < len(jobs):
        model[n:], prompt[n:] = model[n:][::-1].copy(), prompt[n:][::-1].copy()
        gaps = np.diff(arrival_s[n:])[::-1] + 0.25
        arrival_s[n:] += 1.0
        arrival_s[n + 1 :] = arrival_s[n] + np.cumsum(gaps)
    if "view.oracle_tokens" not in until.uses:
        for row in until.rows:
            if row["state"] != "done":
                r, made = row["id"], row["made_tokens"]
                room = max(1, most - int(prompt[r]) - made)
                output[r] = made + 1 + (int(output[r]) - made + 7 * r + 12) % room
    return replace(jobs, arrival_s=arrival_s, model=model, prompt_tokens=prompt, output_tokens=output)


def _to_the_nanosecond(decision: Decision) -> str:
    """Return a decision as text with its times rounded to nanoseconds.

    Sums of the same durations in another order differ by less than a nanosecond.
    """
    return re.sub(r"\d+\.\d+(e[-+]\d+)?", lambda number: f"{float(number[0]):.9f}", repr(decision))


def _steady(trial: Trial) -> bool:
    """Tell whether a trial makes the same decisions when it is repeated.

    If it does not, a difference on a changed workload proves nothing.
    """
    return _differ(trial.decisions, run(trial.subject, trial.jobs, watched=False).decisions) is None


def _noted(trial: Trial, law: str) -> Iterator[Breach]:
    yield from (breach for name, breach in trial.notes if name == law)


def _about(trial: Trial, row: Mapping[str, Any], what: str) -> Breach:
    """Return a breach that concerns a request; `what` says what is wrong with the request.

    The breach occurs at the decision on the request's arrival, if there was one.
    """
    r = row["id"]
    at = (k for k, d in enumerate(trial.decisions) if isinstance(d.event, Arrived) and d.event.request.id == r)
    return Breach(f"request {r} of {row['model']} {what}", next(at, None))


def _lost(trial: Trial) -> Iterator[Breach]:
    """Yield a breach for each request that has not ended."""
    for row in trial.rows:
        if row["state"] == "unfinished":
            stood = "in no batch" if row["admit_ns"] is None else f"with {row['made_tokens']} of its tokens"
            left_s = patience_s(trial.uses, trial.subject.case.size)
            yield _about(trial, row, f"stands {stood}, {left_s:g} s after the last arrival")


def _differ(first: Sequence[Any], second: Sequence[Any]) -> int | None:
    """Return the index of the first difference of two sequences; None if they are equal."""
    k = next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return None if k == len(first) == len(second) else k


# ------------------------------------------------------------------ of two processes

Prints = Mapping[str, Sequence[str]]  # a subject maps to a short hash of each decision, then of all rows


def deterministic(here: Prints, there: Prints) -> Iterator[tuple[str, Breach]]:
    """Check that two processes with different hash seeds make the same decisions and rows."""
    for key, mine in here.items():
        if (k := _differ(mine, there.get(key, ()))) is not None:
            what = "the rows are others" if k == len(mine) - 1 else "this decision is another"
            yield key, Breach(f"under another PYTHONHASHSEED {what}", min(k, max(0, len(mine) - 2)))


def prints(trial: Trial) -> list[str]:
    """Return a trial as hashes that two processes compare: a checksum of each decision, then a hash of all rows."""
    rows = sha256(repr((trial.rows, trial.impossible)).encode()).hexdigest()
    return [*(f"{zlib.crc32(repr(d).encode()):08x}" for d in trial.decisions), rows]


FILE_LAWS: Mapping[str, Callable[[str], Iterator[Breach]]] = {"pure": pure, "starts": starts, "declared": named}
_OF_TRIAL = (declared, fresh_view, livelock, survives, stands, patient, memory, served, idle, replayed, blind)
TRIAL_LAWS: Mapping[str, Callable[[Trial], Iterator[Breach]]] = {
    law.__name__.replace("_", "-"): law for law in _OF_TRIAL
}
LAWS: Mapping[str, str] = {  # what each law says; they are reported in this order
    law: inspect.getdoc(f) or "" for law, f in {**FILE_LAWS, **TRIAL_LAWS, "deterministic": deterministic}.items()
}
