"""Program of the stage kind `export`: write the model, and the quantised formats of `[export]` if there are any."""

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

from cosmos_core.checkpoint import export
from cosmos_core.errors import ConfigError
from cosmos_core.run.stage import Stage
from cosmos_core.train import check as check_model
from cosmos_core.types import Outcome


def check(stage: Stage) -> Outcome:
    """Check for an `export` stage that the model can be read, and that each quantised format can be written and loaded.
    Raise `ConfigError` or `ModelError` for the first problem."""
    check_outcome = check_model.run(stage)
    if not stage.recipe.export.quantized_formats:
        return check_outcome
    format_descriptions = [plan.description for plan in _import_formats_module().plan_quantized_formats(stage)]
    model_description = "; ".join([str(check_outcome.info["found"]), *format_descriptions])
    return replace(check_outcome, info={**check_outcome.info, "found": model_description})


def run(stage: Stage) -> Outcome:
    """Export the model of a stage, and its quantised formats if the recipe names any."""
    return (_import_formats_module() if stage.recipe.export.quantized_formats else export).run(stage)


def _import_formats_module() -> Any:
    """Import and return the module `export/formats.py`; raise ConfigError if the package compressed-tensors, which it
    needs, is not installed."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise ConfigError("export.formats needs the package compressed-tensors, which comes with vLLM; install vLLM")
    return importlib.import_module("cosmos_core.export.formats")
