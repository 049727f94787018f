"""Benchmarks beside other libraries: ``python -m benchmarks PEER`` in the repository's folder. See README.md."""
