"""What VecEnv promises, each promise broken by some known mistake of some vector environment."""

import random
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

import gpu_vecenv
from gpu_vecenv import Env, Fault, Field, VecEnv
from gpu_vecenv.digest import trajectory_digest
from gpu_vecenv.env import f32, param
from gpu_vecenv.errors import InvalidActionError

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


DRIFT = """#include "vecenv.cuh"
struct Scratch {};
HD void reset(State s, Io io) { FOR_RANGE (k, HEADS) s.place[k] = io.rng.uniform(0, k) - 0.5f; }
HD void step(State s, Io io) {
    FOR_RANGE (k, HEADS) s.place[k] += io.action(0, k);
    team_sync();
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


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def everything(env: VecEnv) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in env.data.items()}


def different(a: VecEnv, b: VecEnv, rows=slice(None)) -> list[str]:
    return [name for name in a.data if not same(a.data[name][rows], b.data[name][rows])]


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
    assert same(info["active"], torch.ones_like(info["active"]))
    ticks = []
    for _ in range(steps):
        before = obs
        outputs = outputs_of(env.step(env.sample_actions()))
        obs = outputs["obs"]
        state = {name: tensor.clone() for name, tensor in env.data.items() if tensor.shape[0] == env.num_envs}
        ticks.append({"before": before, **outputs, **state})
    return {name: torch.stack([tick[name] for tick in ticks]).cpu() for name in ticks[0]}


def random_actions(env: VecEnv, key: int = 0, kind=torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key)
    sizes = torch.tensor(env.game.action.head_sizes).view(env.game.action.shape)
    shape = (env.num_envs, env.num_agents, *env.game.action.shape)
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
    expected = {"obs": (*rows, *game.obs_shape)}
    for _ in range(30):
        obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
        kinds = {torch.float32: [obs, rewards], torch.bool: [terminations, truncations, info["active"]]}
        assert all(t.dtype == kind and t.device == env.device for kind, ts in kinds.items() for t in ts)
        assert all(t.shape == rows for t in (rewards, terminations, truncations, info["active"]))
        assert obs.shape == expected["obs"]
        assert all(game.observation_space.contains(row) for row in obs.flatten(0, 1).cpu().numpy())
        assert obs.isfinite().all() and rewards.isfinite().all()
        assert not (terminations & truncations).any()
        assert same(info["active"], env.active)
        assert set(info) == {"active"} | ({"final_obs", "_final_obs"} if mode == "same_step" else set())
        if mode == "same_step":
            assert info["final_obs"].shape == obs.shape and info["final_obs"].dtype == obs.dtype
            assert info["_final_obs"].shape == rows and info["_final_obs"].dtype == torch.bool
        if mode == "disabled":
            env.reset(mask=~env.active.any(1))
    assert (env.device.type, env.data.device) == (device, env.device)
    assert {name: tuple(t.shape) for name, t in env.state.items() if t.shape[0] == 5} == {
        field.name: (5, *game.shape(field)) for field in game.state if not field.shared
    }


@pytest.mark.parametrize("mode", MODES)
def test_an_equal_seed_gives_equal_bits_and_another_seed_gives_others(game, mode, device):
    runs = [trajectory(VecEnv(game, 40, device, autoreset_mode=mode), 60, seed) for seed in (3, 3, 4)]
    assert [name for name in runs[0] if not same(runs[0][name], runs[1][name])] == []
    assert not torch.equal(runs[0]["obs"], runs[2]["obs"])


def test_no_replica_of_any_seed_repeats_another(device):
    """The starts are 8 uniform floats wide and more: two equal ones mean a stream used twice, as by seed + replica."""
    env = VecEnv(CONTINUOUS, 64, device)
    starts, actions = [], []
    for seed in [*range(6), 2**32, 2**32 + 1, 2**63, 2**64 - 1]:
        env.reset(seed=seed)
        starts.append(env.state["position"].flatten(1).clone())
        actions.append(env.sample_actions().flatten(1))
    assert len(torch.cat(starts).unique(dim=0)) == 64 * 10
    assert len(torch.cat(actions).unique(dim=0)) == 64 * 10


def test_a_replica_depends_on_no_other(game, device):
    whole = trajectory(VecEnv(game, 1500, device), 40)
    for first, count in [(0, 1), (0, 2), (0, 31), (0, 33), (0, 1023), (700, 1), (1, 64), (1436, 64)]:
        part = trajectory(VecEnv(game, count, device, first_replica=first), 40)
        assert [n for n in whole if not same(part[n], whole[n][:, first : first + count])] == [], (first, count)


def test_actions_of_one_replica_move_no_other(game, device):
    env, twin = twins(game, device)
    changed = torch.arange(12, device=device) == 7
    for key in range(20, 50):
        actions, others = random_actions(env, key), random_actions(env, 1000 + key)
        mask = changed.view(-1, *[1] * (actions.dim() - 1))
        a, b = outputs_of(env.step(actions)), outputs_of(twin.step(torch.where(mask, others, actions)))
        assert [name for name in a if not same(a[name][~changed], b[name][~changed])] == []
        assert different(env, twin, ~changed.cpu()) == [] or [n for n in different(env, twin, ~changed)] == []
    assert different(env, twin, changed) != []


def test_an_unseeded_reset_goes_on_and_can_be_repeated(game, device):
    env, twin = VecEnv(game, 9, device), VecEnv(game, 9, device)
    first, _ = env.reset()
    assert 0 <= env.seed < 2**64
    twin.reset(seed=env.seed)
    assert same(first, twin.observe())
    starts = [first]
    for _ in range(3):
        env.step(env.sample_actions()), twin.step(twin.sample_actions())
        starts.append(env.reset()[0])
        assert same(starts[-1], twin.reset()[0])
    assert len(torch.stack(starts).flatten(1).unique(dim=0)) == 4
    assert not same(VecEnv(game, 9, device).reset()[0], first)  # two unseeded ones differ
    assert same(env.reset(seed=twin.seed)[0], first)


def test_every_episode_starts_anew(device):
    run = trajectory(VecEnv(CONTINUOUS, 5, device), 9 * 8)
    for e in range(5):
        starts = run["state_position"][:, e][run["machine_time"][:, e, 0] == 0]
        assert len(starts) >= 7 and len(starts.flatten(1).unique(dim=0)) == len(starts)


def transitions(game: Env, mode: str, device: str, episodes: int, ticks: int) -> dict[tuple[int, int, int], list[bytes]]:
    """(replica, episode, t) -> (s, a, r, s', terminations, truncations, active), of the first episodes."""
    env = VecEnv(game, 12, device, autoreset_mode=mode)
    # int16: a table of numbers for every place a transition can have
    table = torch.randint(5, (12, ticks, game.max_steps, game.num_agents, game.action.heads), dtype=torch.int32)
    table = table.view(*table.shape[:4], *game.action.shape).to(device)
    obs, _ = env.reset(seed=8)
    seen, replica = {}, torch.arange(12, device=device)
    for _ in range(ticks):
        episode, time = env.data["machine_episode"][:, 0].clone(), env.time.clone()
        begins = ~env.active.any(1)
        actions = table[replica, episode, time % game.max_steps]
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
    assert env.faults().sum() == 0 and int(env.data["machine_episode"].min()) >= episodes
    return seen


def test_the_three_autoreset_modes_give_the_same_transitions(game, device):
    """Among them s' of the last tick: final_obs in same_step mode is what the other modes return as obs."""
    episodes = 4
    runs = []
    for mode in MODES:
        torch.manual_seed(21)
        runs.append(transitions(game, mode, device, episodes, episodes * (game.max_steps + 1) + 1))
    assert len(runs[0]) > 100
    assert {key[0] for key in runs[0]} == set(range(12)) and {key[1] for key in runs[0]} == set(range(episodes))
    assert runs[0] == runs[1] == runs[2]


def test_the_time_limit_and_the_flags_follow_an_independent_clock(game, device):
    env = VecEnv(game, 12, device)
    env.reset(seed=6)
    clock, limits, terminated = torch.zeros(12, dtype=torch.int32, device=device), 0, 0
    for _ in range(100):
        _, _, terminations, truncations, info = env.step(env.sample_actions())
        clock += 1
        ends, late = info["_final_obs"][:, 0], clock == game.max_steps
        assert torch.equal(truncations.any(1) & ~late, torch.zeros_like(late))
        assert torch.equal(ends & late, late)
        assert same(info["_final_obs"], ends[:, None].expand(-1, game.num_agents))
        limits, terminated = limits + int(truncations.any(1).sum()), terminated + int((ends & ~late).sum())
        clock = torch.where(ends, 0, clock)
        assert torch.equal(clock, env.time)
    assert limits > 0 and terminated > 0


@pytest.mark.parametrize("seed", [None, 77])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_masked_reset_touches_no_other_replica(game, device, seed, kind):
    env, twin = twins(game, device, autoreset_mode="disabled", ticks=3)
    for one in (env, twin):  # a fault bit in every replica
        one.step(torch.full_like(random_actions(one), 99))
    picked = torch.arange(12) % 5 == 1
    mask = picked.numpy() if kind == "numpy" else picked.to(device)
    obs, info = env.reset(mask=mask, seed=seed)
    assert different(env, twin, ~picked) == []
    assert same(obs, env.observe()) and same(obs[~picked], twin.observe()[~picked])
    assert same(info["active"], env.active)
    assert env.time[picked].eq(0).all() and env.faults()[picked].eq(0).all() and env.faults()[~picked].ne(0).all()
    fresh = VecEnv(game, 12, device)
    fresh.reset(seed=5 if seed is None else seed)
    if seed is None:  # the streams go on: episode 1 of the first seed
        fresh.reset()
    names = [name for name in different(env, fresh, picked) if name.removeprefix("machine_") not in STATISTICS]
    assert names == []
    assert bool(mask.sum() == 2)


def test_a_mask_of_none_resets_nothing(game, device):
    env, twin = twins(game, device)
    obs, _ = env.reset(mask=torch.zeros(12, dtype=torch.bool, device=device), seed=1)
    assert different(env, twin) == [] and same(obs, twin.observe())


def test_reset_writes_all_that_an_episode_reads(game, device):
    """Whatever a replica held before; only the statistics are not reset's to write."""
    env, fresh = VecEnv(game, 8, device), VecEnv(game, 8, device)
    env.reset(seed=1)
    names = [f"state_{f.name}" for f in game.state if not f.shared]
    names += [n for n in env.data if n.startswith("machine_") and n.removeprefix("machine_") not in STATISTICS]
    for name in names:
        env.data[name][3].view(torch.uint8).fill_(0xFF)
    mask = torch.arange(8, device=device) == 3
    obs, _ = env.reset(mask=mask, seed=9)
    expected, _ = fresh.reset(seed=9)
    assert same(obs[3], expected[3])
    assert different(env, fresh, slice(3, 4)) == []
    for key in range(20):
        a, b = (outputs_of(one.step(random_actions(env, key))) for one in (env, fresh))
        assert [name for name in a if not same(a[name][3], b[name][3])] == []


def test_earlier_outputs_and_the_callers_inputs_never_change(game, device):
    env = VecEnv(game, 6, device)
    mask = torch.tensor([True, False, True, False, False, True], device=device)
    kept, copies = [], []
    for key in range(30):
        obs, info = env.reset(seed=key) if key % 10 == 0 else env.reset(mask=mask) if key % 10 == 5 else env.step(
            random_actions(env, key))[::4]
        new = [obs, *info.values(), env.observe(), env.sample_actions(), mask]
        kept += new
        copies += [tensor.clone() for tensor in new]
        actions = random_actions(env, key)
        results = env.step(actions)
        kept += [actions, *results[:4], *results[4].values()]
        copies += [tensor.clone() for tensor in kept[len(copies) :]]
    assert all(same(tensor, copy) for tensor, copy in zip(kept, copies, strict=True))
    obs.fill_(7)  # the caller may write to outputs: no state lives there
    assert not (env.observe() == 7).all()
