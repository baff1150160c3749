"""Images in rows: every way to name one, every way for it to be wrong, and what prepared rows keep of it."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from transformers.image_utils import load_image
from transformers.utils import is_torchvision_available

from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.images import ImageRef, align_images, convert_to_rgb, open_image, read_image
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.messages import read_content
from cosmos_core.data.prepare import run
from cosmos_core.errors import ConfigError, DataError, ModelError
from cosmos_core.models.processor import load_processor
from cosmos_core.run.files import read_json, sha256
from cosmos_core.run.stage import Stage
from tests.effects.change import recipe, stage_of
from tests.unit.tiny_vlms import PARTS, picture, save_vlm

SHOWN = {"role": "user", "content": "<image>\nWhat is it?"}
ASKED = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A cat."}
BARE = {"type": "image"}
NULL = {"bytes": None, "path": None}
IN_PARTS = {"role": "user", "content": [BARE, {"type": "text", "text": "\nWhat is it?"}]}


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


CAT = png(picture(1))
BASE64 = (base64.b64encode(CAT).decode(), base64.encodebytes(CAT).decode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vlm("llava", tmp_path_factory.mktemp("model"), PARTS)


def stage_with(folder: Path, model: Path, rows: list[dict[str, Any]] | Path, **tables: Any) -> Stage:
    """A stage that prepares these rows."""
    folder.mkdir(exist_ok=True)
    if not isinstance(rows, Path):
        file = folder / "a.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = file
    policy = {"type": "sft", **tables.pop("train_policy", {"dataset": {"name": str(rows)}})}
    return stage_of(folder / "stage", recipe({"train.train_policy": policy, **tables}), kind="prepare", model=model)


def prepare(folder: Path, model: Path, rows: list[dict[str, Any]] | Path, **tables: Any) -> Path:
    """The data folder of a stage that prepared these rows."""
    stage = stage_with(folder, model, rows, **tables)
    run(stage)
    return stage.path / "data"


@pytest.mark.parametrize(
    ("turns", "row", "sources"),
    [
        ([SHOWN, ANSWER], {"image": "a.png"}, ["a.png"]),
        ([SHOWN, ANSWER], {"images": ["a.png"], "image": None}, ["a.png"]),
        *(([SHOWN, ANSWER], {name: ["a.png"]}, ["a.png"]) for name in ("img", "image_path", "image_paths", "img_path")),
        ([{**ASKED, "content": [{**BARE, "image": "a.png"}]}], {"image_path": "x/a.png"}, ["a.png"]),
        ([ASKED, ANSWER], {"image": "a.png"}, ["a.png"]),
        ([{**IN_PARTS}, ANSWER], {"images": ["a.png"]}, ["a.png"]),
        ([{**ASKED, "content": [{**BARE, "image": "a.png"}, {"type": "text", "text": "?"}]}], {}, ["a.png"]),
        ([{**ASKED, "content": [{**BARE, "image_url": {"url": "a.png"}}]}], {}, [{"url": "a.png"}]),
        ([{**ASKED, "content": "<image> or <image>?"}, SHOWN], {"images": ["1", "2", "3"]}, ["1", "2", "3"]),
        ([ASKED, ANSWER], {}, []),
        ([{**ASKED, "content": [{**BARE, "image": "a.png"}]}], {"images": ["a.png"]}, ["a.png"]),
        *(
            ([ASKED, ANSWER], {name: none}, [])
            for name in ("images", "videos")
            for none in ([None], [NULL], [""], NULL)
        ),
    ],
)
def test_images_are_found_in_the_order_in_which_the_turns_show_them(turns, row, sources):
    placed, found = align_images(turns, row, "a.jsonl:1")
    assert found == sources
    parts = [part for turn in placed if isinstance(turn["content"], list) for part in turn["content"]]
    assert sum(part == BARE for part in parts) == len(sources)


def test_an_image_of_the_responses_api_is_read():
    parts = [{"type": "input_image", "image_url": "a.png"}, {"type": "input_text", "text": "?"}]
    assert align_images([{**ASKED, "content": read_content(parts, "row", with_images=True)}], {}, "row")[1] == ["a.png"]


def test_words_around_a_mark_are_kept_and_images_without_a_mark_come_first():
    assert align_images([SHOWN], {"image": "a"}, "row")[0] == [IN_PARTS]
    both = [{"role": "system", "content": "Be brief."}, ASKED]
    placed, _ = align_images(both, {"image": "a"}, "row")
    assert placed == [both[0], {"role": "user", "content": [BARE, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize(
    ("turns", "row", "message"),
    [
        ([SHOWN], {"images": ["a", "b"]}, "the turns show 1 images and the row has 2"),
        ([SHOWN, SHOWN], {"image": "a"}, "the turns show 2 images and the row has 1"),
        ([SHOWN, SHOWN], {"images": ["a", None]}, "the turns show 2 images and the row has 1"),
        ([{**ASKED, "content": [{**BARE, "image": "a"}]}], {"image": "b"}, "show 1 images and the row has 2"),
        ([IN_PARTS], {}, "the turns show 1 images and the row has 0"),
        ([SHOWN], {}, "shows an image, and the row names none"),
        ([ANSWER], {"image": "a"}, "no user turn to show them"),
        ([ASKED], {"video": "a.mp4"}, "the row has a video"),
    ],
)
def test_a_row_that_shows_other_images_than_it_has_is_refused(turns, row, message):
    with pytest.raises(DataError, match=rf"^a\.jsonl:3: .*{message}"):
        align_images(turns, row, "a.jsonl:3")


@pytest.mark.parametrize(
    "source",
    ["cat.png", {"path": "cat.png", "bytes": None}, {"image": "cat.png"}, "ABSOLUTE", "file://ABSOLUTE"],
    ids=["relative", "dictionary", "dictionary of verl", "absolute", "file URL"],
)
def test_a_file_is_kept_by_its_path_below_the_root_and_its_digest(source, tmp_path):
    (tmp_path / "cat.png").write_bytes(CAT)
    if isinstance(source, str):
        source = source.replace("ABSOLUTE", str(tmp_path / "cat.png"))
    ref, image = read_image(source, tmp_path, "row")
    assert ref == ImageRef("cat.png", None, sha256(tmp_path / "cat.png"))
    assert np.array_equal(np.asarray(image), np.asarray(picture(1)))
    absolute = replace(ref, path=str(tmp_path / "cat.png"))
    assert np.array_equal(np.asarray(open_image(absolute)), np.asarray(picture(1)))


@pytest.mark.parametrize(
    "source",
    [CAT, {"bytes": CAT, "path": "gone.png"}, *(f"data:image/png;base64,{text}" for text in BASE64), *BASE64],
    ids=["bytes", "dictionary", "data URI", "data URI of lines", "base64", "base64 of lines"],
)
def test_bytes_are_kept_themselves(source, tmp_path):
    ref, image = read_image(source, tmp_path, "row")
    assert ref.path is None and ref.content == CAT
    assert np.array_equal(np.asarray(open_image(ref)), np.asarray(image))


def exotic() -> dict[str, bytes]:
    """Files that are not plain RGB."""
    colours, found = picture(3), {}

    def save(name: str, image: Image.Image, kind: str, **options: Any) -> None:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        found[name] = buffer.getvalue()

    save("CMYK", colours.convert("CMYK"), "JPEG")
    save("palette", colours.convert("P"), "PNG")
    save("palette with transparency", colours.convert("P"), "PNG", transparency=3)
    save("alpha", colours.convert("RGBA"), "PNG")
    save("one bit", colours.convert("1"), "PNG")
    turned = Image.Exif()
    turned[0x0112] = 6
    save("turned", colours, "JPEG", exif=turned)
    return found


@pytest.mark.parametrize("name", exotic())
def test_other_kinds_of_pixels_are_read_as_the_processors_of_transformers_read_them(name, tmp_path):
    (tmp_path / "a").write_bytes(exotic()[name])
    theirs = load_image(str(tmp_path / "a"))
    for source in ("a", Image.open(tmp_path / "a")):
        ref, image = read_image(source, tmp_path, "row")
        assert image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(theirs))
        assert image.size == ((30, 40) if name == "turned" else (40, 30))
        assert (ref.content is None) == (source == "a")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        *((f"{scheme}://host/cat.png", "image .* is a URL") for scheme in ("http", "https", "s3")),
        *((f"data:image/png{rest}", "the image .* cannot be decoded") for rest in (",abc", ";base64,%%%")),
    ],
)
def test_nothing_is_fetched_and_a_wrong_data_uri_is_refused(source, problem, tmp_path):
    with pytest.raises(DataError, match=rf"^a\.jsonl:1: {problem}"):
        read_image(source, tmp_path, "a.jsonl:1")


def test_an_image_where_the_template_writes_none_is_refused(tmp_path):
    template = PARTS.replace("'equalto', 'image'", "'equalto', 'image' if m.role == 'user' else 'nothing'")
    model = save_vlm("llava", tmp_path / "model", template)
    (tmp_path / "cat.png").write_bytes(CAT)
    row = {"messages": [ASKED, {"role": "assistant", "content": "<image> A cat."}], "image": "cat.png"}
    with pytest.raises(DataError, match=r"^a\.jsonl:1: the turns show 1 images, and the chat template .* 0 times"):
        prepare(tmp_path / "p", model, [{**row, "image": str(tmp_path / "cat.png")}])


def test_an_image_in_an_answer_is_never_learned(tmp_path, model):
    row = {"messages": [ASKED, {"role": "assistant", "content": "<image>A cat."}], "image": str(tmp_path / "cat.png")}
    (tmp_path / "cat.png").write_bytes(CAT)
    ids, mask = open_sequences(prepare(tmp_path, model, [row]), "train")[0]
    assert (ids == 259).sum() == 4 and mask[ids == 259].sum() == 0
    processor = load_processor(str(model))
    assert processor is not None
    assert processor.tokenizer.decode(ids[mask == 1]).endswith("A cat.<|im_end|>")


def test_the_word_of_the_model_for_an_image_is_refused_in_a_text(tmp_path, model):
    row = {"messages": [{"role": "user", "content": "What is the <image> tag for?"}, ANSWER]}
    with pytest.raises(DataError, match=r"the turns show 0 images, and the chat template writes '<image>' 1 times"):
        prepare(tmp_path, model, [row])


def test_rows_with_an_image_behind_the_cut_are_skipped_and_counted(tmp_path, model):
    (tmp_path / "cat.png").write_bytes(CAT)
    words = {"role": "assistant", "content": "word " * 10}
    rows = [
        {"messages": [SHOWN, words, SHOWN, ANSWER], "images": ["cat.png", "cat.png"]},  # the second is cut off
        {"messages": [SHOWN, words, ASKED, ANSWER], "images": ["cat.png"]},  # words are cut off
    ]
    data = prepare(tmp_path, model, rows, policy={"model_max_length": 60})
    rows_found = open_sequences(data, "train")
    said = read_json(data / "statistics.json")["train"]
    assert said["skipped"] == {
        "longer than policy.model_max_length before the end of the last image": {"rows": 1, "first": "a.jsonl:1"}
    }
    assert said["truncated_rows"] == 1 and said["images"] == 1 and said["image_tokens"] == 4
    assert rows_found.lengths.tolist() == [60] and len(rows_found.images(0)) == 1


def test_a_changed_or_missing_file_is_noticed(tmp_path, model):
    (tmp_path / "cat.png").write_bytes(CAT)
    data = prepare(tmp_path, model, [{"messages": [SHOWN, ANSWER], "image": "cat.png"}])
    (ref,) = open_sequences(data, "train").images(0)
    (tmp_path / "cat.png").write_bytes(png(picture(2)))
    with pytest.raises(DataError, match=r"cat\.png is not the one that was prepared; run the prepare stage again"):
        open_image(ref)
    (tmp_path / "cat.png").unlink()
    with pytest.raises(DataError, match=r"cat\.png.*there is no such file"):
        open_image(ref)


@pytest.mark.parametrize("form", ["hf parquet", "plain parquet", "saved", "paths"])
def test_columns_of_images_are_read_in_every_format(form, tmp_path, model):
    (tmp_path / "cat.png").write_bytes(CAT)
    columns: dict[str, Any] = {"messages": [[SHOWN, ANSWER]]}
    if form == "plain parquet":
        file = tmp_path / "a.parquet"
        pa.parquet.write_table(pa.table({**columns, "image": [CAT]}), file)
    elif form == "paths":
        file = tmp_path / "a.parquet"
        pa.parquet.write_table(pa.table({**columns, "images": [["cat.png"]]}), file)
    else:
        made = datasets.Dataset.from_dict({**columns, "images": [[picture(1)]]}).cast_column(
            "images", datasets.List(datasets.Image())
        )
        file = tmp_path / ("saved" if form == "saved" else "a.parquet")
        made.save_to_disk(str(file)) if form == "saved" else made.to_parquet(str(file))
    rows = open_sequences(prepare(tmp_path, model, file), "train")
    (ref,) = rows.images(0)
    assert ref.path == (str(tmp_path / "cat.png") if form == "paths" else None)
    assert np.array_equal(np.asarray(open_image(ref)), np.asarray(picture(1)))


def test_llava_rows_come_from_the_annotations_and_their_images_from_the_media_folder(tmp_path, model):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "cat.png").write_bytes(CAT)
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]
    rows = [{"id": str(i), "image": "cat.png", "conversations": turns} for i in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    custom = {"dataset": {"annotation_path": str(tmp_path / "rows.json"), "media_path": str(tmp_path / "media")}}
    data = prepare(tmp_path / "p", model, [], train_policy={"dataset": {"test_size": 1}}, custom=custom)
    found = [open_sequences(data, split) for split in ("train", "validation")]
    assert [len(rows) for rows in found] == [3, 1]
    file = tmp_path / "media" / "cat.png"
    assert found[1].images(0) == (ImageRef(str(file), None, sha256(file)),)


def test_a_model_without_a_processor_reads_text_alone(tmp_path, model):
    folder = save_vlm("llava", tmp_path / "model")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).unlink()
    assert load_processor(str(folder)) is None
    message = r"^a\.jsonl:1, turn 1 of 'messages': the turn shows an image, and this version"
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, folder, [{"messages": [SHOWN, ANSWER], "image": "cat.png"}])


@pytest.mark.skipif(is_torchvision_available(), reason="the library is here")
def test_a_processor_that_lacks_a_library_is_named(tmp_path):
    folder = save_vlm("llama4", tmp_path)
    (folder / "processor_config.json").write_text('{"processor_class": "Llama4Processor"}')
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Llama4ImageProcessorFast"}')
    with pytest.raises(ModelError, match=r"cannot load the processor: .*[Tt]orchvision"):
        load_processor(str(folder))


def test_pixels_of_the_recipe_change_the_number_of_tokens(tmp_path):
    folder = save_vlm("qwen2.5-vl", tmp_path / "model")
    (tmp_path / "cat.png").write_bytes(png(picture(1, 300, 300)))
    rows = [{"messages": [SHOWN, ANSWER], "image": str(tmp_path / "cat.png")}]
    found = []
    for pixels in (5 * 28 * 28, 17 * 28 * 28):
        data = prepare(tmp_path / str(pixels), folder, rows, custom={"vision": {"max_pixels": pixels}})
        found.append(read_json(data / "statistics.json")["train"]["image_tokens"])
    assert found == [4, 16]


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        ({"vision": {"max_pixels": 0}}, r"custom\.vision\.max_pixels = 0 must be"),
        ({"vision": {"min_pixels": "many"}}, r"custom\.vision\.min_pixels = 'many' must be"),
        ({"dataset": {"annotation_path": 3}}, r"custom\.dataset\.annotation_path = 3 must be a path"),
        ({"dataset": {"annotation_path": "a.json"}}, r"both name rows"),
    ],
)
def test_wrong_settings_of_media_are_refused(custom, message):
    train = {"train_policy": {"type": "sft", "dataset": {"name": "rows.jsonl"}}}
    with pytest.raises(ConfigError, match=message):
        image_settings(Recipe.model_validate({"train": train, "custom": custom}))


def test_pixels_are_refused_where_the_processor_has_no_such_setting(model):
    with pytest.raises(ConfigError, match=r"custom\.vision\.max_pixels = 100: LlavaProcessor has no such setting"):
        load_processor(str(model), pixel_limits=(("max_pixels", 100),))


def test_held_out_images_are_beside_the_held_out_rows(tmp_path, model):
    for split, seed in (("train", 1), ("held", 2)):
        (tmp_path / split).mkdir()
        picture(seed).save(tmp_path / split / "cat.png")
        (tmp_path / split / "a.jsonl").write_text(json.dumps({"messages": [SHOWN, ANSWER], "image": "cat.png"}) + "\n")
    held = {"dataset": {"name": str(tmp_path / "held" / "a.jsonl")}}
    data = prepare(tmp_path / "p", model, tmp_path / "train" / "a.jsonl", validation=held)
    for split, seed in (("train", 1), ("validation", 2)):
        (ref,) = open_sequences(data, split).images(0)
        assert np.array_equal(np.asarray(open_image(ref)), np.asarray(picture(seed)))


@pytest.mark.full
def test_any_number_of_processes_gives_the_same_bytes(tmp_path, model):
    rows = []
    for i in range(300):
        if i < 5:
            picture(i).save(tmp_path / f"{i}.png")
        rows.append({"messages": [SHOWN, ANSWER], "image": str(tmp_path / f"{i % 5}.png")})
    digests = set()
    for num_workers in (0, 2):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        policy = {"dataset": {"name": str(tmp_path / "a.jsonl")}, "dataloader_num_workers": num_workers}
        data = prepare(tmp_path / str(num_workers), model, [], train_policy=policy)
        assert read_json(data / "statistics.json")["train"]["images"] == 300
        digests.add(sha256(data / "train.arrow"))
    assert len(digests) == 1


def test_settings_of_vision_that_are_not_read_are_told_to_have_no_effect(tmp_path, model):
    (tmp_path / "cat.png").write_bytes(CAT)
    rows = [{"messages": [SHOWN, ANSWER], "image": "cat.png"}]
    outcome = run(stage_with(tmp_path, model, rows, custom={"vision": {"fps": 1, "resized_width": 8}}))
    assert outcome.info["notices"] == [
        "custom.vision.fps has no effect: videos are not read",
        "custom.vision.resized_width has no effect: min_pixels and max_pixels bound the size of images",
    ]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_grey_of_16_bits_keeps_its_shades(tmp_path, suffix):
    values = np.array([[0, 300, 20_000], [40_000, 65_535, 128]], np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    _, image = read_image(f"a.{suffix}", tmp_path, "row")
    assert image.mode == "RGB" and (np.asarray(image) == (values >> 8)[..., None]).all()
    flat = convert_to_rgb(Image.fromarray(np.full((2, 2), 200, np.int32)))
    assert np.asarray(flat).tolist() == np.full((2, 2, 3), 200).tolist()


def test_images_of_data_sets_in_different_folders_are_found(tmp_path, model):
    for i, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(picture(i)))
        (tmp_path / name / "rows.jsonl").write_text(json.dumps({"messages": [SHOWN, ANSWER], "image": "x.png"}) + "\n")
    mixed = [{"name": str(tmp_path / name / "rows.jsonl"), "label": name} for name in "ab"]
    rows = open_sequences(prepare(tmp_path / "p", model, [], train_policy={"datasets": mixed}), "train")
    for i in range(2):
        assert np.array_equal(np.asarray(open_image(*rows.images(i))), np.asarray(picture(i)))
