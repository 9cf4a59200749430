"""The nursery: the process that starts all workers and links of the engine.

It has loaded torch, so a worker that it starts is ready within milliseconds.

    python -m harness.engines.torch.nursery FILE          start processes on request over the socket FILE
    python -m harness.engines.torch.nursery FILE cuda     the same, but start threads, which share the cards' memory
    python -m harness.engines.torch.nursery FILE worker   be a worker: a cold start, which includes loading torch

The nursery runs in its own session, so that Ctrl-C reaches only the main process. It ends when its socket is closed.
The operating system then ends all processes that the nursery started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from harness.engines.torch.ending import bound, ended_with
from harness.engines.torch.wire import take_files

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SWITCH_S = 2e-4  # after which a thread of the cards' process asks for the interpreter's lock: far less than a step


def main() -> None:
    """Start processes at the engine's request, until the engine ends."""
    import torch

    from harness.engines.torch import cpu, links, worker

    torch.set_num_threads(1)
    here, engine = os.getpid(), Connection(int(sys.argv[1]))

    def opened(_: int, memory: int) -> cpu.Core:
        return cpu.Core(memory)

    if sys.argv[2:]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if sys.argv[2:] == ["cuda"]:
            threads(engine)
            os._exit(0)  # ends its threads, too
        else:
            ended_with(worker.Worker(engine, opened).serve)
        return
    with torch.inference_mode():  # sets up what torch would at its first use
        torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    engine.send("ready")
    while True:
        try:
            what = engine.recv()
            (file,) = take_files(engine, 1)
        except (EOFError, ConnectionResetError):
            return
        if what == "cold":
            command = [sys.executable, "-m", "harness.engines.torch.nursery", str(file), "worker"]
            pid = subprocess.Popen(command, pass_fds=[file]).pid
        elif not (pid := os.fork()):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == here:
                engine.close()
                link = Connection(file)
                ended_with(lambda: links.serve(link) if what == "links" else worker.Worker(link, opened).serve())  # noqa: B023
            os._exit(0)
        os.close(file)
        engine.send(pid)


def threads(engine: Connection) -> None:
    """Start workers and links at the engine's request, as threads of this process, until the engine ends.

    The threads share the memory of the cards, and their kernels run side by side.
    """
    import torch

    from harness.engines.torch import cuda, cuda_links, worker

    sys.setswitchinterval(SWITCH_S)
    engine.send("ready")
    with suppress(EOFError, ConnectionResetError):
        sizes, granule, sms, float_bytes = engine.recv()
        cards = cuda.Cards({2: torch.bfloat16, 4: torch.float32}[float_bytes])
        engine.send(cards.open(sizes, granule, sms))
        while True:
            what = engine.recv()
            (file,) = take_files(engine, 1)
            link = Connection(file)
            serve = (
                cuda_links.Links(cards, link).serve
                if what == "links"
                else worker.Worker(link, partial(cuda.Card, cards)).serve
            )
            threading.Thread(target=bound, args=(cuda.bind, serve), daemon=True).start()
            engine.send(os.getpid())


if __name__ == "__main__":
    main()
