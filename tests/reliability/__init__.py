"""Experiments of reliability with as many repetitions as one likes: ``python tests/reliability --help``."""
