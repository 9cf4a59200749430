"""The suite: a fixed test of a sharing policy, whose scores anyone can make again."""
