"""Bad input to every command: `python -m tests.fuzz`, or `make fuzz`."""
