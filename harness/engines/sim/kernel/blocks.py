"""The KV blocks of a request: where they are, how many it needs, and how they are taken and freed."""

from __future__ import annotations

from harness.engines.sim.jit import jit
from harness.engines.sim.kernel.buddy import free_chunk, take_chunk
from harness.engines.sim.kernel.lanes import freed
from harness.engines.sim.kernel.memory import put
from harness.engines.sim.kernel.pages import fill, fill_begun, give, take
from harness.engines.sim.kernel.reuse import give_up
from harness.engines.sim.kernel.walks import accounts
from harness.engines.sim.state import *


@jit
def target(S: int, r: int) -> int:
    """Return the number of tokens that a request's prefill must compute.

    They are the prompt's tokens and, after a preemption, the output tokens made so far.
    """
    return req_at(S, r).prompt + req_at(S, r).made


@jit
def drop_blocks(S: int, r: int) -> None:
    """Free a request's KV in whichever account stores it."""
    q = req_at(S, r)
    if q.home >= 0:
        i = q.home
        inst_at(S, i).holders -= 1
        if world(S).reuse:
            give_up(S, r)
        else:
            free_chunk(S, i, q.node, q.blocks)
            give(S, i, q.blocks, q.extents)
        freed(S, i)
    q.home = -1
    q.node = -1
    q.extents = -1
    q.attend = 0
    q.blocks = 0


@jit
def account_of(S: int, b: int, r: int) -> int:
    """Return a batch's entry (a row of REMOTE) for the KV account, local or remote, that stores a request's KV.

    Return -1 if the batch cannot attend to KV in that account.
    """
    q = req_at(S, r)
    for f in accounts(S, b):
        if remote_at(S, f).inst == q.home and (q.attend or f == batch_at(S, b).near):
            return f
    return -1


@jit
def take_blocks(S: int, r: int, i: int, n: int, held: int) -> None:
    """Allocate a request's first n blocks in account i.

    Other requests already use `held` of these blocks, which therefore take no further memory.
    """
    q = req_at(S, r)
    q.home = i
    q.blocks = n
    q.node = take_chunk(S, i, n)
    inst_at(S, i).holders += 1
    q.extents = take(S, i, n - held)


@jit
def add_blocks(S: int, r: int, i: int, n: int) -> None:
    """Allocate n more blocks in account i for a request whose prefill has begun."""
    fill_begun(S, i)
    put(S, i, n)
    q = req_at(S, r)
    q.blocks += n
    q.extents = fill(S, i, n, q.extents)


@jit
def piece_blocks(S: int, r: int, known: int, piece: int) -> int:
    """Return the number of KV blocks for `known` computed prompt tokens and the next `piece` tokens of a request.

    If that piece completes the prefill, the blocks also have room for one output token.
    """
    tokens = known + piece
    if tokens == target(S, r):
        tokens += 1
    return int((tokens + world(S).block_tokens - 1) // world(S).block_tokens)
