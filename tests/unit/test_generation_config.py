"""What a model says about generating enters no weight: it stops neither a training nor an export."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from cosmos_core.data.prepare import read_stop_tokens
from cosmos_core.models.export import export_model
from cosmos_core.models.generation_config import GENERATION_CONFIG_FILE
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.rollout.base import stop_token_ids
from tests.cells import full
from tests.unit.tiny_model import save_tiny_model

# What transformers loads, but refuses to save; many published models have the first.
NOT_SAVED = [
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"use_cache": False, "cache_implementation": "static"},
    {"temperature": "warm"}, *full(
        {"min_p": 0.1}, {"top_h": 0.4}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.1}, {"eta_cutoff": 0.1},
        {"pad_token_id": -1}, {"early_stopping": True}, {"length_penalty": 2.0}, {"output_scores": True},
    ),
]  # fmt: skip
# What it refuses to load, with the setting that is left out.
NOT_LOADED = [
    ({"num_return_sequences": 3}, "num_return_sequences"),
    ({"forced_eos_token_id": 2, "suppress_tokens": [2]}, "suppress_tokens"),
    ({"streamer": None, "compile_config": 3}, "compile_config, streamer"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    *full(
        ({"early_stopping": "sometimes"}, "early_stopping"), ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"cache_implementation": "unknown"}, "cache_implementation"), ({"pad_token_id": [1]}, "pad_token_id"),
        ({"watermarking_config": {"seeding_scheme": "q"}}, "watermarking_config"),
    ),
]  # fmt: skip


def exported(folder: Path, said: Any, target: Path) -> Path:
    """The model of a folder whose generation config says this, exported and loaded again."""
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps(said))
    model, tokenizer = load_model(str(folder), dtype=torch.float32), load_tokenizer(str(folder))
    export_model(model, tokenizer, target, dtype=None)
    AutoModelForCausalLM.from_pretrained(target)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("said", NOT_SAVED, ids=lambda said: next(iter(said)))
def test_what_transformers_refuses_to_save_is_exported_as_it_was(
    folder: Path, tmp_path: Path, said: dict[str, Any]
) -> None:
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps(said))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        GenerationConfig.from_pretrained(folder).save_pretrained(tmp_path)
    target = exported(folder, {"eos_token_id": [255, 258], **said}, tmp_path / "export")
    written = json.loads((target / GENERATION_CONFIG_FILE).read_text())
    del written["transformers_version"]
    assert written == {"eos_token_id": [255, 258], **said}


@pytest.mark.parametrize(("said", "refused"), NOT_LOADED)
def test_what_transformers_refuses_to_load_is_left_out_by_name(
    folder: Path, tmp_path: Path, said: dict[str, Any], refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        target = exported(folder, {"do_sample": False, "temperature": 0.6, **said}, tmp_path / "export")
    assert f"refuses to load {refused}, left out" in caplog.text
    assert AutoModelForCausalLM.from_pretrained(target).generation_config.temperature == 0.6
    tokenizer = load_tokenizer(str(folder))
    assert read_stop_tokens(str(folder), None, tokenizer) == (tokenizer.eos_token_id,)


def test_a_number_outside_the_vocabulary_is_no_token_that_ends_a_completion(folder: Path) -> None:
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps({"eos_token_id": [-1, 257, 128009]}))
    tokenizer = load_tokenizer(str(folder))
    assert read_stop_tokens(str(folder), None, tokenizer) == (tokenizer.eos_token_id, 257, 128009)
    model = load_model(str(folder), dtype=torch.float32)
    assert stop_token_ids(model, tokenizer) == [257, 258], "vLLM refuses a request with others"


@pytest.mark.parametrize(("said", "written"), [({"eos_token_id": 256}, [256, 258]), ({}, [258]), (None, 258)])
def test_an_export_ends_a_completion_where_its_rows_did(folder: Path, tmp_path: Path, said: Any, written: Any) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    target = tmp_path / "export"
    if said is None:  # the end token is that of config.json
        (copied / GENERATION_CONFIG_FILE).unlink()
        export_model(load_model(str(copied), dtype=torch.float32), load_tokenizer(str(copied)), target, dtype=None)
    else:
        exported(copied, said, target)
    assert json.loads((target / GENERATION_CONFIG_FILE).read_text())["eos_token_id"] == written
