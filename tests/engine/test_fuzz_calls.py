"""Wrong calls and injections at random, a few of each; and that both fuzzers report failures."""

import dataclasses
import os
import subprocess
from pathlib import Path

import gymnasium
import pytest
import torch
from reliability import calls, injections
from reliability.calls import Bad, Calls, problem_of
from reliability.injections import HostileInt, HostileStr, Injections, Injector, Named, stripped, watching

import gpu_vecenv
from gpu_vecenv.compile.backends.host import HostBackend
from gpu_vecenv.compile.codegen import game_source, generate_header
from gpu_vecenv.declare.env import Env
from gpu_vecenv.declare.layout import CONSTANT_NAME
from gpu_vecenv.envs.registry import ENV_ID, GAMES, versions
from gpu_vecenv.errors import CompilerError, ConfigError, EnvDefinitionError, UnknownGameError


@pytest.mark.slow
def test_wrong_calls_are_refused_and_change_nothing(random_seed, device):
    failures, counts = calls.fuzz_calls(device, 750, random_seed)
    assert failures == []
    assert len(counts) > 12


@pytest.mark.slow
def test_injected_strings_are_refused_or_passed_on_unchanged(random_seed):
    failures, counts = injections.fuzz_injections(1400, random_seed, compiled_every=15)
    assert failures == []
    assert counts["compiled"] > 3 and counts["as_file, accepted"] > 50 < counts["as_name, refused"]


# ---------------------------------------------------------------------- the fuzzer itself


def test_a_call_that_is_not_refused_as_expected_is_a_failure():
    def wrong() -> None:
        raise ConfigError("grid is 5")

    assert problem_of(Bad("", wrong, ValueError, ["grid is 5"])) == ""
    assert "not <class 'KeyError'>" in problem_of(Bad("", wrong, KeyError))
    assert "lacks ['expected']" in problem_of(Bad("", wrong, ConfigError, ["grid", "expected"]))
    assert "was not refused" in problem_of(Bad("", lambda: 3, ConfigError))


def test_a_refused_call_that_changes_something_is_a_failure(device):
    assert [found.split(": ")[-1] for found in Calls(device=device).plant().values()] == [
        "something has changed", "the next steps of the object and its twin differ",
    ]  # fmt: skip


def test_an_injection_that_has_an_effect_is_a_failure():
    found = [text.partition(", planted: ")[2].split(" (")[0] for text in Injections().plant().values()]
    assert found == [
        "meanwhile: open", "meanwhile: subprocess.Popen", "was not refused, it gave int",
        "the device code differs: 'int evil;', not None",
    ]  # fmt: skip


def test_commands_and_files_of_an_injection_are_detected(tmp_path):
    with watching() as events:
        subprocess.run(["true"], check=True)
        (tmp_path / "file").write_text("")
        compile(f"'{injections.MARK}'", "x", "eval")
        HostBackend()  # queries the compiler's version, which is not recorded
    assert [event.split()[0] for event in events] == ["subprocess.Popen", "open", "compile"]
    (tmp_path / "other").write_text("")
    assert len(events) == 3


def test_changed_source_is_detected():
    text = game_source(GAMES["tag_gridworld"]().layout)
    assert stripped(text) == stripped(text.replace("tag_gridworld.cu", 'a \\" \\\\ b.cu'))
    for other in (
        text.replace('"tag_gridworld.cu"', '"a" "b.cu"'),
        text.replace('"tag_gridworld.cu"', '"a\nb.cu"'),
        text.replace("Do not edit.", "\\"),
        text.replace("Do not edit.", "\n#error"),
        text.replace("Do not edit.", "\r#error"),
        text.replace("GRID = ", "GRID = 1 + "),
    ):
        assert other != text and stripped(other) != stripped(text)


# ---------------------------------------------------------------------- rules of names and values


def test_registered_ids_follow_gymnasiums_grammar():
    ids = [name for name in gymnasium.registry if name.startswith("gpu_vecenv/")]
    assert len(ids) >= len(GAMES) - 1 and [name for name in ids if not ENV_ID.fullmatch(name)] == []
    for name in ids:
        spec = gymnasium.spec(name)
        assert str(spec.entry_point).startswith("gpu_vecenv.views.gymnasium_env:")
        assert str(spec.vector_entry_point).startswith("gpu_vecenv.views.gymnasium_env:")
        game = spec.kwargs["game"]
        assert type(game) is str
        configs = versions(GAMES[game]).values() if game in GAMES else [{}]  # other tests' games are gone by now
        assert spec.kwargs in [{"game": game, **config} for config in configs]


@pytest.mark.parametrize("name", sorted(GAMES))
def test_constants_of_bundled_games_are_plain_numbers_under_plain_names(name):
    for key, value in GAMES[name]().layout.constants.items():
        assert CONSTANT_NAME.fullmatch(key) and type(value) in (bool, int, float)


@pytest.mark.parametrize("name", ["antigravity:tag_gridworld", "gpu_vecenv.envs.tag_gridworld", "this", "a b", "x.py"])
def test_a_game_name_is_never_imported(name):
    with watching() as events, pytest.raises(UnknownGameError, match=r"not import paths.*gpu_vecenv\.register"):
        gpu_vecenv.make(name, 1, "cpu")
    assert events == []


@pytest.mark.parametrize("field", ["größe", "_x", "x" * 200, "naïve"])
def test_a_constant_needs_a_plain_name(field):
    game = dataclasses.make_dataclass(
        "Odd", [(field, int, 3)], bases=(Named,), frozen=True, kw_only=True, namespace={"__module__": __name__}
    )
    with pytest.raises(EnvDefinitionError, match=r"cannot be a constant.s name; expected \[A-Z\]"):
        game()


@pytest.mark.parametrize(
    "value", [HostileInt(1), injections.HostileFloat(1.0), injections.HostileNumber.ONE, "1", None]
)
def test_a_constant_must_be_exactly_bool_int_or_float(value):
    game = injections.game_with(derived=("far",), far=property(lambda self: value))
    with pytest.raises(EnvDefinitionError, match=r"(?s)Own\.far is .*expected a bool, a 32-bit int or a finite"):
        game()


def test_a_string_subclass_in_a_configuration_becomes_a_plain_str():
    game = Named(label=HostileStr("quiet"), labels=[HostileStr("a")])
    assert (type(game.label), type(game.labels), type(game.labels[0])) == (str, tuple, str)
    assert (game.label, game.labels) == ("quiet", ("a",))
    assert generate_header(game.layout).splitlines()[0].startswith("// Generated from Named(label='quiet', ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"title": "os:system"}, ["'gpu_vecenv/os:system-v0'", "'os:system'"]),
        ({"title": "A b"}, ["'gpu_vecenv/A b-v0'"]),
        ({"version": "1-v2"}, ["'1-v2'"]),
        ({"title": "Größe"}, ["Größe"]),
    ],
)
def test_an_invalid_title_is_refused_before_registration(changes, words):
    before = dict(GAMES), sorted(gymnasium.registry)
    with pytest.raises(EnvDefinitionError, match="is not an id; expected gpu_vecenv/") as raised:
        gpu_vecenv.register(injections.game_with(**changes))
    assert [word for word in words if word not in str(raised.value)] == []
    assert (dict(GAMES), sorted(gymnasium.registry)) == before


# ---------------------------------------------------------------------- compilers and shells


@pytest.mark.parametrize(
    "name", ['a "quoted" one.cu', "back\\slash.cu", "two\nlines.cu", "naïve 游戏.cu", "$(touch canary).cu", "-o x.cu"]
)
def test_a_game_file_of_any_name_compiles_and_steps(name, device, tmp_path):
    path = tmp_path / name
    path.write_text(injections.RULES)
    env = gpu_vecenv.VecEnv(injections.game_with(source=path)(), 2, device)
    env.reset(seed=1)
    env.step(env.sample_actions())
    assert env.elapsed_steps.tolist() == [1, 1] and not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "command", ["c++; touch {canary}", "c++ `touch {canary}`", "$(touch {canary})", "c++ | tee {canary}"]
)
def test_cxx_is_not_run_by_a_shell(command, monkeypatch, tmp_path):
    """The program in $CXX is started, but not by a shell."""
    canary = tmp_path / "canary"
    monkeypatch.setenv("CXX", command.format(canary=canary))
    monkeypatch.setenv("GPU_VECENV_CACHE", str(tmp_path / "kernels"))
    with pytest.raises((CompilerError, gpu_vecenv.errors.KernelCompileError)):
        gpu_vecenv.make("tag_gridworld", 1, "cpu")
    assert not canary.exists()


def test_a_number_in_a_configuration_reaches_the_compiler_as_a_number(tmp_path):
    """The recording compiler gets the whole command line of a harmless game, with an absolute path of the source."""
    recorder, records = tmp_path / "c++", tmp_path / "records"
    records.mkdir()
    recorder.write_text(injections.RECORDER.format(records=records))
    recorder.chmod(0o755)
    injector = Injector(tmp_path)
    harmless = stripped(game_source(Named(level=0.25).layout))
    assert injections.compiler_problem(Named(level=0.25), recorder, records, harmless) == ""
    assert "read other source" in injections.compiler_problem(Named(level=0.5), recorder, records, injector.harmless)
    (record,) = records.iterdir()
    arguments = (record / "arguments").read_bytes().decode().split("\0")
    assert "-shared" in arguments and arguments[-2].endswith("kernel.cpp") and Path(arguments[-2]).is_absolute()
    assert os.environ.get("CXX") != str(recorder)


def test_the_injection_tests_cover_all_bundled_games():
    assert issubclass(Named, Env) and torch.Size([1]) == Named().layout.observation.shape
