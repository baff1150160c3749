"""Models without a chat template: plain text with its prompt masked, a template by a key, and what a check shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepare import run
from cosmos_core.data.prepared import check_token_ids, find_longest_row_length
from cosmos_core.errors import ConfigError, DataError, ModelError
from cosmos_core.models.hf import check_rows, load_tokenizer
from cosmos_core.run.files import read_json
from cosmos_core.train import check, setup
from cosmos_core.train.generation import open_engine
from tasks.kinds import all_kinds
from tests.unit.data_tokenizers import CHATML, byte_tokenizer, learned, unlearned
from tests.unit.test_data_prepare import grpo, make_stage, sft
from tests.unit.test_train import make_stage as make_training_stage
from tests.unit.tiny_model import save_tiny_model

ASKED, ANSWERED = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
ROW = {"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    byte_tokenizer(None, end_token="<|endoftext|>").save_pretrained(folder)
    return folder


def rows(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_prompt_and_completion_are_plain_text_whose_prompt_is_masked(tmp_path: Path, model: Path) -> None:
    own = {"frage": "1+1=", "antwort": "2"}
    named = {"prompt_column_name": "frage", "response_column_name": "antwort"}
    for row, policy in ((ROW, {}), ({"prompt": "1+1=", "response": "2"}, {}), (own, named)):
        run(make_stage(tmp_path / "s", model, sft(rows(tmp_path / "a.jsonl", row), **policy)))
        tokens = [each.tolist() for each in open_sequences(tmp_path / "s" / "data", "train")[0]]
        tokenizer = load_tokenizer(str(model))
        assert (unlearned(tokenizer, *tokens), learned(tokenizer, *tokens)) == (["1+1="], ["2<|endoftext|>"])
        assert read_json(tmp_path / "s" / "data" / "statistics.json")["train"]["continued_rows"] == 1
    run(make_stage(tmp_path / "d", model, sft(rows(tmp_path / "a.jsonl", ROW), trainer_type="dpo")))
    pairs = open_pairs(tmp_path / "d" / "data", "train")
    found = [learned(tokenizer, *(each.tolist() for each in side[0])) for side in (pairs.chosen, pairs.rejected)]
    assert found == [["2<|endoftext|>"], ["3<|endoftext|>"]]


@pytest.mark.parametrize("row", [{"messages": [ASKED, ANSWERED]}, {"question": "1+1?", "answer": "2"}])
def test_turns_name_the_remedies(tmp_path: Path, model: Path, row: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"has no chat template; set policy\.chat_template to a Jinja file"):
        run(make_stage(tmp_path / "s", model, sft(rows(tmp_path / "a.jsonl", row))))


def test_templates_without_a_default_name_the_remedies(tmp_path: Path, model: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "named"))
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = {"rag": "{{ messages[0].content }}", "tool_use": "{{ messages[0].content }}"}
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"no chat template named 'default', only rag, tool_use; set policy\.chat_t"):
        run(make_stage(tmp_path / "s", folder, sft(rows(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]}))))


def test_a_template_that_a_recipe_names_renders_rows_and_prompts(tmp_path: Path, model: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template, encoding="utf-8-sig")  # its mark is no token, as an editor adds it
    plain = "<s>User: 1+1?\n\nAssistant: 2<|endoftext|>\n\n"
    for named, text in ((str(tmp_path / "mine.jinja"), "[1+1?][2]"), ("plain", plain)):
        recipe = sft(rows(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]}))
        run(make_stage(tmp_path / "s", model, {**recipe, "policy": {"chat_template": named}}))
        tokens = [each.tolist() for each in open_sequences(tmp_path / "s" / "data", "train")[0]]
        assert load_tokenizer(str(model)).decode(tokens[0]) == text
    assert learned(load_tokenizer(str(model)), *tokens) == [" 2<|endoftext|>"]
    recipe = grpo(rows(tmp_path / "a.jsonl", {"prompt": "1+1?", "answer": "2"}))
    recipe["policy"] = {**recipe["policy"], "chat_template": "plain"}
    run(make_stage(tmp_path / "g", model, recipe))
    assert open_prompts(tmp_path / "g" / "data", "train")[0].text == "<s>User: 1+1?\n\nAssistant:"


@pytest.mark.parametrize(
    ("named", "told"),
    [("chatml", r"needs the token <\|im_start\|>"), ("no.jinja", "no file"), ("~nobody/x", "no file")],
)
def test_a_template_that_cannot_be_had_is_told(model: Path, named: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_tokenizer(str(model), None, named)


def tiny(folder: Path, count: int, batch: int, **policy: Any) -> Any:
    """A stage of rows of about 30 tokens for a model of 256 positions and 260 embeddings."""
    save_tiny_model(folder / "model")
    turns = [{"messages": [ASKED, {**ANSWERED, "content": "2" * length}]} for length in range(1, count + 1)]
    recipe = sft(rows(folder / "a.jsonl", *turns), conversation_column_name="messages")
    recipe["train"]["train_batch_per_replica"] = batch
    (folder / "model" / "chat_template.jinja").write_text(CHATML)
    return make_stage(folder / "s", folder / "model", {**recipe, "policy": policy})


def test_a_check_shows_rows_with_what_is_learned_and_says_which_fill_no_batch(tmp_path: Path) -> None:
    info = check.run(tiny(tmp_path, 12, 8)).info
    assert "4 of 12 rows fill no batch of 8 and are left out of an epoch" in info["found"]
    assert info["shown"][:4] == [
        "a.jsonl:1:",
        "  masked: '<|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n'",
        "  learned: '2<|im_end|>'",
        "  masked: '\\n'",
    ]
    assert "fill no batch" not in check.run(tiny(tmp_path, 12, 4)).info["found"]


def test_a_check_tells_fewer_rows_than_a_batch(tmp_path: Path) -> None:
    told = "the data set has 7 rows, fewer than one batch of 8; lower train.train_batch_per_replica or give more rows"
    assert check.run(tiny(tmp_path, 7, 8)).info["too_few"] == told


def test_a_check_refuses_tokens_without_an_embedding(tmp_path: Path) -> None:
    stage = tiny(tmp_path, 2, 2)
    tokenizer = load_tokenizer(stage.model)
    tokenizer.add_tokens(["<a>", "<b>", "1+1"])
    tokenizer.save_pretrained(stage.model)
    with pytest.raises(DataError, match=r"^a\.jsonl:1: token id 261 has no embedding, of which the model has 260"):
        check.run(stage)


def test_rows_beyond_the_positions_are_told_and_refused_where_these_are_learned(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config

    stage = tiny(tmp_path, 300, 2, model_max_length=400)
    said = "tokens are longer than the 256 positions of the model (max_position_embeddings)"
    assert said in check.run(stage).info["found"]
    folder = stage.path / "data"
    longest = find_longest_row_length(folder)
    assert longest == max(len(open_sequences(folder, "train")[i][0]) for i in range(300))
    sizes = {"vocab_size": 260, "n_embd": 8, "n_head": 1, "n_layer": 1}
    for positions in (longest - 1, longest):
        config = GPT2Config(**sizes, n_positions=positions)
        build = lambda config=config: AutoModelForCausalLM.from_config(config)  # noqa: E731
        if positions < longest:
            with pytest.raises(ModelError, match=r"positions of the model; lower policy\.model_max_length"):
                check_rows(config, folder, build)
        else:
            assert check_rows(config, folder, build) == ""
            assert check_rows(config, folder, build, completed_splits=["train"]) == "", "they are no prompts"
    check_token_ids(folder, Qwen3Config(vocab_size=260).vocab_size)


def test_a_prompt_that_leaves_a_completion_no_position_is_refused_before_the_training(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    schema = load_row_kind("prompts").schema
    cells = [{name: [1] * n if name == "prompt_ids" else "" for name in schema.names} for n in (3, 9)]
    with pa.ipc.new_file(tmp_path / "train.arrow", schema) as writer:
        writer.write_table(pa.Table.from_pylist(cells, schema=schema))
    for positions in (9, 10):
        config = Qwen3Config(vocab_size=260, max_position_embeddings=positions)
        assert check_rows(config, tmp_path, lambda: None) == ""
        if positions == 10:
            assert check_rows(config, tmp_path, lambda: None, completed_splits=["train"]) == ""
        else:
            with pytest.raises(ModelError, match=r"of 9 tokens leaves none of the 9 .*policy.model_max_length to 9"):
                check_rows(config, tmp_path, lambda: None, completed_splits=["train"])
            assert check_rows(config, tmp_path, lambda: None, completed_splits=["validation"]) == ""


@pytest.mark.parametrize("endpoint", ["", "http://host:8000/v1"])
def test_a_check_refuses_such_prompts_unless_a_server_completes_them(tmp_path: Path, endpoint: str) -> None:
    save_tiny_model(tmp_path / "model")  # of 256 positions
    recipe = grpo(rows(tmp_path / "a.jsonl", {"prompt": "1" * 300, "answer": "2"}))
    recipe["policy"] = {**recipe["policy"], "model_max_length": 400, "chat_template": "plain"}
    recipe["sample"] = {"endpoint": endpoint, "endpoint_model": "m" if endpoint else ""}
    stage = make_stage(tmp_path / "s", tmp_path / "model", recipe)
    if endpoint:
        assert "tokens are longer than the 256 positions of the model" in check.run(stage).info["found"]
    else:
        with pytest.raises(ModelError, match=r"leaves none of the 256 .*policy.model_max_length to 256"):
            check.run(stage)


def test_a_stage_that_samples_refuses_such_prompts_before_it_opens_an_engine(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")  # of 256 positions
    schema = load_row_kind("prompts").schema
    row = {name: [1] * 256 if name == "prompt_ids" else "" for name in schema.names}
    with pa.ipc.new_file(tmp_path / "train.arrow", schema) as writer:
        writer.write_table(pa.Table.from_pylist([row], schema=schema))
    stage = make_training_stage(tmp_path / "sample", "sample", Recipe(), tmp_path / "model", tmp_path)
    with pytest.raises(ModelError, match=r"of 256 tokens leaves none of the 256 positions"):
        open_engine(stage, lambda: None)


def test_a_training_names_the_rows_that_fill_no_batch_where_it_ends(tmp_path: Path) -> None:
    at = tiny(tmp_path, 3, 2)
    run(at)
    at.data, at.kind = at.path / "data", all_kinds()["sft"]
    outcome = setup.run(at)
    assert outcome.info["notices"] == [
        "1 of 3 rows fill no batch of 2 and are left out of an epoch (the same ones); "
        "train.train_policy.dataloader_drop_last = false learns them in a smaller batch"
    ]
