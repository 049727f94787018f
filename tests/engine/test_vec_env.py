"""The contract of VecEnv; each test catches a bug known from other vector environments."""

import dataclasses
import random
import weakref
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from oracles.philox import ONES, philox
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv import Env, Fault, Field, FunctionManager, VecEnv
from gpu_vecenv.declare.env import f32, param
from gpu_vecenv.engine.digest import Digest, trajectory_digest
from gpu_vecenv.errors import InvalidActionError, ResetNeededError

GRIDWORLD = gpu_vecenv.configure("tag_gridworld", num_taggers=2, grid=3, max_steps=7, random_start=True)
FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 3.0, "tagging_distance": 0.15}
CONTINUOUS = gpu_vecenv.configure("tag_continuous", **FEW, max_steps=9, edge_penalty=-0.3)
STATISTICS = ("completed_returns", "completed_lengths", "completed_episodes", "completed_terminations")
MODES = ("same_step", "next_step", "disabled")


@dataclass(frozen=True, kw_only=True)
class Drift(Env):
    """A point that actions push; it ends beyond 1."""

    heads: int = param(2, low=1)
    state = (Field("place", f32, ("heads",)),)

    @property
    def obs_dim(self):
        return self.heads

    @property
    def action_space(self):
        return Box(np.float32([-1, 0]), np.float32([0.25, 0.5]))


DRIFT = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { FOR_RANGE (k, HEADS) s.place[k] = io.rng.uniform(0, k) - 0.5f; }
HD void step(State s, Io io) {
    FOR_RANGE (k, HEADS) s.place[k] += io.action(0, k);
    group_sync();
    ONCE {
        io.rewards[0] = s.place[0];
        io.terminations[0] = s.place[1] > 1;
    }
}
HD void observe(State s, Io io) { FOR_RANGE (k, HEADS) io.obs[0][k] = s.place[k]; }
"""


@pytest.fixture(params=[GRIDWORLD, CONTINUOUS], ids=lambda game: game.name())
def game(request) -> Env:
    return request.param


@pytest.fixture
def drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    source = tmp_path / "drift.cu"
    source.write_text(DRIFT)
    monkeypatch.setattr(Drift, "source", source)
    return Drift()


def different(a: VecEnv, b: VecEnv, rows=slice(None)) -> list[str]:
    """Names of the tensors that differ in these environments."""
    everywhere = {f"state_{field.name}" for field in a.game.state if field.shared}
    chosen = {name: slice(None) if name in everywhere else rows for name in a.data}
    return [name for name in a.data if not equal_bits(a.data[name][chosen[name]], b.data[name][chosen[name]])]


def outputs_of(results) -> dict[str, torch.Tensor]:
    obs, rewards, terminations, truncations, info = results
    named = {"obs": obs, "rewards": rewards, "terminations": terminations, "truncations": truncations, **info}
    if "final_obs" in named:  # its other rows are not written
        mask = info["_final_obs"].view(*info["_final_obs"].shape, 1)
        named["final_obs"] = torch.where(mask, info["final_obs"], 0)
    return named


def trajectory(env: VecEnv, steps: int, seed: int | None = 3) -> dict[str, torch.Tensor]:
    """Every output and all state, (steps, num_envs, …)."""
    obs, info = env.reset(seed=seed)
    assert equal_bits(info["active"], torch.ones_like(info["active"]))
    ticks = []
    for _ in range(steps):
        before = obs
        outputs = outputs_of(env.step(env.sample_actions()))
        obs = outputs["obs"]
        state = {name: tensor.clone() for name, tensor in env.data.items() if tensor.shape[0] == env.num_envs}
        ticks.append({"before": before, **outputs, **state})
    return {name: torch.stack([step[name] for step in ticks]).cpu() for name in ticks[0]}


def random_actions(env: VecEnv, key: int = 0, kind=torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    sizes = torch.tensor(env.game.layout.action.head_sizes).view(env.game.layout.action.shape)
    shape = (env.num_envs, env.num_agents, *env.game.layout.action.shape)
    return (torch.randint(2**40, shape, generator=generator) % sizes).to(kind).to(env.device)


def twins(game: Env, device: str, num_envs: int = 12, ticks: int = 5, **arguments) -> tuple[VecEnv, VecEnv]:
    """Two environments in the same state, in the middle of an episode."""
    pair = VecEnv(game, num_envs, device, **arguments), VecEnv(game, num_envs, device, **arguments)
    for env in pair:
        env.reset(seed=5)
        for key in range(ticks):
            env.step(random_actions(env, key))
    assert different(*pair) == []
    return pair


@pytest.mark.parametrize("mode", MODES)
def test_outputs_have_their_shapes_dtypes_device_and_space(game, mode, device):
    env = VecEnv(game, 5, device, autoreset_mode=mode)
    rows = (5, game.num_agents)
    obs, info = env.reset(seed=1)
    for _ in range(30):
        obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
        kinds = {torch.float32: [obs, rewards], torch.bool: [terminations, truncations, info["active"]]}
        assert all(t.dtype == kind and t.device == env.device for kind, ts in kinds.items() for t in ts)
        assert all(t.shape == rows for t in (rewards, terminations, truncations, info["active"]))
        assert obs.shape == (*rows, *game.obs_shape)
        assert all(game.observation_space.contains(row) for row in obs.flatten(0, 1).cpu().numpy())
        assert obs.isfinite().all() and rewards.isfinite().all()
        assert not (terminations & truncations).any()
        assert equal_bits(info["active"], env.active)
        assert set(info) == {"active", "fault"} | ({"final_obs", "_final_obs"} if mode == "same_step" else set())
        if mode == "same_step":
            assert info["final_obs"].shape == obs.shape and info["final_obs"].dtype == obs.dtype
            assert info["_final_obs"].shape == rows and info["_final_obs"].dtype == torch.bool
        if mode == "disabled":
            env.reset(mask=~env.active.any(1))
    assert (env.device.type, env.data.device) == (device, env.device)
    assert {name: tuple(t.shape) for name, t in env.state.items() if t.shape[0] == 5} == {
        field.name: (5, *field.shape) for field in game.layout.fields if not field.shared
    }


def test_an_environment_with_a_seed_of_its_own_equals_one_made_alone(game, device):
    seeds = [5, 2**64 - 1, 0, 5]
    env = VecEnv(game, 4, device, first_env_index=9)
    alone = [VecEnv(game, 1, device) for _ in seeds]
    obs, _ = env.reset(seed=np.array(seeds, np.uint64))
    begun = [one.reset(seed=seed)[0] for one, seed in zip(alone, seeds, strict=True)]
    assert env.seed == tuple(seeds) and equal_bits(obs, torch.cat(begun))
    for _ in range(20):  # across autoresets
        actions = env.sample_actions()
        ours = outputs_of(env.step(actions))
        theirs = [outputs_of(one.step(actions[e : e + 1])) for e, one in enumerate(alone)]
        assert all(equal_bits(ours[name], torch.cat([each[name] for each in theirs])) for name in ours)
    before = env.state_dict()
    env.reset(seed=[1, 2, 3, 4], mask=torch.tensor([True, False, False, False], device=device))
    assert equal_bits(env.data["engine_key"][1:], before["engine_key"][1:])
    assert not equal_bits(env.data["engine_key"][0], before["engine_key"][0])


def test_an_environment_made_in_inference_mode_works_outside(game, device):
    with torch.inference_mode():
        env = VecEnv(game, 3, device)
        env.reset(seed=1)
    twin = VecEnv(game, 3, device)
    twin.reset(seed=1)
    for each in (env, twin):
        each.elapsed_steps.fill_(1)
        each.clear_episode_statistics()
        each.step(each.sample_actions())
        each.load_state_dict(each.state_dict())
    assert different(env, twin) == []


@pytest.mark.parametrize("mode", MODES)
def test_an_equal_seed_gives_equal_bits_and_another_seed_gives_others(game, mode, device):
    runs = [trajectory(VecEnv(game, 40, device, autoreset_mode=mode), 60, seed) for seed in (3, 3, 4)]
    assert [name for name in runs[0] if not equal_bits(runs[0][name], runs[1][name])] == []
    assert not torch.equal(runs[0]["obs"], runs[2]["obs"])


def test_no_environment_of_any_seed_repeats_another(device):
    """Initial states have at least 8 uniform floats: equal ones mean that a random stream is used twice."""
    env = VecEnv(CONTINUOUS, 64, device)
    starts, actions = [], []
    for seed in [*range(6), 2**32, 2**32 + 1, 2**63, 2**64 - 1]:
        env.reset(seed=seed)
        starts.append(env.state["position"].flatten(1).clone())
        actions.append(env.sample_actions().flatten(1))
    assert len(torch.cat(starts).unique(dim=0)) == 64 * 10
    assert len(torch.cat(actions).unique(dim=0)) == 64 * 10


def test_an_env_depends_on_no_other(game, device):
    whole = trajectory(VecEnv(game, 1500, device), 40)
    for first, count in [(0, 1), (0, 2), (0, 31), (0, 33), (0, 1023), (700, 1), (1, 64), (1436, 64)]:
        part = trajectory(VecEnv(game, count, device, first_env_index=first), 40)
        assert [n for n in whole if not equal_bits(part[n], whole[n][:, first : first + count])] == [], (first, count)


def test_actions_of_one_env_move_no_other(game, device):
    env, twin = twins(game, device)
    changed = torch.arange(12, device=device) == 7
    for key in range(20, 50):
        actions, others = random_actions(env, key), random_actions(env, 1000 + key)
        mask = changed.view(-1, *[1] * (actions.dim() - 1))
        a, b = outputs_of(env.step(actions)), outputs_of(twin.step(torch.where(mask, others, actions)))
        assert [name for name in a if not equal_bits(a[name][~changed], b[name][~changed])] == []
        assert different(env, twin, ~changed) == []
    assert different(env, twin, changed) != []


def test_an_unseeded_reset_continues_the_streams_and_is_reproducible(game, device):
    env, twin = VecEnv(game, 9, device), VecEnv(game, 9, device)
    first, _ = env.reset()
    assert 0 <= env.seed < 2**64
    twin.reset(seed=env.seed)
    assert equal_bits(first, twin.observe())
    starts = [first]
    for _ in range(3):
        env.step(env.sample_actions()), twin.step(twin.sample_actions())
        starts.append(env.reset()[0])
        assert equal_bits(starts[-1], twin.reset()[0])
    assert len(torch.stack(starts).flatten(1).unique(dim=0)) == 4
    assert not equal_bits(VecEnv(game, 9, device).reset()[0], first)  # unseeded environments differ
    assert equal_bits(env.reset(seed=twin.seed)[0], first)


def test_every_episode_starts_anew(device):
    run = trajectory(VecEnv(CONTINUOUS, 5, device), 9 * 8)
    for e in range(5):
        starts = run["state_position"][:, e][run["engine_elapsed_steps"][:, e, 0] == 0]
        assert len(starts) >= 7 and len(starts.flatten(1).unique(dim=0)) == len(starts)


def transitions(
    game: Env, mode: str, device: str, episodes: int, ticks: int
) -> dict[tuple[int, int, int], list[bytes]]:
    """(env_index, episode, t) -> (s, a, r, s', terminations, truncations, active), of the first episodes."""
    env = VecEnv(game, 12, device, autoreset_mode=mode)
    # An action for every environment, episode and time.
    shape = (12, ticks, game.max_steps, game.num_agents, *game.layout.action.shape)
    table = torch.randint(5, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(21)).to(device)
    obs, _ = env.reset(seed=8)
    seen, environment = {}, torch.arange(12, device=device)
    for _ in range(ticks):
        episode, time = env.data["engine_episode"][:, 0].clone(), env.elapsed_steps.clone()
        begins = ~env.active.any(1)
        actions = table[environment, episode, time % game.max_steps]
        before = obs
        obs, rewards, terminations, truncations, info = env.step(actions)
        after, ends = obs, (terminations | truncations).any(1) & ~env.active.any(1)
        if mode == "same_step":
            after = torch.where(info["_final_obs"][..., None], info["final_obs"], obs)
            ends = info["_final_obs"][:, 0]
        active = torch.where(ends[:, None], False, info["active"])
        for e in torch.nonzero(~begins).flatten().tolist():
            key = (e, int(episode[e]), int(time[e]))
            if key[1] < episodes:
                assert key not in seen
                row = (before, actions, rewards, after, terminations, truncations, active)
                seen[key] = [tensor[e].cpu().numpy().tobytes() for tensor in row]
        if begins.any():
            assert not rewards[begins].any() and not (terminations | truncations)[begins].any()
        if mode == "disabled" and ends.any():
            obs, _ = env.reset(mask=ends)
    assert env.faults().sum() == 0 and int(env.data["engine_episode"].min()) >= episodes
    return seen


def test_the_three_autoreset_modes_give_the_same_transitions(game, device):
    """Including s' of the last step: final_obs in same_step mode equals obs of the other modes."""
    runs = [transitions(game, mode, device, episodes=4, ticks=4 * (game.max_steps + 1) + 1) for mode in MODES]
    assert {key[:2] for key in runs[0]} == {(e, episode) for e in range(12) for episode in range(4)}
    assert runs[0] == runs[1] == runs[2]


def test_the_time_limit_and_the_flags_follow_an_independent_clock(game, device):
    env = VecEnv(game, 12, device)
    env.reset(seed=6)
    clock, limits, terminated = torch.zeros(12, dtype=torch.int32, device=device), 0, 0
    for _ in range(100):
        _, _, _, truncations, info = env.step(env.sample_actions())
        clock += 1
        ends, late = info["_final_obs"][:, 0], clock == game.max_steps
        assert torch.equal(truncations.any(1) & ~late, torch.zeros_like(late))
        assert torch.equal(ends & late, late)
        assert equal_bits(info["_final_obs"], ends[:, None].expand(-1, game.num_agents))
        limits, terminated = limits + int(truncations.any(1).sum()), terminated + int((ends & ~late).sum())
        clock = torch.where(ends, 0, clock)
        assert torch.equal(clock, env.elapsed_steps)
    assert limits > 0 and terminated > 0


@pytest.mark.parametrize("seed", [None, 77])
@pytest.mark.parametrize("kind", ["torch", "numpy", "numpy backwards"])
def test_a_masked_reset_touches_no_other_env(game, device, seed, kind):
    env, twin = twins(game, device, autoreset_mode="disabled", ticks=3)
    for one in (env, twin):  # a fault bit in every environment
        one.step(torch.full_like(random_actions(one), 99))
    picked = torch.arange(12) % 5 == 1
    arrays = {"numpy": picked.numpy(), "numpy backwards": picked.flip(0).numpy()[::-1]}
    mask = arrays.get(kind, picked.to(device))
    obs, info = env.reset(mask=mask, seed=seed)
    assert different(env, twin, ~picked) == []
    assert equal_bits(obs, env.observe()) and equal_bits(obs[~picked], twin.observe()[~picked])
    assert equal_bits(info["active"], env.active)
    assert (
        env.elapsed_steps[picked].eq(0).all() and env.faults()[picked].eq(0).all() and env.faults()[~picked].ne(0).all()
    )
    fresh = VecEnv(game, 12, device)
    fresh.reset(seed=5 if seed is None else seed)
    if seed is None:  # the streams continue with episode 1 of the first seed
        fresh.reset()
    names = [name for name in different(env, fresh, picked) if name.removeprefix("engine_") not in STATISTICS]
    assert names == []
    assert np.array_equal(mask.cpu() if kind == "torch" else mask, np.arange(12) % 5 == 1)


def test_an_all_false_mask_resets_nothing(game, device):
    env, twin = twins(game, device)
    obs, _ = env.reset(mask=torch.zeros(12, dtype=torch.bool, device=device), seed=1)
    assert different(env, twin) == [] and equal_bits(obs, twin.observe())


def test_reset_writes_everything_that_an_episode_reads(game, device):
    """Whatever the state was before; reset leaves only the episode statistics."""
    env, fresh = VecEnv(game, 8, device), VecEnv(game, 8, device)
    env.reset(seed=1)
    names = [f"state_{f.name}" for f in game.layout.fields if not f.shared]
    names += [n for n in env.data if n.startswith("machine_") and n.removeprefix("engine_") not in STATISTICS]
    for name in names:
        env.data[name][3].view(torch.uint8).fill_(0xFF)
    mask = torch.arange(8, device=device) == 3
    obs, _ = env.reset(mask=mask, seed=9)
    expected, _ = fresh.reset(seed=9)
    assert equal_bits(obs[3], expected[3])
    assert different(env, fresh, slice(3, 4)) == []
    for key in range(20):
        a, b = (outputs_of(one.step(random_actions(env, key))) for one in (env, fresh))
        assert [name for name in a if not equal_bits(a[name][3], b[name][3])] == []


def test_earlier_outputs_and_the_callers_inputs_never_change(game, device):
    env = VecEnv(game, 6, device)
    mask, kept = torch.tensor([True, False, True, False, False, True], device=device), []

    def keep(*tensors: torch.Tensor) -> None:
        kept.extend((tensor, tensor.clone()) for tensor in tensors)

    env.reset(seed=1)
    for key in range(30):
        if key % 10 == 5:
            obs, info = env.reset(mask=mask)
            keep(mask, obs, info["active"])
        actions = env.sample_actions() if key % 2 else random_actions(env, key)
        keep(actions, env.observe())
        *tensors, info = env.step(actions)
        keep(*tensors, *info.values())
    assert all(equal_bits(tensor, copy) for tensor, copy in kept)
    before = env.observe()
    tensors[0].fill_(7)  # outputs belong to the caller and hold no state
    assert equal_bits(env.observe(), before)


def test_outputs_go_where_the_caller_wants_them(game, device):
    env, twin = twins(game, device)
    storage = torch.full((3, 12, game.num_agents, *game.obs_shape), torch.nan, device=device)
    buffers = env.step_buffers(obs=storage[1])
    for tensor in buffers.tensors().values():
        tensor.view(torch.uint8).fill_(0xFF)
    *tensors, info = env.step(random_actions(env), out=buffers)
    given = [*tensors, info["active"], info["final_obs"], info["_final_obs"]]
    places = [
        buffers.obs,
        buffers.rewards,
        buffers.terminations,
        buffers.truncations,
        buffers.active,
        buffers.final_obs,
        buffers.final_mask,
    ]
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in places]
    assert buffers.obs.data_ptr() == storage[1].data_ptr()
    got, expected = outputs_of((*tensors, info)), outputs_of(twin.step(random_actions(twin)))
    assert [name for name in expected if not equal_bits(expected[name], got[name])] == []
    assert storage[0].isnan().all() and storage[2].isnan().all()
    obs, info = env.reset(seed=2, out=buffers)
    assert (obs.data_ptr(), info["active"].data_ptr()) == (storage[1].data_ptr(), buffers.active.data_ptr())
    assert env.observe(out=storage[2]).data_ptr() == storage[2].data_ptr() and equal_bits(storage[2], obs)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in buffers.tensors().values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


INVALID = {"int32": (-1, -(2**31), 2**31 - 1), "int64": (-1, 2**32, 2**32 + 1, -(2**63), 2**63 - 1, -(2**32))}


@pytest.mark.parametrize(
    ("kind", "value", "mode"),
    [(kind, value, "same_step") for kind in INVALID for value in (*INVALID[kind], "size")]
    + [("int64", -1, mode) for mode in MODES[1:]],
)
def test_an_invalid_action_truncates_its_env_alone(game, device, mode, kind, value):
    env, twin = twins(game, device, autoreset_mode=mode)
    actions = random_actions(env, 50, getattr(torch, kind))
    bad = actions.clone()
    bad.view(12, game.num_agents, -1)[7, 1, -1] = game.layout.action.head_sizes[-1] if value == "size" else value
    others, before, obs_before = torch.arange(12, device=device) != 7, env.state_dict(), env.observe()
    active = env.active[7].clone()
    assert active[1]
    a, b = outputs_of(env.step(bad)), outputs_of(twin.step(actions))
    assert [name for name in a if not equal_bits(a[name][others], b[name][others])] == []
    assert different(env, twin, others) == []
    assert a["fault"][7].all() and not (a["fault"] & before["engine_active"])[others].any()
    assert a["rewards"][7][active].isnan().all() and not a["rewards"][7][~active].any()
    assert torch.equal(a["truncations"][7], active) and not a["terminations"][7].any()
    last_obs = a["final_obs"] if mode == "same_step" else a["obs"]
    assert equal_bits(last_obs[7], obs_before[7])
    assert a["_final_obs"][7].all() if mode == "same_step" else not a["active"][7].any()
    if mode != "same_step":
        states = [name for name in before if name.startswith("state_")]
        assert [name for name in states if not equal_bits(before[name][7], env.data[name][7])] == []
    statistics = [name for name in before if name.startswith("engine_completed")]
    assert all(equal_bits(before[name][7], env.data[name][7]) for name in statistics)
    assert env.faults()[7] == Fault.INVALID_ACTION and equal_bits(env.faults()[others], twin.faults()[others])
    if mode != "disabled":
        for key in range(30):  # the environment goes through further episodes, and the bit stays
            *_, info = env.step(random_actions(env, key))
            assert not info["fault"].any()
        assert env.faults().tolist() == [0] * 7 + [Fault.INVALID_ACTION] + [0] * 4
        assert env.data["engine_episode"].gt(1).all()
    env.reset()
    assert not env.faults().any()


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    ("value", "clipped"),
    [
        (np.nan, None),
        (np.inf, 0.5),
        (-np.inf, 0.0),
        (0.5000001, 0.5),
        (0.6, 0.5),
        (-0.25, 0.0),
        (0.5, 0.5),
        (-0.0, -0.0),
    ],
)
def test_continuous_actions_are_clipped_to_their_box(drift, device, monkeypatch, value, clipped, clips):
    monkeypatch.setattr(type(drift), "clip_actions", clips)
    env = VecEnv(dataclasses.replace(drift), 3, device)
    env.reset(seed=1)
    before, actions = env.state["place"].clone(), env.sample_actions()
    actions[1, 0, 1] = value
    _, rewards, _, truncations, info = env.step(actions)
    fault = np.isnan(value) if clips else not np.isfinite(value)
    if clips and not fault:
        actions[1, 0, 1] = clipped
    moved = before + actions[:, 0]
    if fault:  # the episode ends and the next one begins
        assert equal_bits(info["final_obs"][1, 0], before[1]) and rewards[1].isnan().all()
    rest = [0, 2] if fault else [0, 1, 2]
    assert equal_bits(env.state["place"][rest], moved[rest]) and equal_bits(rewards[rest, 0], moved[rest, 0])
    assert env.faults().tolist() == [0, int(Fault.NONFINITE_ACTION) if fault else 0, 0]
    assert info["fault"][:, 0].tolist() == truncations[:, 0].tolist() == [False, fault, False]


def test_actions_of_inactive_agents_are_ignored(device):
    env, twin = twins(CONTINUOUS, device, num_envs=200, ticks=0)
    ignored = 0
    for key in range(40):
        actions, idle = random_actions(env, key), ~env.active
        ignored += int(idle.sum())
        a = outputs_of(env.step(torch.where(idle[..., None], 2**31 - 1 - key, actions)))
        b = outputs_of(twin.step(actions))
        assert [name for name in a if not equal_bits(a[name], b[name])] == []
        assert not (a["rewards"][idle].any() or a["terminations"][idle].any() or a["truncations"][idle].any())
    assert different(env, twin) == [] and ignored > 100 and not env.faults().any()


def test_stepping_an_ended_env_only_sets_a_bit(game, device):
    env, _ = twins(game, device, autoreset_mode="disabled", ticks=0)
    for key in range(game.max_steps + 3):
        ended, before = ~env.active.any(1), env.state_dict()
        obs, rewards, terminations, truncations, info = env.step(random_actions(env, key))
        assert not (rewards[ended].any() or terminations[ended].any() or truncations[ended].any())
        assert not info["active"][ended].any() and equal_bits(obs, env.observe())
        changed = [n for n in before if len(before[n]) == 12 and not equal_bits(before[n][ended], env.data[n][ended])]
        assert changed in ([], ["engine_fault"])
        assert torch.equal(env.faults() != 0, ended) and env.faults()[ended].eq(Fault.STEPPED_AFTER_END).all()
    assert ended.all()
    env.reset()
    env.step(torch.full_like(random_actions(env), -1))
    env.step(random_actions(env))
    assert env.faults().eq(Fault.INVALID_ACTION | Fault.STEPPED_AFTER_END).all()  # both bits are set


def test_integer_width_and_memory_layout_of_actions_do_not_matter(game, device):
    envs = [VecEnv(game, 12, device) for _ in range(4)]
    for env in envs:
        env.reset(seed=2)
    for key in range(30):
        actions = random_actions(envs[0], key)
        strided = torch.stack([torch.full_like(actions, -1), actions], dim=-1)[..., 1]
        transposed = actions.transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous() and not transposed.is_contiguous()
        kinds = [actions, actions.long(), strided, transposed.long()]
        first, *others = [outputs_of(env.step(a)) for env, a in zip(envs, kinds, strict=True)]
        assert [name for other in others for name in other if not equal_bits(other[name], first[name])] == []
    assert [name for env in envs[1:] for name in different(envs[0], env)] == []


def test_synchronous_validation_raises_before_anything_happens(game, drift, device):
    env, twin = twins(game, device, validate="sync")
    bad = random_actions(env, 1)
    bad[4, 1], bad[9, 0] = -3, 2**20
    agent = game.layout.agent_names[1]
    where = rf"{2 * game.layout.action.heads} invalid .*environment 4, agent {agent}, number 0: -3; expected 0 to"
    with pytest.raises(InvalidActionError, match=where):
        env.step(bad)
    assert different(env, twin) == []
    a, b = (outputs_of(one.step(random_actions(one, 2))) for one in (env, twin))
    assert [name for name in a if not equal_bits(a[name], b[name])] == []
    bad[9, 0] = 0
    env.active[4, 1] = False  # any action of an inactive agent is valid
    env.step(bad)
    assert not env.faults().any()
    env = VecEnv(drift, 3, device, validate="sync")
    env.reset(seed=1)
    actions = env.sample_actions()
    actions[2, 0, 1] = torch.nan
    with pytest.raises(InvalidActionError, match=r"1 invalid .*environment 2, agent agent_0, number 1: nan"):
        env.step(actions)


def test_synchronous_validation_accepts_any_memory_layout(device):
    env, twin = twins(CONTINUOUS, device, validate="sync")
    actions = random_actions(env, 1)
    env.step(actions.transpose(0, 1).contiguous().transpose(0, 1)), twin.step(actions)
    assert different(env, twin) == []


@pytest.mark.parametrize("mode", MODES)
def test_episode_statistics_equal_a_recount(game, mode, device):
    """Returns are float64 sums of the float32 rewards, in the order of the steps."""
    env = VecEnv(game, 12, device, autoreset_mode=mode)
    env.reset(seed=4)
    for _ in range(2):
        running, returns = np.zeros((2, 12, game.num_agents))
        length, lengths, episodes, terminated = np.zeros((4, 12), np.int64)
        for _ in range(80):
            playing = env.active.any(1).cpu().numpy()
            _, rewards, _, truncations, info = env.step(env.sample_actions())
            running += rewards.cpu().numpy()
            length += playing
            ended = (info["_final_obs"] if mode == "same_step" else ~info["active"]).all(1).cpu().numpy() & playing
            returns[ended] += running[ended]
            lengths[ended] += length[ended]
            episodes += ended
            terminated += ended & ~truncations.any(1).cpu().numpy()
            running[ended], length[ended] = 0, 0
            if mode == "disabled":
                env.reset(mask=ended)
        statistics = {name: tensor.cpu().numpy() for name, tensor in env.episode_statistics().items()}
        expected = {"returns": returns, "lengths": lengths, "episodes": episodes, "terminations": terminated}
        for name, values in expected.items():
            assert statistics[name].dtype == values.dtype
            np.testing.assert_array_equal(statistics[name], values, name)
        assert 0 < terminated.sum() < episodes.sum()
        env.reset()
        env.clear_episode_statistics()
        assert not any(tensor.any() for tensor in env.episode_statistics().values())


def test_a_reward_counts_in_a_large_return_and_a_return_in_a_large_sum(drift, device):
    """In float32, 0.1 added to 2**30 is lost."""
    env = VecEnv(drift, 33, device)
    env.reset(seed=1)
    env.data["engine_returns"].fill_(2.0**30)
    env.episode_statistics()["returns"].fill_(2.0**33)
    env.state["place"][:, 1] = 3  # beyond the end
    rewards = env.step(env.sample_actions())[1].double()
    assert rewards.abs().gt(0.01).any()
    assert equal_bits(env.episode_statistics()["returns"], 2.0**33 + (2.0**30 + rewards))


def test_what_is_written_to_the_state_is_seen_and_played(device):
    env = gpu_vecenv.make("tag_gridworld", 3, device, num_taggers=1, grid=8)
    env.reset(seed=1)
    env.state["cell"].copy_(torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[2, 0], [0, 0]]]))
    expected = torch.tensor([[1, 3, 2, 4], [5, 7, 6, 8], [2, 0, 0, 0]], device=device) / 8
    assert torch.equal(env.observe()[:, 0, :4], expected)
    obs, rewards, terminations, _, info = env.step(torch.tensor([[2, 0]] * 3, device=device))  # taggers: column - 1
    assert torch.equal(obs[:, 0, 0], torch.tensor([0, 4, 1], device=device) / 8) and not terminations.any()
    _, rewards, terminations, _, info = env.step(torch.tensor([[2, 0]] * 3, device=device))
    assert rewards[2].tolist() == [10, -5] and terminations.tolist() == [[False] * 2, [False] * 2, [True] * 2]
    assert torch.equal(info["final_obs"][2, 0, :4], torch.zeros(4, device=device))


def test_sampled_actions_are_valid_uniform_and_stable_within_a_step(game, drift, device):
    env, silent = VecEnv(game, 500, device), VecEnv(game, 500, device)
    env.reset(seed=1), silent.reset(seed=1)
    seen, sizes = [], game.layout.action.head_sizes
    for _ in range(20):
        actions = env.sample_actions()
        assert actions.dtype == torch.int32 and actions.shape == (500, game.num_agents, *game.layout.action.shape)
        assert equal_bits(actions, env.sample_actions())
        a, b = outputs_of(env.step(actions)), outputs_of(silent.step(actions))
        assert equal_bits(a, b)  # sampling does not change the game's own draws
        seen.append(actions.view(500, game.num_agents, len(sizes)))
    assert not env.faults().any()
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))
    for head, size in enumerate(sizes):
        counts = torch.stack(seen)[..., head].flatten().bincount(minlength=size).double()
        expected = counts.sum() / size
        assert len(counts) == size
        assert ((counts - expected).abs() < 6 * expected.sqrt()).all()  # six standard deviations; the draw is fixed
    env = VecEnv(drift, 4000, device)
    env.reset(seed=1)
    actions = env.sample_actions().view(-1, 2)
    low, high = torch.tensor(drift.layout.action.bounds["agent"], device=device)
    assert actions.dtype == torch.float32 and ((actions >= low) & (actions <= high)).all()
    # the mean of 4000 uniform numbers has a standard deviation of width / sqrt(12 * 4000) = width / 219; six of them
    assert ((actions.mean(0) - (low + high) / 2).abs() < 6 * (high - low) / 219).all()


DICE = """#include "game_api.cuh"
struct Scratch {};
HD void reset(State s, Io io) { FOR_RANGE (k, HEADS) s.place[k] = io.rng.uniform(7, k); }
HD void step(State s, Io io) {
    FOR_RANGE (k, HEADS) s.place[k] = io.rng.uniform(7, k);
    ONCE io.truncations[0] = io.elapsed_steps == 3;
}
HD void observe(State s, Io io) { FOR_RANGE (k, HEADS) io.obs[0][k] = s.place[k]; }
"""


def test_draws_are_those_of_the_documented_streams(drift, device):
    """Draws of resets, steps and random actions, computed in Python: other numbers would change every recorded run."""
    drift.source.write_text(DICE)
    seed, first = 2**40 + 3, 2**32 + 5
    env = VecEnv(drift, 3, device, autoreset_mode="next_step", first_env_index=first)
    env.reset(seed=seed)
    keys = [philox([k & ONES, k >> 32, 0, 0], [seed & ONES, seed >> 32])[:2] for k in range(first, first + 3)]

    def uniform(stream, item, step, episode):
        blocks = [philox([stream << 29, item, step, episode], key) for key in keys]
        return torch.tensor([[word >> 8 for word in block[:2]] for block in blocks]) / 2**24

    low, high = torch.tensor(drift.layout.action.bounds["agent"], dtype=torch.float64)
    for episode in range(3):
        for step in range(4):
            assert env.data["engine_episode"].eq(episode).all() and env.elapsed_steps.eq(step).all()
            assert equal_bits(env.state["place"], uniform(1 if step else 0, 7, step, episode))
            actions = env.sample_actions()[:, 0]
            # For bounds with few bits, float64 is exact, and a fused multiply-add rounds once.
            exact = low + uniform(3, 0, step, episode).double() * (high - low)
            assert equal_bits(actions, exact.float())
            env.step(actions[:, None])


def test_starts_on_the_grid_are_those_of_the_documented_streams(device):
    """All cells occur; bounded draws as in ``test_rng.py``, where their uniformity is tested."""
    env = VecEnv(GRIDWORLD, 40, device)
    env.reset(seed=9)
    cells = torch.zeros(40, 3, 2, dtype=torch.int32)
    for environment, agent, axis in np.ndindex(40, 3, 2):
        key = philox([environment, 0, 0, 0], [9, 0])[:2]
        block = philox([1 << 28 | axis, agent, 0, 0], key)
        cells[environment, agent, axis] = (block[0] + (block[1] << 32)) * (GRIDWORLD.grid + 1) >> 64
    assert equal_bits(env.state["cell"], cells) and cells.max() == GRIDWORLD.grid


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_an_episode_begins_with_one_saved_start_in_all_its_fields(device, mode):
    count, agents = 13, CONTINUOUS.num_agents
    number = torch.arange(count, dtype=torch.float32).view(count, 1)
    starts = {
        "position": ((number + 1) / 8 + torch.arange(2 * agents) / 64).view(count, agents, 2),
        "heading": (number / 16 + torch.arange(agents) / 1024).numpy(),
    }
    env = VecEnv(CONTINUOUS, 150, device, autoreset_mode=mode, initial_states=starts)
    obs, _ = env.reset(seed=3)
    drawn = []
    for _ in range(40):
        new = env.elapsed_steps == 0
        rows = (env.state["heading"][new][:, 0] * 16).round().long().cpu()
        assert equal_bits(env.state["heading"][new], torch.as_tensor(starts["heading"])[rows])
        assert equal_bits(env.state["position"][new], starts["position"][rows])
        assert not env.state["speed"][new].any() and env.state["in_game"][new].all()
        assert equal_bits(obs, env.observe())
        drawn.append(rows)
        obs, *_ = env.step(env.sample_actions())
    counts = torch.cat(drawn).bincount(minlength=count)
    assert len(counts) == count and counts.sum() > 500
    expected = counts.sum() / count
    assert ((counts - expected).abs() < 6 * expected.sqrt()).all()  # six standard deviations; the draw is fixed


def test_shared_fields_are_given_once_for_all_envs(device):
    turns = np.linspace(-1, 1, 21, dtype=np.float32)
    env = VecEnv(CONTINUOUS, 5, device, arrays={"turn_level": turns, "acceleration_level": torch.zeros(21)})
    assert env.state["turn_level"].shape == (21,) and env.state["turn_level"].device == env.device
    assert equal_bits(env.state["turn_level"], torch.tensor(turns))
    env.reset(seed=1)
    before, actions = env.state["heading"].clone(), random_actions(env)
    env.step(actions)
    angle = 2 * torch.pi
    # mod 2 pi in float32 against float64: the sum (at most 8) and 2 pi are rounded, each by less than 2.4e-7
    expected = (before.double() + torch.tensor(turns, device=device).double()[actions[..., 1]]) % angle
    gap = (env.state["heading"] - expected).abs()
    assert (torch.minimum(gap, angle - gap)[env.state["in_game"]] < 1e-6).all()
    assert not env.state["speed"].any()


def test_a_restored_state_continues_bitwise_equally_in_any_environment(game, device):
    env, _ = twins(game, device, ticks=4)
    saved = env.state_dict()
    copies = {name: tensor.clone() for name, tensor in saved.items()}
    runs = []
    for one in (env, env, VecEnv(game, 12, device)):  # the same again, restored, and a new one without a reset
        one.load_state_dict(saved)
        runs.append([outputs_of(one.step(one.sample_actions())) for _ in range(25)] + [{"obs": one.reset()[0]}])
        assert all(equal_bits(saved[name], copies[name]) for name in copies)
    for step, first in enumerate(runs[0]):
        assert [name for run in runs[1:] for name in first if not equal_bits(first[name], run[step][name])] == [], step


@pytest.mark.parametrize("thread_order", [1, 2])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("tag_gridworld", {"num_taggers": 7, "grid": 5, "max_steps": 20, "random_start": True}),
        ("tag_gridworld", {"num_taggers": 7, "grid": 5, "max_steps": 20, "full_observation": False}),
        ("tag_continuous", {**FEW, "max_steps": 20}),
        ("tag_continuous", {**FEW, "num_neighbors": "all", "max_steps": 20}),
        ("tag_continuous", {**FEW, "runner_leaves_when_tagged": False, "edge_penalty": -0.3, "max_steps": 20}),
        ("tag_continuous", {"num_runners": 40, "side": 4.0, "tag_reward": 0.1, "max_steps": 20}),
    ],
)
def test_the_order_of_threads_does_not_matter(name, config, thread_order):
    game = gpu_vecenv.configure(name, **config)
    runs = [trajectory_digest(VecEnv(game, 24, "cpu", thread_order=order), 5, 60) for order in (0, thread_order)]
    assert torch.equal(runs[0].words, runs[1].words)


def test_no_global_random_state_is_used_or_touched(game, device):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = trajectory(VecEnv(game, 3, device), 30)
    VecEnv(game, 3, device).reset()
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    second = trajectory(VecEnv(game, 3, device), 30)
    assert [name for name in first if not equal_bits(first[name], second[name])] == []


def test_close_frees_all_tensors(game, device):
    for _ in range(3):
        env = VecEnv(game, 5, device)
        obs, _ = env.reset(seed=1)
        env.step(env.sample_actions())
        tensors = [weakref.ref(tensor) for tensor in env.data.values()]
        env.close()
        env.close()
        assert env.closed and [tensor for tensor in tensors if tensor() is not None] == []
        assert obs.isfinite().all()  # outputs outlive their environment


def test_a_runner_that_starts_out_of_game_ends_at_once(device):
    starts = {"in_game": torch.tensor([[True, True, False]])}
    game = gpu_vecenv.configure("tag_continuous", num_taggers=1, num_runners=2, max_steps=5, side=1000.0)
    env = VecEnv(game, 20, device, initial_states=starts)
    env.reset(seed=1)
    _, _, terminations, _, _ = env.step(env.sample_actions())
    assert terminations[:, 2].all()
    for _ in range(4):
        env.step(env.sample_actions())
    assert env.episode_statistics()["episodes"].tolist() == [1] * 20


def test_an_agent_that_has_ended_does_not_act_even_if_put_back_in_game(device):
    game = gpu_vecenv.configure("tag_continuous", num_taggers=1, num_runners=4, side=3.0, tagging_distance=0.3)
    env = VecEnv(game, 64, device, autoreset_mode="next_step")
    env.reset(seed=1)
    for _ in range(3):
        env.step(env.sample_actions())
    out = ~env.active & env.active.any(1, keepdim=True)
    assert out.any()
    env.state["in_game"].fill_(True)
    before = env.state["position"].clone()
    env.step(torch.where(out[..., None], 500_000_000, env.sample_actions()))  # far outside of every table
    assert not env.faults().any()
    assert torch.equal(env.state["position"][out], before[out])


def test_an_environment_like_another_has_its_present_shared_fields_ranges_and_initial_states(device):
    """A curriculum or a caller has changed them."""
    starts, ranges = {"position": torch.rand(3, 5, 2)}, {"max_speed": (0.5, 1)}
    env = VecEnv(CONTINUOUS, 4, device, initial_states=starts, randomize=ranges)
    changed = {"state_acceleration_level": "arrays", "engine_ranges": "randomize", "initial_position": "initial_states"}
    for name in changed:
        env.data[name].mul_(0.5)
    given = {"arrays": {n: env.state[n] for n in ("acceleration_level", "turn_level")}}
    given |= {"randomize": {"max_speed": (3, 4)}, "initial_states": {"position": torch.ones(2, 5, 2)}}
    given["arrays"]["acceleration_level"] = torch.full_like(env.state["acceleration_level"], 7)
    for name, argument in changed.items():
        same, other = env.like(num_envs=2), env.like(**{argument: given[argument]})
        assert same.data[name].equal(env.data[name]) and same.data[name].any(), name
        assert same.data[name].data_ptr() != env.data[name].data_ptr()
        assert not other.data[name].equal(env.data[name]), name
    assert env.like(initial_states={}).build.initial_fields == ()


def test_a_source_that_requires_a_gradient_leaves_the_environment_without(device):
    env = gpu_vecenv.make("cartpole", 3, device)
    env.reset(seed=1)
    env.data.push("mine", torch.full((3,), 2.0, requires_grad=True))
    env.load_state_dict({name: x.requires_grad_(x.is_floating_point()) for name, x in env.state_dict().items()})
    assert not any(tensor.requires_grad for tensor in env.data.values())
    assert env.data.pull("mine").tolist() == [2, 2, 2]


def test_before_the_first_reset_there_are_neither_observations_nor_actions(device):
    env = gpu_vecenv.make("cartpole", 3, device)
    for call in (env.observe, env.sample_actions):
        with pytest.raises(ResetNeededError, match=f"{call.__name__} before reset"):
            call()


LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class WideDrift(Drift):
    """The width of its first action is larger than any float32."""

    action_space = Box(np.float32([-LARGEST, -1]), np.float32([LARGEST, 1]))


def test_sampled_actions_of_a_box_of_any_width_are_uniform(drift, device, monkeypatch):
    monkeypatch.setattr(WideDrift, "source", drift.source, raising=False)
    env = VecEnv(WideDrift(), 4000, device)
    env.reset(seed=1)
    wide, narrow = env.sample_actions()[:, 0].double().T.cpu()
    for values in (wide / LARGEST, narrow):  # the mean of 4,000 has a standard deviation of 0.009
        assert values.abs().max() <= 1 and values.min() < -0.98 and values.max() > 0.98 and abs(values.mean()) < 0.05


def test_tensors_of_the_user_are_not_in_the_state_dict(device):
    env = gpu_vecenv.make("tag_gridworld", 4, device)
    env.reset(seed=7)
    saved = env.state_dict()
    env.data.push("mine", torch.zeros(9, device=device))
    env.load_state_dict(saved)
    assert set(env.state_dict()) == set(saved) and "mine" in env.data


# ---------------------------------------------------------------------- digests

KINDS = (torch.bool, torch.uint8, torch.int32, torch.float32, torch.int64, torch.float64)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_digest_sees_every_element_of_its_own_env(kind, device):
    functions = FunctionManager(device)

    def words(tensor):
        digest = Digest(functions, 3)
        digest.add(tensor)
        return digest.words.tolist()

    tensor = torch.arange(3 * 4, device=device).view(3, 2, 2).remainder(2).to(kind)
    before = words(tensor)
    for row, column in np.ndindex(2, 2):
        other = tensor.clone()
        other[1, row, column] = 1 - tensor[1, row, column].to(torch.int32)
        assert [x == y for x, y in zip(words(other), before, strict=True)] == [True, False, True]


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.int16, torch.complex64], ids=str)
def test_a_digest_refuses_elements_that_its_kernel_does_not_read(kind, device):
    with pytest.raises(TypeError, match=f"got {kind}; expected real elements of 1, 4 or 8 bytes"):
        Digest(FunctionManager(device), 3).add(torch.zeros(3, 2, dtype=kind, device=device))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_a_digest_treats_all_nans_alike(kind, device):
    """NaN payloads may differ between processors and do not count; signs of zeros do."""
    functions, found = FunctionManager(device), []
    integer = torch.int32 if kind == torch.float32 else torch.int64
    one = torch.tensor([float("nan")], dtype=kind, device=device)
    other = (one.view(integer) + 1).view(kind)
    zeros = torch.zeros(2, dtype=kind, device=device)
    for tensor in (one, -one, other, one.view(integer), other.view(integer), zeros[:1], -zeros[:1]):
        digest = Digest(functions, 1)
        digest.add(tensor)
        found.append(digest.hex())
    assert other.isnan().all() and found[0] == found[1] == found[2] != found[4]
    assert found[3] != found[4] and found[5] != found[6]


# ---------------------------------------------------------------------- step buffers and autograd


def test_inference_mode_of_one_call_does_not_affect_later_outputs(device):
    env = gpu_vecenv.make("tag_gridworld", 3, device)
    with torch.inference_mode():
        env.reset(seed=1)
    obs, *_ = env.step(env.sample_actions())
    weight = torch.ones(21, requires_grad=True, device=device)
    (obs * weight).sum().backward()
    assert torch.equal(weight.grad, obs.sum((0, 1)))


def test_writing_into_one_output_does_not_invalidate_an_autograd_graph_through_another(device):
    env = gpu_vecenv.make("tag_gridworld", 3, device)
    env.reset(seed=1)
    first, rewards, *_ = env.step(env.sample_actions())
    weight = torch.ones(21, requires_grad=True, device=device)
    loss = (first * weight).sum()
    rewards.mul_(0.1)
    second, later, *_ = env.step(env.sample_actions())
    later.mul_(0.1)
    second.zero_()
    loss.backward()
    scale = torch.ones((), requires_grad=True, device=device)
    _, third, *_ = env.step(env.sample_actions())
    third.mul_(scale)


def test_a_closed_environment_frees_its_buffers():
    env = gpu_vecenv.make("tag_gridworld", 3, "cpu")
    env.reset(seed=1)
    pool = weakref.ref(env._buffers_pool)
    env.close()
    assert pool() is None


@pytest.mark.parametrize("rows", ["no", 2, [1], None])
def test_agents_as_envs_must_be_a_bool(rows):
    with pytest.raises(TypeError, match="agents_as_envs is"):
        gpu_vecenv.make("tag_gridworld", 3, "cpu", agents_as_envs=rows)
