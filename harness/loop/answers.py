"""Check that each action of a policy's answer has a known class, and fields of the types that actions.py declares.

The checks run for every action of every run. So they are written by hand for speed, and not derived from the
declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, get_args

from harness.policy.actions import Admit, Drop, Evict, Limit, Load, Move, Run, Wake, brief
from harness.policy.types import Batch, Host, Inst, Phase

WHOLE = (int, Integral)  # numpy's integers count too
PHASES = get_args(Phase)
REAL = (float, int, Real)
LONGEST = 160  # characters of an answer that is quoted


def _inst(x: Any) -> bool:
    return type(x) is Inst and isinstance(x.model, str) and _home(x.place)


def _batch(x: Any) -> bool:
    return type(x) is Batch and _inst(x.inst) and isinstance(x.tag, WHOLE)


def _home(x: Any) -> bool:
    if not isinstance(x, tuple):
        return isinstance(x, Host)
    for gpu in x:  # noqa: SIM110 - `all` of a generator takes twice as long
        if not isinstance(gpu, WHOLE):
            return False
    return True


def _count(x: Any) -> bool:
    return x is None or isinstance(x, WHOLE)


def _time(x: Any) -> bool:
    return x is None or (isinstance(x, REAL) and -math.inf <= x <= math.inf)  # type: ignore[operator]  # no NaN


def _run(a: Run) -> bool:
    return (
        _batch(a.batch)
        and a.phase in PHASES
        and _time(a.for_s)
        and _count(a.steps)
        and _count(a.seqs)
        and _count(a.chunk_tokens)
        and _count(a.slice_layers)
        and _time(a.op_s)
        and _count(a.sms)
    )


RIGHT: Mapping[type, Callable[[Any], bool]] = {
    Load: lambda a: _inst(a.inst) and isinstance(a.way, str),
    Evict: lambda a: _inst(a.inst) and isinstance(a.drain, bool),
    Limit: lambda a: isinstance(a.model, str) and isinstance(a.gpu, WHOLE) and _count(a.kv_bytes),
    Admit: lambda a: isinstance(a.who, (int, str)) and _batch(a.batch),  # engines tell the two apart
    Drop: lambda a: isinstance(a.rid, WHOLE),
    Run: _run,
    Move: lambda a: (
        (isinstance(a.who, WHOLE) or _batch(a.who)) and (a.to is None or _home(a.to)) and isinstance(a.attend, bool)
    ),
    Wake: lambda a: isinstance(a.at_s, REAL) and a.at_s == a.at_s and isinstance(a.key, str),  # no NaN
}


def fault(actions: Iterable[Any]) -> str | None:
    """Describe the first item that is no action or has a field of a wrong type; return None if all are right."""
    for action in actions:
        right = RIGHT.get(type(action))
        if right is None:
            return f"answered {_short(repr(action))}, which is no action"
        if not right(action):
            return f"answered {_short(brief(action))}; a field is of the wrong type"
    return None


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
