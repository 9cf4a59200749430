"""The command line as tests call it, in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from harness.cli.app import main


def bench(*args: object) -> Result:
    """Run `bench` with these words; an exception that is no user's mistake is raised."""
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def ok(*args: object) -> str:
    """Return what `bench` prints, if it succeeds."""
    result = bench(*args)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def mistake(result: Result, *says: object) -> None:
    """Check for one line on stderr, and exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for text in says:
        assert str(text) in result.stderr
    assert result.stdout == ""
