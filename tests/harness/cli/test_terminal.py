"""Progress of a long command: lines and a bar where somebody watches, the first table in place."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli import terminal
from harness.cli.terminal import UP, Terminal
from harness.loop.system import ROOT
from harness.run.teller import Left
from tests.bench import python
from tests.cases import cases

COMPARE = tuple(
    ("compare --systems static,chunked --trace sample --models llama-3.2-1b*2 --seeds 2 --workers 1 --no-plot").split()
)
WIPES = re.compile(re.escape(UP).replace(re.escape("{}"), "[0-9]+"))


def watched(out: Path, **variables: str) -> str:
    """Return the characters that a terminal of 30 lines of 100 letters is sent by a comparison."""
    return sent([sys.executable, "-m", "harness", *COMPARE, "-o", str(out)], variables)


def sent(command: list[str], variables: dict[str, str], rows: int = 30, columns: int = 100) -> str:
    """Return the characters that a terminal of such a size is sent by a command."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    others = {"CI", "NO_COLOR", "COLUMNS", "LINES"}
    env = {name: value for name, value in os.environ.items() if name not in others} | {"TERM": "xterm"} | variables
    with subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 65536):
                parts.append(part)
        except OSError:  # the other side is closed
            pass
        finally:
            os.close(ours)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    assert process.returncode == 0, text
    return text


def screen(text: str) -> list[str]:
    """Return the lines that are left of what a terminal was sent: bars, wiped lines and colours are gone."""
    lines = [""]
    for part in re.split(r"(\x1b\[[0-9]+A|\x1b\[J|\x1b\[[0-9;]*m|[\n\r])", text):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            lines[-1] = ""
        elif part.endswith("A") and part.startswith("\x1b"):
            del lines[len(lines) - int(part[2:-1]) :]
            lines[-1:] = [""]
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return [line.rstrip() for line in lines if line.strip()]


def bars(text: str) -> dict[str, list[str]]:
    """Return the texts behind the names of bars, such as `2/4 [00:01<00:01, 1.90run/s]`, in order."""
    counts_of = dict[str, list[str]]()
    for name, counts in re.findall(r"([^\r\n]+?): +[0-9]+%\|[^|]*\| (\S+ \[[^\]\r]*\]?)", text):
        counts_of.setdefault(name, []).append(counts)
    return counts_of


ONE_STEP = """
import time
from harness.cli import terminal
terminal.TICK_S = 0.05
with terminal.Terminal() as teller:
    teller.progress("fig7, more seeds 3: 12 of 28 panels are not decided yet", 1200, 2890)
    time.sleep(1.5)
"""


@pytest.mark.parametrize("size", [(24, 80), (0, 0), (10, 60)])  # some terminals do not tell their size
def test_a_bar_fits_its_terminal_and_its_clock_moves_within_a_step(size: tuple[int, int]) -> None:
    text = sent([sys.executable, "-c", ONE_STEP], {}, *size)
    ((name, counts),) = bars(text).items()
    assert name.startswith("fig7, more ")
    assert {"1200/2890 [00:00<?, ?run/s]", "1200/2890 [00:01<?, ?run/s]"} <= set(counts)
    assert max(len(line) for line in re.split(r"[\r\n]+", text) if "%|" in line) <= (size[1] or 80)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of terminals, in seconds, which a test moves."""
    at = [0.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: at[0]))
    monkeypatch.setattr(terminal, "FIRST_S", 5.0)
    return at


def test_a_pipe_gets_a_line_of_each_stage_that_takes_a_while(
    at: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    teller = Terminal()
    for at_s, what, done, total in (
        (0.0, "planning", 0, 2),
        (4.0, "planning", 1, 2),
        (4.5, "planning", 2, 2),  # over before 5 s
        (4.5, "fig7", 0, 4),
        (9.5, "fig7", 1, 4),
        (14.0, "fig7", 4, 4),
        (14.0, "fig7, round 2", 0, 2),
        (20.0, "fig7, round 2", 1, 2),
        (20.0, "fig7, round 2", 2, 2),  # the same stage
        (21.0, "scores", 0, 9),
        (27.0, "scores", 3, 9),
    ):
        at[0] = at_s
        teller.progress(what, done, total)
    assert capsys.readouterr().err.splitlines() == ["fig7: 1 of 4, about 15 s left", "scores: 3 of 9, about 12 s left"]


@pytest.mark.parametrize("ci", ["", "1"])
def test_a_pipe_gets_a_line_every_30_s_also_of_a_resumed_stage(
    ci: str, at: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", ci)
    teller = Terminal()
    for at_s in range(91):  # a run ends each second
        at[0] = float(at_s)
        teller.progress("fig7", 398 + at_s, 1246)
    assert capsys.readouterr().err.splitlines() == [
        "fig7: 398 of 1,246 are stored",
        "fig7: 428 of 1,246, about 14 min left",
        "fig7: 458 of 1,246, about 13 min left",
        "fig7: 488 of 1,246, about 13 min left",
    ]


@cases(
    ("left", "says"),
    [
        (Left(300.0, 100.0, None, 1.0), ", about 90 s left"),  # 10 s later
        (Left(300.0, 100.0, math.inf, 1.0), ", about 90 s left, then rates between those if they decide more"),
        (Left(300.0, 610.0, 1210.0, 1.0), ", about 10 min left, at most 20 min with more seeds"),
        (Left(300.0, 5.0, None, 0.45), ", about 0 s left; other work slows it: 45 % of a core a run"),
        (Left(300.0, None, None, 1.0), ""),  # of a system that no stored run tells of
    ],
)
def test_what_is_left_of_a_sweep_in_words(
    left: Left, says: str, at: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    at[0] = 0.0
    teller = Terminal()
    teller.progress("fig7", 1, 4, left)
    at[0] = 10.0
    teller._tell(at[0])
    assert capsys.readouterr().err == f"fig7: 1 of 4{says}\n"


BAR = """
from harness.cli import terminal
from harness.run.teller import Left
with terminal.Terminal() as teller:
    teller.progress("fig7", 0, 4, Left(9.0, None, None, 1.0))
    teller.progress("fig7", 1, 4, Left(9.0, 60.0, 600.0, 1.0))
    teller.progress("fig7", 2, 4, Left(9.0, 30.0, 600.0, 1.0))
    teller._bar.refresh()
"""


def test_a_bar_says_what_is_left_of_the_work() -> None:
    ((name, counts),) = bars(sent([sys.executable, "-c", BAR], {})).items()
    assert name == "fig7"
    assert "0/4 [00:00]" in counts
    assert "2/4 [00:00, about 30 s left, at most 10 min with more seeds]" in counts


SCORES = """
import time
from harness.cli import terminal
terminal.TICK_S, terminal.FIRST_S = 0.05, 0.2
with terminal.Terminal() as teller:
    teller.progress("scores", 0, 1)
    time.sleep(3)
"""


def test_a_step_that_takes_long_is_told_in_a_pipe() -> None:
    assert python("-c", SCORES).stderr == "scores ...\n"


def test_the_first_table_is_drawn_in_place_and_gives_way_to_the_last(tmp_path: Path) -> None:
    text = watched(tmp_path / "a")
    marks = re.findall(r"so far, (\d) (?:of 2 )?seeds, (\d+) runs:", text)
    assert len(marks) >= 2
    assert marks[0][0] == "1"  # of the search for the knee
    assert [int(runs) for _, runs in marks] == sorted(int(runs) for _, runs in marks)
    assert len(WIPES.findall(text)) >= len(marks)
    assert {"planning", "SLO bases", "comparison, round 2"} <= bars(text).keys()
    left = screen(text)
    assert not any("so far" in line for line in left)
    plain = python("-m", "harness", *COMPARE, "-o", tmp_path / "a")
    assert "so far" not in plain.stdout + plain.stderr
    table = [line.rstrip() for line in plain.stdout.splitlines() if re.match(r"(static|chunked) {2,}", line)]
    assert table
    assert set(table) <= set(left)


@pytest.mark.full
@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_plain_terminal_gets_progress_alone(tmp_path: Path, variable: tuple[str, str]) -> None:
    text = watched(tmp_path, **dict([variable]))
    assert "so far" not in text
    assert not WIPES.search(text)
    assert "SLO bases" in text


def test_lines_stand_above_what_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Terminal, "redraws", True)
    with Terminal() as teller:
        teller.show(["one", "two"])
        teller.say("said")
        teller.show(["three"])
    text = capsys.readouterr().err
    assert text == f"one\ntwo\n{UP.format(2)}said\none\ntwo\n{UP.format(2)}three\n{UP.format(1)}"
    assert screen(text) == ["said"]
