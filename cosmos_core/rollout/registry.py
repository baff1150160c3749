"""Engine registry: `rollout.backend` names a file of this folder, or a user-defined class.

The engine of `rollout/some_name.py` is its class `SomeNameEngine`.
"""

import logging
from dataclasses import replace

from cosmos_core.parallel.mesh import is_single_rank
from cosmos_core.registry import import_object, is_import_path
from cosmos_core.rollout.base import Engine, EngineSettings
from cosmos_core.rollout.data_parallel import DataParallel
from cosmos_core.rollout.turns import Turns

_FALLBACK = "hf"

logger = logging.getLogger(__name__)


def make_engine(settings: EngineSettings) -> Engine:
    """Return the engine that `rollout.backend` names; with several ranks, each rank has an engine.

    If the library of the engine cannot be imported, the engine `hf` is the fallback, and a warning is logged. Random
    states, thread count, signal handlers and environment are unchanged.

    Raises:
        ConfigError: there is no such engine, or it does not support the model or the settings.
    """
    if settings.flow is not None:  # a diffusion engine distributes samples over ranks itself
        name = settings.rollout.backend
        return _make_engine(name if is_import_path(name) else _path(name), settings)
    text_config = settings.model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or settings.max_model_len
    if positions < settings.max_model_len:
        logger.warning(
            "rollout: sequences end at the model's %d positions, not at %d", positions, settings.max_model_len
        )
        settings = replace(settings, max_model_len=positions)
    engine = _make_local_engine(settings)
    if settings.rollout.multi_turn_config.enable:
        engine = Turns(engine, settings)
    return engine if is_single_rank() else DataParallel(engine)


def _make_local_engine(settings: EngineSettings) -> Engine:
    name = settings.rollout.backend
    if is_import_path(name):
        return _make_engine(name, settings)
    try:
        return _make_engine(_path(name), settings)
    except ImportError as error:
        if name == _FALLBACK:
            raise
        reason = " ".join(str(error).split())
        logger.warning("rollout.backend = %r cannot be imported (%s); using %r in its place", name, reason, _FALLBACK)
    return _make_engine(_path(_FALLBACK), settings)


def _path(name: str) -> str:
    return f"cosmos_core.rollout.{name}:{name.title().replace('_', '')}Engine"


def _make_engine(path: str, settings: EngineSettings) -> Engine:
    engine: Engine = import_object(path)(settings)
    return engine
