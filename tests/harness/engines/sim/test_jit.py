"""Compiled code is never used with sources that it was not made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from numba.core.caching import NullCache

from harness import target
from harness.engines.sim import jit
from harness.engines.sim.kernel import walks
from tests.cases import cases

HOME = Path(jit.__file__).parents[1]
FILES = [str(file.relative_to(HOME)) for pattern in jit.SOURCES for file in sorted(HOME.glob(pattern))]


def copied(folder: Path) -> None:
    """Lay the sources of compiled code into a folder."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HOME / name, folder / name)


@cases("name", FILES)
def test_an_edit_of_any_source_leaves_the_compiled_code_behind(name: str, tmp_path: Path) -> None:
    copied(tmp_path)
    assert jit.fingerprint(tmp_path) == jit.fingerprint(HOME)
    with (tmp_path / name).open("a") as source_file:
        source_file.write("# edited\n")
    assert jit.fingerprint(tmp_path) != jit.fingerprint(HOME)


def test_the_cache_lies_with_the_sources_and_earlier_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    copied(tmp_path)
    kind = f"kernel-{target.compiled()}"
    old, before, other = (f"{kind}-0123", "kernel-0123456789ab", "kernel-generic-0123")
    for name in (old, before, other):
        (tmp_path / "__pycache__" / name).mkdir(parents=True)
    folder = jit.cache_dir(tmp_path)
    assert folder == tmp_path / "__pycache__" / f"{kind}-{jit.fingerprint(tmp_path)}"
    left = sorted(path.name for path in (tmp_path / "__pycache__").iterdir())
    assert left == [other]  # of another target
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    assert jit.cache_dir(tmp_path) == folder


@pytest.mark.skipif(jit.DISABLED, reason="nothing is compiled")
def test_a_generator_is_no_file_of_the_cache() -> None:
    """Else numba raises KeyError where it compiles a further caller in a later process."""
    assert isinstance(walks.accounts._cache, NullCache)  # type: ignore[attr-defined]
