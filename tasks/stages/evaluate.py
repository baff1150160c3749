"""Stage kind `evaluate`: run benchmarks of lm-eval on a language model, or prompt sets on a diffusion model."""

from cosmos_core.run.libraries import EVALUATION_LIBRARIES
from cosmos_core.types import StageKind

KIND = StageKind(
    name="evaluate",
    entry="cosmos_core.evaluate.program:run",
    check="cosmos_core.evaluate.program:check",
    result_version=1,
    makes="metrics",
    has_engine=True,
    reads_model="weights",
    allowed_keys=("format",),
    table="evaluate",
    recipe_tables=("evaluate",),
    keys_by_modality={
        "causal_lm": ("rollout.backend", "rollout.parallelism.tp_size", "policy.chat_template"),
        "diffusion": (
            "policy.diffusers.inference_size",
            "policy.diffusers.inference_frames",
            "policy.diffusers.max_prompt_length",
            "policy.diffusers.sample.eval_num_steps",
            "policy.diffusers.sample.guidance_scale",
            "policy.model_class",
            "train.param_dtype",
            "custom",
        ),
    },
    reports=("evaluation/*",),
    libraries=EVALUATION_LIBRARIES,
)
