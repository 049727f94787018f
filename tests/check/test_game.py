"""``check_game``: a game with one mistake is stopped at its cause, which the report names; sound games pass."""

import io
import os
import pickle
import re

import pytest
from games.crew import Crew
from games.race import Race
from games.sacrifice import Sacrifice
from rich.console import Console
from support.hostile import MISTAKE_LINE, walkers

from gpu_vecenv.check import ConformanceError, Failure, Report
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.check.game import check_game
from gpu_vecenv.check.isolation import ProcessEnded, run_isolated
from gpu_vecenv.check.report import GAME_CHECKS
from gpu_vecenv.engine.vec_env import VecEnv
from gpu_vecenv.errors import ConfigError, SourceRuleError

# What it is -> the statement that it replaces, the new one, and the finding.
MISTAKES = {
    "forgotten truncation": (
        "        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;\n",
        "",
        r"G04: agent walker_0 of environment 0 is still active after max_steps = 12 steps",
    ),
    "write beyond a field": (
        "//",
        "FOR_AGENTS (i) s.place[i + 1][0] = 1;",
        rf"G01: step: walkers\.cu:{MISTAKE_LINE}: s\.place\[3\] .* environment 0: .* expected 0 to 2\..*\(in step 1\)",
    ),
    "write a thousand away": (
        "//",
        "ONCE if (io.elapsed_steps == 7) s.place[1][1000] = 1;",
        rf"G01: step: walkers\.cu:{MISTAKE_LINE}: s\.place\[1\]\[1000\] .*, agent walker_1: .* expected 0 to 1.*step 7",
    ),
    "write before all memory": (
        "//",
        "float* own = s.place[0]; ONCE own[-1000000000] = 1;",
        r"G01: step 1 crashed with SIGSEGV",
    ),
    "write through a pointer": (
        "//",
        "float* own = s.place[0]; ONCE own[7] = 1;",
        r"G01: step wrote \d+ bytes outside of state_place: the first is byte 4 after those of environment 0",
    ),
    "write beyond an array of scratch": (
        "//",
        "ONCE if (io.elapsed_steps == 7) io.scratch->heading[io.elapsed_steps - 4] = 1;",
        r"G01: step wrote outside of Scratch in environment 0: the nearest byte is 1 after its last; .* "
        r"For file and line, declare them as CheckedArray<type, size> name; \(in step 7\)",
    ),
    "unwritten observation": (
        "        io.obs[i][1] = s.place[i][1];\n",
        "",
        r"G02: io\.obs\[0\]\[1\] of environment 0, agent walker_0 is not written by observe \(in reset\)",
    ),
    "observation unwritten later": (
        "io.obs[i][1] = s.place[i][1];",
        "if (io.elapsed_steps != 3 || i != 2) io.obs[i][1] = 0;",
        r"G02: io\.obs\[2\]\[1\] of environment 0, agent walker_2 is not written by observe \(in step 3\)",
    ),
    "unwritten state": (
        "ONCE { s.goal[0] = (int)io.rng.below(9, 0, 3); }",
        "",
        r"G02: s\.goal\[0\] of environment 0 is not written by reset",
    ),
    "scratch that is kept": (
        "//",
        "ONCE { io.scratch->spare += 1; io.rewards[1] += (float)(io.scratch->spare % 5); }",
        r"G02: io\.rewards\[1\] of environment 0, agent walker_1 depends on memory that was not written .* step 1\)",
    ),
    "NaN reward": (
        "//",
        "ONCE if (io.elapsed_steps == 3) io.rewards[1] = math::log(-1.0f);",
        r"G03: io\.rewards\[1\] of environment 0, agent walker_1 is nan \(in step 3\)",
    ),
    "endless loop": (
        "//",
        "ONCE while (s.goal[0] >= 0 && io.elapsed_steps > 4) s.goal[0] = (s.goal[0] + 1) % 3;",
        r"G01: step 5 did not end within 2 s: look for a loop",
    ),
    "division by zero": (
        "//",
        "ONCE s.goal[0] = 7 / (s.goal[0] - s.goal[0] * io.elapsed_steps);",
        r"G01: step 1 crashed with SIGFPE, an integer division by zero",
    ),
    "read after a write": (
        "//",
        "FOR_AGENTS (i) io.rewards[i] += s.place[(i + 1) % NUM_AGENTS][0];",
        rf"G06: step: agent walker_0 in the loop at walkers\.cu:{MISTAKE_LINE} reads s\.place\[1\]\[0\] "
        r"of environment 0, which agent walker_1 in the loop at walkers\.cu:8 wrote: put group_sync\(\) between",
    ),
    "write after a read": (
        "        s.place[i][1] = s.place[i][0];\n",
        "        s.place[i][1] = (float)s.goal[0];\n    }\n    ONCE s.goal[0] = 1;\n    FOR_AGENTS (i) {\n",
        r"G06: step: ONCE at walkers\.cu:11 writes s\.goal\[0\] of environment 0, which agent walker_2 "
        r"in the loop at walkers\.cu:8 read: put group_sync\(\) between the two \(in step 1\)",
    ),
    "write after a write": (
        "//",
        "group_sync(); FOR_AGENTS (i) if (io.elapsed_steps == 3) io.scratch->spare = 1;",
        rf"G06: step: agent walker_1 in the loop at walkers\.cu:{MISTAKE_LINE} writes io\.scratch->spare, which agent "
        rf"walker_0 in the loop at walkers\.cu:{MISTAKE_LINE} wrote: let one thread write it, .* \(in step 3\)",
    ),
    "within one loop": (
        "//",
        "group_sync(); FOR_AGENTS (i) s.place[i][0] += s.place[(i + 1) % NUM_AGENTS][0];",
        rf"G06: step: agent walker_1 in the loop at walkers\.cu:{MISTAKE_LINE} writes s\.place\[1\]\[0\] .*, which "
        r"agent walker_0 in the loop .* read: split the loop, with group_sync\(\) between the two halves",
    ),
    "written by every thread": (
        "//",
        "group_sync(); s.goal[0] = 1 - s.goal[0];",
        r"G06: step: the code after walkers\.cu:8, which every thread executes, writes s\.goal\[0\] of environment 0: "
        r"write it in ONCE",
    ),
    "read by every thread": (
        "//",
        "group_sync(); ONCE io.scratch->heading[1] = 1; if (io.scratch->heading[1] > 2) return;",
        rf"G06: step: the code after walkers\.cu:{MISTAKE_LINE}, .*, reads io\.scratch->heading\[1\], which ONCE at",
    ),
    "range of some agents": (
        "//",
        "group_sync(); FOR_RANGE (w, math::min(NUM_AGENTS, 2)) io.scratch->spare = w;",
        rf"G06: step: w = 1 in FOR_RANGE \(w, math::min\(NUM_AGENTS, 2\)\) at walkers\.cu:{MISTAKE_LINE} writes "
        rf"io\.scratch->spare, which w = 0 in FOR_RANGE \(w, .* at walkers\.cu:{MISTAKE_LINE} wrote: let one thread",
    ),
    "loop over observations": (
        "//",
        "group_sync(); FOR_OBS (i, k) io.scratch->spare = k;",
        rf"G06: step: agent walker_0, k = 1, in FOR_OBS at walkers\.cu:{MISTAKE_LINE} writes io\.scratch->spare, which "
        rf"agent walker_0, k = 0, in FOR_OBS",
    ),
    "atomic and plain": (
        "//",
        "ONCE io.scratch->spare = 0; FOR_AGENTS (i) atomic_add(&io.scratch->spare, 1);",
        rf"G06: step: atomic_add in the loop at walkers\.cu:{MISTAKE_LINE} writes io\.scratch->spare, which ONCE at",
    ),
    "sync in a loop": (
        "//",
        "FOR_AGENTS (i) group_sync();",
        rf"G06: step: walkers\.cu:{MISTAKE_LINE}: .* stands in the loop or ONCE of walkers\.cu:{MISTAKE_LINE}: all",
    ),
    "loop in ONCE": (
        "//",
        "ONCE FOR_AGENTS (i) io.rewards[i] = 0;",
        rf"G06: step: walkers\.cu:{MISTAKE_LINE}: .* stands in the loop or ONCE of walkers\.cu:{MISTAKE_LINE}: all",
    ),
    "sum over threads": (
        "//",
        "float sum = 0; FOR_AGENTS (i) sum += 0.1f * (float)i + s.place[i][0] * 0.3f; ONCE io.rewards[0] = sum;",
        r"G05: ranges backwards: io\.rewards\[0\] of environment \d, agent walker_0 is [\d.-]+ instead of [\d.-]+ "
        r"after step \d+: a group_sync\(\) is missing, .*, or a float sum runs over threads",
    ),
}


@pytest.fixture(autouse=True)
def _quick_compilation(monkeypatch):
    monkeypatch.setenv("GPU_VECENV_CXXFLAGS", "-O0")


def check(game, **settings):
    return check_game(game, device="cpu", **{"steps": 20, "num_envs": 6, "call_seconds": 2.0, **settings})


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_the_only_finding(name, tmp_path):
    old, new, expected = MISTAKES[name]
    report = check(walkers(tmp_path, old, new)())
    (failure,) = report.failures
    with pytest.raises(ConformanceError, match="1 failed"):
        report.raise_for_failures()
    found = f"{failure.check}: {failure}"
    assert re.match(expected, found), found
    before = r"(rules: races, bitwise equality, |races: bitwise equality, |bitwise equality: )"
    after = f"not run after {before}next_step, same_step, disabled, parallel"
    assert re.fullmatch(after, report.notes[failure.check][-1])
    order = [*GAME_CHECKS, *CHECKS]
    assert max({*report.passed, *report.skipped, failure.check}, key=order.index) == failure.check, (
        "nothing is run after the first cause"
    )
    assert str(report).count("\n") < 30


def test_a_summary_has_what_failed_and_the_counts_in_80_columns():
    failures = [Failure("G06", GAME_CHECKS["G06"], "step: agent walker_0 in the loop at walkers.cu:14 reads s.place")]
    report = Report("walkers", ["G01", "G02"], failures, {"K19": "there is no reference", "K22": "no CUDA device"})
    out = io.StringIO()
    Console(file=out, width=80).print(report.summary("--verbose"))
    *table, counts, skipped = out.getvalue().splitlines()
    assert max(map(len, table)) <= 80
    assert "G06" in table[3] and not any(name in "".join(table) for name in ("G01", "K19"))
    assert counts == "walkers: 2 passed, 1 failed, 2 skipped"
    assert skipped == "skipped: K19 K22; --verbose shows all checks, with reasons"


CHOSEN = {  # mistake, the checks that are chosen -> those that pass, and those that fail
    ("NaN reward", "G04"): (["G01", "G02"], ["G03"]),  # G01 to G04 are one run
    ("NaN reward", "K18"): (["K18"], []),
    ("unwritten observation", "G01"): (["G01"], ["G02"]),
    ("forgotten truncation", "G02"): (["G01", "G02", "G03"], ["G04"]),
    ("write beyond a field", "G04"): ([], ["G01"]),
    ("sum over threads", "G02"): (["G01", "G02", "G03", "G04"], []),
    ("sum over threads", "G05"): ([], ["G05"]),
    ("read after a write", "G05"): (["G05"], []),
    ("read after a write", "G06"): ([], ["G06"]),
}


@pytest.mark.parametrize(("mistake", "chosen"), CHOSEN)
def test_only_the_chosen_checks_are_run(mistake, chosen, tmp_path):
    old, new, _ = MISTAKES[mistake]
    report = check(walkers(tmp_path, old, new)(), checks=[chosen], autoreset_modes=["same_step"], parallel=False)
    assert (report.passed, report.failed, report.skipped) == (*CHOSEN[mistake, chosen], {})


def test_a_limit_may_be_given(tmp_path):
    settings = {"checks": ["G04", "K10"], "autoreset_modes": ["same_step"], "parallel": False}
    report = check(walkers(tmp_path)(max_steps=12), max_steps=11, **settings)
    assert report.failed == ["G04"] and "after max_steps = 11 steps" in report.failures[0].got
    passed = check(walkers(tmp_path)(max_steps=12), max_steps=12, **settings).passed
    assert passed == ["G01", "G02", "G03", "G04", "K10"]


def test_a_finding_of_an_interface_names_it(tmp_path):
    report = check(walkers(tmp_path)(max_steps=12), checks=["K10", "K11"], autoreset_modes=["same_step"], max_steps=13)
    assert (report.passed, report.failed) == (["K11"], ["K10"])
    assert {failure.interface for failure in report.failures} == {"same_step"}
    assert report.notes["K10"][-1] == "not run after same_step: parallel"
    assert re.match(r"same_step, env 0, .*; expected ", str(report.failures[0]))


REFUSED = {
    "static": "static int count = 0; ONCE io.rewards[0] += count++;",
    "thread_local": "thread_local int count = 0; ONCE io.rewards[0] += count++;",
    "extern": "extern int count;",
    "digraph": '\n%:include "game_api.cuh"',
    "continuation": '\n#incl\\\nude "game_api.cuh"',
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_source_may_not_have_is_refused(name, tmp_path):
    with pytest.raises(
        SourceRuleError, match=rf"Walkers: walkers\.cu:{MISTAKE_LINE + (REFUSED[name][0] == chr(10))}: "
    ):
        check(walkers(tmp_path, new=REFUSED[name])())


@pytest.mark.slow
def test_a_sound_game_passes_in_one_table():
    report = check(Crew(), autoreset_modes=["disabled"])
    report.raise_for_failures()
    assert {"G01", "G02", "G03", "G04", "G05", "K01", "K18"} <= {*report.passed}
    assert str(report).count("K01") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "game", [Race(), Sacrifice(num_units=3, max_steps=6, limit=True)], ids=lambda game: game.name()
)
def test_games_whose_agents_do_not_act_in_each_step_pass(game):
    checks = [
        name for name in (*GAME_CHECKS, *CHECKS) if name not in ("G00", "K18", "K21")
    ]  # K21 needs random episodes
    report = check(game, checks=checks, autoreset_modes=["next_step"])
    report.raise_for_failures()
    assert {"G01", "G02", "G03", "G05", "K01", "K14"} <= {*report.passed}


def test_what_pointers_allow_and_checked_indices_do_not_is_no_finding(tmp_path):
    """A reference to an array of fixed length cannot be made of an array that checks its indices."""
    statement = "ONCE { float (&own)[2] = s.place[0]; own[0] += 0; }"
    report = check(walkers(tmp_path, new=statement)(), autoreset_modes=[], parallel=False)
    assert not report.failures
    assert "walkers.cu did not compile" in report.skipped["G01"]
    assert "G05" in report.passed


def test_a_limit_that_is_not_reached_is_not_said_to_be_kept(tmp_path):
    game = walkers(tmp_path)(max_steps=5001)
    assert "G04" in check(game, autoreset_modes=[], parallel=False).skipped


@pytest.mark.parametrize("wrong", [{"num_envs": 1}, {"steps": 9}, {"seed": -1}, {"call_seconds": 0}, {"max_steps": 0}])
def test_wrong_numbers_are_refused_before_anything_is_run(wrong, tmp_path):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        check(walkers(tmp_path)(), **wrong)


def test_an_unknown_check_is_refused_before_anything_is_run(tmp_path):
    with pytest.raises(ConfigError, match=r"checks: unknown check 'G07'; nearest: K07, G06, G05"):
        check(walkers(tmp_path)(), checks=["K01", "G07"])


def test_poison_needs_a_debug_build(tmp_path):
    env = VecEnv(walkers(tmp_path)(), 2, "cpu")
    with pytest.raises(ConfigError, match="guards=True"):
        env.poison(7)


def test_an_isolated_function_returns_raises_or_ends():
    assert run_isolated(lambda at: at("add") or 3, 60) == 3
    with pytest.raises(ZeroDivisionError):
        run_isolated(lambda at: 1 // 0, 60)
    with pytest.raises(EOFError):  # is not taken for the end of the process
        run_isolated(lambda at: pickle.loads(b""), 60)
    with pytest.raises(ProcessEnded, match="exit ended the process with exit code 3"):
        run_isolated(lambda at: (at("exit"), os._exit(3)), 60)


def test_agents_that_left_before_the_limit_need_not_be_truncated_at_it(tmp_path):
    limit = "        io.truncations[i] = io.elapsed_steps >= MAX_STEPS;\n"
    game = walkers(tmp_path, limit, f"        io.terminations[i] = i == 0 && io.elapsed_steps == 5;\n{limit}")
    assert check_game(game(), device="cpu", checks=["K10"], autoreset_modes=["next_step"]).failures == []
