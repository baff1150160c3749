"""Set the names and tags by which users find flow runs and task runs in Prefect's UI: pipeline, run and user."""

import getpass
import os
from functools import cache
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

_USER_TAG_PREFIX = "cosmos-user:"


def flow_run_name() -> str:
    """Return the initial name of a flow run: the name of the flow, followed by its config or stage. A name that a
    person has set, for example with `prefect deployment run --flow-run-name`, is kept."""
    return _make_initial_flow_run_name() if is_generated_name(str(flow_run.name)) else str(flow_run.name)


def is_generated_name(name: str) -> bool:
    """Return True if `name` is a random flow run name that Prefect has generated: two words of its word list."""
    slug_parts = name.split("-")
    return len(slug_parts) == 2 and _load_word_list().issuperset(slug_parts)


def label_flow_run(pipeline_name: str, run_id: str, *name_suffixes: str) -> list[str]:
    """Add the tags of a run to the current flow run and return them. Unless a person has named the flow run, rename it
    to the pipeline, the run and `name_suffixes`. An existing tag `cosmos-user:NAME` is kept."""
    with get_client(sync_client=True) as client:
        prefect_run = client.read_flow_run(UUID(flow_run.id))
        user_tags = [tag for tag in prefect_run.tags if tag.startswith(_USER_TAG_PREFIX)]
        user_tags = user_tags or [f"{_USER_TAG_PREFIX}{get_user_name()}"]
        run_tags = [f"cosmos-pipeline:{pipeline_name}", f"cosmos-run:{run_id}", *user_tags]
        has_given_name = not is_generated_name(prefect_run.name) and prefect_run.name != _make_initial_flow_run_name()
        run_title = prefect_run.name if has_given_name else " ".join((pipeline_name, run_id, *name_suffixes))
        client.update_flow_run(prefect_run.id, name=run_title, tags=list(dict.fromkeys([*prefect_run.tags, *run_tags])))
    return run_tags


def get_user_name() -> str:
    """Return the name of the user of this process, or the user's numeric id if the user has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may be missing from /etc/passwd
        return str(os.getuid())


def _make_initial_flow_run_name() -> str:
    flow_parameters: dict[str, Any] = flow_run.parameters
    return f"{flow_run.flow_name} {flow_parameters.get('config') or flow_parameters.get('name')}"


@cache
def _load_word_list() -> frozenset[str]:
    from coolname.data import config  # Prefect generates names from the words of this package

    word_lists: dict[str, Any] = config
    return frozenset(word for entry in word_lists.values() for word in entry.get("words", ()))
