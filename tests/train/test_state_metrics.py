"""A game's own metrics: fields of its state that it names, in training, evaluations and tables."""

import csv
import json
from dataclasses import dataclass

import pytest
from gymnasium.spaces import Discrete
from support.training import SMALL

import gpu_vecenv
from gpu_vecenv import Env, Field
from gpu_vecenv.declare.env import i32
from gpu_vecenv.errors import ConfigError, EnvDefinitionError
from gpu_vecenv.train.evaluation import evaluate
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.trainer import Trainer

SOURCE = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) {
    ONCE s.ends[0] = 2 + io.rng.below(0, 0, 9);
    FOR_AGENTS(i) for (int k = 0; k < 2; ++k) s.done[i][k] = 0;
}
HD void step(State s, Io io) {
    FOR_AGENTS(i) {
        for (int k = 0; k < 2; ++k) s.done[i][k] += 1;
        io.terminations[i] = io.elapsed_steps >= s.ends[0];
    }
}
HD void observe(State s, Io io) { FOR_AGENTS(i) io.obs[i][0] = 1; }
"""


@dataclass(frozen=True, kw_only=True)
class Lasting(Env):
    """Episodes of 2 to 10 steps, which a field of the state counts."""

    state = (Field("ends", i32), Field("done", i32, ("num_agents", 2)))
    state_metrics = ("ends", "done")
    roles = {"agent": 3}  # noqa: RUF012
    obs_dim = 1
    action_space = Discrete(2)


@pytest.fixture
def lasting(tmp_path, monkeypatch):
    (tmp_path / "lasting.cu").write_text(SOURCE)
    monkeypatch.setattr(Lasting, "source", tmp_path / "lasting.cu", raising=False)
    return Lasting


def test_evaluations_have_the_mean_at_the_end_of_the_episodes(lasting, device):
    """A field that counts steps is the length of the episode, also in several rounds and in single episodes."""
    env = gpu_vecenv.make(lasting, 7, device)
    found = evaluate(env, {"agent": None}, 20)
    assert found["state_ends"] == found["state_done"] == found["episode_length"]
    assert 2 < found["episode_length"] < 10


def test_rows_of_training_have_the_mean_over_environments_after_the_iteration(lasting, device):
    env = gpu_vecenv.make(lasting, 16, device, autoreset_mode="next_step")
    trainer = Trainer(env, SMALL)
    for _ in range(2):
        metrics = trainer.train_iteration()
        for name in lasting.state_metrics:
            assert metrics[f"state_{name}"] == pytest.approx(float(env.state[name].double().mean()), rel=1e-15)
    values = []
    for _ in range(2):  # the mean over the iterations of a row
        trainer.launch_iteration()
        values.append(float(env.state["ends"].double().mean()))
    assert trainer.read_iteration()["state_ends"] == pytest.approx(sum(values) / 2, rel=1e-15)


def test_a_run_writes_them_and_may_choose_its_best_checkpoint_by_one(lasting, tmp_path, capsys):
    env = gpu_vecenv.make(lasting, 8, "cpu", autoreset_mode="next_step")
    trainer = Trainer(env, PPOConfig(total_steps=64, num_steps=4, num_minibatches=1, hidden_sizes=(8,)))
    assert run(trainer, tmp_path, RunConfig(episodes=4, best_episodes=2, best_metric="state_done")) == 0
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert all(2 <= float(row["state_ends"]) <= 10 for row in csv.DictReader(file))
    results = json.loads((tmp_path / "evaluation.json").read_text())
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("all trained"))
    assert line.split()[-2:] == [f"{results['all trained'][f'state_{name}']:.2f}" for name in ("ends", "done")]
    assert (tmp_path / "checkpoints/best.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"state_cell.*terminated_fraction, state_ends, state_done"):
        run(trainer, tmp_path / "other", RunConfig(best_metric="state_cell"))


def test_only_fields_of_the_state_are_metrics():
    with pytest.raises(EnvDefinitionError, match=r"state_metrics has \['end'\]; expected fields of its state"):
        type("Wrong", (Lasting,), {"state_metrics": ("end",)})().layout  # noqa: B018


def test_a_game_without_them_has_none(device):
    metrics = Trainer(gpu_vecenv.make("cartpole", 4, device, autoreset_mode="next_step"), SMALL).train_iteration()
    assert [name for name in metrics if name.startswith("state_")] == []
