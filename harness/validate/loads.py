"""Loads of measured runs, as their sources state them, and the settings of a simulated run of such a load."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness.engines.costs import quantities, servers
from harness.engines.machine import Config, Served, cluster
from harness.policy.types import Jobs, Prefix, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_TOKENS = 16
SERVED_TOKENS = 8192  # assumed where a source names no limit: the context of Llama 3
WAVES = 10  # requests of each client of a closed loop; all clients begin at once
SEED_OF_LENGTHS = 0  # draws the lengths of a closed loop whose requests differ
PROMPTS = 50  # distinct prompts of a Poisson run, which are sent in turn again and again (45 to 50 in the source)


class Poisson(NamedTuple):
    """Poisson arrivals in stages; each stage has its own rate."""

    stages: tuple[tuple[float, float], ...]  # (requests per second, seconds at that rate)
    system: int  # tokens with which all prompts begin
    prompt: int
    output: int

    def jobs(self, seed: int = 0) -> Jobs:
        """Draw the requests of all stages.

        There are PROMPTS distinct prompts, which begin with the same system prompt. The requests use them in rotation.
        """
        draw, start_s, parts = np.random.default_rng(seed), 0.0, []
        for rate_rps, seconds in self.stages:
            count = draw.poisson(rate_rps * seconds)
            parts.append(np.sort(draw.uniform(start_s, start_s + seconds, count)))
            start_s += seconds
        jobs = _alike(np.concatenate(parts), self.prompt, self.output)
        whole, common = self.prompt // BLOCK_TOKENS, self.system // BLOCK_TOKENS
        unshared = np.arange(len(jobs))[:, None] % PROMPTS * whole + np.arange(whole)  # ids by prompt and place in it
        ids = np.where(np.arange(whole) < common, np.arange(whole), unshared)
        return replace(jobs, prefix=Prefix(BLOCK_TOKENS, whole * np.arange(len(jobs) + 1), ids.ravel()))

    def __str__(self) -> str:
        return f"{'/'.join(f'{rate:g}' for rate, _ in self.stages)} req/s, {self.prompt}+{self.output}"


class Closed(NamedTuple):
    """A closed loop of clients without think time."""

    clients: int
    prompt: int
    output: int
    least: float = 1.0  # lengths are drawn uniformly from this share of `prompt` and `output` to all of it
    first: bool = False  # the source's means count the first wave too

    @property
    def mean_output(self) -> float:
        """The mean output tokens of a request."""
        return (int(self.least * self.output) + self.output) / 2

    def jobs(self) -> Jobs:
        """Return `WAVES` requests for each client; each request arrives when the client's previous request ends."""
        n = WAVES * self.clients
        after = np.arange(n, dtype=np.int32) - self.clients
        arrival_s = np.where(after < 0, 0.0, np.inf)
        after = np.maximum(after, -1).astype(np.int32)
        jobs = _alike(arrival_s, self.prompt, self.output, after=after, think_s=np.zeros(n))
        if self.least == 1.0:
            return jobs
        rng = np.random.default_rng(SEED_OF_LENGTHS)
        prompt, output = (
            rng.integers(int(self.least * most), most + 1, n, np.int32) for most in (self.prompt, self.output)
        )
        return replace(jobs, prompt_tokens=prompt, output_tokens=output)

    def __str__(self) -> str:
        return f"{self.clients} clients, {self.prompt}+{self.output}"


class Batch(NamedTuple):
    """An offline batch: `size` requests that all arrive at the start."""

    size: int
    prompt: int
    output: int

    def jobs(self) -> Jobs:
        """Return the requests, all of which arrive at 0 s."""
        return _alike(np.zeros(self.size), self.prompt, self.output)

    def __str__(self) -> str:
        return f"batch {self.size}, {self.prompt}+{self.output}"


def _alike(arrival_s: NDArray[np.float64], prompt: int, output: int, **more: Any) -> Jobs:
    each, never = np.ones(len(arrival_s), np.int32), np.full(len(arrival_s), np.inf)
    return Jobs(("model",), arrival_s, 0 * each, prompt * each, output * each, never, never, **more)


Load = Poisson | Closed | Batch


class Setting(NamedTuple):
    """Settings of one simulated run; cases with equal settings share that run."""

    engine: str
    gpu: str
    model: str  # a name of workloads/shapes.toml
    tp: int
    load: Load | None  # None: only the KV blocks that fit are computed
    flags: tuple[tuple[str, Any], ...] = ()  # fields of Config, over those of the engine
    given: Shape | None = None  # the shape, if the row's file or the caller describes it
    served: int = SERVED_TOKENS  # longest prompt + output that is assumed to be served
    sampling: str = "checkpoint"  # or greedy, as in a spec

    @property
    def shape(self) -> Shape:
        """The model's shape, for requests of at most `served` tokens (prompt and output together).

        If sampling is greedy, the shape's `sampled` is false.
        """
        from workloads.models import shape

        its = self.given or shape(self.model)
        return its._replace(
            max_tokens=min(its.max_tokens, self.served), sampled=its.sampled and self.sampling != "greedy"
        )

    @property
    def config(self) -> Config:
        """Return the machine's configuration: the engine's usual settings, but with the values in `flags`."""
        usual = servers.settings(self.engine, quantities.gpu(self.gpu), self.tp, lambda: self.shape.max_tokens)
        flags = {**usual._asdict(), **dict(self.flags)}
        served = (Served("model", self.shape, self.tp),)
        return Config(served, gpu=self.gpu, gpus=self.tp, host=self.engine, block_tokens=BLOCK_TOKENS, **flags)

    @property
    def kv_blocks(self) -> int:
        """The number of KV blocks that fit into GPU memory together with the weights and the engine's process."""
        its = cluster(self.config)
        gpu, model = its.gpus[0], its.models["model"]
        return (gpu.mem_bytes - model.weight_bytes) // (BLOCK_TOKENS * model.kv_token_bytes)
