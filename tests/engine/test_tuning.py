"""Lanes per replica and threads per block: what may be given, what is measured and kept, and that no bit changes."""

import copy
import json
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from games.crew import Crew
from lanes import LanesBackend

import gpu_vecenv
from gpu_vecenv import VecEnv
from gpu_vecenv.cli.main import main
from gpu_vecenv.compile import function_manager
from gpu_vecenv.compile.backends import TEAMS, TeamShape
from gpu_vecenv.compile.backends.cuda import cuda_prologue, default_team
from gpu_vecenv.compile.cache import folder
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.tuning import Candidate, choice, neighbours, tune
from gpu_vecenv.engine.tuning_cache import nearest_power, read, tuning_path
from gpu_vecenv.envs.cartpole import Cartpole
from gpu_vecenv.errors import ConfigError, DeviceUnavailableError, KernelCompileError

CARTPOLE = gpu_vecenv.configure("cartpole", max_steps=6)
GRIDWORLD = gpu_vecenv.configure("tag_gridworld", max_steps=6)
LANES = LanesBackend.hardware


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of this module's own, where no other test finds what is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_VECENV_CACHE", str(tmp_path_factory.mktemp("cache") / "kernels"))
        folder.cache_clear()
        yield folder()
    folder.cache_clear()


@pytest.fixture
def kept(cache: Path) -> Iterator[Path]:
    """The same, without what other tests have kept in it."""
    yield cache
    for path in cache.glob("*.tuning.json"):
        path.unlink()


@pytest.fixture
def lanes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "cpu" compiles and launches as a GPU does, lane by lane."""
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: LanesBackend())


def words(team=None, block=None, *, game=GRIDWORLD, device="cpu", num_envs=37):
    return trajectory_digest(VecEnv(game, num_envs, device, team=team, block=block), 3, 15).words.cpu()


# ---------------------------------------------------------------------- what may be given


@pytest.mark.parametrize(
    ("team", "block", "message"),
    [
        (0, None, "team is 0; expected"),
        (3, None, "team is 3; expected"),
        (48, None, "team is 48; expected"),
        (1056, None, "team is 1056; expected"),
        (True, None, "team is True; expected"),
        (8.0, None, "team is 8.0; expected"),
        ([8], None, "team is .8.; expected"),
        (8, 0, "block is 0 with teams of 8 lanes; expected"),
        (8, 16, "block is 16 with"),
        (8, 96, "block is 96 with"),  # twelve teams: no power of two
        (8, 2048, "block is 2048 with"),
        (8, True, "block is True with"),
        (8, "64", "block is '64' with"),
        (64, 128, "block is 128 with teams of 64 lanes; expected None, or 64; see team"),
        (64, 32, "block is 32 with"),
        (None, 48, "block is 48 with"),
    ],
)
def test_what_does_not_fit_is_refused(team, block, message):
    with pytest.raises(ConfigError, match=message):
        VecEnv(CARTPOLE, 2, "cpu", team=team, block=block)


def test_every_team_has_blocks_that_hold_a_power_of_two_of_it():
    blocks = {team: [b for b in range(0, 2080, 16) if fits(team, b)] for team in TEAMS}
    assert blocks.pop(1) == blocks.pop(8) == blocks.pop(32) == [32, 64, 128, 256, 512, 1024]
    assert all(found == [team] for team, found in blocks.items() if team > 32) and 1024 in blocks
    assert all((block // team).bit_count() == 1 for team, found in blocks.items() for block in found)
    assert [TeamShape.of(team).block for team in (1, 32, 64, 96, 1024)] == [128, 128, 64, 96, 1024]


def fits(team, block):
    try:
        return TeamShape(team, block).block == block
    except ConfigError:
        return False


def test_both_reach_the_text():
    assert "TEAM = 8, TEAMS_PER_BLOCK = 32;" in cuda_prologue(8, 1 << 16, 256)
    assert "TEAM = 8, TEAMS_PER_BLOCK = 16;" in cuda_prologue(8, 1 << 16)
    assert "TEAM = 96, TEAMS_PER_BLOCK = 1;" in cuda_prologue(96, 1 << 16)


def test_defaults_grow_with_the_agents():
    agents = (1, 2, 5, 32, 33, 110, 256, 300, 512, 513, 1000, 4096, 4097, 10_000)
    assert [default_team(n) for n in agents] == [1, 2, 8, 32, 64, 128, 256, 256, 256, 256, 256, 512, 544, 1024]


def test_copies_keep_both(lanes):
    env = VecEnv(CARTPOLE, 4, "cpu", team=8, block=64)
    copies = [env.like(num_envs=5), copy.copy(env), copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    assert [one.teams for one in copies] == [TeamShape(8, 64)] * 4
    assert env.like(team=None, block=256).teams == TeamShape(1, 256)


@pytest.mark.parametrize(("team", "block"), [(1, 32), (1, 1024), (4, 64), (8, 256), (32, 32), (32, 512), (96, 96)])
def test_no_bit_depends_on_team_or_block(team, block, request):
    alone = words()
    request.getfixturevalue("lanes")
    assert words(team, block).equal(alone)


@pytest.mark.parametrize(("team", "block"), [(2, 64), (16, 256)])
def test_nor_do_those_of_roles_and_masks(team, block, request):
    alone = words(game=Crew())
    request.getfixturevalue("lanes")
    assert words(team, block, game=Crew()).equal(alone)


# ---------------------------------------------------------------------- what is kept


def test_about_as_many_replicas_share_a_choice():
    powers = {1: 1, 2: 1, 3: 4, 10: 4, 11: 16, 100: 64, 1000: 1024, 1024: 1024, 2000: 1024, 2048: 1024, 4000: 4096}
    powers |= {100_000: 65536, 131_072: 65536, 1_000_000: 1 << 20, 1 << 20: 1 << 20}
    assert {num_envs: nearest_power(num_envs) for num_envs in powers} == powers


def test_the_key_holds_all_that_a_choice_may_depend_on(cache, tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Other(Cartpole):
        source = tmp_path / "cartpole.cu"

    rules = CARTPOLE.source_path().read_text()
    Other.source.write_text(rules + "// another\n")
    ways = [
        (CARTPOLE, 1000, "NVIDIA A"),
        (CARTPOLE, 10_000, "NVIDIA A"),
        (CARTPOLE, 1000, "NVIDIA B"),
        (gpu_vecenv.configure("cartpole", max_steps=7), 1000, "NVIDIA A"),
        (gpu_vecenv.configure("acrobot", max_steps=6), 1000, "NVIDIA A"),
        (Other(max_steps=6), 1000, "NVIDIA A"),
    ]
    paths = {tuning_path(*way) for way in ways}
    assert len(paths) == len(ways) and {path.parent for path in paths} == {cache}
    before = tuning_path(*ways[-1])
    Other.source.write_text(rules + "// yet another\n")
    assert tuning_path(*ways[-1]) != before
    assert tuning_path(CARTPOLE, 1024, "NVIDIA A") == tuning_path(*ways[0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"team": 8, "blo',
        b"\xff\xfe\x00",
        b"[]",
        b"8",
        b"null",
        b'{"team": 8}',
        b'{"team": 7, "block": 128}',
        b'{"team": 8, "block": 96}',
        b'{"team": "8", "block": 128}',
        b'{"team": 8, "block": [128]}',
        b'{"team": true, "block": 128}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_counts_as_none(content, kept, lanes):
    path = tuning_path(CARTPOLE, 4, LANES)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"\.tuning\.json is damaged: nothing is kept there"):
        assert read(path) is None
    with pytest.warns(UserWarning, match="is damaged"):
        assert VecEnv(CARTPOLE, 4, "cpu").teams == TeamShape(1, 128)


def test_so_does_one_that_is_not_there_or_cannot_be_read(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path / "nothing") is None and read(tmp_path) is None


def test_what_is_kept_is_taken_unless_something_is_given(kept, lanes):
    tuning_path(CARTPOLE, 4, LANES).write_text('{"team": 2, "block": 64}')
    assert VecEnv(CARTPOLE, 4, "cpu").teams == TeamShape(2, 64)
    assert VecEnv(CARTPOLE, 4, "cpu", team=4).teams == TeamShape(4, 128)
    assert VecEnv(CARTPOLE, 4, "cpu", block=256).teams == TeamShape(1, 256)
    assert VecEnv(CARTPOLE, 40, "cpu").teams == TeamShape(1, 128)
    assert VecEnv(GRIDWORLD, 4, "cpu").teams == TeamShape(8, 128)


def test_the_host_looks_nothing_up(kept):
    tuning_path(CARTPOLE, 4, LANES).write_text('{"team": 2, "block": 64}')
    assert VecEnv(CARTPOLE, 4, "cpu").teams is None and VecEnv(CARTPOLE, 4, "cpu", team=8, block=64).teams is None


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    ("default", "teams", "blocks"),
    [
        (TeamShape.of(1), {1, 2}, {64, 128, 256}),
        (TeamShape.of(8), {2, 4, 8, 16}, {64, 128, 256}),
        (TeamShape.of(32), {8, 16, 32, 64}, {64, 128, 256}),
        (TeamShape.of(96), {32, 64, 96, 192}, {64, 128, 256, 96, 192}),
        (TeamShape.of(512), {128, 256, 512, 1024}, {128, 256, 512, 1024}),
        (TeamShape.of(1024), {256, 512, 1024}, {256, 512, 1024}),
    ],
)
def test_the_neighbours_of_a_default(default, teams, blocks):
    shapes = neighbours(default)
    assert shapes[0] == default and len(set(shapes)) == len(shapes)
    assert {shape.team for shape in shapes} == teams and {shape.block for shape in shapes} == blocks


def test_another_choice_must_be_clearly_faster():
    default, other, broken = TeamShape.of(8), TeamShape.of(4), Candidate(TeamShape.of(2), None, "too large")
    for seconds, chosen in ((0.9, other), (0.96, other), (0.98, default), (1.0, default), (1.5, default)):
        assert choice([Candidate(default, 1.0), broken, Candidate(other, seconds)], default) == chosen
    third = TeamShape.of(16)
    assert choice([Candidate(s, t) for s, t in ((default, 1.0), (other, 0.8), (third, 0.7))], default) == third


def only(folder: Path, condition: str) -> Cartpole:
    """Cartpole with a text that compiles only for some teams and blocks."""

    @dataclass(frozen=True, kw_only=True)
    class Narrow(Cartpole):
        source = folder / "narrow.cu"

    rules = CARTPOLE.source_path().read_text()
    Narrow.source.write_text(f'{rules}\nstatic_assert({condition}, "too many registers");\n')
    return Narrow(max_steps=6)


def test_the_fastest_is_kept_and_taken_and_what_does_not_compile_is_passed_over(kept, lanes, tmp_path):
    game, told = only(tmp_path, "TEAM == 1 && TEAMS_PER_BLOCK > 64"), []
    tuning_path(game, 40, LANES).write_text("damaged")
    found = tune(game, 40, "cpu", on_candidate=told.append)
    assert [one.shape for one in told] == neighbours(TeamShape.of(1)) == [one.shape for one in found.candidates]
    problems = {one.shape: one.problem for one in found.candidates if one.seconds is None}
    assert set(problems) == {TeamShape(1, 64), TeamShape(2, 64), TeamShape(2, 128), TeamShape(2, 256)}
    assert all("too many registers" in problem for problem in problems.values())
    assert all(one.seconds > 0 and one.problem is None for one in found.candidates if one.shape not in problems)
    assert found.default == found.candidates[0] and 0 < found.default.seconds <= told[0].seconds
    assert found.shape == choice(found.candidates, TeamShape.of(1))

    assert found.path == tuning_path(game, 40, LANES) and read(found.path) == found.shape
    assert [path.name for path in kept.iterdir() if "tuning" in path.name] == [found.path.name]  # no draft
    measured = json.loads(found.path.read_text())["measured"]
    assert [one["seconds"] for one in measured] == [one.seconds for one in found.candidates]
    found.path.write_text('{"team": 1, "block": 512}')  # no default, whatever was chosen
    assert VecEnv(game, 37, "cpu").teams == TeamShape(1, 512)
    assert words(game=game).equal(words(1, 128, game=game))


def test_a_default_that_does_not_compile_is_an_error(kept, lanes, tmp_path):
    told = []
    with pytest.raises(KernelCompileError, match="too many registers"):
        tune(only(tmp_path, "TEAM > 1"), 40, "cpu", on_candidate=told.append)
    assert told == [] and list(kept.glob("*.tuning.json")) == []


def test_the_host_has_nothing_to_choose(kept):
    with pytest.raises(DeviceUnavailableError, match=r"device is cpu, where one thread runs a replica.*expected a GPU"):
        tune("cartpole", 40, "cpu")
    assert list(kept.glob("*.tuning.json")) == []


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True, "4"])
def test_how_many_replicas_is_checked(num_envs):
    with pytest.raises((TypeError, ValueError), match=r"num_envs is .*expected an int >= 1"):
        tune("cartpole", num_envs, "cpu")


# ---------------------------------------------------------------------- the command


def test_the_command_tells_what_was_measured_and_where_the_choice_lies(kept, lanes, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["tune", "cartpole", "--num-envs", "40", "--config", "max_steps=6", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    path = tuning_path(CARTPOLE, 40, LANES)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    measured = {TeamShape(int(team), int(block)): (float(us.replace(",", "")), note) for team, block, us, note in rows}
    assert set(measured) == set(neighbours(TeamShape.of(1)))
    times = [us for us, _ in measured.values()]
    assert times == sorted(times) and times[0] > 0
    assert measured[TeamShape.of(1)][1].startswith("1.000 (default)")
    assert [shape for shape, (_, note) in measured.items() if "(kept)" in note] == [read(path)]
    assert f"{read(path)}, in\n  {path}\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "tune needs a game's name first"),
        (["tune", "cartpole"], "--num-envs"),
        (["tune", "cartpole", "--num-envs", "0", "--device", "cpu"], "num_envs is 0; expected an int >= 1"),
        (["tune", "cartpole", "--num-envs", "9", "--device", "cpu"], "tune: the device is cpu, where one thread"),
        (["tune", "cartpole", "--num-envs", "9", "--config", "steps=4"], "no configuration key 'steps'"),
        (["tune", "cartpole", "--num-envs", "9", "--config", "max_steps=few"], "max_steps is 'few'"),
        (["tune", "cartpole", "--num-envs", "9", "--config", "max_steps"], "'max_steps'; expected key=value"),
    ],
)
def test_the_command_refuses_with_one_line(arguments, message, kept, capsys):
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.startswith("gpu-vecenv: error: ") and message in errors
    assert list(kept.glob("*.tuning.json")) == []


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("driver", ["pycuda", "cuda_core"])
def test_a_gpu_keeps_a_choice_that_environments_take(driver, kept):
    game = gpu_vecenv.configure("tag_gridworld", num_taggers=40, max_steps=6)
    found = tune(game, 100, "cuda", driver=driver)
    assert all(one.problem is None and one.seconds > 0 for one in found.candidates)
    assert read(found.path) == found.shape == choice(found.candidates, found.default.shape)
    assert VecEnv(game, 100, "cuda", driver=driver).teams == found.shape
    found.path.write_text('{"team": 16, "block": 256}')  # no default, whatever was chosen
    assert VecEnv(game, 100, "cuda", driver=driver).teams == TeamShape(16, 256)
    assert words(game=game, device="cuda").equal(words(game=game))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024])
def test_no_bit_of_a_gpu_depends_on_the_block(block):
    for game in (GRIDWORLD, Crew(), CARTPOLE):
        for team in (1, 8, 32):
            assert words(team, block, game=game, device="cuda").equal(words(game=game)), team


@pytest.mark.gpu
def test_measuring_leaves_no_memory_behind(kept):
    torch.cuda.empty_cache()
    tune(CARTPOLE, 1000, "cuda")  # what stays for good: modules, the allocator's first blocks
    before = torch.cuda.memory_allocated()
    tune(CARTPOLE, 1000, "cuda")
    assert torch.cuda.memory_allocated() == before
