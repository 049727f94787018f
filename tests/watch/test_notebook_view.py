"""Episodes in notebooks: a page, and a picture of it for stored outputs."""

import html
import io
import sys

import numpy as np
import pytest

import gpu_vecenv
from gpu_vecenv.watch.notebook import png, watch


@pytest.fixture(scope="module")
def shown():
    env = gpu_vecenv.make("tag_gridworld", 1, "cpu", max_steps=5, grid=4)
    return watch("Tag <at random>", env, {"tagger": None, "runner": None}, episodes=2)


def test_the_page_is_in_a_frame_that_is_one_attribute(shown):
    text = shown._repr_html_()
    (content,) = [part for part in text.split('"') if part.startswith("&lt;!") or "&lt;html" in part]
    assert "<at random>" not in text and "at random" in html.unescape(content)
    assert len(shown.replays) == 2


def test_the_picture_has_frames_side_by_side_and_needs_pygame(shown, monkeypatch):
    pytest.importorskip("pygame")
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(shown._repr_png_()))
    assert image.mode == "RGB" and image.size[0] > 3 * image.size[1] and len(set(image.getdata())) > 3
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert shown._repr_png_() is None


def test_a_png_file_has_the_pixels():
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(pillow.open(io.BytesIO(png(pixels)))), pixels)
