"""Real servers as an engine: their processes, memory and states. Each kind of server is a file of `engines/`."""
