"""The pages about training agree with the code: their tables of hyper-parameters, metrics and options."""

import csv
import dataclasses
import re
from pathlib import Path

from gpu_vecenv.cli.crossplay import Crossplay
from gpu_vecenv.cli.evaluate import Evaluate
from gpu_vecenv.cli.exploit import Exploit
from gpu_vecenv.cli.export import Export
from gpu_vecenv.cli.main import main
from gpu_vecenv.cli.opponents import OpponentOptions
from gpu_vecenv.cli.plot import Plot
from gpu_vecenv.cli.resume import Resume
from gpu_vecenv.cli.train import Train
from gpu_vecenv.train.learner_config import LearnerConfig
from gpu_vecenv.train.policy_specs import RUN_WIDE_KEYS
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.pqn import PQNConfig
from gpu_vecenv.train.run import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = ("training", "networks", "hyper_parameters", "rewards_and_curricula", "opponents", "several_gpus", "export")
TEXT = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in (*PAGES, "training_internals"))
SMALL = "--total-steps 64 --num-steps 4 --num-envs 4 --num-minibatches 4 --episodes 4 --device cpu".split()


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a section's tables, heads and rules left out."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line] for line in lines]


def test_the_table_of_hyper_parameters_is_the_configuration() -> None:
    table = rows(section("PPO and A2C"))
    told = {name.strip("`"): default for name, default, _ in table}
    assert told == {field.name: str(field.default) for field in dataclasses.fields(PPOConfig)}
    assert list(told) == [field.name for field in dataclasses.fields(PPOConfig)]
    starred = {name.strip("`") for name, _, meaning in table if meaning.startswith("* ")}
    assert starred == set(RUN_WIDE_KEYS)


def test_the_table_of_pqn_is_what_its_configuration_adds_and_changes() -> None:
    told = {name.strip("`"): default for name, default, _ in rows(section("PQN"))}
    common = {field.name: field.default for field in dataclasses.fields(LearnerConfig)}
    own = [f for f in dataclasses.fields(PQNConfig) if f.name not in common or f.default != common[f.name]]
    assert told == {field.name: str(field.default) for field in own} and list(told) == [field.name for field in own]


def test_the_docs_list_what_a2c_changes() -> None:
    (told,) = re.findall(r"^\*\*A2C\.\*\*.*?\n\n", TEXT, re.MULTILINE | re.DOTALL)
    a2c, ppo = (dataclasses.asdict(config) for config in (PPOConfig.a2c(), PPOConfig()))
    assert {name for name in ppo if a2c[name] != ppo[name]} == {
        "num_steps",
        "num_epochs",
        "num_minibatches",
        "gae_lambda",
        "learning_rate",
        "normalize_advantages",
    }
    assert (a2c["num_epochs"], a2c["num_minibatches"], a2c["gae_lambda"]) == (1, 1, 1)
    assert f"each rollout of {a2c['num_steps']} steps" in told and f"`learning_rate` {a2c['learning_rate']}" in told


def test_the_documented_metrics_are_those_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "own_reward.py").write_text("def same(t):\n    return t.rewards\n")
    reward = f"{tmp_path / 'own_reward.py'}:same"
    options = [
        *SMALL,
        *"--digests --opponents random --opponents-share 0.5 --opponents-ranges 2".split(),
        "--reward",
        reward,
    ]
    assert main(["train", "tag_gridworld", *options, "--out", str(run)]) == 0
    with (run / "metrics.csv").open(newline="") as file:
        written = next(csv.reader(file))
    told = [name for cells in rows(section("The folder of a run")) for name in re.findall(r"`([^`]+)`", cells[0])]
    files = {name for name in told if (run / name).exists()}
    assert files == {path.name for path in run.iterdir()} - {"tensorboard"}
    told = [name.replace("<role>", "<policy>") for name in told if name not in {*files, "state_<field>"}]
    known = {re.sub(r"_(tagger|runner)_against_random$", "_<side>_against_<member>", name) for name in written}
    known = {re.sub(r"_(tagger|runner)$", "_<policy>", name) for name in known}
    assert set(told) == known and len(set(told)) == len(told)


def test_options_exist() -> None:
    kinds = (
        Train,
        RunConfig,
        OpponentOptions,
        PPOConfig,
        PQNConfig,
        Resume,
        Evaluate,
        Exploit,
        Crossplay,
        Plot,
        Export,
    )
    names = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)}
    of_torchrun = {"standalone", "nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port"}
    told = set(re.findall(r"(?<![\w-])--([a-z][a-z-]*)", TEXT))
    assert {"out", "resume", "sharing", "help", "no-graphs"} <= told
    assert told - names - of_torchrun - {"help"} == {"no-graphs"}
