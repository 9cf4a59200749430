"""The client's process: its priority, and its end with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from harness.policy.types import UserError
from tests import ROOT
from tests.harness.client.scripted import scripted, tokens
from tests.harness.client.test_client import NEVER_S, begin, client, jobs, states, until


def gone(pid: int) -> bool:
    """Return whether a process ends, or has."""
    try:
        psutil.Process(pid).wait(30)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_short_turns_leave_priority_and_policy_alone() -> None:
    code = (
        "import os; os.nice(3); from harness.client.slice import shorten\n"
        "about = lambda: (os.getpriority(os.PRIO_PROCESS, 0), getattr(os, 'sched_getscheduler', int)(0))\n"
        "before = about(); shorten(); assert about() == before, (before, about())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_client_runs_in_real_time_where_it_may() -> None:
    code = (
        "import os; from harness.client.slice import hurry, in_real_time\n"
        "may = in_real_time(); hurry()\n"
        "assert not may or os.sched_getscheduler(0) == os.SCHED_FIFO\n"
        "print(may)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    with client(jobs([0.0])) as sender:
        in_real_time = getattr(os, "sched_getscheduler", int)(sender.pid) == getattr(os, "SCHED_FIFO", None)
    assert str(in_real_time) == ran.stdout.strip()


def test_close_leaves_no_process_and_may_be_repeated() -> None:
    with client(jobs([0.0])) as sender:
        pid = sender.pid
        assert pid in {child.pid for child in psutil.Process().children()}
        sender.close()
        sender.close()
        assert pid not in {child.pid for child in psutil.Process().children()}
        with pytest.raises(UserError, match="closed"):
            sender.begin(0)


def test_a_killed_process_is_said() -> None:
    with client(jobs([0.0])) as sender:
        os.kill(sender.pid, signal.SIGTERM)
        with pytest.raises(UserError, match="client's process ended with code -15"):
            sender.poll(NEVER_S)
        sender.close()


def test_ctrl_c_leaves_the_log_to_the_parent() -> None:
    with scripted(lambda _: tokens(1)) as server, client(jobs([0.0])) as sender:
        os.kill(sender.pid, signal.SIGINT)
        begin(sender, server.url)
        until(sender, 1)
        assert states(sender.log()) == ["done"]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_parent(by: signal.Signals) -> None:
    code = (
        "import sys, time; from tests.harness.client.test_client import client, jobs\n"
        "with client(jobs([0.0])) as one:\n"
        "    print(one.pid, flush=True); one.poll(600.0)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(by)
    assert gone(pid)
