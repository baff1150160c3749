"""Step time of a training that sends every checkpoint to a store while it goes on, beside the same one that sends none.

    python -m benchmarks.uploads [--rounds 3] [--steps 60] [--hidden 256]

Both take turns in one process, so that who else is at work on the machine disturbs both alike. The store is moto in a
process of its own on loopback. It stands for other machines, so it computes at the lowest priority; its traffic through
this machine's memory, and what it takes of a core that is free, are the training's loss all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

DEMOS = Path(__file__).parents[1] / "configs" / "demo"
PIPELINE = """
[pipeline]
name = "uploads"

[train]
param_dtype = "float32"
compile = false
optm_lr = 1e-3
epoch = 1000
train_batch_per_replica = 16

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "DEMOS/arithmetic.py:make"

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"
overrides.train.train_policy = { type = "sft", mini_batch = 16, conversation_column_name = "messages" }
""".replace("DEMOS", str(DEMOS))
_BUCKET = "benchmark"
_WARM = 5  # steps that are left out


def main() -> None:
    """Print a line for each training, then the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1")
    steps: dict[str, list[float]] = {"none": [], "all": []}
    with tempfile.TemporaryDirectory() as folder, store() as url:
        os.environ["AWS_ENDPOINT_URL_S3"] = url
        for number in range(options.rounds):
            for sends in ("none", "all") if number % 2 == 0 else ("all", "none"):
                found, sent = training(Path(folder) / f"{sends}-{number}", sends, options)
                steps[sends] += found
                say({"sends": sends, "step, median": statistics.median(found), "checkpoints sent": sent})
    medians = {sends: statistics.median(found) for sends, found in steps.items()}
    say({"all / none": medians["all"] / medians["none"], "bar": 1.05})


@contextmanager
def store() -> Iterator[str]:
    """Run a store with an empty bucket; give its URL."""
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["nice", "-n", "19", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                boto3.client("s3", endpoint_url=url).create_bucket(Bucket=_BUCKET)
                break
            except Exception:  # it is still starting
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.3)
        yield url
    finally:
        server.kill()
        server.wait()


def training(folder: Path, sends: str, options: argparse.Namespace) -> tuple[list[float], int]:
    """Train once, in a folder of runs of its own; return the seconds per step and how many checkpoints were sent."""
    from cosmos_core.config.compose import load_pipeline
    from cosmos_core.run.directory import create_run
    from tasks.kinds import all_kinds
    from tasks.stage import run_stage

    folder.mkdir()
    (folder / "p.toml").write_text(PIPELINE)
    ckpt = {"enable_checkpoint": True, "save_freq": options.save_every, "max_keep": 2}
    ckpt |= {"upload_s3": "all", "s3_bucket": _BUCKET, "s3_prefix": folder.name} if sends == "all" else {}
    arguments = {"train_rows": 2000, "heldout_rows": 20, "hidden_size": options.hidden}
    overrides = [
        f"pipeline.output_dir={folder}/outputs",
        f"train.max_num_steps={options.steps}",
        *(
            f"sft.train.ckpt.{key}={tomli_w.dumps({'v': value}).partition('=')[2].strip()}"
            for key, value in ckpt.items()
        ),
        *(f"task.arguments.{key}={value}" for key, value in arguments.items()),
    ]
    run = create_run(load_pipeline(folder / "p.toml", overrides, all_kinds()))
    for name in ("task", "sft-data", "sft"):
        run_stage(run, name)
    lines = [json.loads(line) for line in (run.stage_path("sft") / "metrics.jsonl").read_text().splitlines()]
    events = (run.stage_path("sft") / "events.jsonl").read_text()
    return [line["time/step"] for line in lines if line.get("time/step")][_WARM:], events.count('"sent"')


def say(values: dict[str, object]) -> None:
    """Write one line of JSON to standard output."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
