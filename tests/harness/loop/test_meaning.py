"""The identity of sources: words change nothing, all else does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from harness.check import under
from harness.loop import meaning
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.run import sources
from harness.run.resolve import resolve
from harness.run.spec import Spec
from tests.cases import cases

SAME = {
    "a comment": ("x = 1\n", "x = 1  # one\n"),
    "docstrings": ('"""A."""\ndef f():\n    """B."""\n    return 1\n', "def f():\n    return 1\n"),
    "layout": ("f(a,\n  b)\n", "f(a, b)\n"),
    "a local": ("def f(x):\n    y = x\n    return y\n", "def f(x):\n    z = x\n    return z\n"),
    "a local of a nested function": (
        "def f(x):\n    y = 1\n    def g():\n        return x + y\n    return g\n",
        "def f(x):\n    a = 1\n    def h():\n        return x + a\n    return h\n",
    ),
    "a nonlocal": (
        "def f():\n    n = 0\n    def g():\n        nonlocal n\n        n += 1\n    return g\n",
        "def f():\n    m = 0\n    def g():\n        nonlocal m\n        m += 1\n    return g\n",
    ),
    "a loop's name": ("y = [x + 1 for x in z]\n", "y = [a + 1 for a in z]\n"),
    "an exception's name": (
        "def f():\n    try:\n        g()\n    except E as a:\n        h(a)\n",
        "def f():\n    try:\n        g()\n    except E as b:\n        h(b)\n",
    ),
    "a name in a pattern": (
        "def f(x):\n    match x:\n        case [a, *b]:\n            return a, b\n",
        "def f(x):\n    match x:\n        case [c, *d]:\n            return c, d\n",
    ),
    "annotations": ("def f(x: int) -> str:\n    y: int = x\n    return y\n", "def f(x):\n    y = x\n    return y\n"),
    "types alone": ("if TYPE_CHECKING:\n    import a\nx = 1\n", "x = 1\n"),
}
OTHER = {
    "a constant": ("x = 1\n", "x = 2\n"),
    "its type": ("x = 1\n", "x = 1.0\n"),
    "an operator": ("x = a + b\n", "x = a - b\n"),
    "a parameter": ("def f(x):\n    return x\n", "def f(y):\n    return y\n"),
    "a default": ("def f(x=1):\n    return x\n", "def f(x=2):\n    return x\n"),
    "a name of a module": ("x = 1\n", "y = 1\n"),
    "an attribute": ("x = a.b\n", "x = a.c\n"),
    "which local": ("def f(a):\n    c = d = a\n    return c\n", "def f(a):\n    c = d = a\n    return d\n"),
    "a local that was global": ("x = 1\ndef f():\n    return x\n", "x = 1\ndef f():\n    x = 1\n    return x\n"),
    "the order of lines": ("f()\ng()\n", "g()\nf()\n"),
    "a field's type": ("class A:\n    x: int = 1\n", "class A:\n    x: float = 1\n"),
    "a name of a class": ("class A:\n    x = 1\n", "class A:\n    y = 1\n"),
    "a keyword": ("f(x=1)\n", "f(y=1)\n"),
    "a decorator": ("@a\ndef f():\n    pass\n", "@b\ndef f():\n    pass\n"),
    "a text": ('x = "a"\n', 'x = "b"\n'),
    "a kind of argument": ("def f(x, /):\n    pass\n", "def f(x):\n    pass\n"),
}


def means(folder: Path, text: str, name: str = "a.py") -> str:
    path = folder / f"{len([*folder.iterdir()])}-{name}"
    path.write_text(text)
    return meaning.digest(path)


@cases("what", [*SAME])
def test_words_change_nothing(what: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("a")
    assert len({means(folder, text) for text in SAME[what]}) == 1


@cases("what", [*OTHER])
def test_all_else_changes_it(what: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("a")
    assert len({means(folder, text) for text in OTHER[what]}) == 2


def test_tables_mean_their_values_in_order(tmp_path: Path) -> None:
    first, same, other = "a = 1\nb = [1, 2]\n", "# one\na  = 1\nb = [\n  1, 2]\n", "b = [1, 2]\na = 1\n"
    assert means(tmp_path, first, "t.toml") == means(tmp_path, same, "t.toml") != means(tmp_path, other, "t.toml")
    assert means(tmp_path, "not = [toml", "t.toml") != means(tmp_path, "not = [TOML", "t.toml")


@cases("text", ["def (", "x = '\0'", "x = " + "(" * 400 + ")" * 400])
def test_what_is_no_python_is_one_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(UserError, match=r"a\.py"):
        means(tmp_path_factory.mktemp("a"), text)


def test_meanings_are_kept_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "mine.py"
    path.write_text("import harness.target\nx = 1\n")
    meaning._kept.cache_clear()
    first = meaning.source(path)
    meaning.keep()
    (file,) = tmp_path.glob("llm-sharing-bench/meaning-*.json")
    for left in (file.read_text(), "[]", "{", ""):
        file.write_text(left)
        meaning._kept.cache_clear()
        meaning._source.cache_clear()
        assert meaning.source(path) == first
    meaning._kept.cache_clear()


def forgotten() -> None:
    for cached in (sources._data, sources._imported, under.under):
        cached.cache_clear()


def test_a_word_makes_no_run_stale_and_a_constant_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In a copy of the tree: a local of the loop renamed and a comment edited, then a constant of the kernel."""
    copy = tmp_path / "bench"
    for name in (*sources.PACKAGES, "plots"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for module in (sources, under):
        monkeypatch.setattr(module, "ROOT", copy)
    monkeypatch.setattr(sources, "RUN", copy / "harness/run/execute.py")
    monkeypatch.setattr("harness.loop.engine.path", lambda name: copy / f"harness/engines/{name}/__init__.py")
    specs = [resolve(Spec(name)) for name in ("static", "elastic", "prism")]

    def identities() -> list[str]:
        forgotten()
        return [*map(sources.code, specs), under.under()]

    request.addfinalizer(forgotten)  # before the tree is this one again: what is cached is of the copy

    first = identities()
    loop, kernel = copy / "harness/loop/replay.py", copy / "harness/engines/sim/kernel/rates.py"
    text = loop.read_text()
    renamed = re.sub(r"\bearliest\b", "first_of_all", text) if "earliest" in text else text
    loop.write_text(f"# another comment\n{renamed}\n")
    source = kernel.read_text()
    assert "        beside = 1.0 - " in source
    kernel.write_text(re.sub(r"\bbeside\b", "slowed_by", source))
    assert identities() == first
    kernel.write_text(kernel.read_text().replace("SWEEPS = 3", "SWEEPS = 4"))
    assert not set(identities()) & set(first)
