"""The checker of vector environments: it finds every planted bug by the check meant for it, and nothing else."""

import io

import gymnasium
import numpy as np
import planted_envs
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from planted_envs import DISABLED, LIMIT, NEXT, PLANTED, SAME, Ring
from rich.console import Console

from gpu_vecenv.check import ConformanceError, Failure, Report, check_vector_env
from gpu_vecenv.check.subject import CHECKS
from gpu_vecenv.check.trace import Record, difference
from gpu_vecenv.errors import ConfigError

ALL = [f"K{number:02}" for number in range(1, 19)]
CLEAN = {
    "same step": (Ring, {"mode": SAME}, 0),
    "next step, torch": (Ring, {"mode": NEXT, "output": "torch"}, 17),
    "disabled, two agents": (Ring, {"mode": DISABLED, "agents": 2}, 123),
    "same step, torch, two agents, continuous": (
        Ring,
        {"mode": SAME, "output": "torch", "agents": 2, "continuous": True},
        2**40,
    ),
    "next step, two agents": (Ring, {"mode": NEXT, "agents": 2}, 5),
    "disabled, torch, continuous": (Ring, {"mode": DISABLED, "output": "torch", "continuous": True}, 99),
    "forbidden actions": (planted_envs.MaskedRing, {"mode": SAME}, 31),
    "nested observations": (planted_envs.NestedRing, {"mode": SAME}, 32),
    "garbage where the mask is False": (planted_envs.GarbageWhereTheMaskIsFalse, {"mode": SAME}, 33),
    "leaving rows bring final_obs": (planted_envs.LeavingRowsBringFinalObservations, {"mode": SAME, "agents": 2}, 34),
}


def check(kind, checks=None, steps=300, seed=17, max_steps=LIMIT, **arguments):
    return check_vector_env(
        lambda num_envs: kind(num_envs, **arguments), checks=checks, steps=steps, seed=seed, max_steps=max_steps
    )


def test_there_are_eighteen_checks_with_a_title_and_a_promise():
    assert sorted(CHECKS) == ALL
    for entry in CHECKS.values():
        assert entry.title and entry.rule.__doc__


# ---------------------------------------------------------------------- what it finds, and does not


def test_every_check_has_bugs_planted_for_it():
    assert {check for check, _, _ in PLANTED.values()} == set(ALL)
    assert len(PLANTED) >= 34


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_by_the_check_meant_for_it(bug):
    name, kind, arguments = PLANTED[bug]
    report = check(kind, [name], **arguments)
    assert [failure for failure in report.failures if failure.check == name], str(report)
    assert not report.passed


@pytest.mark.parametrize("name", CLEAN)
def test_an_environment_that_keeps_all_promises_passes_all_checks(name):
    kind, arguments, seed = CLEAN[name]
    report = check(kind, steps=160, seed=seed, **arguments)
    assert report.failures == [], str(report)
    assert (report.passed, report.skipped, report.notes) == (ALL, {}, {})


@pytest.mark.parametrize("mode", [SAME, NEXT, DISABLED])
def test_no_seed_gives_a_false_alarm(mode):
    drawn = ["K02", "K03", "K04", "K07", "K08", "K10"]  # those where chance could do it
    for seed in (0, 1, 2, 3, 1000, 2**31 - 1, 2**63):
        assert check(Ring, drawn, steps=60, seed=seed, mode=mode).passed == drawn


def test_bugs_that_show_late_need_enough_steps():
    late = PLANTED["NanInAnObservationLate"][1]
    assert check(late, ["K11"], steps=planted_envs.LATE - 1).passed == ["K11"]
    failure = check(late, ["K11"], steps=planted_envs.LATE + 1).failures[0]
    assert (failure.replica, failure.row, failure.step) == (3, 3, planted_envs.LATE + 1)


def test_rows_of_a_replica_are_told_from_replicas():
    report = check(PLANTED["NanInAnObservationLate"][1], ["K11"], agents=2)
    assert {(failure.replica, failure.row) for failure in report.failures} == {(3, 7)}


def test_tensors_without_memory_that_others_hold_do_not_matter():
    kept = torch.eye(2).to_sparse(), torch.empty(3, device="meta")
    assert check(Ring, ["K18"]).passed == ["K18"] and len(kept) == 2


def test_outputs_on_a_device_are_checked_there(device):
    report = check(Ring, steps=60, output="torch", device=device)
    assert report.failures == [], str(report)
    reused = PLANTED["RewardBufferReused"][1]
    assert bool(check(reused, ["K12"], output="torch", device=device).failures) == (device == "cpu")  # .to() copies


# ---------------------------------------------------------------------- what it cannot check


def test_where_nothing_is_random_the_checks_of_seeds_are_skipped():
    report = check(planted_envs.StillRing, steps=60)
    assert report.failures == []
    assert set(report.skipped) == {"K02", "K03", "K04", "K08"}
    assert all("nothing in it is random" in reason for reason in report.skipped.values())
    assert "random" in report.notes["K07"][0]


def test_without_max_steps_the_limit_alone_is_left_out():
    report = check(Ring, ["K10"], max_steps=None)
    assert report.passed == ["K10"]
    assert report.notes == {"K10": ["max_steps is unknown: limits are not checked"]}
    assert check(PLANTED["LimitOneTooLate"][1], ["K10"], max_steps=None).passed == ["K10"]
    assert check(PLANTED["ClockNotReset"][1], ["K10"], max_steps=None).passed == ["K10"]
    assert check(PLANTED["FinalMaskShifted"][1], ["K10"], max_steps=None).failures


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


def test_too_few_episodes_skip_what_needs_them():
    class Endless(Ring):
        def limit(self):
            return 10**9

        def move(self, goes, moves):
            super().move(goes, moves)
            self.cell = np.where(self.cell == self.goal[:, None], (self.cell + 1) % planted_envs.CELLS, self.cell)

    report = check(Endless, ["K08", "K10"], steps=20, max_steps=None)
    assert "fewer than 6 episodes in 200 steps" in report.skipped["K08"]
    assert report.passed == ["K10"]
    assert "no episode ended in 20 steps: neither ends nor autoreset were seen" in report.notes["K10"]


def test_a_mask_that_is_refused_skips_what_needs_it_unless_nothing_else_resets():
    refusing = PLANTED["MaskRefusedThoughNeeded"][1]
    report = check(refusing, ["K09", "K13"], mode=NEXT)
    assert "no options" in report.skipped["K09"]
    assert report.passed == ["K13"]
    assert "reset_mask is refused" in report.notes["K13"][0]
    assert check(refusing, ["K09"], mode=DISABLED).failures


# ---------------------------------------------------------------------- the report


def test_an_error_of_the_environment_is_a_failure_of_the_check_that_met_it():
    class Breaking(Ring):
        def step(self, actions):
            if self.ticks == 40:
                raise ZeroDivisionError("tick 40")
            return super().step(actions)

    report = check(Breaking, ["K01", "K15"])
    (failure,) = report.failures
    assert (failure.check, failure.expected) == ("K01", "no error")
    assert failure.got.startswith("ZeroDivisionError: tick 40 (test_check.py, line ")
    assert report.passed == ["K15"]


def test_an_error_while_closing_is_a_failure_and_all_are_closed_nevertheless():
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


def test_a_report_reads_as_a_table():
    report = check(PLANTED["SeedPlusReplica"][1], ["K04", "K05"], steps=30)
    text = str(report)
    assert "SeedPlusReplica(num_envs=7): 1 passed, 1 failed, 0 skipped" in text
    assert "no stream is used twice" in text and "more, see failures" in text
    assert "replica 0, row 0: (seed 18, replica 0) repeats (seed 17, replica" in text
    assert max(map(len, text.splitlines())) <= 120
    out = io.StringIO()
    Console(file=out, width=200).print(report)
    assert "(seed 18, replica 0) repeats (seed 17, replica 1); expected different courses" in out.getvalue()
    assert len(report.failures) > text.count("repeats")


def test_skipped_checks_and_notes_are_in_the_table():
    report = Report("Ring", passed=["K10"], skipped={"K08": "no episodes"}, notes={"K10": ["no limit"]})
    report.failures.append(Failure("K11", "outputs", "[0, 1] = nan", "a number", row=2, step=5))
    text = str(report)
    for words in ("Ring: 1 passed, 1 failed, 1 skipped", "skipped: no episodes", "note: no limit", "passed"):
        assert words in text
    assert "row 2, step 5: [0, 1] = nan; expected a number" in text


def test_failures_raise_when_asked_to():
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
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_vector_env(Ring, **arguments)


def test_what_is_no_vector_environment_of_the_right_size_is_refused():
    with pytest.raises(TypeError, match=r"make\(7\) gave a TimeLimit; expected a gymnasium.vector.VectorEnv"):
        check_vector_env(lambda num_envs: gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"make\(7\) gave num_envs = 8; expected as many rows for each replica"):
        check_vector_env(lambda num_envs: Ring(num_envs + 1))


# ---------------------------------------------------------------------- bits


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
        (np.array([None, np.zeros(2)], object), np.array([None, -np.zeros(2)], object), True),
    ],
)
def test_outputs_are_compared_bit_by_bit(one, other, differ):
    found = difference([Record({"obs": one}, 2)], [Record({"obs": other}, 2)])
    assert (found is not None) == differ


def test_what_a_mask_hides_is_not_compared_and_the_mask_is():
    def record(values, mask):
        return [Record({"info": {"x": np.array(values), "_x": np.array(mask)}}, 2)]

    assert difference(record([1, 2], [True, False]), record([1, 3], [True, False])) is None
    assert difference(record([1, 2], [True, False]), record([1, 2], [True, True])).row == 1
    assert difference(record([1, 2], [False, False]), [Record({"info": {}}, 2)]) is None
    assert difference(record([1, 2], [False, True]), [Record({"info": {}}, 2)]).expected == "info.x = nothing"


# ---------------------------------------------------------------------- Gymnasium's own


@pytest.mark.filterwarnings("ignore")  # it warns of the bad actions that it takes
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasiums_sync_vector_env_uses_streams_twice_and_empties_options(name):
    report = check_vector_env(lambda num_envs: gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode="sync"))
    failed = {failure.check for failure in report.failures}
    assert {*report.passed, *report.skipped} | failed == set(ALL)
    # Its documentation says that replica i gets seed + i; so neighbouring seeds share all replicas but one.
    shared = [failure.got for failure in report.failures if failure.check == "K04"]
    assert "(seed 18, replica 0) repeats (seed 17, replica 1)" in shared
    assert len(shared) == 14  # pairs of 4 x 4 with the same sum: 2 (1 + 3) + 6
    # It pops the mask from the dict that it was given.
    assert "K13" in failed
    assert {"K01", "K02", "K03", "K05", "K06", "K07", "K08", "K09", "K10", "K11", "K12", "K17"} <= set(report.passed)


def test_gymnasiums_vector_cart_pole_draws_all_replicas_from_one_stream():
    report = check_vector_env(
        lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="vector_entry_point")
    )
    failed = {failure.check for failure in report.failures}
    assert {*report.passed, *report.skipped} | failed == set(ALL)
    assert {"K05", "K06"} <= failed  # what a replica draws depends on how many there are, and on when others end
    assert {"K01", "K02", "K03", "K04", "K07", "K08", "K10", "K11", "K12", "K13", "K17"} <= set(report.passed)
