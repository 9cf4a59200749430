"""Serve a GGUF with llama.cpp's server from the wheel `xllamacpp`, in this process, until a signal ends it.

The interpreter of llama.cpp's environment runs this file by its path, so it imports nothing of ours.
`commands.llamacpp` writes the command line. The wheel has no program of its own: its `Server` listens from its
construction on. The names are fields of llama.cpp's `common_params` (common/common.h), as `CommonParams` of xllamacpp
2026.10.11549 has them.
"""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    """Serve until killed."""
    import xllamacpp

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--alias", required=True, help="the name that requests call it by")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens of KV, which all slots share")
    parser.add_argument("--slots", type=int, required=True, help="requests that step together")
    parser.add_argument("--chunk", type=int, required=True, help="most tokens of a step")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {args.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_ctx = args.context
    params.n_parallel = args.slots
    params.kv_unified = True
    params.n_batch = params.n_ubatch = args.chunk
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.cache_prompt = params.cache_idle_slots = False
    params.cache_ram_mib = 0
    params.fit_params = False  # else it may choose another context than the one asked for
    params.ui = False
    params.offline = True
    server = xllamacpp.Server(params)
    print("listening on", server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
