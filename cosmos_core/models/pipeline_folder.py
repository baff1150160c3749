"""Files of a diffusion pipeline: its `model_index.json`, and components that can be loaded separately, because training
needs only the denoiser, and stages of kind `prepare` need all others."""

import importlib
import re
from pathlib import Path
from typing import Any

import torch

from cosmos_core.models.model_files import locate_model, model_error, read_json, translate_load_errors

MODEL_INDEX_FILE = "model_index.json"
_COMPONENT_LIBRARIES = ("diffusers", "transformers")
_VARIANT_REGEX = re.compile(r"(?:diffusion_pytorch_|pytorch_)?model(?:-[-\dof]+)?\.([a-z]\w*)[-.].*(?:safetensors|bin)")
"""Pattern of names of weight files of a variant, such as `model.fp16.safetensors`, with the variant as its group."""


class PipelineFolder:
    """Folder, local or on the Hugging Face Hub, that `save_pretrained` of a diffusers pipeline wrote."""

    def __init__(self, model: str, revision: str | None = None) -> None:
        """Locate the folder of `model`, a path or Hub id, and read its `model_index.json`; raise ModelError if the
        folder does not exist, is not a pipeline, or has only weights of a variant (fp16)."""
        self.model = model
        model_source, load_options = locate_model(model, revision)
        if isinstance(model_source, Path):
            self.path = model_source
        else:
            pipeline_class: Any = importlib.import_module("diffusers").DiffusionPipeline
            with translate_load_errors("pipeline", model):
                self.path = Path(pipeline_class.download(model_source, **load_options))
        self.model_index = read_json(self.path / MODEL_INDEX_FILE, model)
        if not isinstance(self.model_index.get("_class_name"), str):
            remedy = "give a folder that DiffusionPipeline.save_pretrained wrote, or leave policy.is_diffusers out"
            raise model_error(model, f"the folder has no {MODEL_INDEX_FILE} that names a pipeline; {remedy}")
        for name in self.components:
            file_names = [file.name for file in (self.path / name).glob("*") if file.suffix in {".safetensors", ".bin"}]
            if file_names and all(map(_VARIANT_REGEX.fullmatch, file_names)):
                variant_name = _VARIANT_REGEX.sub(r"\1", file_names[0])
                problem = f"of {name!r} the folder has {file_names[0]} alone, the weights of a variant; save it anew"
                remedy = f"DiffusionPipeline.from_pretrained(..., variant={variant_name!r}).save_pretrained(FOLDER)"
                raise model_error(model, f"{problem}: {remedy}")

    @property
    def class_name(self) -> str:
        """Name of the pipeline's class in diffusers."""
        return str(self.model_index["_class_name"])

    @property
    def pipeline_class(self) -> Any:
        """Return the class of the pipeline in diffusers; raise ModelError if diffusers has no class of this name."""
        cls = getattr(importlib.import_module("diffusers"), self.class_name, None)
        if not isinstance(cls, type):
            raise model_error(self.model, f"the installed diffusers has no {self.class_name}; update it")
        return cls

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components of the pipeline that its folder contains."""
        components = [(name, entry) for name, entry in self.model_index.items() if not name.startswith("_")]
        return tuple(name for name, entry in components if isinstance(entry, list) and len(entry) == 2 and entry[1])

    def component_class(self, name: str) -> Any:
        """Return the class of the component `name`; raise ModelError if the pipeline has no such component, or if its
        class is not in diffusers or transformers."""
        if name not in self.components:
            component_names = ", ".join(self.components) or "nothing"
            raise model_error(self.model, f"{MODEL_INDEX_FILE} names no {name!r}; it has {component_names}")
        library, class_name = self.model_index[name]
        cls = getattr(importlib.import_module(library), class_name, None) if library in _COMPONENT_LIBRARIES else None
        if not isinstance(cls, type):
            problem = f"{MODEL_INDEX_FILE} wants {library}.{class_name} for {name!r}, which is not installed"
            raise model_error(self.model, problem)
        return cls

    def load(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """Return the component `name` in evaluation mode, with its weights on the CPU in `dtype`. Components without
        weights, such as a scheduler, ignore `dtype`. Raise ModelError if files are missing or damaged, or lack
        tensors of the class."""
        cls = self.component_class(name)
        has_weights = issubclass(cls, torch.nn.Module)
        load_options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True} if has_weights else {}
        with translate_load_errors(name, self.model):
            component = cls.from_pretrained(str(self.path), subfolder=name, local_files_only=True, **load_options)
        if not has_weights:
            return component
        component_module, loading_info = component
        if missing_keys := sorted(map(str, loading_info["missing_keys"])):
            problem = f"{len(missing_keys)} tensors of {name!r} are missing from the files, first {missing_keys[0]!r}"
            raise model_error(self.model, f"{problem}; copy it again")
        return component_module.eval()

    def build_component(self, name: str) -> Any:
        """Return the component `name` built from its configuration without weights, on the default device; raise
        ModelError if the configuration is missing or invalid."""
        cls = self.component_class(name)
        with translate_load_errors(name, self.model):
            return cls.from_config(cls.load_config(str(self.path), subfolder=name, local_files_only=True))

    def settings(self, name: str) -> dict[str, Any]:
        """Return the configuration of the pipeline component `name`, without building the component; raise ModelError
        if the component has no configuration."""
        for file_name in (f"{name}_config.json", "config.json"):
            if settings := read_json(self.path / name / file_name, self.model):
                return settings
        config_file_name = f"{'scheduler_' * (name == 'scheduler')}config.json"
        remedy = f"copy its {config_file_name} from the model that was trained, as Cosmos-RL exports weights alone"
        raise model_error(self.model, f"{name!r} has no configuration; {remedy}")
