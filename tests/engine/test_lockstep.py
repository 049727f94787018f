"""On the host, replicas of one agent go in lockstep: the bits are those of debug builds, which step them one by one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from games.painter import Painter
from games.script import Script
from games.spinner import Spinner
from support.kernels import signature

import gpu_vecenv
from gpu_vecenv.compile.codegen import DEFAULT_BUILD, SIMD_ENVS, BuildOptions, game_source
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import MODES, VecEnv

SHORT = {"max_steps": 40}
GAMES = {
    "cartpole": gpu_vecenv.configure("cartpole", **SHORT),
    "cartpole, semi-implicit": gpu_vecenv.configure("cartpole", semi_implicit=True, sutton_barto_reward=True, **SHORT),
    "mountain_car": gpu_vecenv.configure("mountain_car", **SHORT),
    "continuous_mountain_car": gpu_vecenv.configure("continuous_mountain_car", **SHORT),
    "pendulum": gpu_vecenv.configure("pendulum", **SHORT),
    "acrobot": gpu_vecenv.configure("acrobot", **SHORT),
    "acrobot, draws in a step": gpu_vecenv.configure("acrobot", torque_noise_max=0.5, **SHORT),
    "script": Script(),  # episodes of 2 to 6 steps: most replicas begin or end
    "script, two numbers": Script(continuous=True),
    "spinner": Spinner(),
}
ARRAYS = {"spinner": {"speeds": torch.tensor([0.0, 0.25, 0.5, 1.0])}}
SIZES = (1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 128, 1000)
TICKS = 100
PROBE = "\nKERNEL(probe) { FOR_ITEMS(k, 1) args.out[0] = host_simd::EnvRange::SUPPORTED; }\n"


def is_vectorized(game: Env, build: BuildOptions = DEFAULT_BUILD) -> bool:
    manager, out = FunctionManager("cpu"), torch.zeros(1, dtype=torch.int32)
    probe = signature("probe", "i32* out")
    source = game_source(game.layout, build) + probe.source + PROBE
    manager._build(source, "probe", [probe]).launch("probe", 1, out=out)
    return bool(out.item())


def wrong(actions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Some actions made invalid; discrete ones are 64-bit in every other step, some beyond what 32 bits hold."""
    chance = torch.rand(actions.shape, generator=generator)
    if actions.dtype == torch.float32:
        for k, bad in enumerate((math.nan, math.inf, -math.inf, 1e9)):
            actions[(chance > 0.01 * k) & (chance < 0.01 * k + 0.005)] = bad
        return actions
    if torch.rand((), generator=generator) < 0.5:
        actions = actions.long()
        actions[(chance > 0.04) & (chance < 0.05)] = 2**32  # 0 in its lower half
    for k, bad in enumerate((-1, 77)):
        actions[(chance > 0.01 * k) & (chance < 0.01 * k + 0.005)] = bad
    return actions


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


def trajectory(env: VecEnv, steps: int = TICKS) -> Iterator[dict[str, torch.Tensor]]:
    """What each step gives, all that is kept included; final observations where they are meant."""
    generator = torch.Generator().manual_seed(7)
    env.reset(seed=2**63 + 11)
    for step in range(steps):
        actions = wrong(env.sample_actions(), generator)
        buffers = env.step_buffers()
        env.step(actions, out=buffers)
        seen = {name: bits(tensor) for name, tensor in buffers.tensors().items() if name != "final_obs"}
        if buffers.final_obs is not None:
            seen["final_obs"] = bits(buffers.final_obs[buffers.final_mask])
        names = [f"state_{name}" for name in env.state]
        names += [f"engine_{name}" for name in ("episode", "elapsed_steps", "active", "fault", "returns")]
        names += [f"machine_completed_{name}" for name in ("returns", "lengths", "episodes", "terminations")]
        yield seen | {name: bits(env.data[name]) for name in names}
        if env.autoreset_mode == "disabled" and step % 8 == 7:
            env.reset(mask=~env.active.any(1))


def check_equal(name: str, num_envs: int, mode: str, steps: int = TICKS) -> None:
    together = VecEnv(GAMES[name], num_envs, "cpu", autoreset_mode=mode, arrays=ARRAYS.get(name))
    alone = together.like(thread_order=1)
    for step, (one, other) in enumerate(zip(trajectory(together, steps), trajectory(alone, steps), strict=True)):
        differing = [name for name in other if not torch.equal(one[name], other[name])]
        assert not differing, f"{num_envs} replicas, step {step}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GAMES)
def test_bits_are_those_of_replicas_stepped_alone(name, mode):
    for num_envs in SIZES:
        check_equal(name, num_envs, mode)


def test_threads_share_the_replicas():
    check_equal("cartpole", 40_001, "same_step", steps=30)


@pytest.mark.parametrize("rows", [False, True])
def test_a_start_pool_and_agents_as_rows(rows):
    initial_states = {"theta": torch.linspace(-0.2, 0.2, 50), "x_dot": torch.linspace(-3, 3, 50)}
    envs = [
        VecEnv(GAMES["cartpole"], 200, "cpu", initial_states=initial_states, agents_as_envs=rows, thread_order=order)
        for order in (0, 1)
    ]
    runs = [[seen["obs"] for seen in trajectory(env)] for env in envs]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ["pendulum", "mountain_car", "acrobot"])
def test_angles_that_take_the_long_way_take_it_alone(name):
    spoilt = torch.tensor([2.0**16, -(2.0**16), 65535.99, 1e9, 3e38, math.inf, -math.inf, math.nan])
    envs = [VecEnv(GAMES[name], 3 * SIMD_ENVS + 5, "cpu", thread_order=order) for order in (0, 1)]
    seen = []
    for env in envs:
        env.reset(seed=4)
        field = next(iter(env.state.values())).view(env.num_envs, -1)
        for step in range(len(spoilt)):
            for k, value in enumerate(spoilt):
                field[(17 * k + 5 * step) % env.num_envs, 0] = value
            obs, rewards, *flags, _ = env.step(env.sample_actions())
            seen.append(
                [
                    bits(obs.nan_to_num(nan=7.0)),
                    bits(rewards.nan_to_num(nan=7.0)),
                    *map(bits, flags),
                    bits(env.elapsed_steps),
                ]
            )
    half = len(spoilt)
    for one, other in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_long_way_is_taken():
    env = VecEnv(GAMES["mountain_car"], 2 * SIMD_ENVS, "cpu")
    env.reset(seed=1)
    env.state["position"][5] = place = 2.0**22 + 1  # three times this is a float, of which the cosine is asked
    obs = env.step(torch.ones(env.num_envs, 1, dtype=torch.int32))[0]
    slope = math.cos(3 * place)
    assert slope > 0.1  # it rolls down: no goal here
    assert obs[5, 0, 1].item() == pytest.approx(-env.game.gravity * slope, rel=1e-6)


@pytest.mark.parametrize("name", GAMES)
def test_games_of_one_agent_go_in_lockstep(name):
    assert is_vectorized(GAMES[name])


@pytest.mark.parametrize(
    "build", [BuildOptions(end_on_nonfinite=True), BuildOptions(guards=True), BuildOptions(thread_order=1)], ids=str
)
def test_debug_builds_and_quarantine_step_one_by_one(build):
    assert not is_vectorized(GAMES["cartpole"], build)


@dataclass(frozen=True, kw_only=True)
class Watched(Spinner):
    """Rows are as wide as those of a role that nobody has here."""

    roles = {"spinner": 1, "watcher": 0}  # noqa: RUF012 - a declaration, not a default
    obs_dim = {"spinner": 5, "watcher": 7}  # noqa: RUF012
    source = Spinner.source_path()


def test_what_a_row_has_too_much_is_0():
    assert not is_vectorized(Watched())
    env = VecEnv(Watched(), 200, "cpu", arrays=ARRAYS["spinner"])
    obs, _ = env.reset(seed=1)
    for _ in range(5):
        assert obs.shape[-1] == 7 and obs[..., 5:].eq(0).all()
        obs = env.step(env.sample_actions())[0]


@pytest.mark.parametrize("game", [Script(num_others=1), Painter(), gpu_vecenv.configure("tag_gridworld")], ids=str)
def test_teams_and_large_observations_step_one_by_one(game):
    assert not is_vectorized(game)
