"""A stand-in for `python -m vllm.entrypoints.openai.api_server` on a card: reads its command line, computes nothing.

    python -m tests.probe.stand_in CARD -m vllm.entrypoints.openai.api_server --model ...

CARD is a folder for the card. A server that starts while another one does ends with an assertion, as vLLM's may where
the card's free memory changes meanwhile. Where kvcached is asked for it keeps an account in CARD, as kvcached does in
/dev/shm. Its command line and variables stay in CARD as JSON, a file a server.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import struct
import sys
import threading
import time
from pathlib import Path

from tests.harness.engines.servers import stub

KNOWN = ("VLLM_", "CUDA_", "KVCACHED_", "ENABLE_KVCACHED", "HF_HUB_OFFLINE")
MIB = 1 << 20


def options(argv: list[str]) -> argparse.Namespace:
    """Read the options that servers on cards are given; any other ends it, as vLLM's own parser does."""
    parser = argparse.ArgumentParser("vllm.entrypoints.openai.api_server", allow_abbrev=False)
    for name in ("model", "served-model-name", "load-format", "host", "generation-config"):
        parser.add_argument(f"--{name}", required=name != "load-format")
    for name in ("port", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-memory-bytes"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in ("disable-uvicorn-access-log", "no-enable-prefix-caching", "enable-sleep-mode"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


def alone(card: Path, port: int) -> None:
    """Hold the card until this server answers; raise where another one is starting."""
    lock = (card / "starting").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AssertionError("Initial free memory is not the current one: another process uses the card") from None

    def wait() -> None:
        while True:
            try:
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
                link.request("GET", "/health")
                link.getresponse().read()
            except OSError:
                time.sleep(0.02)
            else:
                lock.close()
                return

    threading.Thread(target=wait, daemon=True).start()


def main(words: list[str]) -> None:
    """Serve as `tests/harness/engines/servers/stub.py` does."""
    card, argv = Path(words[0]), words[1:]
    assert argv[:2] == ["-m", "vllm.entrypoints.openai.api_server"], argv
    asked = options(argv[2:])
    env = {name: value for name, value in os.environ.items() if name.startswith(KNOWN)}
    alone(card, asked.port)
    (card / f"{asked.port}.json").write_text(json.dumps({"argv": argv[2:], "env": env}))
    if os.environ.get("ENABLE_KVCACHED") == "true":
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0", "kvcached 0.1.6 has no adapter for the second runner"
        (card / os.environ["KVCACHED_IPC_NAME"]).write_bytes(struct.pack("<qqq", 64 * MIB, 0, 0))
    mine = ["--models", asked.served_model_name, "--port", str(asked.port), "--max-model-len", str(asked.max_model_len)]
    stub.main([*mine, *"--ttft-ms 20 --itl-ms 2 --sleep-ms 100 --wake-ms 50".split()])


if __name__ == "__main__":
    main(sys.argv[1:])
