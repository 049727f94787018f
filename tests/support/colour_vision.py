"""How different two colours look: CIEDE2000, for normal vision and for the three kinds of dichromacy.

Dichromacy is simulated with the matrices of Machado, Oliveira and Fernandes, "A Physiologically-based Model for
Simulation of Color Vision Deficiency", IEEE TVCG 15 (6), 2009, at severity 1.0, on linear RGB. CIEDE2000 is that of
Sharma, Wu and Dalal, "The CIEDE2000 Color-Difference Formula", Color Research and Application 30 (1), 2005: the plain
distance in CIELAB overstates how different saturated colours look, such as those of roles. Side by side, about 1 is
just noticeable.
"""

from __future__ import annotations

import numpy as np

VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [(0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)]
    ),
    "deuteranopia": np.array(
        [(0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)]
    ),
    "tritanopia": np.array(
        [(1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)]
    ),
}
# IEC 61966-2-1: linear RGB to XYZ, whose white is D65.
TO_XYZ = np.array(
    [(0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041)]
)


def lab(colour, vision="normal"):
    """CIELAB of a colour (red, green, blue), 0 … 255, as it looks with a kind of vision."""
    share = np.asarray(colour) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    seen = (VISIONS[vision] @ linear).clip(0, 1)
    ratio = (TO_XYZ @ seen) / TO_XYZ.sum(1)
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def ciede2000(one, other):
    """The difference of two colours in CIELAB."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean_c7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * np.sqrt(mean_c7 / (mean_c7 + 25.0**7))
    c1, c2 = np.hypot(stretch * a1, b1), np.hypot(stretch * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, stretch * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    grey = c1 * c2 == 0
    dh = 0.0 if grey else (h2 - h1 + 180) % 360 - 180
    h = h1 + h2 if grey else (h1 + dh / 2) % 360
    lightness, c = (l1 + l2) / 2, (c1 + c2) / 2
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    t = 1 + sum(weight * np.cos(np.radians(times * h + shift)) for weight, times, shift in waves)
    s_l = 1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    s_c, s_h = 1 + 0.045 * c, 1 + 0.015 * c * t
    turn = -np.sin(np.radians(60 * np.exp(-(((h - 275) / 25) ** 2)))) * 2 * np.sqrt(c**7 / (c**7 + 25.0**7))
    of_l, of_c = (l2 - l1) / s_l, (c2 - c1) / s_c
    of_h = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(dh / 2)) / s_h
    return float(np.sqrt(of_l**2 + of_c**2 + of_h**2 + turn * of_c * of_h))


def least_difference(one, other):
    """The difference of two colours (red, green, blue) with the kind of vision to which they look most alike."""
    return min(ciede2000(lab(one, vision), lab(other, vision)) for vision in VISIONS)
