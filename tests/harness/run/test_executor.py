"""The choice of an executor: unknown ones, absent ones and mismatches are one line."""

from __future__ import annotations

import pytest

from harness.policy.types import UserError
from harness.run import cluster, driver, executor, node
from tests.cases import cases


@cases("text", ["slurm", "dask:tcp://10.0.0.1:8786", "ray2", ""])
def test_what_is_no_executor_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="is not ray or ray:ADDRESS"), executor.using(cluster.named(text)):
        pass


def test_an_executor_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.run.cluster.find_spec", lambda _: None)
    with pytest.raises(UserError, match="ray is not here: make cluster"), executor.using(cluster.named("ray")):
        pass
    assert executor.CHOSEN.get() is None


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.40.0
    Python: 3.12.3
This process on Ray Client was started with:
    Ray: 2.60.0
    Python: 3.11.9
"""


def test_a_mismatch_of_ray_or_python_has_both_versions() -> None:
    sentence = driver.sentence(RuntimeError(MISMATCH))
    assert sentence.startswith("the cluster has Ray 2.40.0 and Python 3.12.3, this environment Ray 2.60.0")
    assert driver.sentence(ConnectionError("no node\nand more")) == "ConnectionError: no node"


def test_a_node_says_what_a_result_depends_on() -> None:
    assert node.facts() == node.facts()
    assert {"Python", "numpy", "numba", "sources of the bench", "arithmetic"} <= set(node.facts())
