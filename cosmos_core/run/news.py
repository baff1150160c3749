"""What a scheduled retraining has seen: the content of all rows and every setting that changes a result, or whether and
where it is published, as one digest. Each config has a note for each set of overrides that it is fired with.

The model that it starts from is left out: each publication is another one, and would be a reason to train for ever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.run.digests import shared_digests
from cosmos_core.run.files import SHARED, Document, read_document, write_json
from cosmos_core.run.fingerprint import fingerprint
from cosmos_core.run.lock import Lock

_OF_A_MODEL = "policy.model_revision"
_OF_PUBLISHING = {"kind", "after", "model", "require", "confidence", "target"}
_COUNTS = ("kind", "result_version", "config", "data", "media", "code", "entry", "chat_template", "template")


class Seen(Document):
    """How the newest retraining of a note went."""

    digest: str
    run_id: str
    outcome: Literal["", "published", "refused", "declined"] = ""
    """Empty: it has not ended yet, or failed."""


def content_of(pipeline: Pipeline) -> str:
    """Return the digest of what a pipeline, pinned, is trained on and how, and of what lets it be published where.

    Raises:
        DataError, ConfigError: something that it names is not there.
    """
    digests = shared_digests(pipeline.output_dir.expanduser().absolute())
    found: dict[str, Any] = {}
    for stage in pipeline.stages:
        if not pipeline.kind_of(stage).is_reusable:  # a gate or an upload: what was made before it is taken over
            found[stage.name] = stage.model_dump(mode="json", include=_OF_PUBLISHING)
            continue
        ingredients = fingerprint(pipeline, stage, pipeline.kind_of(stage), {}, digests).ingredients
        ingredients["config"].pop(_OF_A_MODEL, None)
        found[stage.name] = {name: ingredients[name] for name in _COUNTS if name in ingredients}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def note_of(pipeline: Pipeline, overrides: Sequence[str], start: str) -> Path:
    """Return the file of what is noted of a pipeline that is fired with these overrides and this start.

    The config counts as it was named: a deployment may lay its files out in another folder for each firing.
    """
    key = json.dumps([pipeline.config.name, str(pipeline.source), list(overrides), start])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return pipeline.output_dir.expanduser().absolute() / SHARED / "retraining" / f"{name}.json"


def note_of_flow_run(note: Path, flow_run: str) -> Path:
    """Return the file of which run a flow run works on, and the content of that; its outcome is not in it."""
    return note.with_suffix("") / f"{flow_run}.json"


def read_seen(note: Path) -> Seen | None:
    """Return what was noted last; None: nothing was."""
    return read_document(note, Seen)


def write_seen(note: Path, seen: Seen) -> None:
    """Note how far the newest retraining is."""
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, seen.model_dump())


def retraining_lock(note: Path) -> Lock:
    """Open the lock that a firing holds from reading the note until it has ended, on this machine.

    A firing that began with older data would otherwise publish after one that began with newer data.
    """
    return Lock(note.with_suffix(".lock"))
