"""The PettingZoo views of one env: PettingZoo's own tests, and equality with VecEnv, whatever roles a game has."""

import copy
import pickle
import warnings
from types import ModuleType

import cloudpickle
import numpy as np
import pettingzoo
import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from games.scouts import Scouts
from gymnasium.error import UnsupportedMode
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from pettingzoo.test import api_test, max_cycles_test, parallel_api_test, parallel_seed_test, render_test, seed_test
from pettingzoo.test.state_test import state_test
from pettingzoo.utils.conversions import aec_to_parallel, parallel_to_aec, turn_based_aec_to_parallel
from pettingzoo.utils.env_logger import EnvLogger
from pettingzoo.utils.wrappers import MultiEpisodeEnv, MultiEpisodeParallelEnv, TerminateIllegalWrapper
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import (
    AgentKeyError,
    ClosedEnvError,
    ConfigError,
    InvalidActionError,
    InvalidSeedError,
    PettingZooResetNeededError,
    ResetNeededError,
    UnknownGameError,
    UnknownModuleError,
)
from gpu_vecenv.views import pettingzoo_env
from gpu_vecenv.views.frames import render_metadata
from gpu_vecenv.views.pettingzoo_env import ParallelEnv, aec_env, parallel_env

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
FREE = [name for name in MULTI if not GAMES[name].masks_actions]  # PettingZoo's tests of parallel envs know no masks
UNMASKED = [
    *((name, SMALL.get(name, {})) for name in MULTI if name in FREE or name == "connect_four"),
    *((name, {}) for name in SMALL if name in FREE),
    ("tag_continuous", {**TAG, "egocentric": False}),
    *((name, {"continuous_actions": True}) for name in CONTINUOUS),
    (Race, {}),
    (Sacrifice, {"num_units": 3, "max_steps": 6}),
]
MASKED = [
    ("connect_four", {}),
    ("skirmish", {"scenario": "3m", "max_steps": 12}),
    (Crew, {"num_helpers": 3}),
    (Scouts, {}),
    (Scouts, {"num_scouts": 0}),
    (Economy, {}),
]
EVERY = [*UNMASKED, *MASKED, (Painter, {})]
OUTPUTS = ("torch", "numpy")


def each(cases):
    names = [f"{game if isinstance(game, str) else game.name()}-{len(config)}" for game, config in cases]
    return pytest.mark.parametrize(("game", "config"), cases, ids=names)


def as_numpy(value):
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def sample_mask(mask):
    """A mask as Gymnasium's spaces take it."""
    if mask is None or isinstance(mask, np.ndarray):
        return mask
    return tuple(map(sample_mask, mask)) if isinstance(mask, tuple) else mask.cpu().numpy().astype(np.int8)


def samples(env: ParallelEnv, infos) -> dict:
    """A valid action for each live agent, drawn by PettingZoo's means."""
    masks = {agent: sample_mask(infos[agent].get("action_mask")) for agent in env.agents}
    return {agent: env.action_space(agent).sample(mask) for agent, mask in masks.items()}


def seed_actions(env: ParallelEnv, seed: int) -> None:
    for i, agent in enumerate(env.possible_agents):
        env.action_space(agent).seed(seed + i)


def rollout(env: ParallelEnv, steps: int = 30, seed: int = 3, reseed: int | None = 4) -> list:
    """Everything that resets and steps return, over several episodes; only the first is seeded."""
    if reseed is not None:
        seed_actions(env, reseed)
    seen = [env.reset(seed=seed)]
    infos = seen[0][1]
    for _ in range(steps):
        actions = samples(env, infos)
        seen.append((actions, *env.step(actions)))
        infos = seen[-1][-1]
        if not env.agents:
            seen.append(env.reset())
            infos = seen[-1][1]
    return seen


def equal(a, b) -> bool:
    """Bit by bit, through dictionaries and tuples; numbers and flags of the same type."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and equal_bits(a, b)


def twin_actions(env, actions) -> torch.Tensor:
    """The same actions as VecEnv takes them; of agents and heads that are not there, nonsense."""
    action = env.game.layout.action
    whole = np.full((1, env.num_agents, action.heads), 99, np.int64 if action.discrete else np.float32)
    for agent, given in actions.items():
        values = np.ravel(given)
        whole[0, env.game.layout.agent_names.index(agent), : len(values)] = values
    return torch.from_numpy(whole).view(1, env.num_agents, *action.shape).to(env.device)


def digest(env: ParallelEnv) -> list[bytes]:
    return [as_numpy(tensor).tobytes() for tensor in env.vec_env.state_dict().values()]


# ---------------------------------------------------------------------- PettingZoo's own tests

ADVICE = (
    # Positions are unbounded, and so are the spaces of what is seen of them.
    ".*(observation|state) space value is (-?infinity|infinity).*",
    # Two numbers, acceleration and turn, are a MultiDiscrete.
    "Action space for each agent probably should be gymnasium.spaces.box or gymnasium.spaces.discrete",
    # A runner that was tagged sees nothing, nor do players of an empty board.
    "(Observation|State) numpy array is all zeros.",
    # Roles see and do what is theirs.
    "Agents have different observation space sizes",
    "Observations are different shapes",
)


@pytest.fixture
def strict():
    """Warnings are errors, but for advice on what the games are."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in ADVICE:
            warnings.filterwarnings("ignore", message=message)
        yield


@pytest.mark.usefixtures("strict")
class TestPettingZoosTests:
    @pytest.mark.parametrize("output", OUTPUTS)
    @each(UNMASKED)
    def test_parallel_api(self, game, config, output, device):
        parallel_api_test(parallel_env(game, device, output=output, **config), 60)

    @each(UNMASKED)
    def test_parallel_seed(self, game, config):
        parallel_seed_test(lambda: parallel_env(game, "cpu", output="numpy", **config), 60)

    @each(EVERY)
    def test_api(self, game, config):
        api_test(aec_env(game, **config), 60)

    @each(EVERY)
    def test_api_of_the_plain_conversion(self, game, config):
        api_test(parallel_to_aec(parallel_env(game, "cpu", output="numpy", **config)), 30)

    @pytest.mark.parametrize("name", FREE)
    def test_conversions(self, name):
        module = getattr(pettingzoo_env, f"{name}_v{GAMES[name].version}")
        config = SMALL.get(name, {})
        for make in (module.env, module.raw_env):
            parallel_api_test(aec_to_parallel(make(**config)), 30)
            parallel_seed_test(lambda make=make: aec_to_parallel(make(**config)), 30)
            api_test(parallel_to_aec(aec_to_parallel(make(**config))), 30)
        parallel_api_test(turn_based_aec_to_parallel(module.env(**config)), 30)

    @each(EVERY)
    def test_seed(self, game, config):
        seed_test(lambda: aec_env(game, **config), 60)

    @each(UNMASKED)
    def test_state(self, game, config):
        state_test(aec_env(game, **config), parallel_env(game, "cpu", output="numpy", **config), 5)

    @pytest.mark.parametrize("name", FREE)
    def test_max_cycles(self, name):
        max_cycles_test(getattr(pettingzoo_env, f"{name}_v{GAMES[name].version}"))

    @pytest.mark.parametrize("name", FREE)
    def test_render(self, name):
        if not render_metadata(GAMES[name]())["render_modes"]:
            pytest.skip(f"{name} is not drawn")
        module = getattr(pettingzoo_env, f"{name}_v{GAMES[name].version}")
        # The test first asks an environment in "human" mode for its modes, whether there is such a mode or not.
        render_test(lambda render_mode: module.env(render_mode=None if render_mode == "human" else render_mode))


# ---------------------------------------------------------------------- one environment of VecEnv


@pytest.mark.parametrize("output", OUTPUTS)
@each(EVERY)
def test_outputs_equal_those_of_vec_env(game, config, output, device):
    env = parallel_env(game, device, output=output, **config)
    twin = gpu_vecenv.make(game, 1, device, autoreset_mode="disabled", **config)
    layout, names = twin.game.layout.observation, list(twin.game.layout.agent_names)
    roles = [role for role, count in twin.game.roles.items() for _ in range(count)]
    seed_actions(env, 0)
    episodes, early = 0, 0
    observations, infos = env.reset(seed=2**63 + 5)
    obs, info = twin.reset(seed=2**63 + 5)
    keys = names
    for _ in range(40):
        assert list(observations) == list(infos) == keys
        for agent in keys:
            i = names.index(agent)
            assert equal_bits(observations[agent], obs[0, i][layout.own(roles[i])])
            assert env.observation_space(agent).contains(as_numpy(observations[agent]))
        active = [name for name, on in zip(names, info["active"][0].tolist(), strict=True) if on]
        assert env.agents == active and env.num_agents == len(active)
        if not active:
            assert env.step({}) == ({}, {}, {}, {}, {})
            observations, infos = env.reset()
            obs, info = twin.reset()
            episodes, keys = episodes + 1, names
            continue
        early += len(active) < len(names)
        actions = samples(env, infos)
        observations, rewards, terminations, truncations, infos = env.step(actions)
        obs, *outputs, info = twin.step(twin_actions(twin, actions))
        keys = active
        for given, expected, kind in zip(
            (rewards, terminations, truncations), outputs, (float, bool, bool), strict=True
        ):
            assert {type(value) for value in given.values()} == {kind}
            assert list(given.items()) == [(name, expected[0, names.index(name)].item()) for name in active]
    assert twin.faults().tolist() == [0]
    if game in (Crew, Scouts, Economy) or config == TAG:
        assert episodes and (early or config == {"num_scouts": 0}), "agents left early"


@each([("tag_gridworld", {}), (Crew, {}), (Scouts, {})])
def test_torch_observations_are_views_of_one_fresh_tensor(game, config, device):
    env = parallel_env(game, device, **config)
    observations, infos = env.reset(seed=1)
    earlier, kept = [], []
    for _ in range(4):
        storages = {view.untyped_storage().data_ptr() for view in observations.values()}
        assert len(storages) == 1 and not storages & set(earlier)
        assert {view.device.type for view in observations.values()} == {device}
        earlier += storages
        kept += [(view, view.clone()) for view in observations.values()]
        observations, *_, infos = env.step(samples(env, infos))
    assert all(equal_bits(view, copied) for view, copied in kept)


def test_numpy_observations_never_change_afterwards(device):
    kept = [
        (obs, obs.copy()) for step in rollout(parallel_env(Crew, device, output="numpy")) for obs in arrays_of(step)
    ]
    assert len(kept) > 50
    assert all(equal_bits(obs, copied) for obs, copied in kept)


def arrays_of(step) -> list[np.ndarray]:
    found = step if len(step) == 2 else step[1:]
    return [value for value in found[0].values() if isinstance(value, np.ndarray)]


@each(EVERY)
def test_the_outputs_do_not_depend_on_torch_or_numpy(game, config):
    tensors, arrays = (rollout(parallel_env(game, "cpu", output=output, **config)) for output in OUTPUTS)
    for ours, theirs in zip(tensors, arrays, strict=True):
        observed = 0 if len(ours) == 2 else 1
        assert list(ours[observed]) == list(theirs[observed])
        assert all(equal_bits(ours[observed][agent], theirs[observed][agent]) for agent in ours[observed])
        assert ours[observed + 1 : -1] == theirs[observed + 1 : -1]


@each(EVERY)
def test_the_same_seed_gives_the_same_steps_over_several_episodes(game, config):
    env = parallel_env(game, "cpu", output="numpy", **config)
    first = rollout(env)
    assert equal(first, rollout(env)), "again, after it has been used"
    assert equal(first, rollout(parallel_env(game, "cpu", output="numpy", **config)))


@each([("tag_continuous", TAG), (Crew, {}), (Scouts, {}), (Painter, {})])
def test_another_seed_gives_other_starts_and_episodes_without_a_seed_differ(game, config):
    env = parallel_env(game, "cpu", output="numpy", **config)
    starts = [np.concatenate([obs.ravel() for obs in env.reset(seed=seed)[0].values()]) for seed in (1, 2, None, None)]
    assert len({start.tobytes() for start in starts}) == 4


# ---------------------------------------------------------------------- spaces, state, masks


def test_each_agent_has_the_spaces_of_its_role():
    env = parallel_env(Scouts, "cpu")
    assert env.possible_agents == ["scout_0", "scout_1", "pilot_0"]
    assert env.observation_space("scout_1") == Box(0, 255, (1, 2, 3), np.uint8)
    assert env.observation_space("pilot_0") == Box(0, 255, (2, 3, 3), np.uint8)
    assert [env.action_space(agent) for agent in env.possible_agents] == [Discrete(2), Discrete(2), Discrete(4)]
    assert parallel_env(Crew, "cpu").action_space("driver_0") == MultiDiscrete([5])
    for agent in env.possible_agents:
        assert env.observation_space(agent) is env.observation_space(agent) is env.observation_spaces[agent]
        assert env.action_space(agent) is env.action_space(agent) is env.action_spaces[agent]
    for find in (env.observation_space, env.action_space):
        with pytest.raises(AgentKeyError, match="no agent 'scout_9'; nearest: scout_"):
            find("scout_9")


def test_seeding_one_agents_space_seeds_no_other():
    Scouts.action_space["scout"].seed(1)  # of the class itself, and somebody may have drawn from it
    env = parallel_env(Scouts, "cpu", num_scouts=3)
    draws = [[env.action_space(f"scout_{i}").sample() for _ in range(60)] for i in range(3)]
    assert draws[0] != draws[1] != draws[2] != draws[0]
    first, second = env.action_space("scout_0"), env.action_space("scout_1")
    second.seed(7)
    expected = [second.sample() for _ in range(60)]
    second.seed(7)
    first.seed(8)
    first.sample()
    assert [second.sample() for _ in range(60)] == expected


@pytest.mark.parametrize("output", OUTPUTS)
@each([("tag_gridworld", SMALL["tag_gridworld"]), (Crew, {"num_helpers": 3}), (Scouts, {})])
def test_the_state_is_all_observations_one_after_the_other(game, config, output, device):
    env = parallel_env(game, device, output=output, **config)
    observations, infos = env.reset(seed=3)
    while env.agents:
        whole = np.concatenate([as_numpy(obs).ravel() for obs in observations.values()])
        state = env.state()
        assert isinstance(state, np.ndarray if output == "numpy" else torch.Tensor)
        assert equal_bits(state, whole)
        assert env.state_space.contains(as_numpy(state))
        if game == "tag_gridworld":
            assert np.shares_memory(as_numpy(state), as_numpy(observations["runner_0"])) or device == "cuda"
        gone, (observations, *_, infos) = observations, env.step(samples(env, infos))
        # Of those that ended before, the state goes on telling what the game says of them.
        observations = {agent: observations.get(agent, env_row(env, agent)) for agent in gone}
    low, high = env.state_space.low, env.state_space.high
    assert equal_bits(low, np.concatenate([env.observation_space(a).low.ravel() for a in env.possible_agents]))
    assert equal_bits(high, np.concatenate([env.observation_space(a).high.ravel() for a in env.possible_agents]))


@pytest.mark.parametrize("output", OUTPUTS)
def test_agents_masks_and_state_are_those_of_a_loaded_state(output, device):
    env = parallel_env("connect_four", device, output=output)
    env.reset(seed=3)
    begun = env.vec_env.state_dict()
    for _ in range(6):  # the first column is full
        *_, infos = env.step(dict.fromkeys(env.agents, 0))
    full, state = env.vec_env.state_dict(), as_numpy(env.state()).copy()
    while env.agents:
        *_, infos = env.step(samples(env, infos))
    env.vec_env.load_state_dict(begun)
    assert env.agents == env.possible_agents
    env.vec_env.load_state_dict(full)
    assert equal_bits(env.state(), state)
    with pytest.raises(InvalidActionError):
        env.step(dict.fromkeys(env.agents, 0))
    assert env.step(dict.fromkeys(env.agents, 1))[0]


def env_row(env: ParallelEnv, agent: str):
    """What the engine says now of an agent that has ended."""
    role = agent.rpartition("_")[0]
    return env.vec_env.observe()[0, env.possible_agents.index(agent)][env.game.layout.observation.own(role)]


@pytest.mark.parametrize("output", OUTPUTS)
def test_masks_say_what_may_be_done_as_sample_takes_them(output, device):
    env = parallel_env(Scouts, device, output=output)
    for seed in range(5):
        _, infos = env.reset(seed=seed)
        while env.agents:
            colours = env.vec_env.state["colour"][0].tolist()
            for agent in env.agents:
                mask, i = infos[agent]["action_mask"], env.possible_agents.index(agent)
                role, n = (2, 2) if agent.startswith("scout") else (3, 4)
                assert as_numpy(mask).tolist() == [(colours[i] + k) % role != 0 for k in range(n)]
                assert mask.dtype == (np.int8 if output == "numpy" else torch.bool)
                assert output == "numpy" or mask.device.type == device
            forbidden = {agent: int(np.argmin(as_numpy(infos[agent]["action_mask"]))) for agent in env.agents}
            before = digest(env)
            with pytest.raises(InvalidActionError, match="allowed by info"):
                env.step(forbidden)
            assert digest(env) == before
            *_, infos = env.step(samples(env, infos))


@pytest.mark.parametrize("output", OUTPUTS)
def test_masks_of_several_numbers_are_tuples(output, device):
    env = parallel_env(Crew, device, output=output)
    _, infos = env.reset(seed=1)
    place, rest = env.vec_env.state["place"].item(), env.vec_env.state["rest"][0].tolist()
    (driver,) = infos["driver_0"]["action_mask"]
    assert as_numpy(driver).tolist() == [0 <= place + move - 2 < 6 for move in range(5)]
    for i, tired in enumerate(rest):
        hand, effort = infos[f"helper_{i}"]["action_mask"]
        assert as_numpy(hand).tolist() == [True, tired == 0]
        assert as_numpy(effort).tolist() == [k <= tired for k in range(3)]


def test_writing_into_a_mask_changes_no_check():
    for output in OUTPUTS:
        env = parallel_env(Scouts, "cpu", output=output)
        _, infos = env.reset(seed=1)
        forbidden = {agent: int(np.argmin(as_numpy(info["action_mask"]))) for agent, info in infos.items()}
        for info in infos.values():
            info["action_mask"][:] = 1
        with pytest.raises(InvalidActionError):
            env.step(forbidden)


# ---------------------------------------------------------------------- actions

FORMS = {
    "python": lambda action, device: action.item() if action.ndim == 0 else action.tolist(),
    "scalar": lambda action, device: action[()] if action.ndim == 0 else action,
    "int32": lambda action, device: action.astype(np.int32),
    "int64": lambda action, device: action.astype(np.int64),
    "tensor on the host": lambda action, device: torch.tensor(action),
    "tensor": lambda action, device: torch.tensor(action, device=device),
    "int32 tensor": lambda action, device: torch.tensor(action, device=device).int(),
}


@pytest.mark.parametrize("game", ["tag_gridworld", "tag_continuous", Crew, Scouts, Economy])
def test_actions_are_ints_arrays_or_tensors_also_mixed(game, device):
    config = SMALL.get(game, {})
    env, forms = parallel_env(game, device, output="numpy", **config), list(FORMS.values())
    expected = rollout(env, 12)
    for first in range(len(forms)):
        again, episode = parallel_env(game, device, output="numpy", **config), iter(expected)
        assert equal(again.reset(seed=3), next(episode))
        for step in episode:
            if len(step) == 2:
                assert equal(again.reset(), step)
                continue
            given = {}
            for i, (agent, action) in enumerate(step[0].items()):
                values, form = np.asarray(action), forms[(first + i) % len(forms)]
                exact = np.array_equal(as_numpy(form(values, device)), values)  # integers hold no actions of a Box
                given[agent] = form(values, device) if exact else values
            assert equal(again.step(given), step[1:])


def test_continuous_actions_are_float32(device):
    env = parallel_env(Painter, device, output="numpy")
    action = np.array([0.5, 1.5], np.float32)
    results = []
    for given in (action, torch.tensor(action), torch.tensor(action, device=device)):
        env.reset(seed=1)
        results.append(env.step({"agent_0": given}))
    assert equal(results[0], results[1]) and equal(results[0], results[2])


def test_unordered_actions_are_the_same_actions():
    env = parallel_env("tag_gridworld", "cpu", output="numpy", num_taggers=2, random_start=True)
    env.reset(seed=1)
    actions = {"tagger_0": 1, "tagger_1": 2, "runner_0": 3}
    expected = env.step(actions)
    env.reset(seed=1)
    assert equal(env.step(dict(reversed(actions.items()))), expected)


GRID = {"tagger_0": 1, "tagger_1": 2, "runner_0": 3}
PAINT = {"agent_0": np.array([0.5, 1.5], np.float32)}
BAD_ACTIONS = [
    (GRID, lambda a: None, TypeError, "a NoneType; expected a dict"),
    (GRID, lambda a: list(a.values()), TypeError, "a list; expected a dict"),
    (GRID, lambda a: {}, AgentKeyError, "no action for tagger_0, tagger_1, runner_0. Expected one action for each of"),
    (
        GRID,
        lambda a: {**a, "tagger_2": 0},
        AgentKeyError,
        "an action for an unknown agent: tagger_2. .*tagger_1, runner_0$",
    ),
    (
        GRID,
        lambda a: {"tagger_0": 1, "runner": 3, 4: 4},
        AgentKeyError,
        "for tagger_1, runner_0; .*unknown agent: runner, 4",
    ),
    (GRID, lambda a: {**a, "tagger_1": 5}, InvalidActionError, "tagger_1, number 0: 5; expected 0 to 4"),
    (GRID, lambda a: {**a, "runner_0": -1}, InvalidActionError, "agent runner_0"),
    (
        GRID,
        lambda a: {**a, "runner_0": 2**70},
        InvalidActionError,
        "runner_0's action: 1180591620717411303424 does not",
    ),
    (GRID, lambda a: {**a, "runner_0": 1.5}, InvalidActionError, "runner_0's action: 1.5 is no choice"),
    (GRID, lambda a: {**a, "runner_0": True}, TypeError, "dtype bool"),
    (GRID, lambda a: {**a, "runner_0": None}, TypeError, "dtype object"),
    (GRID, lambda a: {**a, "runner_0": torch.tensor(1.5)}, InvalidActionError, "runner_0's action: 1.5 is no choice"),
    (GRID, lambda a: {**a, "runner_0": [1]}, ValueError, r"shape \(1,\); expected \(\)"),
    (GRID, lambda a: {**a, "runner_0": torch.ones(1).long()}, ValueError, r"shape \(1,\); expected \(\)"),
    (GRID, lambda a: {**a, "runner_0": torch.ones(()).long().to("meta")}, ValueError, "runner_0's action is on meta"),
    (PAINT, lambda a: {"agent_0": a["agent_0"][:1]}, ValueError, r"shape \(1,\); expected \(2,\)"),
    (PAINT, lambda a: {"agent_0": np.float32([np.nan, 1])}, InvalidActionError, "number 0: nan"),
    (PAINT, lambda a: {"agent_0": torch.ones(2, requires_grad=True)}, TypeError, "with requires_grad"),
]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("good", "spoil", "error", "message"), BAD_ACTIONS)
def test_bad_actions_are_refused_and_change_nothing(good, spoil, error, message, output):
    env = parallel_env("tag_gridworld", "cpu", num_taggers=2, output=output) if good is GRID else None
    env = env or parallel_env(Painter, "cpu", output=output)
    env.reset(seed=1)
    env.step(good)
    before, agents = digest(env), env.agents
    with pytest.raises(error, match=message):
        env.step(spoil(good))
    assert digest(env) == before and env.agents == agents
    env.step(good)


def test_an_agent_that_has_ended_takes_no_actions():
    env = parallel_env(Scouts, "cpu", output="numpy")
    _, infos = env.reset(seed=1)
    while "scout_0" in env.agents:
        *_, infos = env.step(samples(env, infos))
    assert env.agents == ["scout_1", "pilot_0"]
    before = digest(env)
    with pytest.raises(
        AgentKeyError, match=r"an action for an agent that has ended: scout_0\. .* each of: scout_1, pilot_0$"
    ):
        env.step({**samples(env, infos), "scout_0": 0})
    assert digest(env) == before
    while env.agents:
        *_, infos = env.step(samples(env, infos))
    assert env.step({}) == ({}, {}, {}, {}, {})
    with pytest.raises(AgentKeyError, match=r"has ended: pilot_0. .* each of: none, call reset\(\)") as raised:
        env.step({"pilot_0": 1})
    assert isinstance(raised.value, KeyError)
    assert env.vec_env.faults().tolist() == [0]


def test_long_lists_of_agents_are_cut_in_messages():
    env = parallel_env("tag_continuous", "cpu")
    env.reset(seed=1)
    with pytest.raises(AgentKeyError, match=r"tagger_7 and 102 more\. Expected .* tagger_7 and 102 more$"):
        env.step({})


# ---------------------------------------------------------------------- order, options, arguments, copies


def test_before_reset_there_is_nothing(device):
    env = parallel_env("tag_gridworld", device)
    for use in (lambda: env.step({}), lambda: env.step(GRID), env.state, env.render, lambda: env.agents):
        with pytest.raises(PettingZooResetNeededError, match=r"before reset: call reset\(\)") as raised:
            use()
        for kind in (ResetNeededError, AssertionError, AttributeError, RuntimeError):
            assert isinstance(raised.value, kind)
    assert not hasattr(env, "agents")
    assert env.possible_agents and env.max_num_agents == 5


def test_after_close_nothing_works():
    for begun in (False, True):
        env = parallel_env("tag_gridworld", "cpu")
        if begun:
            env.reset()
        env.close()
        env.close()
        for method, arguments in ((env.reset, ()), (env.step, ({},)), (env.state, ()), (env.render, ())):
            with pytest.raises(ClosedEnvError):
                method(*arguments)


def test_options_do_not_matter_but_seeds_do():
    env = parallel_env("tag_gridworld", "cpu", output="numpy", random_start=True)
    assert equal(env.reset(seed=1, options={"options": 1}), env.reset(seed=np.int64(1)))
    before = digest(env)
    for seed in (-1, 2**64, 1.5, "7", True):
        with pytest.raises(InvalidSeedError, match="seed"):
            env.reset(seed=seed)
    assert digest(env) == before


def test_max_cycles_is_another_word_for_max_steps():
    assert parallel_env("tag_gridworld", "cpu", max_cycles=3).game.max_steps == 3
    assert parallel_env("tag_gridworld", "cpu", max_cycles=3, max_steps=3).game.max_steps == 3
    with pytest.raises(ConfigError, match="max_cycles is 3 and max_steps is 4"):
        parallel_env("tag_gridworld", "cpu", max_cycles=3, max_steps=4)
    env = parallel_env("tag_gridworld", "cpu")
    env.max_cycles = 2  # PettingZoo's test of the API does it
    assert env.game.max_steps == env.max_cycles == 100


@pytest.mark.parametrize("kind", ["parallel_env", "env", "raw_env"])
def test_a_module_takes_the_arguments_of_its_reference_and_has_its_attributes(kind):
    """Those that mpe2's environments have, and what PettingZoo's and SuperSuit's wrappers read of them."""
    make = getattr(pettingzoo_env.simple_spread_v3, kind)
    env = make(N=4, max_cycles=7, local_ratio=0.25, continuous_actions=True, dynamic_rescaling=True)
    game = gpu_vecenv.configure("simple_spread", num_agents=4, max_steps=7, local_ratio=0.25, continuous_actions=True)
    for each_env in (env, env.unwrapped):
        assert each_env.game == game
        names = (each_env.N, each_env.max_cycles, each_env.local_ratio, each_env.continuous_actions)
        assert names == (4, 7, 0.25, True)
        assert each_env.max_num_agents == 4 and each_env.possible_agents == [f"agent_{i}" for i in range(4)]
        assert each_env.render_mode is None and each_env.metadata["name"] == str(each_env) == "simple_spread_v3"
        assert each_env.state_space.shape == (4 * env.observation_space("agent_0").shape[0],)
        assert each_env.action_spaces["agent_0"] == each_env.action_space("agent_0") == Box(0, 1, (5,))
        assert list(each_env.observation_spaces) == each_env.possible_agents
        assert not hasattr(each_env, "agents")
        with pytest.raises(AttributeError, match="num_knights"):
            _ = each_env.num_knights
    with pytest.raises(ConfigError, match="N is 4 and num_agents is 3"):
        make(N=4, num_agents=3)
    assert make().max_cycles == 25 and make().action_space("agent_0") == Discrete(5)


@pytest.mark.parametrize("kind", ["parallel_env", "env", "raw_env"])
def test_steps_count_from_the_reset(kind):
    env = getattr(pettingzoo_env.simple_spread_v3, kind)(max_cycles=3)
    assert env.steps == 0
    for _ in range(2):
        env.reset(seed=1)
        for count in range(1, 4):
            if kind == "parallel_env":
                env.step(dict.fromkeys(env.agents, 0))
            else:
                for _ in env.agents[:]:
                    assert env.steps == count - 1
                    env.step(0)
            assert env.steps == env.unwrapped.steps == count


@pytest.mark.parametrize("kind", ["parallel_env", "env", "raw_env"])
@pytest.mark.parametrize(("name", "last"), [("simple_spread_v3", 1), ("simple_tag_v3", 2)])
def test_the_curriculum_has_mpe2s_methods(kind, name, last, device):
    env = getattr(getattr(pettingzoo_env, name), kind)(curriculum=True, device=device)
    env.reset(seed=1)
    stages = []
    for change in (lambda base: None, *[lambda base: base.advance_curriculum()] * 3):
        change(env.unwrapped)
        stages.append((env.curriculum_stage, env.unwrapped.vec_env.state["curriculum_stage"].item()))
    assert stages == [(stage, stage) for stage in (0, 1, last, last)]
    for stage, expected in ((-3, 0), (1, 1), (9, last)):
        env.unwrapped.set_curriculum_stage(stage)
        env.reset()
        assert env.unwrapped.curriculum_stage == expected and type(env.curriculum_stage) is int
    with pytest.raises(AttributeError, match="advance_curriculum"):
        parallel_env("simple_adversary", "cpu").advance_curriculum()


def test_the_generator_of_wrappers_follows_the_seed():
    env = parallel_env("simple_spread", "cpu")
    draws = []
    for seed in (3, None, 4, 3):
        env.reset(seed=seed)
        draws.append(env.np_random.random())
    assert draws[0] == draws[3] and len(set(draws)) == 3
    assert env.np_random is env.np_random
    unseeded = [aec_env("simple_spread").unwrapped.np_random.random() for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_modules_return_arrays_on_the_cpu_unless_others_are_wanted(device):
    module = pettingzoo_env.simple_spread_v3
    env = module.parallel_env()
    assert (env.output, env.device.type) == ("numpy", "cpu")
    assert isinstance(env.reset(seed=1)[0]["agent_0"], np.ndarray)
    env = module.parallel_env(device=device, output="torch")
    assert env.reset(seed=1)[0]["agent_0"].device.type == device


def test_other_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match='output is \'jax\'; expected "torch" or "numpy"'):
        parallel_env("tag_gridworld", "cpu", output="jax")
    with pytest.raises(TypeError, match="a ParallelEnv is one environment; for more use batched_parallel_env"):
        parallel_env("tag_gridworld", "cpu", num_envs=4)
    with pytest.raises(ConfigError, match="no configuration key 'autoreset_mode'"):
        parallel_env("tag_gridworld", "cpu", autoreset_mode="same_step")
    with pytest.raises(ConfigError, match=r"num_tagers.*nearest: num_taggers"):
        parallel_env("tag_gridworld", "cpu", num_tagers=4)
    with pytest.raises(UnknownGameError):
        parallel_env("tag_gridword", "cpu")
    with pytest.raises(UnsupportedMode, match="render_mode is 'nothing'"):
        parallel_env("tag_gridworld", "cpu", render_mode="nothing")


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda e: pickle.loads(pickle.dumps(e)),
                                    lambda e: cloudpickle.loads(cloudpickle.dumps(e))])  # fmt: skip
@pytest.mark.parametrize("game", ["tag_continuous", Scouts(num_scouts=1)])
def test_a_copy_is_made_with_the_same_arguments(copied, game, device):
    config = {"num_taggers": 1, "num_runners": 2} if isinstance(game, str) else {}
    env = parallel_env(game, device, output="numpy", max_cycles=5, **config)
    env.reset(seed=9)
    twin = copied(env)
    assert type(twin) is ParallelEnv and twin.game == env.game and twin.device == env.device
    assert twin.vec_env is not env.vec_env and not hasattr(twin, "agents")
    assert equal(rollout(twin), rollout(env))


def test_names_and_metadata_are_pettingzoos():
    env = parallel_env("tag_gridworld", "cpu")
    assert str(env) == env.metadata["name"] == "tag_gridworld_v0"
    assert env.metadata["is_parallelizable"] is True
    assert env.render_mode is None
    assert {"render_modes", "render_fps"} <= set(env.metadata)
    assert env.unwrapped is env
    assert isinstance(env, pettingzoo.ParallelEnv)
    assert str(parallel_env(Crew, "cpu")) == "crew_v0"
    assert repr(env).startswith("ParallelEnv(TagGridworld(")
    assert env.reset(seed=1) and env.render() is None


# ---------------------------------------------------------------------- AEC


@each(EVERY)
def test_agents_that_act_one_by_one_play_the_same_game(game, config):
    env, twin = aec_env(game, **config), parallel_env(game, "cpu", output="numpy", **config)
    assert isinstance(env, pettingzoo.AECEnv) and env.metadata["is_parallelizable"]
    seed_actions(twin, 0)
    env.reset(seed=8)
    observations, infos = twin.reset(seed=8)
    last = {}
    while twin.agents:
        actions = samples(twin, infos)
        live = twin.agents
        for agent in live:
            assert env.agent_selection == agent
            obs, reward, terminated, truncated, info = env.last()
            assert equal(obs, observations[agent]) and equal(info, infos[agent])
            assert (terminated, truncated) == (False, False) and reward == last.get(agent, 0)
            env.step(actions[agent])
        observations, last, terminations, truncations, infos = twin.step(actions)
        for agent in set(live) - set(twin.agents):
            assert (env.terminations[agent], env.truncations[agent]) == (terminations[agent], truncations[agent])
            assert env.rewards[agent] == last[agent]
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        assert env.agents == twin.agents


def test_the_wrapped_aec_env_refuses_an_action_when_it_is_given():
    env, raw = (getattr(pettingzoo_env.tag_gridworld_v0, kind)(num_taggers=1) for kind in ("env", "raw_env"))
    with pytest.raises(AssertionError, match="reset"):
        env.step(0)
    env.reset(seed=1)
    with pytest.raises(AssertionError, match="not in action space"):
        env.step(5)
    raw.reset(seed=1)
    raw.step(5)
    with pytest.raises(InvalidActionError, match="tagger_0"):
        raw.step(0)
    assert raw.agent_selection == "tagger_0" and raw.steps == 0, "all act again"
    for _ in range(2):
        raw.step(0)
    assert raw.steps == 1
    assert env.unwrapped.vec_env.device == torch.device("cpu")


# ---------------------------------------------------------------------- names: registry and modules


def test_before_reset_an_aec_env_has_no_agents():
    raw = pettingzoo_env.tag_gridworld_v0.raw_env()
    for use in (lambda: raw.step(0), lambda: raw.observe("tagger_0"), raw.state, raw.last, lambda: raw.agents):
        with pytest.raises(PettingZooResetNeededError, match="before reset"):
            use()
    for name in ("agents", "agent_selection", "rewards", "terminations", "truncations", "infos", "_anything"):
        assert not hasattr(raw, name)
    raw.reset(seed=1)
    assert raw.agent_selection == raw.agents[0] == "tagger_0"
    with pytest.raises(AgentKeyError, match="no observation of 'tagger_9'; nearest: tagger_"):
        raw.observe("tagger_9")


def test_an_agent_that_has_ended_only_acts_with_none():
    env = aec_env("tag_gridworld", max_cycles=1)
    env.reset(seed=1)
    for agent in env.agents:
        assert env.agent_selection == agent
        env.step(0)
    assert all(env.truncations.values()) and env.num_agents == 5
    with pytest.raises(ValueError, match="None"):
        env.unwrapped.step(0)
    left = env.num_agents
    while env.agents:
        env.step(None)
        left -= 1
        assert env.num_agents == left


def test_pettingzoos_wrappers_that_change_the_episode_work():
    """They write to ``env.unwrapped``, which must be the AEC environment itself."""
    env = TerminateIllegalWrapper(aec_env(Scouts).unwrapped, illegal_reward=-1)
    illegal = 0
    for seed in range(20):
        env.reset(seed=seed)
        forbidden = np.flatnonzero(env.last()[-1]["action_mask"] == 0)
        if not len(forbidden):
            continue
        env.step(int(forbidden[0]))
        assert env.rewards["scout_0"] == -1 and all(env.terminations.values())
        while env.agents:
            env.step(None)
        illegal += 1
    assert illegal
    counts = []
    for env in (MultiEpisodeEnv(aec_env("simple_spread", max_cycles=5), 3), aec_env("simple_spread", max_cycles=5)):
        env.reset(seed=1)
        counts.append(0)
        for agent in env.agent_iter():
            *_, terminated, truncated, _ = env.last()
            env.step(None if terminated or truncated else env.action_space(agent).sample())
            counts[-1] += 1
    assert counts == [3 * 18, 18]
    env = MultiEpisodeParallelEnv(pettingzoo_env.simple_spread_v3.parallel_env(max_cycles=5), 3)
    env.reset(seed=1)
    for _ in range(15):
        assert env.agents
        *_, truncations, _ = env.step(dict.fromkeys(env.agents, 1))
    assert all(truncations.values()) and not env.agents


@pytest.fixture
def logged(monkeypatch):
    """Messages of PettingZoo's logger."""
    messages = []
    monkeypatch.setattr(EnvLogger, "_generic_warning", staticmethod(messages.append))
    return messages


def test_an_aec_env_clips_box_actions_with_pettingzoos_warning(logged):
    config = {"continuous_actions": True, "N": 2}
    env, twin = aec_env("simple_spread", **config), parallel_env("simple_spread", "cpu", output="numpy", **config)
    env.reset(seed=1)
    twin.reset(seed=1)
    given = np.array([0, 2, -1, 0.5, 7], np.float32)
    for _ in range(2):
        env.step(given)
    space = env.action_space("agent_0")
    assert logged == 2 * [
        f"[WARNING]: Received an action {given} that was outside action space {space}. Environment is clipping to space"
    ]
    observations, rewards, *_ = twin.step(dict.fromkeys(twin.agents, np.clip(given, 0, 1)))
    assert env.rewards == rewards and all(equal_bits(env.observe(agent), observations[agent]) for agent in env.agents)
    with pytest.raises(AssertionError, match="nan"):
        env.step(given * np.nan)


GIVEN = {"agent_0": np.float32([0, 2, -1, 0.5, 7]), "agent_1": np.float32([0, 1, 0.5, 0.5, 1])}


def test_array_views_clip_box_actions_with_the_warning_of_mpe2(logged):
    mpe2 = pytest.importorskip("mpe2.simple_spread_v3")
    config = {"continuous_actions": True, "N": 2}
    module = pettingzoo_env.simple_spread_v3
    messages = []
    for env in (mpe2.parallel_env(**config), module.parallel_env(**config)):
        env.reset(seed=1)
        for action in (np.inf, -0.25, 0.25, 1.0):
            env.step({**GIVEN, "agent_1": np.full(5, action, np.float32)})
        messages.append(logged[:])
        logged.clear()
    assert messages[0] == messages[1] and len(messages[0]) == 4 + 2
    assert messages[0][0].endswith("Environment is clipping to space") and str(GIVEN["agent_0"]) in messages[0][0]


@pytest.mark.parametrize("output", OUTPUTS)
def test_clipped_actions_are_those_at_the_bounds(output, logged, device):
    config = {"continuous_actions": True, "N": 2, "output": output}
    env, twin = (parallel_env("simple_spread", device, **config) for _ in range(2))
    env.reset(seed=1)
    twin.reset(seed=1)
    results = env.step(GIVEN)
    assert len(logged) == (output == "numpy"), "tensors are clipped without a warning"
    assert equal(results, twin.step({agent: np.clip(action, 0, 1) for agent, action in GIVEN.items()}))
    before = digest(env)
    logged.clear()
    with pytest.raises(InvalidActionError, match="agent_1, number 0: nan"):
        env.step({**GIVEN, "agent_1": np.full(5, np.nan, np.float32)})
    assert digest(env) == before and not logged


def test_a_game_that_reads_box_actions_as_given_has_no_wrapper_that_changes_or_refuses_them(logged):
    env = aec_env("continuous_mountain_car")
    assert not env.game.clip_actions
    env.reset(seed=1)
    env.step(np.float32([-9]))
    parallel = parallel_env("continuous_mountain_car", "cpu", output="numpy")
    parallel.reset(seed=1)
    assert parallel.step({"agent_0": np.float32([-9])})[1] == env.rewards and not logged


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_of_an_aec_env_is_made_with_the_same_arguments(copied):
    env = aec_env("simple_spread", N=2).unwrapped
    env.reset(seed=1)
    twin = copied(env)
    assert twin is not env and twin.vec_env is not env.vec_env and twin.game == env.game
    assert not hasattr(twin, "agents")
    twin.reset(seed=1)
    assert equal_bits(twin.observe("agent_0"), env.observe("agent_0"))


@pytest.mark.skipif(not hasattr(pettingzoo, "register"), reason="PettingZoo has a registry since 1.27")
@pytest.mark.parametrize("name", GAMES)
def test_the_registry_makes_every_game(name):
    version = GAMES[name].version
    for title in (f"gpu_vecenv/{name}-v{version}", f"gpu_vecenv/{name}_v{version}", f"gpu_vecenv/{name}"):
        assert type(pettingzoo.make("parallel", title, device="cpu", max_cycles=4)) is ParallelEnv
    env = pettingzoo.make("aec", f"gpu_vecenv/{name}-v{version}", max_cycles=4)
    assert env.unwrapped.game.max_steps == 4
    env.reset(seed=1)
    assert env.observation_space(env.agent_selection).contains(env.observe(env.agent_selection))


@pytest.mark.parametrize("name", GAMES)
def test_every_game_has_a_module(name):
    title = f"{name}_v{GAMES[name].version}"
    module = getattr(pettingzoo_env, title)
    assert isinstance(module, ModuleType) and module is getattr(pettingzoo_env, title)
    assert title in dir(pettingzoo_env)
    env = module.parallel_env(max_cycles=3, device="cpu", output="numpy")
    assert (str(env), env.game.max_steps, type(env.game)) == (title, 3, GAMES[name])
    assert str(module.env(max_cycles=3).unwrapped) == str(module.raw_env(max_cycles=3).unwrapped) == title


def test_every_version_has_a_module_and_an_id():
    for version, egocentric in enumerate((False, True)):
        title = f"tag_continuous_v{version}"
        assert title in dir(pettingzoo_env)
        module = getattr(pettingzoo_env, title)
        for env in (module.parallel_env(device="cpu"), module.env().unwrapped, module.raw_env()):
            assert (env.game.egocentric, env.metadata["name"]) == (egocentric, title)
        if hasattr(pettingzoo, "register"):
            env = pettingzoo.make("parallel", f"gpu_vecenv/tag_continuous-v{version}", device="cpu")
            assert env.game.egocentric is egocentric


def test_a_game_of_ones_own_has_a_module_once_it_is_known(monkeypatch):
    assert not hasattr(pettingzoo_env, "crew_v0")
    monkeypatch.setitem(GAMES, "crew", Crew)
    assert "crew_v0" in dir(pettingzoo_env)
    assert pettingzoo_env.crew_v0.parallel_env(device="cpu").game == Crew()


def test_a_module_that_is_not_there_is_named_with_its_neighbours():
    for name in ("tag_gridword_v0", "tag_gridworld_v9", "tag_gridworld"):
        with pytest.raises(UnknownModuleError, match=f"no attribute '{name}'; nearest: tag_gridworld_v0") as raised:
            getattr(pettingzoo_env, name)
        assert isinstance(raised.value, AttributeError) and isinstance(raised.value, UnknownGameError)
    with pytest.raises(ImportError):
        from gpu_vecenv.views.pettingzoo_env import tag_gridworld_v9  # noqa: F401
    from gpu_vecenv.views.pettingzoo_env import tag_gridworld_v0

    assert tag_gridworld_v0.parallel_env
