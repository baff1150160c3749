"""What a diffusion model drew, for people: files, grids with rewards, the page of a run, Prefect and sinks."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image

from cosmos_core.observe import gallery, sections
from cosmos_core.observe.gallery import GeneratedSample
from cosmos_core.observe.record import LoggedSample
from cosmos_core.train.measure import SAMPLES_FILE, add_samples
from cosmos_core.types import Completion, DiffusionSample, Group, Prompt, Score, ScoredGroup

RED, GREEN = (200, 0, 0), (0, 200, 0)


def plain(color, frames=0, size=8) -> np.ndarray:
    shape = (frames, size, size, 3) if frames else (size, size, 3)
    return np.broadcast_to(np.array(color, np.uint8), shape).copy()


def group_of(number: int, *pixels: np.ndarray, rewards=(0.25, None)) -> ScoredGroup:
    completions = tuple(
        Completion((), "stop", "", diffusion_sample=DiffusionSample(torch.from_numpy(each), None, (1.0, 0.0), 0))
        for each in pixels
    )
    group = Group(Prompt(number, (), f"prompt {number}", ""), completions, 0)
    return ScoredGroup(group, tuple(Score(reward) for reward in rewards[: len(pixels)]))


def test_samples_name_the_files_of_what_was_drawn_with_their_rewards(tmp_path):
    groups = [group_of(0, plain(RED), plain(GREEN)), group_of(1, plain(GREEN), plain(RED))]
    add_samples(tmp_path / SAMPLES_FILE, 4, groups)
    lines = [json.loads(line) for line in (tmp_path / SAMPLES_FILE).read_text().splitlines()]
    assert lines[1] == {
        "step": 4, "prompt": "prompt 1", "reference": "", "completion": "", "reward": 0.25,
        "media": ["visual_output/step_4/1-0.png", "visual_output/step_4/1-1.png"], "rewards": [0.25, None],
    }  # fmt: skip
    with Image.open(tmp_path / lines[1]["media"][0]) as image:
        assert (np.asarray(image) == GREEN).all()
    add_samples(tmp_path / SAMPLES_FILE, 12, groups[:1])
    assert gallery.find_newest_grid(tmp_path) == tmp_path / "visual_output" / "step_12" / "grid.png"


def test_samples_that_a_kill_or_an_editor_has_damaged_are_passed_over(tmp_path):
    file = tmp_path / SAMPLES_FILE
    whole = b'{"step": 2, "prompt": "\xc3\xa9\xe2\x80\xa8"}'
    file.write_bytes(whole + b'\n{"step": 3, "pro\n[1]\n\xff\n{"step": "x"}\n{"step": 5}\n{"step": 2')
    add_samples(file, 4, [])
    assert [json.loads(line) for line in file.read_text().split("\n")[:-1]] == [{"step": 2, "prompt": "é\u2028"}]


def test_a_grid_has_a_row_for_each_prompt_and_a_column_for_each_completion():
    first = [GeneratedSample("a", plain(RED), 1.0), GeneratedSample("a", plain(GREEN), None)]
    sheet = gallery.draw_grid([first, [GeneratedSample("b", plain(GREEN), 0.5)]])
    height, width = sheet.shape[:2]
    corners = {(1, 1): RED, (1, 3): GREEN, (3, 1): GREEN, (3, 3): (255, 255, 255)}
    for (row, column), colour in corners.items():  # in quarters of the sheet
        assert (sheet[row * height // 4, column * width // 4] == colour).all()


def test_a_video_is_written_whole_and_its_middle_frame_is_in_the_grid(tmp_path):
    frames = np.stack([plain((40 * i, 0, 0), size=32) for i in range(5)])
    [[name]] = gallery.save_step_samples(tmp_path, 1, [[GeneratedSample("a clip", frames, 1.0)]])
    with av.open(str(tmp_path / name)) as container:
        assert container.streams.video[0].average_rate == 16, "the rate at which rewards see it"
        decoded = [frame.to_ndarray(format="rgb24").mean((0, 1))[0] for frame in container.decode(video=0)]
    assert np.allclose(decoded, [0, 40, 80, 120, 160], atol=12)
    with Image.open(tmp_path / "visual_output" / "step_1" / "grid.png") as grid:
        assert tuple(np.asarray(grid)[60, 50]) == (80, 0, 0)


def test_the_page_of_a_run_embeds_what_was_drawn(tmp_path):
    add_samples(tmp_path / SAMPLES_FILE, 4, [group_of(0, plain(RED), plain(GREEN))])
    line = LoggedSample(**json.loads((tmp_path / SAMPLES_FILE).read_text()), folder=str(tmp_path))
    shown = sections.load_completion_media(line)
    assert [each["caption"] for each in shown] == ["0.250", "no valid reward"]
    content = base64.b64decode(re.fullmatch("data:image/png;base64,(.*)", shown[0]["uri"])[1])
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (96, 96)
        assert (np.asarray(image) == RED).all()
    assert sections.load_completion_media(line.model_copy(update={"media": ["gone.png"]}))[0]["uri"] == ""


def test_a_damaged_or_missing_gallery_is_none(tmp_path: Path):
    assert gallery.find_newest_grid(tmp_path) is None
    assert gallery.encode_media_file(tmp_path / "no.png") == ""
