"""Engines, in which time passes, each found by its name; README.md says how to write one."""
