"""The Gymnasium views of every game: registration, contract, rows, the NumPy face, and no copy in between."""

import builtins
import copy
import gc
import pickle
import re
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.utils import RecordConstructorArgs
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import vector as gymnasium_wrappers
from support.actions import UNMASKED
from support.bitwise import equal_bits
from support.processes import run_child
from support.synchronisation import no_synchronisation

import gpu_vecenv
from gpu_vecenv import GymnasiumEnv, GymnasiumVectorEnv
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.compile.backends.select import working_drivers
from gpu_vecenv.envs.registry import GAMES, gymnasium_id, versions
from gpu_vecenv.errors import (
    ClosedEnvError,
    ConfigError,
    EnvDefinitionError,
    InvalidActionError,
    InvalidSeedError,
    ResetNeededError,
    UnsupportedGameError,
)

MODES = ["same_step", "next_step", "disabled"]
IDS = {name: gymnasium_id(game) for name, game in GAMES.items()}
ALL_IDS = [gymnasium_id(game, version=version) for game in GAMES.values() for version in versions(game)]
# Few agents, so that they leave early and environments end often.
TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
NEAR = {"num_rates": 3, "mobile_agent_observation_range": 1}
SMALL = {
    "tag_continuous": TAG,
    "tag_gridworld": {"grid": 4, "max_steps": 7},
    # No column is full before the end: random actions need no mask.
    "harvest": {"layout_name": "small", "num_agents": 3, "max_steps": 12},
    "cleanup": {"layout_name": "small", "num_agents": 3, "max_steps": 12},
    "economy": {"num_workers": 2, "grid": "S.W\n...", "max_bid_ask": 2, "period": 4, "max_steps": 12, **NEAR},
    "connect_four": {"num_rows": 16, "opening_moves": 4, "max_steps": 12},
}


def vector(name: str, num_envs: int = 3, device: str = "cpu", **arguments) -> GymnasiumVectorEnv:
    return gymnasium.make_vec(IDS[name], num_envs=num_envs, device=device, **{**SMALL.get(name, {}), **arguments})


def as_numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- registration


def test_every_game_has_its_id():
    assert IDS["tag_continuous"] == "gpu_vecenv/TagContinuous-v1"
    assert {"gpu_vecenv/CartPole-v1", "gpu_vecenv/MountainCarContinuous-v0"} <= set(IDS.values())
    assert set(IDS.values()) < set(ALL_IDS) <= set(gymnasium.registry)


@pytest.mark.parametrize(("version", "egocentric", "size"), [(0, False, 71), (1, True, 77)])
def test_every_version_has_an_id(version, egocentric, size):
    env = gymnasium.make_vec(f"gpu_vecenv/TagContinuous-v{version}", num_envs=1, device="cpu")
    assert env.game.egocentric is egocentric and env.game.played_version == version
    assert env.single_observation_space.shape == (size,)


@pytest.mark.parametrize("name", GAMES)
def test_make_vec_gives_a_vector_env_of_device_tensors(name, device):
    env = vector(name, device=device)
    game = env.game
    assert isinstance(env, VectorEnv) and env.unwrapped is env
    assert env.spec.id == IDS[name]
    assert env.metadata["autoreset_mode"] is env.autoreset_mode is AutoresetMode.SAME_STEP  # the registered default
    assert (env.num_envs, env.vec_env.num_envs, env.num_agents) == (3 * game.num_agents, 3, game.num_agents)
    assert env.observation_space.shape == (env.num_envs, *env.single_observation_space.shape)
    obs, info = env.reset(seed=4)
    assert obs.device.type == device and info["active"].all()
    for _ in range(20):
        assert env.observation_space.contains(as_numpy(obs))
        obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
        for tensor, dtype in ((rewards, torch.float32), (terminations, torch.bool), (truncations, torch.bool)):
            assert (tensor.shape, tensor.dtype, tensor.device.type) == ((env.num_envs,), dtype, device)
        declared = {"action_mask": game.masks_actions}
        expected = {"active", "fault", "final_obs", "final_info", *(key for key, has in declared.items() if has)}
        assert {key.removeprefix("_") for key in info} - {"acting"} == expected
        assert ("acting" in info) >= game.takes_turns
    assert env.vec_env.faults().sum() == 0


def test_other_options_and_modes_reach_the_engine():
    env = gymnasium.make_vec(
        "gpu_vecenv/TagGridworld-v0",
        num_envs=2,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        max_episode_steps=9,
        num_taggers=7,
        device="cpu",
    )
    assert (env.autoreset_mode, env.game.max_steps, env.num_agents) == (AutoresetMode.NEXT_STEP, 9, 8)
    with pytest.raises(ConfigError, match=r"max_steps is 5, but max_episode_steps, .* is 9; expected one of them"):
        GymnasiumVectorEnv("tag_gridworld", 2, "cpu", max_episode_steps=9, max_steps=5)
    with pytest.raises(ConfigError, match="max_steps is 30, but max_episode_steps, by default that of the id, is 500"):
        gymnasium.make_vec("gpu_vecenv/CartPole-v1", num_envs=2, max_steps=30)
    with pytest.raises(ConfigError, match="max_cycles is 30, but max_episode_steps, by default that of the id, is 500"):
        gymnasium.make_vec("gpu_vecenv/CartPole-v1", num_envs=2, max_cycles=30)
    with pytest.raises(ConfigError, match=r"max_cycles is 5, but Gymnasium's TimeLimit .*max_episode_steps="):
        gymnasium.make("gpu_vecenv/CartPole-v1", max_cycles=5)
    with pytest.raises(ValueError, match="autoreset_mode"):
        GymnasiumVectorEnv("tag_gridworld", 2, "cpu", autoreset_mode="sometimes")
    with pytest.raises(ValueError, match="output"):
        GymnasiumVectorEnv("tag_gridworld", 2, "cpu", output="jax")


def test_what_the_constructor_refuses_is_closed_without_a_word(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(ValueError, match="num_envs is 0"):
        GymnasiumVectorEnv("cartpole", 0, "cpu")
    gc.collect()
    assert not unraisable


def test_ids_are_refused_with_near_names():
    with pytest.raises(gymnasium.error.NameNotFound):
        gymnasium.make_vec("gpu_vecenv/TagGridword-v0", num_envs=2)
    with pytest.raises(gymnasium.error.VersionNotFound):
        gymnasium.make_vec("gpu_vecenv/TagGridworld-v9", num_envs=2)


WITHOUT_IMPORT = """
import gymnasium, sys
assert "gpu_vecenv" not in sys.modules
for num_envs in (1, 5):
    envs = gymnasium.make_vec("gpu_vecenv:gpu_vecenv/CartPole-v1", num_envs=num_envs, device="cpu")
    assert type(envs).__name__ == "GymnasiumVectorEnv" and envs.num_envs == num_envs, envs
    assert envs.reset(seed=1)[0].shape == (num_envs, 4) and envs.spec.id == "gpu_vecenv/CartPole-v1", envs.spec
spread = gymnasium.make_vec("gpu_vecenv:gpu_vecenv/SimpleSpread-v3", num_envs=5, device="cpu")
assert (spread.num_envs, spread.vec_env.num_envs) == (15, 5), spread
env = gymnasium.make("gpu_vecenv:gpu_vecenv/CartPole-v1")
assert env.spec.max_episode_steps == 500 and env.reset(seed=1)[0].shape == (4,), env
"""


def test_the_package_as_prefix_of_an_id_imports_it(tmp_path):
    done = run_child("-c", WITHOUT_IMPORT, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_gymnasium_vectorises_the_single_env_too():
    env = gymnasium.make_vec("gpu_vecenv/CartPole-v1", num_envs=2, vectorization_mode="sync")
    obs, _ = env.reset(seed=1)
    assert obs.shape == (2, 4)
    assert env.step(env.action_space.sample())[0].shape == (2, 4)


# ---------------------------------------------------------------------- the single env


class OnlyAllowed(gymnasium.ActionWrapper, RecordConstructorArgs):
    """The first choice that is allowed in place of forbidden ones, of which Gymnasium's checker knows nothing."""

    def __init__(self, env):
        RecordConstructorArgs.__init__(self)
        super().__init__(env)

    def action(self, action):
        masks = np.split(self.env.action_masks(), self.action_space.nvec.cumsum()[:-1])
        chosen = [k if mask[k] else mask.argmax() for k, mask in zip(action.ravel(), masks, strict=True)]
        return np.reshape(chosen, action.shape)


@pytest.mark.parametrize("env_id", ALL_IDS)
def test_gymnasiums_checker_passes_on_every_single_env(env_id):
    env = gymnasium.make(env_id).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Advice on spaces, and these are the games' own: positions without bounds, a torque of +-2.
        warnings.filterwarnings("ignore", message=".*Box observation space (min|max)imum value is -?infinity.*")
        warnings.filterwarnings("ignore", message=".*we recommend using a symmetric and normalized space.*")
        warnings.filterwarnings("ignore", message=".*is different from the unwrapped version.*")
        check_env(OnlyAllowed(env) if env.game.masks_actions else env)


@pytest.mark.filterwarnings("ignore:.*WARN")
@pytest.mark.parametrize("game", [Race, Sacrifice])
def test_gymnasiums_checker_passes_where_agents_do_not_act_in_each_step(game):
    env = GymnasiumEnv(game)
    check_env(env, skip_render_check=True)
    _, info = env.reset(seed=1)
    assert info["acting"].shape == (2,) and info["acting"].dtype == np.bool_


@pytest.mark.parametrize("name", UNMASKED)
def test_the_single_env_is_one_env(name):
    config = SMALL.get(name, {})
    env, twin = (
        GymnasiumEnv(name, **config),
        gpu_vecenv.make(name, 1, "cpu", autoreset_mode="disabled", **config),
    )
    alone = twin.num_agents == 1
    obs, _ = env.reset(seed=2**40)
    expected, _ = twin.reset(seed=2**40)
    env.action_space.seed(5)
    over = False
    while not over:
        assert env.observation_space.contains(obs)
        assert equal_bits(obs, expected[0, 0] if alone else expected[0])
        action = env.action_space.sample()
        obs, reward, terminated, truncated, _ = env.step(action)
        actions = torch.as_tensor(np.asarray(action)).view(1, twin.num_agents, *twin.game.layout.action.shape)
        expected, rewards, _, truncations, info = twin.step(actions)
        over = not info["active"].any()
        assert reward == float(rewards.double().sum()) and isinstance(reward, float)
        assert (terminated, truncated) == (over and not truncations.any(), over and bool(truncations.any()))
    with pytest.raises(ResetNeededError, match="after the end of an episode"):
        env.step(action)


def test_the_single_env_refuses_what_its_space_does_not_hold():
    env = GymnasiumEnv("cartpole")
    with pytest.raises(ResetNeededError):
        env.step(0)
    for options in ({"low": 1}, {"low": "a"}, {"high": np.nan}, {"lo": 0}, {"reset_mask": [True]}):
        with pytest.raises(ConfigError, match="reset: options"):
            env.reset(options=options)
    with pytest.raises(ConfigError, match="its own range is randomised: reset_low"):
        GymnasiumEnv("cartpole", randomize={"reset_low": (-0.1, 0)}).reset(options={"low": 0})
    with pytest.raises(ConfigError, match="expected none"):
        GymnasiumEnv("tag_gridworld").reset(options={"low": 0})
    env.reset(seed=1)
    before = env.vec_env.state_dict()
    for action in (2, -1, 2**40):
        with pytest.raises(InvalidActionError):
            env.step(action)
    for action in (True, 0.5, "left", None, [0, 1], np.zeros(2, np.int64), np.bool_(True)):
        with pytest.raises((TypeError, ValueError)):
            env.step(action)
    assert all(torch.equal(before[key], value) for key, value in env.vec_env.state_dict().items())
    env.close()
    with pytest.raises(ClosedEnvError):
        env.step(0)


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_agents_with_episodes_of_their_own(mode, device):
    """Against a plain VecEnv, whose agents simply end: what rows add is written down here once more, in Python."""
    env = vector("tag_continuous", 40, device, autoreset_mode=mode)
    twin = gpu_vecenv.make("tag_continuous", 40, device, autoreset_mode=mode, **TAG)
    obs, _ = env.reset(seed=3)
    expected, _ = twin.reset(seed=3)
    active = torch.ones(40, 5, dtype=torch.bool, device=device)
    early, ends = 0, 0
    for _ in range(60):
        assert equal_bits(obs, expected.flatten(0, 1))
        actions = twin.sample_actions()
        assert torch.equal(env.sample_actions(), actions.flatten(0, 1))
        before, begins = active, ~active.any(1) & (mode == "next_step")
        obs, rewards, terminations, truncations, info = env.step(actions.flatten(0, 1))
        expected, twin_rewards, ended, cut, twin_info = twin.step(actions)
        active = twin_info["active"]
        gone = ended | cut
        over = gone.any(1) & ~(before & ~gone).any(1)  # the last agents of an environment have ended
        once_more = over[:, None] & ~before
        early += int(once_more.sum())
        ends += int(over.sum())
        assert equal_bits(rewards, twin_rewards.flatten())
        assert torch.equal(terminations.view(40, 5), ended | once_more)
        assert torch.equal(truncations.view(40, 5), cut)
        assert torch.equal(info["active"].view(40, 5), active)
        assert not (terminations.view(40, 5) & begins[:, None]).any()
        if mode == "same_step":
            mask = info["_final_obs"].view(40, 5)
            assert torch.equal(mask, gone | over[:, None])
            final, last = info["final_obs"].view(40, 5, -1), twin_info["final_obs"]
            assert equal_bits(final[over], last[over])
            left = gone & ~over[:, None]
            assert equal_bits(final[left], expected[left])  # what it sees as it leaves
        else:
            assert "final_obs" not in info
        if mode == "disabled" and over.any():
            mask = over.repeat_interleave(5)
            obs, _ = env.reset(options={"reset_mask": mask if device == "cuda" else mask.numpy()})
            expected, reset_info = twin.reset(mask=over)
            active = reset_info["active"]
    assert early > 20 and ends > 100


def test_roles_with_choices_of_their_own_have_rows_of_their_own():
    env = GymnasiumVectorEnv(Crew, 4, "cpu", output="numpy")
    assert env.single_action_space == MultiDiscrete([5, 3])
    assert env.action_space.nvec.tolist() == [[5, 1], [2, 3], [2, 3]] * 4
    assert env.single_observation_space == Box(-np.inf, np.inf, (4,), np.float32)
    obs, info = env.reset(seed=1)
    assert (obs.reshape(4, 3, 4)[:, 0, 2:] == 0).all() and (obs.reshape(4, 3, 4)[:, 1:] != 0).all()
    for _ in range(30):
        assert equal_bits(info["action_mask"], env.action_masks())
        *_, info = env.step(as_numpy(env.sample_actions()))
    assert env.vec_env.faults().sum() == 0
    forbidden = np.zeros((12, 2), np.int64)
    while info["action_mask"][0, 0]:
        *_, info = env.step(as_numpy(env.sample_actions()))
    with pytest.raises(InvalidActionError, match=r"driver_0, number 0: 0; .* allowed by info\['action_mask'\]"):
        env.step(forbidden)


def test_one_environment_has_the_masks_of_its_action_space():
    env = GymnasiumEnv(Crew)
    _, info = env.reset(seed=1)
    assert env.action_space.nvec.tolist() == [[5, 1], [2, 3], [2, 3]]
    for _ in range(5):
        driver, *helpers = info["action_mask"]
        expected = [*driver[:5], True, *(choice for mask in helpers for choice in [*mask[:2], *mask[5:8]])]
        masks = env.action_masks()
        assert masks.dtype == bool and masks.tolist() == [bool(choice) for choice in expected]
        heads = np.split(masks, np.cumsum(env.action_space.nvec.ravel())[:-1])
        _, _, ended, truncated, info = env.step(np.array([head.argmax() for head in heads]).reshape(3, 2))
        if ended or truncated:
            _, info = env.reset()


def test_only_games_with_masks_have_the_method():
    for env in (GymnasiumVectorEnv("cartpole", 2, "cpu"), GymnasiumEnv("cartpole"), GymnasiumEnv("tag_gridworld")):
        assert not hasattr(env, "action_masks")
        with pytest.raises(AttributeError, match="has no action masks: masks_actions is False"):
            env.action_masks()
    for env in (GymnasiumVectorEnv(Crew, 2, "cpu"), GymnasiumEnv(Crew)):
        assert hasattr(env, "action_masks")


@pytest.mark.parametrize("view", [lambda game: GymnasiumVectorEnv(game, 2, "cpu"), GymnasiumEnv])
def test_a_box_beside_choices_is_refused(view):
    message = r"Economy: the action spaces .* use gpu_vecenv\.parallel_env or gpu_vecenv\.batched_parallel_env"
    with pytest.raises(UnsupportedGameError, match=message):
        view(Economy)


def test_images_and_continuous_actions_pass_through(device):
    env = GymnasiumVectorEnv(Painter, 4, device)
    assert env.single_observation_space == Box(0, 255, (4, 5, 3), np.uint8)
    obs, _ = env.reset(seed=3)
    for _ in range(25):
        assert obs.dtype == torch.uint8 and env.observation_space.contains(as_numpy(obs))
        assert (obs[0, ..., 2].flatten() == torch.arange(20, device=device)).all()
        obs, *_ = env.step(env.action_space.sample())
    assert env.vec_env.faults().sum() == 0


# ---------------------------------------------------------------------- NumPy in and out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GAMES)
def test_the_numpy_view_is_equal(name, mode, device):
    torch_env, numpy_env = (
        vector(name, 7, device, autoreset_mode=mode, output=output) for output in ("torch", "numpy")
    )
    (obs, info), (array, array_info) = torch_env.reset(seed=9), numpy_env.reset(seed=9)
    assert isinstance(array, np.ndarray) and equal_bits(obs, array)
    for _ in range(30):
        actions = torch_env.sample_actions()
        *outputs, info = torch_env.step(actions)
        *arrays, array_info = numpy_env.step(as_numpy(actions))
        assert all(isinstance(a, np.ndarray) and equal_bits(a, b) for a, b in zip(arrays, outputs, strict=True))
        assert set(info) <= set(array_info)
        assert all(
            f"_{key}" in array_info for key in array_info if key[0] != "_"
        )  # Gymnasium's DictInfoToList needs it
        assert equal_bits(info["active"], array_info["active"])
        if mode == "same_step":
            mask = array_info["_final_obs"]
            assert equal_bits(info["_final_obs"], mask)
            assert equal_bits(as_numpy(info["final_obs"])[mask], array_info["final_obs"][mask])


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("name", UNMASKED)
def test_sampled_numpy_actions_are_accepted(name, output, device):
    env = vector(name, 5, device, output=output)
    env.reset(seed=2)
    for _ in range(10):
        env.step(env.action_space.sample())
    assert env.vec_env.faults().sum() == 0


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("name", ["cartpole", "tag_continuous"])
def test_rows_without_a_final_observation_hold_the_observation(name, output, device):
    """Never memory that no step has written; the rows that ended are those of the VecEnv."""
    config = {**SMALL.get(name, {}), "max_steps": 9}
    env = GymnasiumVectorEnv(name, 5, device, output=output, **config)
    twin = gpu_vecenv.make(name, 5, device, agents_as_envs=True, **config)
    env.reset(seed=2)
    twin.reset(seed=2)
    ended = 0
    for _ in range(40):
        actions = twin.sample_actions()
        obs, *_, info = env.step(as_numpy(actions) if output == "numpy" else actions)
        *_, expected = twin.step(actions)
        mask, final = as_numpy(info["_final_obs"]), as_numpy(info["final_obs"])
        assert equal_bits(final[~mask], as_numpy(obs)[~mask])
        assert equal_bits(final[mask], as_numpy(expected["final_obs"])[mask])
        ended += mask.sum()
    assert ended


def test_seeds_are_one_for_each_environment(device):
    seeds = [3, 2**64 - 1, 7]
    env = vector("cartpole", 3, device)
    obs, _ = env.reset(seed=seeds)
    alone = [vector("cartpole", 1, device) for _ in seeds]
    assert equal_bits(obs, torch.cat([one.reset(seed=seed)[0] for one, seed in zip(alone, seeds, strict=True)]))
    with pytest.raises(InvalidSeedError, match=r"shape \(15,\); expected one int, or one for each of the 3"):
        vector("tag_gridworld", 3, device).reset(seed=range(15))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_gymnasiums_autoreset_modes_are_taken_by_member_and_value(mode):
    for given in (mode, mode.value, mode.name.lower()):
        env = vector("cartpole", autoreset_mode=given)
        assert env.autoreset_mode is env.metadata["autoreset_mode"] is mode


def test_reset_options_move_the_masked_environments_for_one_reset(device):
    env = vector("cartpole", 4, device, max_episode_steps=3)
    before, _ = env.reset(seed=1)
    mask = torch.tensor([True, False, True, False], device=device)
    obs, _ = env.reset(options={"low": 0.1, "high": 0.15, "reset_mask": mask})
    assert (obs[mask] >= 0.1).all() and (obs[mask] <= 0.15).all() and equal_bits(obs[~mask], before[~mask])
    for _ in range(3):
        obs, *_ = env.step(env.sample_actions())
    assert (obs.abs() <= 0.05).all()  # the next episodes begin in the game's own range


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_earlier_outputs_never_change(output, device):
    env = vector("tag_continuous", 20, device, output=output)
    kept = [env.reset(seed=1)[0]]
    copies = [as_numpy(kept[0]).copy()]
    for _ in range(40):
        *outputs, info = env.step(env.sample_actions())
        tensors = [*outputs, *(value for value in info.values() if hasattr(value, "shape"))]
        kept += tensors
        copies += [as_numpy(tensor).copy() for tensor in tensors]
    assert all(equal_bits(now, then) for now, then in zip(kept, copies, strict=True))


def test_the_observation_is_the_memory_that_the_kernel_wrote(device):
    env = vector("tag_gridworld", 6, device)
    env.reset(seed=1)
    mine = torch.full((env.num_envs, 21), torch.nan, device=device)
    buffers = env.vec_env.step_buffers(obs=mine)
    obs, rewards, *_ = env.step(env.sample_actions(), out=buffers)
    assert obs.data_ptr() == mine.data_ptr() and rewards.data_ptr() == buffers.rewards.data_ptr()
    assert not mine.isnan().any()
    obs, *_ = env.step(env.sample_actions())  # without out, the kernel's own argument as well
    assert obs.data_ptr() == env.vec_env._kernels._step.fields.obs
    with pytest.raises(ValueError, match='output is "numpy"'):
        numpy_env = vector("tag_gridworld", 6, device, output="numpy")
        numpy_env.reset(seed=1)
        numpy_env.step(env.sample_actions(), out=buffers)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GAMES)
def test_no_step_waits_for_the_device(name):
    env = vector(name, 100, "cuda")
    env.reset(seed=1)
    actions = env.action_space.sample()
    with no_synchronisation():
        for _ in range(20):
            env.step(env.sample_actions())
            env.step(actions)  # NumPy goes to the device by way of pinned memory


# ---------------------------------------------------------------------- life cycle and bad input


def test_an_env_is_copied_by_its_arguments():
    env = vector("tag_continuous", 4, output="numpy", autoreset_mode="next_step")
    env.reset(seed=1)
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert repr(twin) == repr(env) and twin.spec.id == env.spec.id
        assert (twin.autoreset_mode, twin.output) == (env.autoreset_mode, "numpy")
        with pytest.raises(ResetNeededError):
            twin.step(env.action_space.sample())
        assert equal_bits(twin.reset(seed=5)[0], env.reset(seed=5)[0])
    single = pickle.loads(pickle.dumps(GymnasiumEnv("pendulum", max_steps=3)))
    assert single.game.max_steps == 3


def test_reset_masks_must_cover_whole_envs(device):
    env = vector("tag_gridworld", 3, device)
    options = {"reset_mask": np.ones(15, bool)}
    with pytest.raises(ResetNeededError):
        env.reset(options=options)
    env.reset(seed=1)
    env.step(env.sample_actions())
    before = env.vec_env.state_dict()
    part = np.zeros(15, bool)
    part[:7] = True
    for bad, error, text in [
        ({"reset_mask": part}, ValueError, "differs among the 5 rows of an environment"),
        ({"reset_mask": np.ones(3, bool)[:2]}, ValueError, "mask has shape"),
        ({"reset_mask": np.ones(15)}, TypeError, "mask is float64"),
        ({"reset_mask": [True] * 15}, TypeError, "mask is list"),
        ({"reset_masks": options["reset_mask"]}, ConfigError, "nearest: reset_mask"),
    ]:
        with pytest.raises(error, match=text):
            env.reset(options=bad)
    for seed in (-1, 2**64, 1.0, "1", True):
        with pytest.raises(InvalidSeedError):
            env.reset(seed=seed)
    assert all(torch.equal(before[key], value) for key, value in env.vec_env.state_dict().items())
    part[5:7] = False
    kept = {"reset_mask": part.copy()}
    env.reset(options=kept)
    assert list(kept) == ["reset_mask"] and (kept["reset_mask"] == part).all()
    assert env.vec_env.elapsed_steps.tolist() == [0, 1, 1]


def test_a_bad_numpy_action_is_refused_and_changes_nothing(device):
    env = vector("tag_gridworld", 3, device, output="numpy")
    with pytest.raises(ResetNeededError):
        env.step(np.zeros(15, np.int64))
    env.reset(seed=1)
    before = env.vec_env.state_dict()
    good = np.zeros(15, np.int64)
    bad = good.copy()
    bad[7] = 5
    with pytest.raises(InvalidActionError, match=r"environment 1, agent tagger_2.*5; expected 0 to 4$"):
        env.step(bad)
    for actions in (
        good + 0.5,
        good.astype(bool),
        good[:14],
        good.reshape(3, 5),
        good.astype(object),
    ):
        with pytest.raises((TypeError, ValueError)):
            env.step(actions)
    assert all(torch.equal(before[key], value) for key, value in env.vec_env.state_dict().items())
    env.step(good)
    env.close()
    env.close()
    with pytest.raises(ClosedEnvError):
        env.step(good)


def test_infos_may_be_written_to(device):
    env = GymnasiumVectorEnv(Crew, 2, device, output="numpy")
    _, info = env.reset(seed=1)
    info["active"][:] = False
    info["action_mask"][:] = True
    wrong = np.full((6, 2), 9, np.int64)
    with pytest.raises(InvalidActionError):
        env.step(wrong)
    single = GymnasiumEnv("tag_gridworld")
    _, info = single.reset(seed=1)
    info["active"][:] = False
    single.step(single.action_space.sample())


def test_a_loaded_state_is_what_the_next_action_is_checked_by(device):
    env = vector("tag_continuous", 4, device, output="numpy", autoreset_mode="disabled")
    env.reset(seed=1)
    begin = env.vec_env.state_dict()
    for _ in range(12):
        *_, info = env.step(as_numpy(env.sample_actions()))
    assert not info["active"].all()
    env.vec_env.load_state_dict(begin)
    wrong = as_numpy(env.sample_actions())
    wrong[np.flatnonzero(~info["active"])[0]] = 99  # of an agent that has left in the state before
    with pytest.raises(InvalidActionError):
        env.step(wrong)
    fresh = vector("tag_continuous", 4, device, output="numpy", autoreset_mode="disabled")
    fresh.vec_env.load_state_dict(begin)
    fresh.step(as_numpy(fresh.sample_actions()))


@pytest.mark.gpu
def test_a_default_device_changes_nothing():
    torch.set_default_device("cuda")
    try:
        for output in ("torch", "numpy"):
            env = vector("tag_gridworld", 3, "cuda", output=output)
            env.reset(seed=1)
            env.step(env.action_space.sample())
        single = GymnasiumEnv("cartpole")
        single.reset(seed=1)
        single.step(1)
    finally:
        torch.set_default_device(None)


def test_an_id_belongs_to_one_game():
    kind = type("Cartpole", (type(gpu_vecenv.configure("cartpole")),), {"__module__": __name__})
    with pytest.raises(EnvDefinitionError, match=r"id 'gpu_vecenv/CartPole-v1' of .* is already that of 'cartpole'"):
        gpu_vecenv.register(type("MyPole", (kind,), {"__module__": __name__, "title": "CartPole"}))
    assert "my_pole" not in GAMES


@pytest.mark.parametrize("action", [2**63, -(2**70)])
def test_an_action_beyond_64_bits_is_refused(action):
    env = GymnasiumEnv("cartpole")
    env.reset(seed=1)
    with pytest.raises(InvalidActionError, match=r"does not fit in 64 bits|9223372036854775808 is no choice"):
        env.step(action)


# ---------------------------------------------------------------------- our own checker


# What the rules of a game decide: of each version in one mode. What the views decide: of one game in each mode, and of
# one with turns and one with a Box. All of it in `make test-exhaustive`.
OF_RULES = ["K01", "K02", "K03", "K10", "K11"]
BY_MODE = {"same_step": ["connect_four"], "next_step": ["pendulum"]}
VERSIONS = [(name, config) for name, game in GAMES.items() for config in versions(game).values()]
CASES = [(i, name, config, mode) for i, (name, config) in enumerate(VERSIONS) for mode in MODES]
EVERY_VERSION = [
    pytest.param(name, config, mode, marks=[] if mode == MODES[i % len(MODES)] else pytest.mark.exhaustive)
    for i, name, config, mode in CASES
]
SOME_GAMES = [
    pytest.param(
        *(name, config, mode), marks=[] if name in BY_MODE.get(mode, ["tag_gridworld"]) else pytest.mark.exhaustive
    )
    for _, name, config, mode in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version", "mode"), EVERY_VERSION)
def test_every_version_passes_the_checks_of_its_rules(name, version, mode, device):
    assert_passed(name, version, mode, device, OF_RULES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version", "mode"), SOME_GAMES)
def test_views_of_a_game_pass_the_checks(name, version, mode, device):
    # K18, whether memory grows, takes as long as all others.
    assert_passed(name, version, mode, device, [k for k in CHECKS if k != "K18" or mode == "disabled"])


def assert_passed(name, version, mode, device, checks):
    config = {"max_steps": 20, **SMALL.get(name, {}), **version}
    limit = config.pop("max_steps")
    if name == "tag_gridworld":
        config["random_start"] = True  # else nothing in it is random
    if name == "overcooked":
        config |= {"layout_name": "counter_circuit_o_1order", "random_start_positions": True}  # 306 starts,
        config["random_object_probability"] = 0.5  # and far more with what lies there

    def make(num_envs):
        arguments = {"autoreset_mode": mode, "validate": "sync", "max_steps": limit, **config}
        return GymnasiumVectorEnv(name, num_envs, device, **arguments)

    report = gpu_vecenv.check_vector_env(make, checks=checks, steps=60, max_steps=limit)
    report.raise_for_failures()
    assert {f"K{k:02}" for k in range(1, 19)}.intersection(checks) <= set(report.passed)


@pytest.mark.gpu
@pytest.mark.parametrize("driver", working_drivers())
def test_drivers_unload_the_modules_of_closed_environments(driver):
    def make(num_envs):
        return GymnasiumVectorEnv("cartpole", num_envs, "cuda", driver=driver, max_steps=20)

    gpu_vecenv.check_vector_env(make, checks=["K18"], steps=60, max_steps=20).raise_for_failures()


# ---------------------------------------------------------------------- Gymnasium's own vector wrappers

DOCUMENT = Path(__file__).parents[2] / "docs" / "interfaces.md"
WRAPPERS = {  # constructor arguments
    "RecordEpisodeStatistics": {},
    "NormalizeReward": {},
    "ClipReward": {"min_reward": -1, "max_reward": 1},
    "NormalizeObservation": {},
    "FlattenObservation": {},
    "ReshapeObservation": {"shape": (3, 1)},
    "RescaleObservation": {"min_obs": -1.0, "max_obs": 1.0},
    "DtypeObservation": {"dtype": np.float64},
}


def wrapped(name: str, device: str, output: str):
    env = vector("pendulum", 4, device, autoreset_mode="next_step", output=output)
    return getattr(gymnasium_wrappers, name)(env, **WRAPPERS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRAPPERS)
def test_gymnasiums_numpy_wrappers_fail_on_tensors_as_documented(name):
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    kind, said = re.search(r"`(\w+Error): (.*?)(?: …)?`", row).groups()
    env = wrapped(name, "cuda", "torch")
    with pytest.raises(getattr(builtins, kind)) as caught:
        env.reset(seed=1)
        env.step(np.zeros((4, 1), np.float32))
    assert said.replace("'", "`") in str(caught.value).replace("'", "`").replace("\n", " ")


@pytest.mark.parametrize("name", ["RecordEpisodeStatistics", "NormalizeReward", "NormalizeObservation"])
def test_some_fail_on_cpu_tensors_too(name):
    env = wrapped(name, "cpu", "torch")
    with pytest.raises((TypeError, RuntimeError)):
        env.reset(seed=1)
        env.step(np.zeros((4, 1), np.float32))


@pytest.mark.parametrize("name", WRAPPERS)
def test_they_work_on_the_numpy_view(name, device):
    env = wrapped(name, device, "numpy")
    env.reset(seed=1)
    for _ in range(30):
        obs, *_ = env.step(env.action_space.sample())
    assert isinstance(obs, np.ndarray)


def test_those_that_pass_tensors_on_work(device):
    env = vector("cartpole", 4, device, autoreset_mode="next_step")
    env = gymnasium_wrappers.TransformReward(env, lambda rewards: 2 * rewards)
    env = gymnasium_wrappers.TransformObservation(env, lambda obs: obs + 1)
    env = gymnasium_wrappers.TransformAction(env, lambda actions: 1 - actions)
    obs, _ = env.reset(seed=1)
    obs, rewards, *_ = env.step(torch.zeros(4, dtype=torch.int64, device=device))
    assert obs.device.type == device and rewards.tolist() == [2] * 4


def test_gymnasiums_bridge_makes_numpy_of_tensors():
    from gymnasium.wrappers.vector import ArrayConversion

    env = ArrayConversion(vector("cartpole", 4, "cpu"), env_xp=torch, target_xp=np, env_device=torch.device("cpu"))
    obs, _ = env.reset(seed=1)
    assert isinstance(obs, np.ndarray)


def test_arguments_for_several_environments_are_refused_by_a_single_one():
    with pytest.raises(TypeError, match=r"num_envs is given, but a GymnasiumEnv is one environment; .*make_vec"):
        gymnasium.make("gpu_vecenv/CartPole-v1", num_envs=4)
    with pytest.raises(ConfigError, match="agents_as_envs"):
        gymnasium.make("gpu_vecenv/CartPole-v1", agents_as_envs=True)
