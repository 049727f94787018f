"""Experiments of reliability with any number of repetitions: ``python tests/reliability --help``."""
