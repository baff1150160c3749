"""`[evaluate]`: public benchmarks of lm-eval, or prompt sets of a diffusion model, for stages of kind `evaluate`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit, OmittedIfEmpty, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import StringOrList, TokenCount

_LANGUAGE_MODEL_KEYS = (
    "tasks", "include_path", "num_fewshot", "apply_chat_template", "max_length", "engine", "confirm_run_unsafe_code"
)  # fmt: skip
_DIFFUSION_MODEL_KEYS = ("prompts", "rewards", "samples_per_prompt")


class EvaluateConfig(Table):
    """`[evaluate]`: what a stage of kind `evaluate` measures. A language model runs benchmarks, with the settings of
    lm-eval's command line; a diffusion model samples images or videos of prompt sets, which are scored by rewards."""

    tasks: StringOrList = ()
    """Names of benchmarks: tasks, groups and tags of lm-eval (`lm-eval ls tasks`), or tasks of `include_path`; a
    pattern such as `mmlu_*` stands for all matching names."""
    include_path: Annotated[str, ReferenceKind.PATH, ResultNeutral] = ""
    """Folder with YAML files of your own tasks, which take precedence over those of lm-eval. Its files, and the local
    files of rows that a task names, are inputs of the stage. Empty: none."""
    num_fewshot: NonNegativeInt | None = None
    """Number of solved examples in each prompt; None: the number that the task sets."""
    limit: Annotated[PositiveInt | None, FieldUnit("items")] = None
    """Maximum number of items of each task, or of prompts of each prompt set, from the first; None: all."""
    apply_chat_template: bool = False
    """Render prompts as conversations with the model's chat template; False: plain text."""
    fewshot_as_multiturn: Annotated[bool, EnabledBy("apply_chat_template")] = True
    """Render each solved example as a user turn and an assistant turn; False: all examples are part of a single user
    turn."""
    batch_size: Annotated[PositiveInt | None, FieldUnit("prompts")] = None
    """Prompts per forward pass, per call of vLLM, or per call of a diffusion pipeline; None: 256 with vLLM, else 1."""
    max_length: TokenCount | None = None
    """Maximum number of tokens of prompt and completion together; a longer prompt loses its beginning. None: the
    maximum of the model."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] | None = None
    """Seed of Python, NumPy, torch and the choice of examples; None: 0 for Python, 1234 for the others, as lm-eval
    does. For a diffusion model the seed of the noise; None: 0."""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """Engine that runs a language model. `hf`: forward passes of transformers. `vllm`: vLLM. `auto`: vLLM if it is
    `rollout.backend` and installed, otherwise `hf`."""
    confirm_run_unsafe_code: bool = False
    """Allow tasks that execute code which the model wrote, without a sandbox."""
    prompts: Annotated[StringOrList, ReferenceKind.PATH, ResultNeutral] = ()
    """Prompt sets of a diffusion model: files with a prompt per line (`.txt`), files of rows with a column `prompt`,
    folders, or known sets such as `geneval`. The name of a set in metrics is that of its file without the suffix."""
    rewards: Annotated[StringOrList, ReferenceKind.CODE, OmittedIfEmpty] = ()
    """Rewards that score each image or video of a diffusion model, each as a metric `evaluation/PROMPT_SET/REWARD`:
    names such as `clip_score`, or your own as `file.py:function`."""
    samples_per_prompt: Annotated[PositiveInt | None, FieldUnit("images or videos"), OmittedIfEmpty] = None
    """Number of images or videos that a diffusion model samples for each prompt; the mean of their rewards is the
    reward of the prompt. None: 1."""

    @property
    def prompt_sets(self) -> dict[str, str]:
        """Return the location of each prompt set by its name."""
        return {Path(location).stem: location for location in self.prompts}

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if stage.kind.table != "evaluate":
            return
        is_diffusion_model = stage.recipe.policy.is_diffusers
        keys_of_other_modality = _LANGUAGE_MODEL_KEYS if is_diffusion_model else _DIFFUSION_MODEL_KEYS
        if inapplicable_keys := list(filter(self.is_set, keys_of_other_modality)):
            remedy_text = "name evaluate.prompts and evaluate.rewards" if is_diffusion_model else "name evaluate.tasks"
            yield (
                f"evaluate.{inapplicable_keys[0]} is for {'language' if is_diffusion_model else 'diffusion'} models, "
                f"and policy.is_diffusers = {str(is_diffusion_model).lower()}; {remedy_text}"
            )
        elif is_diffusion_model and not (self.prompts and all(self.prompts)):
            yield "evaluate.prompts is empty, or one of its names is; name files of prompts, such as ['prompts.txt']"
        elif is_diffusion_model and not self.rewards:
            yield "evaluate.rewards is empty; name rewards, such as ['clip_score'] or ['rewards.py:brightness']"
        elif len(self.prompt_sets) < len(self.prompts):
            yield "evaluate.prompts: two prompt sets have the same name; rename a file, since metrics have its name"
        elif not is_diffusion_model and not self.tasks:
            yield "evaluate.tasks is empty; name tasks of lm-eval, such as ['gsm8k'], or of evaluate.include_path"
