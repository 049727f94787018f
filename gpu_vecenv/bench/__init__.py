"""Throughput of games, training and interfaces: gpu-vecenv bench, or python -m gpu_vecenv.bench."""
