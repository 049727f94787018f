"""Each example in a process of its own, in another folder, small."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.predator_prey import PredatorPreyOracle
from support.processes import child_environment
from support.warm_process import run_python

import gpu_vecenv
from gpu_vecenv import StepBuffers, VecEnv
from gpu_vecenv.envs.registry import load_game

THIRDS = ("lightest", "middle", "heaviest")
PREDATOR_PREY = [  # name, configuration, what must have happened for the comparison to say something
    ("as it is", {}, {"eaten", "starved", "over"}),
    ("the end by time", {"hunger": 60, "max_steps": 20}, {"eaten", "truncated"}),
    ("prey that stay away", {"rebirth": 0, "grid": 5, "num_prey": 6, "hunger": 40}, {"leaves", "over"}),
    (
        "crowd",
        {"num_predators": 9, "num_prey": 40, "grid": 7, "sight": 3, "rebirth": 1, "hunger": 5, "max_steps": 60},
        {"eaten", "starved", "truncated"},
    ),
    (
        "one of each, blind",
        {"num_predators": 1, "num_prey": 1, "grid": 3, "sight": 0, "rebirth": 2, "hunger": 9},
        {"eaten", "over"},
    ),
    (
        "odd rewards",
        {
            "meal_reward": 1 / 3,
            "starving_penalty": 0.1,
            "eaten_penalty": 0,
            "living_reward": -0.7,
            "grid": 6,
            "meal": 0,
        },
        {"eaten", "over"},
    ),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
# Whichever gpu_vecenv this process tests, a checkout's or an installed one, its children use as well.
ENVIRONMENT = child_environment()


def run(folder: Path, example: str, *arguments: str) -> str:
    done = run_python(EXAMPLES / example, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    match = re.search(pattern, text)
    assert match, f"no {pattern!r} in:\n{text}"
    return [float(group.replace(",", "")) for group in match.groups()]


def test_every_example_is_tested() -> None:
    tests = [Path(__file__), *Path(__file__).parents[1].glob("adapters/*.py")]
    text = "".join(path.read_text() for path in tests)
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []


@pytest.mark.slow
def test_by_hand(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "by_hand.py", "--num-envs", "50", "--steps", "60", "--device", device, "--out", "map.png")
    episodes, steps = numbers(r"(\d+) episodes of ([\d.]+) steps", said)
    assert episodes > 50 and 1 <= steps <= 60  # taggers that head for the runner catch it soon, and again
    assert numbers(r"caught in ([\d.]+)%", said)[0] > 90
    (by_hand,) = numbers(r"reset by hand: (\d+) environments", said)
    assert 0 < by_hand < 50
    # Own kernel, own tensor: every step of every environment is on the map once.
    assert numbers(r"positions counted: (\d+)", said) == [50 * 60]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "no plot" in said
    else:
        assert f"plot: {tmp_path.resolve() / 'map.png'}" in said
        assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_by_hand_says_the_same_on_both_devices(tmp_path: Path) -> None:
    lines = {
        device: run(tmp_path, "by_hand.py", "--num-envs", "50", "--steps", "60", "--device", device).splitlines()
        for device in ("cpu", "cuda")
    }
    assert lines["cpu"][1:3] == lines["cuda"][1:3]


def test_connect_four_search(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "connect_four_search.py", "--depth", "2", "--episodes", "20", "--device", device)
    (share,) = numbers(r"depth 2 against random moves: ([\d.]+)% won", said)
    assert share > 50


def test_pursuit_surround(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "pursuit_surround.py", "--episodes", "4", "--max-steps", "100", "--device", device)
    scripted, moved_at_random = numbers(r"(?s)return (-?[\d.]+).*return (-?[\d.]+)", said)
    assert scripted > 0 > moved_at_random


def test_warehouse_robots(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "warehouse_robots.py", "--max-steps", "100", "--episodes", "2")
    assert numbers(r"tiny, 4 robots: ([\d.]+) deliveries", said)[0] >= 2


def test_commons(device: str, tmp_path: Path) -> None:
    arguments = ["--game", "cleanup", "--layout-name", "small", "--num-agents", "2", "--max-steps", "40"]
    arguments += ["--total-steps", "512", "--num-envs", "4", "--episodes", "3", "--common-reward", "mean"]
    said = run(tmp_path, "commons.py", *arguments, "--device", device)
    for players in ("random", "trained"):
        utility, peace = numbers(players + r" +([\d.]+) .* ([\d.]+)\n", said)
        assert utility >= 0 and 0 < peace <= 2


def test_economy_taxes(device: str, tmp_path: Path) -> None:
    arguments = ["--total-steps", "240", "--num-envs", "3", "--num-steps", "20", "--max-steps", "40", "--period", "10"]
    arguments += ["--saez-buffer-size", "20"]
    said = run(tmp_path, "economy_taxes.py", *arguments, "--episodes", "3", "--device", device)
    for taxes in ("planner", "free_market", "us_federal", "saez"):
        productivity, equality = numbers(taxes + r" +trained +([\d.]+) +([\d.]+)", said)
        assert productivity >= 0 and 0 <= equality <= 1


def test_train_tag(device: str, tmp_path: Path) -> None:
    arguments = ["--total-steps", "512", "--num-envs", "16", "--episodes", "20", "--out", "p.safetensors"]
    said = run(tmp_path, "train_tag.py", *arguments, "--device", device)
    assert numbers(r"([\d,]+) env-steps", said) == [512]
    assert all(0 <= share <= 100 for share in numbers(r"([\d.]+)% by random, ([\d.]+)% by trained", said))
    game = gpu_vecenv.make("tag_gridworld", num_envs=16, device=device)
    trainer = gpu_vecenv.Trainer(game, gpu_vecenv.PPOConfig(total_steps=512))
    manifest = trainer.load(tmp_path / "p.safetensors")
    assert manifest["config"]["total_steps"] == 512 and trainer.iteration == 1
    assert set(trainer.policies) == {"tagger", "runner"}
    loaded = gpu_vecenv.load_policy(tmp_path / "p.safetensors", device=device)
    obs, _ = trainer.env.reset(seed=1)
    assert loaded(obs).shape == (16, 5)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["tag_gridworld", "tag_continuous"])
def test_tag_baselines(game: str, device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "tag_baselines.py", "--game", game, "--episodes", "3", "--num-envs", "3", "--device", device)
    cells = "[^\\d\\n]+([\\d.]+)%[^\\d\\n]+([\\d.]+) "
    caught = {}
    for taggers in ("random", "pursuit"):
        for runners in ("random", "flee"):
            share, length = numbers(rf"{taggers} +│ {runners}{cells}", said)
            assert 0 <= share <= 100 and length >= 1
            caught[taggers, runners] = share, -length
    assert caught["pursuit", "random"] > caught["random", "random"]  # more, or else sooner
    assert caught["random", "flee"] <= caught["random", "random"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_train_against_script(device: str, tmp_path: Path) -> None:
    options = ["--role", "tagger", "--total-steps", "8192", "--num-envs", "64", "--episodes", "64"]
    said = run(tmp_path, "train_against_script.py", *options, "--device", device)
    returns = [numbers(rf"{name} +│ [\d.]+% +│ [\d.]+ +│ (-?[\d.]+)", said)[0] for name in ("random", "its script")]
    assert returns[0] < returns[1]
    assert "trained" in said and "flee" in said.lower()


def test_mappo_rnn(device: str, tmp_path: Path) -> None:
    sizes = "--num-envs 8 --total-steps 700 --num-epochs 2 --units 16 --log-interval 2"
    options = ("--seed", "0"), ("--seed", "0", "--no-graphs"), ("--seed", "1")
    said = [run(tmp_path, "mappo_rnn.py", *sizes.split(), *more, "--device", device) for more in options]
    lines = [[re.sub("[\\d,]+ per second", "", line) for line in text.splitlines()] for text in said]
    assert lines[0] == lines[1] != lines[2] and len(lines[0]) == 5
    assert numbers(r"([\d,]+) env-steps, [\d,]+ per second: return -", said[0]) == [240]  # of three iterations
    with pytest.raises(AssertionError, match=r"has the roles \['tagger', 'runner'\]; expected a game of one role"):
        run(tmp_path, "mappo_rnn.py", "--game", "tag_gridworld", "--device", device)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_mappo_rnn_learns(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "mappo_rnn.py", "--total-steps", "66000", "--device", device)
    at_random, trained = numbers(r"(-[\d.]+) by random actions, (-[\d.]+) trained", said)
    assert trained > at_random + 2  # about -26.5 and -22


@pytest.mark.slow
def test_reward_shaping(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "reward_shaping.py", "--total-steps", "16384", "--episodes", "20", "--device", device)
    returns = [numbers(rf"{name}: return (-?[\d.]+), ", said)[0] for name in ("the game's rewards", "shaped rewards")]
    assert returns[0] != returns[1]


def test_domain_randomisation(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "domain_randomisation.py", "--num-envs", "300", "--device", device)
    lightest, heaviest, mean = numbers(r"([\d.]+) to ([\d.]+) kg, mean return ([-\d.]+)", said)
    assert 0.5 <= lightest < 0.7 and 4.8 < heaviest <= 5  # 300 draws from [0.5, 5)
    thirds = [numbers(rf"{name} third, [\d.]+ kg on average: ([-\d.]+)", said)[0] for name in THIRDS]
    assert thirds == sorted(thirds, reverse=True) and thirds[0] > mean > thirds[2]
    # The pinned masses are the ends of the range: returns lie beyond those of the lightest and the heaviest third.
    assert numbers(r"pinned to \[0\.5\] kg: ([-\d.]+)", said)[0] > thirds[0]
    assert numbers(r"pinned to \[5\.0\] kg: ([-\d.]+)", said)[0] < thirds[2]


@pytest.mark.slow
def test_predator_prey_steps_by_itself(tmp_path: Path) -> None:
    said = run(tmp_path, "own_env/predator_prey.py")
    episodes, steps = numbers(r"(\d+) episodes of ([\d.]+) steps", said)
    assert episodes > 100 and 25 <= steps <= 200  # nobody starves in the first 24 steps


@pytest.mark.slow
def test_predator_prey_trains_by_its_path(tmp_path: Path) -> None:
    options = "--total-steps 64 --num-steps 4 --num-envs 4 --episodes 4 --device cpu --out run --max-steps 30"
    path = EXAMPLES / "own_env" / "predator_prey.py"
    done = subprocess.run(
        [sys.executable, "-m", "gpu_vecenv.cli", "train", str(path), *options.split()],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "iteration-00000004.safetensors").is_file()
    results = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    against = [f"{role} against {name}" for role in ("predator", "prey") for name in ("random", "initial")]
    assert list(results) == ["all random", *against, "all trained"]


def predator_prey(device: str, num_envs: int, **config: Any) -> tuple[VecEnv, list[PredatorPreyOracle]]:
    """Environments and their oracles, begun with the same seed."""
    game = load_game(EXAMPLES / "own_env" / "predator_prey.py")(**config)
    env = VecEnv(game, num_envs, device, autoreset_mode="disabled", first_env_index=5)
    return env, [PredatorPreyOracle(game, 2**40 + 11, 5 + e) for e in range(num_envs)]


@pytest.mark.parametrize(
    ("config", "happens"), [pytest.param(config, happens, id=name) for name, config, happens in PREDATOR_PREY]
)
def test_every_step_of_predator_prey_is_bitwise_equal_to_the_oracle(
    config: dict[str, Any], happens: set[str], device: str
) -> None:
    env, oracles = predator_prey(device, 4, **config)
    game, buffers, seen = env.game, env.step_buffers(), set[str]()

    def compare(what: str, tensor: torch.Tensor, expected: list[Any]) -> None:
        got, expected = tensor.cpu().numpy(), np.stack(expected)
        assert got.dtype == expected.dtype, what
        np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}"), what)

    def garbage() -> StepBuffers:
        for tensor in buffers.tensors().values():
            tensor.view(torch.uint8).fill_(0xFF)
        return buffers

    def compare_state(step: int) -> None:
        for field in ("cell", "alive", "energy", "unborn"):
            compare(f"{field}, step {step}", env.state[field], [getattr(oracle, field) for oracle in oracles])

    obs, _ = env.reset(seed=2**40 + 11, out=garbage())
    for step in range(150):
        compare(f"obs, step {step}", obs, [oracle.observe() for oracle in oracles])
        compare_state(step)
        actions = env.sample_actions()
        obs, *outputs, info = env.step(actions, out=garbage())
        results = [oracle.step(action) for oracle, action in zip(oracles, actions.cpu().numpy(), strict=True)]
        for place, what in enumerate(("rewards", "terminations", "truncations")):
            compare(f"{what}, step {step}", outputs[place], [result[place] for result in results])
        compare(f"active, step {step}", info["active"], [oracle.active for oracle in oracles])
        for oracle, (_, terminations, truncations) in zip(oracles, results, strict=True):
            hunters = slice(game.num_predators)
            seen |= {"eaten"} if (oracle.unborn == game.rebirth).any() and game.rebirth else set()
            seen |= {"starved"} if terminations[hunters].any() and oracle.active[hunters].any() else set()
            seen |= {"leaves"} if terminations[game.num_predators :].any() and oracle.active.any() else set()
            seen |= {"over"} if terminations.any() and not oracle.active.any() else set()
            seen |= {"truncated"} if truncations.any() else set()
        ended = ~info["active"].any(1)
        if ended.any():
            obs, _ = env.reset(mask=ended, out=garbage())
            for e in np.flatnonzero(ended.cpu()):
                oracles[e].begin()
    assert seen >= happens
    assert env.faults().sum() == 0


def test_predator_prey_refuses_a_window_wider_than_the_torus() -> None:
    with pytest.raises(ValueError, match="sight = 2 sees 5 cells of 4"):
        predator_prey("cpu", 1, grid=4)


@pytest.mark.parametrize(("game", "num_agents"), [("tag_gridworld", 5), ("tag_continuous", 110)])
def test_random_rollout(game: str, num_agents: int, device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "random_rollout.py", "--game", game, "--num-envs", "10", "--steps", "5", "--device", device)
    assert "0 of them faulted" in said
    env_steps, agent_steps = numbers(r"([\d,]+) env-steps/s, ([\d,]+) agent-steps/s", said)
    assert agent_steps == pytest.approx(env_steps * num_agents, rel=0.01)


@pytest.mark.parametrize(
    ("game", "options", "num_agents"),
    [
        ("tag_gridworld", "--num-taggers 7 --full-observation False --steps 110", 8),  # an episode has 100 at most
        ("tag_continuous", "--num-taggers 2 --num-runners 9 --steps 20", 11),
    ],
)
def test_cpu_baseline(game: str, options: str, num_agents: int, device: str, tmp_path: Path) -> None:
    sizes = ["--num-envs", "30", "--cpu-envs", "3", "--device", device]
    said = run(tmp_path, "cpu_baseline.py", "--game", game, *options.split(), *sizes)
    assert "all 3 environments are bitwise equal in both" in said
    cells = re.findall(r"│ +([\d,]+)" + r" │ +([\d,]+)" * 2 + r" │ +([\d.,]+) │", said)
    rows = [[float(cell.replace(",", "")) for cell in row] for row in cells]
    assert [row[0] for row in rows] == [3, 3, 30]
    for _, env_steps, agent_steps, ratio in rows:
        assert agent_steps == pytest.approx(env_steps * num_agents, rel=0.01)  # rates are rounded to whole numbers
        assert ratio == pytest.approx(env_steps / rows[0][1], rel=0.01, abs=0.06)  # and this to one digit
    shares = numbers(r"simulating ([\d.]+)%, model ([\d.]+)%, copying ([\d.]+)%", said)
    assert sum(shares) == pytest.approx(100, abs=0.16)  # three, each rounded to one digit


def test_cpu_baseline_wants_a_checkout(tmp_path: Path) -> None:
    (alone := tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLES / "cpu_baseline.py", alone)
    with pytest.raises(AssertionError, match="tests/oracles of a checkout"):
        run(tmp_path, str(alone / "cpu_baseline.py"), "--device", "cpu")


def test_gymnasium_drop_in(device: str, tmp_path: Path) -> None:
    """Gymnasium's own CartPole and ours are solved by the same lines."""
    small = ["--num-envs", "100", "--rounds", "2"]
    ours = run(tmp_path, "gymnasium_drop_in.py", *small, "--device", device)
    theirs = run(tmp_path, "gymnasium_drop_in.py", "--id", "CartPole-v1", "--num-envs", "20", "--rounds", "1")
    pattern = r"round {}: mean return (\d+), best fifth (\d+)"
    (at_first, _), (_, learnt) = (numbers(pattern.format(k), ours) for k in (1, 2))
    assert learnt > 4 * at_first  # about 18 and 200
    assert numbers(pattern.format(1), theirs)[0] < 40 and numbers(r"(\d+) episodes in", theirs) == [20]


def test_pettingzoo_loop(tmp_path: Path) -> None:
    said = run(tmp_path, "pettingzoo_loop.py", "--episodes", "30")
    at_random, learnt = numbers(r"at random (\d+), after 30 episodes (\d+)", said)
    assert learnt < at_random / 2  # about 64 and 15


@pytest.mark.slow
def test_sweep_optuna(device: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    sizes = "--trials 8 --seeds 2 --num-envs 8 --total-steps 8192 --reports 8 --startup-trials 2".split()
    said = run(tmp_path, "sweep_optuna.py", *sizes, "--device", device)
    trials, complete, pruned = numbers(r"(\d+) trials: (\d+) complete, (\d+) pruned", said)
    # Those before any may be pruned; of six that follow, some are below the median.
    assert trials == complete + pruned == 8 and complete >= 2 and pruned >= 1
    (best,) = numbers(r"best mean over 2 seeds ([\d.]+): width ", said)
    assert 9 < best <= 500


@pytest.mark.slow
@pytest.mark.exhaustive
def test_multi_gpu(tmp_path: Path) -> None:
    """Two processes on the CPU."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLES / "multi_gpu.py")]
    options = "--num-envs 8 --total-steps 1024 --episodes 4 --device cpu".split()
    command = [sys.executable, *torchrun, *options]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for rank, shard in enumerate([[0, 3], [4, 7]]):
        assert numbers(rf"process {rank} of 2: environments (\d+) to (\d+)", done.stdout) == shard
    assert numbers(r"([\d,]+) env-steps by (\d+) processes; return_tagger [-\d.]+", done.stdout) == [1024, 2]


@pytest.mark.slow
def test_sb3_cartpole(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    at_random, trained = numbers(r"at random (\d+), trained (\d+)", run(tmp_path, "sb3_cartpole.py"))
    assert trained > 5 * at_random  # about 22 and 480


def test_a_bad_argument_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nearest: tag_gridworld"):
        run(tmp_path, "random_rollout.py", "--game", "tag_gridword", "--device", "cpu")
