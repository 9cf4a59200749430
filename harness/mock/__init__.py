"""`bench mock`, an OpenAI-compatible server that computes nothing and keeps its times."""
