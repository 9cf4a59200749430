"""A sweep of bad input over every command: `python -m tests.fuzz`, or `make fuzz`."""
