"""Colours of the bundled games' pictures: which are which can be told with any kind of colour vision."""

import itertools
import math

import pytest
from support.colour_vision import VISIONS, ciede2000, lab, least_difference

import gpu_vecenv
from gpu_vecenv.declare.drawing import IDENTITIES, Circle
from gpu_vecenv.envs.registry import GAMES
from gpu_vecenv.views.frames import env_drawing

OF_ROLES = 20  # the least difference between agents of different roles, seen apart from each other
OF_THINGS = 12  # between other discs of the same size: what they are, or which agent
STEPS = 12


def bodies(drawing, roles):
    """Colour, radius and role, or None, of each agent's disc, and of the largest part of other discs in each other."""
    groups = {}
    for shape in drawing.shapes:
        if isinstance(shape, Circle):
            groups.setdefault((round(shape.x, 6), round(shape.y, 6)), []).append(shape)
    for circles in groups.values():
        inner = [*(circle.radius for circle in circles[1:]), 0.0]
        body, _ = max(zip(circles, inner, strict=True), key=lambda pair: pair[0].radius ** 2 - pair[1] ** 2)
        body = next((circle for circle in circles if circle.agent is not None), body)
        yield body.colour, body.radius, None if body.agent is None else roles[body.agent]


@pytest.mark.parametrize("name", GAMES)
def test_discs_differ_for_every_kind_of_colour_vision(name):
    game = gpu_vecenv.configure(name)
    env = gpu_vecenv.VecEnv(game, 1, "cpu")
    env.reset(seed=1)
    compared = {}
    for _ in range(STEPS):
        found = set(bodies(env_drawing(env, 0), game.layout.agent_roles))
        for (one, radius, role), (other, size, of_other) in itertools.combinations(found, 2):
            differ = None not in (role, of_other) and role != of_other
            if one != other and (differ or math.isclose(radius, size, rel_tol=0.1)):
                pair = tuple(sorted((one, other)))
                compared[pair] = max(compared.get(pair, 0), OF_ROLES if differ else OF_THINGS)
        env.step(env.sample_actions())
    drawn = {role for _, _, role in found} - {None}
    assert bool(compared) or len(drawn) < 2
    alike = {pair: least_difference(*pair) for pair, least in compared.items() if least_difference(*pair) < least}
    assert alike == {}


def test_agents_of_one_role_differ_by_their_own_colours():
    assert min(least_difference(*pair) for pair in itertools.combinations(IDENTITIES, 2)) >= OF_THINGS


def test_differences_are_those_of_the_reference():
    # Of the 34 pairs that Sharma, Wu and Dalal published, those which most implementations got wrong, and two others.
    pairs = {
        2.0425: ((50, 2.6772, -79.7751), (50, 0, -82.7485)),
        7.2195: ((50, 2.49, -0.001), (50, -2.49, 0.0011)),
        2.3669: ((50, 0, 0), (50, -1, 2)),
        2.0373: ((22.7233, 20.0904, -46.6940), (23.0331, 14.9730, -42.5619)),
        1.2644: ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387)),
    }
    for expected, pair in pairs.items():
        assert ciede2000(*pair) == pytest.approx(expected, abs=5e-5)  # they have four decimals
    # A white is a white, to the rounding of the matrices, and two colours that deuteranopes confuse are near.
    for vision in VISIONS:
        assert lab((255, 255, 255), vision) == pytest.approx((100, 0, 0), abs=0.01)
    brown, olive = (163, 81, 0), (98, 107, 2)
    assert (
        ciede2000(lab(brown), lab(olive)) > 25 > 6 > ciede2000(lab(brown, "deuteranopia"), lab(olive, "deuteranopia"))
    )
