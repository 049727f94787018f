"""TorchRL: its checker, the groups, its partial resets and loss modules, and learning with its own MAPPO."""

import importlib
import sys
import textwrap
from dataclasses import dataclass

import cloudpickle
import pytest
import torch

pytest.importorskip("torchrl", reason="torchrl is not installed")

from games.crew import Crew
from games.economy import Economy
from games.painter import Painter
from games.scouts import Scouts
from games.script import Script
from gymnasium.spaces import Box, Discrete
from support.adapter_contract import run_example_here
from support.synchronisation import no_synchronisation
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Bounded, Categorical, MultiCategorical
from torchrl.envs import ActionMask, Compose, RewardSum, TransformedEnv, check_env_specs
from torchrl.objectives.value import GAE

from gpu_vecenv import BatchedParallelEnv, Env
from gpu_vecenv.adapters import torchrl
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import ClosedEnvError, ConfigError, UnsupportedGameError

TAG = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "max_steps": 12, "tagging_distance": 0.1}
LEAVE = {"num_leads": 2, "num_others": 3, "leave": 2}
CASES = [(name, TAG if name == "tag_continuous" else {}) for name in GAMES]
CASES += [
    (Crew, {}),
    (Economy, {}),
    (Scouts, {}),
    (Painter, {}),
    (Script, LEAVE),
    (Script, {**LEAVE, "continuous": True}),
]
MODES = {"group_by": "role", "autoreset_mode": "disabled"}


def split(env: torchrl.TorchRLEnv, actions: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of the engine's actions, role by role, without the heads that a role lacks."""
    parts = {}
    for role, where in env.env.game.layout.role_slices.items():
        if role in env.group_map:
            own, space = actions[:, where], env.env.action_space(role)
            if actions.ndim > 2:
                own = own[..., : space.shape[0]] if space.shape else own[..., 0]
            parts[role] = (own if isinstance(space, Box) else own.long()).contiguous()
    return parts


@pytest.mark.parametrize(("game", "config"), CASES)
@pytest.mark.parametrize("return_state", [False, True])
def test_torchrls_checker_passes(game, config, return_state, device):
    env = torchrl.make(game, 4, device, return_state=return_state, **config)
    check_env_specs(env, break_when_any_done="both")
    check_env_specs(env, seed=3)
    rollout = env.rollout(40, break_when_any_done=False)
    assert rollout.shape == (4, 40) and rollout.device == env.device == env.env.device
    assert not env.env.vec_env.faults().any()  # random actions were valid ones, masked ones included


@pytest.mark.parametrize(("game", "config"), CASES)
def test_steps_and_resets_are_those_of_the_batched_view(game, config, device):
    """TorchRL's own loop, step_and_maybe_reset, against the view beneath, reset by hand where all have ended."""
    env = torchrl.make(game, 6, device, return_state=True, **config)
    twin = BatchedParallelEnv(env.env.game, 6, device, **MODES)
    env.set_seed(5)
    current, (expected, extras) = env.reset(), twin.reset(seed=5)
    for _ in range(30):
        torch.testing.assert_close(current["state"], twin.state(), rtol=0, atol=0)
        for role in env.group_map:
            assert torch.equal(current[role, "observation"], expected[role])
            assert torch.equal(current[role, "mask"], extras["active"][role])
            assert torch.equal(current[role, "done"][..., 0], ~extras["active"][role])
        actions = split(env, twin.sample_actions())
        for role, own in actions.items():
            current[role, "action"] = own
        given, current = env.step_and_maybe_reset(current)
        expected, rewards, terminations, truncations, extras = twin.step(actions)
        for role in env.group_map:
            own, active = given["next", role], extras["active"][role]
            assert torch.equal(own["observation"], expected[role])
            assert torch.equal(own["reward"], rewards[role][..., None])
            assert torch.equal(own["done"][..., 0], ~active)
            assert torch.equal(own["truncated"][..., 0], truncations[role])
            assert (own["terminated"][..., 0] | ~terminations[role]).all()
            assert torch.equal(own["done"], own["terminated"] | own["truncated"])
        ended = ~torch.cat([*extras["active"].values()], 1).any(1)
        truncated = ended & torch.cat([*truncations.values()], 1).any(1)
        assert torch.equal(given["next", "done"], ended[:, None])
        assert torch.equal(given["next", "truncated"], truncated[:, None])
        assert torch.equal(given["next", "terminated"], (ended & ~truncated)[:, None])
        assert not current["done"].any()
        expected, extras = twin.reset(options={"reset_mask": ended})


def test_a_mask_resets_its_envs_only(device):
    env = torchrl.make(Script, 4, device, **LEAVE)
    env.set_seed(1)
    current = env.rand_action(env.reset())
    for _ in range(2):
        current = env.rand_action(env.step_mdp(env.step(current)))
    assert current["other", "done"].any() and not current["lead", "done"].all()
    before, mask = current.clone(), torch.tensor([[False], [True], [False], [True]], device=device)
    after = env.reset(current.set("_reset", mask))
    assert after["lead", "observation"][:, 0, 1].tolist() == [2, 0, 2, 0]  # steps since reset
    for key in ("observation", "mask", "done", "terminated", "truncated"):
        for role in env.group_map:
            assert torch.equal(after[role, key][::2], before[role, key][::2])
    assert after["other", "mask"][1::2].all() and not after["other", "done"][1::2].any()
    assert env.env.vec_env.elapsed_steps.tolist() == [2, 0, 2, 0]


def test_episodes_end_as_the_script_says(device):
    """The last observations arrive, envs end as a whole, and agents that left early stay done and terminated."""
    env = TransformedEnv(torchrl.make(Script, 5, device, **LEAVE), RewardSum())
    env.set_seed(2)
    rollout = env.rollout(40, break_when_any_done=False).to("cpu")
    lead, other, root = rollout["next", "lead"], rollout["next", "other"], rollout["next"]
    step, ends, truncates = (lead["observation"][:, :, 0, place] for place in (1, 2, 3))
    done = step == ends
    assert done.sum() >= 5 * 6 and (done & (truncates == 1)).any() and (done & (truncates == 0)).any()
    assert torch.equal(root["done"][..., 0], done)
    assert torch.equal(root["truncated"][..., 0], done & (truncates == 1))
    assert torch.equal(root["terminated"][..., 0], done & (truncates == 0))
    for agent in range(2):
        for flag in ("done", "terminated", "truncated"):
            assert torch.equal(lead[flag][:, :, agent], root[flag])
    left = (step >= 2) & (ends > 2)  # they left at step 2, but where the episode ends then
    for agent in range(3):
        assert torch.equal(other["terminated"][:, :, agent, 0], left | (done & (truncates == 0)))
        assert torch.equal(other["truncated"][:, :, agent, 0], done & (truncates == 1) & ~left)
        playing = rollout["other", "mask"][:, :, agent]
        assert torch.equal(playing, ~((step > 2) & (ends > 2)))
        torch.testing.assert_close(other["reward"][:, :, agent, 0], (10 * (agent + 3) + step) * playing)
    total = 20 * ends + ends * (ends + 1) / 2  # of the second agent
    torch.testing.assert_close(lead["episode_reward"][:, :, 1, 0][done], total[done])


def test_advantages_know_truncation_and_early_ends():
    """TorchRL's GAE with values of 1: targets are the reward, and 0.5 where the state that was reached has a value."""
    env = torchrl.make(Script, 8, "cpu", **LEAVE)
    env.set_seed(3)
    rollout = env.rollout(30, break_when_any_done=False)
    for role in env.group_map:
        ones = TensorDictModule(
            lambda obs: torch.ones_like(obs[..., :1]), [(role, "observation")], [(role, "state_value")]
        )
        gae = GAE(gamma=0.5, lmbda=0.0, value_network=ones, deactivate_vmap=True)
        keys = {key: (role, key) for key in ("reward", "done", "terminated", "advantage", "value_target")}
        gae.set_keys(value=(role, "state_value"), **keys)
        target = gae(rollout.clone())[role, "value_target"][..., 0]
        step, ends, truncates = (rollout["next", role, "observation"][..., place] for place in (1, 2, 3))
        over = (step == ends) & (truncates == 0)
        if role == "other":
            over |= (step >= 2) & (ends > 2)
        torch.testing.assert_close(target, rollout["next", role, "reward"][..., 0] + 0.5 * ~over)


def test_collectors_keep_an_envs_trajectory_together():
    """An agent that leaves early ends no trajectory of its environment."""
    env = torchrl.make(Script, 4, "cpu", **LEAVE)
    (batch,) = Collector(env, None, frames_per_batch=4 * 30, total_frames=4 * 30)
    ids, done = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
    assert batch["next", "other", "done"].sum() > 3 * done.sum()
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])


def test_seeds_begin_with_the_next_reset(device):
    env = torchrl.make(Script, 3, device, num_others=1)

    def rollouts(seed: int) -> list[torch.Tensor]:
        env.set_seed(seed)
        starts = [env.reset()["lead", "observation"]]
        starts += [env.reset()["lead", "observation"]]
        return starts

    first, again, other = rollouts(7), rollouts(7), rollouts(8)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])  # a seed counts once
    assert env.set_seed(7) != 7  # TorchRL's next seed


def test_action_specs_and_masks(device):
    env = torchrl.make("tag_continuous", 2, device, **TAG, turn_levels=4)
    assert isinstance(env.full_action_spec["tagger", "action"], MultiCategorical)
    assert env.full_action_spec["tagger", "action"].shape == (2, 2, 2)
    env = torchrl.make("tag_continuous", 2, device, **TAG)
    assert type(env.full_action_spec["runner", "action"]) is Categorical
    assert env.full_action_spec_unbatched["runner", "action"].shape == (3, 2)
    env = torchrl.make("pendulum", 2, device)
    (role,) = env.group_map
    assert isinstance(env.full_action_spec[role, "action"], Bounded)

    env = torchrl.make(Crew, 5, device)
    twin = BatchedParallelEnv(Crew, 5, device, **MODES)
    env.set_seed(4)
    current, (_, extras) = env.reset(), twin.reset(seed=4)
    masks = extras["action_mask"]
    assert torch.equal(current["driver", "action_mask"], masks["driver"][0].unsqueeze(-2))
    assert torch.equal(current["helper", "action_mask"], torch.cat(masks["helper"], -1))
    env = torchrl.make(Scouts, 5, device)
    assert env.reset()["pilot", "action_mask"].shape == (5, 1, 4)
    assert env.full_observation_spec_unbatched["scout", "action_mask"].shape == (2, 2)
    assert env.full_observation_spec_unbatched["scout", "observation"].dtype == torch.uint8


def test_torchrls_action_mask_works_behind_transforms():
    masks = [ActionMask((role, "action"), (role, "action_mask")) for role in ("driver", "helper")]
    env = TransformedEnv(torchrl.make(Crew, 6, "cpu"), Compose(RewardSum(), *masks))
    check_env_specs(env, break_when_any_done="both")
    env.rollout(40, break_when_any_done=False)
    assert not env.base_env.env.vec_env.faults().any()
    assert env.rollout(9, break_when_any_done=False)["next", "done"].any()


class Recorded(BatchedParallelEnv):
    """Keeps what the step wrote."""

    def step(self, actions, out=None):
        self.last = super().step(actions, out)
        return self.last


@pytest.mark.parametrize("game", ["tag_gridworld", Scouts])
def test_torchrl_gets_views_of_the_step_buffers(game, device):
    env = torchrl.wrap(Recorded(game, 3, device, **MODES))
    given = env.step(env.rand_action(env.reset()))["next"]
    obs, rewards, _, truncations, extras = env.env.last
    for role in env.group_map:
        pairs = {"observation": obs, "reward": rewards, "truncated": truncations, "mask": extras["active"]}
        pairs |= {"action_mask": extras["action_mask"]} if game is Scouts else {}
        for key, written in pairs.items():
            assert given[role, key].data_ptr() == written[role].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize(("game", "config"), [("tag_continuous", TAG), (Crew, {}), (Scouts, {}), (Script, LEAVE)])
def test_steps_and_resets_do_not_wait_for_the_device(game, config):
    """TorchRL's own reset() looks at flags; the part that is ours, _reset, does not."""
    env = torchrl.make(game, 64, "cuda", return_state=True, **config)
    current = env.reset()
    with no_synchronisation():
        for _ in range(100):
            for role, own in split(env, env.env.sample_actions()).items():
                current[role, "action"] = own
            ended = env.step(current)["next"]
            current = env._reset(ended.select("done").rename_key_("done", "_reset"))
    assert not env.env.vec_env.faults().any()


def test_the_adapter_travels_and_closes():
    env = torchrl.make(Script, 3, "cpu", num_others=1)
    twin = cloudpickle.loads(cloudpickle.dumps(env))
    assert twin.rollout(5).batch_size[0] == 3 and twin.group_map == env.group_map
    env.close()
    with pytest.raises(ClosedEnvError):
        env.reset()


def test_other_environments_are_refused():
    with pytest.raises(TypeError, match=r"expected a gpu_vecenv\.BatchedParallelEnv"):
        torchrl.wrap(object())
    for wrong in ({"group_by": "agent"}, {"autoreset_mode": "same_step"}, {"agents_as_envs": True}):
        with pytest.raises(ValueError, match='expected \\("role", "disabled", False\\)'):
            torchrl.wrap(BatchedParallelEnv("cartpole", 2, "cpu", **{**MODES, **wrong}))
    with pytest.raises(ConfigError, match="no configuration key 'speed'"):
        torchrl.make("cartpole", 2, "cpu", speed=1)
    with pytest.raises(TypeError, match="lead's actions have dtype object"):
        env = torchrl.make(Script, 2, "cpu")
        env.step(env.reset())


@dataclass(frozen=True, kw_only=True)
class Harvest(Env):
    """The first collector is truncated at step 1, the second terminates at step 2. The role's name is TorchRL's own."""

    role: str = "collector"

    roles = property(lambda self: {self.role: 2})
    obs_dim = 1
    action_space = Discrete(2)


@pytest.fixture
def harvest(tmp_path, monkeypatch):
    source = """
        #include "game_api.cuh"
        struct Scratch {};
        HD void reset(State s, Io io) {}
        HD void step(State s, Io io) {
            ONCE {
                io.truncations[0] = io.elapsed_steps == 1;
                io.terminations[1] = io.elapsed_steps == 2;
            }
        }
        HD void observe(State s, Io io) {
            FOR_AGENTS (i) io.obs[i][0] = io.elapsed_steps;
        }
    """
    (tmp_path / "harvest.cu").write_text(textwrap.dedent(source))
    monkeypatch.setattr(Harvest, "source", tmp_path / "harvest.cu")
    return Harvest


def test_truncation_of_one_agent_does_not_truncate_the_env(harvest):
    rollout = torchrl.make(harvest, 1, "cpu", role="picker").rollout(2)["next"]
    assert [rollout[flag][0, :, 0].tolist() for flag in torchrl.FLAGS] == [[False, True], [False, True], [False, False]]
    first, second = ([rollout["picker", flag][0, :, agent, 0].tolist() for flag in torchrl.FLAGS] for agent in range(2))
    assert first == [[True, True], [False, True], [True, False]]
    assert second == [[False, True], [False, True], [False, False]]


def test_names_of_torchrl_are_refused(harvest):
    with pytest.raises(UnsupportedGameError, match=r"roles \['collector'\] have names of TorchRL's root keys"):
        torchrl.make(harvest, 2, "cpu")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpu-vecenv\[torchrl\]'"):
        importlib.reload(torchrl)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_example_learns(tmp_path):
    """TorchRL's collector, GAE and ClipPPOLoss as MAPPO."""
    pattern = r"return of random actions (\S+), after \d+ s of training (\S+)\n"
    at_random, trained = run_example_here("torchrl_mappo.py", pattern, tmp_path)
    assert trained > at_random + 3
