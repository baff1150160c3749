"""Reward for completions of the form `<think>...</think>`, a blank line, `<answer>...</answer>`, and nothing else."""

import re

_FORMAT_PATTERN = re.compile(r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*?</answer>$", re.DOTALL)


def format(to_be_evaluated: str, reference: str) -> float:
    """Return 1 if the completion is exactly `<think>...</think>`, a blank line, `<answer>...</answer>`, else 0. The
    text in `<think>` contains no think tags, one newline may follow the end, and the reference is ignored."""
    return float(_FORMAT_PATTERN.match(to_be_evaluated) is not None)
