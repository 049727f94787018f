"""RL Zoo3: its command trains a registered game, with the episodes in its monitor files."""

import csv
import re

import yaml
from stable_baselines3 import PPO
from support.documented import PAGE
from support.processes import run_child

from gpu_vecenv import GymnasiumEnv


def test_the_documented_command_trains(tmp_path):
    """The command and the file of hyperparameters that docs/clients.md shows."""
    page = PAGE.read_text(encoding="utf-8").partition("## RL Zoo3")[2]
    hyperparameters = re.search(r"^```yaml client\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    command = re.search(r"^(?:python -m )(rl_zoo3\..*)$", page, re.MULTILINE)[1].split()
    (tmp_path / "cartpole.yml").write_text(hyperparameters)
    assert set(yaml.safe_load(hyperparameters)) == {"gpu_vecenv/CartPole-v1"}
    done = run_child("-m", *command, "--seed", "1", "--eval-freq", "-1", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (model,) = tmp_path.rglob("*CartPole-v1.zip")
    env = GymnasiumEnv("cartpole")
    trained = PPO.load(model, device="cpu")
    assert trained.observation_space == env.observation_space and trained.action_space == env.action_space
    files = [file.read_text().splitlines()[1:] for file in model.parent.glob("*.monitor.csv")]  # the first is a comment
    episodes = [(float(row["r"]), int(row["l"])) for lines in files for row in csv.DictReader(lines)]
    lengths = [length for _, length in episodes]
    assert [total for total, _ in episodes] == lengths  # 1 a step
    # Every step belongs to an episode that ended, or to the last of one of 8 environments.
    assert trained.num_timesteps - 8 * 500 <= sum(lengths) <= trained.num_timesteps == 10_240
