r"""Regular expressions from files of others, matched in bounded time: all places of a match are followed at once.

A backtracking matcher takes exponential time for `(\w+\.?)+!`. Here the places of a name at which a part of a pattern
may end are the bits of a number, so no place is visited twice for the same part. Python's own parser reads a pattern;
what needs a memory (references to groups, look-behind) is refused, and so is a pattern that takes too many steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MOST_CHARS = 1000  # a longer pattern is refused
MOST_STEPS = 3_000_000  # all matches of a checkpoint take some seconds then
ONE = frozenset({"ANY", "LITERAL", "NOT_LITERAL", "IN"})  # parts of one character
CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}


class Unbounded(ValueError):
    """An error for a text that is not a regular expression, or is one that this matcher does not support."""


class Steps:
    """The number of steps that all patterns together may still take."""

    def __init__(self, left: int = MOST_STEPS) -> None:
        self.left = left

    def take(self) -> None:
        """Take a step. Raises Unbounded where none is left."""
        self.left -= 1
        if self.left < 0:
            raise Unbounded("patterns that take too many steps")


class Pattern:
    """A regular expression, which `matches` at the beginning of a text as `re.match` does."""

    def __init__(self, text: str, steps: Steps) -> None:
        """Parse `text`. Raises Unbounded if it is not a pattern, is too long, or needs references or look-behind."""
        if len(text) > MOST_CHARS:
            raise Unbounded(f"a pattern of {len(text):,} characters, above {MOST_CHARS:,}")
        try:
            self._parts: Any = re._parser.parse(text)  # type: ignore[attr-defined]  # noqa: SLF001 - its public name, sre_parse, is deprecated
        except (re.error, OverflowError, RecursionError) as error:
            raise Unbounded(f"no regular expression ({error})") from None
        if self._parts.state.flags != re.UNICODE.value:
            raise Unbounded("flags in a pattern are not understood")
        self._steps = steps
        self.matches("")

    def matches(self, text: str) -> bool:
        """Tell whether the pattern matches at the beginning of a text. Raises Unbounded where no step is left."""
        self._text = text
        self._takes: dict[tuple[str, str], int] = {}
        return bool(self._ends(self._parts, 1))

    def _ends(self, parts: Any, at: int) -> int:
        """Return the positions at which a match of `parts` can end if it begins at a position in `at`.

        A set of positions is an integer with one bit for each position.
        """
        for code, value in parts:
            self._steps.take()
            at = self._after(str(code), value, at)
        return at

    def _after(self, code: str, value: Any, at: int) -> int:
        match code:
            case "SUBPATTERN":
                return self._ends(value[3], at)
            case "BRANCH":
                return self._any(value[1], at)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeated(value[0], value[1], value[2], at)
            case "ASSERT" | "ASSERT_NOT" if value[0] == 1:
                there = (1 << i for i in range(len(self._text) + 1) if at >> i & 1)
                return sum(i for i in there if bool(self._ends(value[1], i)) == (code == "ASSERT"))
            case "AT":
                return self._edge(str(value), at)
            case _ if code in ONE:
                return (at & self._taken(code, value)) << 1
        raise Unbounded(f"{code.lower().replace('_', ' ')} in a pattern is not understood")

    def _taken(self, code: str, value: Any) -> int:
        """Return the positions of the characters that match a one-character part, as bits of an integer."""
        key = code, str(value)
        if key not in self._takes:
            self._takes[key] = sum(1 << i for i, c in enumerate(self._text) if _is(c, code, value))
        return self._takes[key]

    def _any(self, ways: Any, at: int) -> int:
        ends = 0
        for way in ways:
            ends |= self._ends(way, at)
        return ends

    def _repeated(self, least: int, most: Any, body: Any, at: int) -> int:
        done = 0
        while done < least and at:
            before, at, done = at, self._ends(body, at), done + 1
            if at == before:  # the body takes no character, so more repeats change nothing
                break
        ends, new, unlimited = at, at, int(most) > MOST_CHARS
        if unlimited and len(body) == 1 and (code := str(body[0][0])) in ONE:
            takes = self._taken(code, body[0][1])
            while new:
                self._steps.take()
                new = (new & takes) << 1 & ~ends
                ends |= new
        while new and (unlimited or done < most):
            new, done = self._ends(body, new) & ~ends, done + 1
            ends |= new
        return ends

    def _edge(self, where: str, at: int) -> int:
        n, text = len(self._text), self._text
        if where in {"AT_BEGINNING", "AT_BEGINNING_STRING"}:
            return at & 1
        if where in {"AT_END", "AT_END_STRING"}:
            return at & (1 << n)
        word = [False, *(CATEGORIES["CATEGORY_WORD"](c) for c in text), False]
        return sum(1 << i for i in range(n + 1) if at >> i & 1 and (word[i] != word[i + 1]) == (where == "AT_BOUNDARY"))


def _is(c: str, code: str, value: Any) -> bool:
    """Tell whether the character c matches a one-character part of a pattern."""
    match code:
        case "ANY":
            return c != "\n"
        case "LITERAL":
            return bool(ord(c) == value)
        case "NOT_LITERAL":
            return bool(ord(c) != value)
        case "RANGE":
            return bool(value[0] <= ord(c) <= value[1])
        case "CATEGORY":
            name = str(value)
            return CATEGORIES[name.replace("_NOT_", "_")](c) != ("_NOT_" in name)
    negated = str(value[0][0]) == "NEGATE"
    return any(_is(c, str(inner), x) for inner, x in value[negated:]) != negated
