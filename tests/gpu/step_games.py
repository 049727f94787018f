"""Steps every kernel at several shapes, for compute-sanitizer: ``compute-sanitizer --tool racecheck python3 THIS``."""

import torch

import gpu_vecenv
from gpu_vecenv.digest import Digest

FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "max_steps": 4}
GAMES = (
    ("tag_gridworld", {"max_steps": 4}),
    ("tag_gridworld", {"max_steps": 4, "num_taggers": 40, "full_observation": False, "random_start": True}),
    ("tag_continuous", FEW),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "side": 2.0}),
    ("tag_continuous", {"max_steps": 4, "num_taggers": 5, "num_runners": 60, "side": 3.0}),
)


def main() -> None:
    for name, config in GAMES:
        for num_envs in (1, 33, 130):
            for mode in ("same_step", "next_step", "disabled"):
                env = gpu_vecenv.make(name, num_envs, "cuda", autoreset_mode=mode, driver="cuda_core", **config)
                sampler, digest = gpu_vecenv.Sampler(env), Digest(env.functions, num_envs)
                env.reset(seed=1)
                logits = torch.zeros((num_envs, env.num_agents, sampler.num_logits), device="cuda")
                for step in range(6):
                    actions = env.sample_actions() if step % 2 else sampler.sample(logits).actions
                    digest.add(env.step(actions)[0])
                env.reset(mask=torch.arange(num_envs, device="cuda") % 2 == 0)
                env.observe()
                digest.add_state(env)
                print(name, num_envs, mode, digest.hex())
                env.close()


if __name__ == "__main__":
    main()
