"""Commands that write a recipe for a user's rows: what they refuse before they look at model and rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core import cli_train
from cosmos_core.errors import ConfigError


@pytest.mark.parametrize(
    ("reward", "message"),
    [("boxd_math", "did you mean 'boxed_math'"), ("nofile.py:f", "nofile.py"), ("mine.py:g", "mine.py.*'?g"),
     ("mine.py:", "mine.py")],
)  # fmt: skip
def test_a_reward_that_is_not_there_is_refused_before_model_and_rows_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completion):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=message):
        cli_train.grpo(model="none", data="none", reward=reward, dry_run=True)
