"""Calibration: rows of what was measured, from several sources, and the tables that are fitted to them."""
