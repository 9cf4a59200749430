"""The loop between a system and an engine, the two protocols, and the recording of what passes between them."""
