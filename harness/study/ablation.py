"""Parts of a system switched off one at a time: what each adds to attainment, paired by seed with all parts on.

`ablations/NAME.toml` is `bench ablate NAME`; a file of the same form is one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.policy.types import Inst, UserError
from harness.report.estimate import NONE
from harness.report.text_table import laid
from harness.rows import statistics
from harness.rows.definitions import DEFINITIONS
from harness.rows.statistics import Estimate
from harness.run import toml_tables
from harness.run.setup import Failed, Setup
from harness.run.spec import Spec, asked, from_dict
from harness.run.teller import Teller
from harness.study import compare
from harness.study.claims import SAYS, judged, rule
from harness.study.compare import Compared, Entry
from harness.study.rates import Workload

ABLATIONS = Path(__file__).parent / "ablations"
Paper = float | tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Part:
    """A system with one part switched off, and what its paper says of the part.

    `paper` is by how much of 1 the part raises the attainment of the model that gains most: a number, or two that it
    lies between. `comparable` is false where the paper leaves out what a comparison needs, as `why` then says.
    """

    system: str  # as --systems takes it
    off: str
    says: str
    figure: int = 0
    paper: Paper = None
    why: str = ""
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class Activation:
    """Seconds in which the paper's system brings a model in: a number, or two that they lie between.

    `why` is printed where ours differs.
    """

    shape: str
    paper: float | tuple[float, float]
    tp: int = 1
    why: str = ""


@dataclass(frozen=True, slots=True)
class Ablation:
    """A system, its parts, and the workloads on which they are switched off."""

    name: str
    paper: str
    base: str  # the system with all parts
    slo: str  # a rule in full, as 5/2xP95
    seeds: int
    workload: tuple[Workload, ...]
    part: tuple[Part, ...]
    definition: str = "ttft"  # of attainment
    activation: tuple[Activation, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)  # what all runs have in common

    def entry(self, system: str) -> Entry:
        """A contestant by the text that names it."""
        spec = from_dict({**self.spec, **asked(system)})
        return Entry(spec.label, spec)


def ablation(name: str) -> Ablation:
    """Load an ablation by name or the path of its TOML; UserError names the file and key of a mistake."""
    return toml_tables.load(name, ABLATIONS, "ablation", _ablation)


def _ablation(name: str, rows: dict[str, Any]) -> Ablation:
    kinds: dict[str, type[Any]] = {"workload": Workload, "part": Part, "activation": Activation}
    lists = {key: toml_tables.each(kind, key, rows.pop(key, [])) for key, kind in kinds.items()}
    found = toml_tables.made(Ablation, "", {**rows, **lists, "name": name})
    _whole(found)
    return found


def _whole(found: Ablation) -> None:
    """UserError where a list is empty, or a part is no other system than the whole."""
    for key in ("workload", "part"):
        if not getattr(found, key):
            raise UserError(f"{key} is empty")
    if found.definition not in DEFINITIONS:
        raise UserError(f'definition is "{found.definition}" ({", ".join(DEFINITIONS)})')
    labels = [found.entry(found.base).label]
    for i, one in enumerate(found.part, 1):
        label = found.entry(one.system).label
        if label in labels:
            raise UserError(f'part {i}: system "{label}" is listed twice')
        if not (one.comparable or one.why):
            raise UserError(f'part {i}: comparable is false, and the key "why" is missing')
        labels.append(label)


class Loss(NamedTuple):
    """What switching a part off changes at one rate, in shares of 1."""

    part: Part
    workload: Workload
    pooled: Estimate  # the whole's attainment less
    model: str  # the one that loses most
    most: Estimate  # of it


@dataclass(frozen=True, slots=True)
class Found:
    """A scored ablation."""

    asked: Ablation
    compared: Mapping[str, Compared]  # by trace
    whole: Mapping[Workload, Estimate]  # attainment with all parts
    losses: tuple[Loss, ...]

    @property
    def failed(self) -> dict[str, str]:
        """Systems that left, as Failed has them."""
        return {label: why for one in self.compared.values() for label, why in one.failed.items()}


def ablate(asked_for: Ablation, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Found:
    """Run the whole and every part switched off, and pair them by seed. Raises UserError."""
    base = asked_for.entry(asked_for.base)
    pairs = [(part, asked_for.entry(part.system)) for part in asked_for.part]
    compared, whole, losses = dict[str, Compared](), dict[Workload, Estimate](), list[Loss]()
    for trace in dict.fromkeys(one.trace for one in asked_for.workload):
        rates = [one.rate_scale for one in asked_for.workload if one.trace == trace]
        entries = [Entry(e.label, replace(e.spec, trace=trace)) for e in (base, *(e for _, e in pairs))]
        found = compared[trace] = compare.compare(
            entries, out, rates=rates, seeds=asked_for.seeds, rule=asked_for.slo, definition=asked_for.definition,
            workers=workers, teller=teller,
        )  # fmt: skip
        if base.label in found.failed:
            raise Failed(found.failed)
        shares = by_seed(found, asked_for.definition)
        for at in (Workload(trace, rate) for rate in rates):
            own = shares[base.label, at.rate_scale]
            whole[at] = statistics.interval(list(own[""].values()), (0.0, 1.0))
            left = [(part, entry.label) for part, entry in pairs if entry.label not in found.failed]
            losses += [loss(part, at, own, shares[label, at.rate_scale]) for part, label in left]
    return Found(asked_for, compared, whole, tuple(losses))


Shares = Mapping[str, Mapping[int, float]]  # model ("": pooled) -> seed -> attainment


def by_seed(found: Compared, definition: str) -> dict[tuple[str, float], dict[str, dict[int, float]]]:
    """Attainment by label and rate, pooled and by model; NaN values are left out."""
    shares: dict[tuple[str, float], dict[str, dict[int, float]]] = {}
    columns = ["label", "rate_scale", "seed", "over", "model", "definition", "value"]
    for row in found.table.select(columns).to_pylist():
        if row["definition"] == definition and row["over"] in {"pooled", "model"} and row["value"] is not None:
            models = shares.setdefault((row["label"], row["rate_scale"]), {})
            models.setdefault(row["model"] or "", {})[row["seed"]] = row["value"]
    return shares


def loss(part: Part, at: Workload, whole: Shares, without: Shares) -> Loss:
    """The whole less the same without a part, paired by seed: pooled, and of the model that loses most."""
    each = {
        model: statistics.paired(own, without[model])
        for model, own in whole.items()
        if own.keys() & without.get(model, {}).keys()
    }
    model = max((name for name in each if name), key=lambda name: each[name].mean, default="")
    return Loss(part, at, each[""], model, each[model])


def activation_s(base: Spec, one: Activation) -> float:
    """Seconds in which the system brings a model in, on idle links of a whole node."""
    spec = replace(base, models=one.shape, trace="sample", gpus=base.node_gpus, pool_bytes=None, placement="", homes=())
    cluster = Setup(spec).cluster
    way = dict(spec.fields).get("way", "parallel")
    return cluster.profile.load_s(Inst(next(iter(cluster.models)), tuple(range(one.tp))), str(way))


# ------------------------------------------------------------------ in words


def lines(found: Found, *, markdown: bool = False) -> Iterator[str]:
    """What is printed: the differences by rate, then the paper's numbers beside ours."""
    one, points = found.asked, list(found.whole)
    yield (
        f"{one.definition.upper()} attainment (SLO {one.slo}, {one.spec.get('models', '')}) with all parts, and the "
        f"points by which it changes without each [95 % interval, {one.seeds} seeds paired]"
    )
    head = [f"{at.trace} {offered_rps(found.compared[at.trace], at.rate_scale):.3g} req/s" for at in points]
    rows = [["switched off", *head, "loses most"]]
    rows.append(["nothing", *(f"{100 * found.whole[at].mean:.1f}" for at in points), ""])
    for part in one.part:
        own = {x.workload: x for x in found.losses if x.part == part}
        if not own:
            continue
        worst = max(own.values(), key=lambda x: x.most.mean)
        most = f"{worst.model} {_signed(-worst.most.mean)}" if worst.model else NONE
        rows.append([part.off, *(_difference(own[at].pooled) for at in points), most])
    yield from laid(rows, markdown=markdown)
    yield from (f"the paper, figure {part.figure}, of {part.off}: {part.says}" for part in one.part if part.says)
    yield from _numbers(found, markdown)


def offered_rps(found: Compared, rate_scale: float) -> float:
    """Requests a second offered at a rate scale, mean over the runs."""
    frame = found.table.select(["rate_scale", "definition", "over", "value"]).to_pandas()
    own = frame[
        (frame["definition"] == "offered_rps") & (frame["over"] == "pooled") & (frame["rate_scale"] == rate_scale)
    ]
    return float(own["value"].mean())


class Number(NamedTuple):
    """A number of the paper beside ours, in words."""

    what: str
    paper: str
    here: str
    says: str  # of SAYS
    rule: str
    why: str = ""


def numbers(found: Found) -> list[Number]:
    """The paper's numbers beside ours: what a part adds where the paper says so, then activations."""
    out = []
    for part in found.asked.part:
        if part.paper is None:
            continue
        worst = max((x for x in found.losses if x.part == part), key=lambda x: x.most.mean, default=None)
        text = f"{100 * worst.most.mean:.1f} points ({worst.model})" if worst else NONE
        here, what = worst.most if worst else None, f"{part.off}, the model that gains most"
        says, rule = _judged(part.paper, here) if part.comparable else ("not comparable", NONE)
        out.append(Number(what, _range(part.paper, " points"), text, says, rule, part.why))
    return [*out, *activations(found.asked)]


def activations(asked_for: Ablation) -> list[Number]:
    """Seconds of activations, the paper's beside ours; they need no run."""
    spec, out = asked_for.entry(asked_for.base).spec, []
    for one in asked_for.activation:
        ours_s = activation_s(spec, one)
        what, said = f"activation of {one.shape}, TP {one.tp}", _judged(one.paper, Estimate(ours_s, None, None, 1))
        out.append(Number(what, _range(one.paper, " s"), f"{ours_s:.2f} s", *said, one.why))
    return out


def _judged(paper: float | tuple[float, float], here: Estimate | None) -> tuple[str, str]:
    """A verdict and its rule."""
    return judged(paper, here), rule(paper, here)


def _numbers(found: Found, markdown: bool) -> Iterator[str]:
    """The paper's numbers beside ours, with verdicts."""
    every = numbers(found)
    if every:
        yield ""
        head = [f"claim ({found.asked.paper})", "paper", "here", "verdict", "agrees if"]
        yield from laid([head, *(list(one[:5]) for one in every)], markdown=markdown)
        whys = (f"{x.says}: {x.why}" for x in every if x.why and x.says in {"differs", "not comparable"})
        yield from dict.fromkeys(whys)
        said = [one.says for one in every]
        yield "; ".join(f"{said.count(x)} {x}: {words}" for x, words in SAYS.items() if x in said)


def _range(paper: float | tuple[float, float], unit: str) -> str:
    factor = 100 if unit == " points" else 1
    return " - ".join(f"{factor * x:g}" for x in (paper if isinstance(paper, tuple) else (paper,))) + unit


def _difference(lost: Estimate) -> str:
    """What the part makes of attainment when it is switched off, in points."""
    text = _signed(-lost.mean)
    return text if lost.low is None or lost.high is None else f"{text} [{_signed(-lost.high)}, {_signed(-lost.low)}]"


def _signed(share: float) -> str:
    return f"{points:+.1f}" if (points := round(100 * share, 1)) else "0.0"
