"""KV that moves between devices and the host: for a policy's `Move`, or for the engine's own swaps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from harness.engines.machine import Refusal
from harness.engines.torch.core import Core, Kv
from harness.engines.torch.pages import Account
from harness.engines.torch.wire import Bytes
from harness.engines.wallclock import Live
from harness.policy.actions import Move
from harness.policy.events import Done
from harness.policy.types import GIB, Batch, Gpus, Host


@dataclass(slots=True, eq=False)
class Transfer:
    """The transfer of one request's KV, which is being copied or waits for memory at its target."""

    request: Live
    to: Gpus | Host | None  # None: the KV is discarded
    attend: bool
    under: Moving | None  # the action; None: the engine swaps
    kv: Kv | None = None  # the KV at its target; None: the transfer waits
    source: Kv | None = None  # the KV at its source


@dataclass(slots=True, eq=False)
class Moving:
    """A `Move` action that has not ended, and the requests whose KV has not arrived yet."""

    action: Move
    pending: set[int]


class Moves:
    """The moves of an engine that have not ended."""

    def __init__(self, engine: Core) -> None:
        self.engine = engine
        self.moving: dict[int, Transfer] = {}  # keyed by request
        self.under_way: list[Transfer] = []
        self.moves: list[Moving] = []
        self.count = 0
        self.full = False  # a move has waited for memory of the host

    def move(self, action: Move) -> Refusal | None:
        """Start a Move; return the reason if it is refused, else None."""
        to, who = action.to, action.who
        known = to in self.engine.arenas if isinstance(to, Host) else to is None or to in self.engine.places
        if not known:
            return "never", f"no KV on {to}"
        if failed := self.engine.place_refusal(who.inst) if isinstance(who, Batch) else self.engine.gone(who):
            return failed
        requests = list(self.engine.members(who)) if isinstance(who, Batch) else [self.engine.live[who]]
        batch = who if isinstance(who, Batch) else requests[0].batch
        if batch is None:
            return "gone", "a request in no batch has no KV"
        if action.attend and (not isinstance(to, tuple) or to == batch.inst.place):
            return "never", "KV is attended on as many other GPUs as its batch has, and not on its own"
        requests = [
            request for request in requests if request.rid in self.engine.kv and (request.kv_tokens or to is None)
        ]
        if not requests:
            return "gone", "no KV to move"
        move = Moving(action, {request.rid for request in requests})
        self.moves.append(move)
        for request in requests:
            if (before := self.moving.get(request.rid)) is not None:
                if before.kv is not None:  # it is on its way already, and stays where it arrives
                    move.pending.discard(request.rid)
                    continue
                self.over(self.moving.pop(request.rid))
            self.begin(Transfer(request, to, action.attend, move))
        self._arrived(move)
        return None

    def in_transit(self, account: Account) -> bool:
        """Tell whether KV of an account is being copied, from it or to it."""
        ends = (end for transfer in self.under_way for end in (transfer.source, transfer.kv))
        return any(end is not None and end.account is account for end in ends)

    def begin(self, transfer: Transfer) -> None:
        """Begin a transfer now; if its request is in a step, wait for the end of that step."""
        self.moving[transfer.request.rid] = transfer
        if transfer.request.rid not in self.engine.stepping:
            self.depart(transfer)

    def depart(self, transfer: Transfer) -> None:
        """Start copying a transfer's KV to its target if there is room; otherwise the transfer waits.

        KV without a target is freed. KV that is already at its target stays there.
        """
        request, to, kv = transfer.request, transfer.to, self.engine.kv[transfer.request.rid]
        if to is None or kv.home == to:
            self.moving.pop(request.rid)
            if to is None:
                self.engine.release(request)
            else:
                kv.attend = transfer.attend
            self.over(transfer)
            return
        account = self.engine.account(request.model, to)
        if not account.fits(len(kv.blocks)):
            if isinstance(to, Host) and not self.full:
                self.full = True
                size = f"{account.arena.size / GIB:.3g} GiB"
                text = f"at {self.engine.now_s:.3f} s the host's {size} for KV are full, and moves to it wait"
                print(f"torch: {text}", file=sys.stderr, flush=True)
            return
        transfer.kv = Kv(account, to, account.take(len(kv.blocks)), kv.tokens, transfer.attend, transfer.under is None)
        transfer.source = kv
        self.under_way.append(transfer)
        parts = list(self._kv_parts(kv, transfer.kv))
        self.engine.copy(self._link(kv.home, to), parts, partial(self._copied, transfer), kv=True)
        self.count += 1

    def _link(self, source: Gpus | Host, target: Gpus | Host) -> str:
        if isinstance(source, Host):
            assert not isinstance(target, Host)
            return f"h2d{target[0]}"
        return f"d2h{source[0]}" if isinstance(target, Host) else f"peer{source[0]}"

    def _kv_parts(self, kv: Kv, new: Kv) -> Iterator[Bytes]:
        """Yield the copies of a request's blocks, granule by granule; the link joins adjacent granules."""
        ends = [self.engine.config.gpus if isinstance(side.home, Host) else side.home[0] for side in (kv, new)]
        size = kv.account.arena.granule
        for a, b in zip(kv.blocks, new.blocks, strict=True):
            for x, y in zip(kv.account.granules(a), new.account.granules(b), strict=True):
                yield ends[0], x * size, ends[1], y * size, size

    def _copied(self, transfer: Transfer) -> None:
        """Handle the end of a copy: use the KV at its target from now on, and free the source."""
        self.under_way.remove(transfer)
        source, kv = transfer.source, transfer.kv
        assert source is not None
        assert kv is not None
        source.account.give(source.blocks)
        if self.moving.get(transfer.request.rid) is not transfer:  # its request has gone
            kv.account.give(kv.blocks)
        else:
            self.moving.pop(transfer.request.rid)
            self.engine.kv[transfer.request.rid] = kv
            kv.swapped = kv.swapped and isinstance(kv.home, Host)
            self.over(transfer)
        self.engine.freed()

    def over(self, transfer: Transfer) -> None:
        """Remove a transfer from its Move, because the transfer has ended or was cancelled.

        If this was the last transfer of the Move, end the Move.
        """
        if (move := transfer.under) is not None:
            move.pending.discard(transfer.request.rid)
            self._arrived(move)

    def _arrived(self, move: Moving) -> None:
        """End a Move once all its KV is at its target."""
        if not move.pending and move in self.moves:
            self.moves.remove(move)
            self.engine.tell([Done(move.action)])

    def stalled(self) -> bool:
        """Fail the first Move that waits for memory, because nothing can free memory; return False if no Move waits."""
        for transfer in self.moving.values():
            if transfer.kv is None and transfer.under is not None:
                self.moves.remove(transfer.under)
                for rid in transfer.under.pending:
                    self.moving.pop(rid, None)
                self.engine.refuse(Done(transfer.under.action, "never", "nothing is left that could free memory"))
                return True
        return False
