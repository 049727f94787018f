"""Prioritised level replay: levels with more to learn are played more often, by the formulas of the paper."""

import dataclasses

import numpy as np
import pytest
import torch
from games.exam import ALL, NOTHING, RIGHT, Exam

import gpu_vecenv
from gpu_vecenv import Curriculum, LevelReplay, OpponentsConfig, PPOConfig, PQNConfig, Trainer
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.evaluation import Evaluator
from gpu_vecenv.train.level_replay import level_probabilities, rows_of_levels

CONFIG = PPOConfig(
    total_steps=10**6, num_steps=7, num_minibatches=2, num_epochs=2, hidden_sizes=(16,), learning_rate=0.01
)

pytestmark = pytest.mark.usefixtures("one_thread")


def exam(device, pays, num_envs=16, **config):
    given = {"paper": np.arange(len(pays), dtype=np.int32), "pays": np.array(pays, np.int32)}
    return gpu_vecenv.make(Exam, num_envs, device, num_papers=len(pays), initial_states=given, **config)


def trainer_of(device, pays=(NOTHING, ALL, RIGHT, RIGHT, RIGHT), config=CONFIG, replay=None, seed=3, **arguments):
    players = arguments.pop("num_players", 2)
    curriculum = Curriculum(levels=replay or LevelReplay())
    return Trainer(exam(device, pays, num_players=players), config, seed=seed, curriculum=curriculum, **arguments)


# Oracles, in NumPy and Python's numbers, one level or episode at a time


def probabilities(scores, scored, clock, temperature, staleness):
    """Jiang et al., "Prioritized level replay", 2021, section 3; None: the level has no score."""
    number = len(scores)
    seen = [level for level in range(number) if scored[level] is not None]
    found = np.full(number, 1 / number)
    if not seen:
        return found
    by_score = sorted(seen, key=lambda level: -scores[level])  # stable
    weights = {level: (1 / rank) ** (1 / temperature) for rank, level in enumerate(by_score, start=1)}
    ages = {level: clock - scored[level] for level in seen}
    for level in seen:
        by_age = ages[level] / sum(ages.values()) if sum(ages.values()) else 1 / len(seen)
        share = (1 - staleness) * weights[level] / sum(weights.values()) + staleness * by_age
        found[level] = len(seen) / number * share
    return found


class Scores:
    """Plays through rollouts step by step; levels come from observations."""

    def __init__(self, levels, envs, positive):
        self.scores, self.scored, self.positive = [0.0] * levels, [None] * levels, positive
        self.running = [[] for _ in range(envs)]  # values of the episode's steps so far
        self.clock = 0

    def rollout(self, obs, active, learned, advantages):
        values = {}
        for env, running in enumerate(self.running):
            for t in range(len(advantages)):
                if not active[t, env].any():  # a step that resets
                    assert not running
                    continue
                if t == 0 and obs[t, env, :, len(self.scores)].any():  # another opponent: it begins anew
                    running.clear()
                for agent in np.flatnonzero(learned[t, env]):
                    x = float(advantages[t, env, agent])
                    running.append(max(x, 0.0) if self.positive else abs(x))
                if not active[t + 1, env].any():
                    agent = np.flatnonzero(active[t, env])[0]
                    level = int(obs[t, env, agent, : len(self.scores)].argmax())
                    values.setdefault(level, []).extend(running)
                    running.clear()
        for level, own in values.items():
            if own:
                self.scores[level], self.scored[level] = float(np.mean(own)), self.clock
        self.clock += 1


# Formulas


@pytest.mark.parametrize(("temperature", "staleness"), [(0.1, 0.1), (1.0, 0.0), (0.5, 1.0), (2, 0.3)])
def test_probabilities_are_those_of_the_paper(temperature, staleness, device):
    rng = np.random.default_rng(1)
    for number, unseen in ((1, 0), (6, 0), (6, 2), (6, 6), (500, 100)):
        scores = rng.exponential(size=number).round(2)  # some of them equal
        scored = [None if level < unseen else int(rng.integers(0, 9)) for level in rng.permutation(number)]
        for clock in (9, 30):
            found = level_probabilities(
                torch.tensor(scores, device=device),
                torch.tensor([-1 if time is None else time for time in scored], device=device),
                torch.tensor(clock, device=device),
                temperature,
                staleness,
            )
            # A few roundings of float64, among them those of a power of up to 1 / 0.1.
            expected = probabilities(scores, scored, clock, temperature, staleness)
            np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-12, atol=0)
            assert found.sum().item() == pytest.approx(1, rel=1e-12)


def test_levels_scored_at_the_same_time_are_equally_stale(device):
    scores, scored = torch.tensor([2.0, 1.0], dtype=torch.float64, device=device), torch.tensor([4, 4], device=device)
    found = level_probabilities(scores, scored, torch.tensor(4, device=device), 1.0, 0.5)
    assert found.tolist() == pytest.approx([0.5 * 2 / 3 + 0.25, 0.5 / 3 + 0.25])


@pytest.mark.parametrize("rows", [7, 1024])
def test_levels_have_rows_in_proportion_to_their_probability(rows, device):
    given = np.array([0.5, 0.0, 0.0004, 0.3, 0.1996])
    offsets = (np.arange(500) + 0.5) / 500
    counts = []
    for offset in offsets:
        levels = rows_of_levels(
            torch.tensor(given, device=device), torch.tensor(offset, dtype=torch.float64, device=device), rows
        )
        counts.append(np.bincount(levels.cpu().numpy(), minlength=5))
        assert (np.abs(counts[-1] - rows * given) < 1).all()  # rounded up or down
    # An offset at which a level's number changes lies between two of the 500: each end is off by up to one of them.
    assert (np.abs(np.mean(counts, 0) - rows * given) <= 2 / 500 + 1e-6).all()


# Scores


@pytest.mark.parametrize("score", ["magnitude", "positive"])
@pytest.mark.parametrize("with_opponents", [False, True])
def test_scores_are_means_over_the_episodes_that_ended(score, with_opponents, device):
    pays = (NOTHING, ALL, RIGHT, RIGHT, RIGHT)
    opponents = (
        OpponentsConfig(share=0.5, num_ranges=2, num_snapshots=3, snapshot_interval=1, reassign_interval=1)
        if with_opponents
        else None
    )
    names = {"policies": None, "sharing": "agent"} if with_opponents else {}
    trainer = trainer_of(device, pays, replay=LevelReplay(score=score, staleness=0.3), opponents=opponents, **names)
    oracle, data, env = Scores(len(pays), 16, score == "positive"), trainer.rollout, trainer.env
    for _ in range(12):
        before = trainer.levels.probabilities().cpu().numpy()
        scored = [time if time is None else int(time) for time in oracle.scored]
        np.testing.assert_allclose(before, probabilities(oracle.scores, scored, oracle.clock, 0.1, 0.3), rtol=1e-9)
        trainer.train_iteration()
        oracle.rollout(*(x.cpu().numpy() for x in (data.obs, data.active, data.learned, data.advantages)))
        found = [None if time < 0 else time for time in trainer.levels.scored.tolist()]
        assert found == oracle.scored
        # Values are rounded once to units of 2^-50 of the largest, and float64 sums differ in their order.
        assert trainer.levels.scores.tolist() == pytest.approx(oracle.scores, rel=1e-9, abs=1e-12)
        assert trainer.levels.level.equal(env.state["paper"].long())
    assert None not in oracle.scored


def test_levels_are_those_that_the_engine_draws_from_seeds_and_rows_of_any_number(device):
    for seed, number in ((0, 3), (2**63 + 5, 1500)):
        config = PPOConfig(total_steps=10**6, num_steps=16, num_minibatches=1, num_epochs=1, hidden_sizes=(4,))
        trainer = trainer_of(device, (ALL,) * number, config, seed=seed)
        for _ in range(3):
            trainer.train_iteration()
            assert trainer.levels.level.equal(trainer.env.state["paper"].long())
        assert len(trainer.levels.level.unique()) > 2


def test_learnable_levels_are_replayed_more_often(device):
    """Papers 0 to 6 pay nothing or all: soon their values are known. Paper 7 is a matter of eight right answers."""
    pays = (NOTHING,) * 3 + (ALL,) * 4 + (RIGHT,)
    config = dataclasses.replace(
        CONFIG, learning_rate=0.003, num_steps=16, num_epochs=4, num_minibatches=4, gae_lambda=0.8
    )
    env = exam(device, pays, 64, max_steps=8)
    trainer = Trainer(env, config, seed=1, curriculum=Curriculum(levels=LevelReplay(temperature=1.0)))
    begun = torch.zeros(len(pays))
    for iteration in range(50):
        trainer.train_iteration()
        obs = trainer.rollout.obs[1:, :, 0]
        if iteration >= 25:
            begun += obs[obs[..., len(pays)] == 1].cpu()[:, : len(pays)].sum(0)  # with the first question
    assert begun.sum() > 1000
    assert begun[-1] > 2 * begun.sum() / len(pays) and begun[-1] > 2 * begun[:-1].max()


# The environment


def test_evaluations_are_of_all_levels_equally(device):
    trainer = trainer_of(device, replay=LevelReplay(staleness=0.0))
    tables = {name: trainer.env.data[f"initial_{name}"].clone() for name in ("paper", "pays")}
    for _ in range(6):
        trainer.train_iteration()
    assert trainer.levels.probabilities().max() > 0.9
    assert all(trainer.env.data[f"initial_{name}"].equal(table) for name, table in tables.items())
    evaluator = Evaluator(trainer.env, 500)
    evaluator({"player": None}, 500)
    assert evaluator.env.state["paper"].bincount(minlength=5).min() > 60  # 100 expected, standard deviation 9


def test_an_environment_is_a_template(device):
    env = exam(device, (ALL, RIGHT), autoreset_mode="next_step")
    trainer = Trainer(env, CONFIG, curriculum=Curriculum(levels=LevelReplay()))
    assert trainer.env is not env and len(env.data["initial_paper"]) == 2
    assert trainer.env.num_envs == env.num_envs and trainer.env.autoreset_mode == "next_step"


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        PQNConfig(total_steps=10**6, num_steps=7, num_minibatches=2, num_epochs=1, hidden_sizes=(8,)),
    ],
)
@pytest.mark.parametrize("before", [1, 5])
def test_a_resumed_run_is_bit_identical(config, before, device, tmp_path):
    whole, part, resumed = (trainer_of(device, config=config) for _ in range(3))
    for _ in range(before):
        whole.train_iteration()
        part.train_iteration()
    part.save(tmp_path / "a.safetensors")
    for _ in range(2):
        resumed.train_iteration()
    resumed.levels.begin_rollout()  # as where an iteration was interrupted
    resumed.load(tmp_path / "a.safetensors")
    for _ in range(6):
        one, other = (trainer.state()[0] for trainer in (whole, resumed))
        assert one.keys() == other.keys() and [n for n, x in one.items() if not x.equal(other[n])] == []
        assert whole.evaluate(16) == resumed.evaluate(16)
        whole.train_iteration()
        resumed.train_iteration()


def test_graphs_change_nothing_and_options_do(device):
    one, same = trainer_of(device), trainer_of(device, graphs=False)
    other = trainer_of(device, replay=LevelReplay(temperature=1.0))
    for trainer in (one, same, other):
        for _ in range(8):
            trainer.train_iteration()
    assert one.levels.scores.equal(same.levels.scores) and not one.levels.scores.equal(other.levels.scores)


def test_a_checkpoint_of_another_replay_is_refused(device, tmp_path):
    path = trainer_of(device).save(tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="its curriculum"):
        trainer_of(device, replay=LevelReplay(staleness=0.2)).load(path)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"score": "td"}, "score is 'td'; expected one of 'magnitude', 'positive'"),
        ({"temperature": 0}, "temperature is 0; expected a finite number > 0"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"staleness": 1.5}, r"staleness is 1.5; expected a number in \[0, 1\]"),
        ({"staleness": float("nan")}, "staleness is nan"),
    ],
)
def test_options_out_of_range_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        LevelReplay(**arguments)


def test_levels_need_initial_states(device):
    env = gpu_vecenv.make(Exam, 4, device)
    with pytest.raises(ConfigError, match="levels replays initial states, of which the environment has none"):
        Trainer(env, CONFIG, curriculum=Curriculum(levels=LevelReplay()))


def test_levels_beside_a_schedule_of_initial_states_are_refused():
    with pytest.raises(ConfigError, match="both given"):
        Curriculum(levels=LevelReplay(), initial_states={"pays": lambda progress: 1})
    with pytest.raises(TypeError, match="levels is a int"):
        Curriculum(levels=3)
