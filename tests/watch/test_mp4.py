"""MP4 files of the player: boxes as ISO/IEC 14496-12 and 14496-15 describe them, read by a parser of the test's own."""

import base64
import struct

from support.node import require_node, run_node

require_node()
SCRIPTS = ("../watch/player/bytes.js", "../watch/player/mp4.js")
FRAMES = [([1, 2, 3, 4, 5], True), ([6], False), ([7, 8, 9], False), ([10, 11], True)]
FPS, WIDTH, HEIGHT, DESCRIPTION = 30, 960, 540, [1, 100, 0, 31]
PARENTS = ("moov", "trak", "mdia", "minf", "dinf", "stbl")


def boxes(content, start=0, end=None, inside=""):
    """Path of each box -> its first byte and its content."""
    found, end = {}, len(content) if end is None else end
    while start < end:
        size, kind = struct.unpack_from(">I4s", content, start)
        path = f"{inside}{kind.decode()}"
        assert 8 <= size <= end - start and path not in found
        found[path] = start, content[start + 8 : start + size]
        if kind.decode() in PARENTS:
            found |= boxes(content, start + 8, start + size, f"{path}/")
        start += size
    return found


def numbers(box, skipped=0):
    """What a box holds behind so many bytes, as numbers of 32 bits."""
    return list(struct.unpack(f">{(len(box) - skipped) // 4}I", box[skipped:]))


def test_a_file_has_the_frames_their_times_and_where_one_can_start():
    sizes = {"width": WIDTH, "height": HEIGHT, "fps": FPS, "description": DESCRIPTION}
    content = base64.b64decode(run_node("mp4_file.js", {"frames": FRAMES, **sizes}, *SCRIPTS))
    found = boxes(content)
    track, table = "moov/trak/", "moov/trak/mdia/minf/stbl/"
    assert list(found)[:3] == ["ftyp", "mdat", "moov"] and found["ftyp"][1][:4] == b"isom"
    for box in ("moov/mvhd", f"{track}mdia/mdhd"):
        assert numbers(found[box][1])[3:5] == [FPS, len(FRAMES)], "units a second, and all of them"
    assert numbers(found[f"{track}tkhd"][1])[-2:] == [WIDTH << 16, HEIGHT << 16]
    assert numbers(found[f"{table}stts"][1]) == [0, 1, len(FRAMES), 1], "each for one unit"
    assert numbers(found[f"{table}stss"][1]) == [0, 2, 1, 4], "the first frame is number 1"
    assert numbers(found[f"{table}stsc"][1]) == [0, 1, 1, len(FRAMES), 1], "all in one chunk"
    lengths = [len(data) for data, _ in FRAMES]
    assert numbers(found[f"{table}stsz"][1]) == [0, 0, len(FRAMES), *lengths]
    ((zero, one, at), data) = numbers(found[f"{table}stco"][1]), b"".join(bytes(data) for data, _ in FRAMES)
    assert (zero, one) == (0, 1) and content[at : at + len(data)] == data == found["mdat"][1]
    # The sample entry, behind a version and a count, and in it that of the encoder.
    (path, (_, entry)), *_ = boxes(found[f"{table}stsd"][1][8:]).items()
    assert path == "avc1" and struct.unpack_from(">HH", entry, 24) == (WIDTH, HEIGHT)
    assert boxes(entry[78:])["avcC"][1] == bytes(DESCRIPTION)
