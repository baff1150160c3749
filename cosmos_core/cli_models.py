"""`cosmos promote` and `rollback`, which select the version of a model that is published at a publication target, and
`cosmos check-model`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cosmos_core.errors import ConfigError, DamagedRecord
from cosmos_core.imports import make_python_command

TargetArgument = Annotated[str, typer.Argument(help="A folder, s3://BUCKET/PREFIX, mlflow://MODEL or your own class.")]


def promote(
    target: TargetArgument,
    version: Annotated[str, typer.Argument(help="Version to publish; empty: list the stored versions.")] = "",
) -> None:
    """Publish a stored version of a model. Without a version, list the versions that are stored at the target from old
    to new, and mark the published one."""
    target_store = _open_publication_target(target)
    version_history = target_store.history()
    versions = target_store.versions() if hasattr(target_store, "versions") else list(dict.fromkeys(version_history))
    if not version:
        listed_versions = list(dict.fromkeys([*(name for name in version_history if name not in versions), *versions]))
        if not listed_versions:
            raise ConfigError(f"{target}: nothing was published; give the target of an upload stage")
        for name in listed_versions:
            published_mark = "  (published)" if [name] == version_history[-1:] else ""
            typer.echo(f"{name}  {_format_metrics(target_store, name)}".rstrip() + published_mark)
        return
    if version not in versions:
        raise ConfigError(f"{target}: there is no version {version!r}; there are: {', '.join(versions) or 'none'}")
    target_store.point_to(version)
    typer.echo(f"published: {target_store.where(version)}")


def _format_metrics(target_store: Any, version: str) -> str:
    try:
        metrics = target_store.record_of(version)["metrics"].items()
    except DamagedRecord:
        return "gone"
    numeric_metrics = [(metric_name, value) for metric_name, value in sorted(metrics) if isinstance(value, int | float)]
    return ", ".join(f"{metric_name} = {value:.4g}" for metric_name, value in numeric_metrics[:5])


def rollback(target: TargetArgument) -> None:
    """Publish the version before the current one again. The current version stays stored."""
    target_store = _open_publication_target(target)
    version_history = target_store.history()
    if len(version_history) < 2:
        problem_text = f"only {version_history[0]!r} was published" if version_history else "nothing was published"
        raise ConfigError(f"{target}: {problem_text}, there is nothing to go back to")
    target_store.point_to(version_history[-2], version_history[:-1])
    typer.echo(f"published: {target_store.where(version_history[-2])}; before: {version_history[-1]}")


def _open_publication_target(target: str) -> Any:
    from cosmos_core.upload.base import open_target
    from tasks.credentials import set_command_credentials

    if "://" in target:
        set_command_credentials(None)
    target_store = open_target(target)
    if not all(hasattr(target_store, name) for name in ("history", "record_of", "where", "point_to")):
        raise ConfigError(f"{target}: this target keeps no versions that a pointer could go back to")
    return target_store


def check_model(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a diffusion pipeline.")],
    model_class: Annotated[
        str, typer.Option("--class", help="Class of your own model family, path/file.py:Class.")
    ] = "",
) -> None:
    """Check a diffusion model before training. Family, noise, text, latents, predictions and adapter are checked."""
    import subprocess

    check_command = [*make_python_command(), "-m", "cosmos_core.models.check_model", model]
    completed_process = subprocess.run(check_command + (["--class", model_class] if model_class else []), check=False)
    raise typer.Exit(completed_process.returncode)
