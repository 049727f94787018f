"""threads_per_env and threads_per_block: valid values, tuning and its cache; results never depend on them."""

import copy
import dataclasses
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from games.crew import Crew
from support.emulated_cuda import EmulatedCudaBackend

import gpu_vecenv
from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.cli.main import main
from gpu_vecenv.compile import function_manager
from gpu_vecenv.compile.backends import GROUP_SIZES, GroupShape
from gpu_vecenv.compile.backends.cuda import cuda_constants, default_threads_per_env
from gpu_vecenv.compile.cache import cache_dir
from gpu_vecenv.engine.digest import trajectory_digest
from gpu_vecenv.engine.tuning import Candidate, candidate_shapes, choose, sampling_name, tune
from gpu_vecenv.engine.tuning_cache import (
    LaunchChoice,
    fused_sampling_pays_off,
    nearest_power_of_four,
    read,
    tuning_path,
)
from gpu_vecenv.envs.cartpole import Cartpole
from gpu_vecenv.errors import ConfigError, DeviceUnavailableError, KernelCompileError

CARTPOLE = gpu_vecenv.configure("cartpole", max_steps=6)
GRIDWORLD = gpu_vecenv.configure("tag_gridworld", max_steps=6)
EMULATED = EmulatedCudaBackend.processor_name


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_VECENV_CACHE", str(tmp_path_factory.mktemp("cache") / "kernels"))
        cache_dir.cache_clear()
        yield cache_dir()
    cache_dir.cache_clear()


@pytest.fixture
def kept(cache: Path) -> Iterator[Path]:
    """The same folder without stored tuning results."""
    yield cache
    for path in cache.glob("*.tuning.json"):
        path.unlink()


@pytest.fixture
def emulated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a GPU's thread groups on the device "cpu", thread by thread."""
    monkeypatch.setattr(function_manager, "select", lambda device, driver=None: EmulatedCudaBackend())


def store(game, num_envs, threads_per_env, threads_per_block, fuse_sampling=True):
    """A tuning result for a number of environments."""
    numbers = {"threads_per_env": threads_per_env, "threads_per_block": threads_per_block}
    tuning_path(game, num_envs, EMULATED).write_text(json.dumps({**numbers, "fuse_sampling": fuse_sampling}))


def words(threads_per_env=None, threads_per_block=None, *, game=GRIDWORLD, device="cpu", num_envs=37):
    return trajectory_digest(
        VecEnv(game, num_envs, device, threads_per_env=threads_per_env, threads_per_block=threads_per_block), 3, 15
    ).words.cpu()


# ---------------------------------------------------------------------- valid values


@pytest.mark.parametrize(
    ("threads_per_env", "threads_per_block", "message"),
    [
        (0, None, "threads_per_env is 0; expected"),
        (3, None, "threads_per_env is 3; expected"),
        (48, None, "threads_per_env is 48; expected"),
        (1056, None, "threads_per_env is 1056; expected"),
        (True, None, "threads_per_env is True; expected"),
        (8.0, None, "threads_per_env is 8.0; expected"),
        ([8], None, "threads_per_env is .8.; expected"),
        (8, 0, "threads_per_block is 0 with groups of 8 threads; expected"),
        (8, 16, "threads_per_block is 16 with"),
        (8, 96, "threads_per_block is 96 with"),  # twelve groups: not a power of two
        (8, 2048, "threads_per_block is 2048 with"),
        (8, True, "threads_per_block is True with"),
        (8, "64", "threads_per_block is '64' with"),
        (64, 128, "threads_per_block is 128 with groups of 64 threads; expected None, or 64; see threads_per_env"),
        (64, 32, "threads_per_block is 32 with"),
        (None, 48, "threads_per_block is 48 with"),
    ],
)
def test_group_shapes_that_do_not_fit_are_refused(threads_per_env, threads_per_block, message):
    with pytest.raises(ConfigError, match=message):
        VecEnv(CARTPOLE, 2, "cpu", threads_per_env=threads_per_env, threads_per_block=threads_per_block)


def test_every_group_size_has_blocks_of_a_power_of_two_groups():
    blocks = {
        threads_per_env: [b for b in range(0, 2080, 16) if fits(threads_per_env, b)] for threads_per_env in GROUP_SIZES
    }
    assert blocks.pop(1) == blocks.pop(8) == blocks.pop(32) == [32, 64, 128, 256, 512, 1024]
    assert (
        all(found == [threads_per_env] for threads_per_env, found in blocks.items() if threads_per_env > 32)
        and 1024 in blocks
    )
    assert all(
        (threads_per_block // threads_per_env).bit_count() == 1
        for threads_per_env, found in blocks.items()
        for threads_per_block in found
    )
    assert [GroupShape.of(threads_per_env).threads_per_block for threads_per_env in (1, 32, 64, 96, 1024)] == [
        128,
        128,
        64,
        96,
        1024,
    ]


def fits(threads_per_env, threads_per_block):
    try:
        return GroupShape(threads_per_env, threads_per_block).threads_per_block == threads_per_block
    except ConfigError:
        return False


def test_both_numbers_reach_the_generated_code():
    assert "THREADS_PER_ENV = 8, ENVS_PER_BLOCK = 32;" in cuda_constants(8, 1 << 16, 256)
    assert "THREADS_PER_ENV = 8, ENVS_PER_BLOCK = 16;" in cuda_constants(8, 1 << 16)
    assert "THREADS_PER_ENV = 96, ENVS_PER_BLOCK = 1;" in cuda_constants(96, 1 << 16)


def test_defaults_grow_with_the_agents():
    agents = (1, 2, 5, 32, 33, 110, 256, 300, 512, 513, 1000, 4096, 4097, 10_000)
    assert [default_threads_per_env(n) for n in agents] == [
        1,
        2,
        8,
        32,
        64,
        128,
        256,
        256,
        256,
        256,
        256,
        512,
        544,
        1024,
    ]


def test_defaults_grow_with_the_largest_array_up_to_a_warp():
    sizes = (0, 16, 17, 64, 65, 512, 10_000)
    assert [default_threads_per_env(2, n) for n in sizes] == [2, 2, 2, 4, 8, 32, 32]
    assert [default_threads_per_env(9, n) for n in (0, 100, 300)] == [16, 16, 32]
    assert default_threads_per_env(110, 10_000) == default_threads_per_env(110)


def test_the_largest_array_is_a_field_or_all_observations():
    assert gpu_vecenv.configure("overcooked").layout.largest_array == 2 * 5 * 4 * 26
    assert gpu_vecenv.configure("warehouse", num_agents=1).layout.largest_array == 11 * 10  # the shelves
    assert gpu_vecenv.configure("cartpole").layout.largest_array == 4
    assert gpu_vecenv.configure("connect_four").layout.largest_array == 6 * 7  # the board; observations are bytes
    assert gpu_vecenv.configure("harvest").layout.largest_array == -(-7 * 11 * 11 * 9 // 4)


def test_copies_keep_both_numbers(emulated):
    env = VecEnv(CARTPOLE, 4, "cpu", threads_per_env=8, threads_per_block=64)
    copies = [env.like(num_envs=5), copy.copy(env), copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    assert [one.group_shape for one in copies] == [GroupShape(8, 64)] * 4
    assert env.like(threads_per_env=None, threads_per_block=256).group_shape == GroupShape(1, 256)


@pytest.mark.parametrize(
    ("threads_per_env", "threads_per_block"), [(1, 32), (1, 1024), (4, 64), (8, 256), (32, 32), (32, 512), (96, 96)]
)
def test_results_do_not_depend_on_the_group_shape(threads_per_env, threads_per_block, request):
    alone = words()
    request.getfixturevalue("emulated")
    assert words(threads_per_env, threads_per_block).equal(alone)


@pytest.mark.parametrize(("threads_per_env", "threads_per_block"), [(2, 64), (16, 256)])
def test_results_of_games_with_roles_and_masks_do_not_depend_on_the_group_shape(
    threads_per_env, threads_per_block, request
):
    alone = words(game=Crew())
    request.getfixturevalue("emulated")
    assert words(threads_per_env, threads_per_block, game=Crew()).equal(alone)


# ---------------------------------------------------------------------- the cache of results


def test_similar_numbers_of_environments_share_a_result():
    powers = {1: 1, 2: 1, 3: 4, 10: 4, 11: 16, 100: 64, 1000: 1024, 1024: 1024, 2000: 1024, 2048: 1024, 4000: 4096}
    powers |= {100_000: 65536, 131_072: 65536, 1_000_000: 1 << 20, 1 << 20: 1 << 20}
    assert {num_envs: nearest_power_of_four(num_envs) for num_envs in powers} == powers


def test_the_key_contains_all_that_a_result_may_depend_on(cache, tmp_path):
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
        b'{"threads_per_env": 8, "blo',
        b"\xff\xfe\x00",
        b"[]",
        b"8",
        b"null",
        b'{"threads_per_env": 8, "fuse_sampling": true}',
        b'{"threads_per_env": 7, "threads_per_block": 128, "fuse_sampling": true}',
        b'{"threads_per_env": 8, "threads_per_block": 96, "fuse_sampling": true}',
        b'{"threads_per_env": "8", "threads_per_block": 128, "fuse_sampling": true}',
        b'{"threads_per_env": 8, "threads_per_block": [128], "fuse_sampling": true}',
        b'{"threads_per_env": true, "threads_per_block": 128, "fuse_sampling": true}',
        b'{"threads_per_env": 8, "threads_per_block": 128}',
        b'{"threads_per_env": 8, "threads_per_block": 128, "fuse_sampling": 1}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(content, kept, emulated):
    path = tuning_path(CARTPOLE, 4, EMULATED)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"\.tuning\.json is damaged and ignored"):
        assert read(path) is None
    with pytest.warns(UserWarning, match="is damaged"):
        assert VecEnv(CARTPOLE, 4, "cpu").group_shape == GroupShape(1, 128)


def test_a_missing_or_unreadable_file_is_ignored(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path / "nothing") is None and read(tmp_path) is None


def test_a_stored_result_is_used_unless_a_number_is_given(kept, emulated):
    store(CARTPOLE, 4, 2, 64)
    assert VecEnv(CARTPOLE, 4, "cpu").group_shape == GroupShape(2, 64)
    assert VecEnv(CARTPOLE, 4, "cpu", threads_per_env=4).group_shape == GroupShape(4, 128)
    assert VecEnv(CARTPOLE, 4, "cpu", threads_per_block=256).group_shape == GroupShape(1, 256)
    assert VecEnv(CARTPOLE, 40, "cpu").group_shape == GroupShape(1, 128)
    assert VecEnv(GRIDWORLD, 4, "cpu").group_shape == GroupShape(8, 128)


def test_the_host_does_not_read_stored_results(kept):
    store(CARTPOLE, 4, 2, 64)
    for given in ({}, {"threads_per_env": 8, "threads_per_block": 64, "fuse_sampling": True}):
        env = VecEnv(CARTPOLE, 4, "cpu", **given)
        assert env.group_shape is None and not env.fuse_sampling


def test_a_stored_way_to_sample_is_used_unless_it_or_the_threads_are_given(kept, emulated):
    """Results do not depend on it."""
    store(CARTPOLE, 4, 1, 64, fuse_sampling=False)
    found = {}
    for stored, given in (
        (False, {}),
        (True, {"threads_per_env": 1}),
        (True, {"threads_per_block": 64}),
        (True, {"fuse_sampling": True}),
    ):
        env = VecEnv(CARTPOLE, 4, "cpu", **given)
        assert env.fuse_sampling == env.like().fuse_sampling == stored
        assert env.group_shape.threads_per_block == (128 if "threads_per_env" in given else 64)
        sampler = Sampler(env)
        env.reset(seed=5)
        for _ in range(8):
            sample, (obs, *_) = sampler.step(torch.ones((4, 1, 2)))
        found[stored] = sample.actions, sample.log_probs, obs, *env.state_dict().values()
    assert all(torch.equal(one, two) for one, two in zip(found[False], found[True], strict=True))


# ---------------------------------------------------------------------- sampling and step in one kernel or two


def test_sampling_is_fused_unless_idle_threads_fill_the_gpu():
    h200 = 132 * 2048
    measured = {  # environments, agents, threads of a group: whether one kernel was not slower than two on an H200
        (2000, 5, 8): True,
        (31_623, 5, 8): True,
        (100_000, 5, 8): False,
        (1_000_000, 5, 8): False,
        (100_000, 3, 4): False,
        (100_000, 4, 4): True,
        (1_000_000, 1, 1): True,
        (2000, 100, 128): True,
        (2000, 200, 224): True,
        (2000, 1000, 256): True,
    }
    for (num_envs, agents, threads), fused in measured.items():
        assert fused_sampling_pays_off(num_envs, agents, GroupShape.of(threads), h200) == fused, (num_envs, agents)
    full = h200 // 8
    assert fused_sampling_pays_off(full, 5, GroupShape.of(8), h200)
    assert not fused_sampling_pays_off(full + 1, 5, GroupShape.of(8), h200)
    assert fused_sampling_pays_off(full + 1, 5, GroupShape.of(1), h200)  # one thread for five agents is never idle


def test_without_tuning_the_sizes_of_game_and_gpu_decide(kept, emulated):
    full = EmulatedCudaBackend.resident_threads // 8
    for num_envs, fused in ((full, True), (full + 1, False)):
        assert VecEnv(GRIDWORLD, num_envs, "cpu").fuse_sampling is fused
    # With 42 logits for each of five agents and 8 threads one kernel is never faster, but may be chosen.
    many_logits = gpu_vecenv.configure("tag_continuous", num_taggers=4, num_runners=1, max_steps=6)
    assert VecEnv(many_logits, 3, "cpu", threads_per_env=8).fuse_sampling is False
    assert VecEnv(many_logits, 3, "cpu", threads_per_env=8, fuse_sampling=True).fuse_sampling is True


@pytest.mark.parametrize("value", [1, 0, "yes", [True]])
def test_the_way_to_sample_is_checked(value):
    with pytest.raises(TypeError, match=r"fuse_sampling is .*expected True, False or None"):
        VecEnv(CARTPOLE, 2, "cpu", fuse_sampling=value)


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    ("default", "group_sizes", "blocks"),
    [
        (GroupShape.of(1), {1, 2}, {64, 128, 256}),
        (GroupShape.of(8), {2, 4, 8, 16}, {64, 128, 256}),
        (GroupShape.of(32), {8, 16, 32, 64}, {64, 128, 256}),
        (GroupShape.of(96), {32, 64, 96, 192}, {64, 128, 256, 96, 192}),
        (GroupShape.of(512), {128, 256, 512, 1024}, {128, 256, 512, 1024}),
        (GroupShape.of(1024), {256, 512, 1024}, {256, 512, 1024}),
    ],
)
def test_candidates_are_the_neighbours_of_the_default(default, group_sizes, blocks):
    shapes = candidate_shapes(default)
    assert shapes[0] == default and len(set(shapes)) == len(shapes)
    assert {shape.threads_per_env for shape in shapes} == group_sizes and {
        shape.threads_per_block for shape in shapes
    } == blocks


def test_another_shape_must_be_clearly_faster_than_the_default():
    default, other, broken = GroupShape.of(8), GroupShape.of(4), Candidate(GroupShape.of(2), None, "too large")
    for seconds, chosen in ((0.9, other), (0.96, other), (0.98, default), (1.0, default), (1.5, default)):
        assert choose([Candidate(default, 1.0), broken, Candidate(other, seconds)]).shape == chosen
    third = GroupShape.of(16)
    assert choose([Candidate(s, t) for s, t in ((default, 1.0), (other, 0.8), (third, 0.7))]).shape == third
    fused, split = (Candidate(default, 1.0, fuse_sampling=way) for way in (True, False))
    faster = dataclasses.replace(split, seconds=0.9)
    assert (choose([fused, split]), choose([split, fused]), choose([fused, faster])) == (fused, split, faster)


def only(folder: Path, condition: str) -> Cartpole:
    """Cartpole whose source compiles only for some group shapes."""

    @dataclass(frozen=True, kw_only=True)
    class Narrow(Cartpole):
        source = folder / "narrow.cu"

    rules = CARTPOLE.source_path().read_text()
    Narrow.source.write_text(f'{rules}\nstatic_assert({condition}, "too many registers");\n')
    return Narrow(max_steps=6)


@pytest.mark.slow
def test_the_fastest_is_stored_and_used_and_shapes_that_do_not_compile_are_skipped(kept, emulated, tmp_path):
    game, told = only(tmp_path, "THREADS_PER_ENV == 1 && ENVS_PER_BLOCK > 64"), []
    tuning_path(game, 40, EMULATED).write_text("damaged")
    found = tune(game, 40, "cpu", on_progress=lambda *report: told.append(report))
    shapes = candidate_shapes(GroupShape.of(1))
    assert [one.shape for one in found.candidates] == shapes
    assert all(one.fuse_sampling is None for one in found.candidates)
    fused, split = (f"{found.shape}, {sampling_name(way)}" for way in (True, False))
    chosen = fused if found.fuse_sampling else split
    assert [text for _, text in told] == [
        *map(str, shapes),
        f"{shapes[0]} again",
        *(fused, split, f"{fused} again", chosen),
    ]
    assert [fraction for fraction, _ in told] == [k / (len(shapes) + 4) for k in range(len(shapes) + 5)]
    problems = {one.shape: one.problem for one in found.candidates if one.seconds is None}
    assert set(problems) == {GroupShape(1, 64), GroupShape(2, 64), GroupShape(2, 128), GroupShape(2, 256)}
    assert all("too many registers" in problem for problem in problems.values())
    assert all(one.seconds > 0 and one.problem is None for one in found.candidates if one.shape not in problems)
    assert found.default == found.candidates[0] and found.default.seconds > 0
    assert found.shape == choose(found.candidates).shape
    assert [(one.shape, one.fuse_sampling) for one in found.sampling] == [(found.shape, True), (found.shape, False)]
    assert all(one.seconds > 0 and one.problem is None for one in found.sampling)
    assert found.fuse_sampling == choose(found.sampling).fuse_sampling

    stored = LaunchChoice(found.shape, found.fuse_sampling)
    assert found.path == tuning_path(game, 40, EMULATED) and read(found.path) == stored
    assert [path.name for path in kept.iterdir() if "tuning" in path.name] == [found.path.name]  # no draft
    measured = json.loads(found.path.read_text())["measured"]
    assert [one["seconds"] for one in measured] == [one.seconds for one in (*found.candidates, *found.sampling)]
    store(game, 40, 1, 512)  # not the default, whatever was chosen
    assert VecEnv(game, 37, "cpu").group_shape == GroupShape(1, 512)
    assert words(game=game).equal(words(1, 128, game=game))


def test_a_default_that_does_not_compile_is_an_error(kept, emulated, tmp_path):
    told = []
    with pytest.raises(KernelCompileError, match="too many registers"):
        tune(only(tmp_path, "THREADS_PER_ENV > 1"), 40, "cpu", on_progress=lambda *report: told.append(report))
    assert told == [(0.0, str(Candidate(GroupShape.of(1), None)))] and list(kept.glob("*.tuning.json")) == []


def test_tuning_on_the_host_is_refused(kept):
    with pytest.raises(
        DeviceUnavailableError, match=r"device is cpu, where one thread runs an environment.*expected a GPU"
    ):
        tune("cartpole", 40, "cpu")
    assert list(kept.glob("*.tuning.json")) == []


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True, "4"])
def test_the_number_of_environments_is_checked(num_envs):
    with pytest.raises((TypeError, ValueError), match=r"num_envs is .*expected an int >= 1"):
        tune("cartpole", num_envs, "cpu")


# ---------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_prints_the_measurements_and_the_path_of_the_result(kept, emulated, capsys, monkeypatch):
    """And a line of progress before each measurement."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("GPU_VECENV_PROGRESS_SECONDS", "0")
    assert main(["tune", "cartpole", "--num-envs", "40", "--max-steps", "6", "--device", "cpu"]) == 0
    output, errors = capsys.readouterr()
    shapes = candidate_shapes(GroupShape.of(1))
    lines = [re.fullmatch(r"tune: (\d+)%(?:, .+)?  (.+)", line).groups() for line in errors.splitlines()]
    assert [int(percent) for percent, _ in lines] == [100 * k // (len(shapes) + 4) for k in range(len(shapes) + 5)]
    assert [text for _, text in lines[:-5]] == list(map(str, shapes))
    path = tuning_path(CARTPOLE, 40, EMULATED)
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines() if line[:1].isdigit()]
    measured = {
        (GroupShape(int(threads_per_env), int(threads_per_block)), what): (float(us.replace(",", "")), note)
        for threads_per_env, threads_per_block, what, us, note in rows
    }
    stored, given, ways = read(path), "actions given", [sampling_name(way) for way in (True, False)]
    expected = [(shape, given) for shape in shapes] + [(stored.group_shape, way) for way in ways]
    assert set(measured) == set(expected) and len(rows) == len(expected)
    for times in ([us for (_, what), (us, _) in measured.items() if (what == given) == part] for part in (True, False)):
        assert times == sorted(times) and times[0] > 0
    assert measured[GroupShape.of(1), given][1].startswith("1.000 (default)")
    assert measured[stored.group_shape, ways[0]][1].startswith("1.000 (default)")
    chosen = (stored.group_shape, sampling_name(stored.fuse_sampling))
    assert {way for way, (_, note) in measured.items() if "(stored)" in note} == {chosen, (stored.group_shape, given)}
    assert f"{stored.group_shape}, {chosen[1]}, in\n  {path}\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "cartpole", "--num-envs", "0", "--device", "cpu"], "num_envs is 0; expected an int >= 1"),
        (["tune", "cartpole", "--num-envs", "9", "--device", "cpu"], "tune: the device is cpu, where one thread"),
        (["tune", "cartpole", "--num-envs", "9", "--max-steps", "0", "--device", "cpu"], "max_steps is 0; expected"),
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
def test_a_result_on_a_gpu_is_used_by_environments(driver, kept):
    game = gpu_vecenv.configure("tag_gridworld", num_taggers=40, max_steps=6)
    found = tune(game, 100, "cuda", driver=driver)
    assert all(one.problem is None and one.seconds > 0 for one in found.candidates)
    assert read(found.path) == LaunchChoice(found.shape, found.fuse_sampling)
    assert found.shape == choose(found.candidates).shape
    assert found.fuse_sampling == choose(found.sampling).fuse_sampling
    env = VecEnv(game, 100, "cuda", driver=driver)
    assert (env.group_shape, env.fuse_sampling) == (found.shape, found.fuse_sampling)
    numbers = {"threads_per_env": 16, "threads_per_block": 256, "fuse_sampling": not found.fuse_sampling}
    found.path.write_text(json.dumps(numbers))  # not the default, whatever was chosen
    env = VecEnv(game, 100, "cuda", driver=driver)
    assert (env.group_shape, env.fuse_sampling) == (GroupShape(16, 256), not found.fuse_sampling)
    assert words(game=game, device="cuda").equal(words(game=game))


@pytest.mark.gpu
@pytest.mark.parametrize("threads_per_block", [32, 64, 128, 256, 512, 1024])
def test_results_on_a_gpu_do_not_depend_on_the_block(threads_per_block):
    for game in (GRIDWORLD, Crew(), CARTPOLE):
        for threads_per_env in (1, 8, 32):
            assert words(threads_per_env, threads_per_block, game=game, device="cuda").equal(words(game=game)), (
                threads_per_env
            )


@pytest.mark.gpu
def test_tuning_frees_its_memory(kept):
    torch.cuda.empty_cache()
    tune(CARTPOLE, 1000, "cuda")  # permanent allocations: modules, the allocator's first blocks
    before = torch.cuda.memory_allocated()
    tune(CARTPOLE, 1000, "cuda")
    assert torch.cuda.memory_allocated() == before
