"""The SLOs of a study's panels in seconds, by rule and scale; for P95 rules, base runs measure the latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from harness.policy.types import UserError
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup
from harness.run.slo import SloTarget
from harness.run.spec import Spec
from harness.run.teller import Silent
from harness.study import grid as grids
from harness.study.bases import base_specs, slo_target
from harness.study.grid import Panel
from harness.study.study import Study
from workloads import slo


class Targets(dict[float, SloTarget]):
    """SLO targets by scale.

    The targets of the scales given at the start are computed at once. The target of any other scale is computed when it
    is first read.
    """

    def __init__(self, scales: Iterable[float], at: Callable[[float], SloTarget]) -> None:
        super().__init__({scale: at(scale) for scale in sorted(scales)})
        self._at = at

    def __missing__(self, scale: float) -> SloTarget:
        return self.setdefault(scale, self._at(scale))


@dataclass(frozen=True)
class Judges:
    """The SLOs of specs under rules, each measured only once; base runs are stored below `out`."""

    study: Study
    out: Path
    workers: int | None
    known: dict[tuple[Spec, str], SloTarget] = field(default_factory=dict)

    def based(self, panel: Panel) -> Spec:
        """Return the spec with which a panel's SLO is measured: that of its first system, without placement."""
        spec = panel.first
        return replace(spec, engine=self.study.base_engine or spec.engine, placement="", homes=())

    def base_runs(self, panels: Iterable[Panel]) -> list[list[Spec]]:
        """Return the base runs that panels with a P95 rule need: a list for each base spec and kind of GPU."""
        pairs = dict[tuple[Spec, str], None]()
        for panel in panels:
            rule = slo.parse(grids.rule(self.study, panel, panel.scale))
            if isinstance(rule, slo.Scaled) and rule.base == "P95":
                pairs[self.based(panel), rule.gpu] = None
        return [list(base_specs(*pair)) for pair in pairs]

    def judged(self, panel: Panel) -> Panel:
        """Return a panel with its SLO in seconds at each of its scales."""
        at = partial(self._at, panel, self.based(panel))
        return replace(panel, targets=Targets(grids.scales(self.study, panel), at))

    def _at(self, panel: Panel, spec: Spec, scale: float) -> SloTarget:
        key = spec, grids.rule(self.study, panel, scale)
        if key not in self.known:
            self.known[key] = slo_target(*key, self.out, workers=self.workers, teller=Silent())
        return self.known[key]


def check(study: Study, panel: Panel, spec: Spec) -> None:
    """Resolve a spec at the largest x of its panel and build its workload. Raises UserError if either fails."""
    most = max(panel.xs, default=1.0)
    rate = {"rate_scale": most, "rate_rps": most / panel.unit_rps}.get(panel.axis, 1.0)
    gpus = int(most) if panel.axis == "gpus" else spec.gpus
    try:
        Setup(resolve(replace(spec, rate_scale=rate if spec.scaling != "none" else 1.0, gpus=gpus, slo=""))).jobs()
    except Failed:
        raise
    except UserError as error:
        where = f'"{panel.condition.name}": ' if len(study.condition) > 1 else ""
        raise UserError(f"{where}{error}") from None
