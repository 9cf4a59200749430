"""State that all parts of the engine read and change: the models, the memory, and which requests are in a step.

The engine class in `engine.py` derives from `Core`. This module neither forms steps nor copies weights or KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.engines.machine import Config, Refusal, laid_out
from harness.engines.torch import kind, nets
from harness.engines.torch.pages import Account, Arena
from harness.engines.torch.processes import WorkerProcess, Workers
from harness.engines.torch.setting import Fields, rates
from harness.engines.torch.wire import Bytes
from harness.engines.wallclock import Live, WallClock
from harness.policy.events import Done, Preempted
from harness.policy.types import Gpus, Host, Inst, Option


@dataclass(slots=True, eq=False)
class Kv:
    """The KV cache of one request: its blocks, the devices or host that store it, and its number of tokens."""

    account: Account
    home: Gpus | Host
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    attend: bool = False  # a batch on another device attends it where it lies
    swapped: bool = False  # the engine moved it to the host, and brings it back

    @property
    def bytes(self) -> int:
        """The bytes of the request's KV blocks."""
        return len(self.blocks) * self.account.pages.block_bytes


class Core(WallClock):
    """The state that all parts of the engine share, with the KV memory of requests."""

    residents: Any  # residents.Residents, as `moves` is moves.Moves, and so on: those modules import this one
    moves: Any
    lanes: dict[Any, Any]
    stepping: dict[int, Any]  # keyed by request: the step whose result it waits for

    def __init__(self, config: Config, options: Mapping[str, Option], fields: Fields) -> None:
        super().__init__(config)
        self.fields = fields
        k = self.kind = kind.kind(config)
        self.nets = {m.name: nets.net(m.shape, k.as_it_is, k.float_bytes, fields.wide) for m in config.models}
        layout: Any = options.get("process", "model")
        self.layout = laid_out(config, layout)
        self.turns = "turns" in {options.get("sharing") if config.sharing == "own" else config.sharing}
        self.swap = options.get("preempt") == "swap"  # the KV of preempted members goes to the host and comes back
        self.mem_bytes = config.pool_bytes or k.mem_bytes
        self.links = rates(config, k)  # GB/s
        self.places: list[Gpus] = [(device,) for device in range(config.gpus)]  # at which an instance can run
        self.arenas: dict[int | Host, Arena] = {g: Arena(self.mem_bytes, k.granule) for g in range(config.gpus)}
        self.arenas[Host(0)] = Arena(k.host_bytes, k.granule)
        buffer = k.buffer if options.get("kv") == "elastic" else 0
        block = max(config.block_tokens, k.block_tokens)
        self.accounts = {
            (m, place): Account(arena, net, block, buffer=0 if isinstance(place, Host) else buffer)
            for m, net in self.nets.items()
            for place, arena in self.arenas.items()
        }
        self.workers = Workers(k, self.nets, self.arenas, self.accounts)
        self.kv: dict[int, Kv] = {}
        self.copying: dict[int, Callable[[], None]] = {}  # what follows each copy that is under way

    def preempt(self, request: Live) -> Preempted:
        """Free the KV of a batch member to make room for others, and return the event that reports it."""
        raise NotImplementedError

    def retired(self, step: Any) -> None:
        """Forget a step that has ended, and free the blocks of requests that left their batch while it ran."""
        raise NotImplementedError

    def dismiss(self, worker: WorkerProcess) -> None:
        """Let a worker end. From then on, other workers compute the steps of its instances."""
        raise NotImplementedError

    def worker(self, device: int, model: str, *phase: str) -> WorkerProcess:
        """Return the worker for a model on a device; start the worker if it does not exist.

        With a phase, return the worker for the lanes of this phase. With `process=gpu`, one worker serves all models of
        a device.
        """
        return self.workers.worker(device, *(() if self.layout == "gpu" else (model,)), *phase)

    def place_refusal(self, inst: Inst) -> Refusal | None:
        """Return the reason why an instance cannot be served at its place; None if it can."""
        if inst.model not in self.nets or isinstance(inst.place, Host) or inst.place not in self.places:
            many = not isinstance(inst.place, Host) and len(inst.place) > 1
            return "never", "tensor parallelism is not served" if many else f"no {inst.model} on {inst.place}"
        return None

    def attendable(self, request: Live, place: Gpus) -> bool:
        """Tell whether a batch at `place` can attend to a request's KV at the place where the KV is stored now."""
        kv = self.kv[request.rid]
        return kv.home == place or (kv.attend and not isinstance(kv.home, Host))

    def kv_bytes(self, request: Live) -> int:
        """Return the bytes of a request's KV blocks; 0 if it has none; see WallClock."""
        return self.kv[request.rid].bytes if request.rid in self.kv else 0

    def hold(self, request: Live, tokens: int) -> bool:
        """Take the further blocks that a request needs for `tokens` tokens; return False if there is no room."""
        kv = self.kv[request.rid]
        more = kv.account.blocks_for(tokens) - len(kv.blocks)
        if more > 0 and not kv.account.fits(more):
            return False
        kv.blocks += kv.account.take(max(0, more))
        return True

    def could_hold(self, request: Live) -> bool:
        """Tell whether a request's context and one more token would fit on its device if no other model were there."""
        assert request.batch is not None
        account = self.account(request.model, request.batch.inst.place)
        most = account.arena.size - account.arena.whole(self.nets[request.model].weight_bytes)
        if account.limit_bytes is not None:
            most = min(most, account.limit_bytes)
        return account.blocks_for(request.ctx_tokens + 1) * account.pages.block_bytes <= most

    def enter(self, request: Live, tokens: int) -> bool:
        """Take the blocks for `tokens` tokens of a new prompt; return False if there is no room.

        The blocks must leave the watermark free, unless the model has no KV on the device yet. Loads of weights that
        were refused for lack of memory claim memory; the blocks must leave this memory free too.
        """
        assert request.batch is not None
        place = request.batch.inst.place
        account = self.account(request.model, place)
        of = account.arena.size if account.limit_bytes is None else account.limit_bytes
        claimed_bytes = self.residents.claims.get(place[0], 0) if not isinstance(place, Host) else 0
        alone = not account.used_bytes
        blocks = account.blocks_for(tokens)
        if not account.fits(blocks, 0 if alone else int(self.config.watermark * of)):
            return False
        if claimed_bytes and account.need_bytes(blocks) + claimed_bytes > account.arena.free_bytes:
            return False
        self.kv[request.rid] = Kv(account, place)
        return self.hold(request, tokens)

    def account(self, model: str, place: Gpus | Host) -> Account:
        """Return the account that counts a model's KV blocks on a device or on the host."""
        return self.accounts[model, place if isinstance(place, Host) else place[0]]

    def copy(
        self, link: str, parts: Sequence[Bytes], copied: Callable[[], None], *, kv: bool = False, part: float = 1.0
    ) -> None:
        """Order a copy over a link at the fraction `part` of the link's rate; call `copied` when the copy is done."""
        number = self.workers.copy(link, 1e9 * part * self.links[link.rstrip("0123456789")], parts, kv=kv)
        self.copying[number] = copied

    def refuse(self, done: Done) -> None:
        """Queue a Done event for the policy, even if the policy did not ask to be told of such events."""
        self._told.append(done)
