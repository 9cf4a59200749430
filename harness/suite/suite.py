"""The suite: versions of a fixed test as data, each with inputs and a digest that never change.

`suite-1.toml` is a version. It lists scenarios; each has a model set, a generator of traffic, GPUs, an SLO and the rate
at which its search begins. `FROZEN` holds the SHA-256 of each version, and a file that differs is refused. A table has
scores of one version only. To change the test, add a version in a new file, such as `suite-2.toml`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import toml
from harness.loop.system import ROOT
from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.study.study import Condition, Sample, Scope, Study
from harness.toml import Count, Positive, Seconds, Share, Span

HERE = Path(__file__).parent
FROZEN = {"suite-1": "30f9e12e1ac9b9459b8a022770ede925b6550393caae8dc861dabf2df80db3bb"}
CURRENT = "suite-1"
PUBLIC = 0  # the first seed of development
SEED_BYTES = 4  # bytes of a hash that make a first seed


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario: a workload, GPUs and an SLO, for which a policy's highest rate is measured."""

    name: str
    question: str
    at_rps: Positive  # req/s of all models together, at which the search begins
    slo: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    definition: str = "both"  # the rule by which a request counts as met
    window_s: Span = 120.0
    best_rps: Positive | None = None  # the highest rate of any shipped system when the version was frozen
    best: str = ""  # that system
    bound_rps: Positive | None = None  # rate above which no policy that leaves GPUs whole holds the level
    reference: str = ""  # SHA-256 of the rows of its reference run


@dataclass(frozen=True, slots=True)
class Suite:
    """A version of the suite."""

    version: str
    level: Share
    seeds: Count
    points: Count  # rates of a curve
    warmup_s: Seconds
    decision_s: Positive  # mean seconds of a decision, above which a policy is charged
    scenario: tuple[Scenario, ...]
    reference_code: str = ""  # digest of the sources that made the reference runs, and of their arithmetic
    inputs: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of files of the repository by path

    def only(self, names: Sequence[str] | None) -> Suite:
        """Return the suite with these scenarios alone. Raises UserError for an unknown name."""
        known = [scenario.name for scenario in self.scenario]
        if unknown := next((name for name in names or () if name not in known), None):
            raise UserError(f'{self.version} has no scenario "{unknown}"{meant(unknown, known)} ({", ".join(known)})')
        return self if names is None else replace(self, scenario=tuple(s for s in self.scenario if s.name in names))

    @property
    def asked(self) -> str:
        """The facts that decide what is run, without results that were stored when the version was frozen."""
        plain = (replace(s, best_rps=None, best="", bound_rps=None, reference="") for s in self.scenario)
        return str(replace(self, scenario=tuple(plain), reference_code="", inputs={}))

    def quick(self) -> Suite:
        """Return the suite with about a tenth of its runs, which are too few for intervals.

        Windows keep their length, as a shorter window is easier to serve.
        """
        return replace(self, seeds=1, points=3)


def load(version: str = CURRENT) -> Suite:
    """Load a version of the suite.

    Raises UserError for an unknown version, and if its file or one of its inputs has changed since it was frozen.
    """
    if version not in FROZEN:
        raise UserError(f'no suite "{version}"{meant(version, FROZEN)} ({", ".join(FROZEN)})')
    path = HERE / f"{version}.toml"
    frozen(version, path, FROZEN[version])
    suite = toml.read(path, Suite)
    for name, digest in suite.inputs.items():
        frozen(version, ROOT / name, digest)
    return suite


def frozen(version: str, path: Path, digest: str) -> None:
    """Raise UserError if a file of a version has changed since the version was frozen."""
    if digest and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise UserError(
            f"{path.name} is not that of {version}, which never changes: git checkout {path.name}, or a new version"
        )


def first_seed(suite: Suite, scenario: Scenario, beacon: str) -> int:
    """Return the first of a scenario's consecutive seeds, each of which draws a trace.

    Without a beacon, it is PUBLIC. With a beacon, it is the first bytes of a SHA-256 of the beacon, the version and the
    scenario's name.
    """
    if not beacon:
        return PUBLIC
    text = f"{beacon.lower()}|{suite.version}|{scenario.name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:SEED_BYTES], "big")


def located(path: str) -> str:
    """Return the full path if `path` is a file in the folder of suites; any other text is returned as it is."""
    return str(HERE / path) if (HERE / path).is_file() else path


def study(
    suite: Suite,
    scenario: Scenario,
    system: str,
    beacon: str = "",
    decision_s: float | None = None,
    *,
    window: bool = False,
) -> Study:
    """Return the study of one system in a scenario: attainment over the request rate, searched by bisection.

    With `window` the system's forecasts are computed from the window itself, which no operator can know.
    """
    spec = {**scenario.spec, "trace": located(scenario.spec["trace"]), "seed": first_seed(suite, scenario, beacon)}
    spec |= {"plan": "window"} if window else {}
    spec |= {} if decision_s is None else {"decision_s": decision_s}
    return Study(
        name=scenario.name,
        systems={system: system},
        condition=(Condition(scenario.name, spec=spec, at=(scenario.at_rps,)),),
        along="rate_rps",
        sample=Sample("bisect", suite.points, digits=3),
        quick=Scope(suite.seeds, window_s=scenario.window_s),
        definitions=(scenario.definition,),
        level=suite.level,
        slo=":".join(map(located, scenario.slo.split(":"))),
        requests=100,
        warmup_s=suite.warmup_s,
        layout="table",
        by_model=True,
    )
