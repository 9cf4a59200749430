"""The suite: a fixed test of sharing policies, whose scores anyone can reproduce."""
