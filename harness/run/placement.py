"""One placement for all systems of a comparison: from a file, or as one of them begins.

It separates what a system makes of memory from where its models happened to be put.
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
from harness.policy.actions import Load
from harness.policy.events import Woke
from harness.policy.fields import meant
from harness.policy.types import Gpus, Infeasible, Unsupported, UserError
from harness.run.setup import Failed, Setup, blamed
from harness.run.spec import Spec, another
from harness.toml import Natural

Homes = tuple[tuple[str, Gpus], ...]
Where = Annotated[tuple[Natural, ...], MinLen(1)]


def homes(setup: Setup) -> Homes:
    """Return the GPUs of each model under the spec's `placement`; none where each system places its own models.

    Raises UserError for a file or a system that does not place every model on GPUs that there are.
    """
    spec = setup.spec
    if not spec.placement:
        return ()
    found = (
        toml.read(Path(spec.placement), dict[str, Where])
        if spec.placement.endswith(".toml")
        else _start(replace(another(spec, spec.placement), placement="", homes=()))
    )
    where = f"placement {spec.placement}: "
    check(found, setup, where)
    return tuple(sorted(found.items()))


def check(found: Mapping[str, Gpus], setup: Setup, where: str) -> None:
    """UserError where not every model is on GPUs that there are."""
    spec, names = setup.spec, setup.models.names
    if unknown := next((m for m in found if m not in names), None):
        raise UserError(f'{where}no model "{unknown}" in {spec.models}{meant(unknown, names)}')
    if absent := next((m for m in names if m not in found), None):
        raise UserError(f"{where}{absent} has no GPU in it")
    for m, gpus in found.items():
        if len(set(gpus)) != len(gpus) or max(gpus) >= spec.gpus:
            raise UserError(f"{where}{m} is on GPUs {list(gpus)}, of which there are {spec.gpus}, from 0")


@lru_cache(64)
def _start(spec: Spec) -> Mapping[str, Gpus]:
    """Return the place where a system loads each model at its start; the first one of a model that it loads twice."""
    found: dict[str, Gpus] = {}
    setup = Setup(spec)
    try:
        with blamed(spec):
            policy, engine = setup.policy, setup.engine
            with closing(engine):
                engine.ready()
                with guarded():
                    for action in policy.on(Woke("start"), engine.view()):
                        if isinstance(action, Load) and isinstance(action.inst.place, tuple):
                            found.setdefault(action.inst.model, action.inst.place)
    except (Infeasible, Unsupported) as why:
        raise UserError(f"placement {spec.label}: {why}") from None
    except Failed as failed:  # of no system that is compared, so none can leave
        raise UserError(f"placement {failed}") from failed
    return found
