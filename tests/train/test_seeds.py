"""Several seeds at a time: each run equals the one of its seed alone, bit by bit, also resumed, stopped or failed."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from reliability.resume import DEADLINE, differences, ended, process, saved, table, wait_for

import gpu_vecenv
from gpu_vecenv.cli.main import main
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import RunConfig, run, run_seeds
from gpu_vecenv.train.seed_statistics import bootstrap_interval
from gpu_vecenv.train.trainer import Trainer

SEEDS = (3, 4, 5)
PAIRINGS = [f"{role} against {name}" for role in ("tagger", "runner") for name in ("random", "still", "initial")]
ITERATIONS, STEPS = 6, 16  # env-steps of an iteration with these options
OPTIONS = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --normalize-obs".split()
OPTIONS += "--checkpoint-seconds 0 --keep 100 --digests --episodes 4 --best-episodes 4 --best-interval 0".split()
GRID = ["train", "tag_gridworld", "--max-steps", "5", *OPTIONS]
SHORT = PPOConfig(total_steps=4 * STEPS, num_steps=4, num_minibatches=2, num_epochs=1, hidden_sizes=(8,))


pytestmark = pytest.mark.usefixtures("one_thread", "without_pictures")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, device):
    """Folder of the runs of all seeds together, "many", and of each alone, "alone-<seed>". Only to be read."""
    folder = tmp_path_factory.mktemp("seeds")
    options = [*GRID, "--device", device, "--total-steps", str(ITERATIONS * STEPS)]
    assert main([*options, "--seeds", str(len(SEEDS)), "--seed", "3", "--out", str(folder / "many")]) == 0
    for seed in SEEDS:
        assert main([*options, "--seed", str(seed), "--out", str(folder / f"alone-{seed}")]) == 0
    return folder


def of_seed(many, seed):
    return many / f"seed-{seed}"


def test_each_seed_is_bitwise_the_run_of_it_alone(runs):
    for seed in SEEDS:
        one, alone = of_seed(runs / "many", seed), runs / f"alone-{seed}"
        assert differences(one, alone) == []
        assert {path.name for path in one.iterdir()} == {path.name for path in alone.iterdir()}
        assert (one / "settings.json").read_bytes() == (alone / "settings.json").read_bytes()
    weights = [tuple(row["weights"] for row in table(of_seed(runs / "many", seed))) for seed in SEEDS]
    assert len(set(weights)) == len(SEEDS) and all(len(set(one)) == ITERATIONS for one in weights)


def test_beside_the_runs_are_their_seeds_the_curve_and_the_evaluation_of_all(runs):
    many = runs / "many"
    assert json.loads((many / "seeds.json").read_text()) == {"seeds": list(SEEDS)}
    assert (many / "learning_curve.png").stat().st_size > 0
    found = json.loads((many / "evaluation.json").read_text())
    each = {str(seed): json.loads((of_seed(many, seed) / "evaluation.json").read_text()) for seed in SEEDS}
    assert found.pop("seeds") == each
    for name, summary in found.items():
        returns = [one[name]["return_tagger"] for one in each.values()]
        assert summary["mean"]["return_tagger"] == pytest.approx(sum(returns) / len(returns), abs=1e-9)
        assert summary["worst"]["return_tagger"] == min(returns)
        assert set(summary["worst"]) == {f"{s}return_{r}" for r in ("tagger", "runner") for s in ("", "worst_")}
        interval = bootstrap_interval(returns)
        names = ("interquartile_mean", "interval_low", "interval_high")
        assert tuple(summary[statistic]["return_tagger"] for statistic in names) == interval
        assert summary["worst"]["worst_return_tagger"] == min(one[name]["worst_return_tagger"] for one in each.values())
    assert list(found) == ["all random", *PAIRINGS, "all trained"]


def test_the_table_and_the_progress_tell_of_all_seeds(command, monkeypatch, device):
    monkeypatch.setenv("GPU_VECENV_PROGRESS_SECONDS", "0")
    options = ["--device", device, "--total-steps", 5 * STEPS]
    code, output, errors = command(*GRID, *options, "--seeds", 2, "--out", "many")
    assert (code, errors) == (0, [])
    assert "seeds 0, 1, run folder many\niterations 1 to 5 of " in output
    (last,) = re.findall(r"^train: 100%.*$", output, re.MULTILINE)
    number = r"-?\d+\.\d\d"
    assert re.search(rf"2 seeds  return: tagger {number} \(worst {number}\) runner {number} \(worst {number}\)", last)
    pairings = [*PAIRINGS, "all trained"]
    by_row, pairing = {}, None
    for line in re.split("─+ *\n", output)[-1].partition("learning curve")[0].splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        if not line.startswith("  "):
            pairing = name
        numbers = [float(cell) for cell in cells if re.fullmatch(r"-?[\d.]+", cell)]
        by_row[pairing, name] = numbers
    for pairing in pairings:
        ones = [by_row[pairing, f"seed {seed}"][1] for seed in (0, 1)]
        assert by_row[pairing, "worst"][0] == min(ones)
        assert len(by_row[pairing, "IQM, low"]) == 2
        assert by_row[pairing, "mean"][1] == pytest.approx(sum(ones) / 2, abs=0.01)  # printed with two digits


@pytest.mark.usefixtures("pictures")
def test_other_commands_work_on_each_run(runs, command, device):
    one = of_seed(runs / "many", 4)
    code, output, _ = command("evaluate", one, "--device", device, "--episodes", 4, "--json")
    assert code == 0 and json.loads(output)["episodes"] == 4
    assert command("plot", *(of_seed(runs / "many", seed) for seed in SEEDS), "--out", "curves.png")[0] == 0
    assert command("plot", runs / "many", "--out", "folder.png")[0] == 0
    assert Path("folder.png").read_bytes() == Path("curves.png").read_bytes()
    assert command("replay", "record", one, "--out", "episode.json", "--device", device)[0] == 0


# Resumed


def interrupted(many, iterations, folder):
    """A copy of the runs as they were after so many iterations of each seed."""
    copy = shutil.copytree(many, folder)
    for seed, done in iterations.items():
        for path in (of_seed(copy, seed) / "checkpoints").glob("iteration-*"):
            if int(re.search(r"\d+", path.name)[0]) > done:
                path.unlink()
        for later in ("evaluation.json", "learning_curve.png"):
            (of_seed(copy, seed) / later).unlink(missing_ok=True)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("done", [(3, 3, 3), (2, 5, 6)], ids=["the same iteration", "others, one of them the last"])
def test_all_seeds_are_resumed(done, runs, command, tmp_path):
    copy = interrupted(runs / "many", dict(zip(SEEDS, done, strict=True)), tmp_path / "copy")
    (copy / "evaluation.json").unlink()
    code, output, errors = command("train", "--resume", copy)
    assert (code, errors) == (0, []) and f"iterations {min(done) + 1} to {ITERATIONS}" in output
    for seed in SEEDS:
        assert differences(of_seed(copy, seed), of_seed(runs / "many", seed)) == []
    assert (copy / "evaluation.json").read_bytes() == (runs / "many" / "evaluation.json").read_bytes()


def test_a_seed_that_has_no_checkpoint_begins_anew(runs, command, tmp_path):
    copy = interrupted(runs / "many", {3: 2, 4: 2, 5: 4}, tmp_path / "copy")
    shutil.rmtree(of_seed(copy, 4) / "checkpoints")
    code, _, errors = command("train", "--resume", copy)
    assert (code, errors) == (0, [])
    for seed in SEEDS:
        assert differences(of_seed(copy, seed), of_seed(runs / "many", seed)) == []


def test_a_run_in_a_folder_of_seeds_without_checkpoints_is_a_run(command, device, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "seeds.json").write_text('{"seeds": [0, 1]}')
    options = [*GRID, "--device", device, "--total-steps", STEPS, "--out", "folder"]
    assert command(*options)[0] == 0 and not (tmp_path / "folder" / "seeds.json").exists()
    assert command("train", "--resume", "folder", "--total-steps", 2 * STEPS)[0] == 0


def test_a_seed_is_resumed_alone(runs, command, tmp_path):
    copy = interrupted(runs / "many", {4: 2}, tmp_path / "copy")
    assert command("train", "--resume", of_seed(copy, 4))[0] == 0
    for seed in SEEDS:
        assert differences(of_seed(copy, seed), of_seed(runs / "many", seed)) == []


@pytest.mark.slow
def test_all_seeds_may_be_given_another_end(runs, command, tmp_path):
    copy = shutil.copytree(runs / "many", tmp_path / "copy")
    assert command("train", "--resume", copy, "--total-steps", (ITERATIONS + 2) * STEPS)[0] == 0
    assert [len(table(of_seed(copy, seed))) for seed in SEEDS] == [ITERATIONS + 2] * len(SEEDS)


@pytest.mark.slow
def test_a_signal_saves_a_checkpoint_of_each_seed_and_prints_how_to_resume(runs, command, device, tmp_path):
    many = tmp_path / "run"
    options = [*GRID, "--device", device, "--seed", 3, "--seeds", len(SEEDS), "--total-steps", 200 * STEPS]
    with ended(process(tmp_path, *options, "--out", many)) as running:
        wait_for(running, lambda: saved(of_seed(many, SEEDS[-1])) > 1)
        running.send_signal(signal.SIGTERM)
        assert running.wait(DEADLINE) == 143
    output = (tmp_path / "output.txt").read_text()
    assert (tmp_path / "errors.txt").read_text().startswith("\nSIGTERM: stops after this iteration and saves")
    assert f"SIGTERM: saved checkpoints of 3 seeds in {many}\n" in output
    (done,) = {saved(of_seed(many, seed)) for seed in SEEDS}
    assert 1 < done < 200
    (words,) = re.findall(r"^resume with: gpu-vecenv (.*)$", output, re.MULTILINE)
    assert command(*words.split(), "--total-steps", (done + 2) * STEPS)[0] == 0
    assert [len(table(of_seed(many, seed))) for seed in SEEDS] == [done + 2] * len(SEEDS)


# Failed


def trainers(device, rewards=(None, None, None), **changes):
    arguments = {"config": SHORT, **changes}
    for seed, reward in zip(SEEDS, rewards, strict=True):
        env = gpu_vecenv.make("tag_gridworld", 4, device, max_steps=5)
        yield Trainer(env, seed=seed, reward=reward, **arguments)


def not_finite(transition):
    return transition.rewards / 0


@pytest.mark.slow
def test_a_seed_that_fails_is_named_at_the_end_and_the_others_go_on(device, tmp_path):
    config = RunConfig(episodes=4, best_episodes=0, checkpoint_seconds=0, keep=100)
    with pytest.raises(NonFiniteError, match=r"^seed 4: iteration 1: losses .* are not finite; rewards that .*"):
        run_seeds(list(trainers(device, (None, not_finite, None))), tmp_path / "many", config)
    for trainer in trainers(device):
        if trainer.seed != 4:
            run(trainer, tmp_path / f"alone-{trainer.seed}", config)
            assert differences(of_seed(tmp_path / "many", trainer.seed), tmp_path / f"alone-{trainer.seed}") == []
    failed = of_seed(tmp_path / "many", 4)
    assert table(failed) == [] and not (failed / "evaluation.json").exists() and saved(failed) == 0
    assert set(json.loads((tmp_path / "many" / "evaluation.json").read_text())["seeds"]) == {"3", "5"}


def stopping(transition):
    """Sends SIGTERM to this process as soon as it handles it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        signal.raise_signal(signal.SIGTERM)
    return transition.rewards


def test_a_signal_does_not_hide_a_seed_that_failed(device, tmp_path, capsys):
    config = RunConfig(episodes=4, best_episodes=0, checkpoint_seconds=0)
    assert run_seeds(list(trainers(device, (None, not_finite, stopping))), tmp_path / "many", config) == 143
    output = capsys.readouterr().out
    assert re.search(r"^seed 4: iteration 1: losses .* are not finite", output, re.MULTILINE)
    assert "SIGTERM: saved checkpoints of 2 seeds in" in output
    assert [saved(of_seed(tmp_path / "many", seed)) for seed in SEEDS] == [1, 0, 1]


def test_where_all_seeds_fail_there_are_no_results(device, tmp_path):
    with pytest.raises(NonFiniteError, match=r"seed 3: .*; seed 4: .*; seed 5: "):
        run_seeds(list(trainers(device, (not_finite,) * 3)), tmp_path, RunConfig(episodes=4))
    assert not (tmp_path / "evaluation.json").exists()


# Refused


def refused(result, message):
    code, output, errors = result
    assert (code, output, len(errors)) == (2, "", 1) and re.search(message, errors[0]), result


def test_folders_with_runs_are_left_as_they_are(runs, command, device):
    many, alone = runs / "many", runs / "alone-3"
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    for folder in (many, alone):
        for options in ([], ["--seeds", 2, "--seed", 11]):
            result = command(*GRID, "--device", device, "--total-steps", STEPS, *options, "--out", folder)
            refused(
                result,
                f"{folder} already has a run; use another folder, or resume it: gpu-vecenv train --resume {folder}$",
            )
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", [".", "seed-4"])
def test_a_folder_in_which_another_process_trains_is_refused(name, runs, command, tmp_path):
    from filelock import FileLock

    copy = shutil.copytree(runs / "many", tmp_path / "copy")
    with FileLock(copy / name / ".lock"):
        refused(command("train", "--resume", copy), "another process trains in")
    new = tmp_path / "new"
    (new / name).mkdir(parents=True)
    with FileLock(new / name / ".lock"):
        options = ["--seed", 3, "--seeds", 3, "--total-steps", STEPS, "--device", "cpu", "--out", new]
        refused(command(*GRID, *options), "another process trains in")
    assert {path.name for path in new.rglob("*") if path.is_file()} <= {".lock"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", 0], r"seeds is 0; expected"),
        (["--seeds", -1], r"seeds is -1; expected"),
        (["--seeds", 2, "--seed", 2**64 - 1], r"seed is 18446744073709551616"),
        (["--seeds", 2, "--wandb", "project"], "wandb is 'project', but it logs one run of a process, not 2"),
        (["--seeds", 2, "--best-metric", "return_nobody"], "best_metric is 'return_nobody'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(options, message, command, tmp_path, device):
    refused(command(*GRID, "--device", device, "--total-steps", STEPS, *options, "--out", "many"), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{}", '{"seeds": []}', '{"seeds": 3}', '{"seeds": ["3"]}', "[3]"])
def test_a_damaged_list_of_seeds_is_refused(content, runs, command, tmp_path):
    copy = shutil.copytree(runs / "many", tmp_path / "copy")
    (copy / "seeds.json").write_text(content)
    refused(command("train", "--resume", copy), r"seeds\.json is damaged or of another version: ")


def test_wrong_trainers_are_refused(device, tmp_path):
    one, *_ = trainers(device)
    same_seed = Trainer(gpu_vecenv.make("tag_gridworld", 4, device), SHORT, seed=3)
    shared = Trainer(one.env, SHORT, seed=9)
    for given, error, message in (
        ([], ConfigError, "there are no trainers"),
        ([one, same_seed], ConfigError, r"the seeds are \[3, 3\]; expected each once"),
        ([one, shared], ConfigError, "trainers share an environment"),
        ([one, None], TypeError, "trainers has a NoneType; expected trainers"),
    ):
        with pytest.raises(error, match=message):
            run_seeds(given, tmp_path / "many", RunConfig(episodes=4))
    assert not (tmp_path / "many").exists()
