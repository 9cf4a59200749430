"""Generators that walk along the linked lists in the records.

Where a row may leave its list during the walk, the next row is read first.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.engines.sim.jit import jit
from harness.engines.sim.state import *


@jit
def lanes_in(S: int, p: int) -> Iterator[int]:
    """Walk through the busy lanes of a pool."""
    lane = gpu_at(S, p).head
    while lane >= 0:
        yield lane
        lane = lane_at(S, lane).next


@jit
def turns(S: int) -> Iterator[int]:
    """Walk through the lanes that have a turn, in order; the turn of a lane may end meanwhile."""
    lane = world(S).turn_head
    while lane >= 0:
        after = lane_at(S, lane).next_turn
        yield lane
        lane = after


@jit
def demands(S: int, d: int) -> Iterator[int]:
    """Walk through a lane's demands from row d on."""
    while d >= 0:
        yield d
        d = demand_at(S, d).next


@jit
def accounts(S: int, b: int) -> Iterator[int]:
    """Walk through the KV accounts of a batch: its own, then the remote ones."""
    f = batch_at(S, b).near
    while f >= 0:
        yield f
        f = remote_at(S, f).next


@jit
def remotes(S: int, b: int) -> Iterator[int]:
    """Walk through the remote KV accounts of a batch."""
    f = remote_at(S, batch_at(S, b).near).next
    while f >= 0:
        yield f
        f = remote_at(S, f).next


@jit
def transfers(S: int, x: int) -> Iterator[int]:
    """Walk through transfers, or parts in one list, from row x on; a row may leave its list meanwhile."""
    while x >= 0:
        after = xfer_at(S, x).next
        yield x
        x = after


@jit
def pieces_from(S: int, r: int) -> Iterator[int]:
    """Walk through the requests with a piece of their prompt in a step, from r on."""
    while r >= 0:
        yield r
        r = req_at(S, r).next_piece


@jit
def listed(S: int, b: int, lst: int) -> Iterator[int]:
    """Walk through a list of a batch; a member may leave the list meanwhile."""
    r = batch_at(S, b).ends[2 * lst]
    while r >= 0:
        after = req_at(S, r).next
        yield r
        r = after
