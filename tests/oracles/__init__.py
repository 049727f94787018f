"""Independent NumPy oracles of the bundled games, one replica at a time."""
