"""WarpDrive's workflow by hand: declare, push once, compile, reset, sample, step, autoreset, pull for a plot."""

from pathlib import Path

import numpy as np
import torch
import tyro

from gpu_vecenv import Sampler, VecEnv
from gpu_vecenv.declare.env import i32, i64
from gpu_vecenv.declare.kernels import Array, KernelSignature, Scalar
from gpu_vecenv.envs.tag_gridworld import TagGridworld

# A kernel of one's own. Each item is one cell of the map, so that no two write the same number.
COUNT_VISITS = """
#include "kernel.cuh"

KERNEL(count_visits) {
    FOR_ITEMS (k, (i64)args.side * args.side) {
        for (i64 e = 0; e < args.num_envs; ++e) {
            const i32* at = args.cell + (e * args.num_agents + args.agent) * 2;
            args.visits[k] += at[1] * args.side + at[0] == k;
        }
    }
}
"""
COUNT_VISITS_KERNEL = KernelSignature(  # the fields of args
    "count_visits",
    (
        Array("cell", i32, const=True, shape=("num_envs", "num_agents", 2)),
        Array("visits", i64, shape=("side", "side")),
        Scalar("side", i32),
        Scalar("agent", i32),
        Scalar("num_agents", i32),
        Scalar("num_envs", i64),
    ),
)


def chase(cell: torch.Tensor) -> torch.Tensor:
    """Logits (num_envs, num_agents, 5) that lead towards the last agent, the runner; its own are all equal."""
    dx, dy = (cell[:, -1:] - cell).float().unbind(-1)
    return torch.stack([torch.zeros_like(dx), dx, -dx, dy, -dy], -1)


def plot(visits: np.ndarray, path: Path) -> str:
    """Draw the map where matplotlib is installed; returns what became of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed"
    axes = (figure := Figure(layout="constrained")).subplots()
    figure.colorbar(axes.imshow(visits, origin="lower"), label="steps, all environments")
    axes.set(title="where the runner was", xlabel="column", ylabel="row")
    figure.savefig(path)
    return f"plot: {path.resolve()}"


def main(num_envs: int = 500, steps: int = 200, device: str | None = None, out: Path = Path("visits.png")) -> None:
    """Chase a runner over a grid and count where it was.

    Args:
        num_envs: Number of environments.
        steps: Ticks.
        device: cpu, cuda or cuda:1; by default cuda if usable, else cpu.
        out: Where the plot goes.
    """
    game = TagGridworld(grid=20, random_start=True)  # declare
    env = VecEnv(game, num_envs, device)  # env.data is its DataManager, env.functions its FunctionManager
    side = game.grid + 1

    env.data.push("visits", np.zeros((side, side), np.int64))  # push once; from now on it lives on the device
    program = env.functions.compile(COUNT_VISITS, kernels=[COUNT_VISITS_KERNEL])
    sizes = {"side": side, "agent": game.num_taggers, "num_agents": env.num_agents, "num_envs": num_envs}
    sampler = Sampler(env)

    env.reset(seed=7)
    for _ in range(steps):
        actions = sampler.sample(chase(env.state["cell"])).actions
        env.step(actions)  # environments whose episode ends begin the next one at once
        program.launch("count_visits", side * side, cell=env.state["cell"], visits=env.data["visits"], **sizes)
    chosen = env.elapsed_steps > 10
    env.reset(mask=chosen)  # and by hand those that one chooses

    ended = {name: tensor.sum().item() for name, tensor in env.episode_statistics().items()}
    share, length = ended["terminations"] / max(ended["episodes"], 1), ended["lengths"] / max(ended["episodes"], 1)
    print(f"{num_envs} envs x {steps} steps on {env.device}: {ended['episodes']} episodes of {length:.1f} steps")
    print(f"runner caught in {share:.1%} of them; reset by hand: {chosen.count_nonzero().item()} environments")
    visits = env.data.pull("visits")  # to the host, as NumPy
    print(f"runner positions counted: {visits.sum()}")
    print(plot(visits, out))


if __name__ == "__main__":
    tyro.cli(main)
