"""``gpu-vecenv check`` on environments of other libraries: whether it finds what the table in docs/interfaces.md says.

    python tests/check/third_party.py          # exit code 1 if the table says otherwise
    python tests/check/third_party.py write    # write the table

``make third-party`` runs it with the newest versions, in a Python environment of their own.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import gymnasium

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "interfaces.md"
TABLE = re.compile(r"(?<=<!-- tests/check/third_party.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
HEADER = "| environment | from | checks that fail |\n|---|---|---|\n"


def sb3_bit_flipping(num_envs):
    from stable_baselines3.common.envs import BitFlippingEnv

    return gymnasium.vector.SyncVectorEnv([BitFlippingEnv] * num_envs)


def sb3_identity(num_envs):
    from stable_baselines3.common.envs import IdentityEnv

    return gymnasium.vector.SyncVectorEnv([lambda: IdentityEnv(dim=3)] * num_envs)


def sb3_multi_observations(num_envs):
    from stable_baselines3.common.envs import SimpleMultiObsEnv

    return gymnasium.vector.SyncVectorEnv([SimpleMultiObsEnv] * num_envs)


def minigrid_empty(num_envs):
    from minigrid.envs import EmptyEnv
    from minigrid.wrappers import FlatObsWrapper

    return gymnasium.vector.SyncVectorEnv([lambda: FlatObsWrapper(EmptyEnv(size=5))] * num_envs)


def envpool_cartpole(num_envs):
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=num_envs, seed=0)


def supersuit_simple_spread(num_envs):
    import supersuit
    from mpe2 import simple_spread_v3

    one = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env(max_cycles=9))
    return supersuit.concat_vec_envs_v1(one, num_envs, base_class="gymnasium")


def statistics(mode):
    """CartPole in SyncVectorEnv with Gymnasium's RecordEpisodeStatistics."""

    def make(num_envs):
        vector_kwargs = {"autoreset_mode": mode}
        env = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs=vector_kwargs)
        return gymnasium.wrappers.vector.RecordEpisodeStatistics(env)

    return make


statistics_next_step, statistics_disabled = map(statistics, ("NextStep", "Disabled"))


class Row(NamedTuple):
    """An environment: its name in the table, the package that it is from, and the arguments of ``gpu-vecenv check``."""

    name: str
    package: str
    arguments: tuple[str, ...]


def _id(name, steps, *options, **config):
    return name, "--steps", str(steps), *options, "--config", json.dumps(config)


def _factory(function, steps):
    return f"{__file__}:{function}", "--steps", str(steps)


ROWS = (
    Row("CartPole, its own vector env", "gymnasium", _id("CartPole-v1", 40)),
    Row("CartPole in `SyncVectorEnv`", "gymnasium", _id("CartPole-v1", 40, vectorization_mode="sync")),
    Row("CartPole in `AsyncVectorEnv`", "gymnasium", _id("CartPole-v1", 40, vectorization_mode="async")),
    Row("CartPole with `RecordEpisodeStatistics`", "gymnasium", _factory("statistics_next_step", 40)),
    Row("the same, DISABLED autoreset", "gymnasium", _factory("statistics_disabled", 40)),
    Row("Pendulum in `SyncVectorEnv`", "gymnasium", _id("Pendulum-v1", 40)),
    Row("LunarLander in `SyncVectorEnv`", "gymnasium", _id("LunarLander-v3", 40)),
    Row("FrozenLake in `SyncVectorEnv`", "gymnasium", _id("FrozenLake-v1", 40, vectorization_mode="sync")),
    Row("Blackjack in `SyncVectorEnv`", "gymnasium", _id("Blackjack-v1", 40)),
    Row("MiniGrid's EmptyEnv in `SyncVectorEnv`", "minigrid", _factory("minigrid_empty", 40)),
    Row("BitFlippingEnv in `SyncVectorEnv`", "stable-baselines3", _factory("sb3_bit_flipping", 40)),
    Row("IdentityEnv in `SyncVectorEnv`", "stable-baselines3", _factory("sb3_identity", 40)),
    Row("SimpleMultiObsEnv in `SyncVectorEnv`", "stable-baselines3", _factory("sb3_multi_observations", 40)),
    Row("CartPole of EnvPool", "envpool", _factory("envpool_cartpole", 40)),
    Row("simple_spread in SuperSuit's vector env", "supersuit", _factory("supersuit_simple_spread", 20)),
    Row(
        "simple_spread",
        "mpe2",
        _id("mpe2.simple_spread_v3:parallel_env", 20, "--parallel", "--max-steps", "9", max_cycles=9),
    ),
    Row("rps", "pettingzoo", _id("classic/rps-v2", 20)),
    Row("pursuit", "pettingzoo", _id("sisl/pursuit-v5", 20, "--max-steps", "30", max_cycles=30)),
    Row("multiwalker", "pettingzoo", _id("sisl/multiwalker-v9", 20)),
)


def line(row: Row) -> str:
    """The row of the table, from a run of the command."""
    command = [sys.executable, "-m", "gpu_vecenv.cli", "check", *row.arguments, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{row.name}: exit code {done.returncode}: {done.stderr.strip()[-800:]}")
    failed = sorted({failure["check"] for failure in json.loads(done.stdout)["failures"]})
    print(f"{row.name}: {', '.join(failed) or 'none'}", flush=True)
    return f"| {row.name} | {row.package} {version(row.package)} | {', '.join(failed) or 'none'} |\n"


def _results(table: str) -> set[tuple[str, str]]:
    """Environment and checks that fail: a new version with the same results leaves the table true."""
    cells = [text.split("|") for text in table.splitlines()]
    return {(row[1].strip(), row[3].strip()) for row in cells if len(row) > 3}


def main() -> int:
    """Compare or write the table."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (before,) = TABLE.findall(text)
    with ThreadPoolExecutor(2) as pool:
        table = HEADER + "".join(pool.map(line, ROWS))
    if sys.argv[1:] == ["write"]:
        DOCUMENT.write_text(TABLE.sub(lambda _: table, text), encoding="utf-8")
        return 0
    for name, failed in sorted(_results(table) ^ _results(before)):
        print(f"{name}: {failed}: {'found' if (name, failed) in _results(table) else 'in ' + DOCUMENT.name} only")
    return int(_results(table) != _results(before))


if __name__ == "__main__":
    sys.exit(main())
