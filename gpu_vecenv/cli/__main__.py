"""``python -m gpu_vecenv.cli``, the same as ``gpu-vecenv``."""

import sys

from gpu_vecenv.cli.main import main

sys.exit(main())
