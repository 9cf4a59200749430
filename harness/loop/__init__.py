"""The loop between a system and an engine, the interfaces of both, and records of what passes between them."""
