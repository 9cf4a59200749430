"""`bench`: the command line, its errors and exit codes.

At the start, click is the only library that is imported. A command's module is imported when that command is called.
Other libraries are imported when the command needs them.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from importlib import import_module
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from harness.cli.codes import MEANS, Code
from harness.cli.options import HEARD, WIDTH, examples
from harness.cli.values import WORDS
from harness.loop import strangers
from harness.loop.interrupted import Terminated, came, terminable
from harness.policy.types import UserError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # disk full, over quota or read-only; file too large
LEAST_BYTES = 3 << 30  # bytes of address space; with less, libraries crash or hang, as they reserve more than they use
COMMANDS = {  # each has its module and function, and its line in `bench --help`
    "compare": ("compare.compare", "Compare systems on a trace: SLOs, latency, highest rate."),
    "size": ("size.size", "Find the fewest GPUs, and what they cost."),
    "study": ("study.study", "Run a study: a paper's figure, or your own TOML file."),
    "explain": ("explain.explain", "Say where time went, why SLOs were missed, what helps."),
    "calibrate": ("calibrate.calibrate", "Fit cost tables to measurements."),
    "check": ("tools.check", "Test that a system keeps the rules."),
    "claims": ("claims.claims", "Test every paper's claims against runs made here."),
    "list": ("lists.list_", "List systems, engines, models, GPUs, traces and studies."),
    "new": ("tools.new", "Write a small annotated system, or a TOML to begin with."),
    "plot": ("plot.plot", "Draw stored results as PDF, PNG and CSV."),
    "price": ("price.price", "Price a million tokens of a model, by its GPUs."),
    "report": ("report.report", "Write an answer as one HTML page."),
    "run": ("run.run", "Run one spec, a TOML file."),
    "score": ("score.score", "Score a policy on the suite, a fixed test."),
    "sensitivity": ("sensitivity.sensitivity", "Find constants of the machine that reverse an order."),
    "timeline": ("timeline.timeline", "Write a stored run as a trace for Perfetto."),
    "trace": ("traces.trace", "Look at traces, convert logs, draw synthetic ones."),
    "tune": ("tune.tune", "Tune systems alike, on seeds that no evaluation uses."),
    "validate": ("validate.validate", "Compare the simulator with measured end-to-end runs."),
}


def load(name: str) -> click.Command:
    """Load a command from its module, with the options that all commands have."""
    module, function = COMMANDS[name][0].split(".")
    command: click.Command = getattr(import_module(f"harness.cli.{module}"), function)
    if not isinstance(command, click.Group) and not set(HEARD) & set(command.params):
        command.params += HEARD
    return command


FIRST = 4  # number of commands at the top of COMMANDS that most users need, shown as the main ones


class Bench(click.Group):
    """The group of all commands, which prints a user error in one line and exits with code 2.

    A bug keeps its traceback and exits with code 1.
    """

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, the main ones first, and then the exit codes."""
        width = max(map(len, COMMANDS))
        rows = [(name.ljust(width), line) for name, (_, line) in COMMANDS.items()]
        for title, some in (("Main commands", rows[:FIRST]), ("Other commands", rows[FIRST:])):
            with formatter.section(title):
                formatter.write_dl(some)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value).ljust(width), when) for code, when in MEANS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command, and store the command line, from which messages suggest the next command.

        Raises UserError for a command line that cannot be read, or too little address space.
        """
        ctx.meta[WORDS] = list(args)
        _typed(args)
        strangers.name(*args)
        name, _, rest = super().resolve_command(ctx, args)
        if not {"-h", "--help"} & {*rest}:
            _room()
        return name, load(name) if name else None, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and write out all that it printed."""
        with terminable(), strangers.limited():
            code = super().invoke(ctx)
            sys.stdout.flush()
        return code

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command, print the error that ends it, if any, and exit with its code."""
        extra["standalone_mode"] = False
        _open()
        try:
            code = super().main(*args, **extra)
        except click.Abort as error:
            code = _interrupted(isinstance(error.__cause__, Terminated))
        except MemoryError:
            click.echo("error: out of memory", err=True)
            code = Code.REFUSED
        except click.ClickException as error:
            if not isinstance(error, NoArgsIsHelpError):  # its message is the help
                click.ClickException.__init__(error, one_line(error.message))
            error.show()
            code = error.exit_code
        except OSError as error:
            if not (line := _on_disk(error)):
                raise
            click.echo(f"error: {one_line(line)}", err=True)
            code = Code.REFUSED
        except Exception as error:
            terminated = came(signal.SIGTERM)
            if (terminated or came(signal.SIGINT)) and not isinstance(error, UserError):  # an import may wrap a signal
                sys.exit(_interrupted(terminated))
            if not isinstance(error, UserError):
                raise
            click.echo("error: " + "\n".join(map(one_line, error.lines)), err=True)
            code = Code[getattr(error, "exits", "REFUSED")]
        sys.exit(code if isinstance(code, int) else 0)


def _on_disk(error: OSError) -> str:
    """Say that the disk is full, or what is wrong with the path that an error names; empty if it names no path."""
    if error.errno in FULL:
        return f"cannot write {error.filename or 'a file'}: {error.strerror} (free the disk)"
    return "" if error.filename is None else f"{error.filename}: {error.strerror}"


def _interrupted(terminated: bool) -> Code:
    """Print that the command was interrupted, and return its exit code."""
    click.echo("interrupted: finished runs are kept; the same command resumes there", err=True)
    return Code.TERMINATED if terminated else Code.INTERRUPTED


def one_line(text: str) -> str:
    """Escape the line breaks and unprintable characters of a message; names in it may contain some."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Piped(io.FileIO):
    """An output stream that drops output once its reader has closed the pipe, so that the command still finishes."""

    def write(self, data: Any) -> int:
        """Write bytes; if the reader has closed the pipe, drop them and all later ones."""
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def _open() -> None:
    """Replace stdout and stderr by streams to which a command can write after their reader has closed the pipe.

    A stream that is closed from the start becomes the null device. Otherwise the next file opened would get its
    descriptor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - until the process ends
        elif stream is getattr(sys, f"__{name}__"):  # no caller replaced it
            stream.flush()
            lines = stream.line_buffering or stream.write_through
            raw = io.BufferedWriter(_Piped(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=lines))


def _typed(args: list[str]) -> None:
    """Raise UserError if a word of the command line is not UTF-8, or if the working directory no longer exists."""
    for word in args:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UserError(f'"{word}" is not UTF-8') from None
    try:
        os.getcwd()  # noqa: PTH109 - as below, without a path
    except FileNotFoundError:
        raise UserError("the folder that this is run in is gone: cd to one that is there") from None


def _room() -> None:
    """Raise UserError if the limit on address space (ulimit -v) is below LEAST_BYTES."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_BYTES:
        raise UserError(
            f"ulimit -v is {limit >> 10}, the bench needs {LEAST_BYTES >> 10}: raise it, or limit memory by a cgroup"
        )


@click.group(
    cls=Bench,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
    epilog=examples(
        "bench compare --systems dedicated,static,chunked,unshared",
        "bench list",
        'eval "$(_BENCH_COMPLETE=bash_source bench)"  # or zsh_source, fish_source',
    ),
)
@click.version_option(package_name="llm-sharing-bench", prog_name="bench")
def main() -> None:
    """One bench for every way of sharing GPUs among LLMs."""


for name, (_, line) in COMMANDS.items():
    main.add_command(click.Command(name, help=line))

if __name__ == "__main__":
    main(prog_name="bench")
