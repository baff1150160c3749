"""The tests of a GPU and its benchmark need neither Ray, vLLM nor Prefect."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("ray", "vllm", "prefect", "datasets", "diffusers")))  # an import of them fails
import transformers.distributed.tensor_parallel as older
del older.EpDispatchExpertsParallel  # transformers 5.17 has none
import tests.gpu.test_one_gpu, benchmarks.gpu, benchmarks.gpu_diffusion, cosmos_core.train.setup
"""


@pytest.mark.without_gpu
def test_a_single_process_imports_no_cluster_engine_or_flow() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
