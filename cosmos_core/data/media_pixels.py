"""Decoding of images and clips to the pixels that a VAE encodes: one of a few sizes, a fixed number of frames, uint8.

An image is scaled until it covers the size and cropped around its middle. A video is read frame by frame, and only the
frames of the clip are kept in memory, at their final size.

Shapes: F frames, H height, W width, C channels.
"""

from __future__ import annotations

import errno
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_core.data.images import convert_to_rgb
from cosmos_core.data.media_items import MediaContent
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, first_line
from cosmos_core.transient import is_transient

if TYPE_CHECKING:
    from PIL.Image import Image

PixelSize = tuple[int, int]
"""Height and width of an image or a frame, in pixels."""
_NUM_BUCKET_STEPS = 8
"""Number of bucket sizes between the aspect ratios 1:1 and 1:2."""
_MIN_READABLE_FRACTION = 0.95
"""Minimum fraction of the duration in a video's header that must be readable; some programs round the duration."""


@dataclass(frozen=True)
class FrameSettings:
    """Settings for decoding images and clips of any size to pixels of one size, or of a few sizes (buckets)."""

    size: PixelSize
    """Height and width of the decoded pixels; with `buckets`, only their product is used, as the approximate area of
    each bucket size."""
    num_frames: int = 0
    """Number of frames of a clip; 0 for images, which have no frame dimension."""
    multiple: int = 16
    """Number by which the height and the width of each bucket size are divisible."""
    buckets: bool = False
    """Whether an image or clip is decoded to the bucket size with the closest aspect ratio; False: always to `size`."""
    sampling: str = "random"
    """Which `num_frames` frames of a longer video are used: consecutive ones (`first`, `middle` or `random` ones), or
    evenly spaced ones (`uniform`)."""

    def target_size(self, height: int, width: int) -> PixelSize:
        """Return the height and width to which an image or clip of size `height` x `width` is scaled and cropped."""
        if not self.buckets:
            return self.size
        log_aspect = math.log(height / width)
        return min(list_bucket_sizes(self.size, self.multiple), key=lambda s: abs(math.log(s[0] / s[1]) - log_aspect))


@lru_cache(maxsize=8)
def list_bucket_sizes(size: PixelSize, size_multiple: int) -> tuple[PixelSize, ...]:
    """Return bucket sizes (height, width) of about the area of `size`, with aspect ratios from 1:2 to 2:1 and sides
    that are divisible by `size_multiple`."""
    square_side_length = math.sqrt(size[0] * size[1])
    bucket_sizes = []
    for bucket_index in range(-_NUM_BUCKET_STEPS, _NUM_BUCKET_STEPS + 1):
        height_to_square_ratio = 2.0 ** (bucket_index / _NUM_BUCKET_STEPS / 2)
        unrounded_sides = square_side_length * height_to_square_ratio, square_side_length / height_to_square_ratio
        height, width = (max(size_multiple, round(side / size_multiple) * size_multiple) for side in unrounded_sides)
        bucket_sizes.append((height, width))
    return tuple(dict.fromkeys(bucket_sizes))


def decode_media(media_content: MediaContent, frame_settings: FrameSettings, clip_fraction: float) -> np.ndarray:
    """Return an image (HWC) or a clip (FHWC) as uint8; `clip_fraction` in [0, 1] selects the clip if `sampling` is
    random. Raise DataError if the content cannot be decoded completely or a video has too few frames, and OSError if a
    disk or network operation failed, after which a retry can succeed."""
    with convert_errors(partial(_convert_decoder_error, media_content), DataError):
        if media_content.is_video:
            if not frame_settings.num_frames:
                raise DataError("it is a video, and the model makes images")
            # A MemoryError may be temporary: decode again. FFmpeg raises it each time for a damaged size in a file.
            with suppress(MemoryError):
                return _decode_clip(media_content, frame_settings, clip_fraction)
            return _decode_clip(media_content, frame_settings, clip_fraction)
        pixels = _resize_and_crop(_decode_image(media_content), frame_settings)
        return pixels[None] if frame_settings.num_frames else pixels


def _convert_decoder_error(media_content: MediaContent, error: Exception) -> Exception:
    # FFmpeg reports EIO and ENOMEM also for damage in a file, such as a truncated Matroska header or a wrong size.
    if type(error).__module__.startswith("av.") and getattr(error, "errno", None) in {errno.EIO, errno.ENOMEM}:
        media_content.digest()  # read the file again: this raises OSError if the disk is at fault
        return DataError("it cannot be decoded: it is damaged or cut off")
    return error if is_transient(error) else DataError(f"it cannot be decoded: {first_line(error)}")


def is_upscaled(media_content: MediaContent, frame_settings: FrameSettings) -> bool:
    """Return whether an image is smaller than its target size in height or width, without decoding its pixels."""
    from PIL import Image as pillow
    from PIL.ExifTags import Base

    if media_content.is_video:
        return False
    with pillow.open(BytesIO(media_content.read())) as image:
        width, height = image.size
        if image.getexif().get(Base.Orientation) in range(5, 9):  # EXIF orientations 5 to 8 swap width and height
            width, height = height, width
    return any(map(int.__lt__, (height, width), frame_settings.target_size(height, width)))


def _decode_image(media_content: MediaContent) -> Image:
    """Decode an image in RGB, rotated by its EXIF orientation, with white in place of transparent pixels, whose stored
    colour is arbitrary."""
    from PIL import Image as pillow
    from PIL import ImageOps

    image_bytes = media_content.read()
    try:
        with pillow.open(BytesIO(image_bytes)) as stored_image:
            image = ImageOps.exif_transpose(stored_image)
        if image.has_transparency_data and not image.mode.startswith("I"):
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return convert_to_rgb(image)
    except pillow.UnidentifiedImageError:  # replace Pillow's message, which has a memory address that varies by run
        content_description = f"{len(image_bytes)} bytes that begin with {image_bytes[:8]!r}"
        raise DataError(f"it cannot be decoded: no image ({content_description}); replace it") from None


def _resize_and_crop(image: Image, frame_settings: FrameSettings) -> np.ndarray:
    from PIL import Image as pillow

    height, width = frame_settings.target_size(image.height, image.width)
    crop_scale = min(image.width / width, image.height / height)
    # Rounding may make the crop larger than the image by 1e-13 pixels, which Pillow refuses.
    crop_width, crop_height = min(width * crop_scale, image.width), min(height * crop_scale, image.height)
    x_offset, y_offset = (image.width - crop_width) / 2, (image.height - crop_height) / 2
    crop_box = (x_offset, y_offset, min(x_offset + crop_width, image.width), min(y_offset + crop_height, image.height))
    if crop_box == (0, 0, width, height):
        return np.asarray(image)
    return np.asarray(image.resize((width, height), pillow.Resampling.LANCZOS, box=crop_box))


def _decode_clip(media_content: MediaContent, frame_settings: FrameSettings, clip_fraction: float) -> np.ndarray:
    """Return the frames of the clip that `frame_settings` and, for random sampling, `clip_fraction` select from a
    video. The video is decoded once, up to the last of these frames."""
    num_video_frames = _count_frames(media_content)
    if num_video_frames < frame_settings.num_frames:
        required_frames_text = f"policy.diffusers.train_frames = {frame_settings.num_frames}"
        raise DataError(f"it has {num_video_frames} frames, and {required_frames_text} are needed")
    frame_indices = _select_frame_indices(num_video_frames, frame_settings, clip_fraction)
    frames: list[np.ndarray] = []
    with _open_container(media_content) as video_container:
        video_stream = video_container.streams.video[0]
        for frame_index, frame in enumerate(video_container.decode(video_stream)):
            if frame_index == frame_indices[len(frames)]:
                # Correct the width for non-square pixels.
                display_width = round(frame.width * (video_stream.sample_aspect_ratio or 1))
                image = frame.to_image(width=display_width).rotate(frame.rotation, expand=True)
                frames.append(_resize_and_crop(image, frame_settings))
            if len(frames) == len(frame_indices):
                return np.stack(frames)
    raise DataError(f"its frame {frame_indices[len(frames)]} of {num_video_frames} cannot be decoded")


def _select_frame_indices(num_video_frames: int, frame_settings: FrameSettings, clip_fraction: float) -> list[int]:
    num_frames = frame_settings.num_frames
    if frame_settings.sampling == "uniform":
        return np.linspace(0, num_video_frames - 1, num_frames).round().astype(int).tolist()
    last_start_index = num_video_frames - num_frames
    random_start_index = min(last_start_index, int(clip_fraction * (last_start_index + 1)))
    first_frame_index = {"first": 0, "middle": last_start_index // 2}.get(frame_settings.sampling, random_start_index)
    return list(range(first_frame_index, first_frame_index + num_frames))


def _count_frames(media_content: MediaContent) -> int:
    """Return the number of frames of a video that a player shows; raise DataError if it has no video stream, or is cut
    off. A video that was trimmed without encoding it again also has frames that players skip."""
    with _open_container(media_content) as container:
        if not container.streams.video:
            raise DataError("it cannot be decoded: it has no video stream, or is cut off before it")
        video_stream = container.streams.video[0]
        num_header_frames, header_seconds = video_stream.frames, _read_header_duration(container, video_stream)
        seconds_per_frame = float(1 / video_stream.average_rate) if video_stream.average_rate else 0.0
        num_shown_frames, video_end_seconds = 0, 0.0
        for packet in container.demux(video_stream):
            if not packet.size or packet.is_corrupt or packet.is_discard:  # do not count packets that players skip
                continue
            num_shown_frames += 1
            if packet.pts is not None:
                packet_start_seconds = float((packet.pts - (video_stream.start_time or 0)) * packet.time_base)
                packet_seconds = float(packet.duration * packet.time_base) if packet.duration else seconds_per_frame
                video_end_seconds = max(video_end_seconds, packet_start_seconds + packet_seconds)
    min_readable_seconds = header_seconds - 0.75 * seconds_per_frame
    if num_header_frames:  # also compare durations, because the header counts frames that players skip
        is_truncated = num_shown_frames < num_header_frames and video_end_seconds < min_readable_seconds
    else:
        min_readable_seconds = min(_MIN_READABLE_FRACTION * header_seconds, min_readable_seconds)
        is_truncated = video_end_seconds < min_readable_seconds and (video_end_seconds > 0 or not num_shown_frames)
    if is_truncated:
        header_length_text = f"{num_header_frames} frames" if num_header_frames else f"{header_seconds:g} s"
        shown_length_text = f"{num_shown_frames} frames, {video_end_seconds:.3g} s"
        raise DataError(f"it is cut off: its head says {header_length_text}, and it ends after {shown_length_text}")
    return num_shown_frames


def _read_header_duration(container: Any, video_stream: Any) -> float:
    """Return the duration of a video in the header of its file, in seconds; 0 if it is missing."""
    if video_stream.duration is not None:
        return float(video_stream.duration * video_stream.time_base)
    # Matroska stores the duration of a stream as a tag of the form H:M:S.
    hours_text, _, minutes_and_seconds = video_stream.metadata.get("DURATION", "").partition(":")
    minutes_text, _, seconds_text = minutes_and_seconds.partition(":")
    if seconds_text:
        return 3600 * float(hours_text) + 60 * float(minutes_text) + float(seconds_text)
    return container.duration / 1e6 if container.duration and len(container.streams) == 1 else 0.0


def read_frame_rate(media_content: MediaContent) -> float:
    """Return the frame rate of a video in Hz, rounded to hundredths; 0 if it is unknown."""
    with _open_container(media_content) as container:
        average_frame_rate = container.streams.video[0].average_rate
        return round(float(average_frame_rate), 2) if average_frame_rate else 0.0


def _open_container(media_content: MediaContent) -> Any:
    """Return a PyAV container that streams a whole file, or reads a range of a file or a row's bytes from memory."""
    import av

    is_content_whole_file = media_content.path is not None and media_content.size is None
    return av.open(str(media_content.path) if is_content_whole_file else BytesIO(media_content.read()))
