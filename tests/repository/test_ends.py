"""A run of the tests ends: red, with the name of the test that killed its process or hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.slow

WAITS_S = 120  # for a run that takes a few seconds, unless it hangs
LONG = "import time\ndef test_long(): time.sleep(600)\n"
ENDS = {
    "killed": "import os\ndef test_bad(): os.kill(os.getpid(), 9)\n",
    "leaves": "import os\ndef test_bad(): os._exit(0)\n",
    "hangs": "import time\ndef test_bad(): time.sleep(600)\n",
    "hangs in compiled code": "import ctypes\ndef test_bad(): ctypes.PyDLL(None).sleep(600)\n",  # keeps Python's lock
    "fails, then hangs": "import time\ndef teardown_module(): time.sleep(600)\ndef test_bad(): assert 0\n",
}
ALIVE = """
import signal, subprocess, sys
def test_child():
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT
"""


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, str]:
    """Run pytest with this tree's conftest on test files, where SIGINT is ignored; return exit code and output."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "tests.conftest"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's background jobs have it
    try:
        done = subprocess.run(
            [*command, *arguments, str(folder)],
            cwd=folder,
            env=env,
            timeout=WAITS_S,
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return done.returncode, done.stdout


@pytest.mark.parametrize("how", ENDS)
def test_a_test_that_ends_its_worker_ends_the_run_by_name(how: str, tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n2", "--dist=loadfile", "--timeout=2", bad=ENDS[how], other="def test_x(): pass\n")
    assert (code, "FAILED test_bad.py::test_bad" in output) == (1, True), output
    assert ("test_bad.py" in output.partition("node down")[0]) == ("hangs" in how), (
        output
    )  # the traceback says where it hung


def test_other_workers_are_not_waited_for(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n2", "--dist=loadfile", bad=ENDS["killed"], long=LONG)
    assert (code, "FAILED test_bad.py::test_bad" in output) == (1, True), output


def test_what_tests_start_ends_by_ctrl_c_where_it_was_ignored(tmp_path: Path) -> None:
    for workers in ("-n0", "-n1"):
        code, output = run(tmp_path, workers, child=ALIVE)
        assert code == 0, output
