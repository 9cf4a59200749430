"""One target for all machines: equal rows whatever the processor, and where that fails, runs that are not mixed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness import target
from tests.bench import python
from tests.cases import cases

FEATURES = target.flags()

RUN = """
import json, sys
from hashlib import sha256
from pathlib import Path
import harness
from harness.run import arithmetic
from harness.rows import record
from harness.run import sweep
from tests.harness.run.test_sweep import TINY

(folder,) = sweep.sweep([TINY], Path(sys.argv[1]), workers=1)
rows = record.read(folder)
facts = record.meta(folder)
print(json.dumps([sha256(str(rows.to_pylist()).encode()).hexdigest(), facts["code_hash"], arithmetic.digest()]))
"""

AVX512 = target.V4 <= FEATURES
MACHINES = {  # what another processor, or another way to begin, changes
    "as it is": {},
    "a later processor": {"NPY_DISABLE_CPU_FEATURES": "X86_V4"} if AVX512 else {},
    "numba for any processor": {"NUMBA_CPU_NAME": "generic"},
    "NumPy without vectors": {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4" if AVX512 else "X86_V3"},
    "a processor without FMA": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"},
}


def ran(out: Path, env: dict[str, str]) -> tuple[str, str, str]:
    """Run a spec in a process with these variables; return the hashes of its rows, its code and the arithmetic."""
    ours = {key: value for key, value in os.environ.items() if key not in target.variables("x86-64-v3", target.V4)}
    rows, code, arithmetic = json.loads(python("-c", RUN, out, env=ours | env).stdout.splitlines()[-1])
    return rows, code, arithmetic


@pytest.mark.full
@pytest.mark.timeout(900)  # another target is compiled
def test_rows_are_equal_or_their_arithmetic_is_another(tmp_path: Path) -> None:
    got = {name: ran(tmp_path / name, env) for name, env in MACHINES.items()}
    usual = got["as it is"]
    assert got["a later processor"] == usual
    for rows, code, arithmetic in got.values():
        assert code == usual[1]  # arithmetic stands beside it in a run's facts
        if arithmetic == usual[2]:
            assert rows == usual[0]
    # The kernel has sums, products and roots alone: the same bits for any processor.
    assert got["numba for any processor"][0] == usual[0]
    assert got["numba for any processor"][2] != usual[2]


@cases(
    ("architecture", "has", "name"),
    [
        ("x86_64", target.V3 | target.V4, "x86-64-v3"),
        ("x86_64", target.V3, "x86-64-v3"),
        ("x86_64", frozenset({"avx"}), "x86-64"),
        ("AMD64", frozenset(), "x86-64-v3"),  # macOS lists none
        ("aarch64", frozenset(), "arm64"),
        ("arm64", frozenset(), "arm64"),
    ],
)
def test_a_target_an_architecture(architecture: str, has: frozenset[str], name: str) -> None:
    assert target.named(architecture, has) == name


def test_vectors_beyond_the_target_are_off() -> None:
    assert target.variables("x86-64-v3", target.V3 | target.V4)["NPY_DISABLE_CPU_FEATURES"] == "X86_V4"
    assert "NPY_DISABLE_CPU_FEATURES" not in target.variables("x86-64-v3", target.V3)
    assert target.variables("arm64", frozenset())["NUMBA_CPU_NAME"] == "generic"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    target.pin()
    assert os.environ["NUMBA_CPU_NAME"] == "generic"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
