"""Planted bugs: environments, kernels and training steps that break one promise each, kept as data."""
