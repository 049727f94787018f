"""Step a game with random actions, drawn on the device, and print how fast it goes."""

import time

import tyro

import gpu_vecenv


def main(game: str = "tag_continuous", num_envs: int = 200, steps: int = 100, device: str | None = None) -> None:
    """Random actions; the first step, before which kernels may be compiled, is not counted."""
    env = gpu_vecenv.make(game, num_envs, device)
    env.reset(seed=0)
    env.step(env.sample_actions())[1].sum().item()  # reading a value waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        _obs, _rewards, _terminations, _truncations, _info = env.step(env.sample_actions())
    faulted = env.faults().count_nonzero().item()
    rate = num_envs * steps / (time.perf_counter() - start)
    print(f"{game}, {num_envs} environments x {env.num_agents} agents on {env.device}, {faulted} of them faulted")
    print(f"{rate:,.0f} env-steps/s, {rate * env.num_agents:,.0f} agent-steps/s")


if __name__ == "__main__":
    tyro.cli(main)
