"""What a scheduled retraining has seen: the content of all rows and every setting that changes a result, as one digest.

The model that it starts from is left out: each publication is another one, and would be a reason to train for ever.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.run.digests import shared_digests
from cosmos_core.run.files import SHARED, Document, read_document, write_json
from cosmos_core.run.fingerprint import fingerprint
from cosmos_core.run.lock import Lock

_OF_A_MODEL = "policy.model_revision"
_COUNTS = ("kind", "result_version", "config", "data", "media", "code", "entry", "chat_template")


class Seen(Document):
    """How the newest retraining of a pipeline went."""

    digest: str
    run_id: str
    outcome: Literal["", "published", "refused", "declined"] = ""
    """Empty: it has not ended yet, or failed."""


def content_of(pipeline: Pipeline) -> str:
    """Return the digest of what a pipeline, pinned, is trained on and how.

    Raises:
        DataError, ConfigError: something that it names is not there.
    """
    digests = shared_digests(pipeline.output_dir.expanduser().absolute())
    found: dict[str, Any] = {}
    for stage in pipeline.stages:
        if not pipeline.kind_of(stage).is_reusable:
            continue  # a gate or an upload makes nothing
        ingredients = fingerprint(pipeline, stage, pipeline.kind_of(stage), {}, digests).ingredients
        ingredients["config"].pop(_OF_A_MODEL, None)
        found[stage.name] = {name: ingredients[name] for name in _COUNTS if name in ingredients}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def read_seen(pipeline: Pipeline) -> Seen | None:
    """Return what was noted last; None: nothing was."""
    return read_document(_file(pipeline), Seen)


def note_seen(pipeline: Pipeline, seen: Seen) -> None:
    """Note how far the newest retraining of a pipeline is."""
    _file(pipeline).parent.mkdir(parents=True, exist_ok=True)
    write_json(_file(pipeline), seen.model_dump())


def retraining_lock(pipeline: Pipeline) -> Lock:
    """Open the lock that a firing holds from reading the note until it has ended, on this machine.

    A firing that began with older data would otherwise publish after one that began with newer data.
    """
    return Lock(_file(pipeline).with_suffix(".lock"))


def _file(pipeline: Pipeline) -> Path:
    name = hashlib.sha256(pipeline.config.name.encode()).hexdigest()[:16]
    return pipeline.output_dir.expanduser().absolute() / SHARED / "retraining" / f"{name}.json"
