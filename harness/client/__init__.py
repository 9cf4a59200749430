"""The open-loop load client of real servers."""
