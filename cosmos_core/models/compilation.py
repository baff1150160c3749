"""Compilation of each block of a model with torch.compile. Blocks of the same class share one compiled graph."""

import logging

import torch._dynamo.callback
from torch import nn

from cosmos_core.errors import ConfigError
from cosmos_core.machine_properties import measure_machine
from cosmos_core.parallel.fsdp import transformer_blocks
from cosmos_core.run.progress import ProgressWriter

logger = logging.getLogger(__name__)


def compile_blocks(model: nn.Module) -> None:
    """Compile each transformer block of a model with torch.compile; raise ConfigError if this machine lacks a compiler
    that torch.compile needs."""
    if missing_requirement := measure_machine().lacks:
        raise ConfigError(f"train.compile needs {missing_requirement}; install it, or set train.compile = false")
    blocks = transformer_blocks(model)
    for block in blocks:
        block.compile(dynamic=True)
    block_class_names = sorted({type(block).__name__ for block in blocks})
    logger.info("compiled %d blocks of type %s", len(blocks), ", ".join(block_class_names))


def report_compilations(progress_writer: ProgressWriter) -> None:
    """Report the start and end of each torch compilation in this process to `progress_writer`, and no longer to the
    writer of an earlier call. Torch compiles in the first steps, and later for shapes that no compiled graph supports.
    """
    callback_handler = torch._dynamo.callback.callback_handler
    if not _progress_writers:
        callback_handler.register_start_callback(lambda _: _progress_writers[-1].begin_compiling())
        callback_handler.register_end_callback(lambda _: _progress_writers[-1].end_compiling())
    _progress_writers[:] = [progress_writer]


_progress_writers: list[ProgressWriter] = []
