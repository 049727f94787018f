"""benchmarks/: command lines, what a run measures and writes, and refusals."""

import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import chart, learning, ours, reaching, table  # noqa: E402
from benchmarks.__main__ import Side, main, parse, workloads_of  # noqa: E402
from benchmarks.errors import BenchmarkError  # noqa: E402
from benchmarks.peers import PEERS, ai_economist  # noqa: E402
from benchmarks.workload import Algorithm, Request, Workload  # noqa: E402
from gpu_vecenv.envs.registry import configure  # noqa: E402


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_driver_is_parsed_and_names_games_that_exist(peer: str, device: str) -> None:
    assert parse([peer, "--device", device, "--repeats", "12"]).repeats == 12
    module = importlib.import_module(f"benchmarks.peers.{peer}")
    for workload in module.PEER.workloads(device):
        configure(workload.game, **workload.config)
        assert (workload.updates > 0) == (workload.kind == "training")
        batch = workload.num_envs * workload.num_steps
        assert batch % workload.num_minibatches == 0
        assert workload.needs_published == (workload.algorithm != "ppo")
        request = Request(workload.reduced(), device, "float32")
        assert Request.from_dict(json.loads(json.dumps(request.as_dict()))) == request
    assert module.PEER.requirements and callable(module.prepare)


def test_each_module_of_a_peer_is_listed() -> None:
    declared = {path.stem for path in (ROOT / "benchmarks" / "peers").glob("*.py") if "PEER = " in path.read_text()}
    assert declared == set(PEERS)
    rows = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert [peer for peer in PEERS if f"\n| `{peer}` |" not in rows] == []


@pytest.mark.slow
def test_a_quick_run_alternates_and_gives_medians_and_quartiles(tmp_path: Path) -> None:
    done = command("gymnasium", "--quick", "--no-install", "--repeats", "4", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed == [*results["rows"], {key: value for key, value in results.items() if key != "rows"}]
    assert results["repeats"] == 4 and {"commit", "device", "versions", "torch"} <= results.keys()
    for row in results["rows"]:
        rates: dict[str, Any] = {}
        for side in ("ours", "theirs"):
            rates[side] = row[f"{side}_env_steps_per_repeat"] / np.array(row[f"{side}_seconds"])
            assert len(rates[side]) == 4
            told = row[f"{side}_env_steps_per_s"]
            # Rates are rounded to four digits, times to a microsecond.
            assert [*told["quartiles"], told["median"]] == pytest.approx(np.percentile(rates[side], [25, 75, 50]), 1e-3)
        ratio = np.percentile(rates["ours"] / rates["theirs"], 50)
        assert row["ratio"]["median"] == pytest.approx(ratio, 1e-2)  # three digits
        turns = sorted(
            (start, start + seconds, side)
            for side in ("ours", "theirs")
            for start, seconds in zip(row[f"{side}_started_s"], row[f"{side}_seconds"], strict=True)
        )
        assert [side for *_, side in turns] == ["ours", "theirs", "theirs", "ours"] * 2
        assert all(end <= start for (_, end, _), (start, *_) in itertools.pairwise(turns))


def test_rows_are_chosen_by_kind_game_and_environments() -> None:
    peer = importlib.import_module("benchmarks.peers.jaxmarl").PEER
    options = ["--device", "cuda", "--kind", "simulation", "--game", "overcooked", "skirmish"]
    chosen = workloads_of(peer, parse(["jaxmarl", *options, "--num-envs", "1024"]))
    assert {(each.kind, each.game, each.num_envs) for each in chosen} == {
        ("simulation", "overcooked", 1024),
        ("simulation", "skirmish", 1024),
    }
    assert {each.num_envs for each in workloads_of(peer, parse(["jaxmarl", *options]))} > {1024, 100_000}
    with pytest.raises(BenchmarkError, match=r"has no workload on 'cuda' here with kind simulation, .*num_envs 3$"):
        workloads_of(peer, parse(["jaxmarl", *options, "--num-envs", "3"]))


def test_a_file_is_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    workloads = importlib.import_module("benchmarks.peers.gymnasium").PEER.workloads("cpu")
    known = [{**workload.reduced().row(), "ratio": 1} for workload in workloads]
    file.write_text(json.dumps({"peer": "gymnasium", "commit": "old", "rows": known}))
    arguments = ["gymnasium", "--quick", "--no-install", "--json", str(file), "--resume"]
    main(arguments)  # starts no process: nothing is left to measure
    assert json.loads(capsys.readouterr().out) == {"peer": "gymnasium", "commit": "old"}
    file.write_text(json.dumps({"peer": "gymnasium", "commit": "old", "rows": []}))
    main([*arguments, "--max-seconds", "0"])
    assert "--resume measures the other rows" in capsys.readouterr().err
    assert json.loads(file.read_text())["rows"] == []


@pytest.mark.slow
def test_rows_of_another_commit_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"peer": "gymnasium", "commit": "old", "rows": [{"kind": "simulation"}]}))
    done = command("gymnasium", "--quick", "--no-install", "--repeats", "2", "--resume", "--json", str(file))
    assert done.returncode == 1 and "has rows of commit old, now " in done.stderr
    assert json.loads(file.read_text())["rows"] == [{"kind": "simulation"}]


@pytest.mark.parametrize(
    "game, config", [("connect_four", {}), ("skirmish", {"scenario": "3s5z"}), ("economy", {"max_steps": 50})]
)
def test_our_side_draws_what_masks_allow(game: str, config: dict[str, Any]) -> None:
    prepared, env = ours.simulation(Request(Workload("simulation", game, 4, 60, config=config), "cpu", "float32"))
    prepared.run()
    assert not env.faults().any() and (env.data["engine_episode"] > 0).any()


def test_the_ai_economist_is_played_with_allowed_actions_all_equally_likely() -> None:
    masks = np.array([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], np.float32)
    draws = (np.arange(9) + 0.5) / 9
    chosen = np.array([ai_economist.choose(masks, np.full(3, draw)) for draw in draws])
    assert chosen.T.tolist() == [[1] * 3 + [3] * 3 + [4] * 3, [0] * 9, [4] * 9]


def test_a_peer_without_the_device_is_refused() -> None:
    done = command("warpdrive", "--no-install")
    assert done.returncode == 1 and done.stdout == ""
    assert "WarpDrive does not run on 'cpu' here; use --device cuda" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--repeats", "1"], "--repeats is 1; expected at least 2"),
        (["--precision", "tf32"], "--precision is tf32, which a CPU does not have"),
        (["--processors", "0"], "--processors is 0; expected 1 to"),
        (["--json", "absent/out.json"], "--json is absent/out.json; expected a file in a folder that exists"),
        (["--published", "absent"], "--published is absent; expected a folder"),
        (["--resume"], "--resume goes on with the rows of --json; expected both"),
    ],
)
def test_options_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["gymnasium", *arguments])
    assert message in capsys.readouterr().err


def test_training_that_needs_published_scripts_is_left_out_without_them() -> None:
    done = command("jaxmarl", "--no-install", "--quick", "--algorithm", "ppo_rnn")
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
    assert (
        "JaxMARL has no training by 'ppo_rnn' on 'cpu' here; scripts that are not on PyPI need --published"
        in done.stderr
    )


@pytest.mark.parametrize("algorithm", ["ppo", "ppo_rnn", "mappo_rnn", "pqn_vdn_rnn"])
def test_our_side_trains_by_every_algorithm(algorithm: Any) -> None:
    workload = Workload("training", "simple_spread", 4, 8, 1, algorithm=algorithm, num_minibatches=2, hidden_size=8)
    prepared = ours.prepare(Request(workload, "cpu", "float32"))
    prepared.run()
    assert prepared.num_agents == 3 and workload.row()["algorithm"] == algorithm


@pytest.mark.parametrize(
    "game, config, algorithm, num_agents",
    [("overcooked", {"layout_name": "cramped_room"}, "ppo_cnn", 2), ("skirmish", {"scenario": "3m"}, "mappo_rnn", 3)],
)
def test_our_side_trains_on_games_of_papers(game: str, config: Any, algorithm: Any, num_agents: int) -> None:
    workload = Workload("training", game, 2, 4, 1, config, algorithm, 1, 2, hidden_size=8)
    prepared = ours.prepare(Request(workload, "cpu", "float32"))
    prepared.run()
    assert prepared.num_agents == num_agents


def test_returns_of_each_seed_are_added_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "learning.json"
    sizes = ["--num-envs", "4", "--env-steps", "1100", "--seeds", "2"]  # two rollouts of 128 steps, and a rest
    for count in (1, 2):
        learning.main(["gpu_vecenv", "--algorithm", "ppo", *sizes, "--json", str(file)])
        rows = json.loads(file.read_text())["rows"]
        assert len(rows) == count and json.loads(capsys.readouterr().out) == rows[-1]
    first, second = rows
    assert first["env_steps"] == 1024 and first["returns"] == second["returns"]
    assert len(set(first["returns"])) == 2 and all(-100 < x < 0 for x in first["returns"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gpu_vecenv", "--env-steps", "100"], "--env-steps is 100; expected at least"),
        (["jaxmarl"], "--published is missing"),
    ],
)
def test_options_of_learning_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        learning.main([*arguments, "--algorithm", "ppo", "--json", str(tmp_path / "out.json")])
    assert message in capsys.readouterr().err and not any(tmp_path.iterdir())


@pytest.mark.parametrize(("game", "algorithm"), ours.CONFIGS)
def test_published_configurations_train(game: str, algorithm: Algorithm) -> None:
    workload = Workload("training", game, 2, 8, 1, {}, algorithm, 1, 1, hidden_size=8)
    trainer = ours.trainer_of(Request(workload, "cpu", "float32"), total_steps=workload.env_steps)
    with closing(trainer.env), closing(trainer):
        assert all(math.isfinite(value) for key, value in trainer.train_iteration().items() if "loss" in key)


def won_battles() -> Workload:
    """A training on battles that allies win, whatever they do."""
    config = {"scenario": "9s_vs_1m", "start_spread": 1.0}
    return Workload("training", "skirmish", 2, 4, 20, config, "mappo_rnn", 1, 1, hidden_size=4)


def test_scores_are_those_of_ended_episodes() -> None:
    logged: list[tuple[int, float]] = []

    def log(env_steps: int, score: float) -> bool:
        logged.append((env_steps, score))
        return score == 1.0

    facts = ours.watch(Request(won_battles(), "cpu", "float32"), 0, log)
    assert facts["provenance"]["device"] and [steps for steps, _ in logged] == [8 * (k + 1) for k in range(len(logged))]
    assert math.isnan(logged[0][1]) and logged[-1][1] == 1.0 and len(logged) < 20


def test_verbose_prints_every_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reaching, "TRAININGS", (won_battles(),))
    file = tmp_path / "out.json"
    arguments = ["gpu_vecenv", "--game", "skirmish", "--json", str(file)]
    reaching.main(arguments)
    assert len(capsys.readouterr().out.splitlines()) == 1  # the row
    reaching.main([*arguments, "--verbose"])
    lines = capsys.readouterr().out.splitlines()
    told = re.findall(r"^\d+\.\d s, (\d+) env-steps: (\S+)$", "\n".join(lines), re.MULTILINE)
    assert len(told) == len(lines) - 1 and [int(steps) for steps, _ in told] == [8 * (k + 1) for k in range(len(told))]
    assert told[:1] == [("8", "nan")] and told[-1][1] == "1.0000"
    curve = json.loads(file.read_text())["rows"][1]["curve"]
    assert [[int(steps), float(score)] for steps, score in told if score != "nan"] == [point[1:] for point in curve]


def test_an_algorithm_that_a_game_has_no_training_by_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit):
        reaching.main(["gpu_vecenv", "--game", "skirmish", "--algorithm", "ppo_cnn", "--json", str(file)])
    assert "ppo_cnn; expected, of skirmish, mappo_rnn or pqn_vdn_rnn" in capsys.readouterr().err and not file.exists()


def test_scores_of_several_seeds_are_told_with_quartiles(tmp_path: Path) -> None:
    def row(side: str, seconds: float | None) -> dict[str, Any]:
        reached = {} if seconds is None else {"0.5": {"seconds": seconds, "env_steps": int(seconds * 1e6)}}
        own = {"provenance": dict.fromkeys(("device", "commit", "torch"))} if side == "gpu_vecenv" else {"title": "PQN"}
        common = {"game": "skirmish", "algorithm": "pqn_vdn_rnn", "seconds": 3.0, "curve": [[3.0, 1_000_000, 0.6]]}
        return {**common, **own, "side": side, "reached": reached}

    def told(*theirs: float | None) -> str:
        ours = 2.0, 1.0, None, 3.0, 4.0
        rows = [*(row("gpu_vecenv", each) for each in ours), *(row("jaxmarl", each) for each in theirs)]
        (tmp_path / "a-reaching.json").write_text(json.dumps({"what": "", "rows": rows}), encoding="utf-8")
        return table.score_lines(tmp_path)[2]

    assert told(6.0) == "| `skirmish` | 0.5 | 3.0 s (2.0 … 4.0), 3.00 M | PQN 6.0 s, 6.00 M | 2.00 |"
    assert "PQN 6.0 s (6.0 … not reached), 6.00 M" in told(6.0, 5.0, 6.0, None, None)
    assert told(6.0, None, None) == "| `skirmish` | 0.5 | 3.0 s (2.0 … 4.0), 3.00 M | PQN reached by 1 of 3 |  |"


def test_a_curve_keeps_when_goals_were_reached() -> None:
    curve = reaching.Curve((1.0, 2.0))
    assert [curve.add(*point) for point in ((10, math.nan), (20, 0.5), (30, 1.5), (40, 0.9))] == [False] * 4
    assert curve.reached["1.0"][1] == 30 and [steps for _, steps, _ in curve.points] == [20, 30, 40]
    assert curve.add(50, 2.5) and curve.reached["1.0"][1] == 30 and curve.reached["2.0"][1] == 50
    assert curve.reached["1.0"][0] <= curve.reached["2.0"][0]
    assert [steps for _, steps, _ in curve.thinned(2)] == [20, 40, 50]


@pytest.mark.parametrize("mine", reaching.TRAININGS, ids=lambda mine: f"{mine.game}-{mine.algorithm}")
def test_trainings_to_a_score_are_those_of_the_rows(mine: Workload) -> None:
    peer, which = importlib.import_module("benchmarks.peers.jaxmarl").PEER, (mine.game, mine.algorithm)
    (row,) = (each for each in peer.cuda if (each.game, each.algorithm) == which and 1 < each.num_envs < 1024)
    same = ("num_envs", "num_steps", "num_epochs", "num_minibatches", "hidden_size")
    assert {key: getattr(mine, key) for key in same} == {key: getattr(row, key) for key in same}
    assert len(reaching.GOALS[mine.game]) == 5 and mine.updates > row.updates


def test_a_side_that_does_not_start_says_why() -> None:
    request = Request(Workload("simulation", "cartpole", 2, 2), "cpu", "float32")
    with pytest.raises(BenchmarkError, match=r"(?s)process of absent ended with status 1:.*No module named"):
        Side("absent", sys.executable, request, quick=True)


def test_the_page_of_benchmarks_is_made_of_the_results() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    told = page.partition("<!-- python -m benchmarks.table -->\n")[2].partition("<!-- end -->")[0]
    assert told.splitlines() == table.lines() and told.count("| simulation `") > 15
    assert not any(results.get("quick") for results in table.read())


@pytest.mark.parametrize("theme", chart.THEMES)
def test_the_chart_is_made_of_the_results(theme: str) -> None:
    written = (ROOT / "docs" / "_static" / f"speed-{theme}.svg").read_text(encoding="utf-8")
    assert written == chart.chart(theme) and written.count("<rect") == 14


def test_the_table_of_the_readme_has_the_ratios_of_the_results() -> None:
    """Of each library the least and the most of its rows: on GPUs, or on one processor where it has none there."""
    told = {
        name: re.findall(r"[\d.]+(?= to | \(|,|$)", cells.rpartition("|")[2].strip())
        for name, cells in re.findall(r"^\| (\S.*?) \|(.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    }
    measured: dict[tuple[str, str, str], list[float]] = {}
    for results in table.read():
        for row in results["rows"]:
            where = "GPU" if results["device"].startswith("NVIDIA") else str(results.get("processors"))
            measured.setdefault((row["peer"].split()[0], row["kind"], where), []).append(
                float(table.ratio(row).split()[0].replace(",", ""))
            )

    def ends(peer: str, kind: str, where: str) -> list[str]:
        ratios = measured[peer, kind, where]
        return [f"{each:#.3g}" for each in sorted({min(ratios), max(ratios)})]

    assert told["WarpDrive"] == ends("WarpDrive", "simulation", "GPU")
    assert told["JaxMARL"] == ends("JaxMARL", "simulation", "GPU") + ends("JaxMARL", "training", "GPU")
    assert told["gymnax, PureJaxRL"] == ends("gymnax", "simulation", "GPU") + ends("PureJaxRL", "training", "GPU")
    assert told["pgx"] == ends("pgx", "simulation", "GPU")
    assert told["VMAS"] == ends("VMAS", "simulation", "1")
    assert told["EnvPool"] == ends("EnvPool", "simulation", "1")


def test_a_row_has_medians_and_quartiles_of_three_digits() -> None:
    ours, theirs = {"median": 24.71e6, "quartiles": [999.6e3, 25.1e6]}, {"median": 410.0, "quartiles": [7.04, 1234.0]}
    row = {"kind": "training", "game": "cartpole", "precision": "tf32", "num_envs": 1000, "num_agents": 1}
    row |= {
        "ours_device": "cuda",
        "peer_device": "cpu",
        "peer": "Peer",
        "ratio": {"median": 0.7, "quartiles": [0.06, 2]},
    }
    row |= {"ours_env_steps_per_s": ours, "theirs_env_steps_per_s": theirs}
    assert table.line(row) == (
        "| training `cartpole`, tf32 | 1,000 x 1 | 24.7 M (1.00 … 25.1) | "
        "Peer 410 (7.04 … 1,230) | 0.700 (0.0600 … 2.00) |"
    )


def test_the_times_to_scores_are_what_was_measured() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    told = page.partition("<!-- python -m benchmarks.table scores -->\n")[2].partition("\n```sh")[0]
    assert told.splitlines() == table.score_lines()[:-1] and told.count("| JaxMARL ") == 10
