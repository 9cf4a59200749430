"""Help, completion and names of commands: what a user reads before anything runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import click
import pytest

from harness.cli import codes, terminal
from harness.cli.app import COMMANDS, load, main
from harness.cli.options import GROUPS
from harness.loop.system import ROOT
from tests.bench import bench, ok, python
from tests.cases import cases


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        command = load(name) if group is main else command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    for name, (_, line) in COMMANDS.items():
        assert (load(name).name, (load(name).help or "").splitlines()[0]) == (name, line)


def test_the_list_of_commands_cuts_nothing_and_has_the_main_ones_first() -> None:
    text = ok("--help")
    assert all(len(line) <= 60 for _, line in COMMANDS.values())
    listed = text.partition("Main commands:")[2].partition("Exit codes:")[0]
    shown = re.findall(r"^  (\w+) {2,}(\S.*)$", listed, re.MULTILINE)
    assert shown == [(name, line) for name, (_, line) in COMMANDS.items()]
    assert [name for name, _ in shown[:4]] == ["compare", "size", "study", "explain"]


@cases("path", [(), *commands()])
def test_help_has_80_columns_however_wide_the_terminal(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("80", "240"):
        monkeypatch.setenv("COLUMNS", columns)
        assert [line for line in ok(*path, "--help").splitlines() if len(line) > 80] == []


def test_long_help_has_each_option_once_in_a_group_and_no_group_names_one_that_is_none() -> None:
    commands = {name: load(name) for name in ("compare", "size", "study", "sensitivity")}
    known = set()
    for name, command in commands.items():
        text = ok(name, "--help")
        options = [
            max(param.opts, key=len) for param in command.params if isinstance(param, click.Option) and not param.hidden
        ]
        assert sorted(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) == sorted([*options, "--help"])
        assert [line for line in text.splitlines() if line == "Output:"] == ["Output:"]
        known |= {option.lstrip("-") for option in options}
    assert {option for names in GROUPS.values() for option in names} <= known


def test_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom harness.cli.app import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*(name for name in sys.modules if name.startswith('harness.')))"
    )
    done = python("-c", code)
    light = "cli cli.app cli.codes cli.options cli.values loop loop.interrupted loop.strangers policy policy.types rows"
    light += " rows.definitions target"
    assert set(done.stdout.splitlines()[-1].split()) == {f"harness.{name}" for name in light.split()}


def test_wrong_words_keep_clicks_lines_and_get_a_suggestion() -> None:
    for args, says in (
        (("compar",), "compare"),
        (("compare", "--sytems", "x"), "--systems"),
        (("list", "trace"), "traces"),
    ):
        result = bench(*args)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr
        assert says in result.stderr


@cases(
    ("typed", "offered"),
    [
        ("bench com", "compare"),
        ("bench study prism-b", "prism-bridge"),
        ("bench compare --systems static,ch", "static,chunked"),
        ("bench compare --gpu h1", "h100"),
        ("bench compare --models li", "light8"),
    ],
)
def test_the_shell_completes(typed: str, offered: str) -> None:
    env = os.environ | {"_BENCH_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "from harness.cli.app import main; main(prog_name='bench')"
    done = python("-c", code, env=env)
    assert f"plain,{offered}" in done.stdout.splitlines()


def test_verbose_tells_when_and_quiet_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for level in ("", "quiet", "verbose"):
        token = terminal.LEVEL.set(level)
        try:
            terminal.Terminal().say("compiling")
        finally:
            terminal.LEVEL.reset(token)
        printed[level] = capsys.readouterr().err
    assert (printed[""], printed["quiet"]) == ("compiling\n", "")
    assert re.fullmatch(r" +\d+\.\d s  compiling\n", printed["verbose"])


def test_the_exit_codes_stand_in_the_help() -> None:
    told = re.findall(r"^  (\d+) {2,}(\S.*)$", ok("--help").partition("Exit codes:")[2], re.MULTILINE)
    assert told == [(str(code.value), when) for code, when in codes.MEANS.items()]
    assert set(codes.MEANS) == set(codes.Code)
    sources = [path for path in (ROOT / "harness").rglob("*.py") if "codes" not in path.name]
    literal = re.compile(r"(sys\.exit|Exit)\(\d|code = \d")
    assert [path.name for path in sources if literal.search(path.read_text("utf-8"))] == []
