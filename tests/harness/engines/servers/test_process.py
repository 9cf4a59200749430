"""A server process's laws, with small servers in Python: what any server may do to us, and what must not outlive us."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from harness.engines.servers import environments, guard
from harness.engines.servers.process import HELD, PortTaken, Process, free_port
from harness.policy.types import UserError
from tests import ROOT
from tests.cases import cases

ANSWER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
HANG = """
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    kept = listening.accept()
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + ANSWER
# Two processes that hear no SIGTERM: a child in a session of its own, and a grandchild whose parent is gone.
PARENT = f"""
import subprocess, sys
child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
grand = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
kept = subprocess.Popen([sys.executable, "-c", child], start_new_session=True, stdout=subprocess.PIPE)
kept.stdout.readline()
subprocess.run([sys.executable, "-c", grand, child], check=True)
{ANSWER}
"""


Make = Callable[..., Process]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that makes a server of some code, not started; they end whatever a test does."""
    made: list[Process] = []

    def make(code: str, port: int = 0, env: Mapping[str, str] | None = None) -> Process:
        port = port or free_port()
        env = environments.variables(os.environ, {}) if env is None else env
        command = [sys.executable, "-c", code, str(port)]
        made.append(Process(command, env, tmp_path / "mine.log", f"http://127.0.0.1:{port}/health"))
        return made[-1]

    yield make
    for process in made:
        process.stop(0.0)


def started(process: Process) -> Process:
    """Start a server and wait until it answers."""
    process.start()
    process.wait_ready(60.0)
    return process


def last_words(process: Process, kind: type[UserError] = UserError) -> str:
    """Start a server that never answers; return what is said of it then."""
    process.start()
    with pytest.raises(UserError) as failed:
        process.wait_ready(60.0)
    assert type(failed.value) is kind
    assert not process.alive()
    return str(failed.value)


def test_a_server_answers_and_is_gone_after_stop(server: Make) -> None:
    process = server(ANSWER)
    process.stop()
    assert not process.log.exists()
    assert started(process).alive()
    assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
    process.stop()
    assert not process.alive()
    assert not psutil.pid_exists(process.pid)
    process.stop()


def test_a_server_that_dies_says_why(server: Make) -> None:
    why = last_words(server("import sys; print('first'); print('no such device'); sys.exit(7)"))
    assert "server mine ended before it was ready (exit code 7)" in why
    assert why.endswith("first\nno such device")


@cases(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL, as the kernel does when memory runs out"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise MemoryError", "(exit code 1): out of memory"),
        ("raise SystemExit('CUDA out of memory. Tried to allocate 2 GiB')", "(exit code 1): out of memory"),
    ],
)
def test_the_cause_of_death_is_named(code: str, why: str, server: Make) -> None:
    assert why in last_words(server(code))


def test_only_this_start_is_quoted(server: Make) -> None:
    early, late = (server(f"print({word!r}); raise SystemExit(1)") for word in ("early", "late"))
    assert "early" in last_words(early)
    why = last_words(late)
    assert "late" in why
    assert "early" not in why
    assert late.log.read_text() == "early\nlate\n"


def test_a_command_that_does_not_exist_is_a_users_mistake(tmp_path: Path) -> None:
    process = Process(["/no/such/python"], {}, tmp_path / "mine.log", f"http://127.0.0.1:{free_port()}/")
    assert "/no/such/python" in last_words(process)


def test_a_server_that_hangs_is_given_up(server: Make) -> None:
    process = server(HANG)
    process.start()
    with pytest.raises(UserError, match=r"server mine was not ready within 0\.2 s"):
        process.wait_ready(0.2)
    assert not process.alive()


def test_another_server_on_the_port_does_not_pass_for_ours(server: Make) -> None:
    other = started(server(ANSWER, port := free_port()))
    assert "server mine is not what answers" in last_words(server("import signal; signal.pause()", port), PortTaken)
    assert other.alive()


def test_a_port_that_is_taken_is_named(server: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        assert "its port is taken" in last_words(server(ANSWER, port), PortTaken)


def test_a_free_port_is_no_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert 1024 < port < lowest
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_server_that_ignores_sigterm_is_killed(server: Make) -> None:
    process = started(server(DEAF))
    process.stop(0.05)
    assert not psutil.pid_exists(process.pid)


@cases("first", ["stop", "death of the server"])
def test_children_end_with_their_server(first: str, server: Make) -> None:
    process = started(server(PARENT))
    members = process.members()
    assert len(members) == 3
    assert len({os.getsid(member.pid) for member in members}) == 2
    if first != "stop":
        os.kill(process.pid, signal.SIGKILL)
    process.stop(0.05)
    assert [member for member in members if member.is_running() and member.status() != psutil.STATUS_ZOMBIE] == []


RUN = """
import os, sys
from pathlib import Path
from harness.engines.servers.process import Process, free_port
one = Process([sys.executable, "-c", sys.argv[1], str(port := free_port())], dict(os.environ), Path(sys.argv[2]),
              f"http://127.0.0.1:{port}/")
one.start()
if sys.argv[3] != "at once":
    one.wait_ready(60.0)
print(*(member.pid for member in one.members()), flush=True)
if sys.argv[3] != "by its end":
    sys.stdin.read()
"""


@cases("how", ["SIGKILL", "SIGTERM", "at once", "by its end"])
def test_no_server_outlives_its_run(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, PARENT, str(tmp_path / "mine.log"), how]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert run.stdout is not None
    members = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
    assert members
    if how != "by its end":
        run.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    run.communicate(timeout=60.0)
    gone, left = psutil.wait_procs(members, timeout=60.0)
    assert left == []
    assert len(gone) == len(members)


def test_a_server_that_its_guard_does_not_know_never_starts(tmp_path: Path) -> None:
    """The command is held until a line comes: a run that is killed before that leaves a shell that ends."""
    touched = tmp_path / "touched"
    subprocess.run([*HELD, "touch", str(touched)], stdin=subprocess.DEVNULL, check=False)
    assert not touched.exists()
    subprocess.run([*HELD, "touch", str(touched)], input=b"go\n", check=True)
    assert touched.exists()


def test_a_family_is_living_processes_alone() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    leader = psutil.Process(dead.pid)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert leader.status() == psutil.STATUS_ZOMBIE
    assert guard.family(leader) == []
    dead.wait()
    assert guard.family(leader) == []


def test_no_secret_reaches_a_server(server: Make) -> None:
    ours = {
        "PATH": "/usr/bin",
        "HOME": "/home/me",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_HOME": "/cuda",
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "hf_secret",
        "OPENAI_API_KEY": "sk-secret",
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "CUDA_LICENSE_KEY": "cuda-secret",
        "PYTHONPATH": "/ours",
        "http_proxy": "http://me:secret@proxy",
    }
    given = environments.variables(ours, {"VLLM_SERVER_DEV_MODE": "1"})
    assert {k: v for k, v in given.items() if k in ours} == {
        name: ours[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "CUDA_HOME", "OMP_NUM_THREADS")
    }
    assert "secret" not in str(given)
    assert given["HF_HUB_OFFLINE"] == given["VLLM_SERVER_DEV_MODE"] == "1"
    with pytest.raises(UserError, match="VLLM_API_KEY looks like a key"):
        environments.variables({}, {"VLLM_API_KEY": "x"})
    last_words(process := server("import os; print(sorted(os.environ)); raise SystemExit(1)", env=given))
    assert set(eval(process.last_lines())) - set(given) <= {"LC_CTYPE", "PWD", "OLDPWD", "_", "SHLVL"}


def test_an_environment_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    assert environments.lacking("mine", tmp_path) == "an environment of its own, .venv-mine: make servers-mine"
    (path := environments.python("mine", tmp_path)).parent.mkdir(parents=True)
    path.touch()
    assert environments.lacking("mine", tmp_path) == ""
