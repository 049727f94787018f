"""Cross-play: matrices of mean returns, self-play against cross-play, ratings."""

import dataclasses
import json
import sys

import pytest
import torch
from games.crew import Crew
from games.gift import Gift
from games.kuhn import Kuhn

import gpu_vecenv
from gpu_vecenv import GamePolicy, PPOConfig, Trainer, evaluate
from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.crossplay import CrossPlay, crossplay, ratings, self_and_cross_play

TINY = PPOConfig(total_steps=64, num_steps=4, num_epochs=1, num_minibatches=2, hidden_sizes=(8,), learning_rate=0.05)
TAG = {"num_taggers": 2, "num_runners": 2, "side": 3.0, "max_steps": 9, "num_neighbors": 2, "tagging_distance": 0.3}


def always(choice):
    return lambda obs: torch.full(obs.shape[:2], choice, dtype=torch.int32, device=obs.device)


def made(env, seed, changes=None, **how):
    trainer = Trainer(env, dataclasses.replace(TINY, **(changes or {})), seed=seed, **how)
    trainer.train()
    return GamePolicy(env.game, trainer.policies, trainer.configs)


# Matrices


def test_a_row_plays_the_first_agent_and_a_column_all_others(device):
    """Of three players with a gift of 2: what each gets follows from who gives, 0 or 1, at a cost of 1."""
    env = gpu_vecenv.make(Gift, 4, device)
    gives = {"keeps": 0, "gives": 1}
    found = crossplay(env, {name: {"player": always(choice)} for name, choice in gives.items()}, episodes=6)
    assert found.rows == found.columns == ["keeps", "gives"] and found.episodes == 6
    assert found.sides == ("player_0", "player_1+player_2")
    first = [[2 * 2 * column - row for column in gives.values()] for row in gives.values()]
    others = [[2 * (row + column) - column for column in gives.values()] for row in gives.values()]
    for returns, expected in zip(found.returns_of_sides, (first, others), strict=True):
        assert returns.shape == (2, 2, 6)
        assert (returns == torch.tensor(expected, dtype=torch.float64)[:, :, None]).all()
    matrix, *of_sides = found.returns.values()
    assert list(found.returns) == ["player", *found.sides] and matrix.standard_error == [[0, 0], [0, 0]]
    assert [one.mean for one in of_sides] == [first, others]
    expected = [[(a + 2 * b) / 3 for a, b in zip(*rows, strict=True)] for rows in zip(first, others, strict=True)]
    assert matrix.mean == [pytest.approx(row) for row in expected]  # sums of thirds are rounded
    told = found.self_and_cross_play["player"]
    assert told.self_play == pytest.approx(1.5) and told.cross_play == pytest.approx(1.5) and told.runs == 2
    assert json.loads(json.dumps(found.as_dict()))["returns"]["player"]["mean"] == matrix.mean


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["role", "agent", "all"])
def test_each_cell_is_the_evaluation_of_its_pairing(sharing, device):
    env = gpu_vecenv.make("tag_continuous", 8, device, **TAG)
    runs = {f"run {seed}": made(env, seed, {"normalize_obs": True}, sharing=sharing) for seed in (1, 2)}
    found = crossplay(env, {**runs, "random": None}, episodes=24, seed=5)
    assert found.rows == found.columns == ["run 1", "run 2", "random"] and found.sides == ("tagger", "runner")
    for i, row in enumerate(found.rows):
        for j, column in enumerate(found.columns):
            actors = {"tagger": None} if row == "random" else runs[row].policies_of("tagger")
            actors = actors | ({"runner": None} if column == "random" else runs[column].policies_of("runner"))
            expected = evaluate(env, actors, 24, seed=5)
            for role, matrix in found.returns.items():
                assert matrix.mean[i][j] == pytest.approx(expected[f"return_{role}"], rel=1e-9)
    errors = found.returns_of_sides[0].std(-1) / 24**0.5
    torch.testing.assert_close(torch.tensor(found.returns["tagger"].standard_error).double(), errors.cpu())
    assert len({value for row in found.returns["runner"].mean for value in row}) > 3


@pytest.mark.slow
def test_memories_and_parts_of_roles_play_too(device):
    env = gpu_vecenv.make(Kuhn, 8, device)
    runs = {kind: made(env, 3, {"network": kind}) for kind in ("gru", "mlp")}
    found = crossplay(env, runs, episodes=16, roles=["second"])
    assert found.sides == ("second", "first")
    for first, second in zip(*(found.returns[role].mean for role in ("first", "second")), strict=True):
        assert first == [-value for value in second]  # whole numbers / 16
    env = gpu_vecenv.make("simple_spread", 4, device, max_steps=4)
    teams = {str(seed): made(env, seed, {"agent_ids": True, "critic": "central"}) for seed in range(3)}
    found = crossplay(env, teams, episodes=8, roles=["agent_2", "agent_0"])
    assert found.sides == ("agent_2+agent_0", "agent_1") and len(found.returns["agent"].mean) == 3
    for k, team in enumerate(teams.values()):
        expected = evaluate(env, team.policies, 8)["return_agent"]
        assert found.returns["agent"].mean[k][k] == pytest.approx(expected, rel=1e-6)  # float32 forward passes by agent
    assert found.self_and_cross_play["agent"].gap_standard_error > 0


def test_what_plays_one_side_alone_is_a_row_or_a_column(device):
    env = gpu_vecenv.make(Kuhn, 4, device)
    scripts = {"bets": {"first": always(1)}, "folds": {"second": always(0)}, "random": None}
    found = crossplay(env, scripts, episodes=8)
    assert (found.rows, found.columns) == (["bets", "random"], ["folds", "random"])
    assert found.returns["first"].mean[0][0] == 1 and found.returns["second"].mean[0][0] == -1
    assert found.self_and_cross_play == {}


def first_open_column(obs):
    return (obs[:, :, 0] == 0).all(-1).int().argmax(-1).to(torch.int32)


def test_players_of_a_zero_sum_game_of_one_role_have_a_matrix_each(device):
    """The mean over the role is 0, whoever wins."""
    env = gpu_vecenv.make("connect_four", 50, device)
    found = crossplay(env, {"first column": {"player": first_open_column}, "random": None}, episodes=200)
    first, second = found.returns["player_0"].mean, found.returns["player_1"].mean
    assert found.returns["player"].mean == [[0, 0], [0, 0]]
    # Its four stand in a column unless a random piece is in the way: one of three, each with a probability of 1 in 7.
    assert first[0][1] > 0.3 and second[1][0] > 0.3
    assert [[-value for value in row] for row in second] == first
    assert found.as_dict()["returns"]["player_1"]["mean"] == second


def test_a_game_of_several_roles_has_a_matrix_for_each(device):
    env = gpu_vecenv.make(Crew, 4, device)
    roles = list(env.game.layout.present_roles)
    found = crossplay(env, {"a": None, "b": None}, episodes=4)
    assert len(roles) > 1 and list(found.returns) == roles and found.sides == (roles[0], "+".join(roles[1:]))
    mean = found.returns[roles[0]].mean
    assert mean[0] == mean[1] == [mean[0][0]] * 2, "all pairings have the same random numbers"
    assert found.self_and_cross_play == {}, "random actions are no runs"


# Self-play and cross-play


def test_standard_errors_are_those_of_leaving_out_runs():
    means = torch.tensor([[4.0, 1.0, 2.0], [0.0, 6.0, 1.0], [3.0, 5.0, 5.0]], dtype=torch.float64)
    found = self_and_cross_play(means, "abc")
    assert (found.runs, found.self_play, found.cross_play, found.gap) == (3, 5, 2, 3)
    # Without run 0: 5.5 and (1 + 5) / 2 = 3; without 1: 4.5 and 2.5; without 2: 5 and 0.5.
    assert found.self_play_standard_error == pytest.approx((2 / 3 * 0.5) ** 0.5)
    assert found.cross_play_standard_error == pytest.approx((2 / 3 * (1 + 0.25 + 2.25)) ** 0.5)
    assert found.gap_standard_error == pytest.approx((2 / 3 * ((2.5 - 3) ** 2 + (2 - 3) ** 2 + (4.5 - 3) ** 2)) ** 0.5)
    pair = self_and_cross_play(means[:2, :2], "ab")
    assert (pair.self_play, pair.cross_play, pair.gap) == (5, 0.5, 4.5)
    assert pair.self_play_standard_error is pair.cross_play_standard_error is pair.gap_standard_error is None


def test_entries_of_one_run_are_left_out_together_and_are_no_cross_play():
    means = torch.tensor([[4.0, 90.0, 1.0, 2.0], [90.0, 6.0, 3.0, 4.0], [1.0, 2.0, 5.0, 6.0], [3.0, 0.0, 1.0, 7.0]])
    found = self_and_cross_play(means.double(), "aabc")
    # The pairings of the entries 0 and 1, of run a, are in neither mean.
    assert (found.runs, found.self_play, found.cross_play) == (3, 22 / 4, pytest.approx(23 / 10))
    # Without a: 6 and (6 + 1) / 2 = 3.5; without b: 17 / 3 and (2 + 4 + 3 + 0) / 4; without c: 5 and 7 / 4.
    for left, error in (
        ([6, 17 / 3, 5], found.self_play_standard_error),
        ([3.5, 9 / 4, 7 / 4], found.cross_play_standard_error),
        ([2.5, 17 / 3 - 9 / 4, 13 / 4], found.gap_standard_error),
    ):
        mean = sum(left) / 3
        assert error == pytest.approx((2 / 3 * sum((value - mean) ** 2 for value in left)) ** 0.5)
    pair = self_and_cross_play(means.double()[:3, :3], "aab")
    assert (pair.runs, pair.cross_play, pair.gap_standard_error) == (2, 7 / 4, None)


def test_the_runs_of_entries_are_given(device):
    env = gpu_vecenv.make(Gift, 4, device)
    policies = {name: {"player": always(choice)} for name, choice in (("a0", 0), ("a1", 1), ("b", 0))}
    runs = {"a0": "a", "a1": "a"}
    found = crossplay(env, policies, episodes=4, runs=runs)
    mean = found.returns["player"].mean
    told = found.self_and_cross_play["player"]
    assert told.runs == 2 and told.self_play == pytest.approx(sum(mean[k][k] for k in range(3)) / 3)
    assert told.cross_play == pytest.approx((mean[0][2] + mean[1][2] + mean[2][0] + mean[2][1]) / 4)
    del policies["b"]
    assert crossplay(env, policies, episodes=4, runs=runs).self_and_cross_play == {}
    policies["a"] = policies["a0"]  # a run of its own, though it has the name of another
    assert crossplay(env, policies, episodes=4, runs=runs).self_and_cross_play["player"].runs == 2


# Ratings


def matches(rows, columns):
    """What two sides got, (rows, columns, episodes)."""
    names = [
        [f"{side}{k}" for k in range(returns.shape[axis])]
        for axis, side, returns in ((0, "r", rows), (1, "c", columns))
    ]
    settings = {"returns": {}, "self_and_cross_play": {}, "episodes": rows.shape[2]}
    return CrossPlay(
        rows=names[0], columns=names[1], sides=("row", "column"), returns_of_sides=(rows, columns), **settings
    )


def test_ratings_order_what_wins():
    pytest.importorskip("openskill")
    rows = torch.tensor([1.0, 3.0, 2.0])[:, None, None].expand(3, 2, 20) + torch.tensor([0.0, 50.0])[:, None]
    columns = torch.tensor([5.0, 5.0]).view(1, 2, 1).expand(3, 2, 20)
    found = ratings(matches(rows, columns))
    best, middle, worst = (found["row"][name] for name in ("r1", "r2", "r0"))
    assert best[0] > middle[0] > worst[0] and 0 < best[1] < 25 / 3, "other opponents do not count, and deviations fall"
    assert found["column"]["c0"][0] == pytest.approx(found["column"]["c1"][0], abs=1e-9), "ties"


def test_standard_deviations_of_ratings_fall_with_episodes():
    pytest.importorskip("openskill")
    deviations, better = {}, torch.arange(2000) % 20 < 11  # wins 55 % of the episodes
    for seed in range(3):
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(seed))
        for episodes in (500, 2000):
            wins = better[order[:episodes]].double()
            rows = torch.stack([wins, 1 - wins]).view(2, 1, episodes)
            found = ratings(matches(rows, torch.zeros(2, 1, episodes)))["row"]
            deviations[episodes] = found["r0"][1]
        assert found["r0"][0] > found["r1"][0], "in any order of the episodes"
    assert deviations[2000] < 0.65 * deviations[500], "like a mean's, by half"


def test_one_entry_has_no_rating_and_the_library_may_be_missing(monkeypatch):
    one = matches(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "openskill", None)
        patch.setitem(sys.modules, "openskill.models", None)
        with pytest.raises(ConfigError, match=r'ratings need openskill: pip install "gpu_vecenv\[ratings\]"'):
            ratings(one)
    pytest.importorskip("openskill")
    assert ratings(one) == {"row": {}, "column": {}}


# Refusals

BOTH = {"a": {"first": None, "second": None}}
REFUSED = {
    "no mapping": ({"policies": [None]}, TypeError, r"policies is \[None\].*; expected a mapping"),
    "nobody": ({"policies": {}}, ConfigError, r"policies has none for all of \('first',\); expected at least one"),
    "a name that is none": ({"policies": {3: None}}, TypeError, "a name in policies is 3"),
    "an entry that is none": ({"policies": {"a": 3}}, TypeError, r"policies\['a'\] is 3.*; expected a GamePolicy"),
    "an unknown role": ({"policies": {"a": {"third": None}}}, ConfigError, "unknown role 'third'"),
    "no columns": ({"policies": {"a": {"first": None}}}, ConfigError, r"none for all of \('second',\)"),
    "an actor for neither": (
        {"policies": {**BOTH, "b": {}}},
        ConfigError,
        r"policies\['b'\] has actors for neither side",
    ),
    "an actor that is none": (
        {"policies": {"a": {"first": 3, "second": None}}},
        TypeError,
        "actor of 'first' is a int",
    ),
    "all agents": ({"roles": ["first", "second"]}, ConfigError, "leaves agents for one side alone"),
    "roles that are none": ({"roles": "first"}, TypeError, "roles is 'first'.*; expected a list"),
    "a run of nobody": ({"runs": {"b": "one"}}, ConfigError, r"runs has 'b'; expected some of \['a'\]"),
    "runs that are none": ({"runs": ["a"]}, TypeError, r"runs is \['a'\].*; expected a mapping"),
    "a run without a name": ({"runs": {"a": 3}}, TypeError, r"runs\['a'\] is 3.*; expected the name of a run"),
    "one episode": ({"episodes": 1}, ValueError, "episodes is 1; expected an int >= 2"),
    "no flag": ({"greedy": 1}, TypeError, "greedy is 1"),
    "no seed": ({"seed": -1}, ValueError, "seed is -1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_played_is_refused(what):
    changes, error, message = REFUSED[what]
    env = gpu_vecenv.make(Kuhn, 2, "cpu")
    with pytest.raises(error, match=message):
        crossplay(env, **{"policies": BOTH, **changes})


def test_runs_of_other_games_are_refused():
    other = gpu_vecenv.make(Gift, 2, "cpu")
    policy = GamePolicy(other.game, Trainer(other, TINY).policies)
    with pytest.raises(ConfigError, match=r"policies\['a'\] is of gift on cpu; expected kuhn on cpu"):
        crossplay(gpu_vecenv.make(Kuhn, 2, "cpu"), {"a": policy})
