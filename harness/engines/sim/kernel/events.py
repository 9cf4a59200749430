"""The kernel's reports of events to the engine, and its records of actions under way."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def tell(S: int, kind: int, a: int, b: int, c: int) -> None:
    """Append an event at the current time, if the engine listens for events of its kind.

    `a`, `b` and `c` become the event's subject, batch and detail.
    """
    W = world(S)
    if (W.heard >> kind) & 1:
        e = event_at(S, W.events_told)
        e.kind = kind
        e.subject = a
        e.batch = b
        e.detail = c
        W.events_told += 1


@jit
def in_order(S: int) -> None:
    """Sort this instant's unread events by kind; events of the same kind keep their order."""
    W = world(S)
    for i in range(W.events_read + 1, W.events_told):
        j = i
        while j > W.events_read and event_at(S, j - 1).kind > event_at(S, j).kind:
            x, y = event_at(S, j - 1), event_at(S, j)
            x.kind, y.kind = y.kind, x.kind
            x.subject, y.subject = y.subject, x.subject
            x.batch, y.batch = y.batch, x.batch
            x.detail, y.detail = y.detail, x.detail
            x.ran_s, y.ran_s = y.ran_s, x.ran_s
            j -= 1


@jit
def note(S: int, parts: int, heard: int) -> int:
    """Register an action that consists of `parts` parts, and return its number.

    If `heard` is 1, the action's end is reported even when no part failed.
    """
    W = world(S)
    a = W.action_free
    A = action_at(S, a)
    W.action_free = A.next
    W.action_spare -= 1
    A.left = parts
    A.failed = 0
    A.never = 0
    A.heard = heard
    return a


@jit
def forget(S: int, a: int) -> None:
    """Make the number of an ended action available for another action."""
    W = world(S)
    action_at(S, a).next = W.action_free
    W.action_free = a
    W.action_spare += 1


@jit
def over(S: int, a: int, how: int) -> bool:
    """Record the end of one part of action `a`; return True if all parts have now ended.

    `how` is the part's result: OK, GONE or NEVER.
    """
    A = action_at(S, a)
    A.left -= 1
    A.failed += int(how != OK)
    A.never += int(how == NEVER)
    return A.left == 0


@jit
def done(S: int, a: int, how: int) -> None:
    """Record the end of one part of action `a`; after the last part, report the end of the action.

    Do nothing if `a` is -1. The end is reported only if the policy listens for it or a part failed. The event's detail
    is twice the number of failed parts, plus one if some failed part can never succeed.
    """
    if a >= 0 and over(S, a, how):
        A = action_at(S, a)
        if A.heard or A.failed > 0:
            tell(S, E_DONE, a, -1, 2 * A.failed + int(A.never > 0))
        else:
            forget(S, a)
