"""Reward for images that show the objects in their prompt: GenEval (arXiv 2310.11513).

The row of a prompt specifies classes, counts, colours and positions (`tag`, `include`, `exclude`). Mask2Former detects
the objects, CLIP classifies their colours. Both models are from transformers; GenEval's script uses the same
architectures from mmdet and open_clip, so scores may differ slightly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from cosmos_core.rewards.clip_model import DEFAULT_CLIP_MODEL, ClipModel, select_device, translate_loading_errors
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_DEFAULT_DETECTOR = "facebook/mask2former-swin-small-coco-instance"
_GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
_COLOR_PROMPTS = ("a photo of a {color} {name}", "a photo of a {color}-colored {name}", "a photo of a {color} object")
_COCO_NAME_BY_GENEVAL_NAME = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""Class names of GenEval that differ from COCO's, with the names in COCO."""
_CONFIDENCE_THRESHOLD, _COUNTING_CONFIDENCE_THRESHOLD, _MAX_OBJECTS_PER_CLASS = 0.3, 0.9, 16
_OVERLAP_MARGIN_FRACTION = 0.1
_INAPPLICABLE_TAG_SCORE = -10.0
"""Score that an item gets in `gen_eval_group` under each GenEval tag other than its own, as in Cosmos-RL."""


@dataclass
class Detection:
    """Detected object: box (x0, y0, x1, y1) in pixels, mask of its pixels, and confidence of the detector."""

    box: tuple[float, float, float, float]
    mask: np.ndarray
    confidence: float


class GenEvalReward:
    """Reward model that checks whether an image shows the objects that its prompt requests. The scores are
    `gen_eval_score` (fraction of the requests that the image meets), `gen_eval_reward` (1 if all requested objects are
    present), `gen_eval_strict` (1 if their counts are also exact), and `gen_eval_group` (`gen_eval_reward` under the
    tag of the row, -10 under other tags). `options.clip` is the CLIP model that classifies colours."""

    def __init__(self, settings: RewardModelSettings) -> None:
        install_hint = "pip install 'cosmos-posttrain[gen-eval]' (see pyproject.toml)"
        require_packages("gen_eval", install_hint, "torch", "transformers", "scipy")
        import torch
        from transformers import AutoImageProcessor, AutoModelForUniversalSegmentation

        detector_path = settings.model_path or _DEFAULT_DETECTOR
        self._device = torch.device(select_device(settings))
        with translate_loading_errors("gen_eval", detector_path):
            self._detector = AutoModelForUniversalSegmentation.from_pretrained(detector_path).to(self._device).eval()
            self._image_processor = AutoImageProcessor.from_pretrained(detector_path)
        clip_model_path = settings.options.get("clip", DEFAULT_CLIP_MODEL)
        clip_settings = RewardModelSettings(clip_model_path, dtype=settings.dtype, device=settings.device)
        self._clip_model = ClipModel("gen_eval", clip_settings, clip_model_path)

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the scores of each image; an item whose row lacks `tag` or `include` has no scores."""
        self.errors = [""] * len(items)
        score_columns: ScoreColumns = {f"gen_eval_{name}": [] for name in ("score", "reward", "strict")}
        scores_by_tag: dict[str, list[float]] = {tag: [] for tag in _GENEVAL_TAGS}
        for i, item in enumerate(items):
            try:
                item_scores: Sequence[float | None] = self._score_image(middle_image(item.media), item.info)
            except (KeyError, TypeError, ValueError) as error:
                item_scores = (None, None, None)
                self.errors[i] = f"the row of the prompt needs tag and include, as GenEval has them: {error!r}"
            for column, item_score in zip(score_columns.values(), item_scores, strict=True):
                column.append(item_score)
            for tag, tag_scores in scores_by_tag.items():
                is_tag_of_item = tag == item.info.get("tag") and item_scores[1] is not None
                tag_scores.append(float(item_scores[1] or 0.0) if is_tag_of_item else _INAPPLICABLE_TAG_SCORE)
        return {**score_columns, "gen_eval_group": scores_by_tag}

    def _score_image(self, image: Image.Image, row: Mapping[str, Any]) -> tuple[float, float, float]:
        # Drop None: parquet files give all entries of a column the same keys, with None for missing values.
        object_requests, excluded_objects = (
            [{key: value for key, value in entry.items() if value is not None} for entry in entries]
            for entries in (row["include"], row.get("exclude") or [])
        )
        confidence_threshold = _COUNTING_CONFIDENCE_THRESHOLD if row["tag"] == "counting" else _CONFIDENCE_THRESHOLD
        class_names = {entry["class"] for entry in (*object_requests, *excluded_objects)}
        objects = self.detect(image, class_names, confidence_threshold)
        colors = {name: [self.classify_color(image, each, name) for each in objects[name]] for name in class_names}
        needs_strict_score = row.get("geneval_only_strict")
        has_all_objects = has_requested_objects(object_requests, excluded_objects, objects, colors)
        partial_match_score, has_met_requests = score_object_requests(object_requests, objects, colors)
        return partial_match_score, float(has_all_objects and not needs_strict_score), float(has_met_requests)

    def detect(self, image: Image.Image, class_names: set[str], min_confidence: float) -> dict[str, list[Detection]]:
        """Return the objects of the classes `class_names` in an image, by class, in descending order of confidence."""
        import torch

        detector_inputs = self._image_processor(images=image, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            detector_outputs = self._detector(**detector_inputs)
        [segmentation_result] = self._image_processor.post_process_instance_segmentation(
            detector_outputs, threshold=min_confidence, target_sizes=[image.size[::-1]], return_binary_maps=True
        )
        objects_by_class: dict[str, list[Detection]] = {class_name: [] for class_name in class_names}
        label_by_id = self._detector.config.id2label
        object_masks = segmentation_result["segmentation"]
        for i, segment in enumerate(segmentation_result["segments_info"]):
            detected_label = label_by_id[segment["label_id"]]
            object_mask = np.asarray(object_masks[i].cpu(), bool)
            for class_name in class_names:
                if detected_label in {class_name, _COCO_NAME_BY_GENEVAL_NAME.get(class_name)} and object_mask.any():
                    ys, xs = np.nonzero(object_mask)
                    box = (float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1))
                    objects_by_class[class_name].append(Detection(box, object_mask, segment["score"]))
        for objects in objects_by_class.values():
            objects.sort(key=lambda detection: -detection.confidence)
        return {class_name: objects[:_MAX_OBJECTS_PER_CLASS] for class_name, objects in objects_by_class.items()}

    def classify_color(self, image: Image.Image, detection: Detection, class_name: str) -> str:
        """Return the colour whose CLIP embedding, a mean over three prompts, is most similar to the cropped object."""
        grey_background = Image.new("RGB", image.size, "#999")
        object_crop = Image.composite(image, grey_background, Image.fromarray(detection.mask)).crop(detection.box)  # type: ignore[arg-type]
        prompts = [template.format(color=color, name=class_name) for color in _COLORS for template in _COLOR_PROMPTS]
        text_embeddings = self._clip_model.embed_texts(prompts).reshape(len(_COLORS), len(_COLOR_PROMPTS), -1).mean(1)
        text_embeddings = text_embeddings / text_embeddings.norm(dim=-1, keepdim=True)
        return _COLORS[int((text_embeddings @ self._clip_model.embed_images([object_crop])[0]).argmax())]


ObjectRequests = Sequence[Mapping[str, Any]]
"""Objects that a prompt requests, each with `class` and `count` and optionally `color` or `position`."""
ObjectsByClass = Mapping[str, Sequence[Detection]]
ColorsByClass = Mapping[str, Sequence[str]]


def has_requested_objects(
    object_requests: ObjectRequests, excluded_objects: ObjectRequests, detections: ObjectsByClass, colors: ColorsByClass
) -> bool:
    """Return True if all requested objects are present in an image, and it has fewer objects of each excluded class
    than the `count` of that class in `excluded_objects`."""
    _, has_all_objects = score_object_requests(object_requests, detections, colors, ignores_extra_objects=True)
    return has_all_objects and all(len(detections[each["class"]]) < each["count"] for each in excluded_objects)


def score_object_requests(
    requests: ObjectRequests, objects: ObjectsByClass, colors: ColorsByClass, *, ignores_extra_objects: bool = False
) -> tuple[float, bool]:
    """Return a score of how well an image meets the object requests, and whether it meets all of them exactly. The
    score is the mean over the requested counts, colours and positions; a count that is met in part has a score below 1.
    With `ignores_extra_objects`, only as many of the most confident objects of a class count as were requested."""
    matches_by_request: list[Sequence[Detection] | None] = []
    request_scores: list[float] = []
    for object_request in requests:
        class_name, requested_count = object_request["class"], object_request["count"]
        matched_objects = objects[class_name][: requested_count if ignores_extra_objects else None]
        is_request_met = len(matched_objects) == requested_count
        request_scores.append(1 - abs(requested_count - len(matched_objects)) / requested_count)
        if not is_request_met and ("color" in object_request or "position" in object_request):
            request_scores.append(0.0)
        if is_request_met and "color" in object_request:
            num_color_matches = list(colors[class_name][: len(matched_objects)]).count(object_request["color"])
            request_scores.append(1 - abs(requested_count - num_color_matches) / requested_count)
            is_request_met = num_color_matches == requested_count
        if is_request_met and "position" in object_request:
            is_request_met = _has_requested_relation(matched_objects, object_request["position"], matches_by_request)
            request_scores.append(float(is_request_met))
        matches_by_request.append(matched_objects if is_request_met else None)
    return sum(request_scores) / len(request_scores) if request_scores else 0.0, None not in matches_by_request


def _has_requested_relation(
    matched_objects: Sequence[Detection],
    requested_position: Sequence[Any],
    matches_by_request: Sequence[Sequence[Detection] | None],
) -> bool:
    """Return True if each of `matched_objects` is in the requested position relative to each object that matches an
    earlier request. `requested_position` has the spatial relation and the index of that earlier request."""
    relation, anchor_request_index = requested_position
    anchor_objects = matches_by_request[anchor_request_index]
    return anchor_objects is not None and all(
        relation in find_spatial_relations(detection, anchor)
        for detection in matched_objects
        for anchor in anchor_objects
    )


def find_spatial_relations(detection: Detection, anchor_detection: Detection) -> set[str]:
    """Return the spatial relations of an object to another (left of, right of, above, below), empty if they overlap."""
    box_corners, anchor_box_corners = (np.array(each.box).reshape(2, 2) for each in (detection, anchor_detection))
    center_offset = box_corners.mean(0) - anchor_box_corners.mean(0)
    overlap_margin = _OVERLAP_MARGIN_FRACTION * (np.ptp(box_corners, axis=0) + np.ptp(anchor_box_corners, axis=0))
    offset_beyond_margin = np.maximum(np.abs(center_offset) - overlap_margin, 0) * np.sign(center_offset)
    if np.all(np.abs(offset_beyond_margin) < 1e-3):
        return set()
    x, y = offset_beyond_margin / np.linalg.norm(center_offset)
    is_true_by_relation = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in is_true_by_relation.items() if holds}
