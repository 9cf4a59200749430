"""Values that a test knows to be there, though their type allows None."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def there(value: T | None) -> T:
    """Return what is there; it fails where nothing is."""
    assert value is not None
    return value
