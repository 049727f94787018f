"""The CUDA branch of the sources, run on the CPU thread by thread: groups, barriers and shared memory change no bit."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from games.crew import Crew
from games.economy import Economy
from games.fragile import Fragile
from games.painter import Painter
from games.race import Race
from games.sacrifice import Sacrifice
from games.scouts import Scouts
from gymnasium.spaces import Discrete
from support.emulated_cuda import EmulatedCudaBackend
from support.hostile import MISTAKE_LINE, walkers

import gpu_vecenv
from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.compile import function_manager
from gpu_vecenv.declare.env import Env, Field, f32
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.vec_env import MODES
from gpu_vecenv.envs.tag_gridworld import TagGridworld
from gpu_vecenv.errors import EnvContractError

ROOT = Path(__file__).resolve().parents[2]
FEW = {"num_taggers": 2, "num_runners": 3, "num_neighbors": 3, "side": 2.0}
PARTIAL = {"num_taggers": 40, "full_observation": False, "random_start": True}
ANYWHERE = {"fixed_four_skill_and_loc": False, "starting_agent_coin": 9.0, "resource_regen_prob": 0.3}
# Game, configuration, environments (1, fewer than a block has, more), threads per environment (None: the GPU's
# default).
CASES = [
    *((name, {}, 5, None) for name in gpu_vecenv.envs.registry.GAMES if name != "tag_continuous"),
    ("tag_gridworld", {}, 37, None),
    ("tag_gridworld", {}, 3, 64),
    ("tag_gridworld", {}, 140, 1),
    ("tag_gridworld", PARTIAL, 4, None),
    ("tag_gridworld", PARTIAL, 5, 32),
    ("tag_continuous", FEW, 17, None),
    ("tag_continuous", {**FEW, "num_neighbors": "all"}, 1, 2),
    ("tag_continuous", {"num_taggers": 5, "num_runners": 85}, 2, None),
    ("tag_continuous", {"num_taggers": 5, "num_runners": 65}, 3, 32),
    ("cartpole", {}, 129, 4),
    ("warehouse", {"num_agents": 14, "request_queue_size": 5, "grid": "xx.x.x\n..gx.x\nx...g."}, 3, 8),
    ("tag_continuous", {"num_taggers": 10, "num_runners": 1500, "num_neighbors": 45}, 1, None),  # too many for staging
    (Crew, {}, 11, None),
    (Crew, {}, 4, 16),
    (Crew, {"num_helpers": 5}, 9, None),  # agents end before others, agents_as_envs
    (Crew, {"num_helpers": 60}, 3, None),
    (Scouts, {}, 9, None),
    (Painter, {}, 3, None),
    (Economy, {}, 9, None),
    (Race, {}, 37, None),  # turns
    (Sacrifice, {"num_units": 3, "max_steps": 6}, 11, None),  # agents die before their episode ends
    (Sacrifice, {"num_units": 40, "limit": True}, 3, None),
    (Economy, {"num_workers": 40, "num_rates": 1, "num_clerks": 3}, 4, 64),
    ("tag_continuous", {"num_taggers": 6, "num_runners": 214}, 2, 64),  # enough to be sorted into cells
    ("tag_continuous", {**FEW, "egocentric": False}, 17, None),
    ("tag_continuous", {**FEW, "num_neighbors": "all", "egocentric": False}, 2, 2),
    ("tag_continuous", {"num_taggers": 5, "num_runners": 65, "egocentric": False}, 3, 32),
    ("tag_continuous", {"num_taggers": 6, "num_runners": 214, "egocentric": False}, 3, 64),
    ("economy", {"num_workers": 11, "period": 3, "grid": "S.W...\n.@..SS\n......\nWW..@.\n......", **ANYWHERE}, 3, 8),
    ("economy", {"tax_model": "saez", "saez_buffer_size": 8, "period": 2, "grid": "S.W\n...", **ANYWHERE}, 4, 4),
    ("pursuit", {"x_size": 5, "y_size": 6, "num_pursuers": 12}, 13, 4),  # so crowded that evaders are caught
    ("overcooked", {}, 7, None),  # more threads than agents: as many as large observations need
    ("skirmish", {"scenario": "3s_vs_5z"}, 4, None),
    ("connect_four", {}, 9, None),
]


@pytest.fixture
def make_emulated(monkeypatch):
    """Compiles and launches as on a GPU; with an odd number of environments threads run from the last to the first."""

    def make(game, num_envs, **settings) -> VecEnv:
        monkeypatch.setenv("EMULATED_THREADS", ("forwards", "backwards")[num_envs % 2])
        with monkeypatch.context() as patch:
            patch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
            return VecEnv(game, num_envs, "cpu", **settings)

    return make


# Ids without the place in the list, as another game moves all behind it.
IDS = [f"{getattr(name, '__name__', name)}-{num_envs}-{threads}" for name, _, num_envs, threads in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "num_envs", "threads_per_env"), CASES, ids=IDS)
def test_thread_groups_are_bitwise_equal_to_one_thread(name, config, num_envs, threads_per_env, make_emulated):
    game = gpu_vecenv.configure(name, **{"max_steps": 6, **config})
    mode = list(MODES)[num_envs % 3]
    settings = {"autoreset_mode": mode, "agents_as_envs": num_envs % 2 == 1 and mode != "disabled"}
    one, many = (
        VecEnv(game, num_envs, "cpu", **settings),
        make_emulated(game, num_envs, threads_per_env=threads_per_env, **settings),
    )
    assert trajectory_digest(many, 3, 15).hex() == trajectory_digest(one, 3, 15).hex()


@pytest.mark.parametrize("builds", [{"end_on_nonfinite": True}, {"guards": True}, {"thread_order": 2}], ids=str)
def test_debug_builds_are_bitwise_equal_too(builds, make_emulated):
    for name in ("cartpole", "tag_gridworld"):
        game = gpu_vecenv.configure(name, max_steps=6)
        one, many = VecEnv(game, 21, "cpu"), make_emulated(game, 21, **builds)
        assert trajectory_digest(many, 3, 15).hex() == trajectory_digest(one, 3, 15).hex()


def test_an_index_out_of_bounds_is_recorded_once_per_environment(make_emulated, tmp_path):
    statement = "if (thread_rank() == 2) io.rewards[7] = s.place[1000][0];"
    env = make_emulated(walkers(tmp_path, new=statement)(num_walkers=5), 9, guards=True, threads_per_env=4)
    env.reset(seed=3)
    expected = rf"walkers\.cu:{MISTAKE_LINE}: s\.place\[1000\] is out of bounds in environment 0"
    with pytest.raises(EnvContractError, match=expected):
        env.step(env.sample_actions())


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "device memory"])
@pytest.mark.parametrize("threads_per_env", [1, 4, 64])
def test_a_write_outside_of_scratch_is_reported(threads_per_env, shared, make_emulated, tmp_path):
    """Another thread than the one that reads the guard bytes writes it, as the last of what the call does."""
    end = "        io.obs[i][2] = (float)s.goal[0];\n    }\n"
    statement = "    if (s.goal[0] == 77 && thread_rank() == (THREADS_PER_ENV > 1)) io.scratch->heading[3] = 1;\n"
    game = walkers(tmp_path, old=end, new=end + statement)
    if not shared:
        text = game.source.read_text()
        game.source.write_text(text.replace("int spare;", "int spare, large[100000];"))
    env = make_emulated(game(), 10, guards=True, threads_per_env=threads_per_env)
    assert (env._kernels._layout(env.program)[0] == 0) == shared
    env.reset(seed=3)
    env.state["goal"][5] = 77
    expected = "observe wrote outside of Scratch in environment 5: the nearest byte is 1 after its last"
    with pytest.raises(EnvContractError, match=expected):
        env.observe()


def test_a_nonfinite_environment_ends_without_the_others(make_emulated):
    one, many = (
        make(Fragile(), 9, end_on_nonfinite=True) for make in (lambda *a, **k: VecEnv(*a, "cpu", **k), make_emulated)
    )
    for env in (one, many):
        env.reset(seed=3)
    actions = torch.zeros((9, 2), dtype=torch.int32)
    actions[4, 1] = 1
    for _ in range(3):
        outputs = [env.step(actions) for env in (one, many)]
        for a, b in zip(*(o[:4] for o in outputs), strict=True):
            assert a.equal(b)
    assert one.faults().equal(many.faults()) and one.faults().any()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), [("tag_gridworld", {}), ("tag_continuous", FEW), ("pendulum", {})])
def test_samples_are_bitwise_equal(name, config, make_emulated):
    check_samples(gpu_vecenv.configure(name, **config), "clip", make_emulated)


@pytest.mark.parametrize("game", ["pendulum", Economy])
def test_samples_of_beta_distributions_are_bitwise_equal(game, make_emulated):
    check_samples(gpu_vecenv.configure(game), "beta", make_emulated)


def check_samples(game, squash, make_emulated):
    samples = []
    for env in (VecEnv(game, 67, "cpu"), make_emulated(game, 67)):
        env.reset(seed=3)
        sampler = Sampler(env, squash)
        shape = (67, game.num_agents, sampler.num_parameters)
        parameters = torch.tensor(np.random.default_rng(1).normal(size=shape), dtype=torch.float32)
        samples.append(sampler.sample(parameters))
    for field in ("actions", "log_probs", "entropies"):
        assert getattr(samples[0], field).equal(getattr(samples[1], field)), field
    assert len(samples[0].actions.unique()) > 1 and samples[0].log_probs.isfinite().all()


# Heads of 5, 21 and 8 choices, staged in shared memory or not; groups of several warps; a Box; roles of different
# sizes.
@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 37])
@pytest.mark.parametrize(
    ("name", "config", "threads_per_env"),
    [
        ("cartpole", {}, None),
        ("tag_gridworld", {}, None),
        ("tag_gridworld", PARTIAL, 32),
        ("tag_continuous", FEW, None),
        ("tag_continuous", {"num_taggers": 5, "num_runners": 65}, None),
        ("simple_tag", {"continuous_actions": True}, None),
        ("pendulum", {}, 4),
        (Crew, {}, None),
        (Painter, {}, None),
        (Economy, {}, None),
        (Economy, {"num_workers": 12, "num_rates": 4}, 32),
    ],
)
def test_a_sampled_step_equals_a_sample_and_a_step(name, config, threads_per_env, num_envs, random_seed, make_emulated):
    squash = "clip" if gpu_vecenv.configure(name, **config).layout.action.discrete else "tanh"
    check_sampled_steps(name, config, threads_per_env, num_envs, random_seed, make_emulated, squash)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["pendulum", Economy])
def test_a_sampled_step_of_beta_distributions_equals_a_sample_and_a_step(game, random_seed, make_emulated):
    check_sampled_steps(game, {}, None, 37, random_seed, make_emulated, "beta")


def check_sampled_steps(name, config, threads_per_env, num_envs, random_seed, make_emulated, squash):
    game = gpu_vecenv.configure(name, **{"max_steps": 4, **config})
    random, found = np.random.default_rng(random_seed), []
    parameters = random.normal(size=(9, num_envs, game.num_agents, 64)).astype(np.float32)
    mode = list(MODES)[len(str(name)) % 3] if num_envs > 1 else "same_step"
    for env in (
        VecEnv(game, num_envs, "cpu", autoreset_mode=mode),
        make_emulated(
            game,
            num_envs,
            autoreset_mode=mode,
            threads_per_env=threads_per_env,
            fuse_sampling=True if config is FEW else None,  # by itself not: 42 logits for each of five agents
        ),
    ):
        sampler = Sampler(env, squash)
        env.reset(seed=random_seed)
        steps = []
        for t in range(9):
            given = torch.tensor(parameters[t, ..., : sampler.num_parameters])
            sample, (*outputs, info) = sampler.step(given, greedy=t == 3)
            drawn = [getattr(sample, field) for field in ("actions", "log_probs", "entropies", "draws")]
            steps.append([x.clone() for x in (*drawn, *outputs, info["active"]) if x is not None])
        found.append((steps, env.state_dict()))
    assert env._kernels.fuses_sampling(sampler.squash)
    for one, many in zip(found[0][0], found[1][0], strict=True):
        assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(one, many, strict=True))
    assert all(value.equal(found[1][1][key]) for key, value in found[0][1].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "agents", [31, 50]
)  # several environments per block, and one, whose observations share memory with its logits
def test_obs_staging_bytes_changes_no_result(agents, make_emulated):
    logits, found = torch.rand((5, agents, 5)), []
    for obs_staging_bytes in (0, 200 << 10):
        game = type("TagGridworld", (TagGridworld,), {"__module__": __name__, "obs_staging_bytes": obs_staging_bytes})
        game = game(num_taggers=agents - 1, max_steps=5)
        one, many = VecEnv(game, 5, "cpu"), make_emulated(game, 5)
        assert trajectory_digest(many, 3, 12).hex() == trajectory_digest(one, 3, 12).hex()
        (_, outputs), (_, expected) = (Sampler(env).step(logits) for env in (many, one))
        assert all(a.equal(b) for a, b in zip(outputs[:4], expected[:4], strict=True))
        found.append(many._kernels._layout(many.program)[1])
    assert found[1] > found[0] + 4 * agents * (4 * agents + 1)  # of shared memory


CLASHING = """#include "game_api.cuh"
struct Scratch {};
struct Drawn { float weight; };
HD float weight_of(float x) { return x + SAMPLES; }
HD float box_action(float x, int) { return x; }
HD void sample_row() {}
HD void draw_actions() {}
HD void reset(State s, Io) { FOR_AGENTS (i) s.place[i] = 0; }
HD void step(State s, Io io) {
    FOR_AGENTS (i) {
        s.place[i] += weight_of((float)io.action(i));
        io.truncations[i] = io.elapsed_steps >= 3;
    }
}
HD void observe(State s, Io io) { FOR_AGENTS (i) io.obs[i][0] = s.place[i]; }
"""


@dataclass(frozen=True, kw_only=True)
class Clashing(Env):
    """A game that defines names of the sampler."""

    samples: int = 2
    state = (Field("place", f32, ("num_agents",)),)
    obs_dim = 1
    action_space = Discrete(5)


def test_a_game_may_use_the_names_of_the_sampler(make_emulated, tmp_path, monkeypatch):
    (tmp_path / "clashing.cu").write_text(CLASHING)
    monkeypatch.setattr(Clashing, "source", tmp_path / "clashing.cu")
    found = []
    for env in (VecEnv(Clashing(), 7, "cpu"), make_emulated(Clashing(), 7)):
        env.reset(seed=2)
        found.append(Sampler(env).step(torch.zeros(7, 1, 5))[1][0])
    assert found[0].equal(found[1]) and found[0].ge(2).all()


@pytest.mark.parametrize("on_the_instance", [False, True])
def test_an_overridden_step_is_called(monkeypatch, on_the_instance):
    steps = []

    class Counting(VecEnv):
        def step(self, actions, out=None):
            steps.append(actions)
            return VecEnv.step(self, actions, out)

    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())
    for overridden in (False, True):
        kind = Counting if overridden and not on_the_instance else VecEnv
        env = kind(gpu_vecenv.configure("cartpole"), 5, "cpu")
        if overridden and on_the_instance:
            env.step = Counting.step.__get__(env)
        env.reset(seed=1)
        sample, _ = Sampler(env).step(torch.zeros(5, 1, 2))
    assert len(steps) == 1 and steps[0] is sample.actions


DIVERGENT = """
import sys
sys.path.insert(0, "tests")
from support.emulated_cuda import EmulatedCudaBackend
from support.hostile import MISTAKE_LINE, walkers
from gpu_vecenv import FunctionManager
from gpu_vecenv.compile import function_manager
from gpu_vecenv.declare.kernels import Array, KernelSignature
import torch
function_manager.select = lambda device, driver=None: EmulatedCudaBackend()
text = "KERNEL(some) { if (threadIdx.x < 200) __syncthreads(); args.x[0] = 1; }"
program = FunctionManager("cpu").compile(text, kernels=[KernelSignature("some", (Array("x", "f4"),))])
program.launch("some", 256, x=torch.zeros(1))
"""


@pytest.mark.slow
def test_a_divergent_barrier_is_reported():
    done = subprocess.run([sys.executable, "-c", DIVERGENT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (
        done.returncode != 0 and "block 0: 200 threads wait for others that have ended or wait elsewhere" in done.stderr
    )
