"""The build of this project (PEP 517): setuptools', but for wheels, which it refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable", "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable", "prepare_metadata_for_build_wheel",
]  # fmt: skip
REFUSED = (
    "llm-sharing-bench is installed from a checkout only: pip install -e . (a wheel would put systems, traces, plots, "
    "workloads and probe at the top of site-packages, and its results and figures beside them)"
)


def build_wheel(*_args: Any, **_settings: Any) -> NoReturn:
    """Refuse a wheel."""
    raise SystemExit(REFUSED)


def build_sdist(*_args: Any, **_settings: Any) -> NoReturn:
    """Refuse an archive, from which only a wheel could be made."""
    raise SystemExit(REFUSED)
