"""skrl: the adapter's views and flags, its actions and log, and learning with skrl's own trainer."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("skrl", reason="skrl is not installed")

from games.crew import Crew
from games.economy import OpenEconomy
from games.painter import Painter
from games.scouts import Scouts
from games.script import Script
from gymnasium.spaces import Discrete
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import MultiAgentEnvWrapper, Wrapper, wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.multi_agents.torch.mappo import MAPPO
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from skrl.utils.runner.torch import Runner
from support.adapter_contract import run_example
from support.bitwise import equal_bits
from support.synchronisation import no_synchronisation

import gpu_vecenv
from gpu_vecenv import BatchedParallelEnv, EpisodeLog, Fault, GymnasiumVectorEnv
from gpu_vecenv.adapters import skrl
from gpu_vecenv.errors import UnsupportedGameError
from gpu_vecenv.wrappers import RescaleAction

TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
SEVERAL = [
    ("tag_gridworld", {"grid": 4, "max_steps": 7, "random_start": True}),
    ("tag_continuous", TAG),
    ("simple_tag", {"max_steps": 9}),
    ("simple_spread", {"max_steps": 9, "continuous_actions": True}),
    (OpenEconomy, {}),
]
ONE = [("cartpole", {"max_steps": 9}), ("pendulum", {"max_steps": 9}), (Painter, {})]
LEAVING = {"num_leads": 2, "num_others": 2, "leave": 3, "max_steps": 6}


@pytest.fixture(autouse=True)
def one_thread_one_seed():
    torch.set_num_threads(1)
    set_seed(1)


def whole(env, actions):
    """Actions of all agents of all environments as skrl has them: a dictionary, or rows; Discrete ones (N, 1)."""
    if not isinstance(env, MultiAgentEnvWrapper):
        return actions.reshape(env.num_envs, -1)
    by_agent = actions.reshape(env.num_envs, len(env.possible_agents), -1).unbind(1)
    sizes = [1 if isinstance(space, Discrete) else len(space.sample()) for space in env.action_spaces.values()]
    return {key: part[:, :size] for key, part, size in zip(env.possible_agents, by_agent, sizes, strict=True)}


def written(env):
    """A list that gets what the engine returns at each step."""
    outputs, step = [], env.vec_env.step

    def recorded(*arguments):
        outputs.append(step(*arguments))
        return outputs[-1]

    env.vec_env.step = recorded
    return outputs


# ---------------------------------------------------------------------- what skrl gets


@pytest.mark.parametrize(("game", "config"), SEVERAL)
@pytest.mark.parametrize("path", ["adapter", "agents that leave are not told apart"])
def test_values_equal_the_engine_agent_by_agent(game, config, path, device):
    """Also where skrl's wrapper is given the view itself, whose agents end but once."""
    set_seed(5)
    if path == "adapter":
        env = skrl.make(game, 4, device, **config)
    else:
        env = wrap_env(BatchedParallelEnv(game, 4, device, **config), "isaaclab-multi-agent", verbose=False)
    twin = BatchedParallelEnv(game, 4, device, agents_as_envs=path == "adapter", **config)
    assert isinstance(env, MultiAgentEnvWrapper) and env.device == twin.device and env.num_envs == 4
    assert env.possible_agents == env.agents == twin.agents and env.max_num_agents == env.num_agents == len(twin.agents)
    assert env.observation_spaces == twin.observation_spaces and env.action_spaces == twin.action_spaces
    assert env.state_space(env.agents[0]) == twin.state_space
    (obs, _), (expected, _) = env.reset(), twin.reset(seed=5)
    ends = 0
    for _ in range(30):
        for key in env.agents:
            assert equal_bits(obs[key], expected[key])
            assert equal_bits(env.state()[key], twin.state())
        actions = twin.sample_actions()
        obs, *outputs, infos = env.step(whole(env, actions))
        expected, *results, extras = twin.step(actions)
        for key in env.agents:
            assert all(
                equal_bits(ours[key], theirs[key][:, None]) for ours, theirs in zip(outputs, results, strict=True)
            )
            assert equal_bits(infos["_final_obs"][key], extras["_final_obs"][key])
            ends += int(infos["_final_obs"][key].sum())
    assert ends >= 4 * len(env.agents) * 2 and env.vec_env.faults().tolist() == [0] * 4


@pytest.mark.parametrize(("game", "config"), [*ONE, ("tag_continuous", TAG), ("tag_gridworld", {"max_steps": 9})])
def test_values_equal_the_engine_row_by_row(game, config, device):
    set_seed(5)
    one = (game, config) in ONE
    view = GymnasiumVectorEnv(game, 4, device, **config)
    env = skrl.make(game, 4, device, **config) if one else skrl.wrap(view)
    twin = GymnasiumVectorEnv(game, 4, device, **config)
    assert isinstance(env, Wrapper) and (env.device, env.num_envs, env.state_space) == (
        twin.device,
        twin.num_envs,
        None,
    )
    assert env.observation_space == twin.single_observation_space and env.action_space == twin.single_action_space
    (obs, _), (expected, _) = env.reset(), twin.reset(seed=5)
    for _ in range(30):
        assert equal_bits(obs, expected.flatten(1)) and env.state() is None
        actions = twin.sample_actions()
        obs, *outputs, infos = env.step(whole(env, actions))
        expected, *results, info = twin.step(actions)
        assert all(equal_bits(ours, theirs[:, None]) for ours, theirs in zip(outputs, results, strict=True))
        ended = info["_final_obs"]
        assert equal_bits(infos["_final_obs"], ended) and equal_bits(
            infos["final_obs"][ended], info["final_obs"][ended]
        )
    assert env.vec_env.faults().tolist() == [0] * 4


@pytest.mark.parametrize(("game", "config"), SEVERAL)
def test_agents_outputs_are_views_of_the_step_buffers(game, config, device):
    env = skrl.make(game, 4, device, **config)
    env.reset()
    outputs, layout = written(env), env.game.layout.observation
    roles = [role for role, count in env.game.roles.items() for _ in range(count)]
    for _ in range(3):
        obs, *ours, infos = env.step(whole(env, env.sample_actions()))
        tensors = [tensor.unflatten(0, (4, -1)) for tensor in outputs[-1][:4]]
        final_obs = outputs[-1][4]["final_obs"].unflatten(0, (4, -1))
        for i, (key, role) in enumerate(zip(env.agents, roles, strict=True)):
            assert obs[key].data_ptr() == tensors[0][:, i].data_ptr()
            assert obs[key].stride() == tensors[0][:, i][(..., *layout.own(role))].stride()
            assert infos["final_obs"][key].data_ptr() == final_obs[:, i].data_ptr()
            for values, tensor in zip(ours, tensors[1:], strict=True):
                assert values[key].data_ptr() == tensor[:, i].data_ptr() and values[key].stride(0) == len(env.agents)


@pytest.mark.parametrize(("game", "config"), [*ONE, ("tag_continuous", TAG)])
def test_rows_are_views_of_the_step_buffers(game, config, device):
    env = skrl.wrap(GymnasiumVectorEnv(game, 4, device, **config))
    env.reset()
    outputs = written(env)
    for _ in range(3):
        *ours, infos = env.step(whole(env, env.sample_actions()))
        for value, tensor in zip(
            [*ours, infos["final_obs"]], [*outputs[-1][:4], outputs[-1][4]["final_obs"]], strict=True
        ):
            assert value.data_ptr() == tensor.data_ptr() and value.is_contiguous()


def test_earlier_outputs_stay_as_they_were(device):
    """skrl keeps observations for the next transition, and adds to rewards in place."""
    env = skrl.make("simple_spread", 3, device)
    obs, _ = env.reset()
    kept = []
    for _ in range(5):
        kept += [(value, value.clone()) for value in obs.values()]
        obs, rewards, *_ = env.step(whole(env, env.sample_actions()))
        before = env.state()[env.agents[0]].clone()
        for value in rewards.values():
            value += 1
        assert equal_bits(env.state()[env.agents[0]], before)
    assert all(equal_bits(value, copied) for value, copied in kept)


@pytest.mark.gpu
@pytest.mark.parametrize("game", ["tag_continuous", "simple_spread", "cartpole", "pendulum"])
def test_no_step_waits_for_the_device(game):
    env = skrl.make(game, 64, "cuda", **(TAG if game == "tag_continuous" else {}))
    learner = skrl.with_final_obs(SimpleNamespace(record_transition=lambda **transition: None))
    obs, _ = env.reset()
    env.step(whole(env, env.sample_actions()))
    with no_synchronisation():
        for _ in range(100):
            obs, _, _, _, infos = env.step(whole(env, env.sample_actions()))
            learner.record_transition(next_observations=obs, next_states=env.state(), infos=infos)
            infos["episode"].items()
    assert env.vec_env.faults().sum().item() == 0


# ---------------------------------------------------------------------- how episodes end, seeds


def test_each_agent_has_episodes_of_its_own(device):
    """Told from the observation before each step: who ends there, how, with which last observation and reward."""
    env = skrl.make(Script, 40, device, **LEAVING)
    obs, _ = env.reset()
    places = {"lead_0": 1, "lead_1": 2, "other_0": 3, "other_1": 4}
    assert env.possible_agents == list(places)
    seen = {"terminated": 0, "truncated": 0, "left": 0, "ended again": 0}
    for _ in range(30):
        _, time, end, truncates, mark, _ = (column.clone() for column in obs["lead_0"].unbind(1))
        time += 1
        actions = whole(env, env.sample_actions())
        after, rewards, terminated, truncated, infos = env.step(actions)
        over = time == end
        for key, place in places.items():
            may_leave = torch.full_like(over, key.startswith("other"))
            gone, leaves = may_leave & (time > 3), may_leave & (time == 3) & ~over
            assert equal_bits(truncated[key][:, 0], over & ~gone & (truncates == 1))
            assert equal_bits(terminated[key][:, 0], leaves | (over & ~truncated[key][:, 0]))
            assert equal_bits(rewards[key][:, 0], torch.where(gone, 0, 10 * place + time))
            said = actions[key][:, 0].float()
            last = torch.stack([torch.full_like(time, place), time, end, truncates, mark, said], 1)
            ended = terminated[key][:, 0] | truncated[key][:, 0]
            assert equal_bits(infos["_final_obs"][key], ended)
            assert torch.equal(infos["final_obs"][key][ended & ~gone], last[ended & ~gone])
            away = ~over & (gone | leaves)  # zeros until the environment ends
            assert (after[key][away] == 0).all() and (after[key][~away][:, 0] == place).all()
            assert (after[key][over][:, 1] == 0).all()  # begun anew
            seen["left"] += int(leaves.sum())
            seen["ended again"] += int((gone & over).sum())
        seen["terminated"] += int((over & (truncates == 0)).sum())
        seen["truncated"] += int((over & (truncates == 1)).sum())
        obs = after
    assert min(seen.values()) > 20


def test_the_seed_is_skrls(device):
    for game in ("simple_spread", "cartpole"):
        for seed in (7, 8):
            set_seed(seed)
            env = skrl.make(game, 3, device)
            first, _ = env.reset()
            assert env.vec_env.seed == seed
            expected, _ = gpu_vecenv.make(game, 3, device).reset(seed=seed)
            assert equal_bits(
                torch.stack([*first.values()], 1) if game == "simple_spread" else first[:, None], expected
            )


@pytest.mark.parametrize("game", ["simple_spread", "cartpole"])
def test_one_env_continues_from_episode_to_episode(game):
    """skrl's trainer resets a single environment where an episode ends; it has begun anew already."""
    runner = learner(skrl.make(game, 1, "cpu", max_steps=9), rollouts=8, timesteps=60)
    runner.run()
    assert runner.trainer.env.vec_env.episode_statistics()["lengths"].item() >= 6 * 9
    assert runner.trainer.env.vec_env.faults().item() == 0


# ---------------------------------------------------------------------- what skrl gives, what is refused


def test_box_actions_are_clipped_for_the_game_alone(device):
    for env, twin in (
        (skrl.make("pendulum", 3, device), skrl.make("pendulum", 3, device)),
        *[[skrl.make("simple_spread", 3, device, continuous_actions=True) for _ in range(2)]],
        *[[skrl.wrap(GymnasiumVectorEnv("simple_spread", 3, device, continuous_actions=True)) for _ in range(2)]],
        *[[skrl.make(Painter, 3, device) for _ in range(2)]],
    ):
        for each in (env, twin):
            each.reset()
        for _ in range(5):
            inside = env.sample_actions()
            space = env.game.layout.action.widest
            low, high = (torch.tensor(bound, device=device) for bound in (space.low, space.high))
            inside = torch.where(inside > (low + high) / 2, high, low)
            outside = inside + 3 * (inside - (low + high) / 2)
            given = outside.clone()
            ours, theirs = env.step(whole(env, given)), twin.step(whole(twin, inside))
            assert torch.equal(given, outside)
            for a, b in zip(ours[:2], theirs[:2], strict=True):
                assert all(map(equal_bits, a.values(), b.values())) if isinstance(a, dict) else equal_bits(a, b)
        assert env.vec_env.faults().tolist() == [0] * 3


def test_what_is_not_finite_is_not_made_valid():
    env = skrl.make("pendulum", 2, "cpu")
    env.reset()
    env.step(torch.tensor([[torch.nan], [0.0]]))
    assert env.vec_env.faults().tolist() == [Fault.NONFINITE_ACTION, 0]


@pytest.mark.parametrize(
    ("view", "error", "message"),
    [
        (lambda: gpu_vecenv.make("cartpole", 2, "cpu"), TypeError, r"expected a gpu_vecenv\.GymnasiumVectorEnv"),
        (lambda: GymnasiumVectorEnv("cartpole", 2, "cpu", output="numpy"), ValueError, 'output="torch"'),
        (lambda: GymnasiumVectorEnv("cartpole", 2, "cpu", autoreset_mode="next_step"), ValueError, "same_step"),
        (lambda: GymnasiumVectorEnv(Crew, 2, "cpu"), UnsupportedGameError, "skrl does not support action masks"),
        (
            lambda: BatchedParallelEnv(Crew, 2, "cpu", agents_as_envs=True),
            UnsupportedGameError,
            "skrl does not support action masks",
        ),
        (
            lambda: BatchedParallelEnv("simple_tag", 2, "cpu"),
            ValueError,
            "agents_as_envs=False.* expected group_by='agent', agents_as_envs=True",
        ),
        (
            lambda: BatchedParallelEnv("simple_tag", 2, "cpu", agents_as_envs=True, group_by="role"),
            ValueError,
            "group_by='role'",
        ),
        (
            lambda: BatchedParallelEnv("simple_tag", 2, "cpu", agents_as_envs=True, autoreset_mode="disabled"),
            ValueError,
            "autoreset_mode='disabled'",
        ),
    ],
)
def test_what_skrl_cannot_have_is_refused(view, error, message):
    with pytest.raises(error, match=message):
        skrl.wrap(view())


def test_masked_games_are_refused_whatever_the_number_of_agents():
    for config in ({}, {"num_scouts": 0}):
        with pytest.raises(UnsupportedGameError, match=r"gpu_vecenv\.adapters that do: sb3, torchrl"):
            skrl.make(Scouts, 2, "cpu", **config)


def test_views_arguments_and_the_number_of_agents_decide():
    assert skrl.make("cartpole", 2, "cpu", max_episode_steps=7, first_env_index=3).game.max_steps == 7
    assert skrl.make("tag_gridworld", 2, "cpu", max_cycles=7, validate="sync").max_episode_length == 7
    assert isinstance(skrl.make(Script, 2, "cpu"), Wrapper)
    assert isinstance(skrl.make(Script(num_others=1), 2, "cpu"), MultiAgentEnvWrapper)
    assert isinstance(skrl.make(Script(), 2, "cpu", num_leads=2), MultiAgentEnvWrapper)
    with pytest.raises(gpu_vecenv.errors.ConfigError, match="no configuration key 'num_lead'"):
        skrl.make(Script, 2, "cpu", num_lead=2)


def test_wrapped_rows_are_taken(device):
    """What the wrapper says of spaces and values counts."""
    env = skrl.wrap(RescaleAction(GymnasiumVectorEnv("pendulum", 8, device), -1.0, 1.0))
    twin = skrl.wrap(GymnasiumVectorEnv("pendulum", 8, device))
    assert env.action_space.high == 1 and env.num_envs == 8 and env.device == twin.device
    env.reset(), twin.reset()
    ours, theirs = env.step(torch.full((8, 1), 9.0, device=device)), twin.step(torch.full((8, 1), 2.0, device=device))
    assert all(equal_bits(a, b) for a, b in zip(ours[:4], theirs[:4], strict=True))
    assert env.vec_env.faults().tolist() == [0] * 8
    env.close()
    assert env.vec_env.closed


# ---------------------------------------------------------------------- learners


class Uniform(CategoricalMixin, Model):
    def __init__(self, **spaces):
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.scale = torch.nn.Parameter(torch.zeros(1))

    def compute(self, inputs, role=""):
        return self.scale * torch.ones(len(inputs["observations"]), self.num_actions, device=self.device), {}


class Dot(DeterministicMixin, Model):
    """A value that is known: the inputs weighted with 1, 2, 3, …"""

    def __init__(self, inputs, **spaces):
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.inputs, self.scale = inputs, torch.nn.Parameter(torch.ones(1))

    def compute(self, inputs, role=""):
        return self.scale * weighted(inputs[self.inputs]), {}


def weighted(inputs):
    return inputs @ torch.arange(1.0, inputs.shape[1] + 1, device=inputs.device)[:, None]


QUIET = {"experiment": {"write_interval": 0, "checkpoint_interval": 0}}
KWARGS = [f"{name}_preprocessor_kwargs" for name in ("observation", "state", "value")]
KWARGS += ["learning_rate_scheduler_kwargs"]


def scripted(env, steps):
    """A learner of skrl's that only collects, with values known."""
    config = {"rollouts": steps + 1, "time_limit_bootstrap": True, "discount_factor": 0.5, **QUIET}
    several = isinstance(env, MultiAgentEnvWrapper)
    agents = env.agents if several else ["one"]
    kinds = "observation_space", "state_space", "action_space"
    spaces = {
        key: {kind: getattr(env, kind)(key) if several else getattr(env, kind) for kind in kinds} for key in agents
    }
    models = {
        key: {
            "policy": Uniform(**own, device=env.device),
            "value": Dot("states" if several else "observations", **own, device=env.device),
        }
        for key, own in spaces.items()
    }
    memories = {key: RandomMemory(memory_size=steps, num_envs=env.num_envs, device=env.device) for key in agents}
    if not several:
        return PPO(models=models["one"], memory=memories["one"], **spaces["one"], device=env.device, cfg=config)
    config |= {name: {key: {} for key in agents} for name in KWARGS}
    by_kind = {f"{kind}s": {key: own[kind] for key, own in spaces.items()} for kind in kinds}
    return MAPPO(possible_agents=agents, models=models, memories=memories, **by_kind, device=env.device, cfg=config)


def collected(agent, env, steps):
    """What the engine gave while skrl's trainer had the agent play, rewards as they were."""
    kept, step = [], env.vec_env.step

    def recorded(*arguments):
        obs, rewards, terminations, truncations, info = step(*arguments)
        kept.append([obs.clone(), rewards.clone(), terminations, truncations, info])
        return obs, rewards, terminations, truncations, info

    env.vec_env.step = recorded
    config = {"timesteps": steps, "close_environment_at_exit": False, "disable_progressbar": True}
    SequentialTrainer(env=env, agents=agent, cfg=config).train()
    return kept


@pytest.mark.parametrize("final", [False, True])
def test_a_truncated_row_is_bootstrapped_from_its_last_observation(final, device):
    env = skrl.make(Script, 32, device)
    agent = scripted(env, 20)
    kept = collected(skrl.with_final_obs(agent) if final else agent, env, 20)
    recorded, count = agent.memory.get_tensor_by_name("rewards"), 0
    for step, (obs, rewards, terminations, truncations, info) in enumerate(kept):
        follows = torch.where(info["_final_obs"][:, None], info["final_obs"], obs) if final else obs
        expected = rewards[:, None] + 0.5 * weighted(follows) * truncations[:, None]
        torch.testing.assert_close(recorded[step], expected, rtol=1e-6, atol=0)  # float32 sums in another order
        count += int(truncations.sum())
        assert equal_bits(agent.memory.get_tensor_by_name("terminated")[step][:, 0], terminations)
        assert equal_bits(agent.memory.get_tensor_by_name("truncated")[step][:, 0], truncations)
    assert count > 32


@pytest.mark.parametrize("final", [False, True])
def test_truncated_agents_are_bootstrapped_from_the_last_state(final, device):
    env = skrl.make(Script, 32, device, **LEAVING)
    agent = scripted(env, 20)
    kept = collected(skrl.with_final_obs(agent) if final else agent, env, 20)
    count, acting = 0, torch.ones(32, 4, dtype=torch.bool, device=device)
    for step, outputs in enumerate(kept):
        obs, rewards, terminations, truncations = (tensor.unflatten(0, (32, 4)) for tensor in outputs[:4])
        ended, final_obs = (outputs[4][name].unflatten(0, (32, 4)) for name in ("_final_obs", "final_obs"))
        last = torch.where(ended[..., None], torch.where(acting[..., None], final_obs, 0), obs).flatten(1)
        acting = outputs[4]["active"].unflatten(0, (32, 4))
        for i, key in enumerate(env.agents):
            follows = torch.where(ended[:, i, None], last, obs.flatten(1)) if final else obs.flatten(1)
            bootstrap = 0.5 * weighted(follows) * truncations[:, i, None]
            recorded = agent.memories[key].get_tensor_by_name("rewards")[step]
            torch.testing.assert_close(recorded, rewards[:, i, None] + bootstrap, rtol=1e-6, atol=0)
            assert equal_bits(agent.memories[key].get_tensor_by_name("terminated")[step][:, 0], terminations[:, i])
            count += int(truncations[:, i].sum())
    assert count > 100


def test_states_of_agents_who_play_on_are_those_that_follow(device):
    """One who leaves early changes nothing for the others; what is unspecified reaches nobody."""
    env = skrl.make(Script, 16, device, **LEAVING)
    kept = []
    agent = skrl.with_final_obs(SimpleNamespace(record_transition=lambda **transition: kept.append(transition)))
    env.reset()
    others = 0
    for _ in range(12):
        gone = (env.state()["lead_0"][:, 12:] == 0).all(1)
        obs, _, _, _, infos = env.step(whole(env, env.sample_actions()))
        state, ended = env.state()["lead_0"], infos["_final_obs"]
        for key in env.agents:
            infos["final_obs"][key][~ended[key]] = torch.nan
        agent.record_transition(next_observations=obs, next_states=env.state(), infos=infos)
        for key in env.agents:
            assert equal_bits(kept[-1]["next_states"][key][~ended[key]], state[~ended[key]])
            assert equal_bits(kept[-1]["next_observations"][key][~ended[key]], obs[key][~ended[key]])
            assert kept[-1]["next_states"][key].isfinite().all()
            # Where the environment ends, those that had left are zeros: the last two of four, six numbers each.
            over = ended["lead_0"]
            assert key[:4] != "lead" or (kept[-1]["next_states"][key][over & gone, 12:] == 0).all()
        others += int((ended["other_0"] & ~ended["lead_0"]).sum())
    assert others > 0


@pytest.mark.parametrize("path", ["agents", "rows"])
def test_infos_have_means_over_the_episodes_that_ended_since_the_last_look(path, device):
    view = GymnasiumVectorEnv(Script, 8, device, **LEAVING) if path == "rows" else None
    env = skrl.wrap(view) if view else skrl.make(Script, 8, device, **LEAVING)
    env.reset()
    log = EpisodeLog(env.vec_env)
    for step in range(25):
        *_, infos = env.step(whole(env, env.sample_actions()))
        if step % 3:  # now and then nobody looks
            entries = dict(infos["episode"].items())
            assert all(isinstance(mean, torch.Tensor) and mean.numel() == 1 for mean in entries.values())
            torch.testing.assert_close(entries, log.means(), rtol=0, atol=0, equal_nan=True)
    assert 2 <= entries["length"].item() <= 6


def learner(env, algorithm=None, rollouts=32, timesteps=1000, **config):
    """skrl's runner: small networks, nothing written."""
    several = isinstance(env, MultiAgentEnvWrapper)
    algorithm = algorithm or ("IPPO" if several else "PPO")
    net = {"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "elu"}
    space = next(iter(env.action_spaces.values())) if several else env.action_space
    kind = {"Box": "GaussianMixin", "Discrete": "CategoricalMixin", "MultiDiscrete": "MultiCategoricalMixin"}
    critic = {**net, "input": "STATES" if algorithm == "MAPPO" else "OBSERVATIONS"}
    agent = {"class": algorithm, "rollouts": rollouts, "learning_epochs": 4, "mini_batches": 4, **QUIET, **config}
    agent |= {"time_limit_bootstrap": True}
    if several:
        agent["learning_rate_scheduler_kwargs"] = {key: {} for key in env.possible_agents}
    trainer = {"class": "SequentialTrainer", "timesteps": timesteps, "close_environment_at_exit": False}
    runner = Runner(env, {
        "seed": 1,
        "models": {
            "separate": True,
            "policy": {"class": kind[type(space).__name__], "network": [net], "output": "ACTIONS"},
            "value": {"class": "DeterministicMixin", "network": [critic], "output": "ONE"},
        },
        "memory": {"class": "RandomMemory", "memory_size": -1},
        "agent": agent,
        "trainer": {**trainer, "disable_progressbar": True},
    })  # fmt: skip
    skrl.with_final_obs(runner.agent)
    return runner


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ippo_learns_tag_gridworld():
    """PPO and MAPPO learn in the examples."""
    env = skrl.make("tag_gridworld", 128, "cpu", grid=8, max_steps=50, num_taggers=2)
    runner, log = learner(env, timesteps=800), EpisodeLog(env.vec_env)
    env.reset()
    for _ in range(100):
        env.step(whole(env, env.sample_actions()))
    at_random = log.means()["return_tagger"]
    runner.run()
    log.means()
    runner.trainer.cfg.timesteps = 100
    runner.run("eval")
    assert log.means()["return_tagger"] > at_random + 2  # about 4; a catch is worth 10


@pytest.mark.parametrize(("game", "config"), [("tag_continuous", TAG), ("pendulum", {}), ("simple_tag", {})])
def test_rows_share_a_policy(game, config):
    """Box and MultiDiscrete actions, agents that leave: it runs, and what is learned is finite."""
    runner = learner(skrl.wrap(GymnasiumVectorEnv(game, 16, "cpu", **config)), rollouts=16, timesteps=64)
    runner.run()
    assert not runner.trainer.env.vec_env.faults().any()
    assert all(p.isfinite().all() for model in runner.agent.models.values() for p in model.parameters())


@pytest.mark.parametrize(
    ("game", "config"), [("tag_continuous", TAG), ("simple_tag", {}), ("simple_spread", {"continuous_actions": True})]
)
@pytest.mark.parametrize("algorithm", ["IPPO", "MAPPO"])
def test_roles_have_policies_of_their_own(algorithm, game, config):
    runner = learner(skrl.make(game, 16, "cpu", **config), algorithm, rollouts=16, timesteps=64)
    runner.run()
    assert not runner.trainer.env.vec_env.faults().any()
    assert all(p.isfinite().all() for own in runner.agent.models.values() for m in own.values() for p in m.parameters())


def test_skrl_logs_returns_of_roles(tmp_path):
    env = skrl.make(Script, 8, "cpu", **LEAVING)
    written_every = {"directory": str(tmp_path), "write_interval": 100, "checkpoint_interval": 0}
    runner = learner(env, timesteps=30, experiment=written_every)
    runner.run()
    logged = runner.agent.tracking_data
    assert 2 <= logged["Info / length"][-1] <= 6
    assert logged["Info / return_lead"][-1] > 0 and logged["Info / return_other"][-1] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("example", "gain"), [("skrl_mappo.py", 2.5), ("skrl_ppo.py", 45)])
def test_the_examples_learn(example, gain, tmp_path):
    at_random, trained = run_example(example, r"return at random (\S+), after \d+ s of training (\S+)", tmp_path)
    assert trained > at_random + gain
