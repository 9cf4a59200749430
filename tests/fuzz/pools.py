"""Odd values by kind, which groups share."""

from __future__ import annotations

from collections.abc import Iterator

NO_NUMBERS = ("nan", "inf", "-inf", "1e400", "", " ", "x", "²", "٣x", "1,5", "0x10", "--1", "1 2", "[1]", "1e")
HUGE = ("1e308", "9" * 20, "1e12", "9" * 5000)
LOW = ("0", "-1", "-0.0", "-1e308", "1e-320", "-" + "9" * 20)
COUNTS = (*NO_NUMBERS, "1.5", "1e2", "true")
NO_NAMES = (
    "",
    " ",
    ",",
    ",,",
    "nope",
    "Static",
    "../x",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/",
    ".",
    "~",
    "a" * 5000,
    "+",
    "+x",
    "x+",
    "x+y",
    "x+y=",
    ":",
    "x:",
    "=",
    "x=",
    "*",
    "%s",
    "{}",
    "${HOME}",
    "\n",
    "a\nb",
    "\t",
    "\u202ex",
    "é" * 300,
    "\udcff",
    "none.toml",
    "none.py",
    "none.parquet",
    "-",
    "'",
    '"',
    "\x1b[31m",
    "0",
)
NO_RUNS = ("nope", "", "/dev", "/dev/null", "a" * 300, "a\nb", "\udcff")
NO_PATHS = ("", "/proc/x/y", "/dev/null/x", "/sys/x", "a" * 300, "x/" * 2100, "\udcff", "nodir/deep/x")

# TOML values of every kind, as a file writes them
ODD = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1",
    "1.5",
    "-1.5",
    "1e308",
    "1e-320",
    "9223372036854775807",
    "9223372036854775808",
    "9" * 400,
    "true",
    "false",
    '""',
    '"x"',
    '" "',
    '"\\u0000"',
    '"static"',
    "[]",
    "[[]]",
    "[0]",
    "[1, 2]",
    '["x"]',
    "[nan]",
    "{}",
    "{ a = 1 }",
    "{ a = [] }",
    "1979-05-27",
    "07:32:00",
    "1979-05-27T07:32:00Z",
    '"' + "a" * 5000 + '"',
    '"²"',
    '"..."',
    "[1, 'x']",
    "[[1, 2], [3]]",
    '"../x"',
    '"/dev/zero"',
    '"a\\nb"',
    "'''\nx'''",
)

# Whole files that are no TOML of any form
NO_TOML: dict[str, bytes] = {
    "empty": b"",
    "nul": b"\0\0\0",
    "latin": "sy\xe9stem = 'x'".encode("latin-1"),
    "utf-16": "system = 'x'".encode("utf-16"),
    "bom": b"\xef\xbb\xbfsystem = 3",
    "unclosed": b"a = [",
    "twice": b"a = 1\na = 2\n",
    "brackets": b"a = " + b"[" * 5000 + b"]" * 5000,
    "tables": b"[" + b"a." * 3000 + b"a]\n",
    "inline": b"a = " + b"{b=" * 3000 + b"1" + b"}" * 3000,
    "digits": b"a = " + b"9" * 10000,
    "long": b"# " + b"x" * (5 << 20),
    "surrogate": b'a = "\\ud800"',
    "binary": bytes(range(256)),
    "crlf": b"a = 1\r\nb =\r\n",
    "json": b'{"a": 1}',
}


def mutated(text: str) -> Iterator[tuple[str, str]]:
    """Yield a sound file with one line left out, doubled, or cut, by what was done."""
    lines = text.splitlines()
    for k, line in enumerate(lines):
        if not line.strip() or line.startswith("#"):
            continue
        yield f"without {k + 1}", "\n".join(lines[:k] + lines[k + 1 :])
        yield f"twice {k + 1}", "\n".join([*lines[: k + 1], line, *lines[k + 1 :]])
        yield f"cut {k + 1}", "\n".join([*lines[:k], line[: len(line) // 2], *lines[k + 1 :]])


def swapped(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield a sound file with the value of one key replaced by an odd one: (key, value, text)."""
    lines = text.splitlines()
    for k, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        if equals and not line.startswith("#"):
            for value in ODD:
                yield key.strip(), value, "\n".join([*lines[:k], f"{key} = {value}", *lines[k + 1 :]])
