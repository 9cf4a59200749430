"""Workloads: traces or arrival processes, model sets and SLO rules become the jobs that an engine replays."""
