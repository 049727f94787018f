"""Sample Factory: its learner gets what the game says, by its batched sampler, in a process of its own."""

import os
import re

from support.documented import PAGE, code_of
from support.processes import run_child

CHECK = """
import torch
from games.script import Script
from sample_factory.algo.learning.learner import Learner

import gpu_vecenv
import lines

gpu_vecenv.register(Script)
batches, prepare = [], Learner._prepare_batch


def recorded(learner, batch):
    batches.append({name: batch[name].clone() for name in ("actions", "rewards", "dones", "time_outs")})
    batches[-1]["obs"] = batch["obs"]["obs"].clone()
    return prepare(learner, batch)


if __name__ == "__main__":
    Learner._prepare_batch = recorded
    serial = ["--serial_mode=True", "--async_rl=False", "--device=cpu", "--use_rnn=False", "--normalize_input=False"]
    sizes = ["--rollout=16", "--batch_size=1024", "--train_for_env_steps=3000", "--reward_clip=1000"]
    status = lines.train("script", *serial, *sizes)
    assert status == 0, status
    for batch in batches:
        number, steps, last, truncates, mark, said = batch["obs"].unbind(-1)  # (64, 17): the one after them, too
        ends = (steps + 1 == last)[:, :-1]
        assert batch["obs"].dtype == torch.float32 and (number == 1).all() and ends.any() and not ends.all()
        assert torch.equal(batch["rewards"], (10 * number + steps + 1)[:, :-1])
        assert torch.equal(batch["dones"].bool(), ends)
        assert torch.equal(batch["time_outs"].bool(), ends & (truncates[:, :-1] == 1))
        assert torch.equal(said[:, 1:][~ends], batch["actions"][..., 0][~ends].float())
        assert torch.equal(mark[:, 1:][~ends], mark[:, :-1][~ends])
    print("checked", len(batches))
"""


def test_batches_are_what_the_script_says(tmp_path):
    (tmp_path / "lines.py").write_text(code_of("Sample Factory"))
    (tmp_path / "check.py").write_text(CHECK)
    folders = os.pathsep.join(map(str, (PAGE.parents[1], PAGE.parents[1] / "tests")))  # the package, and its test games
    done = run_child("check.py", folder=tmp_path, variables={"PYTHONPATH": folders}, timeout=120)
    found = re.search(r"^checked (\d+)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found and int(found[1]) >= 3, done.stdout + done.stderr


def test_the_documented_lines_train(tmp_path):
    (tmp_path / "lines.py").write_text(code_of("Sample Factory"))
    done = run_child("lines.py", folder=tmp_path, timeout=120)
    assert done.returncode == 0 and re.search(r"Collected \{0: (8|9|1\d)\d{3}\}", done.stdout + done.stderr), (
        done.stderr
    )
