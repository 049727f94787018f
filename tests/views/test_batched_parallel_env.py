"""Dictionaries of environments: they are VecEnv's tensors, looked at agent by agent or role by role."""

import copy
import pickle

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from games.scouts import Scouts
from gymnasium.error import UnsupportedMode
from gymnasium.spaces import Box, Discrete
from support.bitwise import equal_bits
from torch.utils._python_dispatch import TorchDispatchMode

import gpu_vecenv
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import (
    AgentKeyError,
    ClosedEnvError,
    ConfigError,
    InvalidActionError,
    InvalidSeedError,
    ResetNeededError,
)
from gpu_vecenv.views.agents import joint_obs
from gpu_vecenv.views.batched_env import BatchedParallelEnv, batched_parallel_env

MULTI = [name for name, game in GAMES.items() if game().num_agents > 1]
# Few agents, so that they leave early and environments end often.
TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
NEAR = {"num_rates": 3, "mobile_agent_observation_range": 1}
SMALL = {
    "tag_continuous": TAG,
    "tag_gridworld": {"grid": 4, "max_steps": 7, "random_start": True},
    # No column is full before the end: random actions need no mask.
    "harvest": {"layout_name": "small", "num_agents": 3, "max_steps": 12},
    "cleanup": {"layout_name": "small", "num_agents": 3, "max_steps": 12},
    "economy": {"num_workers": 2, "grid": "S.W\n...", "max_bid_ask": 2, "period": 4, "max_steps": 12, **NEAR},
    "connect_four": {"num_rows": 16, "opening_moves": 4, "max_steps": 12},
}
CONTINUOUS = [name for name in MULTI if "continuous_actions" in GAMES[name].__dataclass_fields__]
EVERY = [
    *((name, SMALL.get(name, {})) for name in MULTI),
    *((name, {"continuous_actions": True}) for name in CONTINUOUS),
    (Crew, {"num_helpers": 3}),
    (Scouts, {}),
    (Scouts, {"num_scouts": 0}),
    (Painter, {}),
    (Economy, {}),
    (Race, {}),
    (Sacrifice, {"num_units": 3, "max_steps": 6}),
]
GROUPS, MODES = ("agent", "role"), ("same_step", "next_step", "disabled")


def each(cases):
    names = [f"{game if isinstance(game, str) else game.name()}-{len(config)}" for game, config in cases]
    return pytest.mark.parametrize(("game", "config"), cases, ids=names)


def places(game, group_by) -> dict:
    """Key -> role, and which agents: a number, or a range."""
    roles = {role: where for role, where in game.layout.role_slices.items() if where.start < where.stop}
    if group_by == "role":
        return {role: (role, where) for role, where in roles.items()}
    return {f"{role}_{i}": (role, where.start + i) for role, where in roles.items() for i in range(game.roles[role])}


def is_view(view, tensor, where, own=()) -> bool:
    """The same elements of the same memory."""
    expected = tensor[(slice(None), where)][(..., *own)]
    same_place = view.data_ptr() == expected.data_ptr() and view.stride() == expected.stride()
    return same_place and view.shape == expected.shape and view.dtype == expected.dtype


def own_actions(game, actions, group_by) -> dict:
    """A whole action tensor, taken apart."""
    parts = {}
    for key, (role, where) in places(game, group_by).items():
        part = actions[:, where]
        parts[key] = part[..., : len(game.layout.action.sizes[role])] if game.layout.action.shape else part
    return parts


class Recorded(TorchDispatchMode):
    """Names of the operations that torch runs: views apart, and the memory that they write into."""

    def __init__(self):
        super().__init__()
        self.views, self.others = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        (self.views if function.is_view or name == "empty" else self.others).append(name)
        return function(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("group_by", GROUPS)
@pytest.mark.parametrize("mode", MODES)
@each(EVERY)
def test_every_value_is_a_view_of_the_step_buffers(game, config, mode, group_by, device):
    env = batched_parallel_env(game, 5, device, group_by=group_by, autoreset_mode=mode, **config)
    twin = gpu_vecenv.make(game, 5, device, autoreset_mode=mode, **config)
    where, layout = places(env.game, group_by), env.game.layout.observation
    assert env.possible_agents == env.agents == list(where)

    def check(buffers, obs, extras, info):
        assert list(obs) == list(extras["active"]) == list(where)
        assert set(extras) == set(info)
        for key, (role, agents) in where.items():
            assert is_view(obs[key], buffers.obs, agents, layout.own(role))
            assert is_view(extras["active"][key], buffers.active, agents)
            if "final_obs" in info:
                assert is_view(extras["final_obs"][key], buffers.final_obs, agents, layout.own(role))
                assert is_view(extras["_final_obs"][key], buffers.final_mask, agents)
        assert all(equal_bits(getattr(buffers, "final_mask" if name == "_final_obs" else name), tensor)
                   for name, tensor in info.items() if name != "final_obs")  # fmt: skip

    buffers = env.vec_env.step_buffers()
    obs, extras = env.reset(seed=6, out=buffers)
    expected, info = twin.reset(seed=6)
    check(buffers, obs, extras, info)
    assert equal_bits(buffers.obs, expected)
    for step in range(30):
        actions = twin.sample_actions()
        buffers = env.vec_env.step_buffers()
        given = actions if step % 2 else own_actions(env.game, actions, group_by)
        obs, *outputs, extras = env.step(given, out=buffers)
        expected, *results, info = twin.step(actions)
        check(buffers, obs, extras, info)
        assert equal_bits(buffers.obs, expected)
        if "final_obs" in info:
            assert equal_bits(buffers.final_obs[buffers.final_mask], info["final_obs"][info["_final_obs"]])
        for values, tensor, name in zip(outputs, results, ("rewards", "terminations", "truncations"), strict=True):
            assert list(values) == list(where)
            assert all(is_view(values[key], getattr(buffers, name), agents) for key, (_, agents) in where.items())
            assert equal_bits(getattr(buffers, name), tensor)
        if mode == "disabled" and (over := ~info["active"].any(1)).any():
            obs, extras = env.reset(options={"reset_mask": over})
            expected, info = twin.reset(mask=over)
            assert all(equal_bits(obs[key], expected[:, agents][(..., *layout.own(role))])
                       for key, (role, agents) in where.items())  # fmt: skip
    assert env.vec_env.faults().tolist() == twin.faults().tolist() == [0] * 5


@pytest.mark.parametrize("group_by", GROUPS)
@each(EVERY)
def test_with_rows_values_are_views_of_the_rows(game, config, group_by, device):
    env = batched_parallel_env(game, 5, device, group_by=group_by, agents_as_envs=True, **config)
    twin = gpu_vecenv.make(game, 5, device, agents_as_envs=True, **config)
    where, layout, batch = places(env.game, group_by), env.game.layout.observation, (5, env.game.num_agents)
    obs, _ = env.reset(seed=6)
    expected, _ = twin.reset(seed=6)
    left_early = 0
    for step in range(30):
        for key, (role, agents) in where.items():
            assert equal_bits(obs[key], expected.unflatten(0, batch)[:, agents][(..., *layout.own(role))])
        actions = twin.sample_actions()
        given = actions if step % 2 else own_actions(env.game, actions.unflatten(0, batch), group_by)
        buffers = env.vec_env.step_buffers()
        obs, *outputs, extras = env.step(given, out=buffers)
        expected, *results, info = twin.step(actions)
        written = [buffers.rewards, buffers.terminations, buffers.truncations]
        for values, tensor, result in zip(outputs, written, results, strict=True):
            assert all(is_view(values[key], tensor.unflatten(0, batch), agents) for key, (_, agents) in where.items())
            assert equal_bits(tensor, result)
        for key, (role, agents) in where.items():
            assert is_view(extras["final_obs"][key], buffers.final_obs.unflatten(0, batch), agents, layout.own(role))
        assert equal_bits(buffers.final_obs[buffers.final_mask], info["final_obs"][info["_final_obs"]])
        over = info["_final_obs"].unflatten(0, batch)
        left_early += int((over.any(1) != over.all(1)).sum())
        assert equal_bits(env.state(), joint_obs(env.game, expected.unflatten(0, batch)))
    assert left_early or game not in (Crew, Scouts, "tag_continuous") or config.get("num_scouts") == 0
    assert env.vec_env.faults().tolist() == [0] * 5


def test_values_have_the_shapes_of_directmarlenv(device):
    env = batched_parallel_env(Scouts, 4, device)
    obs, extras = env.reset(seed=1)
    assert {key: tuple(value.shape) for key, value in obs.items()} == {
        "scout_0": (4, 1, 2, 3),
        "scout_1": (4, 1, 2, 3),
        "pilot_0": (4, 2, 3, 3),
    }
    obs, rewards, terminated, time_out, extras = env.step(env.sample_actions())
    for values, dtype in ((rewards, torch.float32), (terminated, torch.bool), (time_out, torch.bool)):
        assert {(tuple(value.shape), value.dtype) for value in values.values()} == {((4,), dtype)}
    assert set(extras) == {"active", "fault", "action_mask", "final_obs", "_final_obs"}
    env = batched_parallel_env(Scouts, 4, device, group_by="role")
    obs, extras = env.reset(seed=1)
    assert obs["scout"].shape == (4, 2, 1, 2, 3) and obs["pilot"].shape == (4, 1, 2, 3, 3)
    assert env.step(env.sample_actions())[1]["scout"].shape == (4, 2)


@pytest.mark.parametrize("group_by", GROUPS)
@pytest.mark.parametrize("game", [Crew, Scouts])
def test_masks_are_views_of_each_roles_own_choices(game, group_by, device):
    env = batched_parallel_env(game, 6, device, group_by=group_by)
    buffers = env.vec_env.step_buffers()
    _, extras = env.reset(seed=2, out=buffers)
    heads = {"driver": [(0, 5)], "helper": [(0, 2), (5, 3)], "scout": [(0, 2)], "pilot": [(0, 4)]}
    for key, (role, agents) in places(env.game, group_by).items():
        masks = extras["action_mask"][key]
        assert isinstance(masks, tuple) == (game is Crew)
        masks = masks if game is Crew else (masks,)
        for mask, (first, count) in zip(masks, heads[role], strict=True):
            assert is_view(mask, buffers.action_mask, agents, (slice(first, first + count),))
            assert not mask.all() or role == "helper"


@pytest.mark.parametrize("group_by", GROUPS)
@each([("tag_gridworld", SMALL["tag_gridworld"]), ("simple_tag", {}), (Crew, {}), (Scouts, {})])
def test_the_state_is_all_observations_one_after_the_other(game, config, group_by, device):
    env = batched_parallel_env(game, 3, device, group_by=group_by, **config)
    obs, _ = env.reset(seed=1)
    for _ in range(3):
        state = env.state()
        assert equal_bits(state, torch.cat([value.flatten(1) for value in obs.values()], 1))
        assert all(env.state_space.contains(row) for row in state.cpu().numpy())
        if game == "tag_gridworld":
            assert state.untyped_storage().data_ptr() == next(iter(obs.values())).untyped_storage().data_ptr()
        obs, *_ = env.step(env.sample_actions())
    own = [env.game.layout.observation.spaces[role] for role, n in env.game.roles.items() for _ in range(n)]
    assert np.array_equal(env.state_space.low, np.concatenate([space.low.ravel() for space in own]))
    assert np.array_equal(env.state_space.high, np.concatenate([space.high.ravel() for space in own]))


def test_earlier_outputs_stay_as_they_were(device):
    env = batched_parallel_env("tag_continuous", 3, device, **TAG)
    kept = []
    for step in range(8):
        dictionaries = env.step(env.sample_actions())[:4] if step else env.reset(seed=1)[:1]
        kept += [(value, value.clone()) for values in dictionaries for value in values.values()]
    assert all(equal_bits(value, copied) for value, copied in kept)


# ---------------------------------------------------------------------- what goes in


@pytest.mark.parametrize("group_by", GROUPS)
@each([("tag_continuous", TAG), ("tag_gridworld", {}), ("simple_spread", {"continuous_actions": True}), (Scouts, {})])
def test_a_step_copies_nothing_but_a_dictionary_of_actions_once(game, config, group_by, device):
    env = batched_parallel_env(game, 4, device, group_by=group_by, **config)
    env.reset(seed=1)
    for taken_apart in (False, True):
        whole = env.sample_actions()
        actions = own_actions(env.game, whole, group_by) if taken_apart else whole
        with Recorded() as recorded:
            env.step(actions)
        joined = taken_apart and len(env.agents) > 1
        assert recorded.views and recorded.others == ["cat"] * joined


def test_heads_that_a_role_lacks_are_added(device):
    env = batched_parallel_env(Crew, 4, device, group_by="role")
    env.reset(seed=1)
    actions = own_actions(env.game, env.sample_actions(), "role")
    assert actions["driver"].shape == (4, 1, 1) and actions["helper"].shape == (4, 2, 2)
    with Recorded() as recorded:
        env.step(actions)
    assert recorded.others.count("cat") == 1 and "_local_scalar_dense" not in recorded.others
    assert env.vec_env.faults().tolist() == [0] * 4


@pytest.mark.parametrize("kinds", [(torch.int64,), (torch.int32,), (torch.int32, torch.int64)])
def test_actions_are_int32_or_int64_and_may_be_strided(kinds, device):
    env, twin = (batched_parallel_env("tag_continuous", 4, device, **TAG) for _ in range(2))
    for each_env in (env, twin):
        each_env.reset(seed=1)
    for _ in range(5):
        whole = env.sample_actions()
        parts = own_actions(env.game, whole, "agent")
        assert not all(part.is_contiguous() for part in parts.values())
        given = {key: part.to(kinds[i % len(kinds)]) for i, (key, part) in enumerate(parts.items())}
        ours, theirs = env.step(dict(reversed(given.items()))), twin.step(whole)
        assert all(equal_bits(ours[k][key], theirs[k][key]) for k in range(4) for key in ours[k])


@pytest.mark.parametrize("group_by", GROUPS)
def test_discrete_actions_may_have_a_last_axis_of_one(group_by, device):
    env, twin = (batched_parallel_env("tag_gridworld", 4, device, group_by=group_by) for _ in range(2))
    for each_env in (env, twin):
        each_env.reset(seed=1)
    whole = env.sample_actions()
    ours = env.step({key: part[..., None] for key, part in own_actions(env.game, whole, group_by).items()})
    assert all(equal_bits(ours[0][key], value) for key, value in twin.step(whole)[0].items())


def good(env) -> dict:
    return own_actions(env.game, torch.ones(3, 5, dtype=torch.int64), env.group_by)


BAD_ACTIONS = [
    ("agent", lambda a: None, TypeError, "a NoneType; expected a dict"),
    ("agent", lambda a: list(a.values()), TypeError, "a list; expected a dict"),
    ("agent", lambda a: {}, AgentKeyError, "no action for tagger_0, .* each of: tagger_0, .*runner_0$"),
    ("agent", lambda a: {**a, "tagger_4": a["runner_0"]}, AgentKeyError, "an action for an unknown agent: tagger_4"),
    ("role", lambda a: {"tagger": a["tagger"]}, AgentKeyError, r"no action for runner\. .* each of: tagger, runner$"),
    ("agent", lambda a: {**a, "runner_0": 1}, ValueError, r"runner_0's actions have shape \(\); expected \(3,\)"),
    ("agent", lambda a: {**a, "runner_0": np.full(3, 0.5)}, InvalidActionError, "runner_0's actions: 0.5 is no choice"),
    ("agent", lambda a: {**a, "runner_0": torch.full((3,), 0.5)}, InvalidActionError, "agent runner_0, number 0: -1"),
    ("agent", lambda a: {**a, "runner_0": torch.ones(3).bool()}, TypeError, "runner_0's actions have dtype torch.bool"),
    ("agent", lambda a: {**a, "runner_0": torch.tensor(1)}, ValueError, r"shape \(\); expected \(3,\)"),
    ("agent", lambda a: {**a, "runner_0": a["runner_0"][:1]}, ValueError, r"shape \(1,\); expected \(3,\)"),
    ("agent", lambda a: {**a, "runner_0": torch.ones(3, 2).long()}, ValueError, r"\(3, 2\); expected \(3,\)"),
    ("role", lambda a: {**a, "tagger": a["tagger"].T}, ValueError, r"tagger's .* \(4, 3\); expected \(3, 4\)"),
    ("agent", lambda a: {**a, "runner_0": a["runner_0"].to("meta")}, ValueError, "are on meta; expected cpu"),
    ("agent", lambda a: torch.ones(3, 5).bool(), TypeError, "actions have dtype torch.bool"),
    ("agent", lambda a: torch.ones(3, 4).long(), ValueError, r"shape \(3, 4\); expected \(3, 5\)"),
    ("agent", lambda a: {**a, "tagger_1": a["tagger_1"] + 4}, InvalidActionError, "agent tagger_1, number 0: 5"),
]


@pytest.mark.parametrize(("group_by", "spoil", "error", "message"), BAD_ACTIONS)
def test_bad_actions_are_refused_and_change_nothing(group_by, spoil, error, message):
    env = batched_parallel_env("tag_gridworld", 3, "cpu", group_by=group_by, validate="sync")
    env.reset(seed=1)
    env.step(good(env))
    before, state = env.vec_env.state_dict(), env.state()
    with pytest.raises(error, match=message):
        env.step(spoil(good(env)))
    assert all(equal_bits(tensor, before[name]) for name, tensor in env.vec_env.state_dict().items())
    assert env.state() is not state and equal_bits(env.state(), state)


def test_actions_that_require_a_gradient_are_refused():
    env = batched_parallel_env(Painter, 3, "cpu")
    env.reset(seed=1)
    with pytest.raises(TypeError, match="with requires_grad"):
        env.step({"agent_0": torch.zeros(3, 2, requires_grad=True)})


# ---------------------------------------------------------------------- reset, spaces, arguments


def test_a_mask_resets_some_envs(device):
    env, twin = (batched_parallel_env("tag_continuous", 4, device, **TAG) for _ in range(2))
    for each_env in (env, twin):
        each_env.reset(seed=3)
        each_env.step(each_env.sample_actions())
    before = env.vec_env.state_dict()
    mask = torch.tensor([True, False, True, False], device=device)
    obs, _ = env.reset(seed=9, options={"reset_mask": mask})
    expected, _ = twin.vec_env.reset(seed=9, mask=mask)
    assert all(equal_bits(obs[key], expected[:, i]) for i, key in enumerate(env.agents))
    assert env.episode_length_buf.tolist() == [0, 1, 0, 1]
    assert equal_bits(env.vec_env.state_dict()["state_position"][1::2], before["state_position"][1::2])
    obs, _ = env.reset(options={"reset_mask": np.array([False] * 4)})
    assert env.episode_length_buf.tolist() == [0, 1, 0, 1]
    assert all(equal_bits(obs[key], expected[:, i]) for i, key in enumerate(env.agents))


def test_bad_resets_are_refused_and_change_nothing():
    env = batched_parallel_env("tag_gridworld", 3, "cpu", random_start=True)
    with pytest.raises(ResetNeededError):
        env.reset(options={"reset_mask": torch.ones(3, dtype=torch.bool)})
    env.reset(seed=1)
    before = env.vec_env.state_dict()
    for options, error, message in (
        ({"reset_mask": torch.ones(2, dtype=torch.bool)}, ValueError, r"shape \(2,\); expected \(3,\)"),
        ({"reset_mask": torch.ones(3)}, TypeError, "expected bool"),
        ({"mask": None}, ConfigError, r"options has \['mask'\]; nearest: reset_mask"),
    ):
        with pytest.raises(error, match=message):
            env.reset(seed=5, options=options)
    for seed in (-1, 2**64, 1.5, "7", True):
        with pytest.raises(InvalidSeedError, match="seed"):
            env.reset(seed=seed)
    with pytest.raises(ValueError, match="expected StepBuffers"):
        env.reset(out=batched_parallel_env("tag_gridworld", 4, "cpu").vec_env.step_buffers())
    assert all(equal_bits(tensor, before[name]) for name, tensor in env.vec_env.state_dict().items())


def test_before_reset_and_after_close_nothing_works():
    env = batched_parallel_env("tag_gridworld", 3, "cpu")
    for method, arguments in ((env.step, ({},)), (env.step, (torch.ones(3, 5).int(),)), (env.state, ())):
        with pytest.raises(ResetNeededError, match=r"call reset\(\)"):
            method(*arguments)
    twin = batched_parallel_env("tag_gridworld", 3, "cpu")
    twin.reset(seed=1)
    env.vec_env.load_state_dict(twin.vec_env.state_dict())
    assert equal_bits(env.state(), twin.state())
    assert equal_bits(env.step(good(env))[0]["runner_0"], twin.step(good(twin))[0]["runner_0"])
    assert equal_bits(env.state(), twin.state())
    env.close()
    env.close()
    for method, arguments in ((env.step, ({},)), (env.reset, ()), (env.state, ()), (env.sample_actions, ())):
        with pytest.raises(ClosedEnvError):
            method(*arguments)


def test_the_state_is_that_of_a_loaded_state(device):
    env = batched_parallel_env("cartpole", 3, device)
    env.reset(seed=1)
    saved, state = env.vec_env.state_dict(), env.state().clone()
    for _ in range(3):
        env.step(env.sample_actions())
    assert not equal_bits(env.state(), state)
    env.vec_env.load_state_dict(saved)
    assert equal_bits(env.state(), state)


@pytest.mark.filterwarnings("error")
def test_actions_may_be_read_only_arrays(device):
    env, twin = (batched_parallel_env("tag_gridworld", 3, device) for _ in range(2))
    actions = {agent: np.array([1, 2, 3]) for agent in env.possible_agents}
    for each in actions.values():
        each.flags.writeable = False
    for one in (env, twin):
        one.reset(seed=1)
    assert equal_bits(
        env.step(actions)[0]["runner_0"], twin.step({k: x.copy() for k, x in actions.items()})[0]["runner_0"]
    )


@pytest.mark.parametrize("group_by", GROUPS)
def test_spaces_are_those_of_one_agent_of_the_role(group_by):
    env = batched_parallel_env(Scouts, 4, "cpu", group_by=group_by)
    first, last = ("scout", "pilot") if group_by == "role" else ("scout_0", "pilot_0")
    assert env.observation_spaces[first] == Box(0, 255, (1, 2, 3), np.uint8)
    assert env.observation_spaces[last] == Box(0, 255, (2, 3, 3), np.uint8)
    assert (env.action_spaces[first], env.action_spaces[last]) == (Discrete(2), Discrete(4))
    assert list(env.observation_spaces) == list(env.action_spaces) == env.possible_agents
    assert env.observation_space(last) is env.observation_spaces[last]
    assert env.action_space(last) is env.action_spaces[last]
    assert env.state_space.shape == (6 + 6 + 18,)
    with pytest.raises(AgentKeyError, match="no agent 'scuot'; nearest: scout"):
        env.action_space("scuot")
    env.action_space(first).seed(1)
    assert env.game.layout.action.spaces["scout"] is not env.action_space(first)


def test_attributes_are_those_of_directmarlenv(device):
    env = batched_parallel_env("tag_continuous", 6, device, max_cycles=9)
    assert env.unwrapped is env
    assert env.device == torch.device(env.vec_env.device) and env.device.type == device
    assert (env.num_envs, env.num_agents, env.max_num_agents, env.max_episode_length) == (6, 110, 110, 9)
    assert env.metadata["name"] == "tag_continuous_v1"
    assert env.render_mode is None and env.render() is None
    assert not isinstance(env, gpu_vecenv.Env) and "PettingZoo" not in str(type(env).__mro__)
    env.reset(seed=1)
    for step in range(12):
        assert env.episode_length_buf.tolist() == [step % 9] * 6
        env.step(env.sample_actions())
    assert repr(env).startswith("BatchedParallelEnv(TagContinuous(") and "group_by='agent'" in repr(env)


def test_frames_are_drawn_of_every_env():
    pytest.importorskip("pygame", reason="frames are drawn by pygame")
    env = batched_parallel_env("tag_gridworld", 3, "cpu", render_mode="rgb_array")
    env.reset(seed=1)
    frames = env.render()
    assert len(frames) == 3 and frames[2].dtype == np.uint8


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match='group_by is \'team\'; expected "agent" or "role"'):
        batched_parallel_env("tag_gridworld", 3, "cpu", group_by="team")
    with pytest.raises(ValueError, match="autoreset_mode is 'never'"):
        batched_parallel_env("tag_gridworld", 3, "cpu", autoreset_mode="never")
    with pytest.raises(ValueError, match="num_envs is 0"):
        batched_parallel_env("tag_gridworld", 0, "cpu")
    with pytest.raises(ConfigError, match="max_cycles is 3 and max_steps is 4"):
        batched_parallel_env("tag_gridworld", 3, "cpu", max_cycles=3, max_steps=4)
    with pytest.raises(TypeError, match="agents_as_envs is 1"):
        batched_parallel_env("tag_gridworld", 3, "cpu", agents_as_envs=1)
    with pytest.raises(UnsupportedMode, match="render_mode is 'nothing'"):
        batched_parallel_env("tag_gridworld", 3, "cpu", render_mode="nothing")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_is_made_with_the_same_arguments(copied, device):
    env = batched_parallel_env(Scouts, 3, device, group_by="role", autoreset_mode="next_step", max_cycles=4)
    env.reset(seed=5)
    twin = copied(env)
    assert type(twin) is BatchedParallelEnv and twin.vec_env is not env.vec_env
    assert (twin.game, twin.group_by, twin.vec_env.autoreset_mode) == (env.game, "role", "next_step")
    for ours, theirs in ((env.reset(seed=5), twin.reset(seed=5)), (env.step(env.sample_actions()),) * 2):
        assert all(equal_bits(ours[0][key], theirs[0][key]) for key in ours[0])
