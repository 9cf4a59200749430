"""A worker, which maps memory and computes steps as the engine orders. It stores nothing about requests.

The nursery (nursery.py) starts workers. For a core, a worker is a process that is pinned to this core. For cards, it is
a thread with its own stream. A worker also computes attention over the KV on its device when workers of other devices
ask for it. If its lane has only a share of the core, it sleeps between kernels.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from harness.engines.torch import model
from harness.engines.torch.device import Device, Space, UnderWay
from harness.engines.torch.model import Computed, Pass, Weights
from harness.engines.torch.nets import prompt_ids
from harness.engines.torch.wire import Given, Order, Part, Stepped, take_files

MOMENT_S = 50e-6  # seconds between two looks whether a card is done


class Worker:
    """A worker: the models that it has mapped, and the steps that it has begun."""

    device: Device

    def __init__(self, engine: Connection, open_device: Callable[[int, int], Device]) -> None:
        self.engine, self.open_device = engine, open_device
        self.given: dict[str, Given] = {}
        self.weights: dict[str, tuple[Space, Weights]] = {}
        self.kv: dict[str, tuple[Space, Tensor]] = {}
        self.unfinished: dict[int, UnderWay] = {}  # steps between two slices
        self.peers: dict[int, Connection] = {}  # workers that this one asks for attention, by device
        self.askers: list[Connection] = []  # workers that ask this one
        self.last_parts: dict[int, list[Part]] = {}  # the parts that each peer attends in the step under way
        self.remote_attention: dict[int, Callable[[int, Tensor, Tensor, Tensor], Tensor] | None] = {}  # keyed by peer
        self.tables: dict[Connection, Any] = {}  # slots and contexts of each asker's step
        self.orders: deque[Order] = deque()  # steps that are still to be done
        self.logits = False

    def serve(self) -> None:
        """Handle messages and compute steps in a loop. Raises EOFError once the engine has ended."""
        while True:
            if not self.orders:
                select.select([self.engine, *self.askers], [], [])
            self.answer()
            if self.orders:
                self.engine.send(self.step(self.orders.popleft()))

    def receive(self) -> None:
        """Handle the messages that the engine has sent; steps are queued for `serve`."""
        while self.engine.poll():
            self.handle(*self.engine.recv())

    def handle(self, what: str, *args: Any) -> None:
        """Handle one message of the engine; `what` is its kind."""
        match what:
            case "begin":
                self._open(*args)
            case "weights":
                name, runs = args
                at = 0
                for offset, size in runs:
                    self._weights(name)[0].map(at, offset, size)
                    at += size
            case "drop":
                name, size = args
                self._weights(name)[0].leave(size)
            case "map" | "unmap":
                name, runs = args
                change = getattr(self._kv(name)[0], what)
                for run in runs:
                    change(*run)
            case "ask":
                self.peers[args[0]] = Connection(take_files(self.engine, 1)[0])
            case "answer":
                self.askers.append(Connection(take_files(self.engine, 1)[0]))
                self.device.meanwhile = self._meanwhile
            case "step":
                self.orders.append(args[0])
            case _:
                raise ValueError(what)

    def _open(self, number: int, cores: set[int], given: dict[str, Given], logits: bool) -> None:
        """Open a device for the models that the worker serves on it, and tell the engine that the worker is ready."""
        self.given, self.logits = given, logits
        (memory,) = take_files(self.engine, 1)
        if cores:
            os.sched_setaffinity(0, cores)
        self.device = self.open_device(number, memory)
        weights = {name: self._weights(name)[1] for name in given}
        self.device.prepare(given, weights, {name: self._kv(name)[1] for name in given})
        self.engine.send("ready")

    def _weights(self, name: str) -> tuple[Space, Weights]:
        if name not in self.weights:
            net = self.given[name].net
            space = self.device.space(net.weight_bytes)
            flat = space.tensor()[: net.weight_bytes // net.float_bytes]
            self.weights[name] = space, Weights(net, flat)
        return self.weights[name]

    def _kv(self, name: str) -> tuple[Space, Tensor]:
        if name not in self.kv:
            (block_tokens, block_bytes, blocks), net = self.given[name].pages, self.given[name].net
            space, s = self.device.space(block_bytes * blocks), net.shape
            size = (blocks, s.layers, 2, block_tokens, s.kv_heads, s.head_dim)
            inner = torch.empty(size[1:], device="meta").stride()
            flat = space.tensor()
            strides = (block_bytes // net.float_bytes, *inner)
            self.kv[name] = space, flat.as_strided(size, strides, flat.storage_offset())
        return self.kv[name]

    def step(self, order: Order) -> Stepped:
        """Compute a step, or its next slice."""
        begun_s, cpu_s = time.monotonic(), time.thread_time()
        _, weights = self._weights(order.model)
        done: Computed | None = None
        kernels_s: float | None = None

        def after_kernel() -> None:
            if order.op_s is not None:
                self.answer()
            if order.share is not None and self.device.place.type == "cpu":
                spent_s = time.thread_time() - cpu_s
                time.sleep(max(0.0, spent_s / order.share - (time.monotonic() - begun_s)))

        with torch.inference_mode(), self.device.lane(order.share, order.phase):
            under_way = self.unfinished.pop(order.step, None) or self._begin(order, weights)
            under_way.run(order.until, after_kernel, lambda *given: self.ask(order.model, *given))
            if order.until < weights.net.shape.layers:
                self.unfinished[order.step] = under_way
            else:
                done = under_way.computed(self.device.wait)
                after_kernel()
            ended_s = time.monotonic()
            if done is not None and order.repeat:
                kernels_s = under_way.kernels_s(order.repeat)
        tokens = () if done is None else tuple(done.tokens)
        shown = done.logits.float().cpu().numpy() if self.logits and done is not None else None
        return Stepped(order.step, begun_s, ended_s, time.thread_time() - cpu_s, tokens, shown, kernels_s)

    def _begin(self, order: Order, weights: Weights) -> UnderWay:
        """Begin a step: as graphs if the device has graphs for it, else kernel by kernel."""
        ids, kv, vocab = list[int](), self._kv(order.model)[1], weights.net.shape.vocab
        for p in order.parts:
            ids += prompt_ids(p.rid, p.cached_tokens, min(p.context, p.prompt_tokens), vocab).tolist()
            ids += p.generated
        return self.device.graphs(order, ids, weights, kv) or Pass(self.device, weights, kv, order.parts, ids)

    # ------------------------------------------------------------ attention elsewhere

    def ask(
        self, name: str, device: int, layer: int, parts: list[Part], q: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Return the attention over KV on another device, computed on that device.

        If the devices allow it, this worker imports a callable at a step's first layer, and calls it at later layers.
        Otherwise the worker of the other device is asked at each layer. While this worker waits for an answer, it
        answers the requests of other workers.
        """
        peer, fresh = self.peers[device], None
        if self.last_parts.get(device) is not parts:
            self.last_parts[device], self.remote_attention[device], fresh = parts, None, tuple(parts)
        if (attention := self.remote_attention[device]) is not None:
            return attention(layer, q, key, value)
        peer.send((name, layer, fresh, self.device.export(q, key, value)))
        while not peer.poll():
            select.select([peer, *self.askers], [], [])
            self.answer()
        result, attention_handle = peer.recv()
        self.remote_attention[device] = self.device.imported_attention(attention_handle)
        return self.device.imported(result)[0]

    def _meanwhile(self) -> None:
        """Wait up to MOMENT_S for messages of the engine or of other workers, and handle them."""
        select.select([self.engine, *self.askers], [], [], MOMENT_S)
        self.answer()

    def answer(self) -> None:
        """Handle the engine's messages, then compute the attention that other workers have asked for."""
        self.receive()
        for asker in select.select(self.askers, [], [], 0)[0] if self.askers else ():
            self.receive()
            try:
                name, layer, parts, tensors = asker.recv()
            except (EOFError, ConnectionResetError):
                self.askers.remove(asker)
                self.tables.pop(asker, None)
                continue
            kv = self._kv(name)[1]
            with torch.inference_mode(), self.device.lane(None, "attend"):
                q, key, value = self.device.imported(tensors)
                if parts is not None:
                    self.tables[asker] = model.slots(parts, kv), self.device.contexts(parts, kv)
                slots, contexts = self.tables[asker]
                model.write(kv, layer, slots, key, value)
                result = self.device.export(self.device.decode_attention(kv, layer, contexts, q))
                asker.send((result, self.device.export_attention(kv, slots, contexts)))
