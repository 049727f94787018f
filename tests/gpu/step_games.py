"""Steps every kernel at several shapes, for compute-sanitizer: ``compute-sanitizer --tool racecheck python3 THIS``."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from games.crew import Crew
from games.painter import Painter

import gpu_vecenv
from gpu_vecenv.digest import Digest
from gpu_vecenv.env import Env
from gpu_vecenv.policy import masked

Game = str | type[Env]

FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "max_steps": 4}
GAMES = (
    ("tag_gridworld", {"max_steps": 4}),
    ("tag_gridworld", {"max_steps": 4, "num_taggers": 40, "full_observation": False, "random_start": True}),
    ("tag_continuous", FEW),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "side": 2.0}),
    ("tag_continuous", {"max_steps": 4, "num_taggers": 5, "num_runners": 60, "side": 3.0}),
    ("simple_spread", {"max_steps": 4, "num_agents": 40}),
    ("simple_tag", {"max_steps": 4, "continuous_actions": True}),
    ("simple_adversary", {"max_steps": 4}),
    (Crew, {"max_steps": 4}),
)
ALONE = ("cartpole", "mountain_car", "continuous_mountain_car", "acrobot", "pendulum", Painter)


def step_game(game: Game, config: dict, num_envs: int, mode: str, rows: bool) -> None:
    env = gpu_vecenv.make(game, num_envs, "cuda", autoreset_mode=mode, rows=rows, driver="cuda_core", **config)
    digest = Digest(env.functions, num_envs)
    _, info = env.reset(seed=1)
    sampler = gpu_vecenv.Sampler(env)
    for step in range(6):
        actions = env.sample_actions()
        if step % 2 == 0:
            parameters = torch.zeros((*env.layout.batch, sampler.num_parameters), device="cuda")
            actions = sampler.sample(masked(parameters, info.get("action_mask"))).actions
        obs, *_, info = env.step(actions)
        digest.add_outputs(obs)
    env.reset(mask=torch.arange(num_envs, device="cuda") % 2 == 0)
    env.observe()
    digest.add_state(env)
    print(env.game.name(), num_envs, mode, rows, digest.hex())
    env.close()


def main() -> None:
    for game, config in GAMES:
        for num_envs in (1, 33, 130):
            for mode in ("same_step", "next_step", "disabled"):
                step_game(game, config, num_envs, mode, rows=num_envs == 33)
    for game in ALONE:
        for num_envs in (1, 130):
            step_game(game, {"max_steps": 4}, num_envs, "same_step", rows=True)


if __name__ == "__main__":
    main()
