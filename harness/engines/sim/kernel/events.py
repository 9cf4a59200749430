"""What the kernel tells the engine: events in order, and actions under way."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.state import E_DONE, NEVER, OK, action_at, event_at, world


@jit
def tell(S: int, kind: int, a: int, b: int, c: int) -> None:
    """Note an event of this instant, if anybody hears its kind."""
    W = world(S)
    if (W.hear >> kind) & 1:
        e = event_at(S, W.ev_n)
        e.kind = kind
        e.a = a
        e.b = b
        e.c = c
        W.ev_n += 1


@jit
def in_order(S: int) -> None:
    """Sort the instant's events by kind, stable."""
    W = world(S)
    for i in range(W.ev_i + 1, W.ev_n):
        j = i
        while j > W.ev_i and event_at(S, j - 1).kind > event_at(S, j).kind:
            x, y = event_at(S, j - 1), event_at(S, j)
            x.kind, y.kind = y.kind, x.kind
            x.a, y.a = y.a, x.a
            x.b, y.b = y.b, x.b
            x.c, y.c = y.c, x.c
            x.ran, y.ran = y.ran, x.ran
            j -= 1


@jit
def note(S: int, parts: int, heard: int) -> int:
    """Number an action that is done when so many parts of it are."""
    W = world(S)
    a = W.afree
    A = action_at(S, a)
    W.afree = A.next
    W.an -= 1
    A.left = parts
    A.failed = 0
    A.never = 0
    A.heard = heard
    return a


@jit
def forget(S: int, a: int) -> None:
    """An action is over and read: its number is free again."""
    W = world(S)
    action_at(S, a).next = W.afree
    W.afree = a
    W.an += 1


@jit
def over(S: int, a: int, how: int) -> bool:
    """A part of an action is over: whether it was the last."""
    A = action_at(S, a)
    A.left -= 1
    A.failed += int(how != OK)
    A.never += int(how == NEVER)
    return A.left == 0


@jit
def done(S: int, a: int, how: int) -> None:
    """A part of an action (-1: of none) is over; the last one tells, if anybody hears of it or a part failed.

    Told are twice the parts that failed, and one more if some of them can never succeed.
    """
    if a >= 0 and over(S, a, how):
        A = action_at(S, a)
        if A.heard or A.failed > 0:
            tell(S, E_DONE, a, -1, 2 * A.failed + int(A.never > 0))
        else:
            forget(S, a)
