"""Tests on clusters of this machine; they need .venv-cluster (make test-cluster)."""
