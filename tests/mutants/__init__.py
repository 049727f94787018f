"""Planted bugs: environments, kernels and training steps with one violation each, kept as data."""
