"""Fixed opponents of trained roles: who acts in a match, the table of evaluations, and what is refused."""

import csv
import json
import math
import sys

import pytest
import torch
from games.race import Race
from reliability.resume import evaluation_rows
from support.training import SMALL, leaving

import gpu_vecenv
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.checkpoint import load_checkpoint
from gpu_vecenv.train.evaluation import Evaluator
from gpu_vecenv.train.evaluation_log import COLUMNS, EvaluationLog
from gpu_vecenv.train.evaluation_tables import name_as_in_training, pairings_of
from gpu_vecenv.train.fixed_opponents import FixedOpponents, Match, parsed_scripts
from gpu_vecenv.train.fixed_policy import StandingStill
from gpu_vecenv.train.ppo import PPOConfig
from gpu_vecenv.train.run import RunConfig, run
from gpu_vecenv.train.scripts import Script
from gpu_vecenv.train.selection import SEED, MatchResult, Selection
from gpu_vecenv.train.trainer import PolicySpec, Trainer

SCRIPT = """import torch

def right(game):
    return lambda obs: torch.full(obs.shape[:2], 1, dtype=torch.int32, device=obs.device)

def still(game):
    return right(game)

def actor(obs):
    return torch.full(obs.shape[:2], 1, dtype=torch.int32, device=obs.device)

number = 3
"""


def grid(device, **arguments):
    env = gpu_vecenv.make("tag_gridworld", 6, device, num_taggers=2, grid=5, max_steps=9)
    return Trainer(env, SMALL, **arguments)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "opponents_of_a_test.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop(path.stem, None)


def differ(one, other):
    return any(not x.equal(y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def test_who_acts_in_a_match(script, device):
    trainer, beginning = grid(device, seed=3), grid(device, seed=3)
    opponents = FixedOpponents(trainer, scripts=[Script("runner", f"{script}:right")])
    trainer.train_iteration()
    names = ["random", "still", "initial"]
    expected = [("tagger", name) for name in names] + [("runner", name) for name in names] + [("tagger", "right")]
    assert opponents.matches == expected
    acting = {match.opponent: opponents.role_policies(match) for match in opponents.matches if match.role == "tagger"}
    assert all(actors["tagger"] is trainer.policies["tagger"] for actors in acting.values())
    assert acting["random"]["runner"] is None
    obs = torch.zeros((6, 1, 9), device=device)
    assert acting["still"]["runner"] == "still" and acting["right"]["runner"](obs).tolist() == [[1]] * 6
    assert not differ(acting["initial"]["runner"], beginning.policies["runner"])
    assert differ(acting["initial"]["runner"], trainer.policies["runner"])


def test_what_learns_beside_a_script_acts_randomly_and_frozen_roles_by_their_policies(device, script):
    source = f"{script}:right"
    specs = {"tagger_0": PolicySpec(), "tagger_1": PolicySpec(train=False), "runner": PolicySpec()}
    trainer = grid(device, policies=specs)
    opponents = FixedOpponents(trainer, ["random", "initial"], [Script("tagger_1", source)])
    against = opponents.role_policies(Match("runner", "right"))
    assert against["tagger_0"] is None and callable(against["tagger_1"])
    assert opponents.role_policies(Match("runner", "initial"))["tagger_1"] is trainer.policies["tagger_1"]
    frozen = grid(device, policies={"tagger": PolicySpec(), "runner": PolicySpec(train=False)})
    opponents = FixedOpponents(frozen, scripts=[Script("runner", source)])
    expected = [("tagger", name) for name in ("random", "still", "frozen", "right")]
    assert opponents.matches == expected and opponents.left_out.keys() == {"initial"}
    assert opponents.role_policies(Match("tagger", "random")) == {**frozen.policies, "runner": None}
    assert opponents.role_policies(Match("tagger", "still")) == {**frozen.policies, "runner": "still"}
    against = opponents.role_policies(Match("tagger", "right"))
    assert against["tagger"] is frozen.policies["tagger"] and callable(against["runner"])
    assert opponents.role_policies(Match("tagger", "frozen")) == frozen.policies
    alone = FixedOpponents(Trainer(gpu_vecenv.make("cartpole", 4, device), SMALL))
    assert alone.matches == [("agent", "none")] and not alone.replaces(alone.matches[0])


def test_a_player_of_a_zero_sum_game_of_one_role_plays_against_the_other_one(script, device):
    """The mean return of the role is always 0."""
    env = gpu_vecenv.make(Race, 6, device)
    trainer, beginning = (Trainer(env, SMALL, seed=3) for _ in range(2))
    opponents = FixedOpponents(trainer, scripts=[Script("player_1", f"{script}:right")])
    trainer.train_iteration()
    against = [(player, name) for player in ("player_0", "player_1") for name in ("random", "initial")]
    assert opponents.matches == [*against, ("player_0", "right")]
    random, initial = (opponents.role_policies(Match("player_1", name)) for name in ("random", "initial"))
    assert random == {"player_1": trainer.policies["player"], "player_0": None}
    assert not differ(initial["player_0"], beginning.policies["player"])
    assert differ(initial["player_0"], initial["player_1"])
    assert opponents.role_policies(Match("player_0", "right"))["player_0"] is trainer.policies["player"]
    specs = {"player_0": PolicySpec(), "player_1": PolicySpec(train=False)}
    frozen = FixedOpponents(Trainer(env, SMALL, policies=specs))
    assert frozen.matches == [("player_0", "random"), ("player_0", "frozen")]
    assert frozen.role_policies(frozen.matches[0])["player_1"] is None
    with pytest.raises(
        ConfigError, match=r"plays player, against .*; expected a single agent, such as player_1=.*:right"
    ):
        FixedOpponents(trainer, scripts=[Script("player", f"{script}:right")])


@pytest.mark.parametrize(
    ("noop", "expected", "dtype"),
    [(None, [[[1, 3]] * 4] * 2, torch.int32), ({"runner": (1, 3)}, [[[1, 3]] * 4] * 2, torch.int32)],
)
def test_standing_still_is_the_declared_action(noop, expected, dtype, device, monkeypatch):
    env = leaving(device)
    monkeypatch.setattr(type(env.game), "noop", noop or (1, 3))
    action = StandingStill(env.game, ["runner"], env.device)(torch.zeros((2, 4, 5), device=device))
    assert action.tolist() == expected and action.dtype is dtype and action.is_contiguous()
    matches = FixedOpponents(Trainer(env, SMALL)).matches
    assert [match.role for match in matches if match.opponent == "still"] == (["tagger"] if noop else ROLES)


ROLES = ["tagger", "runner"]


def test_results_are_of_each_match(device):
    trainer = grid(device, seed=3)
    selection = Selection(trainer, None, 8, 0)
    selection.is_best()
    assert [(result.role, result.opponent) for result in selection.results] == selection.opponents.matches
    evaluator = Evaluator(trainer.env, 8)
    for match, result in zip(selection.opponents.matches, selection.results, strict=True):
        played = evaluator.of_each_episode(selection.opponents.role_policies(match), 8, seed=SEED)
        returns = played[f"return_{match.role}"].cpu().numpy()
        # Sums of 8 numbers in another order.
        expected = (
            returns.mean(),
            returns.min(),
            returns.std(ddof=1) / 8**0.5,
            8,
            float(played["episode_length"].mean()),
        )
        assert result[2:7] == pytest.approx(expected, rel=1e-12)
    assert len({result.mean_return for result in selection.results}) > 3
    one = Selection(trainer, None, 1, 0)
    one.is_best()
    assert all(math.isnan(result.standard_error) for result in one.results)
    for each in (selection, one, evaluator):
        each.close()


def test_a_run_leaves_a_table_and_a_summary_of_all_matches(device, tmp_path, capsys):
    trainer = Trainer(grid(device).env, PPOConfig(total_steps=6 * 8 * 3, num_steps=8, hidden_sizes=(8,)))
    config = RunConfig(episodes=5, best_episodes=4, best_interval=0, checkpoint_seconds=0)
    run(trainer, tmp_path, config)
    with (tmp_path / "evaluations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and [row["iteration"] for row in rows] == ["1"] * 6 + ["2"] * 6 + ["3"] * 6
    assert [row["env_steps"] for row in rows[::6]] == ["48", "96", "144"]
    assert float(rows[0]["seconds"]) > 0
    _, manifest = load_checkpoint(tmp_path / "checkpoints" / "best.safetensors")
    best = [row for row in rows if row["iteration"] == str(manifest["iteration"])]
    mean = sum(float(row["mean_return"]) for row in best) / 6
    assert manifest["progress"]["selection"]["best"] == pytest.approx(mean, rel=1e-12)  # the mean of the roles' means
    results, output = json.loads((tmp_path / "evaluation.json").read_text()), capsys.readouterr().out
    against = [f"{role} against {name}" for role in ROLES for name in ("random", "still", "initial")]
    assert list(results) == ["all random", *against, "all trained"] and all(name in output for name in against)
    for found in results.values():
        assert found["worst_return_tagger"] <= found["return_tagger"]


@pytest.mark.parametrize(
    ("actor", "names", "left_out"),
    [
        (None, ["random", "still", "frozen"], {"initial": "runner is frozen and stays as it began"}),
        ("random", ["still", "frozen"], {"random": "random plays runner in training"}),
        ("still", ["random", "frozen"], {"still": "still plays runner in training"}),
    ],
)
def test_a_role_beside_frozen_ones_also_plays_against_others(actor, names, left_out, device, tmp_path, capsys):
    """But not again against what plays in training, which alone decides which checkpoint is the best."""
    spec = PolicySpec(train=False) if actor is None else PolicySpec(actor=actor)
    trainer = Trainer(
        grid(device).env,
        PPOConfig(total_steps=6 * 8 * 2, num_steps=8, hidden_sizes=(8,)),
        policies={"tagger": PolicySpec(), "runner": spec},
    )
    run(trainer, tmp_path, RunConfig(episodes=5, best_episodes=4, best_interval=0, checkpoint_seconds=0))
    rows = evaluation_rows(tmp_path)
    assert [(row["role"], row["opponent"]) for row in rows] == [("tagger", name) for name in names] * 2
    results, output = json.loads((tmp_path / "evaluation.json").read_text()), capsys.readouterr().out
    against = [f"tagger against {name}" for name in names[:-1]]
    assert list(results) == ["all random", *against, "trained with runner frozen"]
    assert len({results[name]["return_tagger"] for name in results}) > 2
    assert all(f"no evaluation is against {kind}: {why}\n" in output for kind, why in left_out.items())
    _, manifest = load_checkpoint(tmp_path / "checkpoints" / "best.safetensors")
    best = manifest["progress"]["selection"]["best"]
    assert best == max(float(row["mean_return"]) for row in rows if row["opponent"] == "frozen")


FREEZING = {
    "a role": ({"tagger": PolicySpec(), "runner": PolicySpec(train=False)}, "trained with runner frozen"),
    "a role without a network": (
        {"tagger": PolicySpec(actor="random"), "runner": PolicySpec()},
        "trained with tagger frozen",
    ),
    "an agent": (
        {"tagger_0": PolicySpec(), "tagger_1": PolicySpec(train=False), "runner": PolicySpec()},
        "trained with tagger_1 frozen",
    ),
    "an agent and a role": (
        {"tagger_0": PolicySpec(), "tagger_1": PolicySpec(train=False), "runner": PolicySpec(train=False)},
        "trained with tagger_1+runner frozen",
    ),
    "populations": ({"tagger": PolicySpec(population=2), "runner": PolicySpec(population=3)}, "all trained"),
}


@pytest.mark.parametrize("what", FREEZING)
def test_the_name_of_the_last_pairing_says_what_is_frozen(what):
    policies, expected = FREEZING[what]
    trainer = grid("cpu", policies=policies)
    names = list(pairings_of(trainer, FixedOpponents(trainer)))
    assert (names[0], names[-1]) == ("all random", expected)


def test_of_many_frozen_agents_the_first_are_named():
    env = gpu_vecenv.make("tag_gridworld", 6, "cpu", num_taggers=7, grid=5, max_steps=9)
    policies = {f"tagger_{k}": PolicySpec(train=k == 0) for k in range(7)} | {"runner": PolicySpec()}
    name = name_as_in_training(Trainer(env, SMALL, policies=policies))
    assert name == "trained with tagger_1+tagger_2+tagger_3+tagger_4 and 2 more frozen"


def test_the_initial_opponent_is_that_of_the_checkpoint_after_a_resume(tmp_path):
    """A resumed trainer may have begun with other weights, such as those of a network of one's own."""
    config = RunConfig(episodes=2, best_episodes=4, best_interval=0, checkpoint_seconds=0, keep=1)
    env, short = grid("cpu").env, PPOConfig(total_steps=6 * 8 * 2, num_steps=8, hidden_sizes=(8,))
    for folder, seed in (("alone", 3), ("other", 3)):
        run(Trainer(env, short, seed=seed), tmp_path / folder, config)
    longer = PPOConfig(total_steps=6 * 8 * 4, num_steps=8, hidden_sizes=(8,))
    for folder, own_weights in (("alone", False), ("other", True)):
        trainer = Trainer(env, longer, seed=3)
        if own_weights:
            for policy in trainer.policies.values():
                for parameter in policy.parameters():
                    values = torch.linspace(-3, 3, parameter.numel())  # choices that are far from even
                    parameter.data.copy_(values.view_as(parameter))
        run(trainer, tmp_path / folder, config, resume=True)
    alone, other = (evaluation_rows(tmp_path / folder) for folder in ("alone", "other"))
    assert alone == other and [row["iteration"] for row in alone[::6]] == ["1", "2", "3", "4"]


def test_a_run_without_its_initial_checkpoint_is_not_resumed_against_it(tmp_path):
    config = RunConfig(episodes=2, best_episodes=4)
    env, short = grid("cpu").env, PPOConfig(total_steps=6 * 8, num_steps=8, hidden_sizes=(8,))
    run(Trainer(env, short), tmp_path, config)
    initial = tmp_path / "checkpoints" / "initial.safetensors"
    assert load_checkpoint(initial)[1]["iteration"] == 0
    initial.unlink()
    assert run(Trainer(env, short), tmp_path, config, resume=True) == 0  # the checkpoint of iteration 0 is still there
    assert load_checkpoint(initial)[1]["iteration"] == 0
    for path in (initial, tmp_path / "checkpoints" / "iteration-00000000.safetensors"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match='leave "initial" out of eval_opponents'):
        run(Trainer(env, short), tmp_path, config, resume=True)
    opponents = RunConfig(episodes=2, best_episodes=4, eval_opponents=("random", "still"))
    assert run(Trainer(env, short), tmp_path, opponents, resume=True) == 0
    with pytest.raises(CheckpointCorruptError, match="somewhere is of other policies than tagger"):
        FixedOpponents(Trainer(env, short)).load_initial({}, "somewhere")


def test_a_table_of_evaluations_keeps_the_rows_before_a_resume(tmp_path):
    path, result = tmp_path / "evaluations.csv", MatchResult("tagger", "random", 0.1, -1.0, math.nan, 1, 3.0, 1 / 3)
    log = EvaluationLog(path)
    assert not path.exists()
    for iteration in (2, 4, 6):
        log(iteration, 10 * iteration, 0.5, [result, result])
    whole = path.read_bytes()
    assert whole.splitlines()[1] == b"2,20,0.5,tagger,random,0.1,-1.0,nan,1,3.0,0.3333333333333333"
    resumed = EvaluationLog(path, 4)
    assert path.read_bytes().splitlines() == whole.splitlines()[:5]
    resumed(4, 40, 0.5, [result, result])
    resumed(6, 60, 0.5, [result, result])
    assert path.read_bytes() == whole
    damaged = whole.replace(b"6,60,", b"six,60,")
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"evaluations.csv, line 6, is damaged: ValueError"):
        EvaluationLog(path, 4)
    assert path.read_bytes() == damaged
    EvaluationLog(path)
    assert not path.exists()


def test_a_selection_that_leaves_no_match_is_refused(tmp_path):
    frozen = grid("cpu", policies={"tagger": PolicySpec(), "runner": PolicySpec(actor="random")})
    cartpole = Trainer(gpu_vecenv.make("cartpole", 4, "cpu"), SMALL)
    race = Trainer(gpu_vecenv.make(Race, 6, "cpu"), SMALL)
    why = "no evaluation is against it"
    for trainer, kinds, message in (
        (frozen, ("random",), rf"is random, and {why} \(random: random plays runner in .*\); expected one of still,"),
        (frozen, ("initial",), rf"is initial, and {why} \(initial: runner is frozen and stays as it began\)"),
        (cartpole, ("random",), r"\(random: there is no other role\); leave it out"),
        (
            race,
            ("still",),
            r"\(still: the game declares no noop of player_1\); expected one of random, initial, or none",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^eval_opponents .*{message}"):
            run(trainer, tmp_path / "run", RunConfig(eval_opponents=kinds))
    assert not (tmp_path / "run").exists()
    for trainer, kinds in ((frozen, ("random", "still")), (frozen, ()), (cartpole, ("random", "still", "initial"))):
        FixedOpponents(trainer, kinds).check_used()


def test_wrong_opponents_are_refused(script):
    trainer = grid("cpu")
    for kinds, scripts, message in (
        (["rnadom"], [], "eval_opponents has 'rnadom'; expected some of random, still, initial, each once"),
        (["still", "still"], [], "eval_opponents has 'still'"),
        ([], [Script("runer", f"{script}:right")], "eval_scripts has 'runer'; nearest: runner"),
        ([], [Script("runner", f"{script}:wrong")], "has no 'wrong'"),
        (
            [],
            [Script("runner", f"{script}:actor")],
            "raised AttributeError: .*; expected a function of the configured game",
        ),
        ([], [Script("runner", f"{script}:number")], "is 3; expected a function of the configured game"),
        ([], [Script("runner", f"{script}:right"), Script("runner_0", f"{script}:right")], "two opponents 'right' of"),
    ):
        with pytest.raises(ConfigError, match=message):
            FixedOpponents(trainer, kinds, scripts)
    alone = Trainer(gpu_vecenv.make("cartpole", 4, "cpu"), SMALL)
    with pytest.raises(ConfigError, match="plays agent, against whom no other role is trained"):
        FixedOpponents(alone, scripts=[Script("agent", f"{script}:right")])
    for text, message in (
        ("runner", "eval_scripts has 'runner'; expected ROLE=file.py:function"),
        ("runner=file.py", "expected ROLE=file.py:function"),
        ("=file.py:name", "expected ROLE=file.py:function"),
        ("runner=file.py:still", "has an opponent 'still' of runner; expected names that are used once"),
    ):
        with pytest.raises(ConfigError, match=message):
            parsed_scripts([text])


@pytest.mark.usefixtures("one_thread")
def test_scripts_on_the_command_line_are_found_again_from_another_folder(script, tmp_path, monkeypatch):
    from gpu_vecenv.cli.main import main

    options = "tag_gridworld --num-envs 4 --num-steps 4 --num-minibatches 2 --hidden-sizes 8 --max-steps 5"
    options += " --device cpu --episodes 2"
    options += " --checkpoint-seconds 0 --best-interval 0 --best-episodes 2 --total-steps 32 --eval-opponents random"
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options.split(), "--eval-scripts", f"runner={script.name}:right", "--out", "run"]) == 0
    names = [row["opponent"] for row in evaluation_rows(tmp_path / "run")]
    assert names == ["random", "random", "right"] * 2
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--resume", "../run", "--total-steps", "48"]) == 0
    assert len(evaluation_rows(tmp_path / "run")) == 9
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["run"]["eval_scripts"] == [f"runner={script}:right"]
