"""Each example in a process of its own, in another folder, small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_vecenv

EXAMPLES = Path(__file__).parent.parent / "examples"
# Whichever gpu_vecenv this process tests, a checkout's or an installed one, its children use as well.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(Path(gpu_vecenv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
}


def run(folder: Path, example: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(EXAMPLES / example), *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    match = re.search(pattern, text)
    assert match, f"no {pattern!r} in:\n{text}"
    return [float(group.replace(",", "")) for group in match.groups()]


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{path.name}"' in text for path in EXAMPLES.glob("*.py"))


def test_by_hand(device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "by_hand.py", "--num-envs", "50", "--steps", "60", "--device", device, "--out", "map.png")
    episodes, ticks = numbers(r"(\d+) episodes of ([\d.]+) ticks", said)
    assert episodes > 50 and 1 <= ticks <= 60  # taggers that head for the runner catch it soon, and again
    assert numbers(r"caught in ([\d.]+)%", said)[0] > 90
    (by_hand,) = numbers(r"reset by hand: (\d+) replicas", said)
    assert 0 < by_hand < 50
    # Own kernel, own tensor: every tick of every replica is on the map once.
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


def test_train_tag(device: str, tmp_path: Path) -> None:
    arguments = ["--total-steps", "512", "--num-envs", "16", "--episodes", "20", "--out", "p.safetensors"]
    said = run(tmp_path, "train_tag.py", *arguments, "--device", device)
    assert numbers(r"([\d,]+) env-steps", said) == [512]
    assert all(0 <= share <= 100 for share in numbers(r"([\d.]+)% by random, ([\d.]+)% by trained", said))
    game = gpu_vecenv.make("tag_gridworld", num_envs=2, device="cpu")
    manifest = gpu_vecenv.Trainer(game, gpu_vecenv.PPOConfig(num_steps=2)).load(tmp_path / "p.safetensors")
    assert manifest["ppo_config"]["total_steps"] == 512


@pytest.mark.parametrize(("game", "num_agents"), [("tag_gridworld", 5), ("tag_continuous", 110)])
def test_random_rollout(game: str, num_agents: int, device: str, tmp_path: Path) -> None:
    said = run(tmp_path, "random_rollout.py", "--game", game, "--num-envs", "10", "--steps", "5", "--device", device)
    assert "0 of them faulted" in said
    env_steps, agent_steps = numbers(r"([\d,]+) env-steps/s, ([\d,]+) agent-steps/s", said)
    assert agent_steps == pytest.approx(env_steps * num_agents, rel=0.01)


def test_a_bad_argument_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nearest: tag_gridworld"):
        run(tmp_path, "random_rollout.py", "--game", "tag_gridword", "--device", "cpu")
