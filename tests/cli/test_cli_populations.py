"""Populations on the command line: train, resume, and commands that take a member of a run."""

import json
import shutil
import sys

import pytest
from support.bitwise import equal_bits

import gpu_vecenv
from gpu_vecenv import evaluate, load_policy
from gpu_vecenv.cli.main import main
from gpu_vecenv.errors import CheckpointCorruptError, ConfigError
from gpu_vecenv.train.checkpoint import save_checkpoint
from gpu_vecenv.train.game_policy import populations_of_run, read_run, run_and_member
from gpu_vecenv.train.populations import stored_members, stored_populations

TINY = "--num-steps 8 --num-minibatches 2 --num-epochs 1 --hidden-sizes 8 --device cpu --episodes 4 --best-episodes 4"
TAG = "--max-steps 8 --grid 3 --num-envs 12 --learning-rate 0.1"
QUICK = ["--episodes", "8", "--device", "cpu"]
POPULATIONS = json.dumps({"tagger": {"population": 3, "gamma": 0.9}, "runner": {"population": 2}})
GRID = ["train", "tag_gridworld", *TINY.split(), *TAG.split(), "--policies", POPULATIONS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of 3 taggers and 2 runners, and of a team. Only to be read."""
    folder = tmp_path_factory.mktemp("populations")
    assert main([*GRID, "--total-steps", "288", "--out", str(folder / "tag")]) == 0
    team = ["train", "simple_spread", *TINY.split(), "--num-envs", "8", "--population", "2", "--max-steps", "5"]
    assert main([*team, "--total-steps", "64", "--out", str(folder / "team")]) == 0
    return folder


@pytest.fixture
def command(trained, capsys, monkeypatch, tmp_path):
    """Runs a command line in a folder with copies of the runs: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)

    def call(*arguments):
        capsys.readouterr()
        code = main(arguments)
        return code, *capsys.readouterr()

    yield call
    sys.modules.pop("own_scripts", None)


def weights_of(checkpoint, policy):
    tensors, start = read_run(checkpoint, False)[1], f"policy.{policy}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def test_a_resumed_run_is_bitwise_equal(command, tmp_path):
    saves = ["--checkpoint-seconds", "0", "--keep", "9"]
    assert command(*GRID, "--total-steps", "384", *saves, "--out", "whole")[0] == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for iteration in (3, 4):
        (tmp_path / f"part/checkpoints/iteration-{iteration:08}.safetensors").unlink()
    assert command("train", "--resume", "part")[0] == 0
    (_, tensors, manifest), (_, found, _) = (read_run(tmp_path / run, False) for run in ("whole", "part"))
    assert manifest["iteration"] == 4 and manifest["populations"] == {"tagger": 3, "runner": 2}
    assert len(manifest["trained"]) == 5
    assert equal_bits(tensors, found)


def test_a_member_of_a_run_is_loaded(trained):
    run = trained / "tag"
    assert populations_of_run(run) == {"tagger": 3, "runner": 2}
    for member, own in enumerate([("tagger_p0", "runner_p0"), ("tagger_p1", "runner_p1"), ("tagger_p2", "runner_p0")]):
        for loaded in (load_policy(run, member=member), load_policy(f"{run}:{member}")):
            assert loaded.policies.keys() == loaded.configs.keys() == {"tagger", "runner"}
            assert loaded.configs["tagger"].gamma == 0.9
            for role, name in zip(("tagger", "runner"), own, strict=True):
                assert equal_bits(dict(loaded[role].state_dict()), weights_of(run, name))
    first, second = (load_policy(run, member=member)["tagger"] for member in (0, 1))
    assert not equal_bits(dict(first.state_dict()), dict(second.state_dict()))


def test_a_run_of_populations_needs_the_number_of_a_member(trained):
    run = trained / "tag"
    with pytest.raises(ConfigError, match=r"several members of .*; expected member=0 to 2, or as the run .*tag:0"):
        load_policy(run)
    with pytest.raises(ConfigError, match=r"member is 3; expected 0 to 2: .*tagger has 3"):
        load_policy(run, member=3)
    with pytest.raises(ConfigError, match="member is 1; expected one of the two numbers"):
        load_policy(f"{run}:1", member=1)
    with pytest.raises(TypeError, match="member is '1'"):
        load_policy(run, member="1")


def test_a_file_may_have_the_name_of_a_member(tmp_path):
    assert run_and_member(tmp_path / "run:2") == (tmp_path / "run", 2)
    (tmp_path / "run:2").touch()
    assert run_and_member(tmp_path / "run:2") == (tmp_path / "run:2", None)
    assert run_and_member("a:b:10") == (run_and_member("a:b")[0], 10)


def test_a_checkpoint_without_one_of_its_members_is_damaged(trained, tmp_path):
    _, tensors, manifest = read_run(trained / "tag", False)
    save_checkpoint(tmp_path / "one", tensors, {**manifest, "populations": {"tagger": 4, "runner": 2}})
    with pytest.raises(CheckpointCorruptError, match="lacks tagger_p3"):
        load_policy(tmp_path / "one", member=0)
    for wrong in ([1], {"tagger": "3"}, {"tagger": 1}):
        with pytest.raises(CheckpointCorruptError, match="populations is"):
            stored_populations({"populations": wrong}, "file")
    assert stored_populations({}, "file") == {}
    assert stored_members({"b": 2}, ["a", "b_p1", "b_p0"], "file") == {"a": ["a"], "b": ["b_p0", "b_p1"]}


def test_crossplay_of_a_run_is_a_matrix_of_its_members(command):
    code, output, _ = command("crossplay", "tag", *QUICK, "--json", "--seed", "5")
    assert code == 0
    found = json.loads(output)
    assert found["rows"] == ["tag:0", "tag:1", "tag:2"] and found["columns"] == ["tag:0", "tag:1"]
    env = gpu_vecenv.make("tag_gridworld", 8, "cpu", max_steps=8, grid=3)
    for row in range(3):
        for column in range(2):
            actors = {
                "tagger": load_policy("tag", member=row, device="cpu")["tagger"],
                "runner": load_policy("tag", member=column, device="cpu")["runner"],
            }
            expected = evaluate(env, actors, 8, seed=5)["return_tagger"]
            assert found["returns"]["tagger"]["mean"][row][column] == pytest.approx(expected, rel=1e-9)
    assert len({number for row in found["returns"]["tagger"]["mean"] for number in row}) > 2
    assert found["self_and_cross_play"] == {}, "all of them trained together"
    one = json.loads(command("crossplay", "tag:2", "random", *QUICK, "--json")[1])
    assert one["rows"] == one["columns"] == ["tag:2", "random"]


def test_self_play_and_cross_play_of_a_team(command):
    found = json.loads(command("crossplay", "team", *QUICK, "--json")[1])
    assert found["rows"] == found["columns"] == ["team:0", "team:1"]
    told, means = found["self_and_cross_play"]["agent"], found["returns"]["agent"]["mean"]
    assert told["self_play"] == pytest.approx((means[0][0] + means[1][1]) / 2)
    assert told["cross_play"] == pytest.approx((means[0][1] + means[1][0]) / 2)


def test_members_that_trained_together_are_one_run(command, tmp_path):
    shutil.copytree(tmp_path / "tag", tmp_path / "other")
    shutil.copytree(tmp_path / "tag", tmp_path / "third")
    checkpoint = f"third/checkpoints/{max((tmp_path / 'third/checkpoints').glob('iteration-*')).name}:0"
    code, output, _ = command("crossplay", "tag", "other:0", "other:1", checkpoint, "third:1", *QUICK, "--json")
    assert code == 0
    found = json.loads(output)
    names = ["tag:0", "tag:1", "other:0", "other:1", checkpoint, "third:1"]
    assert found["rows"] == [*names[:2], "tag:2", *names[2:]] and found["columns"] == names
    rows = [row for k, row in enumerate(found["returns"]["tagger"]["mean"]) if k != 2]
    told = found["self_and_cross_play"]["tagger"]
    assert told["runs"] == 3 and told["self_play"] == pytest.approx(sum(rows[k][k] for k in range(6)) / 6)
    cross = [rows[i][j] for i in range(6) for j in range(6) if i // 2 != j // 2]
    assert told["cross_play"] == pytest.approx(sum(cross) / 24)
    # All three runs are equal, so the means without one of them are too.
    assert told["self_play_standard_error"] == pytest.approx(0, abs=1e-9)


def test_commands_take_a_member(command, tmp_path):
    found = json.loads(command("evaluate", "tag:1", *QUICK, "--opponents", "runner=tag:0", "--json")[1])
    first, second = (load_policy("tag", member=member, device="cpu") for member in (0, 1))
    env = gpu_vecenv.make("tag_gridworld", 8, "cpu", max_steps=8, grid=3)
    expected = evaluate(env, {"tagger": second["tagger"], "runner": first["runner"]}, 8)
    assert found["return_tagger"] == pytest.approx(expected["return_tagger"], rel=1e-9)
    code, _, errors = command("evaluate", "tag", *QUICK)
    assert code == 2 and "expected member=0 to 2" in errors
    assert command("replay", "record", "tag:2", "--device", "cpu")[0] == 0
    assert command("export", "tag:2", "--format", "torchscript")[0] == 0
    assert (tmp_path / "tag/torchscript-2/tagger.pt").is_file()


def test_the_best_responses_to_each_member_have_a_file(command, tmp_path):
    options = ["--roles", "runner", "--num-envs", "4", "--total-steps", "32", *QUICK]
    for run, name in (("tag:1", "exploitability-1.json"), ("tag/checkpoints:2", "exploitability-2.json")):
        code, output, _ = command("exploit", run, *options)
        assert code == 0 and output.splitlines()[-1] == f"wrote tag/{name}"
        assert json.loads((tmp_path / "tag" / name).read_text())["run"] == run


def test_a_member_is_frozen_or_an_opponent(command, tmp_path):
    options = [*TINY.split(), *TAG.split(), "--total-steps", "96"]
    assert command("train", "tag_gridworld", *options, "--frozen", "runner=tag:1", "--out", "frozen")[0] == 0
    own, member = weights_of(tmp_path / "frozen", "runner"), weights_of(tmp_path / "tag", "runner_p1")
    assert equal_bits(own, member)
    against = ["--opponents", "runner=tag:1", "--opponents-share", "0.5", "--opponents-ranges", "2"]
    assert command("train", "tag_gridworld", *options, *against, "--out", "against")[0] == 0
    assert "win_rate_tagger_against_runner=tag:1" in (tmp_path / "against/metrics.csv").read_text().splitlines()[0]
    tensors = read_run(tmp_path / "against", False)[1]
    assert any(name.startswith("opponents.actors.") and tensor.numel() for name, tensor in tensors.items())


def test_the_population_of_all_policies_and_what_is_wrong(command, tmp_path):
    options = [*TINY.split(), "--max-steps", "8", "--total-steps", "1", "--best-episodes", "0", "--num-envs", "auto"]
    assert command("train", "tag_gridworld", *options, "--population", "3", "--out", "auto")[0] == 0
    manifest = read_run(tmp_path / "auto", False)[2]
    assert manifest["populations"] == {"tagger": 3, "runner": 3} and manifest["num_envs"] % 9 == 0
    header = (tmp_path / "auto/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"policy_loss_tagger_p2", "return_runner_p1"} <= set(header)
    for wrong in (0, 1.5, "2", True):
        policies = json.dumps({"tagger": {"population": wrong}})
        code, _, errors = command("train", "tag_gridworld", *options, "--policies", policies, "--out", "wrong")
        assert code == 2 and "population of tagger in policies is" in errors and not (tmp_path / "wrong").exists()
