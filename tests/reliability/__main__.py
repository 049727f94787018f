"""Run one experiment; the last line has its metrics, the exit status is 1 on any failure.

    python tests/reliability saves --count 200
    python tests/reliability damage --count 20000 --json damage.json

From a clone nothing needs to be installed but the dependencies.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[0] = str(TESTS)  # not this folder: its modules are reliability.saves and so on
sys.path.insert(1, str(TESTS.parent))

from reliability.experiment import main  # noqa: E402

if __name__ == "__main__":  # spawned processes import this file
    sys.exit(main())
