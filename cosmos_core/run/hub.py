"""Resolve Hugging Face Hub names to commits before a run begins, because a branch such as `main` moves."""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.error_handling import complete_future
from cosmos_core.errors import CosmosError, DataError, ModelError

_COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
_DEFAULT_BRANCH = "main"
_REVISION_KEYS = {"model": "policy.model_revision", "teacher": "distillation.model_revision"}
_HUB_TIMEOUT_SECONDS = 8.0
_HUB_RETRY_DELAY_SECONDS = 60.0
failed_hub_requests: dict[str, tuple[float, str]] = {}
"""Monotonic time and reason of the last failed request to each Hub, by URL; no request follows it for a minute."""
Repository = tuple[Literal["model", "dataset"], str, str]
"""Repository on the Hugging Face Hub: type, name and revision."""


def pin_hub_revisions(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with the revision of every model and data set from the Hub replaced by a commit. Raises
    `ModelError` or `DataError` if the Hub has no such repository, or neither Hub nor local cache can be read."""
    commit_by_repository: dict[Repository, str] = {}  # stages that name the same repository read the same commit
    pinned_recipes = {}
    for stage in pipeline.stages:
        recipe = pipeline.recipes[stage.name]
        for each in (each for each in pipeline.inputs(stage) if each.location_type == "hub"):
            revision_key = _REVISION_KEYS.get(each.role) or f"{each.key.removesuffix('.name')}.revision"
            revision = each.revision or _DEFAULT_BRANCH
            repository: Repository = ("dataset" if each.role == "data" else "model", each.location, revision)
            try:
                commit_by_repository[repository] = commit_by_repository.get(repository) or resolve_commit(repository)
            except CosmosError as error:
                raise type(error)(f"{pipeline.source_path}: stage {stage.name!r}: {error}") from error
            recipe = replace_setting(recipe, revision_key, commit_by_repository[repository])
        pinned_recipes[stage.name] = recipe
    return replace(pipeline, recipes=pinned_recipes)


def resolve_commit(repository: Repository, timeout_seconds: float = _HUB_TIMEOUT_SECONDS) -> str:
    """Return the commit of a revision on the Hub or, if the Hub does not respond in time, in the local cache. Raises
    `ModelError` or `DataError` if neither knows the revision."""
    repo_type, repo_name, revision = repository
    if _COMMIT_PATTERN.fullmatch(revision):
        return revision
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, constants  # slow import, which pipelines without Hub names do not need
    from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    hub_url = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    last_failure_time, failure_reason = failed_hub_requests.get(hub_url, (-_HUB_RETRY_DELAY_SECONDS, ""))
    if constants.HF_HUB_OFFLINE:
        failure_reason = "HF_HUB_OFFLINE is set"
    elif time.monotonic() - last_failure_time >= _HUB_RETRY_DELAY_SECONDS:
        hub_api = HfApi(endpoint=hub_url)
        try:
            get_repo_info = partial(hub_api.repo_info, repo_name, revision=revision, repo_type=repo_type)
            return str(call_with_timeout(timeout_seconds, get_repo_info).sha)
        except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
            raise _make_unknown_commit_error(repository, str(error)) from error
        except (HTTPError, OSError) as error:
            failure_reason = str(error)
            failed_hub_requests[hub_url] = (time.monotonic(), failure_reason)
    cache_folder = Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{repo_name.replace('/', '--')}"
    branch_ref_file = cache_folder / "refs" / revision
    if os.path.isfile(branch_ref_file):  # Path.is_file would raise an error for a name that is too long
        cached_commits = [branch_ref_file.read_text(encoding="utf-8").strip()]
    else:  # `datasets` stores no branch names, so take the only commit as that of the default branch
        snapshot_folders = (cache_folder / "snapshots").glob("*") if revision == _DEFAULT_BRANCH else ()
        cached_commits = [path.name for path in snapshot_folders]
    if len(cached_commits) == 1 and cached_commits[0]:
        return cached_commits[0]
    failure_reason = f"the Hub {hub_url} cannot be asked ({failure_reason}), and {cache_folder} does not say"
    raise _make_unknown_commit_error(repository, failure_reason)


def call_with_timeout(timeout_seconds: float, function: Callable[[], Any]) -> Any:
    """Call a function in a thread and return its result. The timeout of an HTTP client is not enough: it does not limit
    the resolution of host names, and starts again for each address. Raises `TimeoutError` if there is no result after
    `timeout_seconds`; the thread continues."""
    future: Future[Any] = Future()
    threading.Thread(target=complete_future, args=(future, function), name="within", daemon=True).start()
    try:
        return future.result(timeout_seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no response within {timeout_seconds:g} s") from error


def _make_unknown_commit_error(repository: Repository, failure_reason: str) -> CosmosError:
    repo_type, repo_name, revision = repository
    error_class, repo_kind = (ModelError, "model") if repo_type == "model" else (DataError, "data set")
    return error_class(
        f"the {repo_kind} {repo_name!r}: no folder here, and which commit {revision!r} is on the Hub cannot be found "
        f"out: {' '.join(failure_reason.split())}; check the name, download it, or write the commit as its revision"
    )


def replace_setting(settings: Any, dotted_key: str, new_setting: Any) -> Any:
    """Return a copy of nested settings with a new value at a dotted key, in which numbers are indices of lists."""
    field_name, _, subkey = dotted_key.partition(".")
    if isinstance(settings, tuple):
        i = int(field_name)
        return (*settings[:i], replace_setting(settings[i], subkey, new_setting), *settings[i + 1 :])
    field_value = replace_setting(getattr(settings, field_name), subkey, new_setting) if subkey else new_setting
    return settings.model_copy(update={field_name: field_value})
