"""Measurements of this library alone, and their tables in the pages PAGES: ``python -m benchmarks.performance``.

It writes a table for each card that has files in docs/performance, named <card>-<measurement>.json, between the markers
of its section. Times and ratios have quartiles where the files have them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.table import FOLDER, digits, quartiles, rate
from gpu_vecenv.engine import timing

Results = Mapping[str, Any]
Cells = tuple[str, ...]
PAGES = tuple(FOLDER.parent / f"{name}.md" for name in ("performance", "performance_notes", "adapters", "reliability"))
SAME = ("commit", "device", "torch", "python")  # in all files of a table
MISSING = "-"


@dataclass(frozen=True)
class Measurement:
    """A command that writes a file.

    Attributes:
        command: {file} and {plot} are files, without their folder on the page.
        quick: The same on a CPU with sizes of tests, whose figures mean nothing; empty: needs a GPU.
        seconds: It ends within these.
        gpus: That it needs.
        on_cpu: It is of a CPU in any case.
        clients: It needs the RL libraries of the adapters.
    """

    command: str
    quick: str = ""
    seconds: int = 240
    gpus: int = 1
    on_cpu: bool = False
    clients: bool = False


def _script(name: str, seconds: int = 240) -> Measurement:
    command = f"python tests/gpu/{name}.py {{file}}"
    return Measurement(command, f"{command} --quick --device cpu", seconds)


BENCH = "python -m gpu_vecenv.bench"
QUICK_STEPS = f"{BENCH} --device cpu --game cartpole --num-envs 2 --json {{file}}"
QUICK_SWEEP = f"{BENCH} --device cpu --game cartpole --sweep environments --num-envs 2 --json {{file}} --plot {{plot}}"
MEASUREMENTS = {
    "cuda_core": Measurement(f"{BENCH} --driver cuda_core --json {{file}}", QUICK_STEPS),
    "pycuda": Measurement(f"{BENCH} --driver pycuda --json {{file}}", QUICK_STEPS),
    "sweep-environments": Measurement(
        f"{BENCH} --game tag_gridworld --sweep environments --num-envs 100000 --json {{file}} --plot {{plot}}",
        QUICK_SWEEP,
    ),
    # Each agent sees one other: what all of a thousand see of all would be 32 GB.
    "sweep-agents": Measurement(
        f"{BENCH} --game tag_gridworld --config '{{\"full_observation\": false}}' --sweep agents --num-envs 2000"
        " --json {file} --plot {plot}",
        QUICK_SWEEP,
    ),
    "sampler": _script("sampler_speed", 60),
    "learner": _script("learner_speed", 540),
    "solved": _script("time_to_solve", 120),
    "own-algorithm": _script("own_algorithm_speed"),
    "opponents": _script("opponents_speed"),
    "convolutions": _script("convolution_speed", 120),
    "cpu-baseline": Measurement(
        "python examples/cpu_baseline.py --num-envs 2000 --cpu-envs 200 --num-taggers 999 --full-observation False"
        " --steps 100 --repeats 10 --json {file}",
        "python examples/cpu_baseline.py --num-envs 3 --cpu-envs 2 --steps 2 --repeats 2 --device cpu --json {file}",
    ),
    "one-core": Measurement(f"taskset -c 0 {BENCH} --device cpu --json {{file}}", QUICK_STEPS, on_cpu=True),
    "two-gpus": Measurement("python tests/gpu/two_gpus.py {file}", seconds=400, gpus=2),
    "cost-of-checks": _script("cost_of_checks", 300),
    "interfaces": Measurement(
        f"{BENCH} --interface gymnasium batched sb3 torchrl skrl rsl_rl rl_games cleanrl benchmarl --json {{file}}",
        clients=True,
    ),
    "interfaces-numpy": Measurement(
        f"{BENCH} --device cpu --interface supersuit tianshou rllib pufferlib --json {{file}}",
        on_cpu=True,
        clients=True,
    ),
    "train-examples": Measurement("python tests/gpu/train_examples.py {file}", seconds=540, clients=True),
}


@dataclass(frozen=True)
class Section:
    """Tables of the same columns, one for each card.

    Attributes:
        measurements: Of a table, some of MEASUREMENTS.
        rows: Measurement -> its results, if it has been measured, to the rows.
        plot: Text of the picture beside the file; empty: there is none.
    """

    measurements: tuple[str, ...]
    head: Cells
    rows: Callable[[Mapping[str, Results]], Iterable[Cells]]
    plot: str = ""


def spread(row: Mapping[str, Any], key: str) -> str:
    """A median of three digits with its quartiles; without them where the row has none, a dash where it has no key."""
    if key not in row:
        return MISSING
    return digits(row[key]) + quartiles(row.get(f"{key}_quartiles", ()))


def _rate(row: Mapping[str, Any], key: str) -> str:
    """A rate with its quartiles; without them where the row has none."""
    between = row.get(f"{key}_quartiles")
    return rate({"median": row[key], "quartiles": between} if between else {"single": row[key]})


def _size(row: Mapping[str, Any], other: str = "num_agents") -> str:
    return f"{row['num_envs']:,} x {row[other]:,}"


def _steps(files: Mapping[str, Results], drivers: Sequence[str]) -> Iterator[Cells]:
    """Of each size the times by each driver, and rate and share of the fastest."""
    found = steps_of(files)
    games = list(dict.fromkeys(game for game, *_ in found))
    for key in sorted(found, key=lambda key: (games.index(key[0]), key[2], key[1])):
        rows = found[key]
        first = next(iter(rows.values()))
        partial = ", partial observation" if first["config"].get("full_observation") is False else ""
        times = [spread(rows.get(driver, {}), f"{stage}_us") for driver in drivers for stage in STAGES]
        yield (f"`{first['game']}`{partial}", _size(first), *times, *_rates(rows.values()))


STAGES = ("step", "sample_and_step")


def steps_of(files: Mapping[str, Results]) -> dict[tuple[str, int, int], dict[str, Mapping[str, Any]]]:
    """(game, environments, agents) -> measurement -> its row."""
    found: dict[tuple[str, int, int], dict[str, Mapping[str, Any]]] = {}
    for name, results in files.items():
        for row in results["rows"]:
            found.setdefault((row["game"], row["num_envs"], row["num_agents"]), {})[name] = row
    return found


def _rates(rows: Iterable[Mapping[str, Any]]) -> Cells:
    rows = list(rows)
    fastest = max(row["sample_and_step_env_steps_per_s"] for row in rows)
    share = max(row["step_share_of_copy_bandwidth"] for row in rows)
    return rate({"single": fastest}), f"{share:.0%}"


def _sweep(files: Mapping[str, Results], size: str, every: int) -> Iterator[Cells]:
    (results,) = files.values()
    for row in results["rows"][::every]:
        yield (f"{row[size]:,}", *(spread(row, f"{stage}_us") for stage in STAGES), *_rates([row]))


def _sampler(files: Mapping[str, Results]) -> Iterator[Cells]:
    for row in files["sampler"]["rows"]:
        times = (spread(row, f"{name}_us") for name in ("sampler", "categorical", "multinomial"))
        how = {"eager": "called", "graph": "in a CUDA graph"}[row["how"]]
        yield (f"`{row['game']}`", _size(row), how, *times, digits(row["ratio"]))


def _learner(files: Mapping[str, Results]) -> Iterator[Cells]:
    for row in files["learner"]["rows"]:
        torch, kernels = row["torch"], row["kernels"]
        seldom = "milliseconds_in_intervals" if "milliseconds_in_intervals" in kernels else "milliseconds"
        faster = kernels["milliseconds"] / kernels[seldom]
        rates = [rate({"single": kernels[f"{unit}_steps_per_s"] * faster}) for unit in ("env", "agent")]
        times = spread(torch, "milliseconds"), spread(kernels, "milliseconds"), spread(kernels, seldom)
        peaks = [way.get("peak_bytes") for way in (torch, kernels)]
        memory = [MISSING if peak is None else f"{peak / 2**20:,.0f}" for peak in peaks]
        share = f"{kernels['update_time_fraction']:.0%}"
        yield (row["name"], _size(row, "num_steps"), *times, *rates, share, *memory)


def _two_gpus(files: Mapping[str, Results]) -> Iterator[Cells]:
    rows = files["two-gpus"]["rows"]
    for one, two, stages in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        rates = [rate({"single": row["env_steps_per_s"]}) for row in (one, two)]
        name = f"{one['game']}, {_size(one, 'num_steps')}, 2 x {one['units'][0]}"
        yield (name, *rates, spread(two, "ratio"), spread(stages, "ratio"))


def _solved(files: Mapping[str, Results]) -> Iterator[Cells]:
    for row in files["solved"]["rows"]:
        solved = f"{row['seeds'] - row['unsolved']} of {row['seeds']}"
        yield (f"{row['num_envs']:,}", spread(row, "seconds_to_solve"), digits(row["seconds_of_the_slowest"]), solved)


def _own_algorithm(files: Mapping[str, Results]) -> Iterator[Cells]:
    rows = files["own-algorithm"]["rows"]
    for ways in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        _, trainer, module = ways
        shares = spread(trainer, "example_by_this"), spread(module, "example_by_this")
        yield (f"{trainer['num_envs']:,}", *(spread(way, "ms") for way in ways), *shares)


def _opponents(files: Mapping[str, Results]) -> Iterator[Cells]:
    for row in files["opponents"]["rows"]:
        yield (row["game"], row["opponents"], f"{row['share']:.0%}", spread(row, "ms"), spread(row, "ratio"))


def _convolutions(files: Mapping[str, Results]) -> Iterator[Cells]:
    for row in files["convolutions"]["rows"]:
        times = (spread(row, f"{way}{part}_us") for way in CONVOLUTION_WAYS for part in ("", "_forward"))
        yield (" x ".join(map(str, row["cells"])), f"{row['images']:,}", *times)


def _cpu_baseline(files: Mapping[str, Results]) -> Iterator[Cells]:
    rows = files["cpu-baseline"]["rows"]
    for row in rows:
        ratio = digits(row["env_steps_per_s"] / rows[0]["env_steps_per_s"])
        yield (row["where"], f"{row['num_envs']:,}", _rate(row, "env_steps_per_s"), ratio)


def _cost_of_checks(files: Mapping[str, Results]) -> Iterator[Cells]:
    for row in files["cost-of-checks"]["rows"]:
        medians, between = row["kernel_us"], row["kernel_us_quartiles"]
        times = (digits(medians[way]) + quartiles(between[way]) for way in CHECKS)
        yield (f"`{row['game']}`", f"{row['num_envs']:,}", *times)


def _interfaces(files: Mapping[str, Results]) -> Iterator[Cells]:
    """Of each interface that is measured with thousands of rows."""
    (results,) = files.values()
    found: dict[str, list[str]] = {}
    for row in results["rows"]:
        if row["num_envs"] > FEW:
            lower, upper = (f"{value:,.0f}" for value in row["overhead_us_quartiles"])
            found.setdefault(row["interface"], []).append(f"{row['overhead_us']:,.0f} ({lower} … {upper})")
    for name, cells in found.items():
        yield (f"`{name}`", *cells)


def _train_examples(files: Mapping[str, Results]) -> Iterator[Cells]:
    """Of each example the seeds together."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in files["train-examples"]["rows"]:
        found.setdefault(row["example"], []).append(row)
    for name, rows in found.items():
        of_seeds = {key: [row[key] for row in rows] for key in ("random", "trained", "agent_steps_per_s")}
        summary: dict[str, Any] = {}
        for key, values in of_seeds.items():
            summary |= timing.spread(key, values, 3)
        reached, speed = spread(summary, "trained"), _rate(summary, "agent_steps_per_s")
        lowest = digits(min(of_seeds["trained"]))
        yield (f"`{name}`", f"{len(rows)}", digits(summary["random"]), reached, lowest, speed)


FEW = 64  # environments, of interfaces whose environments are Python objects
CHECKS = ("default", "no look at actions", "end_on_nonfinite", "guards")
CONVOLUTION_WAYS = ("convolutions", "products", "kernels")
RATES = ("env-steps/s with sampling", "of the copy bandwidth")
TIMES = ("µs a step", "µs with sampling")
ROWS_OF_AGENTS = ("through", "1 agent, 4,096 rows", "65,536 rows", "4 agents, 4,096 rows", "65,536 rows")
SECTIONS = {
    "steps": Section(
        ("cuda_core", "pycuda"),
        (
            *("game", "environments x agents", "cuda.core: µs a step", "with sampling"),
            *("PyCUDA: µs a step", "with sampling", *RATES),
        ),
        lambda files: _steps(files, ("cuda_core", "pycuda")),
    ),
    "sampler": Section(
        ("sampler",),
        ("game", "environments x agents", "", "`Sampler`, µs", "`Categorical`, µs", "`multinomial`, µs", "ratio"),
        _sampler,
    ),
    "sweep-environments": Section(
        ("sweep-environments",),
        ("environments", *TIMES, *RATES),
        lambda files: _sweep(files, "num_envs", 2),
        "env-steps per second by environments",
    ),
    "sweep-agents": Section(
        ("sweep-agents",),
        ("agents", *TIMES, *RATES),
        lambda files: _sweep(files, "num_agents", 1),
        "env-steps per second by agents",
    ),
    "training": Section(
        ("learner",),
        (
            *("iteration", "environments x steps", "torch, ms", "kernels, ms", "read every 10 iterations, ms"),
            *("env-steps/s", "agent-steps/s", "update", "torch, peak MiB", "kernels, peak MiB"),
        ),
        _learner,
    ),
    "two-gpus": Section(
        ("two-gpus",),
        ("configuration", "one GPU, env-steps/s", "two", "ratio", "ratio, several graphs"),
        _two_gpus,
    ),
    "solved": Section(("solved",), ("environments", "seconds", "slowest", "solved"), _solved),
    "own-algorithm": Section(
        ("own-algorithm",),
        (
            *("environments", "example, ms", "trainer, ms", "trainer with its networks, ms"),
            *("example by trainer", "by trainer with its networks"),
        ),
        _own_algorithm,
    ),
    "opponents": Section(("opponents",), ("game", "opponents", "share of environments", "ms", "ratio"), _opponents),
    "convolutions": Section(
        ("convolutions",),
        ("cells", "images", *(f"{way}, µs{part}" for way in CONVOLUTION_WAYS for part in ("", ", forward alone"))),
        _convolutions,
    ),
    "one-core": Section(
        ("one-core",), ("game", "environments x agents", *TIMES, *RATES), lambda files: _steps(files, ("one-core",))
    ),
    "cost-of-checks": Section(
        ("cost-of-checks",),
        ("game", "environments", "default", "without action validation", "end_on_nonfinite", "guard bands"),
        _cost_of_checks,
    ),
    "interfaces": Section(("interfaces",), ROWS_OF_AGENTS, _interfaces),
    "interfaces-numpy": Section(("interfaces-numpy",), ROWS_OF_AGENTS, _interfaces),
    "train-examples": Section(
        ("train-examples",),
        ("example", "seeds", "random play", "trained", "lowest", "agent-steps/s"),
        _train_examples,
    ),
    "cpu-baseline": Section(("cpu-baseline",), ("", "environments", "env-steps/s", "ratio"), _cpu_baseline),
}


def read(section: Section, folder: Path = FOLDER) -> dict[str, dict[str, Results]]:
    """Card -> measurement -> its results.

    Raises:
        BenchmarkError: Files of a card are of several commits or versions.
    """
    cards: dict[str, dict[str, Results]] = {}
    for name in section.measurements:
        for path in sorted(folder.glob(f"*-{name}.json")):
            if "-" not in (card := path.name.removesuffix(f"-{name}.json")):
                cards.setdefault(card, {})[name] = json.loads(path.read_text(encoding="utf-8"))
    for card, files in cards.items():
        for key in SAME:
            if len(values := {str(results.get(key)) for results in files.values()}) > 1:
                raise BenchmarkError(
                    f"{key} of {card}-{', '.join(files)} is {' and '.join(sorted(values))}; expected the same, as they "
                    "are one table: measure all of them again"
                )
    return dict(sorted(cards.items()))


def lines(name: str, folder: Path = FOLDER) -> Iterator[str]:
    """A section's tables, each with its caption and its commands below it."""
    section = SECTIONS[name]
    for number, (card, files) in enumerate(read(section, folder).items()):
        yield from [""] * (number > 0)
        if section.plot:
            yield from (f"![{section.plot}]({folder.name}/{card}-{name}.svg)", "")
        yield from (_line(section.head), f"|{'---|' * len(section.head)}", *map(_line, section.rows(files)))
        below = [_caption(card, files), *(f"`{command_of(measurement)}`" for measurement in files)]
        yield from ("", *(f"{line}\\" for line in below[:-1]), below[-1])  # a line each on the page too


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _caption(card: str, files: Mapping[str, Results]) -> str:
    first = next(iter(files.values()))
    facts = [first["device"], *([first["cpu"]] if "cpu" in first else []), f"commit {first['commit']}"]
    facts += [f"{name} {first[name.lower()]}" for name in ("torch", "Python") if name.lower() in first]
    facts += [results["driver"] for results in files.values() if "driver" in results]
    facts += [f"NCCL {first['nccl']}"] if "nccl" in first else []
    facts += [f"copies of {first['copy_bytes_per_s'] / 1e9:,.0f} GB/s"] if "copy_bytes_per_s" in first else []
    return f"*{', '.join(facts)}: {', '.join(f'`docs/performance/{card}-{name}.json`' for name in files)}.*"


def command_of(measurement: str) -> str:
    """As the page has it."""
    return filled(MEASUREMENTS[measurement].command, f"{measurement}.json", f"{measurement}.svg")


def filled(command: str, file: Path | str, plot: Path | str) -> str:
    """A command of MEASUREMENTS with its files."""
    return command.replace("{file}", str(file)).replace("{plot}", str(plot))


MARKED = re.compile(
    r"^(<!-- python -m benchmarks\.performance (\S+) -->)\n.*?^(<!-- end of \2 -->)$", re.MULTILINE | re.DOTALL
)


def written(pages: Mapping[Path, str], folder: Path = FOLDER) -> dict[Path, str]:
    """The pages with all tables between their markers.

    Raises:
        BenchmarkError: They have other sections than SECTIONS.
    """
    marked = [found[2] for page in pages.values() for found in MARKED.finditer(page)]
    if sorted(marked) != sorted(SECTIONS):
        raise BenchmarkError(f"the pages have tables {', '.join(marked)}; expected {', '.join(SECTIONS)}, each once")

    def section(found: re.Match[str]) -> str:
        return "\n".join((found[1], *lines(found[2], folder), found[3]))

    return {path: MARKED.sub(section, page) for path, page in pages.items()}


def main() -> None:
    """Write the pages."""
    try:
        for path, page in written({path: path.read_text(encoding="utf-8") for path in PAGES}).items():
            path.write_text(page, encoding="utf-8")
    except BenchmarkError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
