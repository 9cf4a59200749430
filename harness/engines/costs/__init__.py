"""Costs of steps, loads and memory: the tables of GPUs and hosts, formulas over them, and their fits."""
