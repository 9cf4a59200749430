"""Measurements of a GPU: `python3 -m probe` probes the card of this machine (`make gpu`).

Needs CUDA torch >= 2.11, cuda-bindings >= 13, triton and numpy of any version, and no file but this folder's.
`plan` says what is probed and what to expect; `conduct` hands the probes to child processes (`worker`) under time boxes
and keeps what they measure; `report` makes a page of it. These four import no torch. `driver` holds
the driver's calls, `kernels` the Triton kernels, `rig` partitions and timing, `llama` a model; the rest are the probes.
"""
