"""The KV blocks of a request: where they are, how many it needs, and how it takes and frees them."""

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
    """Return the tokens that a request's prefill must compute: its prompt, and after a preemption its output so far."""
    return req_at(S, r).prompt + req_at(S, r).made


@jit
def drop_blocks(S: int, r: int) -> None:
    """Free a request's KV, wherever it is."""
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
    """Return a batch's entry for the KV account, local or remote, that holds a request's KV.

    Return -1 if the batch cannot attend to KV in that account.
    """
    q = req_at(S, r)
    for f in accounts(S, b):
        if remote_at(S, f).inst == q.home and (q.attend or f == batch_at(S, b).near):
            return f
    return -1


@jit
def take_blocks(S: int, r: int, i: int, n: int, held: int) -> None:
    """Allocate a request's first n blocks in an account; other requests hold `held` of these blocks already."""
    q = req_at(S, r)
    q.home = i
    q.blocks = n
    q.node = take_chunk(S, i, n)
    inst_at(S, i).holders += 1
    q.extents = take(S, i, n - held)


@jit
def add_blocks(S: int, r: int, i: int, n: int) -> None:
    """Add n blocks in an account to a request whose prompt is computed piece by piece."""
    fill_begun(S, i)
    put(S, i, n)
    q = req_at(S, r)
    q.blocks += n
    q.extents = fill(S, i, n, q.extents)


@jit
def piece_blocks(S: int, r: int, known: int, piece: int) -> int:
    """Return the KV blocks that a request needs for `known` computed prompt tokens and the next `piece` tokens.

    With the last piece of the prompt there is also room for one output token.
    """
    tokens = known + piece
    if tokens == target(S, r):
        tokens += 1
    return int((tokens + world(S).block_tokens - 1) // world(S).block_tokens)
