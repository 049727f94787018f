"""The error of this folder."""


class BenchmarkError(RuntimeError):
    """A peer could not be installed or started, or has no workload for the device; the message says what to do."""
