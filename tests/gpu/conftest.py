"""What only a GPU can show. One command, on a machine with one GPU and without Ray, vLLM or Prefect: `make gpu`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is repeatable with it alone; read at its start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, where torch sees no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("without_gpu") is None:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here"))
