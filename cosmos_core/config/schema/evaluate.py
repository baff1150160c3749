"""`[evaluate]`: public benchmarks of lm-eval, which stages of kind `evaluate` run."""

from collections.abc import Iterator
from typing import Annotated, Literal

from cosmos_core.config.schema.marks import NamedThing, NoResult, RequiresSwitch, UnitMark
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.values import Names, NonNegativeInt, PositiveInt, Tokens


class EvaluateConfig(Table):
    """`[evaluate]`: the benchmarks of a stage of kind `evaluate`, with the settings of lm-eval's command line."""

    tasks: Names = ()
    """Names of benchmarks: tasks, groups and tags of lm-eval (`lm-eval ls tasks`), or tasks of `include_path`; a
    pattern such as `mmlu_*` stands for all matching names."""
    include_path: Annotated[str, NamedThing.PATH, NoResult] = ""
    """Folder with YAML files of your own tasks, which take precedence over those of lm-eval. Its files, and the local
    files of rows that a task names, are inputs of the stage. Empty: none."""
    num_fewshot: NonNegativeInt | None = None
    """Number of solved examples in each prompt; None: that of the task."""
    limit: Annotated[PositiveInt | None, UnitMark("items")] = None
    """Maximum number of items of each task, from the first; None: all."""
    apply_chat_template: bool = False
    """Render prompts as conversations with the model's chat template; False: plain text."""
    fewshot_as_multiturn: Annotated[bool, RequiresSwitch("apply_chat_template")] = True
    """Render each solved example as a user turn and an assistant turn; False: all examples are part of a single user
    turn."""
    batch_size: Annotated[PositiveInt | None, UnitMark("prompts")] = None
    """Prompts per forward pass, or per call of vLLM; None: 1, and 256 with vLLM."""
    max_length: Tokens | None = None
    """Maximum number of tokens of prompt and completion together; a longer prompt loses its beginning. None: the
    maximum of the model."""
    seed: NonNegativeInt | None = None
    """Seed of Python, NumPy, torch and the choice of examples; None: 0 for Python, 1234 for the others, as lm-eval
    does."""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """`hf`: forward passes of transformers. `auto`: `rollout.backend` if that is vLLM and vLLM is installed, otherwise
    `hf`."""
    confirm_run_unsafe_code: bool = False
    """Allow tasks that execute code which the model wrote, without a sandbox."""

    def refusals(self, stage: StageContext) -> Iterator[str]:
        if stage.kind.table != "evaluate":
            return
        if stage.recipe.policy.is_diffusers:
            yield (
                "policy.is_diffusers = true: the benchmarks of lm-eval are for models of text; measure a diffusion "
                "model with a stage of kind validate and the rewards of its recipe"
            )
        elif not self.tasks:
            yield "evaluate.tasks is empty; name tasks of lm-eval, such as ['gsm8k'], or of evaluate.include_path"
