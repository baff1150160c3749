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

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.algorithms.base import Algorithm, LogProbs, Sample
from cosmos_core.algorithms.dpo import Dpo
from cosmos_core.algorithms.grpo_updates import Grpo
from cosmos_core.algorithms.sft import Sft
from cosmos_core.checkpoint.best import Best
from cosmos_core.checkpoint.export import export_model
from cosmos_core.checkpoint.prove import prove_export
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.config.media import media_of
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.prepared import Pairs, Prompts, Sequences, open_pairs, open_prompts, open_sequences, shows_images
from cosmos_core.errors import ConfigError, DataError, ModelError
from cosmos_core.models.freeze import choose_trained
from cosmos_core.models.hf import check_row_length, load_model, load_tokenizer
from cosmos_core.models.kernels import use_fp8, use_liger, without_fp8
from cosmos_core.models.lora import FOLDER, is_adapted
from cosmos_core.models.meta_device import reads_base
from cosmos_core.models.processor import Vision, load_processor, processor_files
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.parallel.fsdp import blocks_of, move_buffers
from cosmos_core.parallel.mesh import is_first, open_mesh
from cosmos_core.rollout.base import Engine, EngineSettings
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.registry import make_engine
from cosmos_core.run.stage import Stage
from cosmos_core.train.earlier import named_checkpoint, take_over
from cosmos_core.train.ema import MovingAverage
from cosmos_core.train.feeds import Feed, PairFeed, RolloutFeed, SequenceFeed
from cosmos_core.train.loop import Loop, Measure
from cosmos_core.train.measure import (
    SAMPLES,
    Answers,
    held_out,
    open_rewards,
    pair_figures,
    reward_weights,
    sequence_figures,
)
from cosmos_core.train.rank import Rank
from cosmos_core.train.reference import FOLDER as REFERENCE
from cosmos_core.train.reference import reference_logprobs
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
    """Supervised fine-tuning, or by preferences, to its last step."""
    is_compared = stage.recipe.train.train_policy.trainer_type == "dpo"
    rows = (open_pairs if is_compared else open_sequences)(prepared_folder(stage), "train")
    rank, tokenizer = open_rank(stage)
    feed, algorithm = _supervised(stage, rank, rows)
    with ExitStack() as stack:
        checkpointer = _checkpointer(stage, stack)
        measure = _measure(stage, rank, tokenizer, stack)
        loop = Loop(
            stage, rank, feed, algorithm, checkpointer, measure=measure, average=_average(stage, rank),
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
        score = stack.enter_context(open_rewards(stage, policy.reward_function))
        engine = stack.enter_context(open_engine(stage, rank, tokenizer))
        feed = RolloutFeed(
            prompts, engine, score, stage.recipe, stage.progress, between=lambda step: loop.stop_if_asked(step)
        )
        loop = Loop(
            stage, rank, feed, Grpo(policy, _reference(stage, rank, policy)), _checkpointer(stage, stack),
            weights_changed=_publisher(stage, engine, rank).publish,
            average=_average(stage, rank),
            begin_from=named_checkpoint(stage),
        )  # fmt: skip
        if stage.recipe.validation.enable:
            if reward_weights(stage.recipe) != policy.reward_function:
                score = stack.enter_context(open_rewards(stage, reward_weights(stage.recipe)))
            rows = held_out(prepared_folder(stage))
            assert isinstance(rows, Prompts)
            loop.measure = Answers(rows, engine, score, stage).measure
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
    vision = _vision(stage)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = open_mesh(policy.parallelism, device.type)
    load = init_on_meta if mesh and not reads_base(policy.lora) else load_model
    if mesh and load is load_model:
        logger.info("every rank loads the whole model before it is split: policy.lora starts from its weights")
    model = load(
        stage.model,
        revision=policy.model_revision,
        dtype=getattr(torch, train.master_dtype),
        device=torch.device("cpu") if train.fsdp_offload else device,
        gradient_checkpointing=policy.model_gradient_checkpointing,
    )
    move_buffers(model, device)
    check_row_length(model.config, policy.model_max_length)
    if policy.enable_liger_kernel:
        use_liger(model)
    if stage.kind.trains:  # one that measures takes what these tables have made already
        choose_trained(model, policy)
        if train.fp8.enable_fp8:
            use_fp8(model, train.fp8)
    if train.compile:
        _compile_blocks(model)
    return Rank(model, train, int(tokenizer.pad_token_id), stage.progress, mesh, vision), tokenizer


def _vision(stage: Stage) -> Vision | None:
    """What reads the images of the prepared rows; None: no row shows one.

    Raises:
        ConfigError: the recipe spreads such rows in a way that this version cannot.
        ModelError: the processor cannot be loaded.
    """
    if stage.data is None or not shows_images(stage.data):
        return None
    sizes = stage.recipe.policy.parallelism
    for key in ("tp_size", "cp_size", "pp_size", "ep_size"):
        if getattr(sizes, key) > 1:
            raise ConfigError(
                f"policy.parallelism.{key} = {getattr(sizes, key)}: this version shards models that are shown images "
                f"by dp_shard_size and dp_replicate_size alone; set {key} = 1"
            )
    policy = stage.recipe.train.train_policy
    if not isinstance(policy, GrpoConfig) and policy.enable_dp_load_balancing:
        raise ConfigError(
            "train.train_policy.enable_dp_load_balancing = true: rows with images go apart from rows without, whatever "
            "their length; set it to false"
        )
    processor = load_processor(stage.model, stage.recipe.policy.model_revision, media_of(stage.recipe).pixels)
    if processor is None:
        raise ModelError(f"{stage.model}: the prepared rows show images, and the model has no processor to read them")
    return Vision(processor)


@contextmanager
def open_engine(stage: Stage, rank: Rank, tokenizer: PreTrainedTokenizerBase) -> Iterator[Engine]:
    """The rollout engine, with the weights of `stage.model`."""
    stage.progress.phase("load")
    engine = make_engine(
        EngineSettings(
            rank.model,
            tokenizer,
            stage.model,
            stage.recipe.rollout,
            max_model_len=stage.recipe.policy.model_max_length,
            dtype=getattr(torch, stage.recipe.train.param_dtype),
            custom=stage.recipe.custom,
        )
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
    extra_files = processor_files(stage.model, stage.recipe.policy.model_revision)
    without_fp8(trained.model)
    export_model(trained.model, trained.tokenizer, stage.path / place, dtype=None, extra_files=extra_files)
    checks = prove_export(trained.model, stage.path / place, dtype=None, tokenizer=trained.tokenizer)
    others = [name for name in (SAMPLES, REFERENCE) if (stage.path / name).exists()]
    info: dict[str, JsonValue] = {"model": place, "step": trained.step, "checks": list(checks)}
    if is_adapted(trained.model):
        info["adapter"] = f"{place}/{FOLDER}"
    if trained.best is not None:
        info["best"] = asdict(trained.best)
    return Outcome(outputs=(place, *others), metrics=trained.metrics, info=info)


def _supervised(stage: Stage, rank: Rank, rows: Sequences | Pairs) -> tuple[Feed, Algorithm]:
    """What is read and what is learned of it; the weights are those that the stage starts from."""
    if isinstance(rows, Sequences):
        return SequenceFeed(rows, stage.recipe), Sft()
    policy = stage.recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    feed = PairFeed(rows, stage.recipe)
    feed.reference = reference_logprobs(stage, rank, rows, "train", feed.places)
    return feed, Dpo(policy.dpo)


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
        score = stack.enter_context(open_rewards(stage, reward_weights(stage.recipe)))
        engine = stack.enter_context(open_engine(stage, rank, tokenizer))
        answers, publisher = Answers(rows, engine, score, stage), _publisher(stage, engine, rank)

        def measure(step: int) -> dict[str, float]:
            publisher.publish(step)  # training does not need the engine, so it follows the weights only when asked
            return answers.measure(step)

        return measure
    if isinstance(rows, Pairs):
        reference = reference_logprobs(stage, rank, rows, "validation", np.arange(len(rows)))
        return lambda step: pair_figures(rank, rows, reference, stage.recipe, stage.progress)
    return lambda step: sequence_figures(rank, rows, stage.recipe, stage.progress)


def _publisher(stage: Stage, engine: Engine, rank: Rank) -> WeightPublisher:
    def logprobs(token_ids: Sequence[int]) -> Tensor:
        ids = np.array(token_ids, dtype=np.int64)
        return rank.logprobs([Sample(ids, np.ones(len(ids), dtype=np.uint8))], 1.0)[0]

    return WeightPublisher(
        engine, rank.model, logprobs, getattr(torch, stage.recipe.train.param_dtype),
        whole=rank.skeleton, probe_interval=stage.recipe.rollout.probe_interval,
    )  # fmt: skip


def _reference(stage: Stage, rank: Rank, policy: GrpoConfig) -> LogProbs | None:
    """Log-probabilities under the model that the stage started from, whatever checkpoint it resumes at."""
    if not policy.kl_beta:
        return None
    train = stage.recipe.train
    load = init_on_meta if rank.mesh else load_model
    frozen = load(
        stage.model,
        revision=stage.recipe.policy.model_revision,
        dtype=getattr(torch, train.master_dtype),
        device=rank.model.device,
    )
    frozen.requires_grad_(False)

    def logprobs(samples: Sequence[Sample]) -> list[Tensor]:
        return rank.logprobs(samples, policy.temperature, model=frozen)

    return logprobs


def _compile_blocks(model: PreTrainedModel) -> None:
    """torch.compile each transformer block.

    Raises:
        ConfigError: there is no C++ compiler for a model on CPU.
    """
    if not torch.cuda.is_available() and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise ConfigError(
            "train.compile = true needs a C++ compiler on CPU (g++ was not found); install one or set it to false"
        )
    blocks = blocks_of(model)
    for block in blocks:
        block.compile(dynamic=True)
    names = sorted({type(block).__name__ for block in blocks})
    logger.info("compiled %d blocks of type %s", len(blocks), ", ".join(names))
