"""Standing orders: actions that the engine refused "not now", issued again when something comes free.

They are issued in order of first issue, never on a timer, until the engine accepts them or the policy gives an order on
the same thing. The policy is not told of this; the log is.
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
    """The orders that stand, oldest first."""

    orders: list[Action]
    log: Log | None = None

    def add(self, action: Action, why: str, now_s: float) -> None:
        """Keep an order that was refused for now."""
        self.orders.append(action)
        self._note(now_s, action, "refused", why)

    def withdraw(self, newer: Action, now_s: float) -> list[Action]:
        """Forget, and return, the orders that a newer action of the policy replaces."""
        gone = [action for action in self.orders if same_subject(newer, action)]
        for action in gone:
            self.orders.remove(action)
            self._note(now_s, action, "withdrawn")
        return gone

    def awaited(self, turn: Action) -> bool:
        """Tell whether an action is a turn (a `Run` that ends by itself) on weights whose Load is a standing order.

        If it were issued before the Load, the turn would end at once.
        """
        return is_turn(turn) and any(isinstance(a, Load) and a.inst == turn.batch.inst for a in self.orders)

    def again(self, do: Callable[[Action], Done | None], now_s: float) -> None:
        """Issue all orders again; those that are refused once more keep their places."""
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
    """Tell whether an action is a turn: an order that ends by itself."""
    return isinstance(action, Run) and (action.for_s is not None or bool(action.steps))


def same_subject(newer: Action, stands: Action) -> bool:
    """Tell whether an action has the subject of a standing one, and so takes its place."""
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
