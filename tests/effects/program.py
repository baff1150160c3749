"""A custom stage that says what it was given and where it runs."""

import os
import signal
import time
from pathlib import Path

from cosmos_core.types import Outcome


def report(stage, word="", seconds=0.0, ask_to_stop=""):
    """Sleep, perhaps send itself a signal, and report."""
    time.sleep(seconds)
    if ask_to_stop:
        os.kill(os.getpid(), signal.Signals[ask_to_stop])
    supervisor = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    info = {
        "word": word,
        "model": stage.model,
        "data": str(stage.data),
        "threads": os.environ["OMP_NUM_THREADS"],
        "grace": supervisor[supervisor.index("--grace") + 1],
        "python": os.environ.get("INTERPRETER", "this one"),
        "variable": os.environ.get("VARIABLE", ""),
        "stops": stage.stop_requested,
    }
    return Outcome(info=info)


def other(stage):
    """Report nothing."""
    return Outcome(info={"word": "other"})


def scored(stage):
    """Ask the reward service."""
    from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
    from cosmos_core.rewards.exchange import read_service_endpoints
    from cosmos_core.rewards.remote import RemoteRewards

    config = RemoteRewardConfig.model_validate({"reward_fns": [{"name": "exact_match"}], "timeout_seconds": 60.0})
    remote = RemoteRewards(config, read_service_endpoints())
    [score] = remote.score([{"prompt": "", "to_be_evaluated": "42", "reference": "42"}])
    return Outcome(info={"value": score.value, "url": os.environ["REMOTE_REWARD_ENQUEUE_URL"]})
