"""Measured runs and timings beside simulated ones, and the fits of hosts and devices to them."""
