"""Isolation of faults: NaN, writes out of bounds, concurrent calls, other processes."""

import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch
from games.fragile import FAULTS, Fragile
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from support.cases import mostly_exhaustive
from support.hostile import MISTAKE_LINE, walkers

import gpu_vecenv
from gpu_vecenv import Fault, PPOConfig, Sampler, Trainer, VecEnv
from gpu_vecenv.compile.backends.select import working_drivers
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.guards import GUARD_BYTE, check, output_guard_bands, state_guard_bands
from gpu_vecenv.errors import (
    ClosedEnvError,
    ConcurrentUseError,
    ConfigError,
    EnvContractError,
    InvalidActionError,
    NonFiniteError,
)

MODES = ("same_step", "next_step", "disabled")
NONFINITE = [fault for fault in FAULTS if fault.startswith(("NaN", "infinity"))]
OUTSIDE = {
    "beyond the state": "state_place",
    "before the state": "state_place",
    "beyond the observations": "obs",
    "beyond the rewards": "rewards",
    "beyond the flags": "truncations",
}
GAMES = [
    name
    for name in gpu_vecenv.envs.registry.GAMES
    if any(f.dtype.kind == "f" for f in gpu_vecenv.configure(name).state)
]


def actions(env, environment=None, fault="none"):
    """Actions without a fault, except in one environment."""
    chosen = torch.zeros(env.num_envs, 2, dtype=torch.int64)
    if environment is not None:
        chosen[environment, 1] = FAULTS.index(fault)
    return chosen.to(env.device)


def rows(env, environment):
    """Mask of the other environments."""
    return torch.arange(env.num_envs, device=env.device) != environment


# ---------------------------------------------------------------------- end_on_nonfinite


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", NONFINITE)
def test_a_non_finite_number_ends_its_own_environment_only(fault, mode, device):
    env, twin = (VecEnv(Fragile(), 9, device, autoreset_mode=mode, end_on_nonfinite=True) for _ in range(2))
    for each in (env, twin):
        each.reset(seed=3)
    for step in range(5):
        obs, rewards, terminations, truncations, info = env.step(actions(env, 4 if step == 2 else None, fault))
        expected = twin.step(actions(env))
        for got, other in zip((obs, rewards, terminations, truncations, info["active"]), expected, strict=False):
            if isinstance(other, torch.Tensor):
                assert got[rows(env, 4)].equal(other[rows(env, 4)])
        assert obs.isfinite().all() and rewards.isfinite().all()
        if step == 2:
            assert terminations[4].all() and not truncations[4].any() and rewards[4].eq(0).all()
            last = info["final_obs"] if mode == "same_step" else obs
            assert last[4].eq(0).all()
            assert info["active"][4].all() == (mode == "same_step")
        elif step < 2:
            assert not terminations.any()
    after_end = Fault.STEPPED_AFTER_END if mode == "disabled" else Fault(0)
    assert env.faults().tolist() == [Fault.NONFINITE | after_end if environment == 4 else 0 for environment in range(9)]
    with pytest.raises(InvalidActionError if after_end else NonFiniteError, match=r"1 of 9 .* first, 4: .*NONFINITE$"):
        env.raise_for_faults()
    twin.raise_for_faults()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("fault", NONFINITE)
def test_after_a_non_finite_end_the_next_episode_is_as_after_a_manual_reset(fault, mode, device):
    """Its next episode equals the one after a call of reset."""
    env, twin = (VecEnv(Fragile(), 3, device, autoreset_mode=mode, end_on_nonfinite=True) for _ in range(2))
    for each in (env, twin):
        each.reset(seed=3)
        each.step(actions(env))
    env.step(actions(env, 1, fault))
    if mode == "next_step":
        env.step(actions(env))
    twin.reset(mask=torch.tensor([False, True, False], device=device))
    for name, tensor in env.state.items():
        assert tensor[1].equal(twin.state[name][1]), name
    assert env.observe()[1].equal(twin.observe()[1])
    assert env.elapsed_steps[1] == 0 and env.active[1].all()


def test_views_pass_end_on_nonfinite(device):
    env = gpu_vecenv.GymnasiumVectorEnv(Fragile(), 3, device, end_on_nonfinite=True)
    env.reset(seed=3)
    obs, _, terminations, *_ = env.step(actions(env.vec_env, 1, "NaN in the state").view(-1))
    assert obs.isfinite().all() and terminations.tolist() == [False, False, True, True, False, False]


def test_without_end_on_nonfinite_the_episode_continues(device):
    env = VecEnv(Fragile(), 3, device)
    env.reset(seed=3)
    obs, *_ = env.step(actions(env, 1, "NaN in the state"))
    assert obs[1].isnan().any() and obs[[0, 2]].isfinite().all() and env.faults().eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", GAMES)
def test_end_on_nonfinite_does_not_change_finite_results(name, device):
    game = gpu_vecenv.configure(name)
    plain, watched = (
        trajectory_digest(VecEnv(game, 7, device, end_on_nonfinite=q), 3, 40).hex() for q in (False, True)
    )
    assert plain == watched


@pytest.mark.parametrize("name", GAMES)
def test_every_float_field_of_every_game_is_checked(name, device):
    game = gpu_vecenv.configure(name)
    fields = [field for field in game.layout.fields if field.dtype.kind == "f" and not field.shared]
    for field in fields:
        env = VecEnv(game, 4, device, end_on_nonfinite=True)
        env.reset(seed=1)
        env.step(env.sample_actions())
        spoilt = env.state[field.name][2].view(-1)
        spoilt[-1] = float("nan")
        obs, rewards, *_ = env.step(env.sample_actions())
        assert obs.isfinite().all() and rewards.isfinite().all()
        if env.faults()[2] == 0:  # the step overwrote the field
            assert spoilt.isfinite().all()
        assert env.faults()[[0, 1, 3]].eq(0).all()


def test_training_continues_without_the_lost_environment(device):
    harmless = FAULTS.index("beyond the state")  # an untrained policy would also choose the others
    env = VecEnv(Fragile(num_actions=harmless), 8, device, autoreset_mode="next_step", end_on_nonfinite=True)
    config = PPOConfig(total_steps=10_000, num_steps=4, num_minibatches=1, hidden_sizes=(8,))
    trainer = Trainer(env, config)
    lost = 0.0
    for _ in range(4):
        lost = max(lost, trainer.train_iteration()["nonfinite_envs"])
    assert lost >= 1
    assert all(p.isfinite().all() for p in trainer.policies["agent"].parameters())


# ---------------------------------------------------------------------- guard bands


@pytest.mark.parametrize("fault", OUTSIDE)
@pytest.mark.parametrize("environment", [0, 2])
def test_a_write_outside_of_an_environment_is_reported(fault, environment, device):
    env = VecEnv(Fragile(), 5, device, guards=True)
    env.reset(seed=3)
    env.step(actions(env))
    expected = rf"step wrote \d+ bytes outside of ({OUTSIDE[fault]})\w*: .* (after|before) those of environment"
    if fault.startswith("beyond") and fault != "beyond the state":
        expected = rf"step: fragile\.cu:\d+: io\.{OUTSIDE[fault]}.* is out of bounds in environment {environment}"
    with pytest.raises(EnvContractError, match=expected):
        env.step(actions(env, environment, fault))


# Statement -> the access that is out of bounds.
BEYOND = {
    "FOR_AGENTS (i) s.place[i + 1][0] = 1;": r"s\.place\[3\] is out of bounds in environment 0: index 3 of axis 0; "
    "expected 0 to 2",
    "ONCE s.place[1][1000 + io.elapsed_steps] = 1;": r"s\.place\[1\]\[1001\] is out of bounds in environment 0, agent "
    "walker_1: index 1001 of axis 1; expected 0 to 1",
    "ONCE s.goal[-1000] = 1;": r"s\.goal\[-1000\] .* expected 0 to 0",
    "ONCE io.rewards[5] += s.goal[0];": r"io\.rewards\[5\] ",
    "ONCE io.rewards[2] = (float)io.action(7);": r"io\.action\(7\) ",
    "ONCE s.goal[0] = io.action(2, 1);": r"io\.action\(2, 1\) .* agent walker_2: index 1 of axis 1; expected 0 to 0",
    "ONCE io.truncations[1] = io.active[3];": r"io\.active\[3\] ",
}


@pytest.mark.parametrize("statement", BEYOND)
def test_an_index_out_of_bounds_is_named_and_not_accessed(statement, device, tmp_path):
    game = walkers(tmp_path, new=statement)()
    env = VecEnv(game, 3, device, guards=True)
    env.reset(seed=3)
    chosen = env.sample_actions()
    with pytest.raises(EnvContractError, match=rf"step: walkers\.cu:{MISTAKE_LINE}: {BEYOND[statement]}.*not executed"):
        env.step(chosen)
    check(state_guard_bands(env.data), "nothing")
    env.reset(seed=3)  # records are empty again


WITHIN_A_ROLE = {
    "s.goal[0] = io.action(1, 1);": r"io\.action\(1, 1\) .* agent walker_1: index 1 of axis 1; expected 0 to 0",
    "s.goal[0] = io.choice(3, 1);": r"io\.action\(3, 1\) .* agent painter_0: index 1 of axis 1; expected 0 to 0",
    "s.goal[0] = (int)io.action(4, 2);": r"io\.action\(4, 2\) .* agent driver_0: index 2 of axis 1; expected 0 to 1",
}


@pytest.mark.parametrize("statement", WITHIN_A_ROLE)
def test_a_head_that_only_other_roles_have_is_out_of_bounds(statement, device, tmp_path):
    spaces = {"walker": Discrete(3), "painter": Box(0.0, 1.0, (1,)), "driver": MultiDiscrete([3, 2])}
    roles = property(lambda self: {"walker": 3, "painter": 1, "driver": 1})
    sound = "s.goal[0] = (int)io.action(0, 0) + (int)io.action(3, 0) + io.choice(4, 1);"
    for text in (sound, statement):
        game = walkers(tmp_path, new=f"ONCE {{ {text} }}", roles=roles, action_space=spaces)()
        env = VecEnv(game, 3, device, guards=True)
        env.reset(seed=3)
        if text == sound:
            env.step(env.sample_actions())
            continue
        with pytest.raises(EnvContractError, match=rf"step: walkers\.cu:{MISTAKE_LINE}: {WITHIN_A_ROLE[text]}"):
            env.step(env.sample_actions())


IN_RESET = "ONCE { s.goal[0] = (int)io.rng.below(9, 0, 3); }"
IN_OBSERVE = "        io.obs[i][2] = (float)s.goal[0];\n"
# Statement that it replaces -> writes outside of Scratch in the environment whose goal is 77, and where.
OUTSIDE_SCRATCH = [
    ("//", "io.scratch->heading[2 + s.goal[0] - 76] = 1;", "step", "1 after its last"),
    ("//", "io.scratch->heading[2 + (s.goal[0] - 76) * 16] = 1;", "step", "61 after its last"),
    ("//", "int* own = &io.scratch->spare; own[76 - s.goal[0]] = 1;", "step", "1 before its first"),
    (IN_RESET, "s.goal[0] = 0; io.scratch->heading[3] = 1;", "reset", "1 after its last"),
    (IN_OBSERVE, "io.obs[i][2] = 0; if (s.goal[0] == 77) io.scratch->heading[3] = 1;", "observe", "1 after its last"),
]


@pytest.mark.parametrize(("old", "new", "call", "place"), OUTSIDE_SCRATCH)
def test_a_write_outside_of_scratch_is_reported(old, new, call, place, device, tmp_path):
    new = f"ONCE if (s.goal[0] == 77) {{ {new} }}" if call == "step" else f"{{ {new} }}"
    env = VecEnv(walkers(tmp_path, old=old, new=new)(), 4, device, guards=True)
    expected = rf"{call} wrote outside of Scratch in environment {0 if call == 'reset' else 2}: the nearest byte is "
    expected += rf"{place}; expected indices within its arrays\. For file and line, declare them as CheckedArray"
    if call == "reset":
        with pytest.raises(EnvContractError, match=expected):
            env.reset(seed=3)
        return
    env.reset(seed=3)
    actions = env.sample_actions()
    env.step(actions)
    env.state["goal"][2] = 77
    with pytest.raises(EnvContractError, match=expected):
        env.step(actions) if call == "step" else env.observe()
    env.state["goal"][2] = 0
    env.step(actions)  # guard bytes and records are as before


WRITTEN = "ONCE {{ io.scratch->heading[0] = 7; io.scratch->nearest[{}] = 1; s.goal[0] = (int)io.scratch->heading[0]; }}"


@pytest.mark.parametrize("index", [3, -1, -1000000, 1000000])
def test_an_index_of_a_checked_array_is_named_and_not_accessed(index, device, tmp_path):
    env = VecEnv(walkers(tmp_path, new=WRITTEN.format(index))(), 3, device, guards=True)
    env.reset(seed=3)
    expected = rf"step: walkers\.cu:{MISTAKE_LINE}: \[{index}\] of a CheckedArray is out of bounds in environment 0: "
    with pytest.raises(EnvContractError, match=rf"{expected}index {index} of axis 0; expected 0 to 2\. The access was"):
        env.step(env.sample_actions())
    assert env.state["goal"].eq(7).all()


def test_a_checked_array_is_an_array(device, tmp_path):
    """Loops, pointers, rows and const references of debug builds give what those of a plain array give."""
    statement = """CheckedArray<CheckedArray<float, 2>, 3> rows;
    for (int i = 0; i < 3; ++i) for (int k = 0; k < 2; ++k) rows[i][k] = (float)(1 + 2 * i + k);
    const CheckedArray<CheckedArray<float, 2>, 3>& same = rows; int* first = io.scratch->nearest;
    ONCE { for (int& k : io.scratch->nearest) k = 2; *(io.scratch->nearest + 1) += *first; rows[2][1] += same[1][0];
    s.place[0][1] = (float)(first[1] + io.scratch->nearest[2]) + rows[2][1]; }"""
    plain, checked = (VecEnv(walkers(tmp_path, new=statement)(), 4, device, guards=guards) for guards in (False, True))
    assert trajectory_digest(plain, 3, 20).hex() == trajectory_digest(checked, 3, 20).hex()
    for env in (plain, checked):
        env.reset(seed=3)
        env.step(env.sample_actions())
        assert env.state["place"][:, 0, 1].eq(4 + 2 + 6 + 3).all()


def test_pointers_to_arrays_are_those_of_a_build_without_checks(device, tmp_path):
    statement = """float* own = s.place[0]; const float (*all)[2] = s.place; float* items = (float*)s.place;
    ONCE { *s.goal = 2; *(s.goal + 0) += 1; own[0] = all[1][1] + items[4]; for (float& x : s.place[2]) x += own[0]; }"""
    game = walkers(tmp_path, new=statement)()
    plain, checked = (VecEnv(game, 4, device, guards=guards) for guards in (False, True))
    assert trajectory_digest(plain, 3, 20).hex() == trajectory_digest(checked, 3, 20).hex()


def test_guard_bands_follow_every_environment_of_every_tensor(device):
    env = VecEnv(gpu_vecenv.configure("simple_tag"), 3, device, guards=True)
    env.reset(seed=1)
    buffers = env.step_buffers()
    env.step(env.sample_actions(), out=buffers)
    bands = {**dict(state_guard_bands(env.data)), **dict(output_guard_bands(buffers))}
    assert bands.keys() == {*env.state_dict(), *buffers.tensors()}, "but for what all environments share"
    for name, band in bands.items():
        tensor = env.data[name] if name in env.data else buffers.tensors()[name]
        assert band.view(torch.uint8).eq(GUARD_BYTE).all() and band.numel() > 0
        assert band[0].data_ptr() + band[0].numel() * band.element_size() == tensor.data_ptr(), "before the first"
        for environment in range(3):
            end = tensor[environment].data_ptr() + tensor[environment].numel() * tensor.element_size()
            assert band[environment + 1].data_ptr() == end, name


# Guard bands lie around each environment's part, whatever the mode; what a game writes differs by game.
BUNDLED = list(itertools.product(gpu_vecenv.envs.registry.GAMES, MODES))
ONE_MODE_EACH = [(name, MODES[i % len(MODES)]) for i, name in enumerate(gpu_vecenv.envs.registry.GAMES)]


@pytest.mark.parametrize(("name", "mode"), mostly_exhaustive(BUNDLED, ONE_MODE_EACH))
def test_bundled_games_keep_guard_bands_intact_and_results_unchanged(name, mode, device):
    game = gpu_vecenv.configure(name)
    plain, guarded = (VecEnv(game, 5, device, autoreset_mode=mode, guards=guards) for guards in (False, True))
    assert trajectory_digest(plain, 3, 40).hex() == trajectory_digest(guarded, 3, 40).hex()
    guarded.reset(mask=torch.tensor([True, False, True, False, False], device=device))
    guarded.load_state_dict(plain.state_dict())
    assert guarded.observe().equal(plain.observe())


def test_guards_refuse_outputs_without_guard_bands(device):
    with pytest.raises(ConfigError, match="agents_as_envs=False"):
        VecEnv(Fragile(), 3, device, guards=True, agents_as_envs=True)
    env = VecEnv(Fragile(), 3, device, guards=True)
    with pytest.raises(ConfigError, match="without guards"):
        gpu_vecenv.Sampler(env)
    with pytest.raises(ConfigError, match="rewards have no guard bytes"):
        env.step_buffers(rewards=torch.zeros(3, 2, device=device))


@pytest.mark.parametrize("name", ["guards", "end_on_nonfinite"])
def test_switches_must_be_bools(name):
    with pytest.raises(TypeError, match=f"{name} is 1 .* expected True or False"):
        VecEnv(Fragile(), 3, "cpu", **{name: 1})


# ---------------------------------------------------------------------- threads and processes


def test_concurrent_calls_of_one_environment_are_refused():
    """While one thread is in a call, calls of another are refused and change nothing."""
    env, twin = (VecEnv(Fragile(), 3, "cpu") for _ in range(2))
    for each in (env, twin):
        each.reset(seed=3)
    inside, go_on = threading.Event(), threading.Event()
    launch, sampler, state = env._kernels._step, Sampler(env), env.state_dict()
    logits = torch.zeros((3, env.num_agents, sampler.num_parameters))

    class Held:
        fields = launch.fields

        def run(self):
            inside.set()
            assert go_on.wait(60)
            launch.run()

    env._kernels._step = Held()
    first = threading.Thread(target=lambda: env.step(actions(env)))
    first.start()
    assert inside.wait(60)
    calls = (
        lambda: env.step(actions(env)),
        env.reset,
        env.observe,
        env.sample_actions,
        env.state_dict,
        lambda: env.load_state_dict(state),
        env.clear_episode_statistics,
        lambda: sampler.sample(logits),
        env.close,
    )
    for call in calls:
        with pytest.raises(ConcurrentUseError, match="another thread"):
            call()
    go_on.set()
    first.join()
    env._kernels._step = launch
    twin.step(actions(twin))
    assert env.step(actions(env))[0].equal(twin.step(actions(twin))[0])
    env.close()


@pytest.mark.parametrize("call", ["step", "reset", "observe", "sample_actions", "state_dict", "faults"])
def test_close_just_after_another_thread_found_the_environment_open(call, monkeypatch):
    env = VecEnv(Fragile(), 3, "cpu")
    env.reset(seed=3)
    check, given = env._check_open, actions(env)

    def check_and_close(method):
        check(method)
        monkeypatch.undo()
        env.close()

    monkeypatch.setattr(env, "_check_open", check_and_close)
    with pytest.raises(ClosedEnvError):
        getattr(env, call)(*[given] * (call == "step"))


FORKED_BESIDE_A_STEP = """
import os, threading
import gpu_vecenv
from gpu_vecenv.errors import ForkedProcessError
env, idle = (gpu_vecenv.make("cartpole", 4, "cpu") for _ in range(2))
for each in (env, idle):
    each.reset(seed=1)
actions, launch = env.sample_actions(), env._kernels._step
inside, go_on = threading.Event(), threading.Event()

class Held:
    fields = launch.fields

    def run(self):
        inside.set()
        assert go_on.wait(60)
        launch.run()

env._kernels._step = Held()
thread = threading.Thread(target=lambda: env.step(actions))
thread.start()
assert inside.wait(60)
if os.fork() == 0:
    for call in (env.reset, lambda: env.step(actions), env.observe, env.state_dict):
        try:
            call()
        except ForkedProcessError as error:
            assert "during the fork" in str(error) and "make a new environment" in str(error)
        else:
            os._exit(1)
    env.close()
    idle.step(actions)  # no thread was in a call of this one
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
go_on.set()
thread.join()
env.step(actions)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_beside_a_step_is_named_in_the_forked_process():
    stdout, stderr = child(FORKED_BESIDE_A_STEP)
    assert stdout == "done\n", stderr


def test_environments_in_separate_threads_are_bit_identical_to_serial_ones(device):
    game = gpu_vecenv.configure("tag_gridworld")
    expected, found = trajectory_digest(VecEnv(game, 64, device), 5, 50).hex(), {}

    def run(k):
        found[k] = trajectory_digest(VecEnv(game, 64, device), 5, 50).hex()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


@pytest.mark.gpu
def test_modules_freed_by_another_thread_are_unloaded(recwarn):
    """PyCUDA unloads a module only while its context is current; otherwise it warns and keeps the module."""
    pytest.importorskip("pycuda")
    held = [VecEnv(gpu_vecenv.configure("tag_gridworld"), 4, "cuda", driver="pycuda")]
    held[0].reset(seed=1)
    thread = threading.Thread(target=lambda: (held.clear(), gc.collect()))
    thread.start()
    thread.join()
    VecEnv(gpu_vecenv.configure("cartpole"), 4, "cuda", driver="pycuda").close()  # loads the next module
    assert not [str(warning.message) for warning in recwarn if "cleaned up" in str(warning.message)]


def _stepped(env):
    return trajectory_digest(env, 5, 20).hex()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_are_bit_identical(method):
    """On the CPU, a forked process uses its parent's environment; a spawned one creates it from its arguments."""
    env = VecEnv(gpu_vecenv.configure("tag_gridworld"), 32, "cpu")
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(_stepped, (env,)) == _stepped(env)


FORKED = """
import os, sys, torch
import gpu_vecenv
from gpu_vecenv.errors import ForkedProcessError
env = gpu_vecenv.make("cartpole", 4, "cuda")
env.reset(seed=1)
if os.fork() == 0:
    for call in (env.reset, lambda: env.step(None), env.observe, env.faults, env.state_dict, lambda: env.state):
        try:
            call()
        except ForkedProcessError as error:
            assert "spawn" in str(error)
        else:
            os._exit(1)
    env.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
env.step(env.sample_actions())
print("done")
"""

WITHOUT_MEMORY = """
import torch
import gpu_vecenv
from gpu_vecenv.errors import DeviceUnavailableError
torch.cuda.set_per_process_memory_fraction(0.0)
try:
    gpu_vecenv.make("cartpole", 4, "cuda")
except DeviceUnavailableError as error:
    assert "out of memory" in str(error) and "nvidia-smi" in str(error) and "pip install" not in str(error), error
else:
    raise AssertionError
torch.cuda.set_per_process_memory_fraction(1.0)
gpu_vecenv.make("cartpole", 4, "cuda").close()
print("done")
"""

BROKEN = """
import torch
import gpu_vecenv
from gpu_vecenv.errors import DeviceFaultError
from tests.games.fragile import FAULTS, Fragile
env, other = (gpu_vecenv.VecEnv(Fragile(), 4, "cuda", driver=DRIVER) for _ in range(2))
for each in (env, other):
    each.reset(seed=1)
actions = torch.full((4, 2), len(FAULTS) - 1, device="cuda")
try:
    env.step(actions)  # queued; the error appears later
    torch.cuda.synchronize()
except Exception:
    pass
refused = []
for each in (env, other):
    for call in (each.observe, each.reset, lambda: each.step(actions), each.sample_actions, each.faults,
                 lambda: each.state, lambda: each.data, each.state_dict, each.step_buffers):
        try:
            call()
        except DeviceFaultError as error:
            refused.append(str(error))
assert len(refused) == 18, refused
assert "restart" in refused[0] and "vecenv_" in refused[-1] and "blocks" in refused[-1], refused
try:
    gpu_vecenv.make("cartpole", 4, "cuda")
except DeviceFaultError as error:
    assert "restart" in str(error)
else:
    raise AssertionError
env.close()
other.close()
print("done")
"""


def child(text):
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=300, env={**os.environ}, check=False
    )
    return done.stdout, done.stderr


@pytest.mark.gpu
def test_a_forked_process_may_not_use_its_parents_gpu():
    assert child(FORKED)[0] == "done\n", child(FORKED)


@pytest.mark.gpu
@pytest.mark.parametrize("driver", working_drivers())
def test_after_a_fault_on_the_device_everything_but_close_is_refused(driver):
    stdout, stderr = child(BROKEN.replace("DRIVER", repr(driver)))
    assert "done\n" in stdout, stderr


@pytest.mark.gpu
def test_a_lack_of_memory_is_named_and_may_pass():
    assert child(WITHOUT_MEMORY)[0] == "done\n", child(WITHOUT_MEMORY)
