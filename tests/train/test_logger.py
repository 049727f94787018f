"""The log of a run: metrics.csv, and the text that goes with its progress."""

import pytest

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.logger import RunLog, rate_text


def logged(folder, iterations, *, done=0):
    """The reports of progress of these iterations of a run of five."""
    reports = []
    with RunLog(folder, 5, 8, lambda *report: reports.append(report), done=done) as log:
        for iteration in iterations:
            first = 2 if iteration == 1 else 0
            returns = {"return_agent": 7.25, "episodes": 3, "first_episodes": first, "episode_length": 12.0}
            log({"iteration": iteration, "env_steps": 10 * iteration, "agent_steps_per_s": 2e6, **returns})
    return reports


def test_progress_comes_with_the_newest_returns(tmp_path):
    first, *_, last = logged(tmp_path, range(1, 6))
    assert first == (
        0.2,
        "iteration 1 of 5  2,000k agent-steps/s  no returns yet: first episodes are running in 2 of 8 environments",
    )
    assert last == (1.0, "iteration 5 of 5  2,000k agent-steps/s  return: agent 7.25  episode: 12 steps")


def test_slow_iterations_have_a_rate_too():
    assert [rate_text(rate) for rate in (178.4, 9999, 10_000, 2e6)] == [
        "178 agent-steps/s",
        "9,999 agent-steps/s",
        "10k agent-steps/s",
        "2,000k agent-steps/s",
    ]


def test_means_are_left_empty_while_first_episodes_are_running(tmp_path):
    logged(tmp_path, [1, 2])
    header, first, second = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == "iteration,env_steps,agent_steps_per_s,return_agent,episodes,first_episodes,episode_length"
    assert first == "1,10,2000000.0,,3,2," and second == "2,20,2000000.0,7.25,3,0,12.0"


def test_each_iteration_is_a_row_of_the_table(tmp_path):
    logged(tmp_path, range(1, 6))
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 6


def test_tensorboard_has_each_metric_of_each_iteration(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged(tmp_path, range(1, 4))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["return/agent"] == [(20, 7.25), (30, 7.25)]  # none while first episodes are running
    assert found["episode_length"] == [(20, 12.0), (30, 12.0)]
    assert found["agent_steps_per_s"] == [(10, 2e6), (20, 2e6), (30, 2e6)]
    assert set(found) == {
        *("iteration", "env_steps", "agent_steps_per_s", "return/agent"),
        *("episodes", "first_episodes", "episode_length"),
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.csv", "iteration,env_steps\n1,10,3\n", "line 2, is damaged.* more than 2 columns"),
        ("metrics.csv", "iteration,steps\n1,10\n", "line 2, is damaged: KeyError.*env_steps"),
        ("metrics.csv", "iteration,env_steps\n1,ten\n", "line 2, is damaged: ValueError.*ten"),
        ("nonfinite.csv", "iteration,figure\n1,loss\n", "line 2, is damaged: KeyError.*metric"),
    ],
)
@pytest.mark.filterwarnings("error")  # as of a file that was not closed
def test_a_damaged_table_is_refused_and_stays(name, text, message, tmp_path):
    files = {"metrics.csv": "iteration,env_steps\n1,10\n", name: text}
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        RunLog(tmp_path, 5, 4, lambda *report: None, done=1)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
