"""SLO rules as data: `parse` reads one, `resolve` gives TTFT and TPOT in seconds by model, `by_isolated` by request.

5xP95                            5 x the P95 of the model's TTFT and TPOT on a GPU of its own
5xP95@l40s                       the P95 on a GPU of this kind, whatever kind the run has; also 10xsolo@l40s
5/2xP95                          5 x for TTFT, 2 x for TPOT
10xsolo                          10 x the latency of the same request alone on an idle GPU
5xreleased                       5 x the base that the set's authors released
absolute:ttft=0.5,tpot=0.05      seconds, for every model; also ttft=500ms,tpot=50ms
0.5xabsolute:ttft=10,tpot=0.1    half of these seconds
classes:FILE.toml                seconds by class: [class.chat] ttft_s, tpot_s; [models] "llama-3.1-8b*" = "chat"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from harness import toml
from harness.policy.fields import meant
from harness.policy.types import Jobs, UserError
from harness.toml import Pairs
from traces.arrivals import positive
from workloads.models import ModelSet, Seconds

F8 = NDArray[np.float64]
Pair = tuple[float, float]  # TTFT, TPOT
Base = Literal["P95", "solo", "released"]
BASES: tuple[Base, ...] = get_args(Base)
USUAL_SCALE = 5.0  # scale of a base

NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e-?[0-9]+)?"
SCALED = re.compile(rf"(?:({NUMBER})(?:/({NUMBER}))?x)?(?:(P95|solo)(?:@([a-z0-9-]+))?|released)")
TIME = rf"({NUMBER})(ms|s)?"
ABSOLUTE = re.compile(rf"(?:({NUMBER})x)?absolute:ttft={TIME},tpot={TIME}")


@dataclass(frozen=True, slots=True)
class Scaled:
    """A multiple of a base: P95 on dedicated GPUs, the request's isolated latency, or the authors' released base."""

    base: Base
    ttft_x: float
    tpot_x: float
    gpu: str = ""  # the kind on which the base is measured; "": that of the run

    @property
    def by_gpu(self) -> bool:
        """True if the base depends on the kind of GPU."""
        return self.base != "released"


@dataclass(frozen=True, slots=True)
class Absolute:
    """The same TTFT and TPOT, in seconds, for every model."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Classes:
    """The file of a rule `classes:FILE.toml`: the SLO of each class, and the class of each pattern of model names.

    The first pattern that matches counts.
    """

    class_: Pairs[Seconds] = ()  # SLOs, keyed by the name of a class
    models: Pairs[str] = ()  # the class of each pattern of names; the first that matches holds

    def __post_init__(self) -> None:
        names = [name for name, _ in self.class_]
        if bad := next((pair for pair in self.models if pair[1] not in names), None):
            raise ValueError(f'models."{bad[0]}" is "{bad[1]}", not a class{meant(bad[1], names)}')


Rule = Scaled | Absolute | Classes


def parse(text: str) -> Rule:
    """Parse the text of an SLO rule.

    Raises UserError for a text in none of the module's forms, and for numbers that are not above 0.
    """
    if match := SCALED.fullmatch(text):
        ttft_x = positive("SLO scale", float(match[1] or 1))
        tpot_x = positive("SLO scale", float(match[2] or ttft_x))
        rule: Rule = Scaled(cast("Base", match[3] or "released"), ttft_x, tpot_x, match[4] or "")
    elif match := ABSOLUTE.fullmatch(text):
        scale = positive("SLO scale", float(match[1] or 1))
        ttft_s, tpot_s = (float(match[k]) / (1000 if match[k + 1] == "ms" else 1) for k in (2, 4))
        rule = Absolute(scale * positive("SLO ttft", ttft_s), scale * positive("SLO tpot", tpot_s))
    elif text.startswith("classes:"):
        rule = toml.read(Path(text.removeprefix("classes:")), Classes)
    else:
        raise UserError(
            f'no SLO rule "{text}" (5xP95, 5/2xP95, 9xsolo, 5xreleased, absolute:ttft=500ms,tpot=0.05, '
            "classes:FILE.toml)"
        )
    return rule


def by_request(text: str) -> bool:
    """Tell whether a rule sets each request's SLO by its own isolated latency, instead of one SLO per model."""
    match = SCALED.fullmatch(text)
    return match is not None and match[3] == "solo"


def full_rule(text: str | None, scale: float | None, models: ModelSet) -> str:
    """Return the text of the SLO rule with its scale; if `text` is None, the usual rule of the model set.

    The usual rule is a multiple of the base that the set's authors released, if there is one for every model, else of
    P95. Only the set light8 has released bases (`[[model]] released` of its file, from Prism's `trace.py`, on H100s).
    Kernels of models that share a GPU run one after the other, so few rates meet 5 x the P95 of a dedicated GPU.
    Prism's experiments used 5 x the released bases.
    """
    usual = "released" if all(member.released_s is not None for member in models.members) else "P95"
    return in_full(text or usual, scale)


def in_full(text: str, scale: float | None = None) -> str:
    """Return a rule's text with its scale written out: `5xP95` for `P95`.

    Without `scale`, a base alone (P95, solo, released) gets the scale 5, and any other rule stays as it is. Raises
    UserError for a `scale` other than 1 if the rule takes none.
    """
    bare = text.partition("@")[0] in BASES
    scale = positive("SLO scale", scale if scale is not None else USUAL_SCALE if bare else 1.0)
    if bare or (text.startswith("absolute:") and scale != 1):
        return f"{scale:g}x{text}"
    if scale != 1:
        raise UserError(f'SLO "{text}" has no scale (P95, solo, released and absolute:ttft=S,tpot=S have one)')
    return text


def resolve(rule: Rule, models: ModelSet, p95_s: Mapping[str, Pair] | None = None) -> dict[str, Pair]:
    """Return each model's SLOs of TTFT and TPOT under a rule, in seconds; `p95_s` has the measured P95 bases.

    Raises UserError if a model has no base or no class. Also raises it for a `solo` rule, which sets seconds by
    request, not by model: see `by_isolated`.
    """
    match rule:
        case Absolute(ttft_s, tpot_s):
            return dict.fromkeys(models.names, (ttft_s, tpot_s))
        case Classes():
            return {name: _class(name, rule) for name in models.names}
        case Scaled("released", ttft_x, tpot_x):
            bases = {member.name: member.released_s for member in models.members if member.released_s is not None}
            return _scaled(bases, models, ttft_x, tpot_x, f"set {models.name} has no released SLO base of")
        case Scaled("P95", ttft_x, tpot_x):
            return _scaled(p95_s or {}, models, ttft_x, tpot_x, "no P95 was measured of")
        case Scaled():
            raise UserError("an SLO by the request's own latency has no seconds by model")


def by_isolated(jobs: Jobs, rule: Scaled, ttft_s: F8, tpot_s: F8) -> Jobs:
    """Set each request's SLOs to the rule's multiples of its own TTFT and TPOT when it is alone on a GPU."""
    return replace(jobs, ttft_slo_s=rule.ttft_x * ttft_s, tpot_slo_s=rule.tpot_x * tpot_s)


def _scaled(bases: Mapping[str, Pair], models: ModelSet, ttft_x: float, tpot_x: float, why: str) -> dict[str, Pair]:
    if missing := next((name for name in models.names if name not in bases), None):
        raise UserError(f"{why} {missing}")
    return {name: (ttft_x * bases[name][0], tpot_x * bases[name][1]) for name in models.names}


def _class(name: str, classes: Classes) -> Pair:
    label = next((label for pattern, label in classes.models if fnmatchcase(name, pattern)), None)
    if label is None:
        raise UserError(f'no SLO class for model "{name}" (a pattern "*" catches the rest)')
    slo = dict(classes.class_)[label]
    return slo.ttft_s, slo.tpot_s
