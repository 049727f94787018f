"""Films for the tests of the player: made by hand, or stepped in a real game."""

from collections.abc import Sequence

import numpy as np

import gpu_vecenv
from gpu_vecenv.declare.drawing import BLUE, GREY, RED, WHITE, Circle, Drawing, Line, blend
from gpu_vecenv.views.frames import state_on_host
from gpu_vecenv.watch.player import Film


def film(drawings: Sequence[Drawing], roles=None, agents=None, **changes) -> Film:
    """A film of these drawings with zero rewards and flags, except for the changes."""
    roles, num_steps = roles or {"agent": 1}, len(drawings) - 1
    agents = agents or [f"{role}_{i}" for role, count in roles.items() for i in range(count)]
    given = {
        "title": "by hand",
        "drawings": drawings,
        "agents": agents,
        "roles": roles,
        "rewards": np.zeros((num_steps, len(agents)), np.float32),
        "active": np.ones((num_steps + 1, len(agents)), bool),
        "terminations": np.zeros((num_steps, len(agents)), bool),
        "truncations": np.zeros((num_steps, len(agents)), bool),
        "facts": {"seed": "7"},
        "fps": 20,
    }
    return Film(**{**given, **changes})


def chase(num_steps: int, taggers: int, runners: int, seed: int = 0, **changes) -> Film:
    """Agents on random walks in a square of side 20, drawn like tag: body, heading, a tagger's reach.

    Half of the runners leave, one after the other, and are pale from then on. All agents get rewards in every step.
    """
    random, count = np.random.default_rng(seed), taggers + runners
    heading = np.cumsum(random.uniform(-1, 1, (num_steps + 1, count)), 0)
    steps = random.uniform(0, 0.5, (num_steps + 1, count, 1)) * np.stack([np.cos(heading), np.sin(heading)], 2)
    places = 20 * random.random((1, count, 2)) + np.cumsum(steps, 0)
    places = 20 - abs(places % 40 - 20)  # back from the edges
    active = np.ones((num_steps + 1, count), bool)
    for gone in range(runners // 2):
        active[1 + gone * (num_steps - 1) // max(1, runners // 2) :, taggers + gone] = False
    drawings = []
    for now, ahead, there in zip(places, heading, active, strict=True):
        shapes = [Line([(0, 0), (20, 0), (20, 20), (0, 20), (0, 0)], 0.07, GREY)]
        shapes += [Circle(*now[i], 0.4, blend(RED, WHITE, 0.85)) for i in range(taggers)]
        shapes += [Circle(*now[i], 0.22, blend(BLUE, WHITE, 0.75), i) for i in np.flatnonzero(~there)]
        for i in np.flatnonzero(there)[::-1]:
            end = now[i] + 0.4 * np.array([np.cos(ahead[i]), np.sin(ahead[i])])
            shapes += [Line([now[i], end], 0.1, GREY), Circle(*now[i], 0.22, RED if i < taggers else BLUE, i)]
        drawings.append(Drawing((-0.5, 20.5, -0.5, 20.5), shapes))
    truncations = np.zeros((num_steps, count), bool)
    truncations[-1], active[-1] = active[-1], False
    given = {
        "rewards": random.standard_normal((num_steps, count)).astype(np.float32),
        "active": active,
        "terminations": active[:-1] & ~active[1:] & ~truncations,
        "truncations": truncations,
    }
    return film(drawings, {"tagger": taggers, "runner": runners}, **{**given, **changes})


def played(game: str, device: str, num_steps: int, title: str = "", seed: int = 1, **configuration) -> Film:
    """An episode of a game with random actions, or its first ``num_steps`` steps."""
    env = gpu_vecenv.make(game, 1, device, autoreset_mode="disabled", **configuration)
    env.reset(seed=seed)
    seen = [(env.game.draw(state_on_host(env, 0)), env.active[0].cpu().numpy().copy())]
    outputs = []
    while len(outputs) < num_steps and seen[-1][1].any():
        step = env.step(env.sample_actions())
        outputs.append([tensor[0].cpu().numpy().copy() for tensor in step[1:4]])
        seen.append((env.game.draw(state_on_host(env, 0)), env.active[0].cpu().numpy().copy()))
    drawings, active = zip(*seen, strict=True)
    rewards, terminations, truncations = map(np.array, zip(*outputs, strict=True))
    return Film(
        title=title or game,
        drawings=drawings,
        agents=env.game.layout.agent_names,
        roles=env.game.layout.roles,
        rewards=rewards,
        active=np.array(active),
        terminations=terminations,
        truncations=truncations,
        facts={"game": game, "seed": str(seed)},
        fps=env.game.render_fps,
    )
