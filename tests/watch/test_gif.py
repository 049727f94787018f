"""GIF files of the player: what Pillow reads in them is what was written."""

import base64
import io

import numpy as np
import pytest
from PIL import Image, ImageSequence
from support.node import require_node, run_node

require_node()
SCRIPTS = ("../watch/player/bytes.js", "../watch/player/gif.js")


def written(pictures, delays):
    """Pictures (n, height, width, 3) uint8 as a GIF."""
    height, width = pictures.shape[1:3]
    words = pictures.astype(np.int64) @ [1, 256, 65536]
    shown = [[picture.ravel().tolist(), delay] for picture, delay in zip(words, delays, strict=True)]
    argument = {"width": width, "height": height, "pictures": shown}
    return base64.b64decode(run_node("film_files.js", argument, *SCRIPTS))


def read(content):
    """Pictures (n, height, width, 3) and their delays in hundredths of a second."""
    image = Image.open(io.BytesIO(content))
    frames = [
        (np.asarray(frame.convert("RGB")), frame.info["duration"] // 10) for frame in ImageSequence.Iterator(image)
    ]
    pictures, delays = zip(*frames, strict=True)
    assert image.info["loop"] == 0
    return np.stack(pictures), list(delays)


@pytest.mark.parametrize("colours", [1, 2, 3, 4, 16, 255])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (90, 130)], ids=str)
def test_pictures_of_few_colours_are_exact(colours, shape):
    # Noise, which fills the table of codes several times, in the first picture; smooth stripes in the second.
    random = np.random.default_rng(colours)
    palette = random.choice(256**3, colours, replace=False)[:, None] >> np.array([0, 8, 16]) & 255
    noise = palette[random.integers(0, colours, shape)]
    stripes = palette[np.broadcast_to(np.arange(shape[1]) // 7 % colours, shape)]
    pictures = np.stack([noise, stripes, noise]).astype(np.uint8)
    found, delays = read(written(pictures, [4, 5, 6]))
    if (noise == stripes).all():
        pictures, expected = pictures[:1], [15]
    else:
        expected = [4, 5, 6]
    assert delays == expected
    np.testing.assert_array_equal(found, pictures)


def test_a_picture_holds_what_changed_and_one_that_does_not_change_is_shown_longer():
    pictures = np.full((5, 60, 80, 3), 200, np.uint8)
    for step, picture in enumerate(pictures[:4]):
        picture[20:30, 10 + 12 * step : 22 + 12 * step] = 213, 94, 0
    pictures[2] = pictures[1]
    pictures[4] = pictures[3]
    content = written(pictures, [5] * 5)
    found, delays = read(content)
    assert delays == [5, 10, 10]
    np.testing.assert_array_equal(found, pictures[[0, 1, 3]])
    assert content.count(bytes([10, 0, 20, 0, 24, 0, 10, 0])) == 1  # the rectangle of the first change


def test_a_long_pause_is_several_pictures():
    pictures = np.full((3, 2, 2, 3), 9, np.uint8)
    found, delays = read(written(pictures, [40000, 20000, 30000]))
    assert delays == [60000, 30000] and (found == 9).all()


def test_of_many_colours_the_nearest_boxes_are_taken():
    # 4096 colours, 16 levels a channel, in 255 boxes of 16 colours or so, 2 x 2 x 4 levels of 17: a box's mean is 25.5
    # off at most, and 11 in the mean; one box is cut once less.
    ramp = np.stack(np.meshgrid(*[np.arange(0, 256, 17)] * 3, indexing="ij"), -1).reshape(1, 64, 64, 3).astype(np.uint8)
    found, _ = read(written(ramp, [5]))
    errors = np.abs(found.astype(int) - ramp)
    assert errors.max() <= 26 and errors.mean() <= 12
    assert len(np.unique(found.reshape(-1, 3), axis=0)) == 255
