"""Traces: public logs converted to one canonical table, loaded by name."""
