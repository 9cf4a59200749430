"""An answer of `bench size` in words: the sentence, the table of strategies, and details of the best strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from harness.answers.caveats import unchecked
from harness.answers.table import WIDTH, Table, aligned
from harness.policy import mix
from harness.policy.types import GIB
from harness.rows import checked
from harness.rows.estimate import NONE, SHARE
from harness.rows.held import DAY_H
from harness.run.spec import Spec
from harness.run.spec import asked as asked_system
from harness.run.streams import share
from harness.study import shared
from harness.study.bases import by_kind
from harness.study.binds import Hour, summed
from harness.study.size import ONE_KIND
from harness.study.size_kept import Words
from harness.study.size_why import MOST, Why
from harness.study.sized import Curve, Outcome, Sized
from harness.study.study import named
from harness.study.traffic import WHOLE, View

HEAD = ("GPU", "system", "GPUs", "pooled", "met %", "worst model %", "$/day", "$/Mtok", "what fails below")
MONTH_DAYS = 365 / 12
MOST_HOMES = 12  # lines of GPUs
MODELS = 12  # rows of models
MEANS: Mapping[str, str] = {
    "load": "waiting for weights that are out, or on their way in",
    "KV": "waiting for KV memory, or for KV on its way",
    "admission": "held by the strategy while the weights were in",
    "compute": "waiting for a step, or in steps slower than alone",
    "weights": "no room for all weights",
    "failed": "failed, as a server refused it or stopped early",
}


def sentence(sized: Sized) -> str:
    """Answer in a sentence: the fewest GPUs on which each model meets the target, and GPUs saved by sharing."""
    asked, best = sized.asked, sized.best
    level = f"{100 * asked.target:g} %"
    if best is None:
        nearest = "; ".join(_nearest(sized, kind) for kind in asked.kinds)
        where = f"for every model on {asked.least} to {asked.most} GPUs{coverage_of(sized)}"
        return f"no strategy holds {level} {where}: {nearest}"
    kind, name, gpus = best
    curve, views = sized.curves[kind, name], " and ".join(f"the {view.name}" for view in sized.views)
    met = f"every model at {level} of SLOs ({_share(curve.tried[gpus], 'least,')}) in {views}{coverage_of(sized)}"
    parts = [rent(sized), f"{cluster(kind, gpus)} with {name}: {met}"]
    if asked.least == asked.most > 1:
        parts.append(f"{gpus} is the least that was tried")
    if (alone := sized.dedicated.get(kind)) is not None and alone > gpus:
        apart = _priced(sized, kind, alone)
        parts.append(f"GPUs of its own for each model would be {apart}: sharing saves {alone - gpus}")
    if (pooled := curve.fewest(asked.target, "pooled")) is not None and pooled < gpus:
        parts.append(f"{pooled} would do for all requests together, where {_share(curve.tried[pooled], 'meets')}")
    return "; ".join(filter(None, (*parts, _next(sized))))


def _share(verdict: Outcome, word: str = "") -> str:
    """Return in words the model with the lowest attainment, then `word`, then that attainment: `m least, 98.7 %`."""
    name, share = verdict.worst
    return " ".join(filter(None, (name, word, f"{100 * share:.1f} %")))


def rent(sized: Sized) -> str:
    """Say what to rent for the best strategy, and its cost: `rent 8 h200 (7 + 1 spare, one node): $857 a day`."""
    assert sized.best is not None
    asked, (kind, _, gpus) = sized.asked, sized.best
    bought, parts = asked.bought(gpus), []
    if asked.spare:
        parts.append(f"{gpus} + {asked.spare} spare")
    if asked.node > 1:
        nodes = bought // asked.node
        parts.append("one node" if nodes == 1 else f"{nodes} nodes of {asked.node}")
    text = f"rent {cluster(kind, bought)}" + (f" ({', '.join(parts)})" if parts else "")
    if (usd := asked.usd_hour(kind, gpus)) is None:
        return text
    month = usd * DAY_H * MONTH_DAYS
    digits = 2 - math.floor(math.log10(month))
    return f"{text}: ${usd * DAY_H:,.0f} a day, ${round(month, digits):,.0f} a month"


def coverage_of(sized: Sized) -> str:
    """Say which share of a log's requests the answer covers; empty if it covers all."""
    coverage = share(sized.kept_share)
    return coverage and f", {coverage}"


def cluster(kind: str, gpus: int) -> str:
    """Return a number of GPUs in words: `4 h100`, `2 h100 + 4 l40s`."""
    return " + ".join(f"{n} {name}" for name, n in mix.copies(kind, gpus))


def _next(sized: Sized) -> str:
    """Name the other strategies that need the fewest GPUs of the same kind, and how many they need."""
    assert sized.best is not None
    kind, name, gpus = sized.best
    holding = [
        (n, curve.system)
        for curve in sized.curves.values()
        if curve.kind == kind
        and curve.system not in {name, *sized.asked.bounds}
        and (n := curve.fewest(sized.asked.target)) is not None
    ]
    if not holding:
        return "no other strategy holds it there" if len(sized.asked.systems) > 1 else ""
    least = min(holding)[0]
    names = ", ".join(system for n, system in holding if n == least)
    return f"{names} {'need' if ',' in names else 'needs'} {least if least > gpus else 'no more'}"


def _nearest(sized: Sized, kind: str) -> str:
    tried = [
        (row.worst or 0.0, row.label, row.gpus)
        for row in sized.tried
        if row.gpu == kind and not row.unfit and row.label not in sized.asked.bounds
    ]
    if not tried:
        return f"none has room on {kind}"
    met, name, gpus = max(tried)
    return f"{name} on {cluster(kind, gpus)} comes nearest, its worst model at {100 * met:.1f} %"


def table(sized: Sized) -> Table:
    """Return the table of strategies, the cheapest first.

    It has a row per kind of GPU and system. A kind on which no system was tried has one row.
    """
    refused = sized.refused
    curves = {
        curve.kind if curve.kind in refused else key: curve
        for key, curve in sized.curves.items()
        if curve.tried or curve.stopped in {ONE_KIND, *refused.values()}
    }

    def rank(curve: Curve) -> tuple[Any, ...]:
        gpus = curve.fewest(sized.asked.target)
        usd = sized.asked.usd_hour(curve.kind, gpus) if gpus else None
        return (gpus is None, usd is None, usd or 0.0, gpus or 0)

    return Table(HEAD, [_row(sized, curve) for curve in sorted(curves.values(), key=rank)])


def _row(sized: Sized, curve: Curve) -> tuple[str, ...]:
    if not curve.tried:
        return (curve.kind, "all" if curve.kind in sized.refused else curve.system, *(NONE,) * 6, _cut(curve.stopped))
    gpus, pooled = (curve.fewest(sized.asked.target, by) for by in ("each", "pooled"))
    verdict = curve.tried[max(curve.tried) if gpus is None else gpus]
    counted = str(gpus) if gpus is not None else curve.stopped.partition(":")[0] or f"> {verdict.gpus}"
    counts = counted, NONE if pooled is None else str(pooled)
    if verdict.least is None:
        return (curve.kind, curve.system, *counts, *(NONE,) * 4, _cut(f"no room: {verdict.unfit}"))
    met = verdict.least.times(100).text(SHARE), f"{100 * verdict.worst[1]:.1f}"
    usd = None if gpus is None else sized.asked.usd_hour(curve.kind, gpus)
    token = NONE if usd is None or not sized.million_tokens_hour else f"{usd / sized.million_tokens_hour:.3g}"
    bound = " (bound)" * (curve.system in sized.asked.bounds)
    return (curve.kind, curve.system + bound, *counts, *met, _day(usd), token, _why(sized, curve, gpus))


def _day(usd_hour: float | None) -> str:
    return NONE if usd_hour is None else f"{usd_hour * DAY_H:,.0f}"


def _why(sized: Sized, curve: Curve, gpus: int | None) -> str:
    """Return the reason why a strategy fails on the largest number of GPUs that was tried below `gpus`, its answer.

    `gpus` is None for a strategy without an answer. Then the reason says why its search ended, or why the strategy
    fails on the most GPUs tried.
    """
    if gpus is not None:
        below = curve.below(gpus)
        return NONE if below is None else _short(below)
    if curve.flat is not None:
        less, more = curve.flat
        short = sized.short.get((curve.kind, curve.system))
        what = f"more do not help: {_share(more)} on {less.gpus}, {more.gpus}"
        return f"{what}; {short} binds" if short else what
    return _cut(curve.stopped) if ":" in curve.stopped else _short(curve.tried[max(curve.tried)])


def _short(verdict: Outcome) -> str:
    """Say why a count of GPUs fails: the models do not fit, or SLOs are missed."""
    if verdict.unfit:
        return _cut(f"no room on {verdict.gpus}: {verdict.unfit}")
    return f"SLO missed on {verdict.gpus}: {_share(verdict)}"


def _cut(text: str, most: int = 64) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def lines(of: Words, homes: int) -> Iterator[str]:
    """Yield all lines to print, the answer first.

    Each of the last `homes` entries of `of.facts` is about one GPU. At most MOST_HOMES of these entries are printed.
    """
    yield from (of.sentence, of.setting, "", *aligned(of.cells, WIDTH), "")
    most = len(of.facts) - max(0, homes - MOST_HOMES)
    yield from (f"{what}: {text}" for what, text in of.facts[:most])
    if most < len(of.facts):
        yield f"... and {len(of.facts) - most} GPUs more (--json)"


def words(sized: Sized) -> Words:
    """Return the texts of an answer, which are stored with it."""
    grid = table(sized)
    return Words(sentence(sized), setting(sized), [grid.head, *grid.rows], list(details(sized)))


def setting(sized: Sized) -> str:
    """State the conditions of the numbers: simulated, checked or not, the SLO, the windows of the traffic."""
    asked = sized.asked
    host = str(asked.setting.get("host", Spec("").host))
    marks = dict.fromkeys(note for kind in asked.kinds if (note := checked.note(kind, host)))
    views = ", ".join(_view(view) for view in sized.views)
    return " · ".join(("simulated (docs/trust.md says how well)", *marks, asked.definition, f"SLO {asked.rule}", views))


def _view(view: View) -> str:
    """Name a part of the traffic and its number of windows.

    If the part is the whole log in several windows, the text names the two halves of the log.
    """
    if view.name == WHOLE and len(view.seeds) > 1:
        return "both halves of the log, each by itself"
    return f"{view.name} ({len(view.seeds)} window{'s' * (len(view.seeds) > 1)})"


def details(sized: Sized) -> Iterator[tuple[str, str]]:
    """Yield the lines below the table, as pairs of heading and text. Lines on the best strategy come last."""
    of = {label: str(asked_system(text)["system"]) for label, text in named(sized.asked.systems).items()}
    yield from unchecked(of)
    yield from sized.refused.items()
    for kind, line in sized.servers.items():
        yield "server" if len(sized.servers) == 1 else f"server on {kind}", line.removeprefix("server: ")
    for line in sized.streams:
        yield "streams", line.removeprefix("streams ")
    if based := base(sized):
        yield "SLO", based
    for kind, degrees in sized.degrees.items():
        wide = ", ".join(f"{name} on {tp} GPUs" for name, tp in degrees.items())
        yield kind, f"{wide}, the fewest on which it fits"
    if sized.best is not None:
        yield from _of_best(sized, *sized.best)


def _of_best(sized: Sized, kind: str, name: str, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield lines on the best strategy: its attainment, its cost, GPUs for more traffic, and where its models are."""
    views = sized.curves[kind, name].tried[gpus].views
    if len(views) > 1:
        yield "attainment", ", ".join(f"{100 * met.share.mean:.1f} % in the {view}" for view, met in views.items())
    if sized.tails:
        yield "longest P95 of a model", ", ".join(_tail(sized.tails, k) for k in (0, 1))
    if spare := sized.asked.spare:
        yield "spare", f"{spare} more {'is' if spare == 1 else 'are'} rented: no loss of a GPU was run"
    yield "rented", _rented(sized, kind, gpus)
    if sized.lacks:
        yield f"on {gpus - mix.size(kind)}", f"short of {sized.lacks}; shorter steps take less (--set chunk_tokens)"
    if sized.cold_s:
        low, high = min(sized.cold_s.values()), max(sized.cold_s.values())
        longest = f" to {high:.2g} s" * (high > low)
        yield "cold start from host memory", f"{low:.2g} s{longest} a model"
    if sized.grown:
        counts = (f"x {times:g}: {_priced(sized, kind, n)}" for times, n in sized.grown.items())
        yield f"more traffic with {name}", ", ".join(counts)
    if sized.placed:
        yield "placement", "in % of each model's requests"
        if sized.at_once:
            yield "needs", "MPS, for servers that compute at the same time on a GPU; --set sharing=turns: without it"
    home, card = shared.homes(sized.placed), mix.kinds(kind, gpus) if mix.mixed(kind) else ()
    for gpu, shares in sized.placed.items():
        yield f"GPU {gpu}" + (f" ({card[int(gpu)]})" if card else ""), _here(shares, gpu, home)


def _rented(sized: Sized, kind: str, gpus: int) -> str:
    """State the rented GPUs and their cost, with the sources of the prices or with the kinds that have no price."""
    asked, kinds, bought = sized.asked, mix.names(kind), sized.asked.bought(gpus)
    extra = "" if bought == gpus else f" ({gpus} for the target, {asked.spare} spare, nodes of {asked.node})"
    rented = f"{cluster(kind, bought)}{extra}, {bought * DAY_H} GPU-hours"
    if (usd := asked.usd_hour(kind, gpus)) is None:
        lacks = [name for name in kinds if name not in asked.prices]
        ways = " ".join(f"--price {name}=USD" for name in lacks)
        return f"{rented} a day; no price of {' and '.join(lacks)} ({ways})"
    prices = [asked.prices[name].told for name in kinds]
    sources = "; ".join(prices if len(kinds) == 1 else map(" ".join, zip(kinds, prices, strict=True)))
    cost = f"${usd * DAY_H:,.0f} a day, ${usd / sized.million_tokens_hour:.3g} a million tokens; {sources}"
    return f"{rented} and {cost}"


def _priced(sized: Sized, kind: str, gpus: int | None) -> str:
    """Return a number of GPUs with its price a day; for None, say that the most GPUs that may be tried are too few."""
    if gpus is None:
        return f"> {sized.asked.most} GPUs"
    usd = sized.asked.usd_hour(kind, gpus)
    return cluster(kind, gpus) + ("" if usd is None else f" (${_day(usd)} a day)")


def _here(shares: Mapping[str, float], gpu: str, home: Mapping[str, str]) -> str:
    """List the models that a GPU serves, each with the share of its requests that run there.

    Models whose home is this GPU come first. Other models with small shares are only counted.
    """
    order = sorted(shares, key=lambda model: (home[model] != gpu, -shares[model]))
    listed = [
        f"{model}{' at home' * (home[model] == gpu)} {100 * shares[model]:.0f} %"
        for model in order
        if home[model] == gpu or shares[model] >= shared.SHARE
    ]
    if less := len(shares) - len(listed):
        listed.append(f"{less} other{'s' * (less > 1)} with less than {100 * shared.SHARE:.0f} %")
    return ", ".join(listed)


def _tail(tails: Mapping[str, tuple[float, float]], k: int) -> str:
    """Return the longest P95 latency of any model, and that model: TTFT if k is 0, TPOT if k is 1."""
    name, unit, factor = (("TTFT", "s", 1.0), ("TPOT", "ms", 1e3))[k]
    of = {model: factor * pair[k] for model, pair in tails.items() if not math.isnan(pair[k])}
    if not of:
        return f"no {name}, outputs have one token"
    longest = max(of, key=of.__getitem__)
    return f"{name} {of[longest]:.3g} {unit} ({longest})"


def base(sized: Sized) -> str:
    """Say on which kind of GPU the SLO's base is measured; empty if the rule names it, or there is only one kind."""
    rule, kinds = by_kind(sized.asked.rule), sized.asked.kinds
    if rule is None or kinds == (mix.names(kinds[0])[0],):
        return ""
    on = {kind: sized.rules[kind].rpartition("@")[2] if mix.mixed(kind) else kind for kind in kinds}
    alone = f"{sized.asked.rule} is that of a model alone on"
    if len(kinds) == 1:
        return f"{alone} {on[kinds[0]]} ({rule.base}@{mix.names(kinds[0])[-1]}: on that kind)"
    by_kind_text = ", ".join(f"{gpu} for {kind}" for kind, gpu in on.items())
    return f"{alone} {by_kind_text} ({rule.base}@{on[kinds[0]]}: on that kind for all)"


def facts(sized: Sized) -> dict[str, Any]:
    """Return the facts of an answer by name, for other programs."""
    asked = sized.asked
    curves = []
    for curve in sized.curves.values():
        alone, pooled = (curve.fewest(asked.target, by) for by in ("each", "pooled"))
        usd = None if alone is None else asked.usd_hour(curve.kind, alone)
        curves.append(
            {
                "gpu": curve.kind,
                "system": curve.system,
                "gpus": alone,
                "gpus_pooled": pooled,
                "usd_hour": usd,
                "stopped": curve.stopped,
                "binds": sized.short.get((curve.kind, curve.system)),
                "tried": [_tried(verdict, asked.target) for _, verdict in sorted(curve.tried.items())],
            }
        )
    priced = [name for kind in asked.kinds for name in mix.names(kind) if name in asked.prices]
    return {
        "sentence": sentence(sized),
        "kept_share": sized.kept_share,
        "best": sized.best and sized.best._asdict(),
        "target": asked.target,
        "slo": asked.rule,
        "slo_by_gpu": sized.rules,
        "servers": sized.servers,
        "definition": asked.definition,
        "own_gpus": sized.dedicated,
        "systems": curves,
        "more_traffic": sized.grown,
        "p95": {
            name: {key: x if math.isfinite(x) else None for key, x in zip(("ttft_s", "tpot_s"), pair, strict=True)}
            for name, pair in sized.tails.items()
        },
        "cold_start_s": sized.cold_s,
        "homes": shared.homes(sized.placed),
        "placed": sized.placed,
        "degrees": sized.degrees,
        "prices": {name: asked.prices[name]._asdict() for name in priced},
    }


def _tried(verdict: Outcome, target: float) -> dict[str, Any]:
    shares = {view: met.share for view, met in verdict.views.items()}
    return {
        "gpus": verdict.gpus,
        "unfit": verdict.unfit,
        "attainment": {view: e.mean for view, e in shares.items()},
        "interval": {view: None if e.low is None else (e.low, e.high) for view, e in shares.items()},
        "worst_model": verdict.worst[0],
        "worst": verdict.worst[1],
        "failing": list(verdict.failing(target)),
        "models": {view: {name: of.met for name, of in met.models.items()} for view, met in verdict.views.items()},
    }


# ------------------------------------------------------------------ why fewer do not hold


def why(reason: Why) -> Iterator[str]:
    """Yield lines: the limit that binds, the cheapest confirmed change, misses by model, and a table of changes.

    All these changes were run.
    """
    yield _fails(reason)
    yield _advice(reason)
    yield ""
    if not reason.tried.unfit:
        yield from aligned(_models(reason), WIDTH)
        meant = "; ".join(f"{name}: {MEANS[name]}" for name in reason.total.binds)
        yield f"misses by their main cause; {meant}; hours count from the start of a window"
        yield ""
    yield from aligned(_outcomes(reason), WIDTH)
    spent, count = sum(change.seconds for change in reason.changes), len(reason.changes)
    ran = f"{count} change{' was' if count == 1 else 's were'} run in {spent:.1f} s, at most {MOST} are"
    yield f"{ran}; target: {100 * reason.kept.asked.target:g} % for every model"


def _fails(reason: Why) -> str:
    tried = reason.tried
    what = f"{tried.label} on {cluster(tried.gpu, tried.gpus)}"
    weights = f"{reason.weights_bytes / GIB:.1f} GiB of weights and processes on {reason.memory_bytes / GIB:.1f} GiB"
    if tried.unfit:
        return f"{what} has no room: {reason.first} binds ({weights}; {tried.unfit})"
    ranked = Counter(reason.total.binds).most_common()
    shares = ", ".join(f"{name} binds in {100 * n / reason.total.missed:.0f} % of misses" for name, n in ranked)
    more = f"; {weights}" if reason.weights_bytes > reason.memory_bytes else ""
    worst = f"{tried.worst_model} meets {100 * (tried.worst or 0):.1f} % of its SLOs"
    return f"{what} fails: {worst}; {shares}{more}"


def _advice(reason: Why) -> str:
    asked, tried, dearer = reason.kept.asked, reason.tried, ""
    here = cluster(tried.gpu, tried.gpus)
    answers = [row.gpus for row in reason.kept.tried if row.answer and row[:2] == tried[:2]]
    if answers:
        enough = min(answers)
        mine, its = (asked.usd_hour(tried.gpu, n) for n in (tried.gpus, enough))
        usd = "" if mine is None or its is None else f", ${(its - mine) * DAY_H:,.0f} more a day"
        more = enough - tried.gpus
        dearer = f"{more} GPU{'s' * (more > 1)} more ({cluster(tried.gpu, enough)}{usd})"
    if (cheapest := reason.cheapest) is not None:
        assert cheapest.verdict is not None
        name, share = cheapest.verdict.worst
        looser = ", a longer promise" if cheapest.looser else ""
        change = f"{cheapest.what}, on the same {here}{looser} ({name} least, {100 * share:.1f} %)"
        return f"the cheapest change that a run confirms: {change}" + (f"; else {dearer}" if dearer else "")
    count = len(reason.changes)
    none = "the one change that was run does not hold" if count == 1 else f"none of {count} changes holds"
    none += f" {100 * asked.target:g} % on {here}"
    return f"{none}; {f'the cheapest that runs confirm is {dearer}' if dearer else 'no count of GPUs tried does'}"


def _models(reason: Why) -> Iterator[tuple[str, ...]]:
    yield ("model", "met %", "requests", "binds", "hours below", "worst hour")
    every = {name: summed(hours.values()) for name, hours in reason.models.items()}
    least = {name: reason.met.get(name, total.met) for name, total in every.items()}
    first, others = (sorted(least, key=least.__getitem__)[part] for part in (slice(MODELS), slice(MODELS, None)))
    for name in first:
        hours = reason.models[name]
        at, worst = min(hours.items(), key=lambda pair: pair[1].met)
        below = sum(hour.met < reason.kept.asked.target for hour in hours.values())
        yield (
            name,
            f"{100 * least[name]:.1f}",
            f"{every[name].offered:,}",
            _binding(every[name]),
            f"{below} of {len(hours)}",
            f"hour {at}: {100 * worst.met:.1f} %, {_binding(worst)}",
        )
    if others:
        yield (f"{len(others)} more", f">= {100 * least[others[0]]:.1f}", *(NONE,) * 4)


def _binding(hour: Hour) -> str:
    return f"{hour.first} {100 * hour.binds[hour.first] / hour.missed:.0f} %" if hour.first else NONE


def _outcomes(reason: Why) -> Iterator[tuple[str, ...]]:
    """Yield table rows of the changes that were run, then of other strategies tried before on these GPUs."""
    yield ("change", "GPUs", "$/day", "worst model %", "seconds", "verdict")
    asked, here = reason.kept.asked, reason.tried
    on = str(here.gpus), _day(asked.usd_hour(here.gpu, here.gpus))
    for change in reason.changes:
        if (verdict := change.verdict) is not None:
            outcome = "holds" if verdict.holds(asked.target) else f"fails: {verdict.worst[0]}"
            if why_not := verdict.unfit:
                outcome = f"no room: {why_not if len(why_not) < WIDTH else why_not[:60] + '...'}"
            worst = NONE if verdict.unfit else f"{100 * verdict.worst[1]:.1f}"
            yield (change.what, *on, worst, f"{change.seconds:.1f}", outcome)
    for row in reason.kept.tried:
        if (row.gpu, row.gpus) == (here.gpu, here.gpus) and row.label != here.label:
            outcome = "holds" if row.answer else f"fails: {row.worst_model}"
            worst = NONE if row.worst is None else f"{100 * row.worst:.1f}"
            yield (row.label, *on, worst, "stored", f"no room: {row.unfit[:60]}" if row.unfit else outcome)
