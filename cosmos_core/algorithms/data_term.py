"""Data term for text models: the SFT loss on rows of a dataset, added to every optimizer step of an RL algorithm. The
number of an optimizer step determines its data rows, so that a checkpoint only stores the number. The data term of
diffusion models is `train.diffusion_setup.make_data_term`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from cosmos_core.algorithms.aggregate import compute_denominator
from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update
from cosmos_core.algorithms.registry import iterate_optimizer_updates
from cosmos_core.algorithms.sft import sft_loss
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch
from cosmos_core.types import ScoredGroup


def make_sft_update(samples: Sequence[Sample], loss_weight: float) -> Update:
    """Return the `Update` with the data term: its loss is `loss_weight` times the mean of -log p over all trained
    tokens of `samples`. The metric `data/nll` is this mean without the factor `loss_weight`."""
    loss_denominator = compute_denominator("token-mean", [sample.num_learned for sample in samples])

    def loss(micro_batch: MicroBatch) -> Loss:
        sft_loss_value, metrics = sft_loss(micro_batch.logprobs_BS, micro_batch.mask_BS, loss_denominator)
        return Loss(loss_weight * sft_loss_value, {f"data/{name}": metric for name, metric in metrics.items()})

    return Update(samples, loss, has_constant_gradient=True)


class DataTermAlgorithm(Algorithm):
    """Algorithm that adds a data term (supervised loss on data rows) to each optimizer step of another algorithm."""

    def __init__(self, algorithm: Algorithm, make_data_term: Callable[[int], Update]) -> None:
        """Wrap `algorithm`. `make_data_term` is called with the number of an optimizer step, counted from 0 over all
        train steps, and returns the supervised `Update` to add to this step."""
        super().__init__(algorithm.config, algorithm.custom, algorithm.sampling)
        self.teacher, self.diffusers = algorithm.teacher, algorithm.diffusers
        self._algorithm, self._make_data_term = algorithm, make_data_term
        self._num_updates = 0

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Sample], dict[str, float]]:
        return self._algorithm.credit(groups)

    def updates(self, samples: Sequence[Any], view: TrainerView) -> Iterator[Update]:
        for update in iterate_optimizer_updates(self._algorithm, samples, view):
            self._num_updates += 1
            yield replace(update, data=self._make_data_term(self._num_updates - 1))

    def after_train_step(self, step: int, view: TrainerView) -> None:
        self._algorithm.after_train_step(step, view)

    def measure(self, chunks: Iterable[Sequence[Any]], view: TrainerView, size: int) -> dict[str, float]:
        return self._algorithm.measure(chunks, view, size)

    def state_dict(self) -> dict[str, Any]:
        return {"algorithm": self._algorithm.state_dict(), "num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, or a state of the wrapped algorithm that a training without data
        term saved."""
        self._algorithm.load_state_dict(state.get("algorithm", state))
        self._num_updates = int(state.get("num_updates", 0))
