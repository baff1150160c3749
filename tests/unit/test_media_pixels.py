"""Pixels of media as a model gets them."""

from __future__ import annotations

import pytest
from PIL import Image

from cosmos_core.data.media_pixels import FrameSettings, decode_media
from cosmos_core.data.media_source import MediaContent

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
