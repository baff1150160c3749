"""Checkpoints: exact, atomic, pruned, verified, and whole after a full disk or a kill at any moment."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.checkpoint.best import BEST_STEP_FILE, BestStep
from cosmos_core.checkpoint.resume import MANIFEST_FILE, check_checkpoint, find_damaged_file, resume_obstacle
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState, capture_rng, restore_rng
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ModelError, StageFailed
from cosmos_core.train.optim import build_optimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter

PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_checkpoint import *\n"


class TiedModel(torch.nn.Module):
    """A language model in small: tied embeddings, a matrix, a norm, dropout that draws from torch's generator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(32, width)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.Dropout(0.1), torch.nn.LayerNorm(width)
        )
        self.lm_head = torch.nn.Linear(width, 32, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        return self.scale * self.lm_head(self.layers(self.embed_tokens(input_ids_BT)))


def make_state(*, name: str = "AdamW", implementation: str = "fused", width: int = 16) -> TrainState:
    model = TiedModel(width)
    rates = {"global": 1e-2, "layers.0": 1e-3}
    train = TrainConfig.model_validate({"optm_lr": rates, "optm_name": name, "optm_impl": implementation})
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    return TrainState(model, build_optimizer(model, train), weight_sets={"ema": averages})


def train_step(state: TrainState) -> float:
    """One step on random tokens: batch and dropout depend on torch's generator."""
    input_ids_BT = torch.randint(32, (2, 8))
    loss = torch.nn.functional.cross_entropy(state.model(input_ids_BT).flatten(0, 1), input_ids_BT.roll(-1).flatten())
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss.item()


def fill(state: TrainState, value: float) -> None:
    """Make the content tell its step: each weight, its average and each moment is `value`."""
    with torch.no_grad():
        for average in state.weight_sets["ema"].values():
            average.fill_(value)
        for parameter in state.model.parameters():
            parameter.fill_(value)
            for slot in state.optimizer.state.get(parameter, {}).values():
                slot.fill_(value)
    state.loop_state = {"value": value}


def is_filled_with(state: TrainState, value: float) -> bool:
    slots = [slot for each in state.optimizer.state.values() for slot in each.values()]
    tensors = [*state.model.parameters(), *state.weight_sets["ema"].values(), *slots]
    return len(slots) > 0 and state.loop_state == {"value": value} and all(bool((t == value).all()) for t in tensors)


def open_checkpoints(
    folder: Path, *, max_keep: int = -1, asynchronous: bool = False, fingerprint: str = "f"
) -> Checkpointer:
    return Checkpointer(folder, fingerprint=fingerprint, max_keep=max_keep, is_async=asynchronous)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "settings",
    [
        {}, *({"name": name, "width": 128} for name in ("AdamW8bit", "Muon")),
        pytest.param({"implementation": "for-loop"}, marks=pytest.mark.full),
        pytest.param({"name": "Adam8bit", "width": 128}, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
@torch.compiler.set_stance("force_eager")  # the arithmetic of 8-bit moments is the same, and compiling takes a minute
def test_a_resumed_training_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any], asynchronous: bool
) -> None:
    name = settings.get("name", "")
    if name:
        pytest.importorskip("torchao", reason="needs the package torchao")
    state = make_state(**settings)
    for _ in range(3):
        train_step(state)
    slots = list(state.optimizer.state.values())
    assert any("momentum_buffer" in slot for slot in slots) == (name == "Muon")
    if name.endswith("8bit"):
        codes = state.optimizer.state[state.model.embed_tokens.weight]["exp_avg"].codes  # type: ignore[index, union-attr]
        assert codes.dtype == torch.uint8 and codes.unique().numel() > 100
    checkpoints = open_checkpoints(tmp_path, asynchronous=asynchronous)
    state.loop_state = {"rng": capture_rng(), "position": [0, 7], "loss": 0.1}
    checkpoints.save(3, state)
    # These steps change every tensor while the writer thread may still be reading: it must have its own copy.
    losses = [train_step(state) for _ in range(3)]
    checkpoints.close()

    resumed = make_state(**settings)
    assert open_checkpoints(tmp_path).load_latest(resumed) == 3
    assert resumed.loop_state["position"] == [0, 7] and resumed.loop_state["loss"] == 0.1
    restore_rng(resumed.loop_state["rng"])  # type: ignore[arg-type]
    assert [train_step(resumed) for _ in range(3)] == losses
    for one, other in zip(state.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.model.lm_head.weight is resumed.model.embed_tokens.weight


def test_saving_has_no_effect_on_the_training_even_before_its_first_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = make_state()
    expected = [train_step(alone) for _ in range(2)]
    torch.manual_seed(0)
    saved = make_state()
    open_checkpoints(tmp_path).save(0, saved)
    assert [train_step(saved) for _ in range(2)] == expected
    fresh = make_state()
    assert open_checkpoints(tmp_path).load_latest(fresh) == 0
    assert not fresh.optimizer.state_dict()["state"]


def test_a_weight_without_a_gradient_so_far_begins_its_moments_with_its_first(tmp_path: Path) -> None:
    state = make_state()
    first, second = list(state.model.parameters())[:2]
    first.grad = torch.ones_like(first)
    state.optimizer.step()
    open_checkpoints(tmp_path).save(1, state)
    resumed = make_state()
    open_checkpoints(tmp_path).load_latest(resumed)
    for each in (state, resumed):
        for parameter in each.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        each.optimizer.step()
        assert [each.optimizer.state[p]["step"].item() for p in list(each.model.parameters())[:2]] == [2, 1]
    assert torch.equal(list(resumed.model.parameters())[1], second)


def test_an_empty_folder_has_nothing_to_load(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path / "none")
    assert checkpoints.latest_step() is None
    assert checkpoints.load_latest(make_state()) is None


def test_the_newest_max_keep_checkpoints_stay(tmp_path: Path) -> None:
    state, saved = make_state(), []
    keeper = Checkpointer(tmp_path, fingerprint="f", max_keep=2, is_async=True, on_saved=saved.append)
    for step in (2, 4, 10, 12):
        keeper.save(step, state)
    keeper.close()
    assert names(tmp_path) == ["step_10", "step_12"]
    assert saved == [2, 4, 10, 12]
    everything = open_checkpoints(tmp_path, max_keep=-1)
    everything.save(14, state)
    assert names(tmp_path) == ["step_10", "step_12", "step_14"]


def test_pruning_neither_counts_nor_deletes_later_steps_or_another_configuration(tmp_path: Path) -> None:
    state = make_state()
    open_checkpoints(tmp_path, fingerprint="other").save(3, state)
    checkpoints = open_checkpoints(tmp_path, max_keep=1)
    checkpoints.save(2, state)
    checkpoints.save(9, state)
    (tmp_path / "step_9" / "policy" / "manifest.json").write_text("{")
    checkpoints.save(4, state)
    assert names(tmp_path) == ["step_3", "step_4", "step_9"]
    assert checkpoints.latest_step() == 4


def test_a_checkpoint_of_another_configuration_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_checkpoints(tmp_path, fingerprint="old").save(5, make_state())
    assert open_checkpoints(tmp_path, fingerprint="new").load_latest(make_state()) is None
    assert "step_5 is passed over: it belongs to another configuration" in caplog.text


def test_a_checkpoint_of_another_model_is_refused_by_the_tensor_that_differs(tmp_path: Path) -> None:
    open_checkpoints(tmp_path).save(1, make_state())
    with pytest.raises(ModelError, match=r"another model: \d+ tensors differ in name or shape, first 'embed_tokens"):
        open_checkpoints(tmp_path).load_latest(make_state(width=8))


def test_pickled_shards_of_cosmos_rl_are_refused_with_the_remedy(tmp_path: Path) -> None:
    policy = tmp_path / "step_7" / "policy"
    policy.mkdir(parents=True)
    (policy / "model_rank_0.pth").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model_rank_0\.pth is a pickled checkpoint .* safetensors"):
        open_checkpoints(tmp_path).load_latest(make_state())
    with pytest.raises(ModelError, match=r"model_rank_0\.pth is a pickled checkpoint .* safetensors"):
        check_checkpoint(policy)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    state = make_state()
    train_step(state)
    open_checkpoints(tmp_path).save(1, state)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for file in files:
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
            pickle.load(io.BytesIO(file.read_bytes()))


def test_what_a_killed_writer_left_is_removed_and_what_it_moved_aside_comes_back(tmp_path: Path) -> None:
    state = make_state()
    open_checkpoints(tmp_path).save(4, state)
    (tmp_path / "step_4").rename(tmp_path / ".step_4.123.old")
    (tmp_path / ".step_4.123.tmp" / "policy").mkdir(parents=True)
    (tmp_path / ".step_6.123.tmp" / "policy").mkdir(parents=True)
    assert open_checkpoints(tmp_path).latest_step() == 4
    assert names(tmp_path) == ["step_4"]


def test_an_error_of_the_writer_thread_surfaces_once_at_the_next_call(tmp_path: Path) -> None:
    state = make_state()
    checkpoints = open_checkpoints(tmp_path / "saved", asynchronous=True)
    (tmp_path / "saved").rmdir()
    (tmp_path / "saved").write_text("a file where the folder should be")
    checkpoints.save(1, state)
    with pytest.raises(StageFailed, match=r"while saving checkpoint step_1 in .*; there is no earlier checkpoint"):
        checkpoints.wait()
    checkpoints.close()


def save_until_the_disk_is_full(folder: str, asynchronous: bool) -> None:
    import resource

    state = make_state()
    train_step(state)
    checkpoints = open_checkpoints(Path(folder), asynchronous=asynchronous)
    fill(state, 20.0)
    checkpoints.save(20, state, BestStep(20, "validation/loss", 2.0))
    checkpoints.wait()
    # Python ignores SIGXFSZ, so a write past the limit is an OSError (EFBIG) in the middle of a file, like ENOSPC.
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    fill(state, 40.0)
    try:
        checkpoints.save(40, state, BestStep(40, "validation/loss", 1.0))
        checkpoints.close()
    except StageFailed as error:
        sys.stdout.write(str(error))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_full_disk_is_one_line_and_the_checkpoint_before_still_loads(tmp_path: Path, asynchronous: bool) -> None:
    folder = tmp_path / "checkpoints"
    call = f"save_until_the_disk_is_full({str(folder)!r}, {asynchronous})"
    done = subprocess.run([sys.executable, "-c", PROGRAM + call], capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        f"disk full while saving checkpoint step_40 in {folder}; "
        "the checkpoint of step 20 is intact; free space and run again"
    ), done.stderr
    assert names(folder) == ["step_20"]
    assert json.loads((tmp_path / BEST_STEP_FILE).read_text())["step"] == 20
    state = make_state()
    assert open_checkpoints(folder).load_latest(state) == 20
    assert is_filled_with(state, 20.0)


def newest_step(folder: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in folder.glob("step_*[0-9]")), default=0)


def save_for_ever(folder: str) -> None:
    state = make_state(width=512)
    train_step(state)
    checkpoints = open_checkpoints(Path(folder), max_keep=2, asynchronous=True)
    step = checkpoints.load_latest(state) or 0
    while True:
        step += 1
        fill(state, float(step))
        checkpoints.save(step, state, BestStep(max(1, step - step % 5), "validation/loss", 1.0))


def test_after_a_kill_at_any_moment_the_newest_and_the_best_checkpoint_have_the_content_of_their_steps(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    call = f"save_for_ever({str(folder)!r})"
    moments = random.Random(0)
    loaded_steps = [0]
    for _ in range(3):
        saver = subprocess.Popen([sys.executable, "-c", PROGRAM + call], stderr=subprocess.DEVNULL)
        try:
            while newest_step(folder) < loaded_steps[-1] + 2:
                assert saver.poll() is None
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.1))
        finally:
            saver.send_signal(signal.SIGKILL)
            saver.wait()
        state = make_state(width=512)
        step = open_checkpoints(folder, max_keep=2).load_latest(state)
        assert step is not None
        assert step > loaded_steps[-1]
        assert is_filled_with(state, float(step))
        best = json.loads((tmp_path / BEST_STEP_FILE).read_text())["step"]
        assert best % 5 == 0 or best == 1
        assert resume_obstacle(folder, best, "f") is None
        loaded_steps.append(step)
    assert len(names(folder)) <= 4


def test_ranks_share_the_digests_of_a_checkpoint_and_one_of_them_finds_what_was_altered(tmp_path: Path) -> None:
    files = {f"file_{i}": {"size": 4, "sha256": hashlib.sha256(b"four").hexdigest()} for i in range(10)}
    for name in files:
        (tmp_path / name).write_bytes(b"four")
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({"files": files}))
    counts: list[list[None]] = [[] for _ in range(4)]
    assert [find_damaged_file(tmp_path, rank, 4, lambda rank=rank: counts[rank].append(None)) for rank in range(4)] == [
        None
    ] * 4
    assert [len(each) for each in counts] == [3, 3, 2, 2]
    (tmp_path / "file_6").write_bytes(b"five")
    assert [find_damaged_file(tmp_path, rank, 4, int) for rank in range(4)] == [None, None, "file_6 was altered", None]
