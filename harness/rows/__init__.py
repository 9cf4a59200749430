"""Rows of runs on disk, and numbers computed from rows alone: attainment, estimates, intervals."""
