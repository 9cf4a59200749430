"""A placement that all systems of a comparison share: from a file, one system's start, or a baseline (floors.py).

With it, a comparison shows how well systems use memory, without the effect of where they place models.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from annotated_types import MinLen

from harness import toml
from harness.loop.guard import guarded
from harness.loop.system import System
from harness.policy import mix
from harness.policy.actions import Action, Load
from harness.policy.events import Woke
from harness.policy.fields import meant
from harness.policy.types import Gpus, Infeasible, Unsupported, UserError
from harness.run.floors import FLOORS
from harness.run.setup import Failed, Setup, blamed
from harness.run.spec import Spec, another
from harness.toml import Natural

Homes = tuple[tuple[str, Gpus], ...]
Where = Annotated[tuple[Natural, ...], MinLen(1)]


def homes(setup: Setup) -> Homes:
    """Return the GPUs of each model under the spec's `placement`; empty if each system places its own models.

    Raises UserError for a file or a system that does not place every model on GPUs that exist.
    """
    spec = setup.spec
    if not spec.placement:
        return ()
    where = f"placement {spec.placement}: "
    if (floor := FLOORS.get(spec.placement)) is not None:
        try:
            return tuple(sorted(floor(Setup(replace(spec, placement="", homes=())).engine.cluster, spec.seed).items()))
        except UserError as error:
            raise UserError(f"{where}{error}") from None
    places = (
        toml.read(Path(spec.placement), dict[str, Where])
        if spec.placement.endswith(".toml")
        else _start(replace(another(spec, spec.placement), placement="", homes=()))
    )
    check(places, setup, where)
    return tuple(sorted(places.items()))


def check(places: Mapping[str, Gpus], setup: Setup, where: str) -> None:
    """Raise UserError unless each model of the set, and no other, is on different, existing GPUs of one kind."""
    spec, names = setup.spec, setup.models.names
    if unknown := next((m for m in places if m not in names), None):
        raise UserError(f'{where}no model "{unknown}" in {spec.models}{meant(unknown, names)}')
    if absent := next((m for m in names if m not in places), None):
        raise UserError(f"{where}{absent} has no GPU in it")
    for m, gpus in places.items():
        if len(set(gpus)) != len(gpus) or max(gpus) >= spec.gpus:
            raise UserError(f"{where}{m} is on GPUs {list(gpus)}, of which there are {spec.gpus}, from 0")
        on = mix.kinds(spec.gpu, spec.gpus)
        if len(kinds := sorted({on[g] for g in gpus})) > 1:
            raise UserError(f"{where}{m} is on GPUs {list(gpus)}, of several kinds ({', '.join(kinds)}): it takes one")


def _start(spec: Spec) -> Mapping[str, Gpus]:
    """Return the GPUs on which a system loads each model at its start.

    If a model is loaded twice, its first load counts. Raises UserError if the system cannot start or its policy fails.
    """
    places: dict[str, Gpus] = {}
    try:
        for action in begun(spec):
            if isinstance(action, Load) and isinstance(action.inst.place, tuple):
                places.setdefault(action.inst.model, action.inst.place)
    except (Infeasible, Unsupported) as why:
        raise UserError(f"placement {spec.label}: {why}") from None
    except Failed as failed:  # it belongs to no compared system that could be left out
        raise UserError(f"placement {failed}") from failed
    return places


@lru_cache(64)
def begun(spec: Spec) -> tuple[Action, ...]:
    """Return the actions of a system at its start.

    Raises Infeasible if the system has no room, Unsupported if the engine lacks something, and Failed if the policy
    fails.
    """
    with blamed(spec):
        return started(Setup(spec))


def started(setup: Setup, policy: System | None = None) -> tuple[Action, ...]:
    """Return the start actions of `policy` (None: the run's own); make the engine ready for it, then close it."""
    engine = setup.engine
    with closing(engine):
        engine.ready()
        with guarded():
            return tuple((policy or setup.policy).on(Woke("start"), engine.view()))
