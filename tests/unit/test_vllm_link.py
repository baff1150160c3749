"""What the engine's end of a native weight transfer uses of vLLM, by its source; `test_rollout_vllm.py` runs it."""

from __future__ import annotations

import importlib.util

import pytest

from tests.unit.test_vllm_on_gpu import parameters, source

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
TRANSFER = "distributed/weight_transfer"
PYNCCL = "distributed/device_communicators/pynccl.py"


@pytest.mark.parametrize(
    ("module", "function", "used"),
    [
        (f"{TRANSFER}/factory.py", "WeightTransferEngineFactory.create_engine", {"config", "vllm_config", "device"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.set_weight_update_target", {"model", "model_config"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.parse_init_info", {"init_dict"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.update_weights", {"update_info"}),
        (f"{TRANSFER}/base.py", "WeightTransferEngine.shutdown", {"self"}),
        (f"{TRANSFER}/nccl_common.py", "worker_init_process_group", {"init_info", "parallel_config"}),
        (PYNCCL, "PyNcclCommunicator.broadcast", {"tensor", "src", "stream"}),
        (PYNCCL, "PyNcclCommunicator.destroy", {"self"}),
        ("distributed/device_communicators/pynccl_wrapper.py", "NCCLLibrary.ncclGetUniqueId", {"self"}),
    ],
)
def test_vllm_has_what_the_link_calls(module: str, function: str, used: set[str]) -> None:
    assert used <= set(parameters(module, function))


def test_a_communicator_is_made_of_the_id_the_rank_the_size_and_the_device_in_this_order() -> None:
    expected = ["cls", "unique_id_bytes", "rank", "world_size", "device"]
    assert parameters(PYNCCL, "PyNcclCommunicator.from_unique_id_bytes")[:5] == expected


def test_vllm_keeps_under_these_names_what_the_link_reads() -> None:
    assert "self.model_update_group" in source(f"{TRANSFER}/nccl_engine.py")
    assert "self._packed_importer = PackedBufferImporter()" in source(f"{TRANSFER}/ipc_engine.py")
    assert "self.disabled = " in source(PYNCCL)
