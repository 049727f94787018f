"""Code for Gymnasium's own CartPole on thousands of environments: another id, and `output="numpy"`.

The loop below uses nothing of gpu_vecenv. It solves CartPole with a linear policy by the cross-entropy method: try
many, keep the best, draw the next ones around them. Each environment tries a policy of its own.

    python examples/gymnasium_drop_in.py --id CartPole-v1 --num-envs 32   # the same on Gymnasium's own
"""

import time

import gymnasium
import numpy as np
import tyro

import gpu_vecenv  # noqa: F401  makes the ids known


def returns_of(env: gymnasium.vector.VectorEnv, policies: np.ndarray, seed: int) -> np.ndarray:
    """Returns (num_envs,) of the first episode of each env, by policies (num_envs, 5): four weights and a bias."""
    obs, _ = env.reset(seed=seed)
    total, running = np.zeros(len(policies)), np.ones(len(policies), bool)
    while running.any():
        actions = (np.einsum("ek,ek->e", obs, policies[:, :4]) + policies[:, 4] > 0).astype(np.int64)
        obs, rewards, terminations, truncations, _ = env.step(actions)
        total += rewards * running
        running &= ~(terminations | truncations)
    return total


def main(id: str = "gpu_vecenv/CartPole-v1", num_envs: int = 512, rounds: int = 6, device: str | None = None) -> None:
    """Search.

    Args:
        id: Of Gymnasium.
        num_envs: Number of environments, and of policies that are tried at once.
        rounds: Times that the best fifth are kept.
        device: cpu or cuda, for our ids; by default cuda if usable.
    """
    options = {"output": "numpy", "device": device} if id.startswith("gpu_vecenv/") else {"vectorization_mode": "sync"}
    env = gymnasium.make_vec(id, num_envs=num_envs, **options)
    rng = np.random.default_rng(1)
    mean, deviation = np.zeros(5), np.ones(5)
    start = time.perf_counter()
    for k in range(rounds):
        policies = mean + deviation * rng.standard_normal((num_envs, 5))
        returns = returns_of(env, policies, seed=k)
        chosen = np.argsort(returns)[-num_envs // 5 :]
        best = policies[chosen]
        mean, deviation = best.mean(0), best.std(0)
        print(f"round {k + 1}: mean return {returns.mean():.0f}, best fifth {returns[chosen].mean():.0f}")
    env.close()
    print(f"{num_envs * rounds:,} episodes in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    tyro.cli(main)
