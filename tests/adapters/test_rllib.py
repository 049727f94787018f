"""RLlib: what its env runners make of rows and of environments, several processes, and learning with its own PPO."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="ray[rllib] is not installed")

import ray
from games.crew import Crew
from games.economy import OpenEconomy
from games.script import Script
from gymnasium.spaces import Discrete
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.pre_checks.env import check_multiagent_environments
from support.actions import UNMASKED
from support.adapter_contract import run_example

import gpu_vecenv
from gpu_vecenv import GymnasiumVectorEnv
from gpu_vecenv.adapters import rllib
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ConfigError, InvalidActionError, UnsupportedGameError

TESTS = Path(__file__).resolve().parent.parent
TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
SMALL = {"train_batch_size_per_learner": 256, "minibatch_size": 128, "num_epochs": 1}


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine; its processes find the tests' games."""
    torch.set_num_threads(1)
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


def here(config):
    return config.env_runners(num_env_runners=0)


def runner_of_rows(game, num_envs=2, seed=3, worker=0, **config):
    config = here(rllib.shared_policy(PPOConfig(), game, num_envs, "cpu", **config)).debugging(seed=seed)
    return SingleAgentEnvRunner(config=config, worker_index=worker)


def runner_of_roles(game, num_envs=2, seed=3, worker=0, **config):
    config = here(rllib.policy_per_role(PPOConfig(), game, num_envs, **config)).debugging(seed=seed)
    return MultiAgentEnvRunner(config=config, worker_index=worker)


@pytest.mark.parametrize("name", UNMASKED)
def test_steps_are_those_of_the_gymnasium_view(name, device):
    """But for rows whose agents leave: seeing nothing, they wait for their environment's end."""
    config = TAG if name == "tag_continuous" else {"max_steps": 9}
    env = rllib.make(name, 6, device, **config)
    twin = GymnasiumVectorEnv(name, 6, device, autoreset_mode="next_step", **config)
    np.testing.assert_array_equal(env.reset(seed=5)[0], twin.reset(seed=5)[0].cpu().numpy())
    left = 0
    for _ in range(40):
        actions = twin.sample_actions()
        played = twin.vec_env.active.flatten().cpu().numpy().copy()
        outputs = env.step(actions.cpu().numpy())
        expected = [tensor.cpu().numpy() for tensor in twin.step(actions)[:4]]
        active = twin.vec_env.active.cpu().numpy()
        leaves = played & ~active.flatten() & np.repeat(active.any(1), twin.num_agents)
        left += leaves.sum()
        for array in (expected[0], expected[2], expected[3]):
            array[leaves] = 0
        for array, other in zip(outputs, expected, strict=False):
            np.testing.assert_array_equal(array, other)
        np.testing.assert_array_equal(outputs[4]["active"], active.flatten())
    assert (left > 0) == (name == "tag_continuous")


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("others", [0, 2])
def test_episodes_of_rows(others, continuous):
    """Each is one agent's, from its environment's start to its end, as the observations themselves foretell it."""
    runner = runner_of_rows(Script, 3, num_others=others, leave=3, continuous=continuous)
    assert runner.num_envs == 3 * (1 + others)
    episodes = [e for e in runner.sample(num_timesteps=60 * runner.num_envs, random_actions=True) if e.is_done]
    truncated, early = 0, 0
    for episode in episodes:
        obs, rewards = episode.get_observations(), np.asarray(episode.get_rewards())
        who, _, ends, truncates, mark, _ = obs[0]
        leaves = 3 if who > 1 and ends > 3 else int(ends)
        assert len(episode) == ends
        assert episode.is_truncated == (truncates == 1 and leaves == ends) != episode.is_terminated
        steps = np.arange(1, ends + 1)
        np.testing.assert_array_equal(rewards, np.where(steps <= leaves, 10 * who + steps, 0))
        kept = obs[: leaves + (leaves == ends)]
        np.testing.assert_array_equal(kept[:, 1], np.arange(len(kept)))
        assert (kept[:, 0] == who).all() and (kept[:, 4] == mark).all()
        assert not obs[leaves : int(ends)].any() or leaves == ends
        actions = episode.get_actions()[: len(kept) - 1]
        np.testing.assert_array_equal(kept[1:, 5], actions[:, 0] if continuous else actions)
        truncated += episode.is_truncated
        early += leaves < ends
    assert 0 < truncated < len(episodes) > 20 and (early > 0) == (others > 0)
    marks = [episode.get_observations()[0][4] for episode in episodes]
    assert len(set(marks)) * (1 + others) >= len(marks)  # nobody starts twice in one of an environment's episodes


def test_episodes_of_roles():
    """An agent's ends where it leaves; where time runs out, RLlib bootstraps."""
    runner = runner_of_roles(Script, 3, num_others=2, leave=3)
    flags = set()
    for episode in runner.sample(num_episodes=20, random_actions=True):
        parts = episode.agent_episodes
        assert {agent: part.module_id for agent, part in parts.items()} == {
            "lead_0": "lead",
            "other_0": "other",
            "other_1": "other",
        }
        for part in parts.values():
            obs = np.asarray(part.get_observations())
            who, _, ends, truncates, _, _ = obs[0]
            leaves = 3 if who > 1 and ends > 3 else int(ends)
            assert len(part) == leaves
            assert part.is_truncated == (truncates == 1 and leaves == ends) != part.is_terminated
            np.testing.assert_array_equal(obs[:, 1], np.arange(leaves + 1))
            np.testing.assert_array_equal(part.get_rewards(), 10 * who + np.arange(1, leaves + 1))
            np.testing.assert_array_equal(obs[1:, 5], part.get_actions())
            flags.add((leaves == ends, part.is_truncated))
    assert flags == {(True, True), (True, False), (False, False)}


@pytest.mark.parametrize("random_actions", [False, True])
def test_roles_may_have_a_box_beside_choices(random_actions):
    """Each module acts in its role's space: what a worker sees of the rates is what the planner chose."""
    runner = runner_of_roles(OpenEconomy, 2)
    low, high = OpenEconomy().layout.action.bounds["planner"]
    for episode in runner.sample(num_episodes=4, random_actions=random_actions):
        parts = episode.agent_episodes
        kinds = {agent: np.asarray(part.get_actions()).dtype.kind for agent, part in parts.items()}
        assert kinds == {**dict.fromkeys(("worker_0", "worker_1", "worker_2", "clerk_0"), "i"), "planner_0": "f"}
        seen = np.asarray(parts["worker_2"].get_observations())[1:, 1:]
        assert (seen >= np.float32(low)[[0, 2]]).all() and (seen <= np.float32(high)[[0, 2]]).all() and seen.any()
        if random_actions:  # those of a module are in units of the Box
            rates = np.asarray(parts["planner_0"].get_actions())
            np.testing.assert_array_equal(seen, rates[: len(seen), [0, 2]])


@pytest.mark.parametrize("make", [runner_of_rows, runner_of_roles])
def test_seeds_are_those_of_the_run(make):
    def marks(**given):
        episodes = make(Script(num_others=1), 3, **given).sample(num_timesteps=40, random_actions=True)
        parts = [getattr(episode, "agent_episodes", {"lead_0": episode})["lead_0"] for episode in episodes]
        return {float(part.get_observations()[0][4]) for part in parts}

    first = marks(seed=5, worker=1)
    assert first == marks(seed=5, worker=1) and len(first) > 5
    assert not first & marks(seed=5, worker=2)  # RLlib gives its env runners neighbouring seeds
    alone = marks(seed=None)
    assert len(alone) > 5 and not alone & marks(seed=None)  # RLlib's check of an env would have seeded each with 42


@pytest.mark.parametrize("name", [name for name in GAMES if not GAMES[name].masks_actions])  # it knows no masks
def test_rllibs_check_passes(name):
    env = rllib.RLlibParallelEnv({"game": name})
    check_multiagent_environments(env)
    assert {agent: space.shape for agent, space in env.observation_spaces.items()} == {
        agent: obs.shape for agent, obs in env.reset(seed=1)[0].items()
    }
    env.close()


def test_agents_are_those_that_the_dictionaries_name():
    env = rllib.RLlibParallelEnv({"game": Script, "num_others": 1, "leave": 1, "max_steps": 4})
    check_multiagent_environments(env)  # other_0 leaves in its only step
    seed = next(seed for seed in range(50) if env.reset(seed=seed)[0]["lead_0"][2:4].tolist() == [3, 1])
    env.reset(seed=seed)
    *_, terminateds, truncateds, _ = env.step({"lead_0": 0, "other_0": 1})
    assert env.agents == ["lead_0", "other_0"] == env.possible_agents
    assert terminateds == {"lead_0": False, "other_0": True, "__all__": False}
    assert truncateds == {"lead_0": False, "other_0": False, "__all__": False}
    env.step({"lead_0": 0})
    assert env.agents == ["lead_0"]
    *_, terminateds, truncateds, _ = env.step({"lead_0": 0})
    assert (terminateds["__all__"], truncateds["__all__"]) == (False, True)
    assert env.reset()[0].keys() == set(env.agents) == {"lead_0", "other_0"}


@pytest.mark.slow
def test_ppo_learns_cartpole(cluster):
    config = here(rllib.shared_policy(PPOConfig(), "cartpole", 64, "cpu")).debugging(seed=1)
    config.training(train_batch_size_per_learner=4096, minibatch_size=512, num_epochs=6, lr=1e-3)
    algorithm = config.build_algo()
    at_random = mean_return(algorithm, random_actions=True)
    for _ in range(10):
        algorithm.train()
    trained = mean_return(algorithm, explore=False)
    algorithm.stop()
    assert trained > 5 * at_random  # about 17 steps at random, of 500 at most


def mean_return(algorithm, **how) -> float:
    return float(np.mean([episode.get_return() for episode in algorithm.env_runner.sample(num_episodes=64, **how)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pendulum", "tag_continuous", "simple_spread"])
def test_ppo_runs_on_rows_of_other_action_spaces(cluster, name):
    algorithm = here(rllib.shared_policy(PPOConfig(), name, 4, "cpu")).training(**SMALL).build_algo()
    assert algorithm.train()["learners"]["default_policy"]["num_module_steps_trained"] > 0
    algorithm.stop()


@pytest.mark.slow
def test_ppo_trains_a_policy_per_role_and_resumes_from_a_checkpoint(cluster, tmp_path):
    config = rllib.policy_per_role(PPOConfig(), "tag_gridworld", 8, grid=8, max_steps=20, num_taggers=2)
    algorithm = here(config).training(**SMALL).build_algo()
    for _ in range(2):
        result = algorithm.train()
    assert {"tagger", "runner"} < result["learners"].keys()
    assert result["env_runners"]["module_episode_returns_mean"].keys() == {"tagger", "runner"}
    path = algorithm.save_to_path(tmp_path)
    algorithm.stop()
    restored = Algorithm.from_checkpoint(path)
    assert restored.train()["env_runners"]["num_env_steps_sampled_lifetime"] > 2.5 * 256
    restored.stop()


@pytest.mark.slow
def test_env_runners_are_processes_with_envs_of_their_own(cluster):
    """A game registered here alone, of a module that they can import."""
    gpu_vecenv.register(Script)
    config = rllib.shared_policy(PPOConfig(), "script", 4, "cpu", num_others=1, leave=3).env_runners(num_env_runners=2)
    algorithm = config.training(**SMALL).debugging(seed=1).build_algo()
    assert algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"] >= 256
    seen = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: (os.getpid(), runner.num_envs, runner.env.reset(seed=runner._seed)[0][0, 4]),
        local_env_runner=False,
    )
    algorithm.stop()
    processes, counts, marks = zip(*seen, strict=True)
    assert len({os.getpid(), *processes}) == 3 and counts == (8, 8) and len(set(marks)) == 2


@dataclass(frozen=True, kw_only=True)
class Uneven(Script):
    source = Script.source_path()

    @property
    def action_space(self):
        return {"lead": Discrete(4), "other": Discrete(2)}


def test_roles_with_actions_of_their_own_are_no_rows():
    with pytest.raises(UnsupportedGameError, match="not support roles with actions of their own"):
        rllib.make(Uneven(num_others=1), 2, "cpu")
    runner = runner_of_roles(Uneven, num_others=1)
    said = [
        episode.agent_episodes["other_0"].get_actions()
        for episode in runner.sample(num_timesteps=40, random_actions=True)
    ]
    assert set(np.concatenate(said)) == {0, 1}


def test_masks_are_refused():
    with pytest.raises(UnsupportedGameError, match="not support action masks"):
        rllib.make(Crew, 2, "cpu")
    with pytest.raises(UnsupportedGameError, match="not support action masks"):
        rllib.RLlibParallelEnv({"game": Crew})
    for setting in (rllib.shared_policy, rllib.policy_per_role):
        with pytest.raises(UnsupportedGameError, match="not support action masks"):
            setting(PPOConfig(), Crew, 2)
        with pytest.raises(TypeError, match=r"expected an AlgorithmConfig, for example PPOConfig"):
            setting(PPOConfig, "cartpole", 2)


def test_only_the_right_views_are_wrapped():
    with pytest.raises(TypeError, match=r"expected a gpu_vecenv\.GymnasiumVectorEnv"):
        rllib.wrap(gpu_vecenv.make("cartpole", 2, "cpu"))
    for wrong in ({"output": "torch", "autoreset_mode": "next_step"}, {"output": "numpy"}):
        with pytest.raises(ValueError, match='expected output="numpy" and "next_step"'):
            rllib.wrap(GymnasiumVectorEnv("cartpole", 2, "cpu", **wrong))
    env = rllib.make("pendulum", 2, "cpu")
    env.reset()
    with pytest.raises(InvalidActionError):
        env.step(np.full((2, 1), np.nan, np.float32))


def test_counts_of_rows_that_do_not_fit_are_refused():
    config = here(rllib.shared_policy(PPOConfig(), Script, 2, "cpu", num_others=2))
    for wrong in ({"num_envs_per_env_runner": 7}, {"gym_env_vectorize_mode": "sync"}):
        with pytest.raises(ConfigError, match="a multiple of 3: each agent"):
            SingleAgentEnvRunner(config=config.copy(copy_frozen=False).env_runners(**wrong))
    with pytest.raises(ConfigError, match="no configuration key 'side'"):
        SingleAgentEnvRunner(config=rllib.shared_policy(PPOConfig(), "cartpole", 2, "cpu", side=3))


def test_the_adapter_travels_by_its_arguments():
    twin = cloudpickle.loads(cloudpickle.dumps(rllib.make("tag_gridworld", 3, "cpu")))
    assert twin.reset(seed=1)[0].shape == (15, 21) and twin.num_envs == 15


def test_a_missing_library_is_one_line():
    code = "import sys; sys.modules['ray'] = None; import gpu_vecenv.adapters.rllib"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1].endswith("is not installed: pip install 'gpu-vecenv[rllib]'")


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    at_random, trained = run_example("rllib_ppo.py", r"of a row (\S+) at random, (\S+) after", tmp_path)
    assert trained > 1.3 * at_random
