"""Every shipped system on real kernels: some two hundred requests on two devices, all of them accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from harness.check.engine import children  # noqa: E402
from harness.cli.options import system_names  # noqa: E402
from harness.rows import record  # noqa: E402
from harness.run import matrix  # noqa: E402
from harness.run.execute import execute  # noqa: E402
from harness.run.resolve import resolve  # noqa: E402
from harness.run.spec import Spec  # noqa: E402

MODELS = "llama-3.2-1b*4"
TRACE = "aegaeon-like+rate_rps=12+max_tokens=64+span_s=60"
SLOS = tuple((f"llama-3.2-1b/{k}", 1.0, 0.1) for k in range(1, 5))
SIMULATED = {"unshared", "contiguous"}  # whose memory has no bound, and whose KV lies in chunks
IN_CI = {"prism", "muxserve", "qlm", "pdmux", "weaver", "static"}  # loads, limits, swaps, partitions, remote attention
SYSTEMS = [name for name in system_names() if name not in SIMULATED]


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in IN_CI else pytest.mark.full) for x in SYSTEMS])
def test_a_system_serves_two_hundred_requests(name: str, tmp_path: Path) -> None:
    before = children()
    spec = resolve(
        Spec(
            name,
            engine="torch",
            trace=TRACE,
            models=MODELS,
            gpus=2,
            window_s=4.0,
            warmup_s=0.0,
            drain_s=900.0,
            slo="absolute:ttft=1,tpot=0.1",
            slo_s=SLOS,
        )
    )
    path = execute(spec, tmp_path, "")
    about = record.meta(path)
    assert (about["skipped"], about["infeasible"], about["fidelity"]) == (None, None, "emulated")
    rows = record.read(path).to_pylist()
    assert 150 < len(rows) < 250
    for row in rows:
        assert row["state"] in {"done", "failed", "dropped"}
        assert sum(row[f"{wait}_ns"] for wait in record.WAITS) == row["done_ns"] - row["arrival_ns"]
    assert children() == before


def test_the_matrix_has_every_preset_of_every_system() -> None:
    lacking = {(row.system, row.preset) for row in matrix.rows(SYSTEMS, ["torch"]) if row.lacks["torch"] != ((), "")}
    assert not lacking
    assert all(row.lacks["torch"].names for row in matrix.rows(sorted(SIMULATED), ["torch"]))
