"""Tests lie where the code lies: those of a folder of the product in the folder of that name below tests/."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from tests import ROOT
from tests.repository.test_layers import MODULES

FOLDERS = {path.parent.relative_to(ROOT).as_posix() for path in MODULES.values()}
# Tests of no folder: whole commands, this repository, and what needs an environment of its own.
OTHERS = {"commands", "repository", "servers", "cluster"}


def misplaced(paths: Iterable[PurePosixPath]) -> list[str]:
    """Return files of tests, below tests/, in a folder that neither the product has nor OTHERS."""
    return [str(path) for path in paths if str(path.parent) not in FOLDERS | OTHERS]


def test_tests_lie_in_the_folders_of_the_product() -> None:
    tests = ROOT / "tests"
    paths = [PurePosixPath(path.relative_to(tests)) for path in tests.rglob("test_*.py")]
    assert misplaced(paths) == []
    assert {str(path.parent) for path in paths} >= OTHERS


def test_a_misplaced_test_is_named() -> None:
    wrong = ["test_search.py", "harness/studies/test_search.py", "tools/test_speed.py"]
    assert misplaced(map(PurePosixPath, ["harness/study/test_search.py", "systems/test_qlm.py", *wrong])) == wrong
