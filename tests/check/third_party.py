"""Factories for ``gpu-vecenv check tests/check/third_party.py:NAME``, of the table in docs/interfaces.md."""

import gymnasium


def sb3_bit_flipping(num_envs):
    from stable_baselines3.common.envs import BitFlippingEnv

    return gymnasium.vector.SyncVectorEnv([BitFlippingEnv] * num_envs)
