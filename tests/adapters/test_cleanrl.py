"""CleanRL: the GPU script's environment, and scripts of release 1.2.0, run byte for byte on the gym they name."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from games.script import Script
from support.adapter_contract import Recorder, TerminatesAndTruncates
from support.synchronisation import no_synchronisation
from support.warm_process import run_python

from gpu_vecenv import GymnasiumEnv, GymnasiumVectorEnv
from gpu_vecenv.adapters import cleanrl
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.errors import UnsupportedGameError

ROOT = Path(__file__).parents[2]
THREADS_PER_ENV = {"num_leads": 1, "num_others": 2, "leave": 3, "max_steps": 8}
GPU_SCRIPT = "cleanrl/ppo_continuous_action_isaacgym/ppo_continuous_action_isaacgym.py"


def pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="session")
def release(tmp_path_factory) -> Path:
    """The scripts, and beside them the packages that they import; skipped if they cannot be had, unless required."""
    folder = tmp_path_factory.mktemp("cleanrl")
    try:
        # CleanRL says that it wants Python < 3.11; the scripts do not.
        pip("download", "--no-deps", "--python-version", "3.9", "--only-binary=:all:", "-d", folder, "cleanrl==1.2.0")
        pip("install", "--no-deps", "--target", folder / "packages", "gym==0.23.1", "cloudpickle>=1.2")
    except subprocess.CalledProcessError as error:
        if "cleanrl" in os.environ.get("GPU_VECENV_REQUIRED", "").split():
            raise
        pytest.skip(f"pip got neither CleanRL's scripts nor their gym: {error.stderr.decode().strip()[-200:]}")
    zipfile.ZipFile(next(folder.glob("cleanrl-*.whl"))).extractall(folder)
    return folder


def output_of(release: Path, *command: object, check: bool = True) -> str:
    """What a process says that finds the packages; runs and their logs go to the release's folder."""
    code = f"import runpy, sys, warnings; warnings.resetwarnings(); sys.path.insert(0, {str(release / 'packages')!r})\n"
    kind, *arguments = map(str, command)
    if kind == "-c":
        code += arguments[0]
    elif kind == "-m":
        code += f"sys.argv = {arguments}; runpy.run_module({arguments[0]!r}, run_name='__main__', alter_sys=True)"
    else:
        code += f"sys.argv = {[kind, *arguments]}; runpy.run_path({kind!r}, run_name='__main__')"
    done = run_python("-c", code, folder=release, timeout=1200)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout if check else done.stderr


@pytest.mark.parametrize(
    ("game", "config"), [("pendulum", {"max_steps": 9}), (Script, THREADS_PER_ENV | {"continuous": True})]
)
def test_steps_are_those_of_the_gymnasium_view(game, config, device):
    env, twin = cleanrl.make(game, 5, device, **config), GymnasiumVectorEnv(game, 5, device, **config)
    assert env.num_envs == 5 * twin.num_agents and env.unwrapped is env
    assert (env.observation_space, env.action_space) == (twin.single_observation_space, twin.single_action_space)
    env.seed(5)
    obs, (expected, _) = env.reset(), twin.reset(seed=5)
    left = torch.zeros(env.num_envs, dtype=torch.bool, device=device)
    ends = time_outs = 0
    for _ in range(40):
        assert list(obs) == ["obs"] and torch.equal(obs["obs"], expected)
        actions = twin.sample_actions()
        last = expected
        obs, rewards, dones, infos = env.step(actions)
        expected, twin_rewards, terminations, truncations, info = twin.step(actions)
        assert torch.equal(rewards, twin_rewards)
        assert dones.dtype == torch.int64 and torch.equal(dones, (terminations | truncations).long())
        assert torch.equal(infos["time_outs"], truncations)
        where = info["_final_obs"]
        assert torch.equal(infos["_final_obs"], where)
        assert torch.equal(infos["final_obs"][where], info["final_obs"][where])
        if game is Script:  # a row that has left is no time-out, whatever ends its environment
            assert torch.equal(infos["time_outs"], truncations & (last[:, 3] > 0) & ~left)
            left = ~infos["active"]
        ends, time_outs = ends + int(dones.sum()), time_outs + int(infos["time_outs"].sum())
    assert ends >= 4 * env.num_envs and time_outs > 0


def test_dones_can_be_subtracted_from_one():
    """As the script does, from the counts in int32 as from the returns."""
    _, rewards, dones, _ = (env := cleanrl.make("pendulum", 3, "cpu", max_steps=1)).step(env.reset()["obs"][:, :1])
    lengths = torch.ones(3, dtype=torch.int32)
    lengths *= 1 - dones
    rewards *= 1 - dones
    assert lengths.tolist() == rewards.tolist() == [0, 0, 0]


def test_a_seed_counts_for_the_next_reset():
    env = cleanrl.make("pendulum", 3, "cpu")
    starts = []
    for seed in (7, 8, 7):
        env.seed(seed)
        starts.append([env.reset()["obs"].tolist(), env.reset()["obs"].tolist()])
    assert starts[0] == starts[2] != starts[1] and starts[0][0] != starts[0][1]


def test_what_terminates_is_no_time_out(device):
    env = cleanrl.wrap(TerminatesAndTruncates(GymnasiumVectorEnv("pendulum", 2, device)))
    env.reset()
    _, _, dones, extras = env.step(torch.zeros(2, 1, device=device))
    assert dones.tolist() == [1, 1] and extras["time_outs"].tolist() == [False, False]


def test_nothing_is_copied(device):
    env = cleanrl.wrap(Recorder(GymnasiumVectorEnv("pendulum", 4, device)))
    env.reset()
    obs, rewards, _, infos = env.step(torch.zeros(4, 1, device=device))
    given_obs, given_rewards, _, _, info = env.env.outputs
    assert obs["obs"].data_ptr() == given_obs.data_ptr() and rewards.data_ptr() == given_rewards.data_ptr()
    assert infos["final_obs"].data_ptr() == info["final_obs"].data_ptr()


@pytest.mark.gpu
def test_no_step_waits_for_the_device():
    env = cleanrl.make("simple_spread", 64, "cuda", continuous_actions=True, max_steps=7)
    env.reset()
    actions = torch.randn(env.num_envs, *env.action_space.shape, device="cuda")
    with no_synchronisation():
        for _ in range(100):
            env.step(actions)


def test_what_the_script_does_not_know_is_refused():
    with pytest.raises(UnsupportedGameError, match="CleanRL's GPU script"):
        cleanrl.make("cartpole", 2, "cpu")
    with pytest.raises(ValueError, match='expected output="torch" and "same_step"'):
        cleanrl.make("pendulum", 2, "cpu", autoreset_mode="next_step")
    with pytest.raises(ValueError, match='expected output="torch"'):
        cleanrl.wrap(GymnasiumVectorEnv("pendulum", 2, "cpu", output="numpy"))


def test_pictures_are_of_the_first_env():
    pytest.importorskip("pygame", reason="pygame-ce is not installed")
    env = cleanrl.make("pendulum", 3, "cpu", render_mode="rgb_array")
    twin = GymnasiumEnv("pendulum", render_mode="rgb_array")
    env.seed(1)
    env.reset()
    twin.reset(seed=1)
    np.testing.assert_array_equal(env.render(mode="rgb_array"), twin.render())
    assert cleanrl.make("pendulum", 3, "cpu").render() is None


def test_single_environments_speak_the_old_gym():
    env, twin = cleanrl.GymEnv(GymnasiumEnv(Script, max_steps=5)), GymnasiumEnv(Script, max_steps=5)
    assert (env.observation_space, env.action_space) == (twin.observation_space, twin.action_space)
    assert env.seed(3) == [3]
    seed, kinds = 3, set()
    for _ in range(20):
        obs, (expected, _) = env.reset(), twin.reset(seed=seed)
        seed, done, length = None, False, 0
        _, _, ends, truncates, *_ = expected
        while not done:
            np.testing.assert_array_equal(obs, expected)
            obs, reward, done, info = env.step(1)
            expected, twin_reward, terminated, truncated, _ = twin.step(1)
            length += 1
            assert reward == twin_reward and done == (terminated or truncated) == (length == ends)
            assert info == ({"TimeLimit.truncated": bool(truncates)} if done else {})
        kinds.add(truncates)
    assert kinds == {0, 1}


@pytest.mark.slow
def test_later_releases_find_the_ids_by_gymnasium_itself():
    code = "import gymnasium as gym; make = lambda: gym.make('gpu_vecenv:gpu_vecenv/CartPole-v1')\n"
    code += "envs = gym.vector.SyncVectorEnv([make] * 2); print(envs.reset(seed=1)[0].shape)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "(2, 4)"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_example_runs_the_gpu_script_which_learns(release):
    said = output_of(release, ROOT / "examples" / "cleanrl_isaacgym.py", GPU_SCRIPT)
    assert re.search(r"global_step=6400, episodic_return=-\d+\.", said)  # 32 rows' 200th steps are at its second step
    at_random, trained = map(float, re.search(r"return at random (-\d+), trained (-\d+)", said).groups())
    assert trained > at_random / 2  # costs: about -1260 at random, -300 when trained


ROWS = """
from gpu_vecenv.adapters import cleanrl
done = cleanrl.run(*"{script} --env-id simple_spread --num-steps 8 --total-timesteps 3000 --num-envs {rows}".split(),
                   continuous_actions=True, max_steps=7)
env = done["envs"].unwrapped
print("rows", env.num_envs, "environments", env.env.vec_env.num_envs, "seed", env.env.vec_env.seed, *done["obs"].shape)
print("lengths", done["info"]["l"].max().item(), done["info"]["time_outs"].dtype)
"""


@pytest.mark.slow
def test_the_gpu_script_counts_rows(release):
    said = output_of(release, "-c", ROWS.format(script=GPU_SCRIPT, rows=12))
    assert "rows 12 environments 4 seed 1 8 12 18" in said
    assert "lengths" in said and int(re.search(r"lengths (\d+) torch.bool", said)[1]) <= 7
    refused = output_of(release, "-c", ROWS.format(script=GPU_SCRIPT, rows=10), check=False)
    assert "--num-envs is 10; expected a multiple of simple_spread's 3 agents" in refused


@pytest.mark.slow
def test_ppo_learns_on_single_environments(release):
    options = "--env-id gpu_vecenv/CartPole-v1 --total-timesteps 8000 --learning-rate 1e-3 --num-envs 4"
    said = output_of(release, "-m", "gpu_vecenv.adapters.cleanrl", "cleanrl/ppo.py", *options.split())
    returns = [float(each) for each in re.findall(r"episodic_return=(\d+)", said)]
    assert np.mean(returns[-30:]) > 2 * np.mean(returns[:30])  # about 22 at first, when its policy is nearly uniform


@pytest.mark.slow
def test_without_gym_one_line_says_what_to_install(tmp_path):
    (tmp_path / "ppo.py").touch()
    code = "import sys; sys.modules['gym'] = None\nfrom gpu_vecenv.adapters import cleanrl\ncleanrl.run('ppo.py')"
    said = run_python("-c", code, folder=tmp_path).stderr
    assert said.rstrip().endswith("ModuleNotFoundError: gym is not installed: pip install 'gpu-vecenv[cleanrl]'")


IDS = """
import sys, gym
for name in sys.argv[1:]:
    env = gym.make(name)
    env.seed(1)
    env.reset()
    assert isinstance(env.observation_space, gym.Space) and isinstance(env.action_space, gym.Space)
    steps = 1
    while not env.step(env.action_space.sample())[2]:
        steps += 1
    print(env.spec.id, steps)
"""


@pytest.mark.slow
def test_gymnasiums_ids_all_work_in_gym(release):
    specs = [spec for spec in gymnasium.registry.values() if spec.namespace == "gpu_vecenv"]
    ids = [spec.id for spec in specs if not GAMES[spec.kwargs["game"]].masks_actions]  # any action is allowed
    script = release / "ids.py"
    script.write_text(IDS)
    code = f"from gpu_vecenv.adapters import cleanrl\ncleanrl.run({str(script)!r}, *{ids}, max_steps=3)"
    assert output_of(release, "-c", code).splitlines() == [f"{name} 3" for name in ids]
