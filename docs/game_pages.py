"""A page for each game: its declaration, and its rules from `docs/games.md`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box

from gpu_vecenv.declare.env import Env
from gpu_vecenv.envs.registry import GAMES, gymnasium_id, versions
from gpu_vecenv.train.game_policy import GamePolicy, load_policy
from gpu_vecenv.train.opponents_config import OpponentsConfig
from gpu_vecenv.web.page import game_page

SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# The paragraph above a table of an observation, which may name values for which the table holds, and the table.
OBSERVATION = re.compile(r"^\*\*Observation\*\*([^\n]*(?:\n(?!\n|\|)[^\n]*)*)\n\n((?:\|[^\n]*\n)+)", re.MULTILINE)
PARAMETERS = re.compile(r"^\| parameter \|[^\n]*\n(?:\|[^\n]*\n)+\n?", re.MULTILINE)
RELATIVE = re.compile(r"\]\((?=[\w./-]+\.md[#)])")  # links to other pages
POLICIES = Path(__file__).parent / "results" / "policies"


def sections(rules: str) -> dict[str, str]:
    """Heading -> text of each section of ``games.md``."""
    return {heading: body.strip("\n") + "\n" for heading, body in SECTION.findall(rules)}


def comments(kind: type) -> dict[str, str]:
    """Name -> the comment beside its line, or above it: of a dataclass's fields, bases first, and of state fields."""
    found = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        beside = {token.end[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                if node.end_lineno not in beside and node.lineno - 1 in beside:
                    found[name] = beside[node.lineno - 1]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field":
                name = str(ast.literal_eval(node.args[0]))
            else:
                continue
            if node.end_lineno in beside:
                found[name] = beside[node.end_lineno]
    return found


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in [head, *rows]]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def values(field: dataclasses.Field[Any], hint: Any) -> str:
    """What may be given for a parameter."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    low, high = field.metadata.get("low"), field.metadata.get("high")
    if low is not None and high is not None:
        bounds = f" in [{low:,g}, {high:,g}]"
    elif low is not None or high is not None:
        bounds = f" ≥ {low:,g}" if low is not None else f" ≤ {high:,g}"
    else:
        bounds = ""
    words = []
    for kind in typing.get_args(hint) if union else [hint]:
        if typing.get_origin(kind) is Literal:
            words += [f'"{choice}"' for choice in typing.get_args(kind)]
        elif kind in (int, float):
            words.append(kind.__name__ + bounds)
        else:
            words.append("None" if kind is type(None) else kind.__name__)
    return ", ".join(words)


def default(value: Any) -> str:
    """A parameter's default; of numbers with many digits the first six."""
    return f"≈ {value:.6g}" if isinstance(value, float) and len(str(value)) > 8 else f"{value}"


def meaning(text: str) -> str:
    """A comment as a sentence's part in Markdown; names with an underscore are code."""
    return re.sub(r"(?<![\w`])[a-z]+(?:_[a-z0-9]+)+", r"`\g<0>`", re.sub(r"([*^\[\]<>])", r"\\\1", text))


def parameters(kind: type[Env]) -> str:
    """The table of a game's configuration."""
    hints, beside = typing.get_type_hints(kind), comments(kind)
    return table(
        ["parameter", "default", "values", "meaning"],
        [
            [f"`{f.name}`", default(f.default), values(f, hints[f.name]), meaning(beside[f.name])]
            for f in kind.own_fields()
        ],
    )


def states(game: Env) -> str:
    """The table of an environment's fields, `env.state[…]`."""
    beside = comments(type(game))
    rows = []
    for field in game.state:
        shape = "(" + ", ".join(f"{size}" for size in field.shape) + ("," if len(field.shape) == 1 else "") + ")"
        text = meaning(beside.get(field.name, ""))
        if field.shared:
            text += "; shared by all environments" if text else "shared by all environments"
        if field.when:
            text += f"; where `{field.when}` is True"
        rows.append([f"`{field.name}`", field.dtype, shape, text])
    return table(["field", "dtype", "shape in one environment", "meaning"], rows)


@dataclasses.dataclass(frozen=True)
class ObservationTable:
    """One table of observations of ``games.md``, for one configuration: numbers by role, and what they are.

    Of an image it counts channels, the numbers of each pixel.
    """

    game: Env
    cells: dict[str, list[str]]  # a role, or "" for every role -> sums of the game's attributes
    what: list[str]

    @property
    def counts(self) -> dict[str, list[int]]:
        """Role, or "" -> how many numbers each row stands for."""
        return {role: [count(self.game, cell) for cell in cells] for role, cells in self.cells.items()}

    def lengths(self) -> dict[str, int]:
        """Role -> numbers in its observation, or in each pixel."""
        return {role: sum(self.counts.get(role) or self.counts[""]) for role in self.game.roles}

    def markdown(self) -> str:
        """The table with the place of each number in place of the counts, and the least and largest value."""
        spaces, bounded = self.game.layout.observation.spaces, []
        columns, image = [], len(self.game.layout.observation.shape) > 1
        for role, counts in self.counts.items():
            ends = np.cumsum(counts)
            columns.append(list(map(places, counts, ends, self.cells[role])))
            space = spaces[role or next(iter(spaces))]
            bounded.append([interval(space, end - n, end) for n, end in zip(counts, ends, strict=True)])
        place = "channel" if image else "place"
        head = [f"{place}, {role}" if role else place for role in self.counts] + ["what"]
        rows = [*columns, self.what]
        if any(cell for column in bounded for cell in column):  # games without bounds say so once
            head.append("range")
            rows.append(bounded[0])
        return table(head, zip(*rows, strict=True))


def observation_tables(kind: type[Env], section: str) -> Iterator[tuple[re.Match[str], ObservationTable]]:
    """The tables of a game's section: the first for the default values, others for those that they name."""
    for found in OBSERVATION.finditer(section):
        given = ", ".join(re.findall(r"`(\w+=[^`]+)`", found[1]))
        config = {k.arg: ast.literal_eval(k.value) for k in ast.parse(f"f({given})", mode="eval").body.keywords}
        game = kind(**config)
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[2].splitlines())
        columns = {"" if name in ("numbers", "channels") else name: k for k, name in enumerate(head) if k}
        cells = {role: [row[place] for row in rows] for role, place in columns.items()}
        yield found, ObservationTable(game, cells, [row[0] for row in rows])


def count(game: Env, cell: str) -> int:
    """``2 * num_observed - 2``: a sum of products of numbers and of the game's attributes."""
    total = 0
    for term in re.findall(r"[+-]?[^+-]+", cell.strip("` ")):
        factors = [factor.strip() for factor in term.lstrip("+-").split("*")]
        numbers = [int(factor) if factor.isdigit() else getattr(game, factor) for factor in factors]
        total += int(np.prod(numbers)) * (-1 if term.startswith("-") else 1)
    return total


def places(number: int, end: int, cell: str) -> str:
    """Where so many numbers before this end lie in an observation, and what makes them so many."""
    if number == 0:
        return "none"
    where = f"{end - 1}" if number == 1 else f"{end - number} … {end - 1}"
    return where if cell.isdigit() else f"{where} ({cell})"


def interval(space: Box, start: int, end: int) -> str:
    """The range that these numbers share, or nothing."""
    low, high = (set(bound[..., start:end].flatten().tolist()) for bound in (space.low, space.high))
    if len(low) != 1 or len(high) != 1 or not np.isfinite([*low, *high]).all():
        return ""
    return f"[{low.pop():.6g}, {high.pop():.6g}]"


def facts(name: str, game: Env) -> str:
    """Names, agents and spaces, in a table without a head."""
    kind = type(game)
    agents = ", ".join(
        f"`{role}_0`" if n == 1 else f"`{role}_0` … `{role}_{n - 1}`" for role, n in game.roles.items() if n
    )
    spaces = {"Observations": game.layout.observation.spaces, "Actions": game.layout.action.spaces}
    played = versions(kind)
    plays = {v: "".join(f" with `{key}={value}`" for key, value in config.items()) for v, config in played.items()}
    rows = [
        ["Gymnasium", ", ".join(f"`{gymnasium_id(kind, version=v)}`{plays[v]}" for v in played)],
        ["PettingZoo", ", ".join(f"`gpu_vecenv/{name}-v{v}`{plays[v]}" for v in played)],
        ["Agents", f"{game.num_agents}: {agents}"],
    ]
    for what, by_role in spaces.items():
        if len({str(space) for space in by_role.values()}) == 1:
            rows.append([what, described(next(iter(by_role.values())))])
        else:
            rows += [[f"{what}, {role}", described(space)] for role, space in by_role.items()]
    by_role = {role: parts.describe() for role, parts in game.layout.observation.parts.items()}
    if len({*by_role.values()}) == 1:
        rows.append(["Parts of observations", next(iter(by_role.values()))])
    else:
        rows += [[f"Parts of observations, {role}", text] for role, text in by_role.items()]
    ends = f"terminated: {kind.termination_label}; " if kind.termination_label != Env.termination_label else ""
    rows.append(["An episode ends", f"{ends}truncated: after `max_steps` = {vars(game)['max_steps']} steps"])
    return table(["", ""], rows)


def described(space: Any) -> str:
    """A space in one line; of a Box with different bounds only the shape: the table below has the bounds."""
    if isinstance(space, Box) and len(np.unique(space.low)) + len(np.unique(space.high)) > 2:
        return f"`Box` of shape {space.shape}, {space.dtype}"
    return f"`{space}`"


def trained(name: str) -> GamePolicy | None:
    """The policies of ``docs/results/policies``, if they have this game."""
    path = POLICIES / f"{name}.safetensors"
    return load_policy(path, device="cpu") if path.exists() else None


def actors(name: str) -> str:
    """Who plays in the page of a game."""
    policy = trained(name)
    if policy is None:
        return "All play at random, but whom you steer."
    steps = max(config.total_steps for config in policy.configs.values())
    return (
        f"All but whom you steer play by policies that `gpu-vecenv train {name} --total-steps {steps}` gave, on a CPU."
    )


def common(name: str, rules: str) -> str:
    """The heading of what a game shares with others, a section that names it, or nothing."""
    shared = (heading for heading, text in sections(rules).items() if heading not in GAMES and f"`{name}`" in text)
    return next(shared, "")


def page(name: str, rules: str) -> str:
    """The Markdown of a game's page.

    Args:
        name: The game's registered name.
        rules: The text of ``games.md``.
    """
    kind = GAMES[name]
    game = kind()
    section = sections(rules)[name]
    text = RELATIVE.sub("](../", PARAMETERS.sub("", section))
    for found, observation in reversed([*observation_tables(kind, text)]):
        above = found[0].removesuffix(found[2])
        text = text[: found.start()] + above + observation.markdown() + text[found.end() :]
    summary, _, rest = text.partition("\n\n")
    shared = common(name, rules)
    also = f" and in [{shared.lower()}](../games.md#{anchor(shared)})" if shared else ""
    preset = preset_table(kind.preset)
    if kind.preset_opponents:
        preset += "\n" + opponents_sentence(kind.preset_opponents)
    if kind.preset_schedules:
        preset += "\n" + schedules_sentence(kind.preset_schedules)
    efficient = ""
    if kind.sample_efficient_preset:
        efficient = f"""
With `--preset sample-efficient`, which needs fewer env-steps and more time for each:

{preset_table(kind.sample_efficient_preset)}"""
    reached = "What they reach, and how long it takes: [results](../results.md)."
    if (Path(__file__).parent / "results" / f"{name}.png").exists():
        reached += f"\n\n![{name} while it is trained](../results/{name}.png)"
    return f"""# {name}

{summary}

<iframe class="game" src="../play/{name}.html#play" title="{name}, live" loading="lazy"></iframe>

The game itself, in your browser: the same source as WebAssembly. {actors(name)} <a href="../play/{name}.html">The page
alone</a> has more: many environments at once, replays, parameters; see [games in a browser](../web.md).

{facts(name, game)}
## Try it

```python
import gpu_vecenv

env = gpu_vecenv.make("{name}", num_envs=64)  # on a GPU if there is one
obs, info = env.reset(seed=7)  # a torch tensor {(64, *vectorised(game))}
for _ in range(100):
    obs, rewards, terminations, truncations, info = env.step(env.sample_actions())
print(env.episode_statistics()["episodes"].sum())  # that have ended
```

```sh
gpu-vecenv train {name}
```

## Rules

What holds in all games stands in [the games](../games.md){also}.

{rest}
## Parameters

Keywords of `gpu_vecenv.make`, of Gymnasium's `make_vec` and of `parallel_env`; options of the command line, as
`--{kind.own_fields()[0].name.replace("_", "-")}`.

{parameters(kind)}
## State

`env.state["…"]`, live tensors of shape (num_envs, …), which may be written to; see [semantics](../semantics.md).

{states(game)}
## Training

The defaults of `gpu-vecenv train {name}`, where they are not those of [PPOConfig](../hyper_parameters.md#ppo-and-a2c):

{preset}{efficient}
{reached}
"""


def preset_table(preset: Mapping[str, Any]) -> str:
    """Hyper-parameters and their values."""
    rows = [[f"`{key}`", f"{value:,}" if type(value) is int else value] for key, value in preset.items()]
    return table(["hyper-parameter", "value"], rows)


def opponents_sentence(opponents: Mapping[str, Any]) -> str:
    """What the preset has of opponents."""
    config = OpponentsConfig(**opponents)
    return (
        f"In {config.share:.0%} of the environments one side learns against "
        "[opponents](../opponents.md#opponents-in-training): "
        f"{', '.join(config.names)}; `--opponents` without a value trains without them, as do several processes, "
        "`--population` and `--frozen`.\n"
    )


def schedules_sentence(schedules: Mapping[str, Mapping[str, Any]]) -> str:
    """What the preset changes in the course of a training."""
    changes = [
        f"`{name}` is " + ", then ".join(f"{value:g} at {progress:.0%} of the run" for progress, value in points)
        for targets in schedules.values()
        for name, points in targets.items()
    ]
    return f"In every preset {'; '.join(changes)}, linear in between; `--schedules '{{}}'` trains without that.\n"


def vectorised(game: Env) -> tuple[int, ...]:
    """Shape of the observations of one environment."""
    return (game.num_agents, *game.layout.observation.shape)


def anchor(heading: str) -> str:
    """The name by which GitHub and MyST link to a heading."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def overview(rules: str) -> str:
    """``games.md`` as a page of the site: instead of each game's rules its film, and the way to its page."""

    def short(found: re.Match[str]) -> str:
        heading, body = found.groups()
        if heading not in GAMES:
            return found[0]
        summary = body.strip().partition("\n\n")[0]
        return f"""## {heading}

:::{{image}} films/{heading}.gif
:alt: one environment of {heading}
:class: thumbnail
:target: games/{heading}.html
:::

{summary}

[Rules, spaces, parameters, training](games/{heading}.md)

"""

    pages = "\n".join(f"games/{name}" for name in GAMES)
    return SECTION.sub(short, rules) + f"\n:::{{toctree}}\n:hidden:\n\n{pages}\n:::\n"


def links_to_play() -> str:
    """A link to the page of each game."""
    return ", ".join(f'<a href="play/{name}.html">{name}</a>' for name in GAMES)


def write(docs: Path, folder: Path) -> None:
    """Write all pages; files that are right already stay as they are."""
    folder.mkdir(exist_ok=True)
    rules = (docs / "games.md").read_text(encoding="utf-8")
    for name in GAMES:
        path, text = folder / f"{name}.md", page(name, rules)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def write_playable(folder: Path) -> None:
    """Write a page for each game that plays it in a browser, by trained policies where there are some."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in GAMES.items():
        (folder / f"{name}.html").write_bytes(game_page(kind(), trained(name))["index.html"])
