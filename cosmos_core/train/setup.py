"""Put a training together from a stage: model, data, engine, rewards, algorithm, checkpoints; then the loop, then the
hand-over.

The hand-over is the model in full precision, proven to load, with its adapter merged into it and beside it; kind
`export` makes the published form of it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.algorithms.base import LogProbs, Sample
from cosmos_core.algorithms.grpo_updates import Grpo
from cosmos_core.algorithms.sft import Sft
from cosmos_core.checkpoint.best import Best
from cosmos_core.checkpoint.export import export_model
from cosmos_core.checkpoint.prove import prove_export
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.prepared import Prompts, open_prompts, open_sequences
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.freeze import choose_trained
from cosmos_core.models.hf import check_row_length, load_model, load_tokenizer, named_weights
from cosmos_core.models.lora import FOLDER, is_adapted
from cosmos_core.parallel.mesh import is_first, open_mesh
from cosmos_core.rollout.base import Engine
from cosmos_core.rollout.choose import make_engine
from cosmos_core.run.stage import Stage
from cosmos_core.train.earlier import named_checkpoint, take_over
from cosmos_core.train.ema import MovingAverage
from cosmos_core.train.feeds import RolloutFeed, SequenceFeed
from cosmos_core.train.loop import Loop, Measure
from cosmos_core.train.measure import SAMPLES, Answers, held_out, reward_runner, reward_weights, sequence_figures
from cosmos_core.train.rank import Rank
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)


class Trained(NamedTuple):
    """What a training leaves in memory."""

    model: PreTrainedModel | None
    """With all its weights; None: another rank has it."""
    tokenizer: PreTrainedTokenizerBase
    step: int
    metrics: dict[str, float]
    best: Best | None = None
    """The best step by validation; None: none was validated."""


def run_sft(stage: Stage) -> Outcome:
    """The program of kind `sft`."""
    return hand_over(stage, train_sft(stage))


def run_rl(stage: Stage) -> Outcome:
    """The program of kind `rl`."""
    return hand_over(stage, train_rl(stage))


def train_sft(stage: Stage) -> Trained:
    """Supervised fine-tuning to its last step."""
    rows = open_sequences(prepared_folder(stage), "train")
    rank, tokenizer = open_rank(stage)
    feed = SequenceFeed(rows, stage.recipe)
    with ExitStack() as stack:
        checkpointer = _checkpointer(stage, stack)
        measure = _measure(stage, rank, tokenizer, stack)
        loop = Loop(
            stage, rank, feed, Sft(), checkpointer, measure=measure, average=_average(stage, rank),
            begin_from=named_checkpoint(stage),
        )  # fmt: skip
        metrics = loop.run()
    return Trained(rank.whole_model(), tokenizer, feed.total_steps, metrics, loop.best)


def train_rl(stage: Stage) -> Trained:
    """The rollout-train loop to its last step."""
    policy = stage.recipe.train.train_policy
    assert isinstance(policy, GrpoConfig)
    prompts = open_prompts(prepared_folder(stage), "train")
    rank, tokenizer = open_rank(stage)
    with ExitStack() as stack:
        rewards = stack.enter_context(reward_runner(stage, policy.reward_function))
        engine = stack.enter_context(open_engine(stage, rank, tokenizer))
        feed = RolloutFeed(
            prompts, engine, rewards, stage.recipe, stage.progress, between=lambda step: loop.stop_if_asked(step)
        )
        loop = Loop(
            stage, rank, feed, Grpo(policy, _reference(stage, rank, policy)), _checkpointer(stage, stack),
            weights_changed=lambda step: {"sync/version": float(_sync(engine, rank, step))},
            average=_average(stage, rank),
            begin_from=named_checkpoint(stage),
        )  # fmt: skip
        if stage.recipe.validation.enable:
            scorer = rewards
            if reward_weights(stage.recipe) != policy.reward_function:
                scorer = stack.enter_context(reward_runner(stage, reward_weights(stage.recipe)))
            rows = held_out(prepared_folder(stage))
            assert isinstance(rows, Prompts)
            loop.measure = Answers(rows, engine, scorer, stage).measure
        metrics = loop.run()
    return Trained(rank.whole_model(), tokenizer, feed.total_steps, metrics, loop.best)


def prepared_folder(stage: Stage) -> Path:
    """Where the rows are.

    Raises:
        DataError: no prepare stage is named.
    """
    if stage.data is None:
        raise DataError(f'stage {stage.name!r} has no prepared data; name a prepare stage with data = "stage:NAME"')
    return stage.data


def open_rank(stage: Stage) -> tuple[Rank, PreTrainedTokenizerBase]:
    """Model and optimizer on this machine's device, seeded; and the tokenizer, which has a pad token."""
    train, policy = stage.recipe.train, stage.recipe.policy
    stage.progress.phase("load")
    torch.manual_seed(stage.seed)
    torch.use_deterministic_algorithms(train.deterministic)
    tokenizer = load_tokenizer(stage.model, policy.model_revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # masks are built from positions, so which id pads does not matter
    model = load_model(
        stage.model,
        revision=policy.model_revision,
        dtype=getattr(torch, train.master_dtype),
        gradient_checkpointing=policy.model_gradient_checkpointing,
    )
    check_row_length(model.config, policy.model_max_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _move(model, device)
    if stage.config.kind != "validate":  # it measures what these tables have made already
        choose_trained(model, policy)
    if train.compile:
        _compile_blocks(model)
    mesh = open_mesh(policy.parallelism, device.type)
    return Rank(model, train, int(tokenizer.pad_token_id), stage.progress, mesh), tokenizer


@contextmanager
def open_engine(stage: Stage, rank: Rank, tokenizer: PreTrainedTokenizerBase) -> Iterator[Engine]:
    """The rollout engine, with the weights of `stage.model`."""
    stage.progress.phase("load")
    engine = make_engine(
        rank.model,
        tokenizer,
        stage.model,
        stage.recipe.rollout,
        max_model_len=stage.recipe.policy.model_max_length,
        dtype=getattr(torch, stage.recipe.train.param_dtype),
    )
    logger.info("rollout engine: %s", engine.name)
    try:
        yield engine
    finally:
        engine.close()


def hand_over(stage: Stage, trained: Trained) -> Outcome:
    """Write the trained model in the dtype that it was trained in, prove it, and name it for the stages behind."""
    if trained.model is None:
        return Outcome()
    stage.progress.phase("export")
    place = f"safetensors/step_{trained.step}"
    export_model(trained.model, trained.tokenizer, stage.path / place, dtype=None)
    checks = prove_export(trained.model, stage.path / place, dtype=None, tokenizer=trained.tokenizer)
    samples = (SAMPLES,) if (stage.path / SAMPLES).exists() else ()
    info: dict[str, JsonValue] = {"model": place, "step": trained.step, "checks": list(checks)}
    if is_adapted(trained.model):
        info["adapter"] = f"{place}/{FOLDER}"
    if trained.best is not None:
        info["best"] = asdict(trained.best)
    return Outcome(outputs=(place, *samples), metrics=trained.metrics, info=info)


def _average(stage: Stage, rank: Rank) -> MovingAverage | None:
    return MovingAverage(rank.model, stage.recipe.train) if stage.recipe.train.ema_enable else None


def _checkpointer(stage: Stage, stack: ExitStack) -> Checkpointer:
    ckpt = stage.recipe.train.ckpt
    checkpointer = Checkpointer(
        stage.path / "checkpoints",
        fingerprint=stage.fingerprint,
        max_keep=ckpt.max_keep,
        asynchronous=ckpt.save_mode == "async",
        on_saved=stage.progress.saved,
    )
    stack.callback(checkpointer.close)
    if stage.recipe.train.resume is True and is_first():
        take_over(stage)
    return checkpointer


def _measure(stage: Stage, rank: Rank, tokenizer: PreTrainedTokenizerBase, stack: ExitStack) -> Measure | None:
    """How supervised training measures itself: by loss, or by generated answers when the held-out rows are prompts."""
    if not stage.recipe.validation.enable:
        return None
    rows = held_out(prepared_folder(stage))
    if isinstance(rows, Prompts):
        if rank.mesh:
            raise ConfigError(
                "policy.parallelism has several ranks, on which this version measures no generated answers; hold out "
                "conversations, or set validation.enable = false and add a stage of kind 'validate'"
            )
        rewards = stack.enter_context(reward_runner(stage, reward_weights(stage.recipe)))
        engine = stack.enter_context(open_engine(stage, rank, tokenizer))
        answers = Answers(rows, engine, rewards, stage)

        def measure(step: int) -> dict[str, float]:
            _sync(engine, rank, step)  # training does not need the engine, so it follows the weights only when asked
            return answers.measure(step)

        return measure
    return lambda step: sequence_figures(rank, rows, stage.recipe, stage.progress)


def _sync(engine: Engine, rank: Rank, step: int) -> int:
    """Give the engine the present weights; the version that it has now."""
    rank.model.eval()
    checksum = engine.load_weights(step, named_weights(rank.model))
    logger.debug("weights of version %d in %s: %s", step, engine.name, checksum)
    return step


def _reference(stage: Stage, rank: Rank, policy: GrpoConfig) -> LogProbs | None:
    """Log-probabilities under the model that the stage started from, whatever checkpoint it resumes at."""
    if not policy.kl_beta:
        return None
    train = stage.recipe.train
    frozen = load_model(
        stage.model, revision=stage.recipe.policy.model_revision, dtype=getattr(torch, train.master_dtype)
    )
    _move(frozen, rank.model.device)
    frozen.requires_grad_(False)

    def logprobs(samples: Sequence[Sample]) -> list[Tensor]:
        return rank.logprobs(samples, policy.temperature, model=frozen)

    return logprobs


def _move(model: torch.nn.Module, device: torch.device) -> None:
    model.to(device)


def _compile_blocks(model: PreTrainedModel) -> None:
    """torch.compile each transformer block.

    Raises:
        ConfigError: there is no C++ compiler for a model on CPU.
    """
    if model.device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise ConfigError(
            "train.compile = true needs a C++ compiler on CPU (g++ was not found); install one or set it to false"
        )
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    for block in blocks:
        block.compile(dynamic=True)
    logger.info("compiled %d blocks of type %s", len(blocks), ", ".join(sorted(names)))
