"""Reproducible random numbers, as hashes of a seed and an id."""

from __future__ import annotations


def draw(seed: int, number: int) -> float:
    """Return a random number from 0 to 1, which depends only on a seed and a whole number such as a request's id.

    The hash is splitmix64.
    """
    z = (number + 1 + (seed << 32)) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    z = (z ^ z >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return (z ^ z >> 31) / (1 << 64)
