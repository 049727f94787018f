"""Polygons as triangles, which WebGL draws."""

import numpy as np
from support.node import require_node, run_node

require_node()


def area(points):
    x, y = np.asarray(points).T
    return (x * np.roll(y, -1) - y * np.roll(x, -1)).sum() / 2


def test_triangles_cover_a_polygon_once():
    rng = np.random.default_rng(4)
    angles, radii = np.sort(rng.uniform(0, 2 * np.pi, 60)), rng.uniform(1, 5, 60)  # many corners point inwards
    star = np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1)
    hills = [*((x, np.sin(3 * x)) for x in np.linspace(-1.2, 0.6, 50)), (0.6, -2), (-1.2, -2)]
    polygons = [np.array(each).tolist() for each in (star, star[::-1], hills, [(0, 0), (1, 0), (0, 1)])]
    for points, found in zip(polygons, run_node("triangles.js", polygons, "tiles.js"), strict=True):
        assert len(found) == len(points) - 2
        parts = [area([points[k] for k in corners]) for corners in found]
        whole = area(points)
        assert all(part * whole >= 0 for part in parts), "they do not overlap, as their areas make up the whole"
        np.testing.assert_allclose(sum(parts), whole)  # sums of products in another order
