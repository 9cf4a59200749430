"""One test of many cases that are data: each runs and is reported by its name, and pytest collects the test once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each of `values`, as subtests; else like `pytest.mark.parametrize`.

    A mapping names its cases by its keys; others are named by their arguments. Each case has a `tmp_path` and a
    `monkeypatch` of its own, other fixtures are shared. What takes many seconds a case stays parametrized: a test has
    one time limit, and runs in one process.

        @cases(("text", "tokens"), [("", 0), ("a b", 2)])
        def test_words_are_tokens(text: str, tokens: int) -> None:
            assert count(text) == tokens
    """

    def decorate(test: Test) -> Test:
        keys = (names,) if isinstance(names, str) else tuple(names)
        labelled = list(_labelled(keys, values))
        if not labelled:
            raise ValueError(f"{test.__name__} has no cases")

        @functools.wraps(test)
        def every_case(subtests: pytest.Subtests, **fixtures: Any) -> None:
            __tracebackhide__ = True
            for number, (label, arguments) in enumerate(labelled):
                with subtests.test(label, **(arguments if label is None else {})), ExitStack() as stack:
                    test(**fixtures | _anew(fixtures, number, stack), **arguments)

        given = [parameter for name, parameter in inspect.signature(test).parameters.items() if name not in keys]
        asked = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=pytest.Subtests)
        every_case.__signature__ = inspect.Signature([asked, *given])  # type: ignore[attr-defined]
        return every_case

    return decorate


def _labelled(names: Sequence[str], values: Iterable[Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield each case's name, if it has one, and its arguments."""
    for label, value in values.items() if isinstance(values, Mapping) else ((None, value) for value in values):
        yield label, dict(zip(names, (value,) if len(names) == 1 else value, strict=True))


def _anew(fixtures: dict[str, Any], number: int, stack: ExitStack) -> dict[str, Any]:
    """Return fixtures that a case has for itself."""
    anew: dict[str, Any] = {}
    if (folder := fixtures.get("tmp_path")) is not None:
        anew["tmp_path"] = Path(folder) / f"case-{number}"
        anew["tmp_path"].mkdir()
    if (patch := fixtures.get("monkeypatch")) is not None:
        anew["monkeypatch"] = stack.enter_context(patch.context())
    return anew
