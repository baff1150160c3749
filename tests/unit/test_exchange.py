"""What ranks hand each other, by several threads of a rank at once: the training, and the writer of checkpoints."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from cosmos_core.parallel.exchange import _deserialize, _serialize
from cosmos_core.types import Completion, Score, Segment


def test_records_are_read_by_several_threads_at_once() -> None:
    completion = Completion((Segment((1, 2), True, (-0.5, -1.0), 3),), "stop", "text")
    packed = _serialize([completion, Score(1.0)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: _deserialize(packed), range(400)))
    finally:
        sys.setswitchinterval(interval)
    assert found == [[completion, Score(1.0)]] * 400
