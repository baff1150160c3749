"""Worker program of stage kind `sample`: complete prompts, score the completions, and write rows of kept completions.

<stage>/completions.jsonl   every prompt with all its completions, rewards and seeds; a resumed stage continues after
                            the last complete batch of prompts
<stage>/rows/train.jsonl    rows of the kept completions: conversations for SFT, or pairs for DPO
<stage>/pass_rates.jsonl    the pass rate of each prompt
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.dataset import PASS_RATES_FILE
from cosmos_core.data.chat import load_tool_schemas
from cosmos_core.data.kinds.prompts import Prompts, open_prompts
from cosmos_core.data.messages import add_system_turn, read_system_prompt
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.errors import DataError, Preempted, StageFailed
from cosmos_core.parallel.mesh import all_reduce_any, broadcast_object, is_first_rank, num_ranks
from cosmos_core.rewards.base import full_reward, invalid_scores_error
from cosmos_core.rollout.base import generate
from cosmos_core.run.files import raise_disk_full, replace_folder, write_text
from cosmos_core.run.stage import Stage
from cosmos_core.sample.records import (
    COMPLETIONS_FILE,
    SampledPrompt,
    append_records,
    make_prompt_record,
    parse_record,
    read_records,
)
from cosmos_core.sample.selection import compute_pass_rate, make_metrics, make_rows, select_completions
from cosmos_core.train.generation import open_engine
from cosmos_core.train.measure import open_rewards, score_on_first_rank
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.types import Group, Outcome, Prompt, Sampling

logger = logging.getLogger(__name__)

_ROWS_FOLDER = "rows"


def run(stage: Stage) -> Outcome:
    """Sample and score completions of all prompts, select some of them, and write these as rows for training.

    Raises:
        DataError: a prompt has images, or no completion is selected.
        RewardError: a reward cannot be loaded, or all rewards of the first batch are permanently invalid.
        StageFailed: all rewards are invalid.
        Preempted: a stop was requested; the completions of finished batches are kept.
    """
    prompts = open_prompts(stage.prepared_folder, "train")
    records = _complete_prompts(stage, prompts, make_training_sampling(stage.recipe))
    _check_rewards(stage.path / COMPLETIONS_FILE, records)
    sample_config, rewards = stage.recipe.sample, stage.recipe.training_rewards
    full_reward_fns = [partial(full_reward, rewards, prompts[record.id].source) for record in records]
    pass_rates = list(map(compute_pass_rate, records, full_reward_fns))
    completions_to_keep = [
        select_completions(record, sample_config.keep, pass_rate, stage.seed)
        for record, pass_rate in zip(records, pass_rates, strict=True)
    ]
    model_columns, train_policy = _make_model_columns(stage), stage.recipe.train.train_policy
    multi_turn_config = stage.recipe.rollout.multi_turn_config
    continues_last_turn = multi_turn_config.enable and multi_turn_config.continue_final_message
    tools = load_tool_schemas(multi_turn_config) if is_first_rank() else []  # only the first rank uses the tools
    rows: list[dict[str, Any]] = []
    for record, pass_rate, kept_completions in zip(records, pass_rates, completions_to_keep, strict=True):
        prompt = prompts[record.id]
        columns = {"prompt_id": record.id, "pass_rate": pass_rate, **make_tools_column(prompt, tools), **model_columns}
        turns = make_prompt_turns(prompt, train_policy.get_system_prompt(prompt.source))
        unfinished_turn = _pop_unfinished_turn(turns, prompt) if continues_last_turn else None
        rows += make_rows(record, turns, sample_config, kept_completions, columns, unfinished_turn)
    metrics = make_metrics(records, completions_to_keep, pass_rates, len(rows))
    if not rows:
        raise DataError(_make_nothing_kept_message(records, metrics, sample_config.min_margin))
    if is_first_rank():
        with raise_disk_full(stage.path):
            with replace_folder(stage.path / _ROWS_FOLDER) as folder:
                write_text(folder / "train.jsonl", _to_json_lines(rows))
            records_and_pass_rates = zip(records, pass_rates, strict=True)
            pass_rate_lines = [
                {"prompt": prompts[each.id].text, "pass_rate": pass_rate} for each, pass_rate in records_and_pass_rates
            ]
            write_text(stage.path / PASS_RATES_FILE, _to_json_lines(pass_rate_lines))
    logger.info("%d rows of %d prompts", len(rows), len(prompts))
    output_paths = (_ROWS_FOLDER, PASS_RATES_FILE, COMPLETIONS_FILE)
    return Outcome(outputs=output_paths, metrics=metrics, info={"data": _ROWS_FOLDER})


def _complete_prompts(stage: Stage, prompts: Prompts, sampling: Sampling) -> list[SampledPrompt]:
    """Return the records of all prompts with their scored completions: those that an earlier attempt of the stage has
    written, and those of the remaining prompts, which are completed and scored now."""
    if (image_prompt_id := next((item.id for item in prompts if item.images), None)) is not None:
        raise DataError(f"prompt {image_prompt_id} has images, and kind sample writes rows of text only")
    batch_size = stage.recipe.rollout.batch_size * num_ranks()
    json_records = broadcast_object(read_records(stage.path, batch_size, len(prompts)) if is_first_rank() else [])
    records = [parse_record(json_record) for json_record in json_records]
    if len(records) == len(prompts):
        return records
    with ExitStack() as exit_stack:
        complete_prompts = _open_sampler(stage, sampling, exit_stack)
        scorer = open_rewards(stage.recipe.reward_settings, stage.recipe.training_rewards, stage.progress.beat)
        score_fn = score_on_first_rank(exit_stack.enter_context(scorer))
        stage.progress.phase("generate")
        for batch_start in range(len(records), len(prompts), batch_size):
            scored_groups = score_fn(complete_prompts(prompts[batch_start : batch_start + batch_size]))
            scores = [item for group in scored_groups for item in group.scores]
            if not records and all(item.value is None and item.is_permanent_error for item in scores):
                raise invalid_scores_error(f"all {len(scores)} rewards of the first batch are invalid", scores)
            new_records = [make_prompt_record(group, sampling) for group in scored_groups]
            if is_first_rank():
                append_records(stage.path, new_records)
            records += new_records
            stage.progress.step(len(records), len(prompts))
            if len(records) < len(prompts) and all_reduce_any(stage.stop_requested):
                raise Preempted(f"stopped; the completions of {len(records)} prompts are kept")
    return records


def _open_sampler(stage: Stage, sampling: Sampling, exit_stack: ExitStack) -> Callable[[Sequence[Prompt]], list[Group]]:
    if stage.recipe.sample.endpoint:
        from cosmos_core.sample.endpoint import EndpointClient  # imported late, since the package openai is optional

        endpoint_client = EndpointClient(stage, sampling)
        exit_stack.callback(endpoint_client.close)

        def complete_prompts(prompts: Sequence[Prompt]) -> list[Group]:
            policy = stage.recipe.train.train_policy
            conversations = [(each, make_prompt_turns(each, policy.get_system_prompt(each.source))) for each in prompts]
            return broadcast_object(endpoint_client.complete_prompts(conversations) if is_first_rank() else [])

        return complete_prompts
    stage.progress.phase("load")
    engine = open_engine(stage, stage.progress.beat)
    exit_stack.callback(engine.close)
    engine.wake()
    return partial(generate, engine, sampling=sampling, step=0)


def make_prompt_turns(prompt: Prompt, system_prompt: str) -> list[dict[str, Any]]:
    """Return the turns of a prompt's conversation; `system_prompt` is inserted if the prompt has no system turn."""
    prompt_content = prompt.metadata.get("prompt", prompt.text)
    turns = [{"role": "user", "content": prompt_content}] if isinstance(prompt_content, str) else [*prompt_content]
    return add_system_turn(turns, read_system_prompt(prompt.metadata) or system_prompt)


def _pop_unfinished_turn(turns: list[dict[str, Any]], prompt: Prompt) -> dict[str, Any] | None:
    """Remove and return the assistant turn at the end of `turns`, which completions of the prompt continue. Its content
    is returned as the chat template renders it in `prompt`. Return None if the last turn is not the assistant's."""
    if turns[-1]["role"] != "assistant":
        return None
    turn_content = turns[-1]["content"]
    return {**turns.pop(), "content": turn_content if prompt.text.endswith(turn_content) else turn_content.rstrip()}


def make_tools_column(prompt: Prompt, recipe_tools: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """Return the column `tools` of a row, as JSON, with the tools in the metadata of `prompt` or, if it has none,
    `recipe_tools`. Return an empty dictionary if there are no tools."""
    tools = read_tools(prompt.metadata, f"prompt {prompt.id}") or recipe_tools
    return {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}


def _make_model_columns(stage: Stage) -> dict[str, str]:
    """Return the columns `model` and `model_digest` of each written row: name and digest of the model that generated
    the completions."""
    if stage.recipe.sample.endpoint:
        return {"model": stage.recipe.sample.endpoint_model, "model_digest": ""}
    if (source_stage := referenced_stage(stage.config.model)) is not None:
        return {"model": stage.config.model, "model_digest": stage.inputs[source_stage]["digest"]}
    source_digest_by_kind = {source.kind: source.digest for source in reversed(stage.sources)}
    model_name = stage.config.model or stage.recipe.policy.model_name_or_path
    return {"model": model_name, "model_digest": source_digest_by_kind.get("model", "")}


def _check_rewards(records_file: Path, records: Sequence[SampledPrompt]) -> None:
    """Raise StageFailed if no completion has a valid reward. The file of the records is then removed, so that the next
    attempt of the stage generates and scores all completions again."""
    candidates = [candidate for record in records for candidate in record.candidates]
    invalid_candidates = [candidate for candidate in candidates if candidate.reward is None]
    if len(invalid_candidates) < len(candidates):
        if invalid_candidates:
            logger.warning(
                "%d of %d rewards are invalid, and these completions are left out; the first: %s",
                len(invalid_candidates), len(candidates), invalid_candidates[0].error,
            )  # fmt: skip
        return
    if is_first_rank():
        records_file.unlink(missing_ok=True)
    raise StageFailed(f"all {len(candidates)} rewards are invalid; the first: {candidates[0].error}")


def _make_nothing_kept_message(records: Sequence[SampledPrompt], metrics: dict[str, float], min_margin: float) -> str:
    if num_prompts := metrics["sample/prompts_kept"]:
        return (
            f"sample.pairs leaves no row of {num_prompts:.0f} prompts: in none do the best and the worst reward differ "
            f"by more than sample.min_margin = {min_margin:g}; lower it, or raise rollout.n_generation"
        )
    highest_reward = max(each.reward for record in records for each in record.candidates if each.reward is not None)
    return (
        f"sample.keep leaves no row of {metrics['sample/completions']:.0f} completions: the highest reward is "
        f"{highest_reward:g}, and {metrics.get('sample/truncated', 0):.0%} are truncated; lower "
        "sample.keep.min_reward, or raise rollout.n_generation or rollout.max_response_length"
    )


def _to_json_lines(json_objects: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(json_object, ensure_ascii=False) + "\n" for json_object in json_objects)
