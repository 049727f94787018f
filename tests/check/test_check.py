"""The conformance checkers: each planted bug is found by its check, and correct environments pass."""

import collections
import io
import os
import secrets
import threading

import gymnasium
import numpy as np
import pettingzoo
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import InvalidAction
from mutants import ring, vector_envs
from mutants.parallel_envs import PLANTED_PARALLEL
from mutants.parallel_envs import examined as examined_parallel
from mutants.parallel_ring import MaskedParallelRing, ParallelRing, StatefulParallelRing
from mutants.ring import CELLS, DISABLED, LATE, LIMIT, MODES, NEXT, SAME, STEPS, PermutableRing, Ring, StatefulRing
from mutants.vector_envs import PLANTED
from mutants.vector_graph import Counter
from mutants.vector_resets import SeedsRing
from rich.console import Console
from support.cases import mostly_exhaustive

import gpu_vecenv
from gpu_vecenv.check import ConformanceError, Failure, Report, check_parallel_env, check_vector_env, isolation
from gpu_vecenv.check.context import CHECKS
from gpu_vecenv.check.parallel import PARALLEL
from gpu_vecenv.check.records import Record, difference
from gpu_vecenv.errors import ConfigError

ALL = [f"K{number:02}" for number in range(1, 29)]
QUICK = [name for name in ALL if name != "K18"]  # K18 takes as long as all others
ALONE = [*ALL[:18], "K27"]  # checks that need only ``make``
GRAPH, STATE, PERMUTABLE, SEVERAL = (
    {"K22", "K28"},
    {"K21", "K25"},
    {"K24"},
    {"K24", "K26"},
)  # skipped without a graph, …
STATISTICS = {"K28"}
STEPS_OF = dict.fromkeys(("K01", "K10", "K11"), LATE + 30)  # some of their planted bugs occur late or rarely
SEEDS = [0, 1, 2, 3, 1000, 2**31 - 1, 2**32, 2**63, *range(40, 52)]
CLEAN = {  # class, arguments, seed, checks that are skipped
    "same step, torch, two agents, continuous": (
        Ring,
        {"mode": SAME, "output": "torch", "agents": 2, "continuous": True},
        2**40,
        GRAPH | STATE | PERMUTABLE,
    ),
    "next step, torch, two agents, state": (
        StatefulRing,
        {"mode": NEXT, "agents": 2, "output": "torch"},
        0,
        GRAPH | PERMUTABLE,
    ),
    "disabled, torch, continuous": (
        Ring,
        {"mode": DISABLED, "output": "torch", "continuous": True},
        99,
        GRAPH | STATE | SEVERAL,
    ),
    "disabled, permutable agents": (PermutableRing, {"mode": DISABLED, "agents": 3}, 123, GRAPH),
    "same step, torch, permutable agents": (
        PermutableRing,
        {"mode": SAME, "agents": 2, "output": "torch"},
        124,
        GRAPH,
    ),
    "forbidden actions": (ring.MaskedRing, {"mode": SAME}, 31, GRAPH | STATE | SEVERAL),
    "nested observations": (ring.NestedRing, {"mode": SAME, "agents": 2}, 32, GRAPH | STATE | PERMUTABLE),
    "garbage where the mask is False": (ring.GarbageWhereTheMaskIsFalse, {}, 33, GRAPH | STATE | SEVERAL),
    "termination and truncation together": (ring.BothFlagsRing, {}, 35, GRAPH | STATE | SEVERAL),
    "termination and truncation together, next step": (
        ring.BothFlagsRing,
        {"mode": NEXT},
        36,
        GRAPH | STATE | SEVERAL,
    ),
    "termination and truncation together, disabled": (
        ring.BothFlagsRing,
        {"mode": DISABLED},
        37,
        GRAPH | STATE | SEVERAL,
    ),
    "statistics of episodes": (ring.StatisticsRing, {}, 39, (GRAPH | STATE | SEVERAL) - STATISTICS),
    "statistics of episodes, next step": (
        ring.StatisticsRing,
        {"mode": NEXT},
        40,
        (GRAPH | STATE | SEVERAL) - STATISTICS,
    ),
    "dictionaries of actions": (ring.DictActionRing, {"mode": DISABLED}, 41, GRAPH | STATE | SEVERAL),
    "lists of seeds": (SeedsRing, {}, 42, GRAPH | STATE | SEVERAL),
    "NumPy's seeds, other integers": (ring.AnyIntegerRing, {}, 38, GRAPH | STATE | SEVERAL),
    "leaving rows bring final_obs": (
        ring.LeavingRowsBringFinalObservations,
        {"mode": SAME, "agents": 2},
        34,
        GRAPH | STATE | PERMUTABLE,
    ),
}
ONE = {"K03", "K04", "K05", "K06", "K09", "K20", "K21", "K22", "K24", "K28"}  # skipped for every ParallelEnv
CLEAN_PARALLEL = {
    "three agents": (ParallelRing, {}, 0, ONE | {"K25"}),
    "its state can be written": (StatefulParallelRing, {"agents": 2}, 17, ONE),
    "forbidden actions": (MaskedParallelRing, {"agents": 4}, 2**40, ONE | {"K25"}),
    "one agent": (ParallelRing, {"agents": 1}, 5, ONE | {"K25", "K26"}),
}


def check(kind, checks=None, steps=150, seed=17, max_steps=LIMIT, **arguments):
    return check_vector_env(
        lambda num_envs: kind(num_envs, **arguments), checks=checks, steps=steps, seed=seed, max_steps=max_steps
    )


def test_every_check_has_a_title_and_a_docstring():
    assert sorted(CHECKS) == ALL
    for entry in CHECKS.values():
        assert entry.title and entry.rule.__doc__
    assert all(rule if isinstance(rule, str) else rule.__doc__ for rule in PARALLEL.values())


# ---------------------------------------------------------------------- planted bugs, correct environments


def test_every_check_has_planted_bugs():
    found = [check for check, _, _ in PLANTED.values()]
    assert set(found) == {"K00", *ALL} and len(found) >= 160
    assert all(found.count(name) >= 2 for name in ALL)
    found = [check for check, _, _ in PLANTED_PARALLEL.values()]
    assert set(found) == set(ALL) - ONE and len(found) >= 56


def planted(bugs, count):
    """The names of all bugs, for ``pytest.mark.parametrize``; beyond so many of each check they are exhaustive."""
    seen, cases = collections.Counter(), []
    for bug, (check, *_) in bugs.items():
        seen[check] += 1
        marks = [pytest.mark.gpu] * (check == "K22") + [pytest.mark.exhaustive] * (seen[check] > count)
        cases.append(pytest.param(bug, marks=marks))
    return cases


@pytest.mark.parametrize("bug", planted(PLANTED, 2))
def test_a_planted_bug_is_found_by_its_check(bug):
    name, kind, arguments = PLANTED[bug]
    checks = None if name == "K00" else [name]  # K00 stops all others
    report = vector_envs.examined(kind, checks, steps=STEPS_OF.get(name, STEPS), **arguments)
    assert name != "K00" or len(report.failures) == 1, str(report)
    assert [failure for failure in report.failures if failure.check == name], str(report)
    assert not report.passed


@pytest.mark.parametrize("bug", planted(PLANTED_PARALLEL, 1))
def test_a_planted_bug_of_a_parallel_env_is_found_by_its_check(bug):
    name, kind, arguments = PLANTED_PARALLEL[bug]
    report = examined_parallel(kind, [name], steps=STEPS_OF.get(name, STEPS), **arguments)
    assert [failure for failure in report.failures if failure.check == name], str(report)
    assert not report.passed


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("nested")) for n in CLEAN])
def test_a_correct_environment_passes_all_checks(name):
    kind, arguments, seed, skipped = CLEAN[name]
    report = vector_envs.examined(kind, QUICK, steps=30, seed=seed, **arguments)
    assert report.failures == [], str(report)
    assert (set(report.passed), set(report.skipped), report.notes) == (set(QUICK) - skipped, skipped, {})


@pytest.mark.parametrize("name", CLEAN_PARALLEL)
def test_a_correct_parallel_env_passes_all_checks(name):
    kind, arguments, seed, skipped = CLEAN_PARALLEL[name]
    report = examined_parallel(kind, QUICK, steps=40, seed=seed, **arguments)
    assert report.failures == [], str(report)
    assert (set(report.passed), set(report.skipped), report.notes) == (set(QUICK) - skipped, skipped, {})


@pytest.mark.parametrize("mode", MODES)
def test_nothing_grows_in_a_correct_environment(mode):
    report = check(ring.StatisticsRing, ["K18"], mode=mode)
    assert (report.passed, report.notes) == (["K18"], {}), str(report)


def test_nothing_grows_in_a_correct_parallel_env():
    report = examined_parallel(ParallelRing, ["K18"])
    assert (report.passed, report.notes) == (["K18"], {}), str(report)


def test_growth_is_measured_only_where_episodes_end():
    class Endless(Ring):
        def limit(self):
            return 10**9

        def move(self, goes, moves):
            self.cell = self.goal[:, None] + 1

    report = check(Endless, ["K18"])
    assert report.passed == ["K18"]
    assert report.notes == {"K18": ["fewer than 120 episodes in 1500 steps: growth was not measured"]}


@pytest.mark.parametrize("case", mostly_exhaustive(range(20), (5, 6, 7)))
def test_no_seed_gives_a_false_alarm(case):
    checks = ["K02", "K03", "K04", "K07", "K08", "K10", "K20", "K24", "K26"]  # checks that compare random trajectories
    arguments = {"mode": MODES[case % 3], "agents": 2 + case % 2}
    assert vector_envs.examined(PermutableRing, checks, steps=40, seed=SEEDS[case], **arguments).passed == checks
    checks = ["K02", "K07", "K08", "K10", "K26"]
    assert examined_parallel(ParallelRing, checks, steps=80, seed=SEEDS[case]).passed == checks


@pytest.mark.gpu
def test_steps_without_host_reads_pass_the_graph_check():
    assert vector_envs.examined(Counter, ["K22"]).passed == ["K22"]


def test_late_bugs_need_enough_steps():
    late = PLANTED["NanInAnObservationLate"][1]
    assert check(late, ["K11"], steps=LATE - 1).passed == ["K11"]
    failure = check(late, ["K11"], steps=LATE + 1).failures[0]
    assert (failure.env_index, failure.row, failure.step, failure.agent) == (3, 3, LATE + 1, None)


def test_failures_have_the_environment_and_the_row():
    report = check(PLANTED["NanInAnObservationLate"][1], ["K11"], agents=2)
    assert {(failure.env_index, failure.row) for failure in report.failures} == {(3, 7)}


def test_failures_of_a_parallel_env_have_the_agent():
    report = examined_parallel(PLANTED_PARALLEL["GuardSeesTooMuch"][1], ["K11"])
    assert {(failure.agent, failure.row, failure.env_index) for failure in report.failures} == {("guard", 2, None)}
    assert "agent guard, step 0: observation (4,) float32; expected (2,) float32" in " ".join(str(report).split())


def test_sparse_and_meta_tensors_elsewhere_do_not_matter():
    kept = torch.eye(2).to_sparse(), torch.empty(3, device="meta")
    assert check(Ring, ["K18"]).passed == ["K18"] and len(kept) == 2


def test_outputs_on_a_device_are_checked_there(device):
    report = check(Ring, QUICK, steps=60, output="torch", device=device)
    assert (report.failures, report.passed) == ([], [name for name in ALONE if name in QUICK]), str(report)
    reused = PLANTED["RewardBufferReused"][1]
    assert bool(check(reused, ["K12"], output="torch", device=device).failures) == (device == "cpu")  # .to() copies


# ---------------------------------------------------------------------- skipped checks and notes


def test_seed_checks_are_skipped_for_a_deterministic_environment():
    report = check(ring.StillRing, [name for name in ALONE if name in QUICK], steps=60)
    assert report.failures == []
    assert set(report.skipped) == {"K02", "K03", "K04", "K08"}
    assert all("nothing in it is random" in reason for reason in report.skipped.values())
    assert "random" in report.notes["K07"][0]


def test_without_max_steps_only_the_limit_is_not_checked():
    report = check(Ring, ["K10"], max_steps=None)
    assert report.passed == ["K10"]
    assert report.notes == {"K10": ["max_steps is unknown: limits are not checked"]}
    assert check(PLANTED["LimitOneTooLate"][1], ["K10"], max_steps=None).passed == ["K10"]
    assert check(PLANTED["ClockNotReset"][1], ["K10"], max_steps=None).passed == ["K10"]
    assert check(PLANTED["FinalMaskShifted"][1], ["K10"], max_steps=None).failures
    (failure,) = check(PLANTED["BothFlagsDoNotEnd"][1], ["K10"], max_steps=None).failures
    assert "ends by termination and truncation the last observation equals" in failure.got


def test_max_steps_comes_from_the_spec():
    def make(num_envs):
        env = PLANTED["LimitOneTooLate"][1](num_envs)
        env.spec = EnvSpec("Ring-v0", max_episode_steps=LIMIT)
        return env

    assert check_vector_env(make, checks=["K10"]).failures
    assert check_vector_env(make, checks=["K10"], max_steps=LIMIT + 1).passed == ["K10"]


def test_a_limit_that_no_episode_reaches_is_noted():
    class Short(Ring):
        def limit(self):
            return 3

        def flags(self, rewards, terminations, truncations):
            return super().flags(rewards, terminations | truncations, np.zeros_like(truncations))

    report = check(Short, ["K10"], max_steps=500)
    assert (report.passed, report.notes) == (["K10"], {"K10": ["no episode reached max_steps = 500"]})


def test_an_environment_that_moves_before_it_accelerates_is_no_violation():
    class Coasting(Ring):
        """The velocity, 1 to 3 cells a step once an action has been taken, is not observed."""

        def begin(self, chosen):
            super().begin(chosen)
            self.velocity = np.where(chosen[:, None], 0, getattr(self, "velocity", 0))

        def move(self, goes, moves):
            self.cell = np.where(goes, (self.cell + self.velocity) % CELLS, self.cell)
            self.velocity = np.where(goes, 2 + moves, self.velocity)

        def observe(self):
            return super().observe() * np.array([1, 1, 0, 0], np.float32)

    report = check(Coasting, ["K10"], steps=60)
    assert report.passed == ["K10"]
    (note,) = report.notes["K10"]
    assert "returns the first observation again" in note


def test_too_few_episodes_skip_what_needs_them():
    class Endless(Ring):
        def limit(self):
            return 10**9

        def move(self, goes, moves):
            super().move(goes, moves)
            self.cell = np.where(self.cell == self.goal[:, None], (self.cell + 1) % ring.CELLS, self.cell)

    report = check(Endless, ["K08", "K10"], steps=20, max_steps=None)
    assert "fewer than 6 episodes in 200 steps" in report.skipped["K08"]
    assert report.passed == ["K10"]
    assert "no episode ended in 20 steps: ends and autoreset were not checked" in report.notes["K10"]


def test_a_refused_mask_skips_its_checks_except_in_disabled_mode():
    refusing = PLANTED["MaskRefusedThoughNeeded"][1]
    report = check(refusing, ["K09", "K13"], mode=NEXT)
    assert "no options" in report.skipped["K09"]
    assert report.passed == ["K13"]
    assert "reset_mask is refused" in report.notes["K13"][0]
    assert check(refusing, ["K09"], mode=DISABLED).failures


def test_skipped_checks_name_the_missing_argument():
    report = check(Ring, ALL[18:], steps=20, agents=2)
    words = {"K19": "oracle=", "K20": "modes=", "K21": "state_of=", "K22": "graph=", "K23": "variants="}
    words |= {"K24": "permutable_agents=", "K25": "state_of="}
    assert set(report.skipped) == {*words, "K28"}
    assert all(f"give {argument}" in report.skipped[name] for name, argument in words.items()), report.skipped
    # A graph needs CUDA tensors; permuting agents and early ends need several rows.
    report = check_vector_env(Ring, checks=["K22", "K24", "K26"], steps=20, graph=Ring, permutable_agents=True)
    assert "not CUDA tensors" in report.skipped["K22"] and "one row" in report.skipped["K24"]
    assert "one row" in report.skipped["K26"]


def test_without_ends_checks_are_skipped_or_noted():
    class Endless(Ring):
        def limit(self):
            return 10**9

        def move(self, goes, moves):
            super().move(goes, moves)
            self.goal = np.array([next(cell for cell in range(CELLS) if cell not in row) for row in self.cell])

    report = vector_envs.examined(Endless, ["K20", "K26"], steps=20, max_steps=None, agents=2)
    assert "no row ended before its environment in 20 steps" in report.skipped["K26"]
    assert len(report.notes["K20"]) == 3 and "no episode ended in 20 steps" in report.notes["K20"][0]


def test_shared_state_is_not_overwritten():
    class Shared(StatefulRing):
        names = ("table",)

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.table = np.arange(4)  # as many as environments, by coincidence

    report = check(Shared, ["K21"], steps=20)
    assert report.passed == ["K21"] and "no array has a row for each environment" in report.notes["K21"][0]


@pytest.mark.parametrize("mode", [SAME, NEXT, DISABLED])
@pytest.mark.parametrize("length", [1, 2, 9, 10])  # state is overwritten after nine steps at the earliest
def test_state_is_overwritten_where_an_episode_goes_on(length, mode):
    class Walk(StatefulRing):
        """In the last step of an episode nothing depends on the cell."""

        names = ("cell",)

        def limit(self):
            return length

        def begin(self, chosen):
            super().begin(chosen)
            self.goal[:] = -1

    class Copied(Walk):
        load_state_dict = None

        @property
        def state(self):
            return {"cell": self.cell.copy()}

    class Alike(Walk):
        """All rings have the same state."""

        def env_keys(self, seed):
            return np.repeat(super().env_keys(seed)[:1], self.num_rings)

        def move(self, goes, moves):
            super().move(goes, 0 * moves)

    for correct in (Walk, Alike):
        assert check(correct, ["K21"], steps=20, max_steps=length, mode=mode).failures == []
    found = [failure.got for failure in check(Copied, ["K21"], steps=20, max_steps=length, mode=mode).failures]
    same = ["state of env 2 was overwritten, and its trajectory is the same"]
    assert found == ([] if length == 1 else same)


def test_state_of_gives_the_object_with_the_state():
    class Hidden(Ring):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.inner = [self]

        state_dict, load_state_dict, state = StatefulRing.state_dict, StatefulRing.load_state_dict, None
        names = StatefulRing.names

    class StateOnly:
        def __init__(self, env):
            self.env = env
            self.state = {name: getattr(env, name) for name in Hidden.names}

    report = check_vector_env(Hidden, checks=["K21", "K25"], steps=20, state_of=StateOnly)
    assert report.passed == ["K21"] and set(report.skipped) == {"K25"}


def test_a_state_attribute_instead_of_a_method_fails_k11():
    class Shadowed(ParallelRing):
        def __init__(self):
            super().__init__()
            self.state = {}

    report = check_parallel_env(Shadowed, checks=["K01", "K11"], steps=20)
    assert report.passed == ["K01"]
    assert [failure.got for failure in report.failures] == ["state(): TypeError: 'dict' object is not callable"]


@pytest.mark.parametrize("mode", MODES)
def test_times_in_infos_are_left_out_of_comparisons(mode):
    class Timed(StatefulRing):
        """Episode statistics as Gymnasium's RecordEpisodeStatistics gives them; "t" is a wall-clock time."""

        def after_moves(self, ends):
            self.ages = self.time.copy()

        def step(self, actions):
            *outputs, info = super().step(actions)
            ends = outputs[2] | outputs[3]
            lengths = self.ages.repeat(self.agents)
            times = np.array([float(secrets.randbits(40)) for _ in ends])
            episode = {"t": times, "_t": ends, "l": lengths, "_l": ends}
            return *outputs, info | ({"episode": episode, "_episode": ends} if ends.any() else {})

    report = check(Timed, QUICK, steps=40, mode=mode)
    assert report.failures == [], str(report)
    assert report.notes == {"K00": ["not compared, since they differ between two identical runs: infos episode.t"]}
    assert "infos episode.t" in " ".join(str(report).split())


def test_final_observations_that_vary_are_compared():
    class Varying(Ring):
        def final(self, ends):
            info = super().final(ends)
            if info:
                info["final_obs"][:, 3] = secrets.randbelow(CELLS)
            return info

    report = check(Varying, ["K01"], steps=40)
    assert "info.final_obs" in report.failures[0].got and not report.notes


def test_what_varies_after_other_outputs_vary_is_compared():
    class Varying(Ring):
        def observe(self):
            rows = super().observe()
            rows[:, 3] = secrets.randbits(20) / 2**20
            return rows

        def step(self, actions):
            *outputs, info = super().step(actions)
            return *outputs, info | {"seen": outputs[0][:, 3] * 1}

    assert not check(Varying, ["K01"]).notes


def test_a_true_seed_and_an_unknown_option_are_noted():
    class Lenient(Ring):
        def validate_seed(self, seed):
            return super().validate_seed(1 if seed is True else seed)

        def validate_mask(self, options):
            return super().validate_mask({key: mask for key, mask in (options or {}).items() if key == "reset_mask"})

    report = check(Lenient, ["K16"])
    assert report.passed == ["K16"]
    assert report.notes == {"K16": ["reset with seed=True: accepted", "reset with an unknown option: accepted"]}


def test_an_action_that_the_space_contains_may_be_accepted():
    report = check_vector_env(lambda n: gymnasium.make_vec("CartPole-v1", n), checks=["K14"], steps=10)
    assert (report.passed, report.failures) == (["K14"], [])


def test_a_true_seed_that_is_refused_after_the_reset_fails():
    class Late(Ring):
        def validate_seed(self, seed):
            if seed is True:
                self.time += 1
            return super().validate_seed(seed)

    (failure,) = check(Late, ["K16"]).failures
    assert failure.got.startswith("after the refusal of seed=True")


def test_torchs_runtime_error_is_a_refusal():
    class Torch(Ring):
        def checked_moves(self, actions):
            try:
                return super().checked_moves(actions)
            except (TypeError, ValueError, InvalidAction) as error:
                raise RuntimeError(str(error)) from error

    report = check(Torch, ["K14"], output="torch")
    assert report.passed == ["K14"], str(report)


# ---------------------------------------------------------------------- one cause, one finding


def test_an_error_in_the_first_calls_is_the_only_failure():
    class Broken(Ring):
        def reset(self, **arguments):
            raise ZeroDivisionError("no start")

    class ShortStep(Ring):
        def step(self, actions):
            return super().step(actions)[:4]

    for kind, got in (
        (Broken, "ZeroDivisionError: no start (test_check.py"),
        (ShortStep, "step returns (array"),
    ):
        (failure,) = check(kind).failures
        assert failure.check == "K00" and failure.got.startswith(got)


def test_the_first_calls_of_a_parallel_env_are_checked_too():
    class ShortStep(ParallelRing):
        def step(self, actions):
            return super().step(actions)[:4]

    class NoInfos(ParallelRing):
        def reset(self, seed=None, options=None):
            return super().reset(seed, options)[0]

    for kind, got in ((ShortStep, "step returns"), (NoInfos, "reset returns")):
        (failure,) = check_parallel_env(kind, steps=20).failures
        assert failure.check == "K00" and failure.got.startswith(got)


def test_what_is_not_reproducible_is_not_compared():
    class Random(Ring):
        def observe(self):
            rows = super().observe()
            rows[:, 3] = secrets.randbits(20) / 2**20
            return rows

    report = check(Random, QUICK[:17], steps=20)
    assert {failure.check for failure in report.failures} == {"K01", "K17"}, str(report)
    assert "two identical runs differ, see K01" in report.skipped["K05"]
    assert check(Random, ["K05"], steps=20).failures  # unless K01 was not run
    report = check(Random, ["K01", "K10"], steps=60, mode=NEXT)
    assert {failure.check for failure in report.failures} == {"K01"}, str(report)
    assert "other actions in steps that reset were not tried" in report.notes["K10"][0]


def test_the_same_error_is_one_failure():
    class Breaking(Ring):
        def step(self, actions):
            if self.time[0] == 3:
                raise ZeroDivisionError("time 3")
            return super().step(actions)

    report = check(Breaking, ["K01", "K05", "K12"], steps=20)
    (failure,) = report.failures
    assert failure.check == "K01"
    assert report.skipped["K12"].startswith("stopped by the error of K01: ZeroDivisionError: time 3")


# ---------------------------------------------------------------------- wrong calls, in a process of their own


class Aborting(Ring):
    def checked_moves(self, actions):
        if actions is None or isinstance(actions, str):
            os.abort()
        return super().checked_moves(actions)

    def validate_seed(self, seed):
        if seed == "7":
            os._exit(3)
        return super().validate_seed(seed)


def test_wrong_calls_that_end_the_process_are_failures():
    report = check(Aborting, ["K14", "K16"], steps=10)
    aborted = "crashed with SIGABRT, an abort, as when the allocator finds its memory overwritten"
    assert [(failure.check, failure.got) for failure in report.failures] == [
        ("K14", f"step with None {aborted}"),
        ("K14", f"step with a string {aborted}"),
        ("K16", "reset with seed='7' ended the process with exit code 3"),
    ]


def test_after_many_crashes_a_check_ends():
    class Fragile(Ring):
        def checked_moves(self, actions):
            if not isinstance(actions, np.ndarray) or actions.shape != (self.num_envs,) or actions.dtype != np.int64:
                os.abort()
            return super().checked_moves(actions)

    failures = check(Fragile, ["K14"], steps=10).failures
    assert len(failures) == isolation.MAX_CRASHES + 1 and all("SIGABRT" in failure.got for failure in failures)


def test_a_call_that_hangs_is_a_failure(monkeypatch):
    class Hanging(Ring):
        def checked_moves(self, actions):
            if actions is None:
                threading.Event().wait()
            return super().checked_moves(actions)

    monkeypatch.setattr(isolation, "PATIENCE", 1.0)
    (failure,) = check(Hanging, ["K14"], steps=10).failures
    assert failure.got == "step with None did not end within 1 s: look for a loop that does not end"


def test_errors_in_the_process_are_failures_of_its_check():
    class Breaking(Ring):
        def step(self, actions):
            if self.elapsed_steps == 3:
                raise ZeroDivisionError("step 3")
            return super().step(actions)

    (failure,) = check(Breaking, ["K14"], steps=10).failures
    assert failure.got.startswith("ZeroDivisionError: step 3 (test_check.py, line ")


def test_with_cuda_wrong_calls_are_made_in_this_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    report = check(Ring, ["K15"], steps=10)
    assert report.passed == ["K15"]
    assert report.notes == {"K15": ["not run in a process of its own: CUDA is in use, which does not survive a fork"]}


# ---------------------------------------------------------------------- the report


def test_an_error_of_the_environment_is_a_failure_of_the_running_check():
    class Breaking(Ring):
        def step(self, actions):
            if self.elapsed_steps == 40:
                raise ZeroDivisionError("step 40")
            return super().step(actions)

    report = check(Breaking, ["K01", "K15"])
    (failure,) = report.failures
    assert (failure.check, failure.expected) == ("K01", "no error")
    assert failure.got.startswith("ZeroDivisionError: step 40 (test_check.py, line ")
    assert report.passed == ["K15"]


def test_an_error_in_close_is_a_failure_and_all_environments_are_closed():
    made = []

    class Stuck(Ring):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

        def close_extras(self, **arguments):
            self.closed = True
            if len(made) > 2 and self is made[2]:
                raise OSError("stuck")

    report = check(Stuck, ["K05"], steps=10)
    assert [failure.got.split(" (")[0] for failure in report.failures] == ["close: OSError: stuck"]
    assert all(env.closed for env in made)


def test_a_report_is_rendered_as_a_table():
    report = check(PLANTED["SeedPlusReplica"][1], ["K04", "K05"], steps=30)
    text = str(report)
    assert "SeedPlusReplica(num_envs=7): 1 passed, 1 failed, 0 skipped" in text
    assert "random streams are independent" in text and "more, see failures" in text
    assert "env 0, row 0: (seed 18, env 0) repeats (seed 17, env" in text
    assert max(map(len, text.splitlines())) <= 120
    out = io.StringIO()
    Console(file=out, width=200).print(report)
    assert "(seed 18, env 0) repeats (seed 17, env 1); expected different trajectories" in out.getvalue()
    assert len(report.failures) > text.count("repeats")


def test_skipped_checks_and_notes_are_in_the_table():
    report = Report("Ring", passed=["K10"], skipped={"K08": "no episodes"}, notes={"K10": ["no limit"]})
    report.failures.append(Failure("K11", "outputs", "[0, 1] = nan", "a number", row=2, step=5))
    text = str(report)
    for words in ("Ring: 1 passed, 1 failed, 1 skipped", "skipped: no episodes", "note: no limit", "passed"):
        assert words in text
    assert "row 2, step 5: [0, 1] = nan; expected a number" in text


def test_raise_for_failures():
    check(Ring, ["K15"]).raise_for_failures()
    with pytest.raises(ConformanceError, match="step before reset: accepted; expected an error"):
        check(PLANTED["StepBeforeReset"][1], ["K15"]).raise_for_failures()
    assert issubclass(ConformanceError, AssertionError)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checks": ["K01", "K99"]}, r"unknown check 'K99'; nearest: K"),
        ({"seed": -1}, r"seed is -1; expected an int >= 0"),
        ({"seed": True}, r"seed is True; expected an int"),
        ({"steps": 9}, r"steps is 9; expected an int >= 10"),
        ({"steps": 30.0}, r"steps is 30.0; expected an int"),
        ({"max_steps": 0}, r"max_steps is 0; expected an int >= 1"),
        ({"modes": {"same": Ring}}, r"modes: unknown autoreset mode 'same'; nearest: same_step"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_vector_env(Ring, **arguments)


def test_other_objects_and_sizes_of_vector_envs_are_refused():
    with pytest.raises(TypeError, match=r"make\(7\) returned a TimeLimit; expected a gymnasium.vector.VectorEnv"):
        check_vector_env(lambda num_envs: gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"make\(7\) returned num_envs = 8; expected a multiple of 7"):
        check_vector_env(lambda num_envs: Ring(num_envs + 1))


def test_other_objects_than_parallel_envs_are_refused():
    with pytest.raises(TypeError, match=r"make\(\) returned a Ring; expected a pettingzoo.ParallelEnv"):
        check_parallel_env(lambda: Ring(1))
    with pytest.raises(ValueError, match="without possible_agents"):
        check_parallel_env(pettingzoo.ParallelEnv)
    with pytest.raises(ConfigError, match="unknown check 'K99'"):
        check_parallel_env(ParallelRing, checks=["K99"])


# ---------------------------------------------------------------------- bitwise comparison


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (np.array([0.0, 1.0]), np.array([0.0, 1.0]), False),
        (np.array([0.0, 1.0]), np.array([-0.0, 1.0]), True),
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), False),
        (np.array([1.0, 1.0]), np.array([1.0, 1.0 + 2**-52]), True),
        (np.array([1.0, 1.0]), np.array([1.0, 1.0], np.float32), True),
        (np.array([None, "a"], object), np.array([None, "a"], object), False),
        (np.array([object(), {"a": 1}], object), np.array([object(), {"a": 1}], object), False),
        (np.array([None, {"a": 1}], object), np.array([None, {"a": 2}], object), True),
        (np.array([None, {"a": torch.ones(2)}], object), np.array([None, {"a": np.ones(2, "f")}], object), False),
        (np.array([None, np.zeros(2)], object), np.array([None, -np.zeros(2)], object), True),
    ],
)
def test_outputs_are_compared_bitwise(one, other, differ):
    found = difference([Record({"obs": one}, 2)], [Record({"obs": other}, 2)])
    assert (found is not None) == differ


def test_masks_are_compared_and_masked_rows_are_not():
    def record(values, mask):
        return [Record({"info": {"x": np.array(values), "_x": np.array(mask)}}, 2)]

    assert difference(record([1, 2], [True, False]), record([1, 3], [True, False])) is None
    assert difference(record([1, 2], [True, False]), record([1, 2], [True, True])).row == 1
    assert difference(record([1, 2], [False, False]), [Record({"info": {}}, 2)]) is None
    assert difference(record([1, 2], [False, True]), [Record({"info": {}}, 2)]).expected == "info.x = nothing"


# ---------------------------------------------------------------------- environments of Gymnasium


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Gymnasium warns about the bad actions that it accepts
def test_gymnasiums_sync_vector_env_shares_streams_and_empties_options():
    def maker(**arguments):
        return lambda n: gymnasium.make_vec("CartPole-v1", num_envs=n, vectorization_mode="sync", **arguments)

    modes = {mode: maker(vector_kwargs={"autoreset_mode": mode}) for mode in MODES}
    report = check_vector_env(maker(), checks=QUICK, modes=modes, steps=40)
    failed = {failure.check for failure in report.failures}
    assert {*report.passed, *report.skipped} | failed == set(QUICK)
    assert "K20" in report.passed
    # As documented, environment i is seeded with seed + i: adjacent seeds share all environments but one.
    shared = [failure.got for failure in report.failures if failure.check == "K04"]
    assert "(seed 18, env 0) repeats (seed 17, env 1)" in shared
    assert len(shared) == 14  # pairs of 4 x 4 with the same sum: 2 (1 + 3) + 6
    # reset pops the mask from the caller's dict.
    assert "K13" in failed
    assert {"K01", "K02", "K03", "K05", "K06", "K07", "K08", "K09", "K10", "K11", "K12", "K17"} <= set(report.passed)


@pytest.mark.slow
def test_gymnasiums_vector_cart_pole_has_one_stream_for_all_environments():
    report = check_vector_env(
        lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point"),
        checks=QUICK,
        steps=20,
    )
    failed = {failure.check for failure in report.failures}
    assert {*report.passed, *report.skipped} | failed == set(QUICK)
    assert {"K05", "K06"} <= failed  # samples depend on num_envs and on when other environments end
    assert {"K01", "K02", "K03", "K04", "K07", "K08", "K10", "K11", "K12", "K13", "K17"} <= set(report.passed)


# ---------------------------------------------------------------------- environments of PettingZoo


def test_pettingzoos_aec_conversion_is_left_inconsistent_by_a_refused_action():
    simple_spread = pytest.importorskip("mpe2.simple_spread_v3")
    checks = ["K01", "K10", "K11", "K12", "K13", "K14", "K15", "K16"]
    report = check_parallel_env(lambda: simple_spread.parallel_env(max_cycles=9), checks=checks, steps=10, max_steps=9)
    assert {failure.check for failure in report.failures} == {"K14", "K15"}
    assert report.notes["K16"] == ["reset with seed=True: accepted"]
    refused = [failure.got for failure in report.failures if failure.check == "K14"]
    assert any(
        "after the refusal of None for agent_2: AssertionError: expected agent agent_0" in got for got in refused
    )
    assert "step with an action of an unknown agent: accepted" in refused
    assert report.passed == [*checks[:5], "K16"]


@pytest.mark.slow
def test_our_own_parallel_view_passes(device):
    def make(output="torch"):
        return gpu_vecenv.parallel_env("tag_gridworld", device, output=output, random_start=True, max_steps=15)

    checks = ["K01", "K02", "K07", "K08", "K10", "K11", "K12", "K13", "K14", "K15", "K16", "K17", "K23"]
    report = check_parallel_env(make, checks=checks, steps=20, max_steps=15, variants={"arrays": lambda: make("numpy")})
    assert report.passed == checks and bool(report.notes) == (device != "cpu"), str(report)  # of K14 to K16


def test_an_id_in_place_of_a_function_is_refused_with_an_example():
    with pytest.raises(TypeError, match=r"make is 'gpu_vecenv/CartPole-v1' \(str\); .* check_vector_env\(lambda num_"):
        check_vector_env("gpu_vecenv/CartPole-v1")
    with pytest.raises(TypeError, match=r"make is None \(NoneType\); .* check_parallel_env\(lambda: gpu_vecenv\."):
        check_parallel_env(None)
