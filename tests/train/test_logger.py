"""Progress of a run: a bar in a terminal, lines elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from gpu_vecenv.train import logger
from gpu_vecenv.train.logger import RunLog


def printed(folder, iterations, *, terminal=False, done=0, lines_apart=None, monkeypatch=None):
    if lines_apart is not None:
        monkeypatch.setattr(logger, "LINE_SECONDS", lines_apart)
    file = io.StringIO()
    with RunLog(folder, 5, Console(file=file, force_terminal=terminal, width=200), done=done) as log:
        for iteration in iterations:
            episodes = 0 if iteration == 1 else 3
            returns = {"return_agent": 7.25, "episodes": episodes, "episode_length": 12.0}
            log({"iteration": iteration, "env_steps": 10 * iteration, "agent_steps_per_s": 2e6, **returns})
    return file.getvalue()


def test_a_file_gets_the_first_line_and_the_last(tmp_path):
    first, last = printed(tmp_path, range(1, 6)).splitlines()
    assert first.startswith("iteration 1 of 5, about 0:00:0") and first.endswith("no finished episodes yet")
    assert last == "iteration 5 of 5, about 0:00:00 left  2,000k agent-steps/s  return: agent 7.25  episode: 12 steps"


def test_lines_follow_when_their_time_has_come(tmp_path, monkeypatch):
    lines = printed(tmp_path, range(1, 5), lines_apart=0.0, monkeypatch=monkeypatch).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"iteration {i} of 5" for i in range(1, 5)]


def test_the_estimate_counts_the_iterations_of_this_process(tmp_path, monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(logger, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert printed(tmp_path, [4], done=3).startswith("iteration 4 of 5, about 0:00:10 left")


def test_a_terminal_gets_no_lines(tmp_path):
    assert "iteration" not in printed(tmp_path, range(1, 6), terminal=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_metrics_are_written_either_way(tmp_path, terminal):
    printed(tmp_path, range(1, 6), terminal=terminal)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 6
