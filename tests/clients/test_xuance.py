"""XuanCe: what its buffers hold is what the game says, with one agent and with several."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import xuance
from games.script import Script
from support.documented import documented
from xuance.common import load_yaml
from xuance.environment import make_envs
from xuance.torch.agents import REGISTRY_Agents

import gpu_vecenv

CONFIGS = Path(xuance.__file__).parent / "configs"
PLAIN = {"device": "cpu", "render_mode": None, "use_obsnorm": False, "use_rewnorm": False, "use_advnorm": False}
AGENTS = {"env_name": "gpu_vecenv_agents", "vectorize": "DummyVecMultiAgentEnv"}
AGENTS |= {"policy": "Categorical_MAAC_Policy", "continuous_action": False}


@pytest.fixture(scope="module", autouse=True)
def registered():
    gpu_vecenv.register(Script)
    documented("XuanCe")
    torch.set_num_threads(1)


def agent_of(config: str, game: str, folder: Path, **options):
    """XuanCe's agent on 4 environments of a game, with one of its own configurations."""
    values = load_yaml(str(CONFIGS / "basic.yaml")) | load_yaml(str(CONFIGS / config)) | PLAIN
    values |= {
        "env_name": "gpu_vecenv",
        "vectorize": "DummyVecEnv",
        "env_id": game,
        "parallels": 4,
        "running_steps": 1000,
        **options,
    }
    values |= {"log_dir": str(folder / "logs"), "model_dir": str(folder / "models")}
    settings = Namespace(**values)
    return REGISTRY_Agents[settings.agent](settings, make_envs(settings))


def test_single_environments_are_what_the_script_says(tmp_path):
    agent = agent_of("ppo/classic_control/CartPole-v1.yaml", "script", tmp_path, horizon_size=64)
    agent.train(63)  # one less than fills the buffer, which is then used and emptied
    memory = agent.memory
    # XuanCe overwrites the first observation of all before it stores it.
    stored = [array[:, 1:63] for array in (memory.observations, memory.rewards, memory.terminals, memory.actions)]
    observations, rewards, terminals, actions = stored
    number, steps, last, truncates, mark, said = np.moveaxis(observations, -1, 0)
    ends = steps + 1 == last
    assert (number == 1).all() and ends.sum() > 20 and observations.dtype == np.float32
    np.testing.assert_array_equal(rewards, 10 + steps + 1)
    np.testing.assert_array_equal(terminals.astype(bool), ends & (truncates == 0))
    inside = ~ends[:, :-1]
    np.testing.assert_array_equal(said[:, 1:][inside], actions[:, :-1][inside])
    np.testing.assert_array_equal(mark[:, 1:][inside], mark[:, :-1][inside])
    assert agent.current_episode.sum() == ends.sum()  # none is shorter than two steps


def test_parallel_environments_are_what_they_give_alone(tmp_path):
    agent = agent_of("mappo/mpe/simple_spread_v3.yaml", "simple_spread", tmp_path, buffer_size=400, **AGENTS)
    agent.train(60)  # of 100 that fill the buffer
    stored = agent.memory.data
    for i in range(4):
        twin = gpu_vecenv.parallel_env("simple_spread", "cpu", output="numpy")
        names = twin.possible_agents
        twin.reset(seed=1 + i)  # env_seed of XuanCe's configuration
        obs = twin.reset()[0]
        for step in range(60):
            actions = {name: int(stored["actions"][name][i, step]) for name in names}
            assert step == 0 or all(np.array_equal(stored["obs"][name][i, step], obs[name]) for name in names)
            obs, rewards, terminations, truncations, _ = twin.step(actions)
            for name in names:
                assert stored["rewards"][name][i, step] == np.float32(rewards[name])
                assert bool(stored["terminals"][name][i, step]) == terminations[name]
            if not twin.agents:
                assert all(truncations.values()) and step % 25 == 24
                obs = twin.reset()[0]


def test_policies_change_and_stay_finite(tmp_path):
    own = {"env_name": "Classic Control", "horizon_size": 32}
    for config, game, options in (
        ("ppo/classic_control/CartPole-v1.yaml", "gpu_vecenv:gpu_vecenv/CartPole-v1", own),
        ("ppo/classic_control/CartPole-v1.yaml", "cartpole", {"horizon_size": 32}),
        ("mappo/mpe/simple_spread_v3.yaml", "simple_spread", {**AGENTS, "buffer_size": 200}),
    ):
        agent = agent_of(config, game, tmp_path, **options)
        before = [p.clone() for p in agent.policy.parameters()]
        agent.train(101)
        assert any(not torch.equal(old, new) for old, new in zip(before, agent.policy.parameters(), strict=True))
        assert all(p.isfinite().all() for p in agent.policy.parameters())
