"""Figures: one file each, reading Parquet only; the one place with matplotlib."""
