"""Runs: the spec of a run, its execution, and the execution of many runs on processes, machines and clusters."""
