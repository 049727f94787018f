"""Vectorised stepping on the host is bitwise equal to debug builds, which step one environment at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from games.painter import Painter
from games.script import Script
from games.spinner import Spinner
from support.bitwise import equal_bits
from support.kernels import signature

import gpu_vecenv
from gpu_vecenv.compile.codegen import SIMD_ENVS, game_source
from gpu_vecenv.compile.engine_kernels import DEFAULT_BUILD, BuildOptions
from gpu_vecenv.compile.function_manager import FunctionManager
from gpu_vecenv.declare.env import Env
from gpu_vecenv.engine.vec_env import MODES, VecEnv

pytestmark = pytest.mark.usefixtures("shipped_flags")

SHORT = {"max_steps": 40}
GAMES = {
    "cartpole": gpu_vecenv.configure("cartpole", **SHORT),
    "cartpole, semi-implicit": gpu_vecenv.configure("cartpole", semi_implicit=True, sutton_barto_reward=True, **SHORT),
    "mountain_car": gpu_vecenv.configure("mountain_car", **SHORT),
    "continuous_mountain_car": gpu_vecenv.configure("continuous_mountain_car", **SHORT),
    "pendulum": gpu_vecenv.configure("pendulum", **SHORT),
    "acrobot": gpu_vecenv.configure("acrobot", **SHORT),
    "acrobot, random torque": gpu_vecenv.configure("acrobot", torque_noise_max=0.5, **SHORT),
    "script": Script(),  # episodes of 2 to 6 steps: most environments begin or end
    "script, continuous": Script(continuous=True),
    "spinner": Spinner(),
}
ARRAYS = {"spinner": {"speeds": torch.tensor([0.0, 0.25, 0.5, 1.0])}}
# Around a quarter of a batch, from which on the vectorised loop is used; around one batch; several batches.
SIZES = (1, 15, 16, 17, 63, 64, 65, 200)
QUICK = ("cartpole", "script")
PROBE = "\nKERNEL(probe) { FOR_ITEMS(k, 1) args.out[0] = host_simd::EnvRange::SUPPORTED; }\n"


def is_vectorized(game: Env, build: BuildOptions = DEFAULT_BUILD) -> bool:
    manager, out = FunctionManager("cpu"), torch.zeros(1, dtype=torch.int32)
    probe = signature("probe", "i32* out")
    source = game_source(game.layout, build) + probe.source + PROBE
    manager._build(source, "probe", [probe]).launch("probe", 1, out=out)
    return bool(out.item())


def with_invalid(actions: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Makes some actions invalid; discrete ones are int64 in every other step, some of them outside int32."""
    random = torch.rand(actions.shape, generator=generator)
    if actions.dtype == torch.float32:
        for k, invalid in enumerate((math.nan, math.inf, -math.inf, 1e9)):
            actions[(random > 0.01 * k) & (random < 0.01 * k + 0.005)] = invalid
        return actions
    if torch.rand((), generator=generator) < 0.5:
        actions = actions.long()
        actions[(random > 0.04) & (random < 0.05)] = 2**32  # its lower half is 0
    for k, invalid in enumerate((-1, 77)):
        actions[(random > 0.01 * k) & (random < 0.01 * k + 0.005)] = invalid
    return actions


def trajectory(env: VecEnv, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Outputs and state after each step; of final_obs, the rows of final_mask."""
    generator = torch.Generator().manual_seed(7)
    env.reset(seed=2**63 + 11)
    for step in range(steps):
        actions = with_invalid(env.sample_actions(), generator)
        buffers = env.step_buffers()
        env.step(actions, out=buffers)
        outputs = {name: tensor.clone() for name, tensor in buffers.tensors().items() if name != "final_obs"}
        if buffers.final_obs is not None:
            outputs["final_obs"] = buffers.final_obs[buffers.final_mask]
        yield outputs | {name: tensor.clone() for name, tensor in env.state_dict().items()}
        if env.autoreset_mode == "disabled" and step % 8 == 7:
            env.reset(mask=~env.active.any(1))


def check_equal(vectorized: VecEnv, steps: int) -> None:
    scalar = vectorized.like(thread_order=1)
    trajectories = zip(trajectory(vectorized, steps), trajectory(scalar, steps), strict=True)
    for step, (one, other) in enumerate(trajectories):
        differing = [name for name in other if not equal_bits(one[name], other[name])]
        assert not differing, f"{vectorized.num_envs} environments, step {step}"


# What a game computes differs by game, how episodes end and begin by mode: quick games in all modes, others in one.
CASES = [
    (name, mode, [pytest.mark.slow] * (name not in QUICK) + [pytest.mark.exhaustive] * (name not in QUICK and apart))
    for k, name in enumerate(GAMES)
    for mode, apart in ((mode, j != k % len(MODES)) for j, mode in enumerate(MODES))
]


@pytest.mark.parametrize(("name", "mode"), [pytest.param(name, mode, marks=marks) for name, mode, marks in CASES])
def test_vectorized_steps_are_bitwise_equal_to_scalar_ones(name, mode):
    for num_envs in SIZES:
        check_equal(VecEnv(GAMES[name], num_envs, "cpu", autoreset_mode=mode, arrays=ARRAYS.get(name)), steps=60)


def test_several_threads_are_bitwise_equal_too():
    check_equal(VecEnv(GAMES["cartpole"], 9_001, "cpu"), steps=20)


@pytest.mark.parametrize("agents_as_envs", [False, True])
def test_saved_initial_states_and_agents_as_envs_are_bitwise_equal_too(agents_as_envs):
    initial_states = {"theta": torch.linspace(-0.2, 0.2, 50), "x_dot": torch.linspace(-3, 3, 50)}
    settings = {"initial_states": initial_states, "agents_as_envs": agents_as_envs}
    check_equal(VecEnv(GAMES["cartpole"], 200, "cpu", **settings), steps=60)


@pytest.mark.parametrize("name", ["pendulum", "mountain_car", "acrobot"])
def test_large_angles_take_the_scalar_path(name):
    angles = torch.tensor([2.0**16, -(2.0**16), 65535.99, 1e9, 3e38, math.inf, -math.inf, math.nan])
    envs = [VecEnv(GAMES[name], 3 * SIMD_ENVS + 5, "cpu", thread_order=order) for order in (0, 1)]
    results = []
    for env in envs:
        env.reset(seed=4)
        field = next(iter(env.state.values())).view(env.num_envs, -1)
        for step in range(len(angles)):
            for k, angle in enumerate(angles):
                field[(17 * k + 5 * step) % env.num_envs, 0] = angle
            obs, rewards, *flags, _ = env.step(env.sample_actions())
            # The sign of a NaN may differ.
            results.append([obs.nan_to_num(nan=7.0), rewards.nan_to_num(nan=7.0), *flags, env.elapsed_steps.clone()])
    half = len(angles)
    for one, other in zip(results[:half], results[half:], strict=True):
        assert equal_bits(one, other)


def test_the_scalar_path_computes_the_cosine_of_a_large_angle():
    env = VecEnv(GAMES["mountain_car"], 2 * SIMD_ENVS, "cpu")
    env.reset(seed=1)
    env.state["position"][5] = position = 2.0**22 + 1  # three times this is a float
    obs = env.step(torch.ones(env.num_envs, 1, dtype=torch.int32))[0]
    slope = math.cos(3 * position)
    assert slope > 0.1  # the car rolls downhill: no goal here
    assert obs[5, 0, 1].item() == pytest.approx(-env.game.gravity * slope, rel=1e-6)


@dataclass(frozen=True, kw_only=True)
class Padded(Spinner):
    """Its rows are as wide as those of a role without agents."""

    roles = {"spinner": 1, "watcher": 0}  # noqa: RUF012 - a declaration, not a default
    obs_dim = {"spinner": 5, "watcher": 7}  # noqa: RUF012
    source = Spinner.source_path()


@pytest.mark.parametrize(
    ("game", "build", "expected"),
    [
        *((game, DEFAULT_BUILD, True) for game in GAMES.values()),
        (GAMES["cartpole"], BuildOptions(end_on_nonfinite=True), False),
        (GAMES["cartpole"], BuildOptions(guards=True), False),
        (GAMES["cartpole"], BuildOptions(thread_order=1), False),
        (Padded(), DEFAULT_BUILD, False),
        (Script(num_others=1), DEFAULT_BUILD, False),
        (Painter(), DEFAULT_BUILD, False),  # large observations
        (gpu_vecenv.configure("tag_gridworld"), DEFAULT_BUILD, False),
    ],
    ids=lambda value: value.name() if isinstance(value, Env) else None,
)
def test_which_games_are_vectorized(game, build, expected):
    assert is_vectorized(game, build) is expected


def test_padding_is_zero():
    env = VecEnv(Padded(), 200, "cpu", arrays=ARRAYS["spinner"])
    obs, _ = env.reset(seed=1)
    for _ in range(5):
        assert obs.shape[-1] == 7 and obs[..., 5:].eq(0).all()
        obs = env.step(env.sample_actions())[0]
