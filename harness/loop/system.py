"""The interface of all strategies, and functions that find a strategy by name or path."""

from __future__ import annotations

import importlib
import inspect
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from harness.loop import strangers
from harness.loop.guard import Fault, guarded
from harness.policy.actions import Action
from harness.policy.events import Event
from harness.policy.fields import meant
from harness.policy.types import Cluster, Option, UserError
from harness.policy.view import View

ROOT = Path(__file__).resolve().parents[2]


def user_cache() -> Path:
    """Return the folder in which the bench stores files of this user. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-sharing-bench"


class System(Protocol):
    """A GPU-sharing strategy: it receives events and answers with actions; it has no clock, thread or GPU.

    The values of `hears`, `uses` and `options` depend on the preset, so each object has its own.
    """

    hears: frozenset[type]  # event types; action types whose successful Done is wanted
    # What it asks for: "Load", "Load.way:pool", "Run.sms", "Move.to:host", "view.oracle_tokens". What it reads:
    # "Request.slo"; "Cluster.homes", a placement given; "Cluster.plan:window", a forecast that knows the window;
    # "Cluster.degrees", of which it chooses one for each model.
    uses: frozenset[str]
    options: Mapping[str, Option]  # what the paper's engine has: kv, preempt, sharing, memory, ...

    def on(self, event: Event, view: View) -> Iterable[Action]:
        """Answer one event with actions. The caller first reads the whole answer, then applies the actions in order."""
        ...


class Make(Protocol):
    """The class in a system's file; the keyword arguments of its call are the system's fields."""

    presets: Mapping[str, Mapping[str, Option]]

    def __call__(self, cluster: Cluster, **fields: Option) -> System:
        """Build the strategy for a cluster."""
        ...


def build(make: Make, cluster: Cluster, fields: Mapping[str, Option]) -> System:
    """Build a system for a cluster, with these values of its fields.

    Raises Infeasible or Unsupported unchanged if the system raises one of them. Any other error in the system is raised
    as a Fault.
    """
    with guarded():
        policy = make(cluster, **fields)
        for name, members in (("hears", type), ("uses", str)):
            have = getattr(policy, name, None)
            if not isinstance(have, frozenset) or not all(isinstance(member, members) for member in have):
                raise Fault(f"has no `{name}`, a frozenset of {'event classes' if members is type else 'names'}")
        if not isinstance(getattr(policy, "options", None), Mapping):
            raise Fault("has no `options`, a mapping of names to values")
    return policy


def names() -> list[str]:
    """Return the names of the .py files in systems/ that do not begin with an underscore: the available systems."""
    return sorted(p.stem for p in (ROOT / "systems").glob("*.py") if not p.stem.startswith("_"))


RENAMED = ROOT / "systems" / "renamed.toml"  # names that systems had


def path(name: str) -> Path:
    """Return the file of a system, by name (`prism`) or path (`./mine.py`). Raises UserError if there is none."""
    if name.endswith(".py"):
        if not (file := Path(name).resolve()).is_file():
            raise UserError(f"no file {name}")
        return file
    if name not in names():
        if (now := tomllib.loads(RENAMED.read_text("utf-8")).get(name)) is not None:
            raise UserError(f'system "{name}" is called {now}')
        raise UserError(f'no system "{name}"{meant(name, names())} (bench list)')
    return ROOT / "systems" / f"{name}.py"


def module(name: str) -> ModuleType:
    """Import the module of a system, by name or by path. Raises the errors of `path`, and Fault if the import fails.

    Also raises UserError for a file of code that only stored results name (harness/loop/strangers.py).
    """
    file = path(name)
    if name.endswith(".py"):
        strangers.known(file)
        with guarded():
            return strangers.load(f"_system_{file.stem}", file)
    with guarded():
        return importlib.import_module(f"systems.{name}")


def find(name: str) -> Any:
    """Return the class of a system: the only class in its file that has a method `on`.

    Raises the errors of `module`. Also raises UserError if not exactly one class has `on`, and Fault if that class has
    no `presets`.
    """
    source = module(name)
    classes = [
        c
        for _, c in inspect.getmembers(source, inspect.isclass)
        if c.__module__ == source.__name__ and callable(getattr(c, "on", None))
    ]
    if len(classes) != 1:
        raise UserError(f"{source.__file__}: expected one class with a method `on`, found {len(classes)}")
    if not isinstance(getattr(classes[0], "presets", None), Mapping):
        raise Fault("has no `presets`, a mapping of names to fields")
    return classes[0]
