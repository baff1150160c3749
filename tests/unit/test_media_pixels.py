"""Pixels of media as a model gets them."""

from __future__ import annotations

import errno
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from cosmos_core.data.media_items import MediaContent
from cosmos_core.data.media_pixels import FrameSettings, decode_media, is_upscaled
from cosmos_core.errors import DataError

RED, BLUE = (255, 0, 0), (0, 0, 255)


def test_an_image_is_scaled_to_cover_its_size_and_cropped_around_the_middle(tmp_path):
    image = Image.new("RGB", (40, 20), BLUE)
    image.paste(RED, (10, 0, 30, 20))
    image.save(tmp_path / "1.png")
    pixels = decode_media(MediaContent(False, tmp_path / "1.png"), FrameSettings((10, 10)), 0.0)
    assert pixels.shape == (10, 10, 3)
    assert (pixels[:, 3:7] == RED).all()


@pytest.mark.parametrize(
    ("width", "height", "size"), [(1000, 1000, (480, 480)), (2000, 1000, (480, 832)), (249, 249, (480, 480))]
)
def test_rounding_makes_no_crop_larger_than_the_image(tmp_path, width, height, size):
    Image.new("RGB", (width, height), BLUE).save(tmp_path / "1.png")
    pixels = decode_media(MediaContent(False, tmp_path / "1.png"), FrameSettings(size), 0.0)
    assert pixels.shape == (*size, 3) and (pixels == BLUE).all()


@pytest.mark.parametrize(("mode", "hidden", "visible"), [
    ("RGBA", (200, 0, 0, 0), (200, 0, 0, 255)), ("LA", (50, 0), (50, 255)), ("P", 1, 0)
])  # fmt: skip
def test_what_is_transparent_is_white_and_all_else_keeps_its_colour(tmp_path, mode, hidden, visible):
    image = Image.new(mode, (8, 8), visible)
    image.paste(hidden, (0, 0, 8, 4))
    if mode == "P":
        image.putpalette([10, 20, 30, 40, 50, 60])
    image.save(tmp_path / "1.png", **({"transparency": 1} if mode == "P" else {}))
    pixels = decode_media(MediaContent(False, tmp_path / "1.png"), FrameSettings((8, 8)), 0.0)
    assert (pixels[:4] == 255).all()
    assert (pixels[4:] == {"RGBA": (200, 0, 0), "LA": (50, 50, 50), "P": (10, 20, 30)}[mode]).all()


def write_frames(path: Path, frames: list[np.ndarray], pixel_aspect: Fraction = Fraction(1), first: int = 0) -> Path:
    """Write a video of 10 frames a second with a key frame at every fifth, of which a player shows those from `first`
    on: the timestamps of the others are negative, for which an MP4 file gets an edit list."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.bit_rate = *frames[0].shape[:2], 4_000_000
        stream.codec_context.gop_size, stream.codec_context.sample_aspect_ratio = 5, pixel_aspect
        packets = [
            packet for frame in (*frames, None)
            for packet in stream.encode(frame if frame is None else av.VideoFrame.from_ndarray(frame, format="rgb24"))
        ]  # fmt: skip
        for packet in packets:
            packet.pts, packet.dts = packet.pts - first, packet.dts - first
            container.mux(packet)
    return path


@pytest.mark.parametrize("first", [3, 12])
def test_a_clip_that_was_trimmed_without_encoding_has_the_frames_that_a_player_shows(tmp_path, first):
    frames = [np.full((32, 32, 3), 10 * i, np.uint8) for i in range(20)]
    clip = write_frames(tmp_path / "1.mp4", frames, first=first)

    def shown(sampling):
        framing = FrameSettings((32, 32), num_frames=5, sampling=sampling)
        return (decode_media(MediaContent(True, clip), framing, 0.999).mean((1, 2, 3)) / 10).round().tolist()

    assert shown("first") == [*range(first, first + 5)]
    assert shown("random") == [15, 16, 17, 18, 19]
    assert (shown("uniform")[0], shown("uniform")[-1]) == (first, 19)


def test_a_damaged_size_in_a_clip_is_damage_and_no_lack_of_memory_after_which_to_try_again(tmp_path):
    content = bytearray(write_frames(tmp_path / "1.mp4", [np.zeros((32, 32, 3), np.uint8)] * 2).read_bytes())
    content[content.index(b"stts") + 8] = 0xFF  # the first byte of the number of entries, behind version and flags
    with pytest.raises(DataError, match="it cannot be decoded: it is damaged or cut off"):
        decode_media(MediaContent(True, content_bytes=bytes(content)), FrameSettings((32, 32), num_frames=1), 0.0)


def test_a_lack_of_memory_that_has_passed_is_no_damage_of_a_clip(tmp_path, monkeypatch):
    clip = MediaContent(True, write_frames(tmp_path / "1.mp4", [np.zeros((32, 32, 3), np.uint8)] * 2))
    whole, failures = av.open, [MemoryError, av.error.MemoryError]

    def open_container(file):
        if failures:
            raise failures.pop()(errno.ENOMEM, "Cannot allocate memory")
        return whole(file)

    monkeypatch.setattr(av, "open", open_container)
    framing = FrameSettings((32, 32), num_frames=1)
    with pytest.raises(MemoryError):  # both tries fail, the second in Python itself
        decode_media(clip, framing, 0.0)
    failures = [av.error.MemoryError]
    assert decode_media(clip, framing, 0.0).shape == (1, 32, 32, 3)


def test_a_clip_has_the_proportions_that_a_player_shows(tmp_path):
    y, x = np.mgrid[:64, :48]
    disc = (y - 31.5) ** 2 + ((x - 23.5) * 4 / 3) ** 2 < 24**2  # a disc, by pixels that are wider than high
    frame = np.where(disc, 255, 0).astype(np.uint8)[..., None].repeat(3, -1)
    clip = write_frames(tmp_path / "1.mp4", [frame], Fraction(4, 3))
    [pixels] = decode_media(MediaContent(True, clip), FrameSettings((64, 64), num_frames=1), 0.0)
    is_disc = pixels.mean(-1) > 128
    assert abs(is_disc.any(0).sum() - is_disc.any(1).sum()) <= 2
    assert abs(is_disc.sum() - np.pi * 24**2) < 60


@pytest.mark.parametrize(("orientation", "is_rotated"), [(b"\3\0\1\0\0\0\6", True), (b"\1\0\1\0\0\0\6", False)])
def test_an_orientation_of_another_type_is_none_as_for_the_decoder(orientation: bytes, is_rotated: bool) -> None:
    """Some writers store it as a byte, where EXIF has a short."""
    exif = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1" + orientation + b"\0" * 7
    Image.new("RGB", (40, 20)).save(file := BytesIO(), "jpeg", exif=exif)
    content, settings = MediaContent(False, None, content_bytes=file.getvalue()), FrameSettings((32, 16), multiple=16)
    assert is_upscaled(content, settings) == (not is_rotated)
