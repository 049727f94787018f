"""Independent NumPy oracles of the bundled games, one environment at a time."""
