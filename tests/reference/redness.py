"""A reward of images, in a module that processes which score load without torch."""

from __future__ import annotations

from typing import Any

import numpy as np


def redness(to_be_evaluated: str, reference: str, *, media: Any) -> float:
    """Return how red an image is."""
    return float(np.asarray(media)[..., 0].mean()) / 255
