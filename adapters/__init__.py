"""Adapters to RL libraries, one file per library: import the one you need, nothing else."""
