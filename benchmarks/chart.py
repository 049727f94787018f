"""The chart of README.md and docs/benchmarks.md, from the results that are committed: ``python -m benchmarks.chart``.

It writes ``docs/_static/speed-light.svg`` and ``speed-dark.svg``: the throughput of gpu_vecenv divided by that of each
other library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.table import rate, ratio, read

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "_static"
# (title, kind, device, rows: (peer, game, environments)) in the order of the chart.
PARTS = (
    (
        "Simulation on one NVIDIA H200",
        "simulation",
        "NVIDIA H200",
        (
            ("WarpDrive", "tag_continuous", 2_000),
            ("WarpDrive", "tag_gridworld", 100_000),
            ("JaxMARL", "simple_spread", 100_000),
            ("gymnax", "cartpole", 100_000),
            ("gymnax", "cartpole", 1_000_000),
        ),
    ),
    (
        "Simulation on one NVIDIA H100",
        "simulation",
        "NVIDIA H100",
        (("JaxMARL", "skirmish", 100_000), ("JaxMARL", "overcooked", 100_000), ("pgx", "connect_four", 100_000)),
    ),
    (
        "Training by PPO on one NVIDIA H200",
        "training",
        "NVIDIA H200",
        (
            ("PureJaxRL", "cartpole", 16_384),
            ("JaxMARL IPPO", "simple_spread", 4_096),
            ("JaxMARL IPPO with a GRU", "simple_spread", 1_024),
        ),
    ),
    (
        "Simulation on one core of a CPU",
        "simulation",
        "cpu",
        (("EnvPool", "cartpole", 1_000), ("VMAS", "simple_spread", 1_000)),
    ),
)
THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"ink": "#1f2328", "dim": "#59636e", "line": "#d1d9e0", "bar": "#0072b2"},
    "dark": {"ink": "#f0f6fc", "dim": "#9198a1", "line": "#3d444d", "bar": "#56b4e9"},
}
WIDTH, LEFT, RIGHT, ROW, HEAD = 860, 400, 180, 24, 32  # pixels
RATES = ("ours_env_steps_per_s", "theirs_env_steps_per_s")
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


def found(kind: str, device: str, peer: str, game: str, num_envs: int) -> list[Mapping[str, Any]]:
    """The newest rows of the committed results; a game has one for each of its layouts or scenarios."""
    rows = [
        (results["date"], row)
        for results in read()
        for row in results["rows"]
        if (row["kind"], row["peer"], row["game"], row["num_envs"]) == (kind, peer, game, num_envs)
        and (results["device"].startswith(device) or row.get("ours_device") == device)
    ]
    newest = max(date for date, _ in rows)
    return [row for date, row in rows if date == newest]


def chart(theme: str) -> str:
    """The chart as SVG."""
    colours = THEMES[theme]
    parts = [
        (title, [each for row in rows for each in found(kind, device, *row)]) for title, kind, device, rows in PARTS
    ]
    most = max(float(ratio(row).split()[0]) for _, rows in parts for row in rows)
    height = sum(HEAD + ROW * len(rows) for _, rows in parts) + 34
    lines = list(drawn(parts, colours, (WIDTH - LEFT - RIGHT) / most))
    title = "Throughput of gpu_vecenv divided by that of other libraries"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label="{title}" font-family="{FONT}" font-size="13">',
            f"<title>{title}</title>",
            *lines,
            "</svg>\n",
        ]
    )


def drawn(parts: list[tuple[str, list[Mapping[str, Any]]]], colours: Mapping[str, str], unit: float) -> Iterator[str]:
    """Headings, bars and their texts, from top to bottom."""
    y = 0
    for title, rows in parts:
        y += HEAD
        yield f'<text x="0" y="{y - 8}" font-weight="600" fill="{colours["ink"]}">{escape(title)}</text>'
        for row in rows:
            middle, quartiles = ratio(row).split(" ")[0], row.get("ratio", {}).get("quartiles")
            end = LEFT + float(middle) * unit
            texts = [value for value in row.get("config", {}).values() if isinstance(value, str)]
            label = f"{row['peer']}: {' '.join([row['game'], *texts])}, {row['num_envs']:,} x {row['num_agents']}"
            rates = " / ".join(rate(row[key]).split(" (")[0] for key in RATES)
            yield f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end" fill="{colours["ink"]}">{escape(label)}</text>'
            bar = f'x="{LEFT}" y="{y + 4}" width="{end - LEFT:.1f}" height="{ROW - 8}" rx="2"'
            yield f'<rect {bar} fill="{colours["bar"]}"/>'
            if quartiles:
                low, high = (LEFT + value * unit for value in quartiles)
                yield f'<path d="M{low:.1f} {y + 12}H{high:.1f}" stroke="{colours["ink"]}" stroke-width="2"/>'
                end = max(end, high)
            yield (
                f'<text x="{end + 8:.1f}" y="{y + 16}" fill="{colours["ink"]}">'
                f'<tspan font-weight="600">{middle} x</tspan>'
                f'<tspan dx="8" fill="{colours["dim"]}" font-size="12">{rates}</tspan></text>'
            )
            y += ROW
    one = LEFT + unit
    yield f'<path d="M{one:.1f} 8V{y + 4}" stroke="{colours["line"]}" stroke-width="1.5" stroke-dasharray="3 3"/>'
    note = "1 x: as fast as the other library. Environments x agents; env-steps/s, ours / theirs; lines: quartiles."
    yield f'<text x="0" y="{y + 24}" fill="{colours["dim"]}" font-size="12">{note}</text>'


def write(folder: Path = FOLDER) -> None:
    """Write the chart for both themes."""
    for theme in THEMES:
        (folder / f"speed-{theme}.svg").write_text(chart(theme), encoding="utf-8")


if __name__ == "__main__":
    write()
