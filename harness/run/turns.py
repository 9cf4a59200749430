"""The turns and the loads of weights of a run, from the events and actions of its policy. Stored with `--record`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.policy.actions import Action, Load, brief
from harness.policy.events import Event, TurnEnded
from harness.policy.types import Host
from harness.rows import record

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.loop.recorder import Note
    from harness.policy.types import Inst, Profile
    from harness.policy.view import View

FILE = record.TURNS


@dataclass(slots=True)
class Turns:
    """A log (`recorder.Log`) of a run's turns, loads and refused orders; times are from the window's start.

    `rows` has a row for each turn on GPUs that ended after at least one step. `loads` counts the loads that the policy
    asked for. `orders` lists, in order of time, what happened to orders that the engine refused at first. An item has
    the time, the action, its fate (refused, issued or withdrawn) and the reason.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    loads: dict[tuple[Inst, str], int] = field(default_factory=dict)
    orders: list[tuple[float, str, str, str]] = field(default_factory=list)

    def watch(self, view: View) -> View:
        """See `recorder.Log`."""
        return view

    def decided(self, event: Event, actions: tuple[Action, ...], now_s: float) -> None:
        """See `recorder.Log`."""
        for action in actions:
            if isinstance(action, Load):
                key = (action.inst, action.way)
                self.loads[key] = self.loads.get(key, 0) + 1
        if isinstance(event, TurnEnded) and event.steps and not isinstance(place := event.batch.inst.place, Host):
            self.rows.append(
                {
                    "gpus": "+".join(map(str, place)),
                    "model": event.batch.inst.model,
                    "phase": event.phase,
                    "why": event.why,
                    "steps": event.steps,
                    "start_s": now_s - event.ran_s,
                    "end_s": now_s,
                }
            )

    def stood(self, note: Note) -> None:
        """See `recorder.Log`."""
        self.orders.append((note.now_s, brief(note.action), note.fate, note.why))

    def table(self) -> pa.Table:
        """Return the turns as a table, in order of their ends."""
        import pyarrow as pa

        from harness.rows.forms import TURN_COLUMNS

        return pa.Table.from_pylist(self.rows, schema=TURN_COLUMNS)


def load_s(
    loads: Mapping[tuple[Inst, str], int], profile: Profile, fixed_s: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return each model's mean seconds of a load on idle links: the fixed part, and the copy of weights.

    The copy is from host memory, or from the disk if the load starts there.
    """
    parts: dict[str, list[tuple[int, float, float]]] = {}
    for (inst, way), times in loads.items():
        parts.setdefault(inst.model, []).append((times, fixed_s[way], profile.load_s(inst, way) - fixed_s[way]))
    return {model: (_mean(rows, 1), _mean(rows, 2)) for model, rows in parts.items()}


def _mean(rows: list[tuple[int, float, float]], part: int) -> float:
    return sum(row[0] * row[part] for row in rows) / sum(row[0] for row in rows)
