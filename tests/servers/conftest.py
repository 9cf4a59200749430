"""Interpreters of the servers' environments: without one a test skips, but in CI it fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from harness.engines.commands import Command
from harness.engines.servers import environments
from harness.engines.servers.process import Process, free_port


def interpreter(name: str) -> Path:
    """Return the interpreter of a server's environment."""
    if lacks := environments.lacking(name):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} needs {lacks}")
    return environments.python(name)


@pytest.fixture(scope="session")
def llamacpp() -> Path:
    """Return the interpreter of .venv-llamacpp."""
    return interpreter("llamacpp")


@pytest.fixture(scope="session")
def vllm() -> Path:
    """Return the interpreter of .venv-vllm."""
    return interpreter("vllm")


@pytest.fixture(scope="session")
def sglang() -> Path:
    """Return the interpreter of .venv-sglang."""
    return interpreter("sglang")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of checkpoints."""
    return tmp_path_factory.mktemp("models")


Start = Callable[[str, Callable[[int], Command]], Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server that a function of its port describes, wait until it is ready, and stop it after the test."""
    started: list[Process] = []

    def run(name: str, of: Callable[[int], Command], ours: Mapping[str, str] = os.environ) -> Process:
        command = of(free_port())
        env = environments.variables(ours, command.env)
        started.append(Process(command.argv, env, tmp_path / f"{name}.log", command.ready_url))
        started[-1].start()
        started[-1].wait_ready(600.0)
        return started[-1]

    yield run
    for server in started:
        server.stop()
