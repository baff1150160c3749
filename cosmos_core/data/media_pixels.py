"""Decoding of images and clips to the pixels that a VAE encodes: one of a few sizes, a fixed number of frames, uint8.

An image is scaled until it covers the size and cropped around its middle. A video is read frame by frame, and only the
frames of the clip are kept in memory, at their final size.

Shapes: F frames, H height, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_core.data.images import convert_to_rgb
from cosmos_core.data.media_source import Content
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, first_line
from cosmos_core.transient import is_transient

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
"""Height and width of an image or a frame, in pixels."""
_STEPS = 8
"""Number of bucket sizes between the aspect ratios 1:1 and 1:2."""
_MIN_READABLE_FRACTION = 0.95
"""Minimum readable fraction of the duration in a video's header, which some programs round."""


@dataclass(frozen=True)
class FrameSettings:
    """Settings for converting media of any size to pixels of one size."""

    size: Size
    """Height and width; with `buckets`, their product is the approximate area of each bucket."""
    num_frames: int = 0
    """Number of frames of a clip; 0 for images, which have no frame dimension."""
    multiple: int = 16
    """Divisor of the height and width of each bucket."""
    buckets: bool = False
    """Whether to use the bucket with the closest aspect ratio; False always uses `size`."""
    sampling: str = "random"
    """Choice of frames of a longer video: consecutive (`first`, `middle`, `random`) or evenly spaced (`uniform`)."""

    def size_of(self, height: int, width: int) -> Size:
        """Return the size to which media with `height` and `width` are resized and cropped."""
        if not self.buckets:
            return self.size
        ratio = math.log(height / width)
        return min(bucket_sizes(self.size, self.multiple), key=lambda size: abs(math.log(size[0] / size[1]) - ratio))


@lru_cache(maxsize=8)
def bucket_sizes(size: Size, multiple: int) -> tuple[Size, ...]:
    """Return sizes of about the same area as `size`, from 1:2 to 2:1, whose sides are divisible by `multiple`."""
    edge = math.sqrt(size[0] * size[1])
    sizes = []
    for step in range(-_STEPS, _STEPS + 1):
        ratio = 2.0 ** (step / _STEPS / 2)
        height, width = (max(multiple, round(length / multiple) * multiple) for length in (edge * ratio, edge / ratio))
        sizes.append((height, width))
    return tuple(dict.fromkeys(sizes))


def pixels_of(content: Content, framing: FrameSettings, position: float) -> np.ndarray:
    """Return an image (HWC) or a clip (FHWC) as uint8; `position` in [0, 1] selects the clip if `sampling` is random.

    Raises:
        DataError: the content cannot be decoded completely, or a video has too few frames.
        OSError: a disk or network operation failed, so the content may be valid.
    """
    with convert_errors(_decoder_error, DataError):
        if content.is_video:
            if not framing.num_frames:
                raise DataError("it is a video, and the model makes images")
            return _clip(content, framing, position)
        image = _crop_to_size(_decode_image(content), framing)
        return image[None] if framing.num_frames else image


def _decoder_error(error: Exception) -> Exception:
    return error if is_transient(error) else DataError(f"it cannot be decoded: {first_line(error)}")


def is_enlarged(content: Content, framing: FrameSettings) -> bool:
    """Return True if an image has fewer pixels than it is resized to in height or in width; read its header only."""
    from PIL import Image as pillow
    from PIL.ExifTags import Base

    if content.is_video:
        return False
    with pillow.open(BytesIO(content.read())) as image:
        width, height = image.size
        if image.getexif().get(Base.Orientation, 1) >= 5:  # the image is rotated by 90 degrees
            width, height = height, width
    return any(map(int.__lt__, (height, width), framing.size_of(height, width)))


def _decode_image(content: Content) -> Image:
    from PIL import Image as pillow
    from PIL import ImageOps

    data = content.read()
    try:
        with pillow.open(BytesIO(data)) as image:
            return convert_to_rgb(ImageOps.exif_transpose(image))
    except pillow.UnidentifiedImageError:  # its message has a memory address, which differs between runs
        raise DataError(
            f"it cannot be decoded: no image ({len(data)} bytes that begin with {data[:8]!r}); replace it"
        ) from None


def _crop_to_size(image: Image, framing: FrameSettings) -> np.ndarray:
    """Return the image scaled to cover its target size and cropped around its centre."""
    from PIL import Image as pillow

    height, width = framing.size_of(image.height, image.width)
    scale = min(image.width / width, image.height / height)
    x_offset, top = (image.width - width * scale) / 2, (image.height - height * scale) / 2
    box = (x_offset, top, x_offset + width * scale, top + height * scale)
    if box == (0, 0, width, height):
        return np.asarray(image)
    return np.asarray(image.resize((width, height), pillow.Resampling.LANCZOS, box=box))


def _clip(content: Content, framing: FrameSettings, position: float) -> np.ndarray:
    """Return the frames of a clip; the video is decoded once, up to the last of these frames."""
    total = _count(content)
    if total < framing.num_frames:
        raise DataError(f"it has {total} frames, and policy.diffusers.train_frames = {framing.num_frames} are needed")
    indices = _frame_indices(total, framing, position)
    frames: list[np.ndarray] = []
    for index, frame in enumerate(_frames(content)):
        if index == indices[len(frames)]:
            frames.append(_crop_to_size(frame.to_image().rotate(frame.rotation, expand=True), framing))
        if len(frames) == len(indices):
            return np.stack(frames)
    raise DataError(f"its frame {indices[len(frames)]} of {total} cannot be decoded")


def _frame_indices(total: int, framing: FrameSettings, position: float) -> list[int]:
    """Return the indices of a clip's frames in a video of `total` frames."""
    count = framing.num_frames
    if framing.sampling == "uniform":
        return np.linspace(0, total - 1, count).round().astype(int).tolist()
    latest = total - count
    start = {"first": 0, "middle": latest // 2}.get(framing.sampling, min(latest, int(position * (latest + 1))))
    return list(range(start, start + count))


def _count(content: Content) -> int:
    """Return the number of frames of a video; raise DataError if it has no video stream, or ends before the length in
    its header."""
    with _open_container(content) as container:
        if not container.streams.video:
            raise DataError("it cannot be decoded: it has no video stream, or is cut off before it")
        stream = container.streams.video[0]
        header_frames, seconds = stream.frames, _duration_in_header(container, stream)
        frame_seconds = float(1 / stream.average_rate) if stream.average_rate else 0.0
        count, end = 0, 0.0
        for packet in container.demux(stream):
            if not packet.size or packet.is_corrupt:  # the last packet of a truncated file
                continue
            count += 1
            if packet.pts is not None:
                start = float((packet.pts - (stream.start_time or 0)) * packet.time_base)
                duration = float(packet.duration * packet.time_base) if packet.duration else frame_seconds
                end = max(end, start + duration)
    min_end = min(_MIN_READABLE_FRACTION * seconds, seconds - 0.75 * frame_seconds)
    is_truncated = count < header_frames if header_frames else end < min_end and (end > 0 or not count)
    if is_truncated:
        full_length = f"{header_frames} frames" if header_frames else f"{seconds:g} s"
        raise DataError(f"it is cut off: its head says {full_length}, and it ends after {count} frames, {end:.3g} s")
    return count


def _duration_in_header(container: Any, stream: Any) -> float:
    """Return the duration of a video in the header of its file, in seconds; 0 if it is missing."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    # Matroska stores the duration of a stream as a tag of the form H:M:S.
    hours, _, minutes_text = stream.metadata.get("DURATION", "").partition(":")
    minutes, _, seconds = minutes_text.partition(":")
    if seconds:
        return 3600 * float(hours) + 60 * float(minutes) + float(seconds)
    return container.duration / 1e6 if container.duration and len(container.streams) == 1 else 0.0


def frame_rate(content: Content) -> float:
    """Return the frame rate of a video in Hz, rounded to hundredths; 0 if it is unknown."""
    with _open_container(content) as container:
        rate = container.streams.video[0].average_rate
        return round(float(rate), 2) if rate else 0.0


def _frames(content: Content) -> Iterator[Any]:
    with _open_container(content) as container:
        yield from container.decode(container.streams.video[0])


def _open_container(content: Content) -> Any:
    """Return a PyAV container that streams a whole file, or reads a range of a file or a row's bytes from memory."""
    import av

    is_whole_file = content.path is not None and content.size is None
    return av.open(str(content.path) if is_whole_file else BytesIO(content.read()))
