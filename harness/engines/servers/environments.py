"""The Python environments in which servers run, and the environment variables that servers get."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from harness.policy.types import UserError

ROOT = Path(__file__).resolve().parents[3]
# A server is given these of our own variables, and no others.
NEEDED = re.compile(r"PATH|HOME|TMPDIR|LANG|LC_\w+|LD_LIBRARY_PATH|(CUDA|NVIDIA|OMP|OPENBLAS)_\w+")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
# Nothing is fetched from a hub, and nothing is reported to one.
ALWAYS = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}


def python(name: str, root: Path | None = None) -> Path:
    """Return the path of the interpreter of a server's Python environment."""
    return (root or ROOT) / f".venv-{name}" / "bin" / "python"


def lacking(name: str, root: Path | None = None) -> str:
    """Return the text that names a server's missing environment and the command that makes it; "" if it exists."""
    return "" if python(name, root).exists() else f"an environment of its own, .venv-{name}: make servers-{name}"


def variables(ours: Mapping[str, str], of_the_command: Mapping[str, str]) -> dict[str, str]:
    """Return a server's environment variables: the needed ones of `ours`, ALWAYS, and those of its command.

    Variables of `ours` that may contain a key or a token are left out. Raises UserError if `of_the_command` names such
    a variable.
    """
    for name in of_the_command:
        if SECRET.search(name):
            raise UserError(f"{name} looks like a key or a token: servers are given none")
    needed = {name: value for name, value in ours.items() if NEEDED.fullmatch(name) and not SECRET.search(name)}
    return needed | ALWAYS | dict(of_the_command)
