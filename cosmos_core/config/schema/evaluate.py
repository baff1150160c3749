"""`[evaluate]`: public benchmarks of lm-eval, which stages of kind `evaluate` run."""

from collections.abc import Iterator
from typing import Annotated, Literal

from cosmos_core.config.schema.marks import Needs, NoResult, Unit, Where
from cosmos_core.config.schema.table import InStage, Table
from cosmos_core.config.schema.values import Names, NonNegativeInt, PositiveInt, Tokens


class EvaluateConfig(Table):
    """`[evaluate]`: the benchmarks of a stage of kind `evaluate`, with the settings of lm-eval's command line."""

    tasks: Names = ()
    """Tasks, groups and tags of lm-eval (`lm-eval ls tasks`), or of `include_path`; `mmlu_*` is every name that
    matches."""
    include_path: Annotated[str, Where.PATH, NoResult] = ""
    """Folder with YAML files of your own tasks, which take precedence over those of lm-eval. Its files, and the local
    files of rows that a task names, are inputs of the stage. Empty: none."""
    num_fewshot: NonNegativeInt | None = None
    """Number of solved examples in each prompt; None: that of the task."""
    limit: Annotated[PositiveInt | None, Unit("items")] = None
    """Only the first items of each task; None: all."""
    apply_chat_template: bool = False
    """Prompts are conversations in the chat template of the model, rather than plain text."""
    fewshot_as_multiturn: Annotated[bool, Needs("apply_chat_template")] = True
    """Each solved example is a turn of the user and one of the model, rather than part of a single turn."""
    batch_size: Annotated[PositiveInt | None, Unit("prompts")] = None
    """Prompts per forward pass, or per call of vLLM; None: 1, and 256 with vLLM."""
    max_length: Tokens | None = None
    """Maximum number of tokens of prompt and completion, beyond which a prompt loses its beginning; None: that of the
    model."""
    seed: NonNegativeInt | None = None
    """Seed of Python, NumPy, torch and the choice of examples; None: 0 for Python, 1234 for the others, as lm-eval
    does."""
    engine: Literal["auto", "vllm", "hf"] = "auto"
    """`hf`: forward passes of transformers. `auto`: `rollout.backend` if that is vLLM and vLLM is installed, otherwise
    `hf`."""
    confirm_run_unsafe_code: bool = False
    """Allow tasks that execute code which the model wrote, without a sandbox."""

    def refusals(self, stage: InStage) -> Iterator[str]:
        if stage.kind.table != "evaluate":
            return
        if stage.recipe.policy.is_diffusers:
            yield (
                "policy.is_diffusers = true: the benchmarks of lm-eval are for models of text; measure a diffusion "
                "model with a stage of kind validate and the rewards of its recipe"
            )
        elif not self.tasks:
            yield "evaluate.tasks is empty; name tasks of lm-eval, such as ['gsm8k'], or of evaluate.include_path"
