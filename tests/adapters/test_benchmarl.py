"""BenchMARL: the task's contract, its experiments on every kind of game it takes, and learning with its own MAPPO."""

import importlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarl", reason="benchmarl is not installed")

from benchmarl.algorithms import IppoConfig, IqlConfig, IsacConfig, MappoConfig, QmixConfig
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.cnn import CnnConfig
from benchmarl.models.mlp import MlpConfig
from games.crew import Crew
from games.economy import OpenEconomy
from games.painter import Painter
from games.scouts import Scouts
from games.script import Script
from gymnasium.spaces import Discrete
from support.adapter_contract import run_example
from torchrl.envs import check_env_specs

from gpu_vecenv import BatchedParallelEnv
from gpu_vecenv.adapters import benchmarl
from gpu_vecenv.errors import ConfigError, UnsupportedGameError

LEAVE = {"num_leads": 2, "num_others": 3, "leave": 2}
MODES = {"group_by": "role", "autoreset_mode": "disabled"}
MLP = replace(MlpConfig.get_from_yaml(), num_cells=[16])
CNN = CnnConfig(
    cnn_num_cells=[4],
    cnn_kernel_sizes=[1],
    cnn_strides=[1],
    cnn_paddings=[0],
    cnn_activation_class=torch.nn.Tanh,
    mlp_num_cells=[8],
    mlp_layer_class=torch.nn.Linear,
    mlp_activation_class=torch.nn.Tanh,
)
SMALL = {
    "on_policy_n_envs_per_worker": 8,
    "on_policy_collected_frames_per_batch": 80,
    "on_policy_minibatch_size": 40,
    "on_policy_n_minibatch_iters": 2,
    "off_policy_n_envs_per_worker": 8,
    "off_policy_collected_frames_per_batch": 80,
    "off_policy_n_optimizer_steps": 2,
    "off_policy_train_batch_size": 16,
    "off_policy_memory_size": 1000,
    "off_policy_init_random_frames": 80,
    "max_n_iters": 2,
    "max_n_frames": None,
    "loggers": [],
    "evaluation_interval": 80,
    "evaluation_episodes": 3,
}


class Seen(Callback):
    """Keeps what was collected, and the evaluations."""

    def __init__(self):
        super().__init__()
        self.batches, self.evaluations = [], []

    def on_batch_collected(self, batch):
        self.batches.append(batch.clone())

    def on_evaluation_end(self, rollouts):
        self.evaluations.append(rollouts)


def run(task, algorithm, model, folder, **config) -> tuple[Experiment, Seen]:
    seen = Seen()
    config = replace(ExperimentConfig.get_from_yaml(), **{**SMALL, "save_folder": str(folder), **config})
    experiment = Experiment(task, algorithm.get_from_yaml(), model, seed=1, config=config, callbacks=[seen])
    experiment.run()
    return experiment, seen


@pytest.mark.parametrize(
    ("game", "config"), [("simple_tag", {}), (Scouts, {}), (Painter, {}), (Script, {**LEAVE, "return_state": True})]
)
def test_specs_have_no_axis_of_envs(game, config, device):
    task = benchmarl.task(game, **config)
    env = task.get_env_fun(num_envs=6, continuous_actions=False, seed=3, device=device)()
    check_env_specs(env, break_when_any_done="both")
    groups = task.group_map(env)
    assert groups == env.group_map and env.batch_size == (6,) and task.max_steps(env) == env.env.max_episode_length
    observed, acted, state = task.observation_spec(env), task.action_spec(env), task.state_spec(env)
    for role, agents in groups.items():
        assert list(observed[role].keys()) == ["observation"] and list(acted[role].keys()) == ["action"]
        assert observed[role, "observation"].shape == (len(agents), *env.env.observation_space(role).shape)
        assert acted[role].shape == (len(agents),)
    assert (state is None) == (game is not Script) and (state is None or list(state.keys()) == ["state"])
    assert task.info_spec(env) is None
    masks = task.action_mask_spec(env)
    assert (masks is None) == (game is not Scouts)
    if masks is not None:
        assert {role: tuple(masks[role, "action_mask"].shape) for role in groups} == {"scout": (2, 2), "pilot": (1, 4)}
    assert task.supports_continuous_actions() == (game is Painter) != task.supports_discrete_actions()
    assert (task.env_name(), task.has_render(env)) == ("gpu_vecenv", False)


def test_the_seed_reaches_the_environments():
    task = benchmarl.task("simple_spread")
    twin = BatchedParallelEnv("simple_spread", 4, "cpu", **MODES)
    for seed in (3, 4):
        expected, _ = twin.reset(seed=seed)
        env = task.get_env_fun(num_envs=4, continuous_actions=False, seed=seed, device="cpu")()
        assert torch.equal(env.reset()["agent", "observation"], expected["agent"])
    assert task.get_env_fun(4, False, None, "cpu")().reset().batch_size == (4,)


@pytest.mark.parametrize(
    ("game", "config", "algorithm", "model"),
    [
        (Script, {**LEAVE, "return_state": True}, MappoConfig, MLP),  # agents leave, the critic sees all groups
        (Script, {**LEAVE, "continuous": True}, MappoConfig, MLP),
        ("simple_tag", {"continuous_actions": True}, IsacConfig, MLP),
        ("simple_tag", {}, QmixConfig, MLP),
        (Scouts, {}, MappoConfig, CNN),  # masks, images, groups of different spaces
        (Scouts, {}, IqlConfig, CNN),  # begins with random actions
    ],
)
def test_experiments_run_on_valid_actions(game, config, algorithm, model, tmp_path):
    experiment, seen = run(benchmarl.task(game, **config), algorithm, model, tmp_path)
    assert experiment.total_frames == 160 and len(seen.batches) == 2 and len(seen.evaluations) == 2
    assert all(value.isfinite().all() for loss in experiment.losses.values() for value in loss.parameters())
    # An env that is given an invalid action is not stepped and has no reward, which in these games everybody gets.
    always = {Script: "lead", Scouts: "pilot"}.get(game)
    assert always is None or all((batch["next", always, "reward"] != 0).all() for batch in seen.batches)


def test_returns_are_those_of_the_episodes(tmp_path):
    """What BenchMARL logs as return is the mean over groups and agents, of environments that are done."""
    experiment, seen = run(benchmarl.task(Script, num_others=1), IppoConfig, MLP, tmp_path, max_n_iters=1)
    (batch,) = seen.batches
    ends = batch["next", "lead", "observation"][:, :, 0, 2][batch["next", "done"][..., 0]]
    assert len(ends) > 8
    returns = 15 * ends + ends * (ends + 1) / 2  # 10 and 20 a step, and the steps
    assert experiment.mean_return == pytest.approx(returns.mean().item(), rel=1e-5)  # sums of float32
    ((*rollouts,),) = seen.evaluations
    assert len(rollouts) == 3 and all(len(rollout) <= 6 for rollout in rollouts)


def test_tasks_travel(tmp_path):
    task = benchmarl.task(Script, **LEAVE)
    assert pickle.loads(pickle.dumps(task)) == task != benchmarl.task(Script)
    assert task.name == "script" and task.config.items() >= LEAVE.items()
    assert benchmarl.task(Script(max_steps=8)) != benchmarl.task(Script(max_steps=9))
    for word in ("num_envs", "device", "seed"):
        with pytest.raises(ConfigError, match=f"{word} is 3; the adapter sets it"):
            benchmarl.task(Script, **{word: 3})
    experiment, _ = run(task, IppoConfig, MLP, tmp_path, checkpoint_at_end=True, max_n_iters=1)
    (checkpoint,) = Path(experiment.folder_name).rglob("checkpoint_*.pt")
    assert Experiment.reload_from_file(str(checkpoint)).task == task


def test_evaluations_can_be_filmed():
    pytest.importorskip("pygame", reason="pygame is not installed")
    task = benchmarl.task("tag_gridworld", render_mode="rgb_array")
    env = task.get_env_fun(2, False, 0, "cpu")()
    env.reset()
    assert task.has_render(env)
    frame = task.render_callback(None, env, None)
    assert frame.ndim == 3 and frame.shape[-1] == 3


def test_games_that_benchmarl_cannot_train_are_refused():
    for refused in (benchmarl.task, lambda game: benchmarl.make(game, 2, "cpu")):
        for game in ("tag_continuous", Crew):
            with pytest.raises(UnsupportedGameError, match="BenchMARL does not support MultiDiscrete"):
                refused(game)
    with pytest.raises(UnsupportedGameError, match="BenchMARL does not support MultiDiscrete"):
        benchmarl.wrap(BatchedParallelEnv(Crew, 2, "cpu", **MODES))
    assert benchmarl.wrap(BatchedParallelEnv("cartpole", 2, "cpu", **MODES)).batch_size == (2,)
    spaces = {**OpenEconomy().action_space, "worker": Discrete(3)}
    town = type("Town", (OpenEconomy,), {"__module__": __name__, "action_space": spaces})
    with pytest.raises(
        UnsupportedGameError, match=r"not support a Box beside discrete actions; .*do: torchrl, skrl, rllib"
    ):
        benchmarl.make(town, 2, "cpu")
    game = replace(benchmarl.task(Script).game)
    object.__setattr__(game, "max_steps", None)  # as of a game without the field
    with pytest.raises(UnsupportedGameError, match="script has no max_steps"):
        benchmarl.checked(game)
    with pytest.raises(ConfigError, match="no configuration key 'speed'"):
        benchmarl.make("cartpole", 2, "cpu", speed=1)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarl.environments", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gpu-vecenv\[benchmarl\]'"):
        importlib.reload(benchmarl)


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    pattern = r"return of random actions (\S+), after \d+ s of training (\S+)\n"
    at_random, trained = run_example("benchmarl_mappo.py", pattern, tmp_path)
    assert trained > at_random + 3
