"""Declarations of the bundled games, one file each."""
