"""An answered question of size in words: the sentence, a row a strategy, what the recommendation costs and takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.loop import vetted
from harness.policy import mix
from harness.report.commands import check_command
from harness.report.text_table import aligned
from harness.rows import checked
from harness.run.spec import Spec
from harness.run.spec import asked as asked_system
from harness.study.size import BOUNDS, ONE_KIND, Asked, Curve, Sized, Verdict
from harness.study.study import named
from workloads import slo

HEAD = ("GPU", "system", "GPUs", "pooled", "all %", "worst %", "$/day", "$/Mtok", "one count lower")
NONE = "-"
DAY_H = 24
WIDTH = 100  # of the table
MOST_HOMES = 12  # lines of GPUs


def sentence(sized: Sized) -> str:
    """Answer in a sentence: the fewest GPUs on which every model holds the target, and what that saves."""
    asked, best = sized.asked, sized.best
    level = f"{100 * asked.target:g} %"
    if best is None:
        parts = (_nearest(sized, kind) for kind in asked.kinds)
        return f"no strategy holds {level} for every model on {asked.least} to {asked.most} GPUs: {'; '.join(parts)}"
    kind, name, gpus = best
    verdict = sized.curves[kind, name].tried[gpus]
    worst, share = verdict.worst
    views = " and ".join(f"the {view.name}" for view in sized.views)
    least = f"{worst} least, {100 * share:.1f} %"
    answer = f"{cluster(kind, gpus)} with {name}: every model at {level} of SLOs ({least}) in {views}"
    if (alone := sized.dedicated.get(kind)) is not None and alone > gpus:
        answer += f"; GPUs of its own for each model are {alone}: sharing saves {alone - gpus}"
    if (pooled := sized.curves[kind, name].fewest(asked.target, "pooled")) is not None and pooled < gpus:
        less = sized.curves[kind, name].tried[pooled]
        answer += f"; pooled over models {pooled} would do, and {less.worst[0]} have {100 * less.worst[1]:.1f} %"
    return f"{answer}; {_next(sized)}" if _next(sized) else answer


def cluster(kind: str, gpus: int) -> str:
    """Return a number of GPUs in words: `4 h100`, `2 h100 + 4 l40s`."""
    return " + ".join(f"{n} {name}" for name, n in mix.copies(kind, gpus))


def _next(sized: Sized) -> str:
    """Name the next best strategy on the same kind of GPU."""
    assert sized.best is not None
    kind, name, gpus = sized.best
    held = [(n, curve.system) for curve in sized.curves.values()
            if curve.kind == kind and curve.system not in (name, *BOUNDS)
            and (n := curve.fewest(sized.asked.target, "each")) is not None]  # fmt: skip
    if not held:
        return "no other strategy holds it there" if len(sized.curves) > 1 else ""
    least = min(held)[0]
    names = ", ".join(system for n, system in held if n == least)
    return f"{names} {'take' if ',' in names else 'takes'} {least if least > gpus else 'as many'}"


def _nearest(sized: Sized, kind: str) -> str:
    tried = [(verdict.worst[1], curve.system, gpus) for curve in sized.curves.values() if curve.kind == kind
             for gpus, verdict in curve.tried.items() if not verdict.unfit and curve.system not in BOUNDS]  # fmt: skip
    if not tried:
        return f"none has room on {kind}"
    share, name, gpus = max(tried)
    return f"{name} on {cluster(kind, gpus)} comes nearest, its worst model at {100 * share:.1f} %"


def rows(sized: Sized) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table: a row a kind and system, the cheapest first."""
    yield HEAD
    curves = [curve for curve in sized.curves.values() if curve.tried or curve.stopped == ONE_KIND]
    for curve in sorted(curves, key=lambda curve: _rank(sized.asked, curve)):
        yield _row(sized, curve)


def _rank(asked: Asked, curve: Curve) -> tuple[Any, ...]:
    gpus = curve.fewest(asked.target, "each")
    usd = asked.usd_hour(curve.kind, gpus) if gpus else None
    return (gpus is None, usd is None, usd or 0.0, gpus or 0)


def _row(sized: Sized, curve: Curve) -> tuple[str, ...]:
    asked = sized.asked
    if not curve.tried:
        return (curve.kind, curve.system, *(NONE,) * 6, curve.stopped)
    gpus, pooled = (curve.fewest(asked.target, by) for by in ("each", "pooled"))
    at = gpus if gpus is not None else max(curve.tried)
    verdict = curve.tried[at]
    usd = asked.usd_hour(curve.kind, gpus) if gpus is not None else None
    counted = str(gpus) if gpus is not None else curve.stopped.partition(":")[0] or f"> {at}"
    pooled_text = NONE if pooled is None else str(pooled)
    if verdict.unfit:
        return (curve.kind, curve.system, counted, pooled_text, *(NONE,) * 4, _cut(f"room: {verdict.unfit}"))
    view, share = min(verdict.share.items(), key=lambda pair: pair[1])
    ends = verdict.interval[view]
    interval = f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]" if ends else ""
    day = NONE if usd is None else f"{usd * DAY_H:,.0f}"
    token = NONE if usd is None or not sized.million_tokens_hour else f"{usd / sized.million_tokens_hour:.3g}"
    bound = curve.system in BOUNDS
    return (
        curve.kind, curve.system + (" (bound)" if bound else ""), counted, pooled_text, f"{100 * share:.1f}{interval}",
        f"{100 * verdict.worst[1]:.1f}", day, token, _why(curve, gpus),
    )  # fmt: skip


def _why(curve: Curve, gpus: int | None) -> str:
    """Say what binds below the answer; without one, why the search ended, or what binds on the most GPUs tried."""
    if gpus is not None:
        return binds(curve, gpus)
    return _cut(curve.stopped) if ":" in curve.stopped else _load(curve.tried[max(curve.tried)])


def binds(curve: Curve, gpus: int) -> str:
    """Say what binds: room or load, on the largest count below the answer that was tried."""
    below = curve.below(gpus)
    if below is None:
        return NONE
    return _cut(f"room on {below.gpus}: {below.unfit}") if below.unfit else _load(below)


def _load(verdict: Verdict) -> str:
    name, share = verdict.worst
    return f"load on {verdict.gpus}: {name} {100 * share:.1f} %"


def _cut(text: str, most: int = 44) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def lines(sized: Sized) -> Iterator[str]:
    """Yield everything that is printed, the answer first."""
    yield sentence(sized)
    yield setting(sized)
    yield ""
    yield from aligned(list(rows(sized)), WIDTH)
    yield ""
    pairs = list(told(sized))
    most = len(pairs) - max(0, len(sized.homes) - MOST_HOMES) if sized.best is not None else len(pairs)
    yield from (f"{what}: {text}" for what, text in pairs[:most])
    if most < len(pairs):
        yield f"... and {len(pairs) - most} GPUs more (--json)"


def setting(sized: Sized) -> str:
    """Say under which conditions the numbers are: simulated, checked or not, the SLO, the stretches of the traffic."""
    asked = sized.asked
    host = str(asked.setting.get("host", Spec("").host))
    unchecked = dict.fromkeys(note for kind in asked.kinds if (note := checked.note(kind, host)))
    views = ", ".join(f"{view.name} ({len(view.seeds)} window{'s' * (len(view.seeds) > 1)})" for view in sized.views)
    return " · ".join(("simulated", *unchecked, asked.definition, f"SLO {asked.rule}", views))


def told(sized: Sized) -> Iterator[tuple[str, str]]:
    """Yield what is told below the table, in pairs: of all kinds of GPU, then of the best; last the models by GPU."""
    asked = sized.asked
    of = {label: str(asked_system(text)["system"]) for label, text in named(asked.systems).items()}
    late = vetted.unchecked(of.values())
    for label, name in of.items():
        if name in late:
            yield "unchecked", f"{label}, {check_command(name)}"
    for kind, line in sized.servers.items():
        yield "server" if len(sized.servers) == 1 else f"server on {kind}", line.removeprefix("server: ")
    if based := base(sized):
        yield "SLO", based
    for kind, degrees in sized.degrees.items():
        wide = ", ".join(f"{name} on {tp} GPUs" for name, tp in degrees.items())
        yield kind, f"{wide}, the fewest on which it fits"
    if sized.best is None:
        return
    kind, name, gpus = sized.best
    verdict = sized.curves[kind, name].tried[gpus]
    if len(verdict.share) > 1:
        yield "attainment", ", ".join(f"{100 * share:.1f} % in the {view}" for view, share in verdict.share.items())
    if sized.tails:
        yield "longest P95 of a model", ", ".join(_tail(sized.tails, k) for k in (0, 1))
    bought = asked.bought(gpus)
    extra = "" if bought == gpus else f" ({gpus} for the target, {asked.spare} spare, nodes of {asked.node})"
    kinds = mix.names(kind)
    usd, lacks = asked.usd_hour(kind, gpus), [name for name in kinds if name not in asked.prices]
    held = f"{cluster(kind, bought)}{extra}, {bought * DAY_H} GPU-hours"
    if usd is None:
        ways = " ".join(f"--price {name}=USD" for name in lacks)
        yield "held", f"{held} a day; no price of {' and '.join(lacks)} ({ways})"
    else:
        prices = [asked.prices[name].told for name in kinds]
        told = "; ".join(prices if len(kinds) == 1 else map(" ".join, zip(kinds, prices, strict=True)))
        yield "held", (f"{held} and ${usd * DAY_H:,.0f} a day, "
                       f"${usd / sized.million_tokens_hour:.3g} a million tokens; {told}")  # fmt: skip
    if sized.lacks:
        yield f"on {gpus - mix.size(kind)}", f"short of {sized.lacks}"
    if sized.cold_s:
        low, high = min(sized.cold_s.values()), max(sized.cold_s.values())
        yield (
            "cold start from host memory",
            f"{low:.2g} s" + (f" to {high:.2g} s a model" if high > low else " a model"),
        )
    if sized.grown:
        each = (f"x {times:g}: {'> ' + str(asked.most) if n is None else n}" for times, n in sized.grown.items())
        yield "more traffic", ", ".join(each) + " GPUs"
    card = mix.kinds(kind, gpus) if mix.mixed(kind) else ()
    for gpu, models in sized.homes.items():
        yield f"GPU {gpu}" + (f" ({card[int(gpu)]})" if card else ""), ", ".join(models)


def _tail(tails: Mapping[str, tuple[float, float]], k: int) -> str:
    """Return the longest P95 of a model: of TTFT (k = 0) or TPOT (1)."""
    name, unit, factor = (("TTFT", "s", 1.0), ("TPOT", "ms", 1e3))[k]
    of = {model: factor * pair[k] for model, pair in tails.items() if not math.isnan(pair[k])}
    if not of:
        return f"no {name}, outputs have one token"
    longest = max(of, key=of.__getitem__)
    return f"{name} {of[longest]:.3g} {unit} ({longest})"


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def base(sized: Sized) -> str:
    """Say on which kind of GPU a model alone is the base of the SLO; empty where there is one kind, or it is named."""
    rule, kinds = slo.parse(sized.asked.rule), sized.asked.kinds
    if not isinstance(rule, slo.Scaled) or not rule.by_gpu or rule.gpu or kinds == (mix.names(kinds[0])[0],):
        return ""
    on = {kind: sized.rules[kind].rpartition("@")[2] if mix.mixed(kind) else kind for kind in kinds}
    alone = f"{sized.asked.rule} is that of a model alone on"
    if len(kinds) == 1:
        return f"{alone} {on[kinds[0]]} ({rule.base}@{mix.names(kinds[0])[-1]}: on that kind)"
    each = ", ".join(f"{gpu} for {kind}" for kind, gpu in on.items())
    return f"{alone} {each} ({rule.base}@{on[kinds[0]]}: on that kind for all)"


def facts(sized: Sized) -> dict[str, Any]:
    """Return the answer for another program."""
    asked = sized.asked
    curves = []
    for curve in sized.curves.values():
        each, pooled = (curve.fewest(asked.target, by) for by in ("each", "pooled"))
        usd = asked.usd_hour(curve.kind, each) if each is not None else None
        curves.append({
            "gpu": curve.kind, "system": curve.system, "gpus": each, "gpus_pooled": pooled, "usd_hour": usd,
            "stopped": curve.stopped,
            "tried": [_tried(n, verdict) for n, verdict in sorted(curve.tried.items())],
        })  # fmt: skip
    best = None if sized.best is None else dict(zip(("gpu", "system", "gpus"), sized.best, strict=True))
    return {
        "sentence": sentence(sized), "best": best, "target": asked.target, "slo": asked.rule,
        "slo_by_gpu": dict(sized.rules), "servers": dict(sized.servers), "definition": asked.definition,
        "own_gpus": dict(sized.dedicated),
        "systems": curves, "more_traffic": dict(sized.grown),
        "p95": {name: dict(zip(("ttft_s", "tpot_s"), map(_finite, pair), strict=True))
                for name, pair in sized.tails.items()},
        "cold_start_s": dict(sized.cold_s), "homes": {gpu: list(models) for gpu, models in sized.homes.items()},
        "degrees": {kind: dict(of) for kind, of in sized.degrees.items()},
        "prices": {name: asked.prices[name]._asdict()
                   for kind in asked.kinds for name in mix.names(kind) if name in asked.prices},
    }  # fmt: skip


def _tried(gpus: int, verdict: Verdict) -> dict[str, Any]:
    models = {view: {name: share for name, (share, _) in of.items()} for view, of in verdict.models.items()}
    return {
        "gpus": gpus, "unfit": verdict.unfit, "attainment": dict(verdict.share), "interval": dict(verdict.interval),
        "worst_model": verdict.worst[0], "worst": verdict.worst[1], "failing": list(verdict.failing), "models": models,
    }  # fmt: skip


def points(sized: Sized) -> list[dict[str, Any]]:
    """Return what the figure draws: a row a kind, system and count that ran."""
    asked = sized.asked
    return [
        {"gpu": curve.kind, "label": curve.system, "gpus": n, "usd_day": usd and usd * DAY_H,
         "pooled": min(verdict.share.values()), "worst": verdict.worst[1],
         "answer": curve.fewest(asked.target, "each") == n}
        for curve in sized.curves.values()
        for n, verdict in sorted(curve.tried.items()) if not verdict.unfit
        for usd in (asked.usd_hour(curve.kind, n),)
    ]  # fmt: skip
