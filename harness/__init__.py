"""One bench for every way of sharing GPUs among LLMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.rows.record import load as load

    __version__: str
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    """Look up what is not there at once: `import harness` alone stays instant."""
    if name == "__version__":
        from importlib.metadata import version

        return version("llm-sharing-bench")
    if name == "load":
        from harness.rows.record import load

        return load
    raise AttributeError(f"module 'harness' has no attribute {name!r}")
