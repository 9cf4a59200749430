"""Conformance: the laws of systems and of engines, and the files that `bench new` writes."""
