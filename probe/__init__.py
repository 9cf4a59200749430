"""Measurements of a GPU: `python3 -m probe` probes the card of this machine (`make gpu`).

It needs CUDA torch >= 2.11, cuda-bindings >= 13, triton and numpy of any version, and no file outside this folder.
`plan` lists the probes and the results to expect. `conduct` hands the probes to child processes (`worker`) with time
limits and stores their measurements. `report` writes a page about them. These four modules do not import torch.
`driver` wraps the CUDA driver's calls, and `kernels` has the Triton kernels. `rig` makes partitions and times work, and
`llama` is a model. Most other modules are probes.
"""
