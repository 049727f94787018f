"""Learning curves: what is read from a run's table, and what is drawn from it."""

import csv
import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from gpu_vecenv.errors import ConfigError
from gpu_vecenv.train.plots import COLOURS, plot_runs, read_metrics

SVG = "{http://www.w3.org/2000/svg}"


def row(iteration, **metrics):
    """A line of metrics.csv."""
    common = {"iteration": iteration, "seconds": 2.0 * iteration, "env_steps": 100 * iteration, "episodes": 5}
    return {**common, "return_agent": float(iteration), "episode_length": 20.0 + iteration, **metrics}


def written(folder, rows):
    """A run's folder with these lines."""
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def returning(folder, values, **metrics):
    """A run whose iterations have these returns."""
    return written(folder, [row(i, return_agent=value, **metrics) for i, value in enumerate(values, start=1)])


# The table


def test_metrics_are_numbers_by_name(tmp_path):
    rows = [row(1), row(2, return_agent=float("nan"))]
    found = read_metrics(written(tmp_path / "run", rows))
    assert found[0] == rows[0] and all(type(value) is float for value in found[0].values())
    assert found[1]["return_agent"] != found[1]["return_agent"]


def test_means_may_be_empty_while_first_episodes_are_running(tmp_path):
    none = {"first_episodes": 3, "return_agent": "", "episode_length": ""}
    found, other = read_metrics(written(tmp_path / "run", [row(1, **none), row(2, first_episodes=0)]))
    assert found["episodes"] == 5 and math.isnan(found["return_agent"]) and math.isnan(found["episode_length"])
    assert other == row(2, first_episodes=0)


def test_columns_of_strings_are_left_out(tmp_path):
    folder = written(tmp_path / "run", [row(1, weights="00e9"), row(2, weights="ab12")])
    assert read_metrics(folder) == [row(1), row(2)]


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    path = written(tmp_path / "run", [row(1), row(2)]) / "metrics.csv"
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert read_metrics(path.parent) == [row(1), row(2)][: max(whole[:cut].count(b"\r") - 1, 0)]


@pytest.mark.parametrize(
    ("line", "what", "message"),
    [
        (1, "iteration,seconds", r"the columns are \['iteration', 'seconds'\]"),
        (1, "env_steps,env_steps", "expected unique names"),
        (3, "2,4.0,200,5,2.0", "it has 5 values; expected 6"),
        (3, "2,4.0,200,5,2.0,20.0,1", "it has 7 values; expected 6"),
        (3, "2,4.0,200,5,,20.0", "could not convert string to float: ''"),
        (3, "2,4.0,200,5,\x00\xff,20.0", "could not convert string to float"),
        (3, "2,4.0,100,5,2.0,20.0", "env_steps is 100; expected more"),
        (4, '3,"6"0,300,5,3.0,20.0', "expected after '\"'"),
    ],
)
def test_a_damaged_line_is_named(line, what, message, tmp_path):
    path = written(tmp_path / "run", [row(1), row(2), row(3)]) / "metrics.csv"
    lines = path.read_bytes().split(b"\r\n")
    lines[line - 1] = what.encode("latin-1")
    path.write_bytes(b"\r\n".join(lines))
    with pytest.raises(ConfigError, match=message) as caught:
        read_metrics(path.parent)
    assert f"{path}, line {line}, is damaged" in str(caught.value)


def test_a_folder_without_a_table(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "metrics.csv"))):
        read_metrics(tmp_path)


# The picture


def lines_of(path):
    """Of each panel of an SVG, colour -> its curve, as the values that its points have on a y axis from 0 to 1."""
    panels = []
    for panel in ElementTree.parse(path).iter(f"{SVG}g"):
        if not panel.get("id", "").startswith("axes_"):
            continue
        frame = numbers(panel.find(f"{SVG}g[@id='{_ids(panel, 'patch')[0]}']/{SVG}path").get("d"))
        left, right = min(frame[::2]), max(frame[::2])
        bottom, top = max(frame[1::2]), min(frame[1::2])
        curves = {}
        for name in _ids(panel, "line2d"):
            path = panel.find(f"{SVG}g[@id='{name}']/{SVG}path")
            if path is None or not path.get("clip-path"):
                continue
            points = numbers(path.get("d"))
            colour = re.search(r"stroke: (#\w+)", path.get("style"))[1].upper()
            places = [(x - left) / (right - left) for x in points[::2]]
            curves.setdefault(colour, []).append(
                list(zip(places, [(bottom - y) / (bottom - top) for y in points[1::2]], strict=True))
            )
        panels.append(curves)
    return panels


def _ids(panel, kind):
    return [child.get("id") for child in panel if child.get("id", "").startswith(kind)]


def numbers(path):
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", path)]


def words_of(path):
    """Texts of an SVG; matplotlib draws them as outlines and leaves them in comments."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def heights(curve):
    """The shape of a curve, whatever its scale: its lowest point is 0, its highest 1."""
    values = [y for _, y in curve]
    low, high = min(values), max(values)
    # A picture's numbers have 6 decimals of about 200 units.
    return [round((y - low) / (high - low), 4) for y in values]


matplotlib = pytest.importorskip("matplotlib")


def test_the_default_is_each_roles_return_and_the_length_of_episodes(tmp_path):
    rows = [{**row(i), "return_runner": -i * 1.0, "entropy_agent": 1.0} for i in (1, 2, 3)]
    assert plot_runs([written(tmp_path / "run", rows)], tmp_path / "deep" / "curve.svg")
    words = words_of(tmp_path / "deep" / "curve.svg")
    expected = ["return, agent", "return, runner", "episode length", "run", "env-steps (all environments)", "steps"]
    assert [word for word in expected if word not in words] == []
    assert words.count("reward per agent and episode") == 2 and "entropy agent" not in words
    assert len(lines_of(tmp_path / "deep" / "curve.svg")) == 3


def test_members_of_a_population_are_thin_lines_in_the_panel_of_all(tmp_path):
    rows = [{**row(i), "return_agent_p0": i - 1.0, "return_agent_p1": i + 1.0, "return_p2": 1.0 / i} for i in (1, 2, 3)]
    plot_runs([written(tmp_path / "run", rows)], tmp_path / "curve.svg")
    agent, other, _ = lines_of(tmp_path / "curve.svg")
    assert [len(lines) for panel in (agent, other) for lines in panel.values()] == [3, 1]  # return_p2 is of no other
    assert all(low[1] < high[1] for low, high in zip(*next(iter(agent.values()))[:2], strict=True))
    plot_runs([tmp_path / "run"], tmp_path / "one.svg", metrics=["return_agent_p1"])
    assert len(lines_of(tmp_path / "one.svg")) == 1


def test_selected_metrics_are_plotted(tmp_path):
    folder = returning(tmp_path / "run", [1, 2], entropy_agent=1.5, agent_steps_per_s=1e6)
    asked = ["entropy_agent", "agent_steps_per_s"]
    plot_runs([folder], tmp_path / "curve.svg", metrics=asked)
    words = words_of(tmp_path / "curve.svg")
    assert {"entropy agent", "nats", "agent-steps / s"} <= set(words) and "episode length" not in words
    with pytest.raises(ConfigError, match="no run has the metric 'entropy'; nearest: entropy_agent"):
        plot_runs([folder], tmp_path / "other.svg", metrics=["entropy"])
    assert not (tmp_path / "other.svg").exists()


def test_a_curve_shows_the_values(tmp_path):
    folder = returning(tmp_path / "run", [0, 1, 4, 2])
    plot_runs([folder], tmp_path / "curve.svg", metrics=["return_agent"])
    [[curve]] = [panel[COLOURS[0]] for panel in lines_of(tmp_path / "curve.svg")]
    assert heights(curve) == [0, 0.25, 1, 0.5]


def test_values_are_smoothed_over_those_before(tmp_path):
    folder = returning(tmp_path / "run", [0, 2, 4, 0, 2])
    plot_runs([folder], tmp_path / "curve.svg", metrics=["return_agent"], smooth=2)
    [[curve]] = [panel[COLOURS[0]] for panel in lines_of(tmp_path / "curve.svg")]
    assert heights(curve) == [round(mean / 3, 4) for mean in (0, 1, 3, 2, 1)]


def test_iterations_in_which_no_episode_ended_say_nothing_about_episodes(tmp_path):
    rows = [row(1, episodes=0, return_agent=0.0), row(2), row(3, episodes=0, return_agent=0.0), row(4), row(6)]
    plot_runs([written(tmp_path / "run", rows)], tmp_path / "curve.svg", metrics=["return_agent", "episodes"])
    returns, episodes = (panel[COLOURS[0]][0] for panel in lines_of(tmp_path / "curve.svg"))
    assert heights(returns) == [0, 0.5, 1] and len(episodes) == 5
    begun = written(tmp_path / "begun", [row(1, episodes=0), row(2, episodes=0)])
    assert plot_runs([begun], tmp_path / "begun.svg") and lines_of(tmp_path / "begun.svg") == [{}]
    assert plot_runs([written(tmp_path / "empty", [])], tmp_path / "empty.svg") is True


def test_numbers_that_are_none_leave_no_point(tmp_path):
    folder = returning(tmp_path / "run", [0, float("nan"), 1, float("inf"), 2])
    plot_runs([folder], tmp_path / "curve.svg", metrics=["return_agent"], smooth=2)
    [[curve]] = [panel[COLOURS[0]] for panel in lines_of(tmp_path / "curve.svg")]
    assert heights(curve) == [0, round(1 / 3, 4), 1]  # of 0, 0.5, 1.5


def test_runs_that_differ_in_their_seed_are_one_line_in_a_band(tmp_path):
    seeds = [returning(tmp_path / f"pole-seed{i}", values) for i, values in enumerate(([0, 2, 2, 9], [0, 4, 8]))]
    other = returning(tmp_path / "a2c", [1, 1, 2])
    path = tmp_path / "curve.svg"
    plot_runs([*seeds, other], path, metrics=["return_agent"])
    [panel] = lines_of(path)
    assert set(panel) == set(COLOURS[:2]) and [len(curves) for curves in panel.values()] == [1, 1]
    assert heights(panel[COLOURS[0]][0]) == [0, 0.6, 1]  # the means 0, 3, 5, as far as both have come
    assert len(re.findall(r"<g id=.\w*PolyCollection_", path.read_text())) == 1
    band = numbers(re.search(r"PolyCollection_1.*?<path [^>]*? d=\"([^\"]*)\"", path.read_text(), re.S)[1])
    edge = list(zip(band[::2], (-y for y in band[1::2]), strict=True))
    places = sorted({x for x, _ in edge})
    ranges = [[edge_of(y for x, y in edge if x == place) for edge_of in (min, max)] for place in places]
    low, high = ranges[0][0], ranges[-1][1]
    shares = [[round((y - low) / (high - low), 4) for y in both] for both in ranges]
    assert shares == [[0, 0], [0.25, 0.5], [0.25, 1]]  # 0 to 0, 2 to 4, 2 to 8
    assert {"pole (mean and range of 2 runs)", "a2c"} <= set(words_of(path))


def test_runs_of_one_name_elsewhere_or_with_other_numbers_are_not_one(tmp_path):
    folders = ["ppo/seed1", "ppo/seed2", "old/pole-seed1", "new/pole-seed1", "run-1", "run-2"]
    runs = [returning(tmp_path / folder, [1, 2, 3]) for folder in folders]
    plot_runs([*runs, runs[0]], tmp_path / "curve.svg", metrics=["return_agent"])
    expected = {"ppo (mean and range of 2 runs)", "old/pole", "new/pole", "run-1", "run-2"}
    words = set(words_of(tmp_path / "curve.svg"))
    assert expected <= words and {word for word in words if "run" in word} <= {*expected, "return, agent"}
    assert len(lines_of(tmp_path / "curve.svg")[0]) == 5


def test_seeds_with_nothing_in_common_are_lines_of_one_colour(tmp_path):
    early = written(tmp_path / "a-seed1", [row(1), row(2)])
    late = written(tmp_path / "a-seed2", [row(5), row(6)])
    plot_runs([early, late], tmp_path / "curve.svg", metrics=["return_agent"])
    [panel] = lines_of(tmp_path / "curve.svg")
    assert [len(curves) for curves in panel.values()] == [2]


def test_points_between_those_of_other_seeds_are_interpolated(tmp_path):
    one = written(tmp_path / "a-seed1", [row(1, return_agent=0.0), row(3, return_agent=4.0)])
    two = written(tmp_path / "a-seed2", [row(1, return_agent=0.0), row(2, return_agent=0.0), row(3, return_agent=2.0)])
    plot_runs([one, two], tmp_path / "curve.svg", metrics=["return_agent"])
    [[curve]] = [panel[COLOURS[0]] for panel in lines_of(tmp_path / "curve.svg")]
    assert heights(curve) == [0, round(1 / 3, 4), 1]


@pytest.mark.parametrize(("seconds", "unit"), [(1, "seconds"), (60, "minutes"), (3600, "hours")])
def test_time_is_given_in_units_that_suit_it(seconds, unit, tmp_path):
    rows = [row(i, seconds=seconds * i * 4.0) for i in (1, 2)]
    plot_runs([written(tmp_path / "run", rows)], tmp_path / "curve.svg", x="seconds", metrics=["return_agent"])
    words = words_of(tmp_path / "curve.svg")
    assert f"training time ({unit})" in words and {"4", "8"} <= {word.removesuffix(".0") for word in words}


def test_more_runs_than_colours_differ_in_dashes(tmp_path):
    runs = [returning(tmp_path / f"run-{i}", [i, i + 1]) for i in range(len(COLOURS) + 1)]
    plot_runs(runs, tmp_path / "curve.svg", metrics=["return_agent"])
    [panel] = lines_of(tmp_path / "curve.svg")
    assert len(panel) == len(COLOURS) and len(panel[COLOURS[0]]) == 2
    assert "stroke-dasharray" in (tmp_path / "curve.svg").read_text()


@pytest.mark.parametrize("panels", range(1, 8))
def test_a_png_of_any_number_of_panels(panels, tmp_path):
    folder = returning(tmp_path / "run", [1, 2, 4], **{f"figure_{i}": 1.0 for i in range(panels)})
    assert plot_runs([folder], tmp_path / "a.png", metrics=[f"figure_{i}" for i in range(panels)]) is True
    content = (tmp_path / "a.png").read_bytes()
    assert content.startswith(b"\x89PNG") and int.from_bytes(content[16:20], "big") >= 900  # pixels across


def test_wrong_arguments(tmp_path):
    folder = returning(tmp_path / "run", [1, 2])
    out = tmp_path / "a.png"
    for error, message, arguments in (
        (ConfigError, 'x is \'steps\'; expected "env_steps" or "seconds"', {"x": "steps"}),
        (
            ConfigError,
            r"out is .*a\.jpg; expected a file name that ends in \.png or \.svg",
            {"out": tmp_path / "a.jpg"},
        ),
        (ConfigError, "there are no runs", {"runs": []}),
        (FileNotFoundError, r"nowhere.metrics\.csv", {"runs": [tmp_path / "nowhere"]}),
        (ValueError, "smooth is 0", {"smooth": 0}),
        (TypeError, r"smooth is 1\.5", {"smooth": 1.5}),
        (TypeError, "runs is 'run' .*expected a sequence of paths of run folders", {"runs": "run"}),
        (TypeError, "metrics is 'episode_length' .*expected a sequence of names", {"metrics": "episode_length"}),
    ):
        with pytest.raises(error, match=message):
            plot_runs(**{"runs": [folder], "out": out, **arguments})
    old = written(tmp_path / "old", [{"env_steps": 1, "episode_length": 3.0}])
    with pytest.raises(ConfigError, match="x is 'seconds', but a run has no such column"):
        plot_runs([old], out, x="seconds")
    assert not out.exists()


# Evaluations against fixed opponents


def evaluated(folder, points, random=None):
    """Give a run evaluations, (role, opponent) -> mean returns, and the returns of random play, by role."""
    with (folder / "evaluations.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["iteration", "env_steps", "seconds", "role", "opponent", "mean_return"])
        for (role, opponent), values in points.items():
            writer.writerows([i, 100 * i, 2.0 * i, role, opponent, value] for i, value in enumerate(values, 1))
    if random is not None:
        results = {"all random": {"episodes": 3, **{f"return_{role}": value for role, value in random.items()}}}
        (folder / "evaluation.json").write_text(json.dumps(results))
    return folder


def of_two_roles(folder, learn=("tagger", "runner")):
    rates = {f"learning_rate_{role}": 0.1 for role in learn}
    rows = [{**row(i), "return_tagger": 1.0 * i, "return_runner": 0.0, **rates} for i in (1, 2, 3)]
    return written(folder, [{key: value for key, value in one.items() if key != "return_agent"} for one in rows])


def test_a_roles_panel_has_its_evaluations_and_random_play(tmp_path):
    points = {("tagger", "random"): [0, 4, 2], ("tagger", "still"): [1, 1, 3], ("runner", "random"): [0, 0, 0]}
    folder = evaluated(of_two_roles(tmp_path / "run"), points, {"tagger": -1.0, "runner": 0.5})
    plot_runs([folder], tmp_path / "curve.svg")
    tagger, runner, length = lines_of(tmp_path / "curve.svg")
    assert [heights(tagger[colour][0]) for colour in COLOURS[1:3]] == [[0, 1, 0.5], [0, 0, 1]]
    assert set(tagger) == {*COLOURS[:3], "#777777"} and set(runner) == {*COLOURS[:2], "#777777"}
    lowest = min(y for curves in tagger.values() for curve in curves for _, y in curve)
    assert [y for _, y in tagger["#777777"][0]] == [lowest] * 2 and set(length) == {COLOURS[0]}
    words = words_of(tmp_path / "curve.svg")
    assert {"against random", "against still", "random play"} <= set(words)


def test_several_runs_keep_their_colours_and_opponents_differ_in_markers(tmp_path):
    names = {("tagger", "random"): [0, 4, 2], ("tagger", "still"): [1, 1, 3]}
    runs = [evaluated(of_two_roles(tmp_path / name), names) for name in ("one-seed0", "one-seed1", "two")]
    plot_runs(runs, tmp_path / "curve.svg")
    tagger = lines_of(tmp_path / "curve.svg")[0]
    assert {colour: len(curves) for colour, curves in tagger.items()} == {COLOURS[0]: 3, COLOURS[1]: 3}


def test_random_play_is_one_line_where_it_is_the_same_in_all_runs(tmp_path):
    points, runs = {("tagger", "random"): [0, 4, 2]}, []
    for name, value in (("one", -1.0), ("two", -1.0 - 1e-12), ("three", -2.0)):
        runs.append(evaluated(of_two_roles(tmp_path / name), points, {"tagger": value, "runner": 0.5}))
    without = evaluated(of_two_roles(tmp_path / "four"), points)
    plot_runs([*runs[:2], without], tmp_path / "same.svg")
    assert [len(panel["#777777"]) for panel in lines_of(tmp_path / "same.svg")[:2]] == [1, 1]
    words = words_of(tmp_path / "same.svg")
    assert "random play" in words and "random play, in the run's colour" not in words
    # A role of which the values differ has no panel here.
    plot_runs(runs, tmp_path / "runner.svg", metrics=["return_runner"])
    assert len(lines_of(tmp_path / "runner.svg")[0]["#777777"]) == 1

    plot_runs([without, *runs], tmp_path / "curve.svg")
    tagger, runner, _ = lines_of(tmp_path / "curve.svg")
    flat = {colour: [c for c in curves if len(c) == 2 and c[0][1] == c[1][1]] for colour, curves in tagger.items()}
    assert "#777777" not in {*tagger, *runner}
    levels = [[round(curve[0][1], 4) for curve in flat[colour]] for colour in COLOURS[:4]]
    assert [len(own) for own in levels] == [0, 1, 1, 1] and levels[1] == levels[2] > levels[3]
    words = words_of(tmp_path / "curve.svg")
    assert "random play, in the run's colour" in words and "random play" not in words
    # Two lines at one height share the dots.
    dots = re.findall(
        r"stroke-dasharray: ([\d.]+),([\d.]+); stroke-dashoffset: ([\d.]+)", (tmp_path / "curve.svg").read_text()
    )
    halves = {(float(gap) / float(on), float(offset) / float(on)) for on, gap, offset in dots}
    assert {(3.0, 0.0), (3.0, 2.0), (1.0, 0.0)} <= {(round(gap, 3), round(offset, 3)) for gap, offset in halves}


@pytest.mark.parametrize(
    ("learn", "count"), [(("tagger", "runner"), 2), (("tagger+runner",), 2), (("tagger_0", "tagger_1"), 1), ((), 0)]
)
def test_titles_say_where_the_opponent_learns_too(learn, count, tmp_path):
    folder = evaluated(of_two_roles(tmp_path / "run", learn), {("runner", "random"): [1, 2, 3]})
    plot_runs([folder], tmp_path / "curve.svg")
    assert words_of(tmp_path / "curve.svg").count("in training the opponent learns too") == count


def test_a_run_without_opponents_is_not_said_to_have_one(tmp_path):
    alone = written(tmp_path / "alone", [row(i, learning_rate_agent=0.1) for i in (1, 2)])
    evaluated(alone, {("agent", "none"): [1, 2]})
    returns = [f"return_{role}" for role in ("agent", "tagger", "runner")]
    plot_runs([alone, of_two_roles(tmp_path / "tag")], tmp_path / "curve.svg", metrics=returns)
    words = words_of(tmp_path / "curve.svg")
    assert words.count("in training the opponent learns too") == 2
    assert "evaluation" in words and "against none" not in words


def test_returns_of_agents_that_evaluations_alone_have_get_panels(tmp_path):
    """As in a zero-sum game of one role, whose own mean return is always 0."""
    folder = written(tmp_path / "run", [row(i, return_agent=0.0) for i in (1, 2)])
    evaluated(folder, {("agent_0", "random"): [0, 1], ("agent_1", "random"): [-1, 1]})
    plot_runs([folder], tmp_path / "curve.svg")
    words = words_of(tmp_path / "curve.svg")
    assert "return, agent_0" in words and "return, agent_1" in words and "return, agent" not in words
    assert heights(lines_of(tmp_path / "curve.svg")[1][COLOURS[1]][0]) == [0, 1]


def test_the_legend_names_the_games_where_runs_have_several(tmp_path):
    games = {"a-seed1": "cartpole", "a-seed2": "cartpole", "b": "pendulum", "unknown": None}
    runs = [returning(tmp_path / name, [1, 2]) for name in games]
    for run, game in zip(runs, games.values(), strict=True):
        if game is not None:
            (run / "config.json").write_text(json.dumps({"game": game}))
    plot_runs(runs, tmp_path / "curve.svg", metrics=["return_agent"])
    assert {"a, cartpole (mean and range of 2 runs)", "b, pendulum", "unknown"} <= set(words_of(tmp_path / "curve.svg"))
    plot_runs(runs[:2], tmp_path / "one.svg", metrics=["return_agent"])
    assert "a (mean and range of 2 runs)" in words_of(tmp_path / "one.svg")


def test_time_is_drawn_beside_steps(tmp_path):
    points = {("agent", "none"): [1, 2, 4]}
    plot_runs([evaluated(returning(tmp_path / "run", [0, 1, 4]), points)], tmp_path / "curve.svg", x="both")
    panels, words = lines_of(tmp_path / "curve.svg"), words_of(tmp_path / "curve.svg")
    assert len(panels) == 4 and heights(panels[0][COLOURS[0]][0]) == heights(panels[1][COLOURS[0]][0])
    assert words.count("env-steps (all environments)") == words.count("training time (seconds)") == 2
    assert heights(panels[1][COLOURS[1]][0]) == [0, round(1 / 3, 4), 1]


def test_panels_without_information_are_left_out(tmp_path):
    nothing = {"return_runner": float("nan"), "return_chaser": 0.0, "episode_length": 0.0}
    folder = written(tmp_path / "run", [row(i, **nothing) for i in (1, 2)])
    plot_runs([folder], tmp_path / "curve.svg")
    assert len(lines_of(tmp_path / "curve.svg")) == 1 and "return, agent" in words_of(tmp_path / "curve.svg")
    plot_runs([folder], tmp_path / "curve.svg", metrics=["return_chaser"])  # as it was asked for
    assert "return, chaser" in words_of(tmp_path / "curve.svg")
    evaluated(folder, {("runner", "random"): [1, 2]})
    plot_runs([folder], tmp_path / "curve.svg")
    assert {"return, agent", "return, runner"} <= set(words_of(tmp_path / "curve.svg"))


def test_panels_whose_values_never_change_are_left_out(tmp_path):
    runs = [
        returning(tmp_path / f"run{i}", [1, 2], episode_length=20.0, return_runner=3.0 + i, return_still=-5.0)
        for i in (1, 2)
    ]
    drawn = {"return, agent", "return, runner", "return, still", "episode length"}
    plot_runs(runs[:1], tmp_path / "one.svg")
    assert drawn & set(words_of(tmp_path / "one.svg")) == {"return, agent"}
    plot_runs(runs, tmp_path / "two.svg")  # each constant, but not the same
    assert drawn & set(words_of(tmp_path / "two.svg")) == {"return, agent", "return, runner"}
    evaluated(runs[0], {("still", "random"): [-5, -5]})
    plot_runs(runs[:1], tmp_path / "same.svg")
    assert "return, still" not in words_of(tmp_path / "same.svg")
    evaluated(runs[0], {("still", "random"): [-5, -4]})
    plot_runs(runs[:1], tmp_path / "evaluated.svg")
    assert "return, still" in words_of(tmp_path / "evaluated.svg")
    plot_runs([returning(tmp_path / "short", [1], episode_length=20.0)], tmp_path / "short.svg")  # changes are unknown
    assert drawn & set(words_of(tmp_path / "short.svg")) == {"return, agent", "episode length"}


def test_no_point_is_of_episodes_that_ended_early_alone(tmp_path):
    rows = [row(i, first_episodes=max(3 - i, 0), return_agent=value) for i, value in enumerate([9, 8, 1, 2, 3], 1)]
    plot_runs([written(tmp_path / "run", rows)], tmp_path / "curve.svg", metrics=["return_agent"])
    assert heights(lines_of(tmp_path / "curve.svg")[0][COLOURS[0]][0]) == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluations.csv", "env_steps,seconds,role,opponent,mean_return\n1,x,a,b,2\n", "line 2, is damaged"),
        ("evaluations.csv", "env_steps,seconds\n1,2\n", "line 2, is damaged: KeyError"),
        ("evaluation.json", "[]", "is damaged"),
        ("evaluation.json", "{", "is damaged"),
        ("config.json", "{", "is damaged: JSONDecodeError"),
        ("config.json", "[]", "is damaged: TypeError"),
    ],
)
def test_a_damaged_evaluation_is_named(name, content, message, tmp_path):
    folder = returning(tmp_path / "run", [1, 2])
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{re.escape(name)}.*{message}"):
        plot_runs([folder], tmp_path / "curve.svg")


@pytest.mark.slow
def test_without_matplotlib_nothing_is_drawn(tmp_path):
    folder = returning(tmp_path / "run", [1, 2])
    program = (
        "import sys; from pathlib import Path; sys.modules['matplotlib'] = None\n"  # what import finds missing
        "from gpu_vecenv.train.plots import plot_runs\n"
        f"assert plot_runs([Path({str(folder)!r})], Path({str(tmp_path / 'a.png')!r})) is False"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert not (tmp_path / "a.png").exists()


def test_the_modules_of_windows_stay_out():
    program = (
        "import sys; from pathlib import Path; from gpu_vecenv.train.plots import plot_runs\n"
        "assert not any(name.split('.')[0] == 'matplotlib' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
