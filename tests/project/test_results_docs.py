"""What docs/results.md says is what was measured: its tables are made of the JSON beside it."""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.scripts import imported_script

from gpu_vecenv.train.seed_statistics import bootstrap_interval

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "results.md").read_text(encoding="utf-8")
SCRIPTS = Path(__file__).parents[1] / "gpu"


def results(file: str) -> dict[str, Any]:
    return json.loads((DOCS / "results" / file).read_text(encoding="utf-8"))


def middle(returns: list[float]) -> str:
    """Interquartile mean with its interval."""
    found = bootstrap_interval(returns)
    return f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"


# What is in the first column -> the file.
GOALS_OF_TAG_GRIDWORLD = {
    "the preset, CPU": "tag_gridworld-goals-cpu.json",
    "the preset, H200": "tag_gridworld-goals-h200.json",
    "`make train`, CPU": "tag_gridworld-goals-make-train-cpu.json",
    "`make train`, H200": "tag_gridworld-goals-make-train-h200.json",
}


def goals_of_tag_gridworld(place: str) -> str:
    """The line of a training and device: shares of episodes in which the runner was caught."""
    runs = results(GOALS_OF_TAG_GRIDWORLD[place])["runs"].values()
    columns = ("trained - random", "trained - flee", "trained - trained", "pursuit - trained")
    found = {pairing: [run["pairings"][pairing]["tagged_all"] for run in runs] for pairing in columns}
    cells = [spread(v, ".1%") for v in found.values()]
    return f"| {place} | {len(runs)} | {' | '.join(cells)} |"


def learners() -> Iterator[str]:
    """The end of one line for each algorithm and library: interquartile mean, its interval, the worst seed."""
    for row in results("simple_spread.json")["rows"]:
        shown = f"{middle(row['returns'])} | {min(row['returns']):.1f}"
        yield f"| {row.get('title', 'gpu_vecenv')} | {len(row['returns'])} | {row['env_steps']:,} | {shown} |"


def test_the_table_of_few_env_steps_is_what_was_measured() -> None:
    few, others = results("sample_efficient.json"), results("sb3.json")
    with imported_script(DOCS.parent / "tests" / "gpu" / "figures.py") as figures:
        assert figures.table([few, others]) in TEXT
    steps = [{run["row"]: run["env_steps"] for run in contents["runs"]} for contents in (few, others)]
    assert steps[0].keys() == steps[1].keys() and all(steps[0][row] <= steps[1][row] for row in steps[0])


def test_every_curve_is_shown_and_is_there() -> None:
    with imported_script(DOCS.parent / "tests" / "gpu" / "curves.py") as curves:
        measured = map(results, ("presets.json", "commons.json", "economy.json"))
        games = {game for contents in measured for game in curves.pictures(contents)}
    assert games == {path.stem for path in (DOCS / "results").glob("*.png")}
    shown = set(re.findall(r"\]\((results/[\w-]+\.png)\)", TEXT))
    assert shown == {f"results/{path.name}" for path in (DOCS / "results").glob("*.png")}


def drawn(file: str) -> dict[str, Any]:
    """Game -> the figure that tests/gpu/curves.py makes of a file."""
    with imported_script(SCRIPTS / "curves.py") as curves:
        made: dict[str, Any] = {}
        curves.save = lambda figure, path: made.update({path.stem: figure})
        curves.main(DOCS / "results" / file, Path())
    return made


def seconds_axes(figure: Any) -> list[Any]:
    """The axes of a figure with seconds, below or above a panel."""
    every = [axes for panel in figure.axes for axes in (panel, *panel.child_axes)]
    return [axes for axes in every if axes.get_xlabel().startswith("seconds, ")]


def test_curves_have_random_play_scripts_stable_baselines3_and_seconds() -> None:
    pytest.importorskip("matplotlib")
    scripts, peers = set(), set()
    for game, figure in drawn("presets.json").items():
        labels = [[line.get_label() for line in panel.get_lines()] for panel in figure.axes]
        assert all(any(name.startswith("random play") for name in names) for names in labels), game
        assert {axes.get_xlabel() for axes in seconds_axes(figure)} == {"seconds, 10 seeds at once on NVIDIA H200"}
        scripts |= {(game, name) for names in labels for name in names if name.startswith("script: ")}
        peers |= {game for names in labels for name in names if name.startswith("Stable-Baselines3")}
    assert peers == {run["row"] for run in results("sb3.json")["runs"]}
    assert scripts == {
        ("pursuit", "script: pursuit_surround.py"),
        ("tag_gridworld", "script: tag_baselines.py, pursuit"),
        ("tag_gridworld", "script: tag_baselines.py, flee"),
        ("tag_continuous", "script: tag_baselines.py, pursuit"),
        ("tag_continuous", "script: tag_baselines.py, flee"),
        ("warehouse", "script: warehouse_robots.py"),
        ("connect_four", "script: connect_four_search.py"),
    }


def test_the_axes_of_seconds_end_with_the_trainings() -> None:
    pytest.importorskip("matplotlib")
    figures = drawn("presets.json")
    for game in ("pendulum", "overcooked"):
        seconds = max(run["seconds"] for run in results("presets.json")["runs"] if run["row"].startswith(game))
        (axes,) = seconds_axes(figures[game])
        figures[game].draw_without_rendering()
        assert seconds < axes.get_xlim()[1] < 1.1 * seconds, game


def test_references_are_of_every_row_and_what_the_page_says() -> None:
    found, (part, later, last) = results("references.json")["rows"], results("references.json")["parts"]
    assert set(found) == {run["row"] for run in results("presets.json")["runs"]}
    assert f"*Random play and scripts: {part['device']}, commit {part['commit']}, torch {part['torch']}" in TEXT
    commits = f"commit {later['commit']}; connect_four: commit {last['commit']}"
    assert f"*tag_continuous: {later['device']}, {commits}.*" in TEXT
    assert later["device"] == last["device"]
    runs = [run for run in results("presets.json")["runs"] if run["row"] == "connect_four"]
    first = statistics.fmean(run["curve"][0][1]["player"] for run in runs)
    final = statistics.fmean(run["sampled"]["player"] for run in runs)
    assert f"the mean over seeds is {first:.2f} in 32 episodes each, and {final:.2f} in 320 at the end" in TEXT
    script = found["pursuit"]["scripts"]["pursuer"]["return"]
    assert f"`examples/pursuit_surround.py` has {script:.1f}." in TEXT
    assert f"Four random robots deliver {found['warehouse']['random']['robot']:.1f}." in TEXT
    assert f"plays {found['warehouse']['scripts']['robot']['episodes']} episodes" in TEXT


def test_references_can_be_measured_again(tmp_path: Path) -> None:
    others = "connect_four_search", "figures", "preset_runs", "pursuit_surround", "tag_baselines", "warehouse_robots"
    with imported_script(SCRIPTS / "references.py", *others) as references:
        file = tmp_path / "references.json"
        for games in ("cartpole", "cartpole,overcooked"):
            references.main(file, references.Options(games=games))
    found = json.loads(file.read_text(encoding="utf-8"))
    assert list(found["rows"]) == ["cartpole", "overcooked"] and len(found["parts"]) == 2
    for row, measured in found["rows"].items():
        assert measured["random"] == pytest.approx(results("references.json")["rows"][row]["random"])


def test_pictures_are_small() -> None:
    assert max(path.stat().st_size for path in (DOCS / "results").glob("*.png")) < 64_000


@pytest.mark.parametrize("place", GOALS_OF_TAG_GRIDWORLD)
def test_the_table_of_goals_is_what_was_measured(place: str) -> None:
    assert goals_of_tag_gridworld(place) in TEXT


def test_the_table_of_learners_is_what_was_measured() -> None:
    rows = list(learners())
    assert len(rows) == 6 and [row for row in rows if row not in TEXT] == []


def test_the_table_of_ten_seeds_is_what_was_measured() -> None:
    with imported_script(DOCS.parent / "tests" / "gpu" / "figures.py") as figures:
        assert figures.table([results("presets.json"), results("sb3.json")]) in TEXT
        assert figures.table([results(f"algorithms-{name}.json") for name in ("mappo", "pqn", "ppo")]) in TEXT
        presets = results("presets.json")
        robots = {**presets, "runs": [run for run in presets["runs"] if run["row"] == "warehouse"]}
        assert figures.table([robots]) in TEXT


def test_returns_of_robots_with_a_central_critic_are_what_was_measured() -> None:
    runs = results("warehouse-mappo.json")["runs"]
    assert len(runs) == 10 and {run["env_steps"] for run in runs} == {20_004_864}
    said = {}
    for how in ("sampled", "greedy"):
        returns = [run[how]["robot"] for run in runs]
        said[how] = middle(returns), f"the worst seed {min(returns):.1f}"
    (sampled, worst), (greedy, worst_greedy) = said["sampled"], said["greedy"]
    assert f"ten seeds return {sampled} in 320 episodes of sampled actions, {worst}, and" in TEXT
    assert f"greedily {greedy}, {worst_greedy}:" in TEXT
    means = [statistics.fmean(run["curve"][point][1]["robot"] for run in runs) for point in range(10)]
    assert max(means) == means[-1] and f"after half of those steps: {means[-1]:.1f}." in TEXT


def test_shares_of_battles_won_after_whole_trainings_are_what_was_measured() -> None:
    ours, theirs, *pqn = (row["curve"][-1][2] for row in results("skirmish-whole.json")["rows"])
    logged = f"{theirs:.1%} of those that JaxMARL's script logged in its last update"
    said = f"{logged}; by PQN-VDN {pqn[0]:.1%}, and {pqn[1]:.1%} of those that ended"
    assert ours == 1.0 and said in " ".join(TEXT.replace(" %", "%").split())


def matches_of_connect_four() -> Iterator[str]:
    """One line for each seed: the shares of games won."""
    columns = [f"{how}, {who}" for how in ("greedy", "sampled") for who in ("random moves", "a search of depth 5")]
    for run in results("connect_four-goals.json")["runs"].values():
        cells = [f"{sum(run['matches'][name]['wins']) / sum(run['matches'][name]['games']):.1%}" for name in columns]
        yield f"| {run['seed']} | {' | '.join(cells)} |"


def test_the_table_of_connect_four_is_what_was_measured() -> None:
    rows = list(matches_of_connect_four())
    assert len(rows) == 10 and [row for row in rows if row not in TEXT] == []


def goals_of_tag_continuous() -> Iterator[str]:
    """One line for each seed: shares of episodes in which all were tagged, and returns of the trained runners."""
    columns = ("trained - random", "trained - flee", "trained - trained", "pursuit - trained")
    for run in results("tag_continuous-goals.json")["runs"].values():
        shares = " | ".join(f"{run['pairings'][name]['tagged_all']:.1%}" for name in columns)
        returns = [run["pairings"][name]["return_runner"] for name in ("pursuit - trained", "random - trained")]
        yield f"| {run['seed']} | {shares} | {' | '.join(f'{value:.2f}' for value in returns)} |"


def test_interquartile_means_of_connect_four_are_what_was_measured() -> None:
    runs = results("connect_four-goals.json")["runs"].values()
    for how in ("greedy", "sampled"):
        for opponent in ("random moves", "a search of depth 5"):
            matches = [run["matches"][f"{how}, {opponent}"] for run in runs]
            won = bootstrap_interval([100 * sum(match["wins"]) / sum(match["games"]) for match in matches])
            assert f"{won.value:.1f} % [{won.low:.1f}, {won.high:.1f}]" in TEXT


def test_the_table_of_goals_of_tag_continuous_is_what_was_measured() -> None:
    rows = list(goals_of_tag_continuous())
    assert len(rows) == 10 and [row for row in rows if row not in TEXT] == []


def goals_of_five_taggers() -> Iterator[str]:
    """As ``goals_of_tag_continuous``, with returns of runners from trained taggers too; the last line is of scripts."""
    measured = results("tag_continuous-5-goals.json")
    of_runners = ("trained - flee", "trained - trained", "pursuit - trained", "random - trained")
    for run in measured["runs"].values():
        shares = [f"{run['pairings'][name]['tagged_all']:.1%}" for name in ("trained - random", *of_runners[:3])]
        returns = [f"{run['pairings'][name]['return_runner']:.2f}" for name in of_runners]
        yield f"| {run['seed']} | {' | '.join(shares)} | {' | '.join(returns)} |"
    scripts = measured["scripts"]["tag_continuous-5"]
    random, flee = (f"{scripts[name]['tagged_all']:.1%}" for name in ("pursuit - random", "pursuit - flee"))
    returns = [f"{scripts[name]['return_runner']:.2f}" for name in ("pursuit - flee", "random - flee")]
    yield f"| pursuit, flee | {random} | {flee} |  |  |  |  | {' | '.join(returns)} |"


def test_the_table_of_five_taggers_is_what_was_measured() -> None:
    rows = list(goals_of_five_taggers())
    assert len(rows) == 9 and [row for row in rows if row not in TEXT] == []


def options_of_tag_continuous() -> Iterator[str]:
    """One line for each network, and for training without opponents."""
    columns = {"trained - flee": "tagged_all", "trained - trained": "tagged_all"}
    columns |= dict.fromkeys(("pursuit - trained", "random - trained"), "return_runner")
    for row in results("tag_continuous-options.json")["rows"]:
        cells = [row["option"], str(len(row["runs"])), f"{row['seconds']} s"]
        for pairing, metric in columns.items():
            found = [run["pairings"][pairing][metric] for run in row["runs"]]
            cells.append(spread(found, ".0%" if metric == "tagged_all" else ".2f"))
        yield f"| {' | '.join(cells)} |"


def test_the_table_of_options_of_tag_continuous_is_what_was_measured() -> None:
    rows = list(options_of_tag_continuous())
    assert len(rows) == 5 and [row for row in rows if row not in TEXT] == []


def sampling_of_opponents() -> Iterator[str]:
    """One line for each setting: shares of episodes in which all were tagged, and returns of the trained runners."""
    for row in results("tag_continuous-sampling.json")["rows"]:
        option = f"{row['sampling']}, {row['num_snapshots']}, {row['reassign_interval']}"
        cells = [str(row["taggers"]), option, f"{row['runs'][0]['seed']} to {row['runs'][-1]['seed']}"]
        for pairing in ("trained - random", "trained - flee", "trained - trained"):
            cells.append(spread([run["pairings"][pairing]["tagged_all"] for run in row["runs"]], ".0%"))
        for pairing in ("pursuit - trained", "random - trained"):
            cells.append(spread([run["pairings"][pairing]["return_runner"] for run in row["runs"]], ".2f"))
        yield f"| {' | '.join(cells)} |"


def spread(found: Sequence[float], digits: str) -> str:
    """The mean, and of several values the lowest and the highest."""
    mean, low, high = (format(value, digits) for value in (statistics.fmean(found), min(found), max(found)))
    return mean if len(found) == 1 else f"{mean} ({low} … {high})"


def test_the_table_of_sampling_of_opponents_is_what_was_measured() -> None:
    rows = list(sampling_of_opponents())
    assert len(rows) == 6 and [row for row in rows if row not in TEXT] == []


def partners() -> Iterator[str]:
    """One line for each kitchen: self-play, cross-play, their difference, the lowest mean of two different runs."""
    for row in results("crossplay.json")["rows"]:
        found = row["self_and_cross_play"]
        cells = [
            f"{found[key]:.1f} ± {found[f'{key}_standard_error']:.1f}" for key in ("self_play", "cross_play", "gap")
        ]
        lowest = min(mean for i, means in enumerate(row["mean"]) for k, mean in enumerate(means) if i != k)
        yield f"| {row['row']} | {' | '.join(cells)} | {lowest:.1f} |"


def test_the_table_of_partners_is_what_was_measured() -> None:
    rows = list(partners())
    assert len(rows) == 8 and [row for row in rows if row not in TEXT] == []


def opponents() -> Iterator[str]:
    """A line for each game, role and training, without and with opponents: returns against both and random play."""
    kinds = {"none": range(3), "snapshots and random play": range(3, 6), "random": range(6, 7)}
    for row in results("opponents.json")["rows"]:
        (rows, first), (columns, second) = row["mean"].items()
        of_role = {rows: first, columns: [list(means) for means in zip(*second, strict=True)]}
        if row["game"] == "connect_four":  # one role: the mean over both sides
            pairs = [zip(*of_both, strict=True) for of_both in zip(*of_role.values(), strict=True)]
            of_role = {"player": [[(one + other) / 2 for one, other in of_both] for of_both in pairs]}
        for role, means in of_role.items():
            for trained in list(kinds)[:2]:
                cells = []
                for others in kinds.values():
                    seen = [[means[own][k] for k in others if len(of_role) > 1 or k != own] for own in kinds[trained]]
                    cells.append(spread(list(map(statistics.fmean, seen)), ".2f").replace("-0.00", "0.00"))
                yield f"| {row['game']} | {role} | {trained} | {' | '.join(cells)} |"


def test_the_table_of_opponents_is_what_was_measured() -> None:
    rows = list(opponents())
    assert len(rows) == 10 and [row for row in rows if row not in TEXT] == []


def test_the_tables_of_societies_are_what_was_measured() -> None:
    modules = "figures", "preset_runs", "commons", "economy_taxes"
    with imported_script(SCRIPTS / "societies.py", *modules) as societies:
        for file, count in (("commons.json", 6), ("economy.json", 20)):
            rows = list(societies.table(results(file)))
            assert len(rows) == count and [row for row in rows if row not in TEXT] == []


def test_the_tables_of_sweeps_have_the_preset_and_the_best_trials() -> None:
    names = "figures", "preset_runs"
    with imported_script(SCRIPTS / "preset_sweep.py", *names) as preset_sweep:
        for sweep in results("sweeps.json")["sweeps"]:
            _, _, _, *rows = preset_sweep.summary(sweep["game"], sweep["runs"])
            told = [row for k, row in enumerate(rows) if k < 3 or row.startswith("| preset |")]
            assert "\n".join(told) in TEXT and f"the best of {len(rows) - 1} others" in TEXT


def test_the_table_of_warehouse_s_rollouts_is_what_was_measured() -> None:
    for row in results("warehouse-sweep.json")["rows"]:
        learner, runs = json.loads(row["settings"]["learner"]), row["runs"]
        sizes = f"{learner['num_envs']} x {learner['num_steps']} | {learner['num_minibatches']}"
        cells = f"{learner['learning_rate']} | {runs[0]['env_steps']:,} | {len(runs)}"
        assert f"| {sizes} | {cells} | {spread([run['sampled']['robot'] for run in runs], '.2f')} |" in TEXT


KITCHENS = ("presets.json", "overcooked-entropy.json", "overcooked-falling-entropy.json")


def returns_in(kitchen: str, file: str) -> str:
    """A cell: what the ten seeds of a kitchen return."""
    found = [run["sampled"]["player"] for run in results(file)["runs"] if run["row"] == kitchen]
    return f"{middle(found)}, {min(found):.1f}"


def test_the_table_of_kitchens_is_what_was_measured() -> None:
    kitchens = list(dict.fromkeys(run["row"] for run in results("overcooked-entropy.json")["runs"]))
    assert len(kitchens) == 5
    for kitchen in kitchens:
        cells = [kitchen, *(returns_in(kitchen, file) for file in KITCHENS)]
        assert f"| {' | '.join(cells)} |" in TEXT


def options() -> Iterator[str]:
    """The end of one line for each trial of other options: env-steps, seeds, measure and the scores."""
    for row in results("trials.json")["rows"]:
        scores, digits = list(row["scores"].values()), ".1f" if row["measure"] == "return" else ".1%"
        yield f"| {row['env_steps']:,} | {len(scores)} | {row['measure']} | {spread(scores, digits)} |"


def test_the_table_of_other_options_is_what_was_measured() -> None:
    rows = list(options())
    assert len(rows) == 40 and [row for row in rows if row not in TEXT] == []


def test_each_table_names_the_commit_and_the_device_of_its_file() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    told = re.findall(r"^\*([\w ]+), commit (\w{7,}), .*: `docs/(\w+/[\w-]+\.json)`\.\*$", pages, re.MULTILINE)
    assert len(told) > 8  # without those that benchmarks/performance.py writes, see test_performance.py
    for device, commit, file in told:
        measured = (DOCS / file).read_text(encoding="utf-8")
        assert f'"{device}' in measured and f'"{commit}"' in measured, file


def test_what_skirmish_and_overcooked_returned_is_what_was_measured() -> None:
    of_seeds = [f"{value:.1f}" for value in results("overcooked-circuit-cnn.json")["sparse_return"].values()]
    assert f"return {', '.join(of_seeds[:-1])} and {of_seeds[-1]}:" in TEXT
    curves = results("skirmish-pqn.json")["curves"].values()
    late = [returns["ally"] for curve in curves for env_steps, returns in curve if env_steps >= 3_900_000]
    assert re.search(rf"mean returns of {min(late):.2f} to\s{max(late):.2f} in evaluations", TEXT)
