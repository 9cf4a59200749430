"""One bench for every way of sharing GPUs among LLMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.target import pin

if TYPE_CHECKING:
    from harness.cli.python import compare as compare
    from harness.cli.python import size as size
    from harness.rows.loaded import load as load

    __version__: str
__all__ = ["__version__", "compare", "load", "size"]
FROM = {"load": "harness.rows.loaded", "compare": "harness.cli.python", "size": "harness.cli.python"}
pin()


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `import harness` stays instant."""
    if name == "__version__":
        from importlib.metadata import version

        return version("llm-sharing-bench")
    if name in FROM:
        from importlib import import_module

        return getattr(import_module(FROM[name]), name)
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
