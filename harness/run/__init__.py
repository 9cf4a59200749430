"""Runs: a run as a value and its execution, and the execution of many on processes, machines and clusters."""
