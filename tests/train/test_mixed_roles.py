"""A Box beside choices, from scripts and masks to policies that learn."""

import pytest
import torch
from games.economy import Economy
from support.cases import mostly_exhaustive

import gpu_vecenv
from gpu_vecenv import PPOConfig, Trainer, evaluate
from gpu_vecenv.check.game import check_game
from gpu_vecenv.train.evaluation import RolePolicies

ROLES = ("worker", "planner", "clerk")


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_exhaustive(range(3), [0]))
def test_every_role_learns(seed, device):
    """Workers earn more and taxes are kinder than by chance, and clerks see what to say."""
    env = gpu_vecenv.make(Economy, 64, device)
    config = PPOConfig(
        total_steps=64 * 16 * 25, num_steps=16, num_minibatches=1, learning_rate=0.02, hidden_sizes=(16,)
    )
    trainer = Trainer(env, config, seed=seed)
    trainer.train()
    assert trainer.env.faults().eq(0).all()
    trained, random = trainer.evaluate(500), trainer.evaluate(500, random_roles=ROLES)
    for role in ROLES:
        assert trained[f"return_{role}"] > random[f"return_{role}"]
    assert trained["return_clerk"] > 4  # of 8; by chance 2


def test_masks_bind_choices_and_leave_a_box_alone(device):
    """Policies that want what is forbidden, and means outside the Box."""
    env = gpu_vecenv.make(Economy, 50, device, autoreset_mode="next_step")
    trainer = Trainer(env, PPOConfig(num_steps=8, hidden_sizes=()))
    with torch.no_grad():
        for role, wanted in (("worker", [9.0, 0, 0, 0, 9]), ("planner", [3.0, -3, 3, -9, -9, -9])):
            network = trainer.policies[role].network
            for parameter in network.parameters():
                parameter.zero_()
            outputs = torch.tensor(wanted, device=device)
            network.register_forward_hook(lambda module, args, out, add=outputs: (out[0] + add, out[1]))
    trainer.begin_iteration()
    data = trainer.rollout
    assert env.faults().eq(0).all() and trainer.env.faults().eq(0).all()
    playing = data.active[:-1]
    places = data.obs[:-1, :, :3, 0]
    moves, works = data.draws[:, :, :3, 0], data.draws[:, :, :3, 1]
    at_the_wall = playing[:, :, :3] & places.eq(0)
    assert at_the_wall.any() and moves[at_the_wall].ne(0).all() and works[at_the_wall].eq(0).all()
    free = playing[:, :, :3] & places.gt(0)
    assert moves[free].eq(0).float().mean() > 0.9 and works[free].eq(1).float().mean() > 0.9
    means = data.draws[:, :, 3].flatten(0, 1).mean(0)
    # The standard deviation of one draw is e^-9.
    assert (means - torch.tensor([3.0, -3, 3], device=device)).abs().max() < 0.01


def test_functions_play_roles_of_each_kind(device):
    env = gpu_vecenv.make(Economy, 6, device)
    low, high = torch.tensor(env.game.layout.action.bounds["planner"], device=device)

    def plan(obs):
        return ((low + high) / 2).expand(*obs.shape[:2], 3).contiguous()

    def stay(obs):
        return torch.tensor([1, 0], device=device).expand(*obs.shape[:2], 2).contiguous()

    def say(obs):
        return obs[..., :1].int()  # the place, which is right

    scripts = {"worker": stay, "planner": plan, "clerk": say}
    found = evaluate(env, scripts, 6)
    assert found["return_clerk"] == 8.0
    act, obs = RolePolicies(env, scripts), env.reset(seed=1)[0]
    actions = act(obs)
    assert actions.dtype == torch.float32 and actions[:, 3].equal(((low + high) / 2).expand(6, 3))
    assert actions[:, :3].equal(torch.tensor([1.0, 0, 0], device=device).expand(6, 3, 3))
    for role, wrong, expected in (
        ("worker", lambda obs: stay(obs).float(), "the function of 'worker': .* expected torch.int32 or torch.int64"),
        ("planner", lambda obs: plan(obs).int(), "the function of 'planner': .* expected torch.float32"),
    ):
        with pytest.raises(TypeError, match=expected):
            RolePolicies(env, {**scripts, role: wrong})(obs)


@pytest.mark.slow
def test_the_games_own_checks_pass():
    report = check_game(Economy(), device="cpu", num_envs=8, steps=20)
    assert not report.failures, str(report)
    assert {"G01", "G02", "G03", "G04", "G05", "K01"} <= {*report.passed}
    assert any("one action space" in reason for reason in report.skipped.values())
