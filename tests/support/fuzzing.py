"""The seed of tests with random inputs: fresh in every run, printed, and set by $FUZZ_SEED to repeat a run."""

import os
import secrets

VARIABLE = "FUZZ_SEED"


def fuzz_seed() -> int:
    """The run's seed. The first call of a run draws it; child processes and pytest's workers inherit it."""
    return int(os.environ.setdefault(VARIABLE, str(secrets.randbits(32))))
