"""Tests lie where the code lies: those of a folder of the product in the folder of that name below tests/."""

from __future__ import annotations

from tests import ROOT
from tests.repository.test_layers import MODULES

FOLDERS = {path.parent.relative_to(ROOT).as_posix() for path in MODULES.values()}
# Tests of no folder: whole commands, this repository, and what needs an environment of its own.
OTHERS = {"commands", "repository", "servers", "cluster"}


def test_tests_lie_in_the_folders_of_the_product() -> None:
    tests = ROOT / "tests"
    assert {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - FOLDERS == OTHERS
