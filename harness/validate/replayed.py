"""Simulation of a measured run's load, used for all files of measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pyarrow as pa

from harness.engines.costs import quantities
from harness.engines.machine import Config, Machine, Served, cluster, machine
from harness.loop import system
from harness.loop.engine import find
from harness.loop.replay import replay
from harness.policy.types import Jobs
from harness.rows import requests


def replayed(
    config: Config,
    jobs: Jobs,
    name: str = "dedicated",
    fields: Mapping[str, Any] | None = None,
    *,
    host: quantities.HostProfile | None = None,
    quantum_s: float | None = None,
) -> requests.Rows:
    """Simulate jobs under the system `name`, and return a row for each request.

    `fields` are fields of the system. `host` is a profile that a fit tries. It replaces the profile of `config`, and
    steps then have no noise. `quantum_s` replaces the committed seconds of a model's turn on a shared GPU.
    """
    config = config if host is None else replace(config, noise=0.0)
    priced = _machine(config.models, config.gpu, config.host, host or quantities.host(config.host, config.gpu))
    priced = priced._replace(quantum_s=quantities.quantum_s() if quantum_s is None else quantum_s)
    make: Any = system.find(name)
    options = make(cluster(config, priced=priced), **(fields or {})).options
    engine = find("sim")(config, options, priced)
    replay(make(engine.cluster, **(fields or {})), engine, jobs)
    return requests.rows(pa.Table.from_batches(engine.rows()))


@lru_cache(maxsize=64)  # a fit runs many loads on few machines, whose cost tables take longer than the runs
def _machine(models: tuple[Served, ...], gpu: str, name: str, host: quantities.HostProfile) -> Machine:
    """Return the machine of a measured run, with its costs.

    The machine has the standard table, links and factors, because measured runs set none of their own.
    """
    return machine(Config(models, gpu=gpu, host=name), host)
