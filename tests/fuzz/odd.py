"""Odd values by kind, tables of options that take them, and strategies that damage what is sound in one place."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

Changed = tuple[str, Any]  # what was changed, and the copy that has it
GONE = object()
# TOML values of every kind, as a file writes them
TOML = [
    *"nan inf -inf -1 0 1 1.5 -1.5 1e308 1e-320 9223372036854775807 9223372036854775808 true false".split(),
    *'"" "x" "\\u0000" "static" [] [[]] [0] ["x"] [nan] {} "²" "..." "../x" "/dev/zero" "a\\nb"'.split(),
    *("9" * 400, '" "', "[1, 2]", "[1, 'x']", "[[1, 2], [3]]", "{ a = 1 }", "{ a = [] }", "'''\nx'''"),
    *("1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", f'"{"a" * 5000}"'),
]
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
INSTEAD: dict[str, Callable[[Path], object]] = {  # what may stand in the place of a file
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "none": lambda path: None,
}
# ------------------------------------------------------------------ words of a command line

POOLS = {
    "!text": "'' ' ' a¶b ¤",
    "!list": "'' ' ' , ,, ' , '",
    "!float": "nan inf -inf 1e400 '' ' ' x ² ٣x 1,5 0x10 --1 '1 2' [1] 1e",
    "!count": "!float 1.5 1e2 true",
    "!names": "'' ' ' , ,, nope Static ../x /dev/null /dev/zero /proc/self/mem / . ~ a^5000 + +x x+ x+y x+y= : x: = x= "
    "* %s {} ${HOME} ¶ a¶b ¬x é^300 ¤ none.toml none.py none.parquet \"'\" '\"' 0",
    "!runs": "nope '' /dev /dev/null a^300 a¶b ¤",
    "!setting": "--trace sample --models llama-3.2-1b*8 --rate-scale 1 --seeds 1 --slo absolute:ttft=1,tpot=1 "
    "--workers 1 --no-plot -o res",
    "!columns": "--column arrival_s=t --column model=m --column prompt_tokens=p --column output_tokens=o",
    "!paths": "'' /proc/x/y /dev/null/x /sys/x a^300 x/^2100 ¤ nodir/deep/x",
}


def words(text: str) -> list[str]:
    """Read words as a shell does.

    `!pool` is a list of words, `a^300` repeats a letter; ¶ is a new line, ¤ is no UTF-8, ¬ turns the direction of text.
    """
    read = list[str]()
    for word in shlex.split(text):
        if word in POOLS:
            read += words(POOLS[word])
        else:
            long = re.sub(r"(x/|.)\^(\d+)", lambda match: match[1] * int(match[2]), word)
            read.append(long.replace("¶", "\n").replace("¤", "\udcff").replace("¬", "\u202e"))
    return read


class Option(NamedTuple):
    """An option, the values that it must refuse and name, and those of which it may take some."""

    name: str
    culprit: str  # named by a refusal
    wrong: list[str]
    odd: list[str]


def options(table: str) -> list[Option]:
    """Read rows of `--name [culprit]: wrong values | odd values`; the culprit is the name, or `*` anything."""
    rows = list[Option]()
    for entry in re.split(r"\n(?=-)", table.strip()):
        head, _, values = entry.partition(":")
        name, _, culprit = head.partition(" ")
        wrong, odd = re.split(r"\s\|\s", values + " | ")[:2]
        culprit = {"": name.lstrip("-"), "*": ""}.get(culprit, culprit)
        rows.append(Option(name, culprit, words(wrong), words(odd)))
    return rows


# ------------------------------------------------------------------ one place of a sound file


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Return what writes a file into a case's folder."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda here: (here / name).write_bytes(data)


def at(name: str, put: Callable[[Path], object], here: Path) -> None:
    """Put something in the place of a file of a case's folder."""
    put(here / name)


def lines(text: str) -> st.SearchStrategy[Changed]:
    """Leave one line out, double it, or cut it."""
    every, keep = text.splitlines(), st.sampled_from(["without", "twice", "cut"])
    rows = [k for k, line in enumerate(every) if line.strip()]

    def changed(how: str, k: int) -> Changed:
        line = {"without": [], "twice": [every[k]] * 2, "cut": [every[k][: len(every[k]) // 2]]}[how]
        return f"{how} {k + 1}", "\n".join([*every[:k], *line, *every[k + 1 :]])

    return st.builds(changed, keep, st.sampled_from(rows))


def values(text: str) -> st.SearchStrategy[tuple[str, str, str]]:
    """Replace the value of one key of TOML; draw key, value and text."""
    every = text.splitlines()

    def changed(k: int, value: str) -> tuple[str, str, str]:
        key = every[k].partition(" = ")[0]
        return key, value, "\n".join([*every[:k], f"{key} = {value}", *every[k + 1 :]])

    keys = [k for k, line in enumerate(every) if " = " in line]
    return st.builds(changed, st.sampled_from(keys), st.sampled_from(TOML))


def bits(data: bytes, until: int | None = None) -> st.SearchStrategy[Changed]:
    """Turn one bit over, of the first bytes."""

    def changed(at: int, bit: int) -> Changed:
        damaged = bytearray(data)
        damaged[at] ^= 1 << bit
        return f"bit {at}.{bit}", bytes(damaged)

    return st.builds(changed, st.integers(0, (until or len(data)) - 1), st.integers(0, 7))


def cuts(data: bytes) -> st.SearchStrategy[Changed]:
    """Keep the first bytes only."""
    keeps = sorted(
        {*range(0, len(data), max(1, len(data) // 10)), *(k for k in (1, 4, 8, len(data) - 9, len(data) - 1))}
    )
    return st.sampled_from(keeps).map(lambda keep: (f"cut at {keep}", data[:keep]))


# ------------------------------------------------------------------ one place of JSON


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each part of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from places(inner, (*before, key))


def changed(value: Any, place: Sequence[Any], other: Any) -> Any:
    """Return a copy with one part replaced, or GONE."""
    copy = inner = deepcopy(value)
    for key in place[:-1]:
        inner = inner[key]
    if other is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = other
    return copy


def parts(value: Any, others: Sequence[Any]) -> st.SearchStrategy[tuple[tuple[Any, ...], Any, Changed]]:
    """Replace one part of a value; draw its place, the other value, and what was changed."""

    def pick(place: tuple[Any, ...], other: Any) -> tuple[tuple[Any, ...], Any, Changed]:
        text = "gone" if other is GONE else json.dumps(other)[:14]
        return place, other, (f"{'.'.join(map(str, place))} {text}", changed(value, place, other))

    return st.builds(pick, st.sampled_from(list(places(value))), st.sampled_from(others))
