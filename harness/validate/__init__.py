"""Comparisons of measured runs and timings with simulated ones, and fits of hosts and devices to measurements."""
