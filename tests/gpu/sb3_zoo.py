"""Train Stable-Baselines3's PPO with the settings of RL Baselines3 Zoo, many seeds, beside preset_figures.py; on a CPU.

usage: python tests/gpu/sb3_zoo.py FOLDER [--games cartpole,pendulum] [--seeds 10] [--processes 1] [--max-seconds 540]

The games are Gymnasium's own. FOLDER/figures.json has, as that of preset_figures.py, the returns of evaluations during
training and of the final policy. Each seed has one core. The file is written after each; the call that has spent
--max-seconds drops the seeds it trains, with exit code 3: the same command continues.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import UNFINISHED, Settings, opened

from gpu_vecenv.engine.timing import provenance

EVAL_SEED = 1_000_000  # of the environments of evaluations, whose seeds follow; each training seed has its own thousand


@dataclass(frozen=True)
class Zoo:
    """An entry of hyperparams/ppo.yml of DLR-RM/rl-baselines3-zoo at commit 00128b5."""

    env_id: str
    env_steps: int
    num_envs: int
    learner: Mapping[str, Any]  # arguments of PPO; a string lin_x is a value that falls from x to 0
    normalize: bool = False  # observations and returns


ROWS = {
    "cartpole": Zoo(
        "CartPole-v1",
        100_000,
        8,
        {
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 20,
            "ent_coef": 0.0,
            "learning_rate": "lin_0.001",
            "clip_range": "lin_0.2",
        },
    ),
    "pendulum": Zoo(
        "Pendulum-v1",
        100_000,
        4,
        {
            "n_steps": 1024,
            "gae_lambda": 0.95,
            "gamma": 0.9,
            "n_epochs": 10,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
            "clip_range": 0.2,
            "use_sde": True,
            "sde_sample_freq": 4,
        },
    ),
    "acrobot": Zoo(
        "Acrobot-v1",
        1_000_000,
        16,
        {"n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0},
        normalize=True,
    ),
    "mountain_car": Zoo(
        "MountainCar-v0",
        1_000_000,
        16,
        {"n_steps": 16, "gae_lambda": 0.98, "gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0},
        normalize=True,
    ),
    "continuous_mountain_car": Zoo(
        "MountainCarContinuous-v0",
        20_000,
        1,
        {
            "batch_size": 256,
            "n_steps": 8,
            "gamma": 0.9999,
            "learning_rate": 7.77e-05,
            "ent_coef": 0.00429,
            "clip_range": 0.1,
            "n_epochs": 10,
            "gae_lambda": 0.9,
            "max_grad_norm": 5,
            "vf_coef": 0.19,
            "use_sde": True,
            "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False},
        },
        normalize=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What to train."""

    games: str = ",".join(ROWS)
    processes: int = 1  # seeds at a time
    total_steps: int | None = None  # of every run; default: the Zoo's


def schedule(value: Any) -> Any:
    """The Zoo's way to write a value that falls linearly."""
    if isinstance(value, str):
        first = float(value.removeprefix("lin_"))
        return lambda remaining: remaining * first
    return value


def environments(zoo: Zoo, count: int, seed: int, gamma: float, of: VecEnv | None = None) -> VecEnv:
    """Of training, or with the statistics of others, of an evaluation."""
    env: VecEnv = make_vec_env(zoo.env_id, count, seed=seed)
    if not zoo.normalize:
        return env
    if of is None:
        return VecNormalize(env, gamma=gamma)
    assert isinstance(of, VecNormalize)
    normalised = VecNormalize(env, training=False, norm_reward=False)
    normalised.obs_rms = of.obs_rms
    return normalised


class Actor:
    """A model that draws the matrix of gSDE's noise as often as in training, which ``predict`` alone never does."""

    def __init__(self, model: PPO) -> None:
        self.model, self.calls = model, 0
        self.every = model.sde_sample_freq if model.sde_sample_freq > 0 else model.n_steps

    def predict(self, obs: np.ndarray, state: Any, episode_start: np.ndarray, deterministic: bool) -> tuple[Any, Any]:
        """As ``evaluate_policy`` calls it."""
        if self.model.use_sde and self.calls % self.every == 0:
            self.model.policy.reset_noise(len(obs))
        self.calls += 1
        return self.model.predict(obs, state, episode_start, deterministic)


def returns_of(model: PPO, zoo: Zoo, episodes: int, greedy: bool) -> dict[str, float]:
    """Mean return of whole episodes; the model and its noise are left as they were."""
    gamma, distribution = zoo.learner["gamma"], model.policy.action_dist
    noise = {key: value for key, value in vars(distribution).items() if key.startswith("exploration")}
    env = environments(zoo, min(episodes, 32), EVAL_SEED + 1000 * model.seed, gamma, of=model.get_env())
    found, _ = evaluate_policy(Actor(model), env, episodes, deterministic=greedy, return_episode_rewards=True)
    env.close()
    vars(distribution).update(noise)
    return {"agent": statistics.fmean(found)}


class Curve(BaseCallback):
    """Evaluates at the ends of rollouts, after equal parts of the run, and keeps the time that this takes."""

    def __init__(self, evaluate: Callable[[], dict[str, float]], every: int) -> None:
        super().__init__()
        self.evaluate, self.every = evaluate, every
        self.points: list[tuple[int, dict[str, float]]] = []
        self.seconds = 0.0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # the first one before training, the others after an update
        if self.num_timesteps >= self.every * (len(self.points) + 1):
            began = time.perf_counter()
            with torch.random.fork_rng():  # the draws of an evaluation are not those of training
                self.points.append((self.num_timesteps, self.evaluate()))
            self.seconds += time.perf_counter() - began


def train(options: Options, run: tuple[str, int]) -> tuple[str, int, dict[str, Any]]:
    """A run of a game and a seed, and with these its returns and times."""
    torch.set_num_threads(1)
    name, seed = run
    zoo = ROWS[name]
    total_steps = options.total_steps or zoo.env_steps
    env = environments(zoo, zoo.num_envs, seed, zoo.learner["gamma"])
    model = PPO(
        "MlpPolicy", env, seed=seed, device="cpu", **{key: schedule(value) for key, value in zoo.learner.items()}
    )
    curve = Curve(
        lambda: returns_of(model, zoo, options.curve_episodes, False), math.ceil(total_steps / options.points)
    )
    began, cpu = time.perf_counter(), time.process_time()
    model.learn(total_steps, callback=curve)
    seconds, cpu = time.perf_counter() - began - curve.seconds, time.process_time() - cpu
    result = {
        "env_steps": model.num_timesteps,
        "seconds": seconds,
        "cpu_seconds": cpu,  # with evaluations
        "curve": curve.points,
        "sampled": returns_of(model, zoo, options.episodes, False),
        "greedy": returns_of(model, zoo, options.episodes, True),
    }
    env.close()
    return name, seed, result


def main(folder: Path, options: Options) -> int:
    """Train what is missing; the exit code."""
    names = options.games.split(",")
    if unknown := sorted(set(names) - set(ROWS)):
        raise SystemExit(f"unknown games {unknown}; expected some of {', '.join(ROWS)}")
    origin = provenance(torch.device("cpu")) | {
        "stable_baselines3": stable_baselines3.__version__,
        "gymnasium": gymnasium.__version__,
        "numpy": np.__version__,
    }
    figures = opened(folder, replace(options, games=""), origin, side="Stable-Baselines3")
    # Every game has its first seeds before any has its last.
    left = [(name, seed) for seed in options.seed_range for name in names if not figures.has(name, seed)]
    deadline = time.perf_counter() + options.max_seconds
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:  # which ends what it runs
        results = pool.imap_unordered(partial(train, options), left, chunksize=1)
        for _ in left:
            try:
                figures.add(*results.next(max(0.0, deadline - time.perf_counter())))
            except multiprocessing.TimeoutError:
                return UNFINISHED
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes)))
