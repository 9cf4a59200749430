"""A process that computes: it maps what it is told, and steps what it is ordered to. It keeps nothing of a request.

Run by the nursery (nursery.py), pinned to the core that stands for its device. Between two kernels it attends to what
other devices ask for KV that lies here, and sleeps where a share of the device is all that its lane has.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from harness.engines.torch import model
from harness.engines.torch.device import Space
from harness.engines.torch.model import Pass, Piece, Weights
from harness.engines.torch.nets import prompt_ids
from harness.engines.torch.wire import Given, Order, Stepped, take_files


class Worker:
    """The models that one process has mapped, and the steps it has begun."""

    def __init__(self, engine: Connection) -> None:
        self.engine = engine
        self.given: dict[str, Given] = {}
        self.memory = -1
        self.weights: dict[str, tuple[Space, Weights]] = {}
        self.kv: dict[str, tuple[Space, Tensor]] = {}
        self.begun: dict[int, Pass] = {}  # steps between two slices
        self.peers: dict[int, Connection] = {}  # to whom this one asks, by device
        self.askers: list[Connection] = []
        self.tables: dict[tuple[int, ...], Any] = {}  # of the askers' step, for all its layers
        self.orders: deque[Order] = deque()  # steps that are still to be done
        self.logits = False

    def serve(self) -> None:
        """Do what comes, until EOFError: the engine is gone."""
        while True:
            if not self.orders:
                select.select([self.engine, *self.askers], [], [])
            self.answer()
            if self.orders:
                self.engine.send(self.step(self.orders.popleft()))

    def heed(self) -> None:
        """Do what the engine has said; steps are done in `serve`."""
        while self.engine.poll():
            self.do(*self.engine.recv())

    def do(self, what: str, *args: Any) -> None:
        """Do one thing."""
        match what:
            case "begin":
                cores, self.given, self.logits = args
                (self.memory,) = take_files(self.engine, 1)
                os.sched_setaffinity(0, cores)
                self.engine.send("ready")
            case "weights":
                name, runs = args
                space, at = Space(self.memory, self.given[name].net.weight_bytes), 0
                for offset, size in runs:
                    space.map(at, offset, size)
                    at += size
                flat = space.tensor()[: self.given[name].net.weight_bytes // 4]
                self.weights[name] = space, Weights(self.given[name].net, flat)
            case "drop":
                self.weights.pop(args[0])[0].close()
            case "map":
                name, runs = args
                for at, offset, size in runs:
                    self._kv(name)[0].map(at, offset, size)
            case "unmap":
                name, runs = args
                for at, size in runs:
                    self._kv(name)[0].unmap(at, size)
            case "ask" | "answer":
                (file,) = take_files(self.engine, 1)
                if what == "ask":
                    self.peers[args[0]] = Connection(file)
                else:
                    self.askers.append(Connection(file))
            case "step":
                self.orders.append(args[0])
            case _:
                raise ValueError(what)

    def _kv(self, name: str) -> tuple[Space, Tensor]:
        if name not in self.kv:
            (block_tokens, block_bytes, blocks), s = self.given[name].pages, self.given[name].net.shape
            space = Space(self.memory, block_bytes * blocks)
            size = (blocks, s.layers, 2, block_tokens, s.kv_heads, s.head_dim)
            inner = torch.empty(size[1:], device="meta").stride()
            self.kv[name] = space, space.tensor().as_strided(size, (block_bytes // 4, *inner))
        return self.kv[name]

    def step(self, order: Order) -> Stepped:
        """Compute a step, or its next slice."""
        begun_s, cpu_s = time.monotonic(), time.thread_time()
        _, weights = self.weights[order.model]
        vocab = weights.net.shape.vocab

        def breathe() -> None:
            if order.op_s is not None:
                self.answer()
            if order.share is not None:
                spent_s = time.thread_time() - cpu_s
                time.sleep(max(0.0, spent_s / order.share - (time.monotonic() - begun_s)))

        tokens, logits = None, None
        with torch.inference_mode():
            under_way = self.begun.pop(order.step, None)
            if under_way is None:
                ids = list[int]()
                for p in order.parts:
                    ids += prompt_ids(p.rid, p.start, min(p.start + p.tokens, p.prompt_tokens), vocab).tolist()
                    ids += p.made
                pieces = [Piece(p.tokens, p.start, p.blocks, p.far) for p in order.parts]
                under_way = Pass(weights, self._kv(order.model)[1], pieces, torch.tensor(ids))
            under_way.run(order.until, breathe, lambda *asked: self.ask(order.model, *asked))
            if order.until < weights.net.shape.layers:
                self.begun[order.step] = under_way
            else:
                logits = under_way.logits()
                tokens = logits.argmax(-1).tolist()
                breathe()
        ended_s = time.monotonic()
        shown = logits.numpy() if self.logits and logits is not None else None
        return Stepped(order.step, begun_s, ended_s, time.thread_time() - cpu_s, tuple(tokens or ()), shown)

    # ------------------------------------------------------------ attention elsewhere

    def ask(
        self, name: str, device: int, layer: int, pieces: list[Piece], q: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Have another device attend to what lies there; answer its own questions meanwhile."""
        peer = self.peers[device]
        peer.send((name, layer, tuple(pieces), q.numpy(), key.numpy(), value.numpy()))
        while not peer.poll():
            select.select([peer, *self.askers], [], [])
            self.answer()
        return torch.from_numpy(peer.recv())

    def answer(self) -> None:
        """Attend to what others ask now; what the engine said before they asked comes first."""
        self.heed()
        for asker in select.select(self.askers, [], [], 0)[0] if self.askers else ():
            self.heed()
            try:
                name, layer, pieces, q, key, value = asker.recv()
            except (EOFError, ConnectionResetError):
                self.askers.remove(asker)
                continue
            kv = self._kv(name)[1]
            with torch.inference_mode():
                if layer == 0 or pieces not in self.tables:
                    self.tables = {pieces: (model.slots(pieces, kv.shape[3]), model.table(pieces, kv.shape[3]))}
                slots, table = self.tables[pieces]
                model.write(kv, layer, slots, torch.from_numpy(key), torch.from_numpy(value))
                asker.send(model.attend(kv, layer, table, torch.from_numpy(q)).numpy())
