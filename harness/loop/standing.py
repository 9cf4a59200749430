"""Standing orders: actions that the engine refused "not now". They are issued again when some resource is free again.

They are issued again in the order in which they were first issued, never on a timer. An order stands until the engine
accepts it, or until the policy issues an action on the same subject. The log records each refusal, acceptance and
withdrawal. The policy gets no event, except `TurnEnded` for a standing turn whose lane the policy closes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from harness.loop.recorder import Fate, Log, Note
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Done


@dataclass(slots=True)
class Standing:
    """The standing orders, oldest first."""

    orders: list[Action]
    log: Log | None = None

    def add(self, action: Action, why: str, now_s: float) -> None:
        """Add an action that the engine refused for now."""
        self.orders.append(action)
        self._note(now_s, action, "refused", why)

    def withdraw(self, newer: Action, now_s: float) -> list[Action]:
        """Remove and return the orders on the subject of a newer action of the policy."""
        gone = [action for action in self.orders if same_subject(newer, action)]
        for action in gone:
            self.orders.remove(action)
            self._note(now_s, action, "withdrawn")
        return gone

    def awaited(self, turn: Action) -> bool:
        """Tell whether an action is a turn (a `Run` that ends by itself) whose weights wait for a standing Load.

        Such a turn must not be issued before the Load, because it would end at once.
        """
        return is_turn(turn) and any(isinstance(a, Load) and a.inst == turn.batch.inst for a in self.orders)

    def again(self, do: Callable[[Action], Done | None], now_s: float) -> None:
        """Issue the orders again, except turns that wait for a Load (`awaited`); drop the accepted orders.

        The remaining orders stay in the same sequence.
        """
        orders, self.orders = self.orders, []
        for action in orders:
            if self.awaited(action):
                self.orders.append(action)
            elif (refusal := do(action)) is None:
                self._note(now_s, action, "issued")
            else:
                self.orders.append(action)
                self._note(now_s, action, "refused", refusal.why)

    def _note(self, now_s: float, action: Action, fate: Fate, why: str = "") -> None:
        if self.log is not None:
            self.log.stood(Note(now_s, action, fate, why))


def is_turn(action: Action) -> TypeGuard[Run]:
    """Tell whether an action is a turn: a `Run` that ends by itself."""
    return isinstance(action, Run) and (action.for_s is not None or bool(action.steps))


def same_subject(newer: Action, stands: Action) -> bool:
    """Tell whether an action has the same subject as a standing order, and therefore replaces that order."""
    match newer, stands:
        case (Load(inst) | Evict(inst), Load(other) | Evict(other)):
            return inst == other
        case Limit(model, gpu), Limit():
            return (model, gpu) == (stands.model, stands.gpu)
        case (Admit(who) | Drop(who), Admit(other) | Drop(other)) | (Move(who) | Drop(who), Move(other)):
            return who == other
        case Run(batch, phase), Run():
            return batch == stands.batch and (phase == stands.phase or "mixed" in {phase, stands.phase})
    return False
