"""Export as one GGUF file, which the converter of llama.cpp writes and transformers loads again."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cosmos_core.errors import StageFailed

GGUF_FORMAT = "gguf"
GGUF_FILE = "model.gguf"
CONVERTER_PROGRAM = "convert_hf_to_gguf.py"
_POLL_INTERVAL_SECONDS = 1.0


def find_gguf_problem() -> str:
    """Return the reason why a GGUF file cannot be written or loaded on this machine; "" if it can."""
    if shutil.which(CONVERTER_PROGRAM) is None:
        return f"{CONVERTER_PROGRAM} of llama.cpp is not on PATH, or not executable"
    if importlib.util.find_spec("gguf") is None:
        return "the package gguf, with which transformers loads it, is not installed (pip install gguf)"
    return ""


def write_gguf(source_folder: Path, target_folder: Path, on_converter_poll: Callable[[], None]) -> None:
    """Write the model in `source_folder` to `target_folder` as a bfloat16 GGUF file, with the converter of llama.cpp.
    `on_converter_poll` is called every second until the converter has ended, and can raise an error to stop it. Raise
    `StageFailed` if the converter fails."""
    target_folder.mkdir(parents=True)
    converter_command = [sys.executable, str(shutil.which(CONVERTER_PROGRAM)), str(source_folder), "--outtype", "bf16"]
    with tempfile.TemporaryFile() as log_file:
        converter_process = subprocess.Popen(
            [*converter_command, "--outfile", str(target_folder / GGUF_FILE)], stdout=log_file, stderr=log_file
        )
        try:
            while converter_process.poll() is None:
                on_converter_poll()
                with suppress(subprocess.TimeoutExpired):
                    converter_process.wait(_POLL_INTERVAL_SECONDS)
        finally:
            converter_process.kill()
            converter_process.wait()
        log_file.seek(0)
        log_lines = log_file.read().decode(errors="replace").split("\n")
    if converter_process.returncode or not (target_folder / GGUF_FILE).is_file():
        last_log_line = next((line.strip() for line in reversed(log_lines) if line.strip()), "it wrote no file")
        raise StageFailed(f"{CONVERTER_PROGRAM} failed with exit code {converter_process.returncode}: {last_log_line}")
