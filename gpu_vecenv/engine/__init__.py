"""Stepping: VecEnv and make(), launches, step buffers, DataManager, argument checks, Sampler, tuning, digests."""
