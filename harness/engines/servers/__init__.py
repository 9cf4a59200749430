"""Real servers as an engine: their processes, memory and states. One kind of server is one file of `engines/`."""
