"""Who may import whom. The checker reads the sources, so lazy imports and imports for types count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.check.check import IMPURE_CALLS, IMPURE_NUMPY, STANDARD
from harness.loop import engine

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("harness", "systems", "workloads", "traces", "plots")

# harness, from the bottom: a module imports from the rows above its own, never from its own row or below.
LAYERS = (
    {"types", "checked"},
    {"shapes", "actions", "algorithms", "guard"},
    {"events", "answers"},
    {"view"},
    {"system", "engine", "switching"},
    {"replay", "record", "turns"},
    {"metrics"},
    {"spec"},
    {"table", "run", "figure"},
    {"sweep", "measured"},
    {"check", "explain", "new", "reproduce", "validate"},
    {"check_engine"},
    {"cli", "fit_hosts"},
    {"__main__"},
)
LAYER = {f"harness.{name}": k for k, names in enumerate(LAYERS) for name in names}
# These name concrete systems, engines, workloads, traces and plots; `run` is the part of a sweep that does one spec.
ASSEMBLE = {
    f"harness.{name}" for name in ("run", "sweep", "check", "check_engine", "measured", "validate", "fit_hosts", "cli")
}

GPU = {"cuda", "cupy", "pycuda", "pynvml", "torch", "triton"}
# The probe stands alone on a machine that may have nothing else of ours; these of its modules run on the GPU, so they
# import its libraries at their start, and are themselves imported where they are used.
PROBE = "harness.engines.probes"
DEVICE = {f"{PROBE}.{name}" for name in ("driver", "kernels", "rig", "compute", "memory", "sharing")}


# Engines do not build on each other: what several need lies in modules that belong to none, which are not compiled.
SIMULATOR = {f"harness.engines.{name}" for name in ("sim", "kernel", "state", "jit")}
SHARED = {f"harness.engines.{name}" for name in ("machine", "rows", "cost", "process", "coef")}
OTHER_ENGINES = {f"harness.engines.{name}" for name in engine.names()} - SIMULATOR


class Rule(NamedTuple):
    """What a package may import: of ours by prefix, of others by top-level name."""

    ours: tuple[str, ...]
    others: frozenset[str]


RULES = {
    "systems": Rule(
        ("harness.policy",),
        frozenset({"numpy", "scipy"}),
    ),
    "workloads": Rule(("harness.policy.types", "harness.engines.shapes", "workloads"), frozenset({"numpy"})),
    "traces": Rule(("harness.policy.types", "traces"), frozenset({"numpy", "pandas", "pyarrow"})),
    "plots": Rule(
        ("harness.policy.types", "harness.rows.checked", "harness.rows.record", "harness.rows.metrics", "plots"),
        frozenset({"matplotlib", "numpy", "pandas", "pyarrow", "seaborn"}),
    ),
    "harness.engines": Rule(
        (
            *(f"harness.{name}" for name in ("types", "shapes", "actions", "events", "view", "engine")),
            "harness.rows.record",  # the schema of the rows that an engine hands out
            "harness.engines",
        ),
        frozenset({"llvmlite", "numba", "numpy", "pandas", "pyarrow", "scipy"} | GPU),
    ),
    PROBE: Rule((PROBE,), frozenset({"matplotlib", "numpy"} | GPU)),
    "harness": Rule(("harness",), frozenset({"numpy", "pandas", "pyarrow", "scipy", "tqdm"})),
    "harness.cli.app": Rule(("harness", *PACKAGES), frozenset({"click", "numpy", "pandas", "pyarrow", "tqdm"})),
}


class Import(NamedTuple):
    """One imported name, where, and whether `import` of the module alone runs it."""

    name: str
    line: int
    eager: bool


def modules() -> dict[str, Path]:
    """Every module of ours by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, source: str) -> Iterator[Import]:
    """Imported names in full; `from harness import shapes` is `harness.engines.shapes`."""

    def walk(node: ast.AST, eager: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = module.split(".")[: -child.level] if child.level else []
                stem = ".".join([*base, *([child.module] if child.module else [])])
                yield from (Import(f"{stem}.{alias.name}", child.lineno, eager) for alias in child.names)
            else:
                lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                    isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                )
                yield from walk(child, eager and not lazy)

    return walk(ast.parse(source), True)


def under(name: str, prefix: str) -> bool:
    """Is `name` the module `prefix`, or something in it?"""
    return name == prefix or name.startswith(f"{prefix}.")


def rule(module: str) -> Rule:
    """The rule of the longest prefix."""
    return RULES[max((prefix for prefix in RULES if under(module, prefix)), key=len)]


def breaches(module: str, source: str) -> list[str]:
    """Every breach of the layers in one module, as `line: what`."""
    found = [f"{module} is in no layer"] if rule(module) is RULES["harness"] and layer(module) is None else []
    for one in imports(module, source):
        why = ours if one.name.split(".", 1)[0] in PACKAGES else others
        if one.eager and module not in DEVICE and any(under(one.name, device) for device in DEVICE):
            found.append(f"{one.line}: {one.name} must be imported where it is used")
        if bad := why(module, one):
            found.append(f"{one.line}: {bad}")
    return found + (impure(source) if under(module, "systems") else named(module, source))


def others(module: str, one: Import) -> str | None:
    """Why `module` may not import something that is not ours, if so."""
    top = one.name.split(".", 1)[0]
    if top in sys.stdlib_module_names:
        bad = under(module, "systems") and top not in STANDARD
    else:
        bad = top not in rule(module).others or (under(module, "systems") and under(one.name, "numpy.random"))
    if bad:
        return f"{module} cannot import {one.name}"
    if top in GPU and one.eager and module not in DEVICE:
        return f"{one.name} must be imported where it is used"
    if module == "harness.cli.app" and one.eager and top not in {"click", *sys.stdlib_module_names}:
        return f"{module} imports {one.name} at its start"
    return None


def layer(module: str) -> int | None:
    """A harness module's layer; the package itself is the top's face and imports lazily."""
    return len(LAYERS) if module == "harness" else LAYER.get(module)


def ours(module: str, one: Import) -> str | None:
    """Why `module` may not import something of ours, if so."""
    name = one.name
    core = under(module, "harness") and not under(module, "harness.engines")
    if core and (not under(name, "harness") or under(name, "harness.engines")):
        names = ", ".join(sorted(ASSEMBLE))
        return None if module in ASSEMBLE else f"{module} names {name}; only {names} do"
    if not any(under(name, prefix) for prefix in rule(module).ours):
        return f"{module} cannot import {name}"
    if module in SHARED | OTHER_ENGINES and any(under(name, own) for own in SIMULATOR):
        return f"{module} cannot import {name}, the simulator's own"
    low = layer(module)
    if low is not None:
        high = LAYER.get(".".join(name.split(".")[:2]))
        if high is not None and high >= low:
            return f"{module} imports {name} of a layer not below its own"
    return None


def named(module: str, source: str) -> list[str]:
    """Strings that are a system's name, where no system may be named."""
    if not module.startswith("harness") or module in ASSEMBLE | {"harness.check.new"}:
        return []
    names = {path.stem for path in (ROOT / "systems").glob("*.py")} - {"__init__"}
    return [
        f'{node.lineno}: {module} names the system "{node.value}"'
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in names
    ]


def impure(source: str) -> list[str]:
    """What a policy could reach without an import: files, hash order, numpy's generators."""
    tree = ast.parse(source)
    numpy = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "numpy"
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                found.append(f"{node.lineno}: a system cannot call {name}()")
            case ast.Attribute(value=ast.Name(id=np), attr=name) if np in numpy and name in IMPURE_NUMPY:
                found.append(f"{node.lineno}: a system cannot use numpy.{name}")
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module: str) -> None:
    path = modules()[module]
    assert breaches(module, path.read_text(encoding="utf-8")) == []


BANNED = (
    *("asyncio", "contextvars", "ctypes", "datetime", "gc", "glob", "importlib", "io", "logging", "multiprocessing"),
    *("numba", "numpy.random", "os", "pathlib", "pickle", "pyarrow", "queue", "random", "secrets", "signal", "socket"),
    *("subprocess", "sys", "tempfile", "threading", "time", "torch", "uuid", "weakref"),
)
PLANTED = [
    ("harness.policy.types", "from harness.policy.events import Event", "not below"),
    ("harness.policy.actions", "from harness import view", "not below"),
    ("harness.policy.actions", "from harness.policy.events import Event", "not below"),
    ("harness.loop.system", "def f():\n    from harness.loop.replay import replay", "not below"),
    ("harness.rows.record", "import harness.rows.metrics", "not below"),
    ("harness.rows.metrics", "if TYPE_CHECKING:\n    from harness.experiment.spec import Spec", "not below"),
    ("harness.experiment.sweep", "from .cli import main", "not below"),
    ("harness.loop.replay", "from harness.engines.sim.engine import Sim", "only harness.check.check"),
    ("harness.loop.engine", "from harness.engines.machine import Config", "only harness.check.check"),
    ("harness.engines.machine", "from harness.engines import kernel", "the simulator's own"),
    ("harness.engines.rows", "def f():\n    from harness.engines.sim.state import DONE", "the simulator's own"),
    ("harness.engines.costs.cost", "from harness.engines.sim.engine import Sim", "the simulator's own"),
    ("harness.experiment.spec", "from systems.static import Static", "only harness.check.check"),
    ("harness.experiment.spec", "def f():\n    import workloads.build", "only harness.check.check"),
    ("harness.rows.metrics", "from matplotlib import pyplot", "cannot import matplotlib"),
    ("harness.rows.metrics", "if system == 'dedicated':\n    pass", 'names the system "dedicated"'),
    ("harness.loop.replay", "import torch", "cannot import torch"),
    ("harness.loop.replay", "from numba import njit", "cannot import numba"),
    ("harness.utils", "", "in no layer"),
    ("harness.engines.sim.engine", "from harness.loop.replay import replay", "cannot import harness.loop.replay"),
    ("harness.engines.sim.engine", "from systems import prism", "cannot import systems"),
    ("harness.engines.local", "import torch", "where it is used"),
    (
        "harness.engines.local",
        "try:\n    from cuda.bindings import driver\nexcept ImportError:\n    pass",
        "where it is used",
    ),
    ("harness.engines.vllm", "def f():\n    import vllm", "cannot import vllm"),
    ("harness.engines.probes.conduct", "import torch", "where it is used"),
    ("harness.engines.probes.conduct", "from harness.engines.probes import rig", "where it is used"),
    ("harness.engines.probes.rig", "from harness.engines import cost", "cannot import harness.engines"),
    ("harness.engines.probes.report", "import pandas", "cannot import pandas"),
    ("harness.engines.local", "from harness.engines.probes.driver import bind", "where it is used"),
    ("harness.cli.app", "import numpy as np", "at its start"),
    ("harness.cli.app", "try:\n    import tqdm\nfinally:\n    pass", "at its start"),
    ("harness.cli.app", "def f():\n    import torch", "cannot import torch"),
    ("workloads.build", "from traces.load import Trace", "cannot import traces"),
    ("workloads.build", "from harness.engines.costs.cost import tables", "cannot import harness.engines"),
    ("workloads.build", "import pandas", "cannot import pandas"),
    ("traces.load", "from harness.rows.record import write", "cannot import harness.rows.record"),
    ("traces.load", "import seaborn", "cannot import seaborn"),
    ("plots.fig_compare", "from harness.experiment.sweep import sweep", "cannot import harness.experiment.sweep"),
    ("plots.fig_compare", "from harness.engines import cost", "cannot import harness.engines"),
    *(("systems.prism", f"import {name}", f"cannot import {name}") for name in BANNED),
    ("systems.prism", "from numpy import random", "cannot import numpy.random"),
    ("systems.prism", "def f():\n    from time import monotonic", "cannot import time"),
    ("systems.prism", "from systems.static import Static", "cannot import systems.static"),
    ("systems.prism", "from . import static", "cannot import systems.static"),
    ("systems.prism", "from harness.engines.sim.engine import Sim", "cannot import harness.engines"),
    ("systems.prism", "from harness.loop.replay import replay", "cannot import harness.loop.replay"),
    ("systems.prism", "from harness import load", "cannot import harness.load"),
    ("systems.prism", "import numpy as np\nx = np.random.default_rng(0)", "numpy.random"),
    ("systems.prism", "import numpy as np\nx = np.load('x')", "numpy.load"),
    ("systems.prism", "x = open('x')", "call open()"),
    ("systems.prism", "x = hash('x')", "call hash()"),
]


@pytest.mark.parametrize(("module", "source", "says"), PLANTED)
def test_planted_breach_is_found(module: str, source: str, says: str) -> None:
    assert any(says in breach for breach in breaches(module, source))


ALLOWED = [
    ("harness.policy.events", "from harness.policy.actions import Action"),
    ("harness.loop.engine", "if TYPE_CHECKING:\n    import pyarrow as pa"),
    ("harness.engines.sim.engine", "from harness import shapes\nfrom harness.engines import kernel"),
    ("harness.engines.local", "def step():\n    import torch"),
    ("harness.engines.probes.rig", "import torch\nfrom harness.engines.probes import driver, kernels"),
    (
        "harness.experiment.sweep",
        "from systems import static\nfrom harness.engines.sim.engine import Sim\nimport workloads.build",
    ),
    ("harness.cli.app", "import click\ndef f():\n    from harness.experiment.sweep import sweep\n    import pyarrow"),
    ("harness.__main__", "from harness.cli.app import main"),
    (
        "systems.prism",
        "import math\nimport numpy as np\nfrom scipy.optimize import milp\nfrom harness.policy.types import Inst",
    ),
    ("systems.prism", "x = request.id\ny = np.argsort(z)"),
    ("workloads.build", "from workloads.models import ModelSet\nimport tomllib"),
    (
        "plots.fig_compare",
        "import seaborn as sns\nfrom plots import style\nfrom harness.rows.metrics import attainment",
    ),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert breaches(module, source) == []


def test_the_command_line_starts_light() -> None:
    heavy = "matplotlib numba numpy pandas pyarrow scipy seaborn tqdm"
    code = f"import sys, harness.cli.app; print(*sorted(set('{heavy}'.split()) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n", "")
