"""The numbers of docs/reliability.md are those of the ledger, the receipts, the measurements and the sources."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import ledger
import pytest
import receipts
from reliability.experiment import NAMES

import gpu_vecenv
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.envs.registry import GAMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").split())
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def sentences() -> Iterator[str]:
    """What the page has to say."""
    yield f"[{len(CHECKS)} checks](interfaces.md#checks-for-any-environment)"

    rows = ledger.read()
    agents = [gpu_vecenv.configure(row["game"], **row["config"]).num_agents for row in rows]
    steps = [max(map(int, row["digests"])) * row["num_envs"] * n for row, n in zip(rows, agents, strict=True)]
    of_devices = dict[str, int]()
    for row, count in zip(rows, steps, strict=True):
        of_devices[row["device"]] = of_devices.get(row["device"], 0) + count
    parts = [
        f"{n // 10**6:,} million agent-steps of an {name.removeprefix('NVIDIA ')}" for name, n in of_devices.items()
    ]
    yield f"The ledger has {' and '.join(parts)}"

    found = {name: receipts.read(name)["metrics"] for name in receipts.REQUIRED}
    configurations = " to ".join(map(str, sorted({found[tool]["environments"] for tool in SANITIZERS})))
    yield f"{', '.join(SANITIZERS[:-1])} and {SANITIZERS[-1]} each reported its planted kernel"
    yield f"had {max(found[tool]['findings'] for tool in SANITIZERS)} findings in {configurations} configurations"
    leaks, growth = found["leaks"], found["soak"]["growth_bytes"] / 2**20
    kinds = "tensor_bytes tensors files threads modules driver_bytes".split()
    assert {leaks[f"{kind}_left"] for kind in kinds} == {0}
    yield f"{leaks['cycles']:,} cycles of making, stepping and closing left 0 bytes"
    assert 10**9 <= found["soak"]["agent_steps"] < 1.001 * 10**9
    yield f"A billion agent-steps used {growth:.1f} MB more memory at the end"
    yield f"tensors of {found['large']['observations']:,} elements passed"
    experiments = [name for name in receipts.REQUIRED if name in NAMES]
    yield f"the experiments `{'`, `'.join(experiments[:-1])}` and `{experiments[-1]}`"

    costs = json.loads((ROOT / "docs" / "performance" / "h200-cost-of-checks.json").read_text(encoding="utf-8"))
    for row in costs["rows"]:
        share = row["kernel_us"]["default"] / row["kernel_us"]["no look at actions"] - 1  # of the validation
        if row["num_envs"] == (2000 if row["game"] == "tag_continuous" else 1_000_000):
            yield f"`{row['game']}` ({share:.1%})"
    calls = [row["call_us"] for row in costs["rows"]]
    looks = sorted(call["its look at dtype, shape and device"] for call in calls)
    smallest = min(call["call of step"] for call in calls)
    yield f"takes {looks[0]:.1f} to {looks[-1]:.1f} µs per call, of {smallest:.2f} µs for the smallest of these steps"


@pytest.mark.parametrize("sentence", [*sentences()])
def test_a_number_is_what_was_measured(sentence: str) -> None:
    assert sentence in PAGE


def test_every_experiment_has_its_row() -> None:
    table = PAGE.partition("## Experiments")[2].partition("## Evidence")[0]
    assert sorted(re.findall(r"\| `(\w+)` \|", table)) == sorted(NAMES)


def test_every_bundled_game_is_compared_with_a_reference() -> None:
    tests = (
        "oracles",
        "classic_control",
        "particle_games",
        "connect_four",
        "skirmish",
        "overcooked",
        "pursuit",
        "warehouse",
        "commons",
        "economy",
    )
    files = [ROOT / "tests" / "envs" / f"test_{name}.py" for name in tests]
    compared = {word for path in files for word in re.findall(r'"(\w+)"', path.read_text(encoding="utf-8"))}
    assert {name for name, game in GAMES.items() if game.__module__.startswith("gpu_vecenv.")} <= compared
