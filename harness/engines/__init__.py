"""Engines, which run requests in simulated or real time; each is found by its name. README.md says how to write one."""
