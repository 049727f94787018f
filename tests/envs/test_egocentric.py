"""tag_continuous with egocentric=True: what agents see of themselves and of others, by hand and by symmetry."""

import math

import pytest
import torch

import gpu_vecenv

SIDE, TOP = 10.0, 0.5
CONFIG = {"num_taggers": 1, "num_runners": 2, "num_neighbors": 2, "side": SIDE, "max_speed": TOP, "egocentric": True}


def observed(device, position, heading, speed, acceleration=(0.0, 0.0, 0.0), in_game=(True, True, True), **config):
    """Observations (agents, 7 features, 2 others) and (agents, 7 own numbers) of one environment in this state."""
    env = gpu_vecenv.make("tag_continuous", 1, device, **{**CONFIG, **config})
    env.reset(seed=1)
    state = {"position": position, "heading": heading, "speed": speed, "acceleration": acceleration}
    for name, values in state.items():
        env.state[name][0] = torch.as_tensor(values, dtype=torch.float32)
    env.state["in_game"][0] = torch.tensor(in_game)
    obs = env.observe()[0].double().cpu()
    return obs[:, :-7].unflatten(-1, (7, -1)), obs[:, -7:]


def test_what_a_tagger_sees_that_heads_up(device):
    """It heads along y. One runner is 2 to the right and comes nearer, one 3 behind and moves away from it."""
    position = [[5.0, 4.0], [7.0, 4.0], [5.0, 1.0]]
    others, own = observed(device, position, [math.pi / 2, math.pi, 3 * math.pi / 2], [0.25, 0.5, 0.125], [0.05, 0, 0])
    ahead, left, velocity_ahead, velocity_left, tagger, present, in_game = others[0]
    length = math.sqrt(2) * SIDE
    near = {"rtol": 0, "atol": 1e-6}  # float32's rounding of numbers below 1, a few operations each
    close = torch.testing.assert_close
    close(ahead, torch.tensor([0.0, -3.0 / length], dtype=torch.float64), **near)
    close(left, torch.tensor([-2.0 / length, 0.0], dtype=torch.float64), **near)
    close(velocity_ahead, torch.tensor([-0.25 / TOP, -0.375 / TOP], dtype=torch.float64), **near)
    close(velocity_left, torch.tensor([0.5 / TOP, 0.0], dtype=torch.float64), **near)
    assert (tagger.tolist(), present.tolist(), in_game.tolist()) == ([0, 0], [1, 1], [1, 1])
    close(own[0], torch.tensor([0.0, 1.0, 0.25 / TOP, 0.05 / TOP, 0.5, 0.4, 0.0], dtype=torch.float64), **near)


def test_others_look_the_same_from_anywhere(device):
    """Moved and turned together, the three see as much of each other; only what each sees of itself differs."""
    angle, where = 2.1, torch.tensor([5.0, 5.0])
    around = torch.tensor([[0.0, 0.0], [1.0, 0.5], [-2.0, 0.7]])
    turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    heading, speed = torch.tensor([0.3, 1.0, 2.0]), torch.tensor([0.1, 0.5, 0.3])
    others, own = observed(device, around + where, heading, speed)
    turned, turned_own = observed(device, around @ turn + where + 1, heading + angle, speed)
    torch.testing.assert_close(turned, others, rtol=0, atol=1e-5)  # float32's rounding of the moved places
    torch.testing.assert_close(turned_own[:, 2:4], own[:, 2:4], rtol=0, atol=0)
    assert (turned_own - own)[:, [0, 1, 4, 5]].abs().min() > 0.05


@pytest.mark.parametrize("num_neighbors", [2, "all"])
def test_who_is_out_of_the_game_sees_nothing_and_is_seen_only_in_full_lists(num_neighbors, device):
    position, out = [[5.0, 4.0], [7.0, 4.0], [5.0, 1.0]], (True, False, True)
    others, own = observed(device, position, [0.0, 0, 0], [0.1, 0, 0.1], in_game=out, num_neighbors=num_neighbors)
    assert others[1].abs().max() == 0 and own[1].abs().max() == 0
    present, in_game = others[0, 5:].tolist()
    assert (present, in_game) == (([1, 1], [0, 1]) if num_neighbors == "all" else ([1, 0], [1, 0]))
    assert (others[0, :, 1] == 0).all() == (num_neighbors != "all")


def test_its_parts_are_those_of_the_declaration():
    parts = gpu_vecenv.configure("tag_continuous", egocentric=True).layout.observation.parts["tagger"]
    (others,) = parts.entities
    assert (others.name, others.count, others.features, others.presence) == ("other", 10, 7, 5)
    assert others.columns[3] == tuple(range(3, 73, 10))
    assert parts.own == {
        "heading": (70, 71),
        "speed": (72,),
        "acceleration": (73,),
        "position": (74, 75),
        "time": (76,),
    }
