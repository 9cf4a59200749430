"""Tools of whoever changes the bench: each is a command, `python -m tests.tools.NAME`."""
