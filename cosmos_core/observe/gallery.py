"""Save generated samples of a diffusion model: each image or video as a file, and all of them as a grid with prompts
and rewards.

    <stage>/visual_output/step_<N>/0-0.png | 0-0.mp4    prompt 0, completion 0
    <stage>/visual_output/step_<N>/grid.png             one row per prompt; the middle frame of a video

The report, the artifacts of Prefect and the metric sinks read these files. Other modules generate the samples.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.run.files import parse_step, replace_folder
from cosmos_core.types import ScoredGroup

SAMPLES_FOLDER = "visual_output"
GRID_FILE = "grid.png"
VIDEO_SUFFIX = ".mp4"
_FRAMES_PER_SECOND = 16  # frame rate of SANA-Video and Cosmos-Predict2.5, which reward functions assume
MAX_SAVED_PROMPTS, _MAX_SAMPLES_PER_PROMPT = 12, 8
_MIN_CELL_SIZE = 96  # minimum width in pixels of an image in the grid of samples
_MAX_CELL_SIZE = 256
_LINE_HEIGHT, _CELL_MARGIN, _TEXT_COLOR, _BACKGROUND_COLOR = 12, 4, (40, 40, 48), (255, 255, 255)
_LETTER_WIDTH = 6  # approximate width in pixels of a letter of a prompt or caption
_MAX_EMBEDDED_BYTES = 2 << 20


@dataclass(frozen=True)
class GeneratedSample:
    """Image or video that a diffusion model generated, with its prompt and its reward."""

    prompt: str
    pixels: np.ndarray
    """uint8 array of shape (height, width, 3) for an image, or (frames, height, width, 3) for a video."""
    reward: float | None
    """Reward of the image or video; None: the reward function returned no valid reward."""
    is_scored: bool = True
    """Whether a reward was computed for the image or video."""

    @property
    def middle_frame(self) -> np.ndarray:
        """Return the image, or the middle frame of the video."""
        return self.pixels[len(self.pixels) // 2] if self.pixels.ndim == 4 else self.pixels

    @property
    def caption(self) -> str:
        """Return the reward as text for the caption of the sample; empty if no reward was computed."""
        if not self.is_scored:
            return ""
        return "no valid reward" if self.reward is None else f"{self.reward:.3g}"


def get_step_folder(stage_path: Path, step: int) -> Path:
    """Return the folder with the samples that were generated after train step `step`."""
    return stage_path / SAMPLES_FOLDER / f"step_{step}"


def save_step_samples(stage_path: Path, step: int, sample_rows: Sequence[Sequence[GeneratedSample]]) -> list[list[str]]:
    """Write generated samples, at most 8 for each of `MAX_SAVED_PROMPTS` prompts, and their grid to the folder of a
    train step; return the paths of the samples of each prompt, relative to the stage."""
    step_folder = get_step_folder(stage_path, step)
    sample_files = save_samples(step_folder, [row[:_MAX_SAMPLES_PER_PROMPT] for row in sample_rows[:MAX_SAVED_PROMPTS]])
    return [[str((step_folder / name).relative_to(stage_path)) for name in row] for row in sample_files]


def save_samples(target_folder: Path, rows: Sequence[Sequence[GeneratedSample]]) -> list[list[str]]:
    """Write the samples of each prompt and their grid to a new folder; return the file names by prompt."""
    from PIL import Image

    with replace_folder(target_folder) as folder:
        sample_files = [[_write_sample(folder, f"{p}-{k}", x) for k, x in enumerate(row)] for p, row in enumerate(rows)]
        Image.fromarray(draw_grid(rows)).save(folder / GRID_FILE)
    return sample_files


def collect_samples(
    scored_group: ScoredGroup, completion_indices: Iterable[int], *, is_scored: bool = True
) -> list[GeneratedSample]:
    """Return the images or videos of the completions of a group at `completion_indices`. `is_scored`: whether the
    scores of the group are rewards."""
    completions, scores = scored_group.group.completions, scored_group.scores
    samples = [(completions[k].diffusion_sample, scores[k].value) for k in completion_indices]
    text = scored_group.group.prompt.text
    return [GeneratedSample(text, each.pixels.numpy(), score, is_scored) for each, score in samples if each is not None]


def find_newest_grid(stage_path: Path) -> Path | None:
    """Return the path of the grid image of the newest step; None if no grid was written."""
    grid_paths = (stage_path / SAMPLES_FOLDER).glob(f"step_*/{GRID_FILE}")
    return max(grid_paths, key=lambda path: parse_step(path.parent.name), default=None)


def draw_grid(rows: Sequence[Sequence[GeneratedSample]]) -> np.ndarray:
    """Return one image of all samples, a row per prompt, the prompt above its row, each reward below its sample."""
    from PIL import Image, ImageDraw

    height, width = _compute_cell_size([sample.middle_frame.shape for row in rows for sample in row])
    column_width, row_height = width + _CELL_MARGIN, height + 2 * _LINE_HEIGHT + 2 * _CELL_MARGIN
    canvas_size = (_CELL_MARGIN + max(map(len, rows)) * column_width, _CELL_MARGIN + len(rows) * row_height)
    grid_image = Image.new("RGB", canvas_size, _BACKGROUND_COLOR)
    image_draw = ImageDraw.Draw(grid_image)
    for prompt_index, row in enumerate(rows):
        row_top_y = _CELL_MARGIN + prompt_index * row_height
        image_draw.text((_CELL_MARGIN, row_top_y), _truncate_text(row[0].prompt, grid_image.width), fill=_TEXT_COLOR)
        for sample_index, sample in enumerate(row):
            cell_left = _CELL_MARGIN + sample_index * column_width
            grid_image.paste(_resize_pixels(sample.middle_frame, height, width), (cell_left, row_top_y + _LINE_HEIGHT))
            caption_position = (cell_left, row_top_y + _LINE_HEIGHT + height)
            image_draw.text(caption_position, _truncate_text(sample.caption, width), fill=_TEXT_COLOR)
    return np.asarray(grid_image)


def encode_media_file(media_path: Path) -> str:
    """Return a media file as a data: URI, an image as a thumbnail; empty if it is missing or too large to embed."""
    from PIL import Image

    try:
        if media_path.suffix == VIDEO_SUFFIX:
            video_bytes = media_path.read_bytes()
            return "" if len(video_bytes) > _MAX_EMBEDDED_BYTES else make_data_uri("video/mp4", video_bytes)
        with Image.open(media_path) as image:
            png_buffer = io.BytesIO()
            _resize_pixels(np.asarray(image.convert("RGB")), *_compute_cell_size([image.size[::-1]])).save(
                png_buffer, "PNG"
            )
            return make_data_uri("image/png", png_buffer.getvalue())
    except OSError:
        return ""


def _write_sample(folder: Path, name: str, sample: GeneratedSample) -> str:
    from PIL import Image

    if sample.pixels.ndim == 3:
        Image.fromarray(sample.pixels).save(folder / f"{name}.png")
        return f"{name}.png"
    _write_video(folder / f"{name}{VIDEO_SUFFIX}", sample.pixels)
    return f"{name}{VIDEO_SUFFIX}"


def _write_video(path: Path, frames: np.ndarray) -> None:
    """Write frames as an H.264 video, cropped to even width and height, which H.264 requires."""
    import av

    height, width = (length - length % 2 for length in frames.shape[1:3])
    with av.open(str(path), "w") as container:
        encoder_stream: Any = container.add_stream("libx264", rate=_FRAMES_PER_SECOND)
        encoder_stream.width, encoder_stream.height, encoder_stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            frame_pixels = np.ascontiguousarray(frame[:height, :width])
            container.mux(encoder_stream.encode(av.VideoFrame.from_ndarray(frame_pixels, format="rgb24")))
        container.mux(encoder_stream.encode())


def _compute_cell_size(image_shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return height and width in pixels that each image gets in the grid of samples: small images are enlarged by an
    integer factor, large images are shrunk."""
    height, width = max(shape[0] for shape in image_shapes), max(shape[1] for shape in image_shapes)
    scale = -(-_MIN_CELL_SIZE // width) if width < _MIN_CELL_SIZE else min(1.0, _MAX_CELL_SIZE / max(height, width))
    return round(height * scale), round(width * scale)


def _resize_pixels(pixels: np.ndarray, height: int, width: int) -> Any:
    from PIL import Image

    resampling_filter = Image.Resampling.LANCZOS if pixels.shape[0] > height else Image.Resampling.NEAREST
    return Image.fromarray(pixels).resize((width, height), resampling_filter)


def make_data_uri(mime_type: str, file_content: bytes) -> str:
    """Return the content of a file, encoded in base64, as a `data:` URI to embed in HTML."""
    return f"data:{mime_type};base64,{base64.b64encode(file_content).decode()}"


def _truncate_text(text: str, width: int) -> str:
    """Return `text` without line breaks, truncated to `width` pixels, with `?` for letters that Pillow's font lacks."""
    one_line_text = text.replace("\n", " ").encode("latin-1", "replace").decode("latin-1")
    max_characters = max(1, width // _LETTER_WIDTH)
    return one_line_text if len(one_line_text) <= max_characters else f"{one_line_text[: max_characters - 2]}.."
