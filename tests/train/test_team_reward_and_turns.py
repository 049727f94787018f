"""Training where agents die for their team, or take turns: games with known best policies."""

import dataclasses

import pytest
import torch
from games.race import Race
from games.sacrifice import Sacrifice, Selfish

import gpu_vecenv
from gpu_vecenv.train.ppo import PPOConfig, advantages
from gpu_vecenv.train.trainer import Trainer

CONFIG = PPOConfig(num_steps=16, learning_rate=3e-3, hidden_sizes=(32,))


def trained(game, seed, total_steps, device, **changes):
    config = dataclasses.replace(CONFIG, total_steps=total_steps, **changes)
    trainer = Trainer(gpu_vecenv.make(game, 64, device), config, seed=seed)
    trainer.train(log_interval=1000)
    return trainer


@pytest.mark.parametrize("seed", range(4))
def test_a_team_learns_a_sacrifice(seed, device):
    assert trained(Sacrifice, seed, 40_000, device).evaluate(300)["return_unit"] > 0.97


@pytest.mark.parametrize("seed", range(2))
def test_units_on_their_own_do_not(seed, device):
    """Whoever died would get nothing, not even the consolation: that is all they get."""
    assert trained(Selfish, seed, 40_000, device).evaluate(300)["return_unit"] == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("seed", range(2))
def test_players_learn_to_win_and_to_know_when_they_have_lost(seed, device):
    trainer = trained(Race, seed, 100_000, device)
    game, policy = trainer.env.game, trainer.policies["player"]
    totals = torch.arange(game.goal, device=trainer.env.device)
    obs = torch.zeros(game.goal, game.goal + 2, device=trainer.env.device)
    obs[totals, totals] = obs[:, -1] = 1
    with torch.no_grad():
        parameters, values = policy(obs)
    for total, chosen, value in zip(totals.tolist(), parameters.argmax(1).tolist(), values.tolist(), strict=True):
        winning = game.winning_actions(total)
        assert not winning or chosen in winning
        assert value > 0.7 if winning else value < -0.7, total  # the loser's reward came with the other one's move
    against_perfect_play(trainer, game)


def against_perfect_play(trainer, game):
    """Wherever the player to move can win, the trained one does, as perfect play would; greedy, from every start."""
    env = gpu_vecenv.make(Race, 400, trainer.env.device, autoreset_mode="disabled")
    obs, _ = env.reset(seed=9)
    ours, start = env.state["player"].clone(), env.state["total"].tolist()
    policy, results = trainer.policies["player"], torch.zeros(400, device=env.device)
    perfect = torch.tensor([(game.winning_actions(total) or [0])[0] for total in range(game.goal)] + [0])
    while env.active.any():
        with torch.no_grad():
            mine = policy(obs.flatten(0, 1))[0].argmax(1).view(400, 2).int()
        theirs = perfect.to(env.device)[env.state["total"][:, None].long()].int().expand(400, 2)
        is_ours = env.state["player"] == ours
        running = env.active[:, 0].clone()
        obs, rewards, *_ = env.step(torch.where(is_ours[:, None], mine, theirs))
        results += torch.where(running, rewards.gather(1, ours[:, None].long())[:, 0], 0)
    expected = [1 if game.winning_actions(total) else -1 for total in start]
    assert results.tolist() == expected and {-1, 1} == set(expected)


@pytest.mark.parametrize("game", [Race, Sacrifice])
def test_the_trainers_advantages_are_those_of_the_reference(game, device):
    trainer = Trainer(gpu_vecenv.make(game, 32, device), dataclasses.replace(CONFIG, gamma=0.9, num_epochs=1))
    for _ in range(2):
        trainer.train_iteration()
    data = trainer.rollout
    flags = data.terminations, data.truncations, data.active[:-1]
    numbers = [x.double() for x in (data.rewards, data.values[:-1], data.values[1:])]
    expected = advantages(*numbers, *flags, 0.9, CONFIG.gae_lambda, data.acting, game.zero_sum)
    torch.testing.assert_close(data.advantages.double(), expected, rtol=0, atol=1e-5)
    waiting = data.active[:-1] & ~data.acting[:-1]
    assert waiting.any() and expected[waiting].ne(0).any()


@pytest.mark.parametrize("game", [Race, Sacrifice])
def test_training_resumes_bit_by_bit(game, device, tmp_path):
    def begun():
        config = dataclasses.replace(CONFIG, num_steps=5, normalize_obs=True, normalize_returns=True)
        return Trainer(gpu_vecenv.make(game, 16, device), config, seed=1)

    trainer, other = begun(), begun()
    trainer.train_iteration()
    acting = trainer.rollout.acting[-1]
    assert not acting.all(), "some agents do not act when it is saved"
    path = trainer.save(tmp_path / "checkpoint")
    other.train_iteration()
    other.load(path)
    assert other.rollout.acting[-1].equal(acting) and other.rollout.obs[-1].equal(trainer.rollout.obs[-1])
    for one in (trainer, other):
        one.train_iteration()
    expected = trainer.state()[0]
    assert all(expected[name].equal(tensor) for name, tensor in other.state()[0].items())


def test_observations_of_the_dead_are_not_in_the_statistics(device):
    trainer = Trainer(gpu_vecenv.make(Sacrifice, 16, device), dataclasses.replace(CONFIG, normalize_obs=True))
    trainer.train_iteration()
    data = trainer.rollout
    seen = data.obs[:-1][data.active[:-1] & data.acting[:-1]].double()
    normalizer = trainer.policies["unit"].obs_normalizer
    torch.testing.assert_close(normalizer.mean, seen.mean(0), rtol=1e-3, atol=1e-3)
    everything = data.obs[:-1][data.active[:-1]].double().mean(0)
    assert (everything - seen.mean(0)).abs().max() > 0.05
