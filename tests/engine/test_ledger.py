"""The ledger: the host reproduces the digests of a GPU, and a different digest is reported."""

import json

import ledger
import pytest
from support.cases import mostly_exhaustive

import gpu_vecenv
from gpu_vecenv.envs.registry import GAMES, versions


def row(steps=(5, 40), **changes):
    made = {"game": "tag_gridworld", "config": {"max_steps": 7}, "autoreset_mode": "same_step", "num_envs": 8}
    made |= {"seed": 3, "digests": dict.fromkeys(map(str, steps), ""), **changes}
    said = {"device": "a GPU", "sources": ledger.source_sha256(gpu_vecenv.configure(made["game"], **made["config"]))}
    return {**said, **made, "digests": ledger.digests(made, "cpu", steps)}


@pytest.fixture
def written(tmp_path):
    """Write a ledger of these rows; its path."""

    def write(*rows):
        path = tmp_path / "ledger.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_the_ledger_covers_every_game_and_mode_with_enough_steps():
    rows = list(ledger.rows_to_record(100_000_000))
    played = [gpu_vecenv.configure(r["game"], **r["config"]).played_version for r in rows]
    assert {(r["game"], version, r["autoreset_mode"]) for r, version in zip(rows, played, strict=True)} == {
        (name, version, mode)
        for name, game in GAMES.items()
        for version in versions(game)
        for mode in ("same_step", "next_step", "disabled")
    }
    for each in rows:
        agents = gpu_vecenv.configure(each["game"], **each["config"]).num_agents
        steps = [int(steps) * each["num_envs"] * agents for steps in each["digests"]]
        assert 2_000_000 <= steps[0] < 2_100_000
        assert len(steps) == 1 or 100_000_000 <= steps[1] < 105_000_000
        assert (len(steps) == 2) == (each["autoreset_mode"] == "same_step")


@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_recorded_digests_are_reproduced(mode, device):
    made = row(autoreset_mode=mode)
    assert ledger.digests(made, device, (5, 40)) == made["digests"]
    steps = 8 * 5 * 40
    assert ledger.replay(made, steps) == (steps, [])
    assert ledger.replay(made, steps // 2) == (steps // 8, []), "only the first digest"
    assert not ledger.is_stale(made)


@pytest.mark.parametrize("mark", ["5", "40"])
def test_a_different_digest_is_reported(mark, written, capsys):
    good, bad = row(), row(seed=4)
    bad["digests"][mark] = "0" * 16
    assert ledger.main(["replay", "--ledger", str(written(good, bad)), "--agent-steps", "2e3"]) == 1
    said = capsys.readouterr().out
    assert f"{mark} steps: " in said and "0000000000000000 on a GPU" in said
    assert said.endswith("2 rows, 1 differ, 0 stale\n")


@pytest.mark.parametrize("change", [{"seed": 4}, {"num_envs": 9}, {"config": {"max_steps": 8}}])
def test_every_key_of_a_row_matters(change):
    made = row()
    assert ledger.replay({**made, **change}, 10**4)[1]


def test_a_reproduced_ledger_can_write_a_receipt(written, monkeypatch, tmp_path):
    monkeypatch.setattr(
        ledger.receipts.write, "__kwdefaults__", {**ledger.receipts.write.__kwdefaults__, "folder": tmp_path}
    )
    assert ledger.main(["replay", "--ledger", str(written(row(), row(seed=4))), "--receipt"]) == 0
    receipt = ledger.receipts.read("parity", tmp_path)
    assert receipt["metrics"] == {"rows": 2, "agent_steps": {"tag_gridworld": 2 * 8 * 5 * 40}}
    assert "40 steps" in str(receipt["planted"]) or "5 steps" in str(receipt["planted"])
    assert receipt["device"] == "a GPU" and ledger.receipts.stale(receipt) == []


def test_a_row_of_other_device_code_is_stale_but_may_be_reproduced(written, capsys):
    assert ledger.main(["replay", "--ledger", str(written({**row(), "sources": "0" * 64}))]) == 0
    assert capsys.readouterr().out.endswith("(stale)\n1 rows, 0 differ, 1 stale\n")


def test_stale_rows_give_no_receipt(written, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        ledger.receipts.write, "__kwdefaults__", {**ledger.receipts.write.__kwdefaults__, "folder": tmp_path}
    )
    path = written(row(), {**row(), "sources": "0" * 64})
    assert ledger.main(["replay", "--ledger", str(path), "--receipt"]) == 1
    assert "record the ledger again" in capsys.readouterr().out and list(tmp_path.iterdir()) == [path]


@pytest.mark.gpu
def test_the_host_reproduces_what_a_gpu_records(tmp_path, capsys):
    path = tmp_path / "new" / "ledger.jsonl"
    assert ledger.main(["record", "--agent-steps", "2e6", "--ledger", str(path)]) == 0
    assert len(ledger.read(path)) == 3 * (sum(len(versions(game)) for game in GAMES.values()) + len(ledger.ALSO))
    assert ledger.main(["replay", "--ledger", str(path)]) == 0


SAME_STEP = [recorded for recorded in ledger.read() if recorded["autoreset_mode"] == "same_step"]
# Half a minute each. What these games do on a CPU, tests/envs/test_game_versions.py compares with its table.
LONG = {"economy", "cleanup", "harvest"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recorded",
    mostly_exhaustive(SAME_STEP, [recorded for recorded in SAME_STEP if recorded["game"] not in LONG]),
    ids=lambda recorded: recorded["game"],
)
def test_the_host_reproduces_the_digests_of_a_gpu(recorded, shipped_flags):
    """2 million agent-steps of each game; ``python tests/ledger.py replay`` does so in every mode."""
    assert ledger.replay(recorded, ledger.SHORT)[1] == []
