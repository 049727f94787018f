"""Runs that are interrupted: by signals, by SIGKILL, by damage; and going on from what they left, bit by bit."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reliability.resume import DEADLINE, differences, ended, kill_and_resume, names, process, same_bits, saved, table
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.checkpoint import load_checkpoint, save_checkpoint
from gpu_vecenv.train.plots import METRICS_FILE
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.trainer import Trainer

TINY = "--num-envs 4 --num-steps 4 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8".split()
STEPS = 16  # of an iteration with these options
SHORT = PPOConfig(total_steps=STEPS, num_steps=4, num_minibatches=2, num_epochs=1, hidden_sizes=(8,))
KEPT = "--checkpoint-seconds 0 --keep 100 --digests --episodes 4 --best-episodes 4 --best-interval 0".split()
GRID = "tag_gridworld --max-steps 5".split()
# Nothing depends on the end of the run.
CONSTANT = "--final-learning-rate None --final-clip None --final-entropy-coefficient None"


pytestmark = pytest.mark.usefixtures("one_thread", "without_pictures")


@pytest.fixture
def command(command):
    """The same with lines of output."""

    def run(*arguments):
        code, output, errors = command(*arguments)
        return code, output.splitlines(), errors

    return run


def test_a_trainer_that_failed_resumes_from_a_checkpoint_like_a_new_one(device, tmp_path):
    config = dataclasses.replace(SHORT, total_steps=9 * STEPS, normalize_returns=True, normalize_obs=True)

    def made():
        env = gpu_vecenv.make("cartpole", 4, device, max_steps=7, autoreset_mode="next_step")
        return Trainer(env, config)

    failed, new = made(), made()
    for _ in range(3):
        failed.train_iteration()
    path = failed.save(tmp_path / "checkpoint")
    failed.env.state["x"].fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        failed.train_iteration()
    for trainer in (failed, new):
        trainer.load(path)
        trainer.train_iteration()
    assert equal_bits(failed.state()[0], new.state()[0])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Where runs lie that tests take copies of."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def trained(command, device, runs, tmp_path):
    """Gives a run of so many iterations that went through undisturbed; its folder."""

    def make(name, iterations, *options, game=GRID):
        options = [*game, *TINY, *KEPT, "--device", device, "--total-steps", iterations * STEPS, *options]
        made = runs / hashlib.sha256(repr(options).encode()).hexdigest()[:16]
        if not made.exists():
            code, _, errors = command("train", *options, "--out", made)
            assert (code, errors) == (0, [])
        shutil.copytree(made, tmp_path / name)
        return tmp_path / name

    return make


def file_of(run, iteration):
    return run / "checkpoints" / f"iteration-{iteration:08d}.safetensors"


def interrupted(run, iteration, name="interrupted"):
    """A copy of a run as it was after an iteration; its table, tensorboard and best checkpoint are ahead of it."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    for found in names(copy):
        if (match := re.fullmatch(r"iteration-(\d+)\.safetensors", found)) and int(match[1]) > iteration:
            (copy / "checkpoints" / found).unlink()
    for later in ("evaluation.json", "learning_curve.png"):
        (copy / later).unlink(missing_ok=True)
    return copy


def flip(path, place=-1):
    """Damage one byte, by default the last one of a tensor."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def refusal(result):
    """The one line of an error."""
    code, _, errors = result
    assert code == 2 and len(errors) == 1 and errors[0].startswith("gpu-vecenv: error: "), result
    return errors[0]


# Killed


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_phase_ends_like_one_that_was_left_alone(device, random_seed, tmp_path):
    assert kill_and_resume(tmp_path, 4, device=device, seed=random_seed) == []


# Signals

LONG = [*GRID, *TINY, *KEPT, *f"--num-epochs 4 --total-steps {40 * STEPS}".split()]


def until(running, there):
    """Wait for what a process does."""
    end = time.monotonic() + DEADLINE
    while not there():
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_a_checkpoint_and_prints_how_to_resume(number, code, command, device, runs, tmp_path):
    with ended(process(tmp_path, "train", *LONG, "--device", device, "--out", tmp_path / "run")) as running:
        until(running, lambda: saved(tmp_path / "run") > 1)
        running.send_signal(number)
        assert running.wait(DEADLINE) == code
    output = (tmp_path / "output.txt").read_text()
    again = "Ctrl-C again stops" if number == signal.SIGINT else "another SIGTERM stops"
    said = f"\n{number.name}: stops after this iteration and saves a checkpoint; {again} at once, without one\n"
    assert (tmp_path / "errors.txt").read_text() == said
    (path,) = re.findall(rf"^{number.name}: saved (.*)$", output, re.MULTILINE)
    done = saved(tmp_path / "run")
    assert 1 < done < 40 and Path(path) == file_of(tmp_path / "run", done)
    assert [row["iteration"] for row in table(tmp_path / "run")] == [str(i) for i in range(1, done + 1)]
    assert not (tmp_path / "run" / "evaluation.json").exists()
    (words,) = re.findall(r"^resume with: gpu-vecenv (.*)$", output, re.MULTILINE)
    assert command(*words.split())[0] == 0
    alone = runs / f"long-{device}"
    assert alone.exists() or command("train", *LONG, "--device", device, "--out", alone)[0] == 0
    assert differences(alone, tmp_path / "run") == []


def test_a_signal_after_the_last_iteration_is_not_lost(tmp_path, capfd):
    """It arrives after all have looked for one, as the handlers are about to be removed."""
    trainer = Trainer(gpu_vecenv.make("cartpole", 4, "cpu", max_steps=7, autoreset_mode="next_step"), SHORT)
    entered = 0

    def send(frame, event, argument):
        nonlocal entered
        if event == "call" and frame.f_code.co_name == "_stop_signal":
            entered += 1
            if entered == 2:  # at the end of its block
                os.kill(os.getpid(), signal.SIGTERM)

    sys.setprofile(send)
    try:
        code = run(trainer, tmp_path, RunConfig(episodes=4, best_episodes=0))
    finally:
        sys.setprofile(None)
    assert (entered, code) == (2, 143) and "SIGTERM: saved" in capfd.readouterr().out
    assert trainer.iteration == saved(tmp_path) == 1 and not (tmp_path / "evaluation.json").exists()


def cpu_seconds(pid):
    """Of work that a process has done: however busy the machine, it has come past its signals."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="the system does not tell how long a process has worked"
)
def test_a_second_interrupt_ends_at_once(device, tmp_path):
    """In the middle of an iteration that would take hours."""
    run = tmp_path / "run"
    options = [*GRID, *TINY, *KEPT, "--num-epochs", 10**7, "--total-steps", 10 * STEPS, "--device", device]
    with ended(process(tmp_path, "train", *options, "--out", run)) as running:
        until(running, (run / "metrics.csv").exists)
        worked = cpu_seconds(running.pid)
        until(running, lambda: cpu_seconds(running.pid) > worked + 1)  # the iteration has begun
        running.send_signal(signal.SIGINT)
        said = "\nSIGINT: stops after this iteration and saves a checkpoint; Ctrl-C again stops at once, without one\n"
        until(running, lambda: (tmp_path / "errors.txt").read_text() == said)
        running.send_signal(signal.SIGINT)
        assert running.wait(DEADLINE) == 130
    assert (tmp_path / "errors.txt").read_text() == f"{said}gpu-vecenv: interrupted\n"
    (words,) = re.findall(
        r"^resume from the last checkpoint with: gpu-vecenv (.*)$", (tmp_path / "output.txt").read_text(), re.MULTILINE
    )
    assert words == f"train --resume {run}"
    assert saved(run) == len(table(run)) == 0 and "saved" not in (tmp_path / "output.txt").read_text()


# Going on

CASES = {
    "a policy for each role": (GRID, []),
    "one for all": (GRID, ["--sharing", "all"]),
    "hyper-parameters of their own": (
        GRID,
        ["--policies", '{"tagger": {"learning_rate": 0.01, "gamma": 0.9, "target_kl": 1e-3}, "runner": {"clip": 0.1}}'],
    ),
    "other layers": (GRID, ["--policies", '{"runner": {"hidden_sizes": [4, 4], "normalize_obs": true}}']),
    "normalisers and a Box": (
        "pendulum --max-steps 5".split(),
        "--normalize-obs --normalize-returns --squash tanh --no-shared-trunk".split(),
    ),
    "A2C": (GRID, ["--algorithm", "a2c", "--num-minibatches", "1"]),
    "masks and agents that leave": ("tag_continuous --max-steps 5 --num-taggers 3 --num-runners 4".split(), []),
    "states of a GRU": (GRID, ["--network", "gru", "--sequence-length", "2"]),
    "a best figure of one's own": (GRID, ["--best-metric", "episode_length"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one(what, command, trained):
    game, options = CASES[what]
    alone = trained("alone", 8, *options, game=game)
    copy = interrupted(alone, 3)
    assert command("train", "--resume", copy)[0] == 0
    assert differences(alone, copy) == []
    weights = [row["weights"] for row in table(copy)]
    assert len(set(weights)) == 8  # each iteration has learned something


def test_frozen_roles_stay_what_they_were_although_their_run_is_gone(command, trained):
    other = trained("other", 2)
    frozen, _ = load_checkpoint(file_of(other, 2))
    alone = trained("alone", 6, "--frozen", "tagger=other")
    shutil.rmtree(other)
    copy = interrupted(alone, 2)
    assert command("train", "--resume", copy)[0] == 0
    assert differences(alone, copy) == []
    tensors, manifest = load_checkpoint(file_of(copy, 6))
    own = [name for name in frozen if name.startswith("policy.tagger.")]
    assert manifest["trained"] == ["runner"] and own and all(tensors[name].equal(frozen[name]) for name in own)
    assert not any(name.startswith("optimizer.tagger") for name in tensors)


def test_a_finished_run_that_is_resumed_is_only_evaluated(command, trained):
    alone = trained("alone", 3)
    again = interrupted(alone, 3)
    code, output, errors = command("train", "--resume", again)
    extended = f"gpu-vecenv train --resume {again} --total-steps {6 * STEPS}"
    assert (code, errors) == (0, []) and f"all iterations are done; to train twice as long: {extended}" in output
    assert differences(alone, again) == [] and (again / METRICS_FILE).read_text() == (alone / METRICS_FILE).read_text()


def test_a_run_may_be_given_another_end(command, trained):
    alone, copy = (trained(name, n, *CONSTANT.split()) for name, n in (("alone", 9), ("short", 3)))
    assert command("train", "--resume", copy, "--total-steps", 9 * STEPS)[0] == 0
    assert differences(alone, copy) == []
    copy = interrupted(copy, 5)
    assert command("train", "--resume", copy)[0] == 0  # the new end stays
    assert differences(alone, copy) == []


def test_an_end_that_is_past_is_refused_and_changes_nothing(command, trained):
    copy = interrupted(trained("alone", 4), 4)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    message = f"total_steps is {3 * STEPS}, but the run in {copy} has {4 * STEPS} env-steps; expected at least as many"
    assert message in refusal(command("train", "--resume", copy, "--total-steps", 3 * STEPS))
    game = gpu_vecenv.configure("tag_gridworld", max_steps=5)
    env = gpu_vecenv.VecEnv(game, 4, "cpu", autoreset_mode="next_step")
    expected = pytest.raises(ConfigError, match=f"total_steps is {STEPS}, but the run")
    with contextlib.closing(env), contextlib.closing(Trainer(env, SHORT)) as trainer, expected:
        run(trainer, copy, resume=True)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert command("train", "--resume", copy, "--total-steps", 4 * STEPS)[0] == 0


def test_a_game_of_ones_own_is_named_again(command, trained, tmp_path, monkeypatch):
    """The registered name leads nowhere in another process, so the file comes first."""
    alone = trained("alone", 3)
    copy = interrupted(alone, 1)
    assert command("train", "tag_gridworld", "--resume", copy)[0] == 0
    assert differences(alone, copy) == []
    message = f"{copy} is of tag_gridworld, and the game given, pendulum, is pendulum; expected the file that declares"
    assert message in refusal(command("train", "pendulum", "--resume", copy))


def test_a_game_that_has_lost_a_parameter_is_refused(command, trained):
    copy = interrupted(trained("alone", 3), 1)
    tensors, manifest = load_checkpoint(file_of(copy, 1))
    manifest["game_config"]["lost"] = 3
    save_checkpoint(file_of(copy, 1), tensors, manifest)
    message = "the run was made with keys that TagGridworld does not have: ['lost']"
    assert message in refusal(command("train", "tag_gridworld", "--resume", copy))


# What was left


@pytest.mark.parametrize("damage", [flip, Path.touch, "empty"])
def test_where_the_newest_checkpoint_is_damaged_the_one_before_is_taken(damage, command, trained):
    alone = trained("alone", 6)
    copy = interrupted(alone, 4)
    newest = file_of(copy, 4)
    if damage is Path.touch:
        newest.unlink()
        newest.mkdir()
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        damage(newest)
    with pytest.warns(UserWarning, match=r"iteration-00000004.*; iteration 3 is used instead"):
        result = command("train", "--resume", copy)
    if damage is Path.touch:
        assert "iteration-00000004" in refusal(result)  # a folder is not ours to replace
    else:
        assert result[0] == 0 and differences(alone, copy) == []


def test_where_all_checkpoints_are_damaged_nothing_is_touched(command, trained):
    run = interrupted(trained("alone", 2), 2)
    for iteration in range(3):
        flip(file_of(run, iteration))
    before = (run / METRICS_FILE).read_text()
    line = refusal(command("train", "--resume", run))
    assert all(f"iteration-0000000{iteration}" in line for iteration in range(3)) and "damaged" in line
    assert (run / METRICS_FILE).read_text() == before and saved(run) == 2


CUTS = {
    "in the middle of a line": (5, "6,0.5,96,1"),
    "after its first comma": (5, "6,"),
    "before its last column": (5, ",".join("6" * 12)),
    "nowhere: rows are ahead of the checkpoint": (6, ""),
    "in an older iteration's number, as if it were 1 of 12": (4, "1"),
}


@pytest.mark.parametrize("where", CUTS)
def test_the_table_has_every_iteration_once_wherever_it_was_cut(where, command, trained):
    alone = trained("alone", 6)
    copy = interrupted(alone, 4)
    count, rest = CUTS[where]
    lines = (copy / METRICS_FILE).read_text().splitlines(keepends=True)
    (copy / METRICS_FILE).write_text("".join(lines[: 1 + count]) + rest)
    assert command("train", "--resume", copy)[0] == 0
    assert [row["iteration"] for row in table(copy)] == ["1", "2", "3", "4", "5", "6"]
    assert differences(alone, copy) == []


@pytest.mark.parametrize("left", ["", "\r\n", None])
def test_a_table_that_is_gone_begins_anew(left, command, trained):
    """Without its header nobody can tell what it held."""
    alone = trained("alone", 4)
    copy = interrupted(alone, 2)
    (copy / METRICS_FILE).unlink()
    if left is not None:
        (copy / METRICS_FILE).write_text(left, newline="")
    assert command("train", "--resume", copy)[0] == 0
    assert table(copy) == table(alone)[2:]


def test_tensorboards_events_are_not_needed(command, trained):
    alone = trained("alone", 4)
    copy = interrupted(alone, 2)
    shutil.rmtree(copy / "tensorboard")
    assert command("train", "--resume", copy)[0] == 0
    assert differences(alone, copy) == []


def test_drafts_of_a_killed_run_are_removed(command, trained):
    copy = interrupted(trained("alone", 4), 2)
    (copy / "checkpoints" / ".iteration-00000003.safetensors.0123456789ab.draft").write_bytes(b"half of it")
    assert command("train", "--resume", copy)[0] == 0
    assert not [name for name in names(copy) if name.endswith(".draft")]


def test_a_new_run_has_a_checkpoint_before_its_first_iteration(command, trained, device):
    """Of the initial weights, and with no score: it is not the best before anything was compared."""
    alone = trained("alone", 3)
    tensors, manifest = load_checkpoint(file_of(alone, 0))
    assert manifest["iteration"] == 0 and manifest["progress"]["seconds"] == 0
    assert manifest["progress"]["selection"] == {"best": None, "best_iteration": None, "training_episodes": 0}
    assert load_checkpoint(alone / "checkpoints" / "best.safetensors")[1]["iteration"] > 0
    assert tensors["env.engine_episode"].eq(0).all() and tensors["optimizer.tagger.reward_sums"].eq(0).all()
    copy = interrupted(alone, 0)
    assert command("train", "--resume", copy)[0] == 0
    assert differences(alone, copy) == []


@pytest.mark.parametrize("progress", [{"selection": {"worst": 1}}, {"selection": [1]}, {"seconds": "long"}, [1]])
def test_progress_that_is_damaged_is_named(progress, command, trained):
    copy = interrupted(trained("alone", 4), 2)
    tensors, manifest = load_checkpoint(file_of(copy, 2))
    save_checkpoint(file_of(copy, 2), tensors, {**manifest, "progress": progress})
    code, _, errors = command("train", "--resume", copy)
    assert code != 0 and "'progress' of its newest checkpoint is" in errors[-1] and "best_iteration" in errors[-1]


@pytest.mark.parametrize("keep", [1, 2])
def test_so_many_checkpoints_are_kept_and_the_best(keep, command, trained):
    alone = trained("alone", 7, "--keep", keep)
    newest = [f"iteration-{i:08d}.safetensors" for i in range(8 - keep, 8)]
    assert sorted(names(alone)) == ["best.safetensors", "initial.safetensors", *newest]


def test_a_kill_before_the_best_checkpoint_has_its_name_loses_it_not(command, device, trained, monkeypatch, tmp_path):
    """Nor one between the two names: the run goes on from the checkpoint before, and finds the best one again."""
    learning = "--grid 4 --best-episodes 16 --learning-rate 0.03".split()
    alone = trained("alone", 6, *learning)
    best, link = load_checkpoint(alone / "checkpoints" / "best.safetensors")[1]["iteration"], os.link

    def killed(source, target):
        if f"iteration-{best:08d}." in Path(target).name:
            raise KeyboardInterrupt
        link(source, target)

    monkeypatch.setattr(os, "link", killed)
    options = [*GRID, *TINY, *KEPT, "--device", device, "--total-steps", 6 * STEPS, *learning, "--out", "killed"]
    assert command("train", *options)[0] == 130 and saved(tmp_path / "killed") == best - 1
    monkeypatch.setattr(os, "link", link)
    assert command("train", "--resume", "killed")[0] == 0
    assert differences(alone, tmp_path / "killed") == []


def test_a_run_becomes_not_finite_in_one_line_and_its_checkpoints_stay(command, device, tmp_path):
    """The first iteration is at a learning rate of 0; steps of 1e29 make products that are infinite."""
    options = [*GRID, *TINY, *KEPT, "--device", device, "--total-steps", 10 * STEPS, "--out", "run"]
    line = refusal(command("train", *options, "--learning-rate", "0", "--final-learning-rate", "1e30"))
    iteration = int(re.search(r"error: iteration (\d+): losses .* are not finite", line)[1])
    done = saved(tmp_path / "run")
    assert 0 < done == iteration - 1 == len(table(tmp_path / "run"))
    for number in range(1, done + 1):
        tensors, _ = load_checkpoint(file_of(tmp_path / "run", number))
        assert all(
            bool(x.isfinite().all()) for name, x in tensors.items() if not name.startswith(("env.", "episodes."))
        )
    assert f"iteration {iteration}: losses" in refusal(command("train", "--resume", "run"))


# Folders


def test_a_folder_that_holds_a_run_is_refused_and_stays(command, trained):
    run = trained("run", 2)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    line = refusal(command("train", *GRID, *TINY, "--out", run))
    assert "already has a run" in line and line.endswith(f"resume it: gpu-vecenv train --resume {run}")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


HOLDER = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("begun", [True, False])
def test_a_folder_has_one_process_at_a_time_and_is_free_after_a_kill(begun, command, trained, tmp_path):
    run = interrupted(trained("run", 2), 1) if begun else tmp_path / "run"
    run.mkdir(exist_ok=True)
    start = ("--resume", run) if begun else (*GRID, *TINY, "--total-steps", STEPS, "--episodes", 4, "--out", run)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        before = content(run)
        line = refusal(command("train", *start))
        assert f"another process trains in {run}" in line and "wait until it has ended" in line
        assert content(run) == before
    finally:
        holder.kill()
        holder.communicate()
    assert command("train", *start)[0] == 0


def test_a_running_run_refuses_a_second_one_in_its_folder(tmp_path):
    """And frees the folder when it returns, in the same process."""
    env, refused = gpu_vecenv.make("tag_gridworld", 4, "cpu", max_steps=5), []
    second = Trainer(env, SHORT)

    class Refusing(Trainer):
        def train_iteration(self):
            for resume in (False, True):
                with pytest.raises(ConfigError, match="another process trains in"):
                    run(second, tmp_path, RunConfig(episodes=4), resume=resume)
                refused.append(resume)
            return super().train_iteration()

    assert run(Refusing(env, SHORT), tmp_path, RunConfig(episodes=4)) == 0
    assert refused == [False, True]
    assert run(second, tmp_path, RunConfig(episodes=4), resume=True) == 0


@pytest.mark.usefixtures("pictures")
def test_no_symbolic_link_in_a_run_folder_is_followed(command, tmp_path):
    """Each file is written beside its place and renamed."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    for name in (
        "metrics.csv",
        "evaluations.csv",
        "evaluation.json",
        "learning_curve.png",
        "settings.json",
        "config.json",
    ):
        (other / name).write_text("of somebody else")
        (run / name).symlink_to(other / name)
    (run / "tensorboard").symlink_to(other, target_is_directory=True)
    before = content(other)
    assert command("train", *GRID, *TINY, "--total-steps", STEPS, "--episodes", 4, "--out", run)[0] == 0
    assert content(other) == before
    assert [path for path in run.rglob("*") if path.is_symlink()] == []
    (other / "metrics.csv").write_bytes((run / "metrics.csv").read_bytes())
    (run / "metrics.csv").unlink()
    (run / "metrics.csv").symlink_to(other / "metrics.csv")
    before = content(other)
    assert command("train", "--resume", run, "--total-steps", 3 * STEPS)[0] == 0
    assert content(other) == before and len(table(run)) == 3


def test_a_lock_that_is_a_symbolic_link_is_not_written(command, tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.write_text("of somebody else")
    (run / ".lock").symlink_to(other)
    assert ".lock" in refusal(command("train", *GRID, *TINY, "--total-steps", STEPS, "--out", run))
    assert other.read_text() == "of somebody else"


@pytest.mark.parametrize("draft", [True, False])
def test_a_run_without_a_checkpoint_is_started_again_not_taken_up(draft, command, device, trained, tmp_path):
    """As a kill before its first checkpoint, or while it was written, leaves it."""
    alone = trained("alone", 3)
    run = interrupted(alone, 0)
    file_of(run, 0).unlink()
    for name in ("best", "initial"):
        (run / "checkpoints" / f"{name}.safetensors").unlink()
    if draft:
        (run / "checkpoints" / ".iteration-00000000.safetensors.0123456789ab.draft").write_bytes(b"half of it")
    else:
        (run / "checkpoints").rmdir()
    assert "no usable checkpoint" in refusal(command("train", "--resume", run))
    options = [*GRID, *TINY, *KEPT, "--device", device, "--total-steps", 3 * STEPS]
    assert command("train", *options, "--episodes", "5", "--out", run)[0] == 0
    assert table(run) == table(alone) and sorted(names(run)) == sorted(names(alone))
    assert json.loads((run / "evaluation.json").read_text())["all trained"]["episodes"] == 5
    copy = interrupted(run, 2, "again")
    assert command("train", "--resume", copy)[0] == 0
    assert differences(run, copy) == []  # the settings are those of the second start


NO_RUNS = {
    "no folder": lambda run: shutil.rmtree(run),
    "no settings": lambda run: (run / "settings.json").unlink(),
    "settings that are cut": lambda run: (run / "settings.json").write_text('{"device": "cp'),
    "empty settings": lambda run: (run / "settings.json").write_text(""),
    "settings without keys": lambda run: (run / "settings.json").write_text("{}"),
    "settings that are a list": lambda run: (run / "settings.json").write_text("[]"),
    "settings that are no text": lambda run: (run / "settings.json").write_bytes(b"\xff\xfe\x00"),
    "settings with unknown keys": lambda run: (run / "settings.json").write_text(
        json.dumps({"device": "cpu", "graphs": True, "run": {"nonsuch": 1}})
    ),
}


@pytest.mark.parametrize("what", NO_RUNS)
def test_settings_that_cannot_be_read_give_one_line_that_names_them(what, command, trained):
    run = trained("run", 1)
    NO_RUNS[what](run)
    line = refusal(command("train", "--resume", "run"))
    assert "settings.json" in line and "run" in line


@pytest.mark.parametrize("version", [None, 1, 3])
def test_run_folders_of_other_versions_are_refused_by_name(version, command, trained):
    path = trained("run", 1) / "settings.json"
    settings = json.loads(path.read_text())
    assert settings.pop("format") == 2
    path.write_text(json.dumps(settings if version is None else {**settings, "format": version}))
    line = refusal(command("train", "--resume", "run"))
    assert f"another version of gpu_vecenv: its format is {version or 1}; expected 2" in line


REFUSED = {
    "no steps": ("--resume run --total-steps 0", "total_steps is 0"),
    "an unknown device": ("--resume run --device tpu", "device is 'tpu'"),
}


BOXED = {  # tyro reports these: the option is not one of this command
    "no folder's name": ("--resume", "--resume"),
    "an option of a new run": ("--resume run --seed 3", "--seed"),
    "another number of environments": ("--resume run --num-envs 8", "--num-envs"),
}


@pytest.mark.parametrize("what", BOXED)
def test_options_of_a_new_run_are_refused(what, command, trained):
    arguments, option = BOXED[what]
    run = trained("run", 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, errors = command("train", *arguments.split())
    assert code == 2 and any(option in line for line in errors)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_way_to_go_on_gives_one_line(what, command, trained):
    arguments, message = REFUSED[what]
    run = trained("run", 1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert message in refusal(command("train", *arguments.split()))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_checks_of_this_file_see_a_single_bit(trained):
    """What ``differences`` compares."""
    alone = trained("alone", 3)
    copy = alone.parent / "copy"
    shutil.copytree(alone, copy)
    assert differences(alone, copy) == [] and same_bits(file_of(alone, 3), file_of(copy, 3))
    shutil.copy(file_of(alone, 2), file_of(copy, 3))
    (copy / METRICS_FILE).write_text((copy / METRICS_FILE).read_text().replace(table(copy)[1]["weights"], "0" * 16))
    (copy / "evaluation.json").write_text("{}")
    found = differences(alone, copy)
    assert len(found) == 3 and "row 2" in found[0] and "evaluation" in found[1] and "iteration-00000003" in found[2]
