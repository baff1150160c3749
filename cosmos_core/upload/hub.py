"""Publication target `hub`: the Hugging Face Hub, `hub://OWNER/NAME` or `hub://OWNER/NAME@BRANCH`; without an owner,
the account of the token.

A new repository is private. A version is one atomic commit and a tag of the same name; the tag is set after the stored
files were compared with the source. `HF_ENDPOINT` selects the Hub, `HF_TOKEN` the account.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, DamagedRecord, UploadError
from cosmos_core.run.hub import call_with_timeout
from cosmos_core.upload.base import RECORD_FILE, is_publication_record

_MAX_ATTEMPTS = 5
_MAX_RETRY_DELAY_SECONDS = 300.0
_SLEEP_INTERVAL_SECONDS = 0.5
_CHECK_TIMEOUT_SECONDS = 8.0
_ACCESS_DENIED_STATUSES = {401, 403}
_TRANSIENT_STATUSES = {408, 409, 412, 429, 500, 502, 503, 504}
_HUB_MANAGED_FILES = {".gitattributes"}
_COMMIT_TITLE_PREFIX = "Publish "
_MODEL_CARD_FILE = "README.md"


class HubTarget:
    """Publication target that stores versions as commits on one branch of a repository on the Hugging Face Hub."""

    def __init__(self, location: str, *, retry_wait_seconds: float = 2.0) -> None:
        repository_name, _, self.branch = location.partition("@")
        if not repository_name or repository_name.count("/") > 1:
            raise ConfigError(f"hub://{location} names no repository; write hub://OWNER/NAME")
        self._repository_name = repository_name.strip("/")
        self._retry_wait_seconds = retry_wait_seconds
        self._check_cancellation: Callable[[], None] = lambda: None

    def check(self) -> None:
        """Raise ConfigError or UploadError for an invalid name or token, or if the Hub cannot be reached."""
        from huggingface_hub.utils import validate_repo_id

        with self._translate_errors():
            validate_repo_id(self._repository_name)
            whoami_request = partial(self._retry_call, self.hub_api.whoami, _CHECK_TIMEOUT_SECONDS / 2)
            account_info: dict[str, Any] = call_with_timeout(_CHECK_TIMEOUT_SECONDS, whoami_request)
        access_token = (account_info.get("auth") or {}).get("accessToken") or {}
        if access_token.get("role") == "read":
            raise ConfigError(f"hub://{self._repository_name}: HF_TOKEN may only read; set it to one that may write")
        if owner := _find_owner_without_write_access(self._repository_name, account_info, access_token):
            denial_text = f"HF_TOKEN may not write to repositories of {owner!r}"
            raise ConfigError(f"hub://{self._repository_name}: {denial_text}; set one that may, or name another owner")

    def prepare_upload(self, folder: Path, check_cancellation: Callable[[], None]) -> None:
        """Set the function `check_cancellation`, which is called before each request and the commit, and can raise an
        error to end the publication. No journal is kept in `folder`, because the Hub skips files that it has."""
        self._check_cancellation = check_cancellation

    @cached_property
    def hub_api(self) -> Any:
        """Return the client of the Hugging Face Hub; raise ConfigError if `HF_TOKEN` is not set."""
        for variable_name in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable_name, "1")
        from huggingface_hub import HfApi  # the import takes half a second

        access_token = os.environ.get("HF_TOKEN", "").strip()  # a mounted secret may end with a line break
        if not access_token:
            raise ConfigError(f"hub://{self._repository_name}: no token; set HF_TOKEN to one that may write")
        return HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None, token=access_token)

    @cached_property
    def repository(self) -> str:
        """Return the name of the repository on the Hub, `OWNER/NAME`; without an owner in the target, the owner is the
        account of the token."""
        if "/" in self._repository_name:
            return self._repository_name
        return f"{self._retry_call(self.hub_api.whoami)['name']}/{self._repository_name}"

    def where(self, version: str) -> str:
        """Return the address of a version, `hub://OWNER/NAME@TAG`."""
        return f"hub://{self.repository}@{version}"

    def published(self) -> dict[str, Any] | None:
        with self._translate_errors():
            return self._retry_call(lambda: self._read_record(self.branch or "main"))

    def record_of(self, version: str) -> dict[str, Any]:
        """Return the publication record of the model version `version`; raise DamagedRecord if the record is missing
        or damaged."""
        with self._translate_errors():
            if record := self._retry_call(lambda: self._read_record(version)):
                return dict(record)
        raise DamagedRecord(f"{self.where(version)}: {RECORD_FILE} is missing; publish again")

    def history(self) -> list[str]:
        """Return the model versions that were published on the target's branch, the current version last."""
        list_commits = partial(self.hub_api.list_repo_commits, self.repository, revision=self.branch or "main")
        with self._translate_errors():
            commit_titles = [commit.title for commit in reversed(self._retry_call(list_commits))]
        return [t.removeprefix(_COMMIT_TITLE_PREFIX) for t in commit_titles if t.startswith(_COMMIT_TITLE_PREFIX)]

    def damage(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Return a message about the first file of `record` that is missing on the Hub or differs from `folder`; empty
        if all files agree. The files at the version's tag are compared, and the files on the branch too if the version
        is the current one."""
        branch = self.branch or "main"
        with self._translate_errors():
            current_record = self._retry_call(lambda: self._read_record(branch)) or {}
            revisions = (version, branch) if current_record.get("version", version) == version else (version,)
            damages = [self._retry_call(partial(self._find_damaged_file, folder, record, each)) for each in revisions]
        return next(filter(None, damages), "")

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        branch = self.branch or "main"
        with self._translate_errors():
            self._retry_call(lambda: self.hub_api.create_repo(self.repository, private=True, exist_ok=True))
            if branch != "main":
                self._retry_call(lambda: self.hub_api.create_branch(self.repository, branch=branch, exist_ok=True))
            # Committing again after a lost response is safe, because `_commit_files` first compares the stored files.
            commit_id = self._retry_call(lambda: self._commit_files(folder, version, record, branch))
        with self._translate_errors(f"{version} was committed to {branch}, and has no tag; resume"):
            # Compare the commit, not the branch, which another publication may have moved meanwhile.
            if damage_message := self._retry_call(lambda: self._find_damaged_file(folder, record, commit_id)):
                raise UploadError(f"hub://{self.repository}: {damage_message} after the commit")
            create_tag = partial(self.hub_api.create_tag, self.repository, tag=version, exist_ok=True)
            self._retry_call(partial(create_tag, revision=commit_id))
            if self._retry_call(lambda: self._find_damaged_file(folder, record, version)):
                # Move an existing tag of this version that refers to a commit with other files.
                self._retry_call(partial(self.hub_api.delete_tag, self.repository, tag=version))
                self._retry_call(partial(create_tag, revision=commit_id))
        return self.where(version)

    def _commit_files(self, folder: Path, version: str, record: dict[str, Any], branch: str) -> str:
        """Return the id of a commit with the files of a version: the newest commit of the branch if it has this version
        with intact files, otherwise a new commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        try:
            stored_record = self._read_record(branch) or {}
        except DamagedRecord:
            stored_record = {}  # the commit replaces the damaged record
        is_version_stored = stored_record.get("version") == version and stored_record["files"] == record["files"]
        branch_info = self.hub_api.repo_info(self.repository, revision=branch)
        if is_version_stored and not self._find_damaged_file(folder, record, branch_info.sha):
            return str(branch_info.sha)
        file_names = [name for name in record["files"] if name != _MODEL_CARD_FILE]
        operations: list[Any] = [CommitOperationAdd(name, str(folder / name)) for name in file_names]
        try:
            self.hub_api.preupload_lfs_files(self.repository, operations, revision=branch)
        except (RuntimeError, PermissionError, TimeoutError) as error:
            # The transfer of a file by LFS or Xet failed: raise an error after which `_retry_call` tries again.
            raise ConnectionError(str(error)) from error
        self._check_cancellation()  # last chance to stop, because the commit publishes the version
        model_card = _render_model_card(folder / _MODEL_CARD_FILE, record)
        operations.append(CommitOperationAdd(_MODEL_CARD_FILE, model_card.encode()))
        operations.append(CommitOperationAdd(RECORD_FILE, json.dumps(record, indent=1).encode()))
        published_paths = {operation.path_in_repo for operation in operations} | _HUB_MANAGED_FILES
        stale_files = [file.rfilename for file in branch_info.siblings or () if file.rfilename not in published_paths]
        operations += [CommitOperationDelete(name) for name in stale_files]
        create_commit = partial(self.hub_api.create_commit, self.repository, operations, parent_commit=branch_info.sha)
        return str(create_commit(commit_message=f"{_COMMIT_TITLE_PREFIX}{version}", revision=branch).oid)

    def _find_damaged_file(self, folder: Path, record: dict[str, Any], revision: str) -> str:
        """Return a message about the first file of `record` that is missing on the Hub or has another digest there: the
        SHA-256 of a large file, the git object id of a small file. Empty if all files agree."""
        from huggingface_hub.errors import RevisionNotFoundError
        from huggingface_hub.utils.sha import git_hash

        try:
            repo_info = self.hub_api.repo_info(self.repository, revision=revision, files_metadata=True)
        except RevisionNotFoundError:
            return f"the revision {revision} is missing"
        file_by_name = {file.rfilename: file for file in repo_info.siblings or ()}
        for name, sha256 in record["files"].items():
            if name == _MODEL_CARD_FILE:
                continue
            file = file_by_name.get(name)
            is_file_intact = file is not None and (
                file.lfs.sha256 == sha256 if file.lfs else file.blob_id == git_hash((folder / name).read_bytes())
            )
            if not is_file_intact:
                return f"{name} is missing or altered"
        return ""

    def _read_record(self, revision: str) -> dict[str, Any] | None:
        from huggingface_hub import errors, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repository, RECORD_FILE, revision=revision, endpoint=self.hub_api.endpoint)
        try:
            response = get_session().get(url, headers=build_hf_headers(token=self.hub_api.token), follow_redirects=True)
            hf_raise_for_status(response)
        except errors.GatedRepoError:
            # Do not treat this as a missing repository: the repository exists, but the token may not read it.
            raise
        except (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            return None
        record = None
        with suppress(ValueError):
            record = response.json()
        if not is_publication_record(record):
            raise DamagedRecord(f"hub://{self.repository}: {RECORD_FILE} is damaged; publish again, or remove it there")
        return dict(record)

    def _retry_call(self, hub_function: Callable[[], Any], max_seconds: float = math.inf) -> Any:
        """Call a function until it succeeds, at most five times; no attempt starts more than `max_seconds` after the
        first one. Between attempts, wait as long as a busy Hub requests."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        start_time = time.monotonic()
        for attempt in itertools.count():
            self._check_cancellation()
            wait_seconds = self._retry_wait_seconds * 2.0**attempt
            is_last_attempt = attempt == _MAX_ATTEMPTS - 1 or time.monotonic() + wait_seconds - start_time > max_seconds
            try:
                return hub_function()
            except HfHubHTTPError as error:
                if is_last_attempt or _get_status_code(error) not in _TRANSIENT_STATUSES:
                    raise
                retry_after = error.response.headers.get("Retry-After", "")
                wait_seconds = float(retry_after) if retry_after.isdigit() else wait_seconds
            except (HTTPError, ConnectionError):
                if is_last_attempt:
                    raise
            # While waiting for a busy Hub, call `_check_cancellation`, which raises an error if the run is to stop.
            wait_end_time = time.monotonic() + min(wait_seconds, _MAX_RETRY_DELAY_SECONDS)
            while (seconds_left := wait_end_time - time.monotonic()) > 0:
                self._check_cancellation()
                time.sleep(min(seconds_left, _SLEEP_INTERVAL_SECONDS))

    @contextmanager
    def _translate_errors(self, consequence: str = "nothing was published") -> Iterator[None]:
        """Convert errors of the Hub's client in the `with` block into ConfigError or UploadError with a message of one
        line. `consequence` says in the message of an UploadError what the error means for the publication."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        target_url, hub = f"hub://{self._repository_name}", f"the Hub {self.hub_api.endpoint}"
        try:
            yield
        except HfHubHTTPError as error:
            status_code = _get_status_code(error)
            # The Hub also refuses what a plan does not include, such as private storage, and says so in the reason.
            reason = f"{status_code}: {' '.join(error.server_message.split())}" if error.server_message else status_code
            if status_code in _ACCESS_DENIED_STATUSES:
                access_problem = f"{hub} refuses the token ({reason}); set HF_TOKEN to one that may write there"
                raise ConfigError(f"{target_url}: {access_problem}") from error
            raise UploadError(f"{target_url}: {hub} responds with {reason}; {consequence}") from error
        except (HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError) as error:
            raise UploadError(f"{target_url}: {hub}: {' '.join(str(error).split())}; {consequence}") from error
        except ValueError as error:  # the library refuses a name, a path or the metadata of the model card
            raise ConfigError(f"{target_url}: {' '.join(str(error).split())}") from error


def _find_owner_without_write_access(name: str, account: dict[str, Any], access_token: dict[str, Any]) -> str:
    """Return the owner of the repository `name` if the Hub's information about the account and the access token says
    that the token may not write to repositories of this owner; otherwise an empty string."""
    owner = name.rpartition("/")[0] or str(account.get("name"))
    if (scopes := (access_token.get("fineGrained") or {}).get("scoped")) is not None:
        writable_scopes = [scope for scope in scopes if "repo.write" in scope.get("permissions", ())]
        writable_entities = [scope.get("entity") or {} for scope in writable_scopes]
        if any(entity.get("type") not in {"user", "org"} for entity in writable_entities):
            return ""  # the token may write to single repositories, which the Hub names by id
    elif (organisations := account.get("orgs")) is not None:
        writable_entities = [account, *organisations]
    else:
        return ""
    writable_owners = {str(entity.get("name")).lower() for entity in writable_entities}
    return "" if owner.lower() in writable_owners else owner


def _get_status_code(error: Any) -> int:
    return error.response.status_code if error.response is not None else 0


def _render_model_card(card_file: Path, record: dict[str, Any]) -> str:
    """Return the text of the model card in `card_file` (a minimal one if the file is missing), extended by the
    published version of the model, the metrics of the version and the digests of its inputs."""
    library = "diffusers" if "model_index.json" in record["files"] else "transformers"
    empty_card = f"---\nlibrary_name: {library}\n---"
    card_text = card_file.read_text(encoding="utf-8").rstrip() if card_file.is_file() else empty_card
    card_lines = [card_text, "", f"## Published as `{record.get('version', '')}`", ""]
    card_lines += [f"- from stage `{name}`: `{digest}`" for name, digest in sorted(record.get("inputs", {}).items())]
    if metrics := record["metrics"]:
        card_lines += ["", "| metric | value |", "|---|---|"]
        card_lines += [f"| {metric_name} | {value:.4g} |" for metric_name, value in sorted(metrics.items())]
    return "\n".join(card_lines) + "\n"
