"""Registry of the families of diffusion models: the files of this folder that define `PIPELINES` and `FAMILY`.

Only the file of the selected family is imported. A recipe can name a user-defined class instead.
"""

import ast
import importlib
from functools import cache
from pathlib import Path

import torch

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.model_files import MODEL_RECIPE_KEY
from cosmos_core.models.pipeline_folder import PipelineFolder
from cosmos_core.registry import import_user_code


def open_pipeline(model: str, policy_config: PolicyConfig, device: torch.device | str = "cpu") -> DiffusionModel:
    """Return the `DiffusionModel` of the pipeline `model`, a folder or Hub id; raise ModelError if the model is not a
    pipeline, and the errors of `find_family_class`. The encoders are loaded on first use."""
    folder = PipelineFolder(model, policy_config.model_revision)
    return find_family_class(folder, policy_config.model_class)(folder, policy_config.diffusers, device)


def find_family_class(folder: PipelineFolder, model_class: str | None = None) -> type[DiffusionModel]:
    """Return the subclass of `DiffusionModel` for the pipeline in `folder`: the user-defined class `model_class`, or
    the family that supports the pipeline's class. Raise ModelError if there is no such family, ConfigError if
    `model_class` is no `DiffusionModel`."""
    if model_class is not None:
        cls = import_user_code(model_class)
        if not (isinstance(cls, type) and issubclass(cls, DiffusionModel)):
            base_class_name = f"{DiffusionModel.__module__}.{DiffusionModel.__name__}"
            raise ConfigError(f"policy.model_class = {model_class!r} must be a subclass of {base_class_name}")
        return cls
    module_by_pipeline_class = find_pipeline_modules()
    if folder.class_name not in module_by_pipeline_class:
        raise ModelError(
            f"{MODEL_RECIPE_KEY} = {folder.model!r}: {folder.class_name} is of no family here, which are those of "
            f"{', '.join(sorted(module_by_pipeline_class))}; write one of your own and name it in policy.model_class"
        )
    return importlib.import_module(f"cosmos_core.models.{module_by_pipeline_class[folder.class_name]}").FAMILY


@cache
def find_pipeline_modules() -> dict[str, str]:
    """Return for the name of each supported pipeline class the name of the module that implements its family."""
    module_by_pipeline_class: dict[str, str] = {}
    for family_file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(family_file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PIPELINES":
                module_by_pipeline_class |= dict.fromkeys(ast.literal_eval(node.value), family_file.stem)
    return module_by_pipeline_class
