"""Measurements of a GPU: `python3 -m probe` probes the card of this machine (`make gpu`).

It needs CUDA torch >= 2.11, cuda-bindings >= 13, triton and numpy of any version, and no file outside this folder.
`plan` says what is probed and what to expect. `conduct` hands the probes to child processes (`worker`) with time limits
and stores their measurements, and `report` makes a page of them. These four modules import no torch. `driver` holds the
driver's calls, `kernels` the Triton kernels, `rig` partitions and timing, `llama` a model; the rest are the probes.
"""
