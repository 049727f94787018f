"""The best checkpoint: chosen by episodes against fixed opponents, which leave training as it is."""

import csv
import dataclasses
from dataclasses import dataclass
from statistics import fmean

import pytest
from games.race import Race
from gymnasium.spaces import Discrete
from support.bitwise import equal_bits
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv import Env, Field
from gpu_vecenv.declare.env import i32
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.checkpoint import load_checkpoint
from gpu_vecenv.train.evaluation import Evaluator, evaluate
from gpu_vecenv.train.fixed_opponents import FixedOpponents
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.selection import SEED, Selection
from gpu_vecenv.train.trainer import PolicySpec, Trainer

EARLY = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { ONCE s.ends[0] = io.rng.uniform(0, 0) < 0.5f ? 2 : 12; }
HD void step(State s, Io io) {
    ONCE {
        io.rewards[0] = s.ends[0] == 2 ? 5.0f : io.action(0) == 1 ? 0.5f : 0.0f;
        if (POISONED) io.rewards[0] = math::from_bits(0x7fc00000u);
        io.terminations[0] = io.elapsed_steps >= s.ends[0];
    }
}
HD void observe(State s, Io io) { ONCE io.obs[0][0] = 1; }
"""


@dataclass(frozen=True, kw_only=True)
class Early(Env):
    """Every other episode ends at once, and pays 10. The others pay 0.5 for each of 12 right actions."""

    poisoned: bool = False
    state = (Field("ends", i32),)
    obs_dim = 1
    action_space = Discrete(2)


@pytest.fixture
def early(tmp_path, monkeypatch):
    (tmp_path / "early.cu").write_text(EARLY)
    monkeypatch.setattr(Early, "source", tmp_path / "early.cu", raising=False)
    config = PPOConfig(total_steps=32 * 4 * 10, num_steps=4, hidden_sizes=(8,), learning_rate=0.02)

    def trainer(device="cpu", **game):
        return Trainer(gpu_vecenv.make(Early, 32, device, **game), config, seed=2)

    return trainer


def table(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(folder, name):
    return load_checkpoint(folder / "checkpoints" / f"{name}.safetensors")


def test_early_ends_with_a_high_return_are_neither_the_curves_maximum_nor_the_best_checkpoint(early, tmp_path, device):
    folder, trainer = tmp_path / "run", early(device)
    run(trainer, folder, RunConfig(episodes=1, checkpoint_seconds=0, keep=100, best_episodes=64, best_interval=0))
    rows = table(folder)
    begun = [row["first_episodes"] for row in rows].index("0.0")
    returns = [float(row["return_agent"]) for row in rows[begun:]]
    assert float(rows[0]["episodes"]) > 0 and all(row["return_agent"] == "" for row in rows[:begun])
    assert returns[0] < max(returns) < 10
    other, scores = early(device), []
    env = other.env.like(num_envs=64)
    for iteration in range(1, 11):
        other.load_state(*checkpoint(folder, f"iteration-{iteration:08d}"), "it")
        scores.append(evaluate(env, other.policies, 64, seed=SEED)["return_agent"])
    best = max(scores)
    _, manifest = checkpoint(folder, "best")
    assert manifest["iteration"] == scores.index(best) + 1 > begun
    chosen = {"best": best, "best_iteration": manifest["iteration"], "training_episodes": 0}
    assert manifest["progress"]["selection"] == chosen
    assert checkpoint(folder, "iteration-00000010")[1]["progress"]["selection"] == chosen


def test_training_is_the_same_with_and_without(tmp_path, device):
    folders = {episodes: tmp_path / str(episodes) for episodes in (0, 7)}
    for episodes, folder in folders.items():
        config = RunConfig(episodes=1, checkpoint_seconds=0, digests=True, best_episodes=episodes, best_interval=0)
        run(Trainer(leaving(device), dataclasses.replace(SMALL, total_steps=48 * 4), seed=3), folder, config)
    digests = [[row["weights"] for row in table(folder)] for folder in folders.values()]
    assert digests[0] == digests[1] and len(set(digests[0])) == 4
    assert equal_bits(*(checkpoint(folder, "iteration-00000004")[0] for folder in folders.values()))
    assert [(folder / "checkpoints" / "best.safetensors").exists() for folder in folders.values()] == [False, True]


@pytest.mark.parametrize(
    ("metric", "pairs"),
    [
        (None, [("runner", "return_tagger"), ("tagger", "return_runner")]),
        ("return_runner", [("tagger", "return_runner")]),
        ("episode_length", [("runner", "episode_length"), ("tagger", "episode_length")]),
    ],
)
def test_a_score_is_the_mean_over_trained_roles_and_their_opponents(metric, pairs, device):
    trainer, initial = (Trainer(leaving(device), SMALL, seed=4) for _ in range(2))
    selection = Selection(trainer, metric, 6, 0)
    trainer.train_iteration()
    assert selection.is_best()
    scores = []
    for other, name in pairs:
        for opponent in (None, initial.policies[other]):
            scores.append(evaluate(trainer.env, {**trainer.policies, other: opponent}, 6, seed=SEED)[name])
    assert selection.state.best == pytest.approx(fmean(scores), rel=1e-12)  # a mean of means, or of all at once
    assert selection.state.best_iteration == 1
    assert not selection.is_best()  # the same again is no better
    selection.close()


def test_agents_of_a_role_play_together(device):
    """With policies of their own; a frozen one by its policy, also where the others of its role act randomly."""
    specs = {name: PolicySpec(train=name != "tagger_1") for name in ("tagger_0+tagger_2", "tagger_1", "runner")}
    trainer = Trainer(leaving(device), SMALL, policies=specs, seed=4)
    opponents = FixedOpponents(trainer, ["random"])
    random = {
        match.role: {name for name, actor in opponents.role_policies(match).items() if actor is None}
        for match in opponents.matches
    }
    assert random == {"tagger": {"runner"}, "runner": {"tagger_0", "tagger_2"}}
    selection = Selection(trainer, None, 6, 0, opponents)
    assert selection.is_best()
    alone = [(["runner"], "return_tagger"), (["tagger_0", "tagger_2"], "return_runner")]
    scores = [trainer.evaluate(6, random_roles=random, seed=SEED)[name] for random, name in alone]
    assert selection.state.best == fmean(scores)
    assert scores[1] != trainer.evaluate(6, random_roles=["tagger"], seed=SEED)["return_runner"]
    selection.close()


def test_frozen_roles_are_opponents_by_their_policies(device):
    specs = {"tagger": PolicySpec(), "runner": PolicySpec(train=False)}
    trainer = Trainer(leaving(device), SMALL, policies=specs, seed=4)
    results = {metric: Selection(trainer, metric, 6, 0) for metric in (None, "return_runner")}
    assert all(selection.is_best() for selection in results.values())
    played = trainer.evaluate(6, seed=SEED)
    assert played != trainer.evaluate(6, random_roles=["runner"], seed=SEED)
    assert results[None].state.best == played["return_tagger"]
    assert results["return_runner"].state.best == played["return_runner"]
    idle = Trainer(leaving(device), SMALL, policies=dict.fromkeys(specs, PolicySpec(train=False)))
    assert not Selection(idle, None, 6, 0).is_best()


@pytest.mark.parametrize("metric", [None, "return_player_1"])
def test_players_of_a_zero_sum_game_of_one_role_are_scored_each(metric, device):
    """The mean return of the role is always 0."""
    env = gpu_vecenv.make(Race, 6, device)
    trainer, initial = (Trainer(env, SMALL, seed=4) for _ in range(2))
    selection = Selection(trainer, metric, 6, 0)
    trainer.train_iteration()
    assert selection.is_best()
    now, scores = trainer.policies["player"], []
    for opponent in (None, initial.policies["player"]):
        for player, other in (("player_0", "player_1"), ("player_1", "player_0"))[0 if metric is None else 1 :]:
            scores.append(evaluate(env, {player: now, other: opponent}, 6, seed=SEED)[f"return_{player}"])
    assert selection.state.best == pytest.approx(fmean(scores), rel=1e-12) and any(scores)
    assert [result.role for result in selection.results] == ["player_0"] * 2 + ["player_1"] * 2
    selection.close()
    with pytest.raises(
        ConfigError, match="'return_player'; expected one of return_player_0, return_player_1, episode_l"
    ):
        Selection(trainer, "return_player", 6, 0)


def test_a_score_is_due_after_training_episodes_in_proportion_to_its_own():
    selection = Selection(Trainer(leaving("cpu"), SMALL), None, 3, 10)
    for episodes, due in ((119.0, False), (120.0, True)):  # 10 x 3 episodes x 2 roles x 2 opponents
        selection.state.training_episodes = episodes
        assert selection.due() is due
    selection.is_best()
    assert not selection.due()


def test_a_score_that_is_not_finite_is_never_the_best(early):
    selection = Selection(early(poisoned=True), None, 4, 0)
    assert not selection.is_best() and selection.state.best is None


def test_an_unknown_metric_is_refused():
    with pytest.raises(ConfigError, match=r"best_metric is 'retrun'; expected one of return_tagger, return_runner, ep"):
        Selection(Trainer(leaving("cpu"), SMALL), "retrun", 4, 0)


def test_an_evaluator_repeats_itself_and_follows_shared_fields(device):
    env = gpu_vecenv.make("simple_spread", 3, device, curriculum=True)
    evaluator, random = Evaluator(env, 3), dict.fromkeys(env.game.layout.roles)
    first = evaluator(random, 7, seed=5)
    assert evaluator(random, 7, seed=6) != first
    assert evaluator(random, 7, seed=5) == first == evaluate(env, random, 7, seed=5)
    env.state["curriculum_stage"].fill_(1)
    changed = evaluator(random, 7, seed=5)
    assert changed != first and changed == evaluate(env, random, 7, seed=5)
    evaluator.close()
