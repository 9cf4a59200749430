"""The processes of an engine, as the engine handles them: nursery, workers and links. `close` ends all of them."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from harness.engines.torch import nets
from harness.engines.torch.kind import Kind
from harness.engines.torch.load import Load
from harness.engines.torch.nets import Net
from harness.engines.torch.pages import Account, Arena
from harness.engines.torch.wire import Bytes, Copied, Copy, Given, pair, send_files
from harness.policy.types import Host, UserError

ROOT = Path(__file__).resolve().parents[3]
ONE = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
# With these settings of glibc a process keeps the memory that a step frees, so the next need not fault it in again.
KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


class Nursery:
    """The engine's handle on the nursery, the process that starts workers and links."""

    def __init__(self, *, cuda: bool = False) -> None:
        self._end, file = pair()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, **ONE, **KEEP, "PYTHONPATH": path}
        command = [sys.executable, "-m", "harness.engines.torch.nursery", str(file), *(["cuda"] if cuda else [])]
        self._child = subprocess.Popen(command, env=env, pass_fds=[file], start_new_session=True)
        os.close(file)
        self._answer("the engine's processes ended as they started")

    def _answer(self, ended: str) -> Any:
        """Wait for the nursery's answer, and return it.

        Raises UserError with the text `ended` if the nursery has ended.
        """
        try:
            return self._end.recv()
        except (EOFError, ConnectionResetError):
            raise UserError(f"torch: {ended}; the reason is above") from None

    def open_cards(self, sizes: Sequence[int], kind: Kind) -> None:
        """Reserve the memory of devices on the cards; `sizes` has the bytes of each. Raises UserError if that fails."""
        self._end.send((tuple(sizes), kind.granule, kind.sms, kind.float_bytes))
        if refusal := self._answer("the cards' process ended as it opened them"):
            raise UserError(f"torch: {refusal}")

    def start(self, what: Literal["worker", "cold", "links"]) -> tuple[Connection, int]:
        """Start a worker or the links; return the connection to it, and the id of its process."""
        mine, file = pair()
        self._end.send(what)
        send_files(self._end, [file])
        os.close(file)
        return mine, self._end.recv()

    @property
    def pid(self) -> int:
        """The id of the nursery's process."""
        return self._child.pid

    def close(self) -> None:
        """End the nursery; the processes that it started then end too."""
        with suppress(OSError):
            os.killpg(self._child.pid, 9)
        self._child.kill()
        self._child.wait()
        self._end.close()


class WorkerProcess:
    """A worker process as the engine handles it: the models that it has mapped, and the step that it computes."""

    def __init__(self, nursery: Nursery, device: int, *, cold: bool = False) -> None:
        self.device = device
        self.conn, self.pid = nursery.start("cold" if cold else "worker")
        self.ready = False
        self.since_s = time.monotonic()  # an answer has been due since then, by the monotonic clock; inf: none is due
        self.weights: set[str] = set()  # models whose weights it has mapped
        self.accounts: set[str] = set()  # models whose KV it has mapped
        self.step: Any = None  # the step in flight

    def send(self, *message: Any) -> None:
        """Send the worker a message. If the worker has ended, the engine notices when it reads the worker's answers."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.conn.send(message)

    def kill(self) -> None:
        """Kill the worker at once, by SIGKILL."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection to the worker; the worker then ends."""
        with suppress(OSError):
            self.conn.close()


class Workers:
    """All processes of an engine, and the files that they map.

    The files are the memory of devices, the host's memory for KV, and the models' weights. Each file has a number,
    which identifies it as a store of the links. The numbers begin with the memory of each device. Then come the host's
    memory for KV, each model's weights in host memory, and each model's weights on disk.
    """

    def __init__(
        self,
        kind: Kind,
        nets: Mapping[str, Net],
        arenas: Mapping[int | Host, Arena],
        accounts: Mapping[tuple[str, int | Host], Account],
    ) -> None:
        self.kind, self.nets, self.arenas, self.accounts = kind, nets, arenas, accounts
        self.cores = sorted(os.sched_getaffinity(0))
        self.processes: dict[tuple[Any, ...], WorkerProcess] = {}
        self.logits = False
        self._introduced: set[tuple[WorkerProcess, WorkerProcess]] = set()
        self._nursery: Nursery  # since `start`, as the links
        self._links: Connection
        self._poll = select.poll()
        self._by_file: dict[int, WorkerProcess | None] = {}
        self._files: list[int] = []
        self._opened = ExitStack()  # closes what `start` opens
        self._copies = 0
        self._copying: dict[str, dict[int, float]] = {}  # seconds of the copies under way, keyed by link and number
        self._moved_s: dict[str, float] = {}  # when each link began its copies, or ended one
        self._links_pid = 0
        self.load: Load | None = None  # counted from the start of the clock

    def watch_load(self) -> None:
        """Begin to count the processor seconds of all processes."""
        self.load = Load([self._nursery.pid, self._links_pid, *(worker.pid for worker in self.processes.values())])

    def start(self) -> None:
        """Start the nursery and the links, allocate memory and draw weights. Raises UserError if they do not start."""
        cuda = self.kind.name == "cuda"
        self._nursery = self._opened.enter_context(closing(Nursery(cuda=cuda)))
        sizes = [arena.size for arena in self.arenas.values()] + [net.weight_bytes for net in self.nets.values()]
        for size in sizes:  # a card's memory is no file: an empty one keeps its number
            self._keep(os.memfd_create("torch"))
            os.ftruncate(self._files[-1], size)
        if cuda:
            devices = [arena.size for place, arena in self.arenas.items() if not isinstance(place, Host)]
            self._nursery.open_cards(devices, self.kind)
            for file in self._files[-len(self.nets) :]:
                self._keep(os.dup(file))
        else:
            self._write()
        self._links, self._links_pid = self._nursery.start("links")
        self._opened.callback(self._links.close)
        self._links.send((tuple(range(len(self._files))), tuple(self.nets.values())))
        send_files(self._links, self._files)
        self._links.recv()
        self._watch(self._links.fileno(), None)

    def _write(self) -> None:
        """Write each model's weights to two files: one in host memory, and one on disk."""
        folder = Path(self._opened.enter_context(TemporaryDirectory(prefix="bench-torch-", ignore_cleanup_errors=True)))
        for k, net in enumerate(self.nets.values()):
            raw = nets.blob(net, k).tobytes()
            with open(self._files[len(self.arenas) + k], "wb", closefd=False) as file:
                file.write(raw)
            (folder / str(k)).write_bytes(raw)
            self._keep(os.open(folder / str(k), os.O_RDONLY))

    def _keep(self, file: int) -> None:
        self._files.append(file)
        self._opened.callback(os.close, file)

    def close(self) -> None:
        """End every process and free all memory. May be called twice, or without `start`."""
        for worker in self.processes.values():
            worker.close()
        self.processes = {}
        self._opened.close()

    def _watch(self, file: int, worker: WorkerProcess | None) -> None:
        self._by_file[file] = worker
        self._poll.register(file, select.POLLIN)

    def worker(self, device: int, *key: Any, cold: bool = False) -> WorkerProcess:
        """Return the worker of a device that has this `key` (model, phase); start it if it does not exist.

        With `cold`, the new worker is a fresh process.
        """
        if (worker := self.processes.get((device, *key))) is None:
            worker = self.processes[device, *key] = WorkerProcess(self._nursery, device, cold=cold)
            if self.load is not None:
                self.load.join(worker.pid)
            served = {key[0]: self.nets[key[0]]} if key and key[0] in self.nets else self.nets
            given = {m: Given(net, self.accounts[m, device].pages) for m, net in served.items()}
            cores = {self.cores[device % len(self.cores)]} if self.kind.name == "cpu" else set()
            worker.send("begin", device, cores, given, self.logits)
            send_files(worker.conn, [self._files[device]])
            self._watch(worker.conn.fileno(), worker)
        return worker

    def dismiss(self, worker: WorkerProcess) -> None:
        """Remove a worker, and close its connection, so that it ends."""
        for key in [key for key, other in self.processes.items() if other is worker]:
            del self.processes[key]
        if self.load is not None and worker.pid != self._nursery.pid:
            self.load.leave(worker.pid)
        del self._by_file[worker.conn.fileno()]
        self._poll.unregister(worker.conn.fileno())
        worker.close()
        self._introduced = {two for two in self._introduced if worker not in two}

    def overdue(self, limit_s: float) -> list[WorkerProcess]:
        """Return the workers from which an answer has been missing for more than `limit_s` seconds."""
        return [worker for worker in self.processes.values() if time.monotonic() - worker.since_s > limit_s]

    def late_link(self, limit_s: float) -> str:
        """Return a text about a link that is late; "" if no link is late.

        A link has a limit: the seconds that all its open copies together should take, plus `limit_s`. It is late if no
        copy ended for longer than this limit.
        """
        for link, copies in self._copying.items():
            for_s = time.monotonic() - self._moved_s[link]
            if copies and for_s > sum(copies.values()) + limit_s:
                return f"link {link} has moved nothing for {for_s:.0f} s, with {len(copies)} copies to do"
        return ""

    def receive(self, wait_s: float | None) -> list[tuple[float, WorkerProcess | None, Any]]:
        """Return the processes' messages in order of their times, each as (time, worker, message).

        If there is no message, wait for one, at most `wait_s` seconds (None: without limit). The worker is None for
        messages of the links. If a worker has ended, its message is None, and comes after all others.
        """
        messages: list[tuple[float, WorkerProcess | None, Any]] = []
        for file, _ in self._poll.poll(None if wait_s is None else math.ceil(1e3 * wait_s)):
            worker = self._by_file[file]
            try:
                what = (self._links if worker is None else worker.conn).recv()
                if isinstance(what, Copied):
                    link = next(link for link, copies in self._copying.items() if what.number in copies)
                    del self._copying[link][what.number]
                    self._moved_s[link] = time.monotonic()
                messages.append((getattr(what, "ended_s", 0.0), worker, what))
            except (EOFError, ConnectionResetError):
                if worker is None:
                    raise RuntimeError("torch: the links' process has ended") from None
                messages.append((math.inf, worker, None))
        return sorted(messages, key=lambda message: message[0])

    # ------------------------------------------------------------ messages to them

    def copy(self, link: str, rate: float, parts: Sequence[Bytes], *, kv: bool = False) -> int:
        """Order a copy at `rate` bytes/s, and return the copy's number."""
        self._copies += 1
        copies = self._copying.setdefault(link, {})
        if not copies:
            self._moved_s[link] = time.monotonic()
        copies[self._copies] = sum(size for *_, size in parts) / rate
        self._links.send(Copy(self._copies, link, rate, kv, tuple(parts)))
        return self._copies

    def fill(self, parts: Sequence[Bytes]) -> None:
        """Copy at an unlimited rate before the clock starts, and wait until the copy is done."""
        number = self.copy("fill", math.inf, parts)
        self._links.recv()
        del self._copying["fill"][number]

    def sync(self, worker: WorkerProcess, model: str) -> None:
        """Send the KV mappings that changed since the last call to the workers of this worker's device.

        A worker gets the changes of those models whose KV it has mapped before. If this worker has not mapped the KV of
        `model` before, it gets all mappings of that model.
        """
        fresh = "" if model in worker.accounts else model
        if fresh:
            account = self.accounts[model, worker.device]
            worker.accounts.add(model)
            worker.send("map", model, [run for page in account.mapped for run in _mapping(account, page)])
        for name in self.nets:
            account = self.accounts[name, worker.device]
            changes, account.changes = account.changes, {}  # workers have a page whose first change was an unmapping
            for other in self.processes.values() if changes else ():
                if other.device != worker.device or name not in other.accounts or (other is worker and name == fresh):
                    continue
                for page, mapped in changes.items():
                    if not mapped:
                        other.send("unmap", name, [(page * account.page_bytes, account.page_bytes)])
                    if page in account.mapped:
                        other.send("map", name, list(_mapping(account, page)))

    def introduce(self, worker: WorkerProcess, peer: WorkerProcess) -> None:
        """Connect a worker to `peer`, a worker of another device, so that it can ask `peer` for attention."""
        if (worker, peer) in self._introduced:
            return
        self._introduced.add((worker, peer))
        near, remote = socket.socketpair()
        for who, message, end in ((worker, ("ask", peer.device), near), (peer, ("answer",), remote)):
            who.send(*message)
            send_files(who.conn, [end.fileno()])
            end.close()


def _mapping(account: Account, page: int) -> Iterator[tuple[int, int, int]]:
    """Yield the memory areas of a page: (offset in the account's range, offset in the device's memory, bytes)."""
    at = page * account.page_bytes
    for offset, size in account.runs(page):
        yield at, offset, size
        at += size
