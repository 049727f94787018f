"""Several processes that train together on the CPU (gloo): equal weights, lost ranks, going on.

torchrun starts them where it has a part in what is tested; else they begin warm, with the variables of torchrun.
"""

import contextlib
import copy
import csv
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.bitwise import equal_bits
from support.learning import run_update
from support.processes import child_environment
from support.warm_process import WarmProcess

import gpu_vecenv
from gpu_vecenv.cli.main import main
from gpu_vecenv.errors import ConfigError, NonFiniteError
from gpu_vecenv.train.checkpoint import CheckpointFolder, load_checkpoint
from gpu_vecenv.train.distributed import TIMEOUT, World, process_group
from gpu_vecenv.train.policy_specs import PolicySpec
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.ppo_learner import PPOLearner
from gpu_vecenv.train.trainer import Trainer

pytestmark = pytest.mark.slow

DEADLINE = 4 * TIMEOUT.total_seconds()  # by then whatever lost its partners has given up, and torchrun has ended
ITERATIONS = 20
GRID = "train tag_gridworld --max-steps 7 --device cpu --num-envs 8 --num-steps 4 --num-minibatches 4".split()
LEARNING = "--num-epochs 4 --num-minibatches 2 --hidden-sizes 16 --normalize-obs --normalize-returns".split()
KEPT = f"--checkpoint-seconds 0 --digests --episodes 4 --total-steps {ITERATIONS * 8 * 4}".split()
KEPT += "--best-episodes 5 --best-interval 0".split()
TRAIN = [*GRID, *LEARNING, *KEPT]
ONE_STEP = PPOConfig(
    num_steps=8,
    num_epochs=1,
    num_minibatches=1,
    hidden_sizes=(16,),
    max_grad_norm=1e9,
    normalize_advantages=False,
    staggered_starts=False,
)
# Policies with different numbers of minibatches, of which approx_kl ends some early, and the statistics of both kinds.
LEARNERS = {"num_steps": 8, "hidden_sizes": (16,), "learning_rate": 1e-2, "total_steps": 10**6}
NORMALIZED = PPOConfig(**LEARNERS, num_epochs=2, num_minibatches=2, normalize_obs=True, normalize_returns=True)
MORE = dataclasses.replace(NORMALIZED, num_epochs=3, num_minibatches=4, target_kl=0.02)
on_two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_two_gpus)]
WAYS = {
    "normalizers": (NORMALIZED, {"tagger": PolicySpec(), "runner": PolicySpec(config=MORE)}),
    "values": (PPOConfig(**LEARNERS, value_norm_beta=0.9, desired_kl=0.01), None),
}
SAVED, COMPARED = 2, 5  # iterations


# What a process does under torchrun


def train_as_a_rank(folder, *arguments):
    """The command line; the process's number lies in a file."""
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    return main(arguments)


def train_with_a_rank_that_is_wrong(folder, *arguments):
    """The first process is told something that cannot be, before it has heard of the others."""
    wrong = ["--gamma", "2"] if os.environ["RANK"] == "0" else []
    return main([*arguments, *wrong])


def step_once(folder):
    """One iteration of one minibatch. What it had, what it made of it, and the gradient of its own rows."""
    with process_group("cpu") as (world, device):
        env = gpu_vecenv.make(
            "tag_gridworld", 4, device, autoreset_mode="next_step", first_env_index=4 * world.rank, max_steps=5
        )
        trainer = Trainer(env, ONE_STEP, seed=3)
        found = {f"env.{name}": tensor for name, tensor in env.state_dict().items()}
        before = copy.deepcopy(trainer.policies)
        trainer.train_iteration()
        for name, learner in trainer.learners.items():
            found[f"before.{name}"] = torch.cat([p.detach().flatten() for p in before[name].parameters()])
            kernels = type(trainer.kernels[name])(before[name], trainer.rollout, ONE_STEP.precision)
            alone = PPOLearner(
                before[name], ONE_STEP, trainer.rollout, seed=3, world=World(), graph_pool=None, kernels=kernels
            )
            run_update(alone)
            found[f"own.{name}"] = alone.flat_grad.clone()
            found[f"average.{name}"] = learner.flat_grad.clone()
            found[f"after.{name}"] = torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        save_file(found, folder / f"{world.rank}.safetensors")
    return 0


def state_of(trainer, metrics):
    """A copy of all that the next iteration depends on, and the metrics but times."""
    told = {name: value for name, value in metrics.items() if "time_fraction" not in name and "_per_s" not in name}
    tensors = {name: tensor.cpu().clone() for name, tensor in trainer.state()[0].items()}
    return {**tensors, "metrics": torch.tensor(list(told.values()), dtype=torch.float64)}


def train_both_ways(folder, device):
    """What several tests compare."""
    with process_group(device) as (world, own):
        found, graphs = three_ways(folder, world, own)
        found["stopped"] = weights_of_stopped_iterations(world, own)
    assert all(graphed.graph is None for graphed in graphs)  # NCCL waits for graphs with its collectives
    save_file(found, folder / f"{world.rank}.safetensors")
    return 0


def three_ways(folder, world, device):
    """Iterations as one work, in stages, and resumed; on a GPU the first and the last become one CUDA graph."""
    found, graphs = {}, []
    for name, (config, policies) in WAYS.items():
        checkpoint = folder / f"{name}{world.rank}.safetensors"
        for way in ("whole", "stages", "resumed"):
            trainer = Trainer(small_env(world, device), config, seed=3, policies=policies)
            assert trainer.by_kernels and trainer.collectives_reason is None
            if way == "stages":
                trainer.collectives_reason = "to compare"
            if way == "resumed":
                trainer.load(checkpoint)
            for iteration in range(trainer.iteration, COMPARED):
                metrics = trainer.train_iteration()
                if (way, iteration) == ("whole", SAVED):
                    trainer.save(checkpoint)
            graphs.append(trainer._graphed_iteration)
            assert (graphs[-1].graph is not None) == (device != "cpu" and way != "stages")
            found |= {f"{name}.{way}.{key}": tensor for key, tensor in state_of(trainer, metrics).items()}
    return found, graphs


def weights_of_stopped_iterations(world, device):
    """An environment of the second process has an invalid action before the second of four iterations."""
    trainer, weights = Trainer(small_env(world, device), NORMALIZED, seed=3), []
    for iteration in range(4):
        if iteration == 1 and world.rank == 1:
            trainer.env.faults()[0] = 1
        trainer.launch_iteration()
        parameters = [p.detach().flatten() for policy in trainer.policies.values() for p in policy.parameters()]
        weights.append(torch.cat(parameters).cpu())
    with pytest.raises(NonFiniteError, match="1 environments received invalid actions"):
        trainer.read_iteration()
    trainer.close()
    return torch.stack(weights)


def small_env(world, device):
    first = {"first_env_index": 8 * world.rank, "max_steps": 7}
    return gpu_vecenv.make("tag_gridworld", 8, device, autoreset_mode="next_step", **first)


# The other side


def port():
    """A free one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def launched(folder, *arguments, torchrun=("--standalone", "--nproc-per-node=2")):
    """torchrun in a process of its own; whatever is left of it in the end is killed."""
    folder.mkdir(exist_ok=True)
    environment = child_environment()
    tests = Path(__file__).resolve().parents[1]  # for tests/support: a rank may run this file
    environment["PYTHONPATH"] += f"{os.pathsep}{tests}"
    with (folder / "output.txt").open("w") as output, (folder / "errors.txt").open("w") as errors:
        running = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)  # torchrun then ends the ranks, which have groups of their own
            try:
                running.wait(DEADLINE)
            finally:
                running.kill()


def done(folder, *arguments, **options):
    """Wait for torchrun: its exit code, and what it and the ranks have said to stderr."""
    with launched(folder, *arguments, **options) as running:
        code = running.wait(DEADLINE)
    return code, (folder / "errors.txt").read_text()


def ranks(folder, *arguments, hosts=False):
    """Two processes with the variables of torchrun, of one host or of two: exit codes, and what they have said.

    Args:
        arguments: Those of Python: a script and its own, or ``-m`` and a module and its own.
        hosts: Each is the only one of its host.
    """
    folder.mkdir(exist_ok=True)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "TORCHELASTIC_RUN_ID": "none"}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1" if hosts else "2"}
    with contextlib.ExitStack() as running:
        started = []
        for rank in ("0", "1"):
            own = {"RANK": rank, "LOCAL_RANK": "0" if hosts else rank}
            streams = {name: folder / f"{name}{rank}.txt" for name in ("output", "errors")}
            environment = child_environment(**variables, **own)
            process = WarmProcess(folder, *arguments, environment=environment, **streams)
            running.callback(process.kill)
            started.append(process)
        codes = [process.wait(DEADLINE) for process in started]
    outputs, errors = ([(folder / f"{name}{rank}.txt").read_text() for rank in (0, 1)] for name in ("output", "errors"))
    return codes, outputs, "".join(errors)


def until(running, there):
    """Wait for what a process does."""
    end = time.monotonic() + DEADLINE
    while not there():
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def said(errors):
    """The lines of the command line's own errors."""
    return [line for line in errors.splitlines() if line.startswith("gpu-vecenv: error: ")]


def rows(run):
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def fingerprints(run):
    """Of all weights, after each iteration."""
    found = [(int(row["iteration"]), row["weights"]) for row in rows(run)]
    assert len({weights for _, weights in found}) == len(found) > 0
    return found


def tensors_of(run, iteration):
    """Each rank's."""
    folder = run / "checkpoints"
    return [load_checkpoint(folder / f"iteration-{iteration:08d}{rank}.safetensors")[0] for rank in ("", ".rank1")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of two processes that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    codes, outputs, errors = ranks(folder, "-m", "gpu_vecenv.cli", *TRAIN, "--out", folder / "run")
    assert (codes, said(errors)) == ([0, 0], []), errors
    for line in ("learning curve ", "\nall trained "):  # the first process speaks
        assert [output.count(line) for output in outputs] == [1, 0]
    return folder / "run"


def test_two_processes_have_the_same_weights_and_different_envs(alone):
    for iteration in (ITERATIONS - 2, ITERATIONS - 1, ITERATIONS):
        one, other = tensors_of(alone, iteration)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            if not name.startswith(("env.", "episodes.")) and "reward_sums" not in name:  # those are of environments
                assert tensor.equal(other[name]), name
        assert any(not tensor.equal(other[name]) for name, tensor in one.items() if name.startswith("env."))
    assert any("mean" in name for name in one if name.startswith("policy."))  # statistics are of all environments
    chosen = [CheckpointFolder(alone / "checkpoints", rank=rank, world_size=2).load()[1]["progress"] for rank in (0, 1)]
    assert chosen[0]["selection"] == chosen[1]["selection"] and chosen[0]["selection"]["best"] is not None
    assert CheckpointFolder(alone / "checkpoints", world_size=2).newest() == ITERATIONS


def test_recurrent_policies_have_the_same_weights_states_of_their_own_and_resume(tmp_path):
    steps = ["--total-steps", 5 * 32, "--network", "gru", "--sequence-length", 2, "--keep", 9]
    codes, _, errors = ranks(tmp_path, "-m", "gpu_vecenv.cli", *TRAIN, *steps, "--out", tmp_path / "run")
    assert codes == [0, 0], errors
    one, other = expected = tensors_of(tmp_path / "run", 5)
    weights = [name for name in one if name.startswith("policy.")]
    states = [name for name in one if name.startswith("recurrent.")]
    assert len(states) == 2 and all(one[name].equal(other[name]) for name in weights)
    assert not any(one[name].equal(other[name]) for name in states)
    for iteration in (4, 5):
        for path in (tmp_path / "run" / "checkpoints").glob(f"iteration-{iteration:08d}*"):
            path.unlink()
    codes, _, errors = ranks(tmp_path, "-m", "gpu_vecenv.cli", "train", "--resume", tmp_path / "run")
    assert codes == [0, 0], errors
    for before, after in zip(expected, tensors_of(tmp_path / "run", 5), strict=True):
        assert before.keys() == after.keys() and all(x.equal(after[name]) for name, x in before.items())


def test_only_the_first_process_writes_metrics(alone):
    assert [int(row["iteration"]) for row in rows(alone)] == list(range(1, ITERATIONS + 1))
    assert [int(row["env_steps"]) for row in rows(alone)] == [32 * i for i in range(1, ITERATIONS + 1)]
    assert sum(float(row["episodes"]) for row in rows(alone)) > 4 * ITERATIONS * 4 / 8  # of both: 4 envs had less
    assert len(list((alone / "tensorboard").iterdir())) == 1
    left = {
        ".lock",
        "checkpoints",
        "config.json",
        "evaluation.json",
        "evaluations.csv",
        "learning_curve.png",
        "metrics.csv",
        "settings.json",
        "tensorboard",
    }
    assert {path.name for path in alone.iterdir()} == left


def test_shaped_rewards_are_those_of_all_processes(tmp_path):
    """The environments with the larger values lie in the second process."""
    reward = "import os\n\ndef by_rank(t):\n    return 0 * t.rewards + 2 * int(os.environ['RANK'])\n"
    (tmp_path / "own_reward.py").write_text(reward)
    options = ["--reward", tmp_path / "own_reward.py:by_rank", "--total-steps", 32, "--episodes", 4]
    options += ["--no-staggered-starts"]  # all environments count alike, as no episode ends in four steps
    codes, _, errors = ranks(tmp_path, "-m", "gpu_vecenv.cli", *GRID, *options, "--out", tmp_path / "run")
    assert codes == [0, 0], errors
    assert [float(row["shaped_reward_runner"]) for row in rows(tmp_path / "run")] == [1]


def test_a_run_of_two_processes_is_evaluated_by_one(alone, capsys):
    assert main(["evaluate", str(alone), "--json", "--episodes", "4", "--device", "cpu"]) == 0
    assert '"episodes": 4' in capsys.readouterr().out


def test_one_process_does_not_take_up_the_run_of_two(alone, capsys):
    before = (alone / "metrics.csv").read_text()
    assert main(["train", "--resume", str(alone)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is of a run of 2 process(es), this one has 1" in line and "torchrun --nproc-per-node=2" in line
    assert (alone / "metrics.csv").read_text() == before


def test_one_step_is_by_the_average_of_the_gradients_of_disjoint_envs(tmp_path):
    codes, _, errors = ranks(tmp_path, __file__, "step_once", tmp_path)
    assert codes == [0, 0], errors
    both = [load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    whole = gpu_vecenv.make("tag_gridworld", 8, "cpu", autoreset_mode="next_step", max_steps=5)
    whole.reset(seed=3)
    for name, tensor in whole.state_dict().items():
        parts = [rank[f"env.{name}"] for rank in both]
        assert torch.cat(parts).equal(tensor) if tensor.shape[:1] == (8,) else parts[0].equal(tensor), name
    for name in ("tagger", "runner"):
        own = [rank[f"own.{name}"] for rank in both]
        assert not own[0].equal(own[1])
        for rank in both:
            # The same sums over the same rows by one thread; a sum of two numbers has one order, its half is exact.
            assert rank[f"average.{name}"].equal((own[0] + own[1]) / 2)
        # Adam's first step: mean and root of the mean square are the gradient itself. In float32 the step has some
        # ten roundings, its difference to the weight one of at most half an ulp of 2.
        gradient, before, after = (both[0][f"{what}.{name}"].double() for what in ("average", "before", "after"))
        rate = ONE_STEP.learning_rate
        expected = before - rate * gradient / (gradient.abs() + 1e-5)
        assert before.abs().max() < 2
        torch.testing.assert_close(after, expected, rtol=0, atol=2.0**-24 + 10 * 2.0**-24 * rate)
        assert (after - before).abs().max() > rate / 2 and both[1][f"after.{name}"].double().equal(after)


@pytest.fixture(scope="module", params=DEVICES)
def both_ways(request, tmp_path_factory):
    """What each process has found."""
    folder = tmp_path_factory.mktemp("both")
    codes, _, errors = ranks(folder, __file__, "train_both_ways", folder, request.param)
    assert codes == [0, 0], errors
    return [load_file(folder / f"{rank}.safetensors") for rank in (0, 1)]


def test_one_work_and_stages_train_the_same_bits_in_all_processes_and_resume(both_ways):
    for rank in both_ways:
        names = [name for name in rank if ".whole." in name]
        assert len(names) == len(rank) // 3 > 50
        for name in names:
            for way in (".stages.", ".resumed."):
                assert equal_bits(rank[name], rank[name.replace(".whole.", way)]), (name, way)
    one, other = both_ways
    learned = [name for name in one if "policy." in name or "optimizer." in name or name.endswith("metrics")]
    for name in (name for name in learned if "reward_sums" not in name):  # those are of environments
        assert equal_bits(one[name], other[name]), name
    assert any(not other[name].equal(tensor) for name, tensor in one.items() if ".env." in name)


def test_updates_are_skipped_in_all_processes_or_in_none(both_ways):
    one, other = (rank["stopped"] for rank in both_ways)
    assert one.equal(other)
    assert not one[0].equal(one[1]) and one[1].equal(one[2]) and one[2].equal(one[3])


def test_two_hosts_train_like_two_processes_of_one(alone, tmp_path):
    command = ("-m", "gpu_vecenv.cli", *TRAIN, "--out", tmp_path / "run")
    codes, outputs, errors = ranks(tmp_path, *command, hosts=True)
    assert codes == [0, 0], errors
    assert fingerprints(tmp_path / "run") == fingerprints(alone)
    assert "all trained" not in outputs[1]


# Lost ranks and signals


def test_a_killed_rank_ends_all_and_the_run_resumes(alone, tmp_path):
    run = tmp_path / "run"
    folder = CheckpointFolder(run / "checkpoints", world_size=2)
    # torchrun looks now and then, and ends the other rank: which shall have had the time to say its line.
    rare = ("--standalone", "--nproc-per-node=2", "--monitor-interval=3")
    with launched(tmp_path, __file__, "train_as_a_rank", tmp_path, *TRAIN, "--out", run, torchrun=rare) as running:
        until(running, lambda: max(folder.iterations(), default=0) >= 3)
        os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGKILL)
        assert running.wait(DEADLINE) not in (0, None)
    errors = (tmp_path / "errors.txt").read_text()
    (line,) = said(errors)
    assert re.match(r"gpu-vecenv: error: rank 0 of 2 lost the others: .*torchrun's report names the process", line)
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9 ", errors), errors
    assert 3 <= folder.newest() < ITERATIONS
    codes, _, errors = ranks(tmp_path, "-m", "gpu_vecenv.cli", "train", "--resume", run)
    assert (codes, said(errors)) == ([0, 0], []), errors
    assert fingerprints(run) == fingerprints(alone)
    assert (run / "evaluation.json").read_text() == (alone / "evaluation.json").read_text()
    for one, other in zip(tensors_of(run, ITERATIONS), tensors_of(alone, ITERATIONS), strict=True):
        assert one.keys() == other.keys() and all(tensor.equal(other[name]) for name, tensor in one.items())


def test_a_signal_to_the_launcher_makes_the_ranks_save_and_leave(tmp_path):
    run = tmp_path / "run"
    folder = CheckpointFolder(run / "checkpoints", world_size=2)
    long = ["--checkpoint-seconds", "1000000", "--total-steps", "100000000"]  # it saves because it is told to
    with launched(tmp_path, "-m", "gpu_vecenv.cli", *TRAIN, *long, "--out", run) as running:
        until(running, lambda: (run / "metrics.csv").exists() and len(rows(run)) > 1)
        running.send_signal(signal.SIGTERM)
        assert running.wait(DEADLINE) != 0
    first, iteration = folder.iterations()
    assert first == 0 and iteration == folder.newest() == len(rows(run)) > 1
    output = (tmp_path / "output.txt").read_text()
    assert re.search(rf"(SIGTERM|another process): saved .*iteration-{iteration:08d}", output), output
    assert f"resume with: gpu-vecenv train --resume {run}" in output


def test_a_rank_that_fails_before_the_others_hear_of_it_ends_all(tmp_path):
    code, errors = done(tmp_path, __file__, "train_with_a_rank_that_is_wrong", tmp_path, *TRAIN, "--out", "run")
    assert code not in (0, None)
    assert any("gamma is 2.0" in line for line in said(errors)), errors
    assert re.search(r"rank +: 0 \(local_rank: 0\)\s+exitcode +: 2 ", errors), errors
    assert not list(tmp_path.rglob("*.safetensors"))


# What is refused


REFUSED = {
    "envs that cannot be dealt out": (["--num-envs", "7", "--out", "run"], "num_envs is 7; .* 2 processes, 6 or 8"),
    "no folder": ([], "several processes need one run folder: give --out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_two_processes_cannot_do_gives_each_one_line(what, tmp_path):
    options, message = REFUSED[what]
    codes, _, errors = ranks(tmp_path, "-m", "gpu_vecenv.cli", *TRAIN, *options)
    lines = said(errors)
    assert codes == [2, 2] and len(lines) == 2 and all(re.search(message, line) for line in lines), errors
    assert not (tmp_path / "run").exists() and not (tmp_path / "runs").exists()


def test_environments_are_split_evenly_over_ranks_or_refused_with_a_remedy():
    assert (World().envs_per_process(7), World(1, 3).envs_per_process(9)) == (7, 3)
    with pytest.raises(ConfigError, match=r"num_envs is 8; expected a multiple of the 3 processes, 6 or 9"):
        World(0, 3).envs_per_process(8)


def test_a_single_process_needs_no_process_group():
    tensor = torch.tensor([1.0, 3.0])
    world = World.current()
    world.all_reduce_sum(tensor)
    world.all_reduce_mean(tensor)
    world.barrier()
    assert (world.rank, world.size) == (0, 1) and tensor.tolist() == [1, 3]
    assert [world.all_agree(a, b) for a in (True, False) for b in (True, False)] == [
        (a, b) for a in (True, False) for b in (True, False)
    ]


if __name__ == "__main__":
    CALLS = (train_as_a_rank, train_with_a_rank_that_is_wrong, step_once, train_both_ways)
    sys.exit({call.__name__: call for call in CALLS}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:]))
