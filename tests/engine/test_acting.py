"""Agents that do not act in a step, because it is not their turn or because they have died: what a step gives."""

from dataclasses import dataclass

import pytest
import torch
from games.race import Race
from games.sacrifice import Sacrifice, Selfish
from gymnasium.spaces import Box, Discrete

import gpu_vecenv
from gpu_vecenv.declare.env import Env, Field, i32
from gpu_vecenv.engine.vec_env import MODES
from gpu_vecenv.errors import EnvDefinitionError

T, F = True, False
HEADER = '#include "game_api.cuh"\nstruct Scratch {};\n'


def played(game, actions, device, mode="next_step", **config):
    """What each step of one environment gives: rewards, terminations, truncations, active, acting, obs."""
    env = gpu_vecenv.make(game, 1, device, autoreset_mode=mode, **config)
    env.reset(seed=1)
    for chosen in actions:
        obs, *outputs, info = env.step(torch.tensor([chosen], dtype=torch.int32, device=env.device))
        row = {name: x[0].tolist() for name, x in zip(("rewards", "terminations", "truncations"), outputs, strict=True)}
        row |= {name: info[name][0].tolist() for name in info}
        yield row | {"obs": obs[0].tolist()}
    assert env.faults().eq(0).all()


# Team reward


@pytest.mark.parametrize("limit", [F, T])
def test_a_dead_agent_receives_the_teams_reward_and_ends_with_its_episode(limit, device):
    first, second, third, reset = played(Sacrifice, [[1, 0], [9, 0], [9, 0], [9, 9]], device, limit=limit)
    for step in (first, second):
        assert step["active"] == [T, T] and step["acting"] == [F, T]
        assert step["rewards"] == [0, 0] and not any(step["terminations"] + step["truncations"])
        assert step["obs"][0] == [0, 0, 1, 0] and step["obs"][1][1:] == [1, 0, 1]
    assert third["rewards"] == [1, 1] and third["active"] == [F, F]
    assert third["terminations"] == [not limit] * 2 and third["truncations"] == [limit] * 2
    assert third["obs"] == [[0, 0, 1, 0], [0, 1, 0, 1]]  # the last observation of who is alive is its own
    assert reset["active"] == reset["acting"] == [T, T] and reset["obs"][0] == [1, 0, 1, 0]


def test_the_last_observation_of_a_dead_agent_is_zero_but_for_its_id(device):
    *_, last = played(Sacrifice, [[1, 1, 0], [0, 0, 0], [0, 0, 0]], device, "same_step", num_units=3)
    assert last["final_obs"] == [[0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 1, 0, 0, 1]]
    assert last["_final_obs"] == last["active"] == last["acting"] == [T, T, T] and last["obs"][0] == [1, 0, 1, 0, 0]


def test_without_team_reward_a_dead_agent_has_left(device):
    first, second, third = played(Selfish, [[1, 0], [9, 0], [9, 0]], device)
    assert first["active"] == [F, T] and first["terminations"] == [T, F] and "acting" not in first
    assert second["active"] == [F, T] and third["rewards"] == [0, 1] and third["terminations"] == [F, T]


def test_an_episode_ends_when_all_have_died(device):
    (only,) = played(Sacrifice, [[1, 1]], device)
    assert only["active"] == [F, F] and only["terminations"] == [T, T] and only["rewards"] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_returns_and_lengths_count_rewards_after_death(mode, device):
    env = gpu_vecenv.make(Sacrifice, 3, device, autoreset_mode=mode)
    env.reset(seed=1)
    actions = torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=torch.int32, device=env.device)
    for _ in range(3):
        env.step(actions)
    statistics = env.episode_statistics()
    expected = torch.tensor([[0.2, 0.2], [1, 1], [1, 1]], dtype=torch.float32)
    assert statistics["returns"].float().cpu().equal(expected)
    assert statistics["lengths"].tolist() == [3] * 3 and statistics["terminations"].tolist() == [1] * 3


def test_an_invalid_action_ends_the_rows_of_dead_agents_too(device):
    env = gpu_vecenv.make(Sacrifice, 2, device, autoreset_mode="next_step")
    env.reset(seed=1)
    env.step(torch.tensor([[1, 0], [1, 0]], dtype=torch.int32, device=env.device))
    _, rewards, terminations, truncations, info = env.step(
        torch.tensor([[7, 0], [0, 7]], dtype=torch.int32, device=env.device)
    )
    assert env.faults().ne(0).tolist() == [F, T]  # actions of the dead are not checked
    assert rewards[1].isnan().all() and rewards[0].eq(0).all()
    assert truncations.tolist() == [[F, F], [T, T]] and not terminations.any()
    assert info["active"].tolist() == [[T, T], [F, F]]


def test_a_state_is_restored_with_its_dead(device):
    env = gpu_vecenv.make(Sacrifice, 2, device, autoreset_mode="next_step")
    env.reset(seed=1)
    actions = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32, device=env.device)
    obs, *_ = env.step(actions)
    other = env.like()
    other.load_state_dict(env.state_dict())
    assert other.observe().equal(obs) and other.acting.tolist() == [[F, T], [T, T]]
    for one, same in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
        assert one.equal(same)


def test_with_agents_as_envs_a_dead_agents_row_ends_with_its_environment(device):
    env = gpu_vecenv.make(Sacrifice, 1, device, agents_as_envs=True)
    env.reset(seed=1)
    flags = []
    for _ in range(3):
        _, rewards, terminations, _, info = env.step(torch.tensor([1, 0], dtype=torch.int32, device=env.device))
        flags.append((terminations.tolist(), rewards.tolist(), info["_final_obs"].tolist()))
    assert flags == [([F, F], [0, 0], [F, F])] * 2 + [([T, T], [1, 1], [T, T])]


# Turns


def test_players_act_in_turn_and_both_get_the_result(device):
    env = gpu_vecenv.make(Race, 64, device, autoreset_mode="next_step")
    _, info = env.reset(seed=1)
    player = env.state["player"]
    ends = 0
    for _ in range(30):
        turn = torch.nn.functional.one_hot(player.long(), 2).bool()
        assert info["acting"].equal(turn) and env.acting.equal(turn)
        mover, before = player.clone(), info["active"].clone()
        actions = env.sample_actions()
        actions[~turn] = 99  # ignored
        _, rewards, terminations, truncations, info = env.step(actions)
        won = rewards.gather(1, mover[:, None].long())[:, 0] == 1
        assert rewards.sum(1).eq(0).all() and won.equal(terminations.all(1)) and not truncations.any()
        assert before.all(1).equal(before.any(1)) and terminations.all(1).equal(terminations.any(1))
        ends += int(won.sum())
    assert ends > 64 and env.faults().eq(0).all()


def test_only_the_action_of_who_acts_is_checked(device):
    env = gpu_vecenv.make(Race, 2, device, validate="sync")
    env.reset(seed=1)
    actions = torch.where(env.acting, 0, 5).int()
    env.step(actions)
    with pytest.raises(gpu_vecenv.errors.InvalidActionError):
        env.step(actions)


SLOW = """
HD void reset(State s, Io) { ONCE { s.clock[0] = 0; } }
HD void step(State s, Io io) {
    ONCE {
        s.clock[0] += 1;
    }
    io.rewards[0] = io.acting[0] ? 10.0f + io.action(0) : 1.0f;
    io.truncations[0] = io.elapsed_steps >= 7;
}
HD void observe(State s, Io io) {
    io.acting[0] = s.clock[0] % 3 == 0;
    io.obs[0][0] = s.clock[0];
    io.action_mask[0][0] = s.clock[0] % 2 == 0;
    io.action_mask[0][1] = true;
}
"""


def test_a_single_agent_may_act_every_few_steps(tmp_path, device):
    source = tmp_path / "slow.cu"
    source.write_text(HEADER + SLOW)

    @dataclass(frozen=True, kw_only=True)
    class Slow(Env):
        state = (Field("clock", i32),)
        takes_turns = masks_actions = True
        obs_dim = 1
        action_space = Discrete(2)

    Slow.source = source
    rows = list(played(Slow, [[1], [0], [0], [1], [0], [0], [1]], device))
    assert [row["rewards"] for row in rows] == [[11], [1], [1], [11], [1], [1], [11]]
    assert [row["acting"] for row in rows[:-1]] == [[F], [F], [T], [F], [F], [T]]
    assert [row["action_mask"] for row in rows[:-1]] == [[[T, T]]] * 2 + [[[F, T]]] + [[[T, T]]] * 3  # ignored: all
    assert all(row["active"] == [T] for row in rows[:-1]) and rows[-1]["truncations"] == [T]


# Declarations


def test_games_without_turns_and_team_reward_have_neither_flags_nor_state():
    layout = Selfish().layout
    assert not layout.tracks_acting and {f.name for f in layout.engine_fields}.isdisjoint({"alive", "acting"})
    assert Race().layout.tracks_acting and Sacrifice().layout.team_roles == ("unit",)


def declared(**attributes):
    given = {"roles": {"scout": 1, "carrier": 2}, "obs_dim": {"scout": 3, "carrier": 4}, "action_space": Discrete(2)}
    kind = type("Declared", (Env,), {**given, "source": Sacrifice.source_path(), **attributes})
    return dataclass(frozen=True, kw_only=True)(kind)


def test_some_roles_may_have_team_reward():
    assert declared(team_reward=("carrier",))().layout.team_roles == ("carrier",)
    assert declared(team_reward=True, agent_id_size=3)().layout.team_roles == ("scout", "carrier")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"team_reward": ("pilot",)}, r"team_reward names \['pilot'\]; expected True, False or some of \['scout'"),
        ({"team_reward": "scout"}, r"team_reward is 'scout'; expected True, False or a tuple of roles"),
        ({"zero_sum": True}, r"zero_sum is True, but there are 3 agents.*; expected 2"),
        ({"takes_turns": 1}, r"takes_turns is 1; expected True or False"),
        ({"team_reward": True, "agent_id_size": 4}, r"agent_id_size is 4, and 'scout' has .* \(3,\); expected at most"),
        ({"agent_id_size": -1}, r"agent_id_size is -1; expected an int >= 0"),
        ({"agent_id_size": 2}, r"agent_id_size is 2; expected 0, or roles with team_reward"),
        (
            {"team_reward": True, "agent_id_size": 1, "obs_shape": (2, 2), "observation_space": Box(0, 1, (2, 2))},
            r"agent_id_size is 1, .* of one axis",
        ),
    ],
)
def test_wrong_declarations(attributes, message):
    with pytest.raises(EnvDefinitionError, match=message):
        declared(**attributes)()


def test_final_observations_can_be_written_elsewhere(device):
    env, twin = (gpu_vecenv.make("connect_four", 64, device, autoreset_mode="same_step") for _ in range(2))
    obs, _ = env.reset(seed=3)
    twin.reset(seed=3)
    ended = 0
    for _ in range(40):
        actions, elsewhere = env.sample_actions(), torch.full_like(obs, 255)
        *_, info = env.step(actions, out=env.step_buffers().with_final_obs(elsewhere))
        *_, expected = twin.step(actions)
        rows = expected["_final_obs"]
        assert info["acting"].equal(expected["acting"]) and info["_final_obs"].equal(rows)
        assert elsewhere[rows].equal(expected["final_obs"][rows]) and elsewhere[~rows].eq(255).all()
        ended += rows.sum()
    assert ended
