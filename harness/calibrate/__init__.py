"""Calibration: measurements from several sources, and the cost tables that are fitted to them."""
