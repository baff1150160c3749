"""Run `cosmos check`: validate models, tokenizers, all rows, masks, lengths and rewards in workers before a run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_core.config.capabilities import MODEL_REFERENCE_KEYS
from cosmos_core.config.compose import Pipeline, stage_references
from cosmos_core.config.inherited import collect_chat_templates
from cosmos_core.config.inputs import is_s3_url, referenced_stage, stage_inputs
from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.modality import DATA_FILE_PATTERNS
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import StageContext
from cosmos_core.errors import DataError, StageFailed
from cosmos_core.launch.managed_service import load_named_service
from cosmos_core.launch.processes import make_check_folder, remove_orphans
from cosmos_core.launch.worker import AttemptSettings, register_active_run, run_attempt
from cosmos_core.run.content import create_linked_model_folder, list_data_files
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.files import write_json
from cosmos_core.run.fingerprint import compute_fingerprint, count_worker_threads
from cosmos_core.run.manifest import Result
from cosmos_core.run.plan import get_reuse_folder
from cosmos_core.run.remote import download_inputs, download_url
from cosmos_core.run.stage import CHECKED_PROMPTS_FILE, Stage
from cosmos_core.types import JsonValue

_MAX_QUICK_CHECK_BYTES = 32 << 20


def check_stages_in_worker(pipeline: Pipeline, num_shown_rows: int = 0) -> Iterator[str]:
    """Check each stage in turn; yield a line with the result, or with the reason why the stage cannot be checked yet,
    and lines with the first `num_shown_rows` rows, split into spans of tokens. Raises the first error in the input as
    `ConfigError`, `DataError`, `ModelError` or `RewardError`, and `StageFailed` if a check crashed."""
    prompts_by_stage: dict[str | None, JsonValue] = {}
    chat_templates = collect_chat_templates(pipeline)
    for stage in pipeline.stages:
        if not pipeline.stage_kind(stage).reads_model:
            continue
        base_stage, data_stage_name = _find_base_stage(pipeline, stage), referenced_stage(stage.data)
        reference_pairs = stage_references(stage, pipeline.recipes[stage.name], pipeline.stage_kind(stage))
        row_stage_names = [referenced_stage(value) for key, value in reference_pairs if key not in MODEL_REFERENCE_KEYS]
        kind_by_row_stage = {name: pipeline.stage_kind(pipeline.stage(name)) for name in filter(None, row_stage_names)}
        unknown_row_stages = [name for name, row_kind in kind_by_row_stage.items() if row_kind.makes != "data"]
        if base_stage is None or unknown_row_stages:
            unfinished_stage_name = referenced_stage(stage.model) if base_stage is None else unknown_row_stages[0]
            yield f"{stage.name}: not looked at: it starts from what stage {unfinished_stage_name!r} will make"
            continue
        data, prompts = "" if data_stage_name else stage.data, prompts_by_stage.get(data_stage_name)
        model, base_model_note, base_model_recipe = "", "", None
        if base_stage is not stage:
            base_policy, recipe = pipeline.recipes[base_stage.name].policy, pipeline.recipes[stage.name]
            base_policy_fields = {name: getattr(base_policy, name) for name in ("model_name_or_path", "model_revision")}
            base_policy_fields["chat_template"] = chat_templates[stage.name]
            base_model_recipe = recipe.copy_with(policy=recipe.policy.copy_with(**base_policy_fields))
            model = base_stage.model or base_policy.model_name_or_path
            base_model_note = f" (looked at with the model that stage {base_stage.name!r} starts from)"
        check_program = pipeline.stage_kind(stage).check
        check_result = run_check(
            pipeline, stage, check_program, model=model, data=data, recipe=base_model_recipe, prompts=prompts
        )
        prompts_by_stage[stage.name] = check_result["info"].get("prompts")
        check_downstream_stages(pipeline, stage.name, check_result["info"])
        yield f"{stage.name}: {check_result['info']['found']}{base_model_note}"
        num_printed_rows = 0
        for line in check_result["info"].get("shown", []):
            num_printed_rows += not line.startswith(" ")
            if num_printed_rows <= num_shown_rows:
                yield line


def check_downstream_stages(pipeline: Pipeline, data_stage_name: str, check_info: dict[str, JsonValue]) -> None:
    """Check that the stages that read rows from the stage `data_stage_name` can use these rows; `check_info` is the
    result of the check of that stage. Raises `DataError` if a stage needs more rows, held-out rows or other limits on
    the size of images, or cannot read the images in the rows."""
    for stage in (each for each in pipeline.stages if referenced_stage(each.data) == data_stage_name):
        stage_kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
        rejection_reason = check_info.get("too_few") if stage_kind.trains_model else None
        if StageContext(recipe, stage_kind).measures_held_out_rows:
            rejection_reason = rejection_reason or check_info.get("no_held_out")
        if check_info.get("has_images"):
            rejection_reason = rejection_reason or recipe.explain_missing_image_support(stage_kind)
            prompts: Any = check_info.get("prompts") or {}
            if stage_kind.table == "sample" and any(prompt["images"] for prompt in prompts.get("train") or ()):
                rejection_reason = "its prompts have images, and kind sample writes rows of text only"
            pixel_limits, row_limits = (_find_pixel_limits(pipeline, name) for name in (stage.name, data_stage_name))
            if pixel_limits != row_limits and not rejection_reason:
                rejection_reason = (
                    f"custom.vision here and in stages before gives {pixel_limits}, and in its rows {row_limits}; set "
                    "the same in the recipes of all these stages"
                )
        if rejection_reason:
            raise DataError(f"{pipeline.source_path}: stage {stage.name!r}: {rejection_reason}")


def _find_pixel_limits(pipeline: Pipeline, name: str) -> dict[str, int]:
    """Return the `min_pixels` and `max_pixels` with which a stage reads images: its own settings and, for those that it
    does not set, the settings of the stage that makes its model."""
    initial_stage_name = referenced_stage(pipeline.initial_model(pipeline.stage(name)))
    inherited_pixel_limits = _find_pixel_limits(pipeline, initial_stage_name) if initial_stage_name else {}
    return inherited_pixel_limits | dict(image_settings(pipeline.recipes[name]).pixels)


def check_first_rows(pipeline: Pipeline) -> None:
    """Check the first rows of each stage that reads small local files or rows of a row generator, in a few seconds.
    Raises `DataError` if preparing the rows of a stage would fail; the message names the stage."""
    for stage in pipeline.stages:
        if pipeline.stage_kind(stage).reads_data != "source" or referenced_stage(stage.data) is not None:
            continue
        inputs = pipeline.inputs(stage)
        decodes_media = pipeline.recipes[stage.name].policy.modality.is_media_decoded_by_checks
        if decodes_media or any(each.role == "data_code" for each in inputs) or _has_prepared_rows(pipeline, stage):
            continue
        data_inputs = [each for each in inputs if each.role == "data"]
        are_inputs_local = {each.location_type for each in data_inputs} <= {"folder", "literal"}
        data_paths = [Path(each.location) for each in data_inputs if each.location_type == "folder"]
        row_file_lists = [list_data_files(path, DATA_FILE_PATTERNS) if path.is_dir() else [path] for path in data_paths]
        if not are_inputs_local or any(
            sum(f.stat().st_size for f in files) > _MAX_QUICK_CHECK_BYTES for files in row_file_lists
        ):
            continue
        try:
            run_check(pipeline, stage, "cosmos_core.data.quick_check:run", data=stage.data)
        except DataError as error:
            raise DataError(f"{pipeline.source_path}: stage {stage.name!r}: {error}") from error
        except StageFailed:  # ignore a crash of the check, because it does not mean that the rows are wrong
            continue


def _has_prepared_rows(pipeline: Pipeline, stage: StageConfig) -> bool:
    """Return True if a stage has no upstream stages and has already finished, in any run, with its present rows and
    settings."""
    if stage.after:
        return False
    output_dir = pipeline.output_dir.expanduser().absolute()
    stage_kind, digest_cache = pipeline.stage_kind(stage), shared_digest_cache(output_dir)
    fingerprint = compute_fingerprint(pipeline, stage, stage_kind, {}, digest_cache)
    return get_reuse_folder(output_dir, fingerprint.value).exists()


def run_check(  # noqa: PLR0913 - a stage, and the inputs that differ between callers
    pipeline: Pipeline,
    stage: StageConfig,
    check_program: str,
    *,
    model: str = "",
    data: str = "",
    recipe: Recipe | None = None,
    prompts: JsonValue = None,
) -> Result:
    """Check a stage with the program `check_program` in a worker with a temporary folder; return the result. `model`,
    `data` and `recipe` replace those of the stage unless they are empty. `prompts` holds the first prompts of the
    rows that another stage prepares for this stage. Raises the errors of `check_stages_in_worker`."""
    if recipe is not None:
        pipeline = replace(pipeline, recipes=pipeline.recipes | {stage.name: recipe})
    stage, recipe = download_inputs(pipeline, stage, pipeline.output_dir, lambda: None)
    data, model = download_url(data, pipeline.output_dir), download_url(model, pipeline.output_dir)
    stage_kind = pipeline.stage_kind(stage)
    remove_orphans()
    with register_active_run(), make_check_folder() as temporary_folder:
        # Use a subfolder as folder of the run, because the caches that runs share are written to its parent.
        stage_path = temporary_folder / "run" / "stages" / stage.name
        stage_path.mkdir(parents=True)
        if prompts:
            write_json(stage_path / CHECKED_PROMPTS_FILE, prompts)
        model = model or stage.model or recipe.policy.model_name_or_path
        model = create_linked_model_folder(stage_inputs(stage, recipe, stage_kind), stage_path / "model") or model
        Stage(
            path=stage_path, config=stage, recipe=recipe, model=model, data=Path(data) if data else None, inputs={},
            fingerprint="look", kind=replace(stage_kind, entry=check_program),
        ).save()  # fmt: skip
        service_variables, config = load_named_service(stage.reward_service), pipeline.config
        attempt_settings = AttemptSettings(
            stage_path=stage_path, python_path=config.python, num_threads=count_worker_threads(pipeline),
            grace_seconds=config.grace_seconds, environment=service_variables, secret_vars=tuple(service_variables),
        )  # fmt: skip
        try:
            return run_attempt(attempt_settings)
        except StageFailed as error:  # quote the worker's log, because it is deleted with the temporary folder
            failure_text, _, log_path = str(error).partition("; log: ")
            log_lines = Path(log_path).read_text(encoding="utf-8", errors="replace").split("\n") if log_path else []
            if last_log_line := next(filter(str.strip, reversed(log_lines)), ""):
                raise StageFailed(f"{failure_text}; its log ends with: {last_log_line.strip()[:300]}") from error
            raise


def _find_base_stage(pipeline: Pipeline, stage: StageConfig) -> StageConfig | None:
    """Return the first stage of the chain of stages through which `stage` gets its model: `stage` can be checked with
    the model from which that first stage starts. Return None if a stage of the chain may change the architecture, or if
    the model of another stage is on S3 or has its weights outside its folder."""
    original_stage = stage
    while upstream_name := referenced_stage(stage.model):
        stage = pipeline.stage(upstream_name)
        if pipeline.stage_kind(stage).makes != "model" or not pipeline.stage_kind(stage).reads_model:
            return None
    policy = pipeline.recipes[stage.name].policy
    is_local_model = not policy.model_safetensor_path and not is_s3_url(stage.model or policy.model_name_or_path)
    return stage if stage is original_stage or is_local_model else None
