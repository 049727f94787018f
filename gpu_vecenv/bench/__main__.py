"""``python -m gpu_vecenv.bench``, the same as ``gpu-vecenv bench``."""

import tyro

from gpu_vecenv.bench.command import BenchConfig, run

run(tyro.cli(BenchConfig, prog="python -m gpu_vecenv.bench"))
