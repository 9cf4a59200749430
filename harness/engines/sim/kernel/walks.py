"""Generators that iterate over the linked lists in the records.

If a row may leave its list during the iteration, the row after it is read before the row is yielded.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def lanes_in(S: int, p: int) -> Iterator[int]:
    """Yield the busy lanes of a pool."""
    lane = gpu_at(S, p).head
    while lane >= 0:
        yield lane
        lane = lane_at(S, lane).next


@jit
def turns(S: int) -> Iterator[int]:
    """Yield the lanes that have a turn, sorted by row; a yielded lane's turn may end meanwhile."""
    lane = world(S).turn_head
    while lane >= 0:
        after = lane_at(S, lane).next_turn
        yield lane
        lane = after


@jit
def demands(S: int, d: int) -> Iterator[int]:
    """Yield a lane's demands on GPUs, from row d on."""
    while d >= 0:
        yield d
        d = demand_at(S, d).next


@jit
def accounts(S: int, b: int) -> Iterator[int]:
    """Yield a batch's entries for KV accounts: first the batch's own account, then the remote ones."""
    f = batch_at(S, b).near
    while f >= 0:
        yield f
        f = remote_at(S, f).next


@jit
def remotes(S: int, b: int) -> Iterator[int]:
    """Yield a batch's entries for remote KV accounts."""
    f = remote_at(S, batch_at(S, b).near).next
    while f >= 0:
        yield f
        f = remote_at(S, f).next


@jit
def transfers(S: int, x: int) -> Iterator[int]:
    """Yield transfers, or the parts in one list, from row x on; a yielded row may leave its list meanwhile."""
    while x >= 0:
        after = xfer_at(S, x).next
        yield x
        x = after


@jit
def pieces_from(S: int, r: int) -> Iterator[int]:
    """Yield the requests that have a piece of their prompt in a step, from request r on."""
    while r >= 0:
        yield r
        r = req_at(S, r).next_piece


@jit
def listed(S: int, b: int, lst: int) -> Iterator[int]:
    """Yield the members in one list of a batch; a yielded member may leave the list meanwhile."""
    r = batch_at(S, b).ends[2 * lst]
    while r >= 0:
        after = req_at(S, r).next
        yield r
        r = after
