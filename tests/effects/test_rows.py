"""Keys of the data: the rows that a `prepare` stage writes."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.source_weights import reward_weights_of_source
from cosmos_core.data import prepare
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.order import Mixture
from cosmos_core.data.prepared import has_split, read_mixture, read_row_kind
from cosmos_core.errors import DataError
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.run.progress import ProgressWriter
from tests.effects.change import GRPO, SFT, Change, changes, recipe, stage_of
from tests.unit.data_tokenizers import CHATML, byte_tokenizer

LENGTHS = {"policy.model_max_length": 64, "rollout.max_response_length": 8}
# Paths are relative to the folder that each test works in.
SFT_ROWS = {**SFT, "train.train_policy.dataset.name": "rows"}
PAIRED = {
    **SFT_ROWS, "train.train_policy.prompt_column_name": "prompt", "train.train_policy.response_column_name": "answer"
}  # fmt: skip
GRPO_ROWS = {**GRPO, **LENGTHS, "train.train_policy.dataset.name": "rows"}
KEPT = {**GRPO_ROWS, "train.train_policy.dataset.keep": "pass_rate >= 0.625"}
HELD_OUT_KEPT = {
    **GRPO_ROWS, "validation.dataset.name": "rows", "validation.dataset.keep": "pass_rate <= 0.25"
}  # fmt: skip
HELD_OUT = {**SFT_ROWS, "validation.dataset.name": "rows"}
BAD = {**SFT, "train.train_policy.dataset.name": "bad.jsonl"}
MANY = {**SFT, "train.train_policy.dataset.name": "many.jsonl"}
TURNS = "rollout.multi_turn_config"
CHAT_ROWS = {**GRPO_ROWS, f"{TURNS}.enable": True}
TOLD = {**CHAT_ROWS, f"{TURNS}.custom_chat_template_path": "told.jinja"}
OPEN = {
    **CHAT_ROWS, f"{TURNS}.add_generation_prompt": False, "train.train_policy.prompt_column_name": "conversations",
}  # fmt: skip
FEW_SUMS: dict[str, Any] = {"name": "reasoning-gym:chain_sum", "arguments": {"size": 4}}
GENERATED = {**GRPO, "policy.model_max_length": 512}
MIX = "train.train_policy.datasets"
MIXED: dict[str, Any] = {**SFT, MIX: [{"name": "rows"}]}
MIXED_ON_HUB = {**SFT, MIX: [{"name": "org/rows"}]}
MIXED_PROMPTS = {**GRPO, **LENGTHS, MIX: [{"name": "rows"}]}
ON_HUB = {**SFT, "train.train_policy.dataset.name": "org/rows"}
TERM = "train.train_policy.data_term"
BESIDE = {**GRPO_ROWS, f"{TERM}.weight": 0.1, f"{TERM}.name": "rows"}
BESIDE_ON_HUB = {**BESIDE, f"{TERM}.name": "org/rows"}
HELD_OUT_ON_HUB = {**SFT_ROWS, "validation.dataset.name": "org/rows"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, a folder of two splits, and a file."""
    tmp_path = tmp_path_factory.mktemp("inputs")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "short.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}>")
    (tmp_path / "told.jinja").write_text(
        "{% for t in tools or [] %}{{ t.function.description }} {% endfor %}"
        "{% if enable_thinking %}Think. {% endif %}" + CHATML
    )
    lines = ["from cosmos_core.tools.base import tool", "@tool", "def now() -> str:", '    """Say the time."""']
    (tmp_path / "tools.py").write_text("\n".join(lines))
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    packer = f"class First:\n    def sft_process_sample(self, item):\n        return {turns}\n"
    (tmp_path / "packer.py").write_text(packer)
    for name in ("rows/train", "rows/dev", "other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row(name, i)) + "\n" for i in range(8)))
    return tmp_path


@pytest.fixture(autouse=True)
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the inputs, in which the test works."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)


def row(name: str, number: int) -> dict[str, Any]:
    turns = [("q", "a"), ("q2", "a2")]
    first, second = (
        [{"role": "user", "content": f"{name} {q} {number}"}, {"role": "assistant", "content": f"{a} {number}"}]
        for q, a in turns
    )
    return {"conversations": first, "talk": second, "prompt": f"p {number}", "ask": f"ask {number}",
            "answer": f"a {number}", "truth": f"truth {number}"}  # fmt: skip


def prepared(recipe: Recipe, folder: Path) -> dict[str, list[str]]:
    """Each row of each split as text; a prompt with its reference behind a bar."""
    stage = stage_of(folder / "stage", recipe, kind="prepare", model=folder / "model")
    prepare.run(stage)
    data, tokenizer = stage.path / "data", load_tokenizer(str(folder / "model"))
    found = {}
    for split in ("train", "validation", "data_term"):
        if not has_split(data, split):
            continue
        if read_row_kind(data, split) == "prompts":
            found[split] = [f"{prompt.text}|{prompt.reference}" for prompt in open_prompts(data, split)]
        else:
            sequences = open_sequences(data, split)
            found[split] = [str(tokenizer.decode(sequences[i][0])) for i in range(len(sequences))]
    return found


_USUAL: dict[str, dict[str, list[str]]] = {}


def usual(recipe: Recipe, folder: Path) -> dict[str, list[str]]:
    """What the inputs are prepared to, once for each recipe."""
    key = repr(recipe)
    if key not in _USUAL:
        _USUAL[key] = prepared(recipe, folder)
    return _USUAL[key]


def talk(question: str, answer: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def asked(question: str, reference: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n|{reference}"


@changes(
    (Change("train.train_policy.dataset.name", "other.jsonl", SFT_ROWS), ("train", 8, talk("other q 0", "a 0"))),
    (Change("train.train_policy.data_packer", "packer.py:First", SFT_ROWS), ("train", 8, talk("q", "a"))),
    (Change("train.train_policy.dataset.split", ["dev", "train"], SFT_ROWS),
     ("train", 16, talk("rows/dev q 0", "a 0"))),
    (Change("train.train_policy.dataset.test_size", 0.25, SFT_ROWS), ("validation", 2, None)),
    (Change("train.train_policy.conversation_column_name", "talk", SFT_ROWS),
     ("train", 8, talk("rows/train q2 0", "a2 0"))),
    (Change("train.train_policy.system_prompt", "Add.", SFT_ROWS),
     ("train", 8, "<|im_start|>system\nAdd.<|im_end|>\n" + talk("rows/train q 0", "a 0"))),
    (Change("train.train_policy.system_prompt", "Add.", GRPO_ROWS),
     ("train", 8, "<|im_start|>system\nAdd.<|im_end|>\n" + asked("p 0", "a 0"))),
    (Change("train.train_policy.prompt_column_name", "ask", PAIRED), ("train", 8, talk("ask 0", "a 0"))),
    (Change("train.train_policy.response_column_name", "truth", PAIRED), ("train", 8, talk("p 0", "truth 0"))),
    (Change("train.train_policy.prompt_column_name", "ask", GRPO_ROWS), ("train", 8, asked("ask 0", "a 0"))),
    (Change("train.train_policy.response_column_name", "truth", GRPO_ROWS), ("train", 8, asked("p 0", "truth 0"))),
    (Change("train.train_policy.type", "grpo", {**SFT_ROWS, **LENGTHS}), ("train", 8, asked("p 0", "a 0"))),
    (Change("train.train_policy.type", "sft", GRPO_ROWS), ("train", 8, talk("rows/train q 0", "a 0"))),
    (Change("policy.chat_template", "short.jinja", GRPO_ROWS), ("train", 8, "p 0>|a 0")),
    (Change(f"{TURNS}.custom_chat_template_path", "short.jinja", CHAT_ROWS), ("train", 8, "p 0>|a 0")),
    (Change(f"{TURNS}.enable_thinking", True, TOLD), ("train", 8, "Think. " + asked("p 0", "a 0"))),
    (Change(f"{TURNS}.tools", ["tools.py:now"], {**TOLD, f"{TURNS}.enable_tools": True}),
     ("train", 8, "Say the time. " + asked("p 0", "a 0"))),
    (Change(f"{TURNS}.add_generation_prompt", False, CHAT_ROWS),
     ("train", 8, asked("p 0", "a 0").replace("<|im_start|>assistant\n", ""))),
    (Change(f"{TURNS}.continue_final_message", True, OPEN),
     ("train", 8, "<|im_start|>user\nrows/train q 0<|im_end|>\n<|im_start|>assistant\na 0|a 0")),
    (Change("validation.dataset.name", "other.jsonl", SFT_ROWS), ("validation", 8, talk("other q 0", "a 0"))),
    (Change("validation.max_rows", 3, HELD_OUT), ("validation", 3, None)),
    (Change("validation.dataset.split", "dev", HELD_OUT), ("validation", 8, talk("rows/dev q 0", "a 0"))),
    (Change(f"{MIX}.name", "other.jsonl", MIXED), ("train", 8, talk("other q 0", "a 0"))),
    (Change(f"{MIX}.split", ["dev", "train"], MIXED), ("train", 16, talk("rows/dev q 0", "a 0"))),
    (Change(f"{MIX}.test_size", 0.25, MIXED), ("validation", 2, None)),
    (Change(f"{MIX}.columns", {"conversation": "talk"}, MIXED), ("train", 8, talk("rows/train q2 0", "a2 0"))),
    (Change(f"{MIX}.columns", {"prompt": "ask", "response": "truth"}, MIXED_PROMPTS),
     ("train", 8, asked("ask 0", "truth 0"))),
    (Change(f"{MIX}.system_prompt", "Add.", MIXED_PROMPTS),
     ("train", 8, "<|im_start|>system\nAdd.<|im_end|>\n" + asked("p 0", "a 0"))),
    (Change(f"{TERM}.name", "other.jsonl", BESIDE), ("data_term", 8, talk("other q 0", "a 0"))),
    (Change(f"{TERM}.split", ["dev", "train"], BESIDE), ("data_term", 16, talk("rows/dev q 0", "a 0"))),
    (Change(f"{TERM}.conversation_column_name", "talk", BESIDE), ("data_term", 8, talk("rows/train q2 0", "a2 0"))),
)  # fmt: skip
def test_it_changes_the_rows(change: Change, expected: tuple[str, int, str | None], folder: Path) -> None:
    before, after = usual(change.before, folder), prepared(change.after, folder)
    split, count, first = expected
    assert before != after
    assert len(after[split]) == count
    assert first is None or after[split][0] == first


@changes(
    (Change("train.train_policy.dataset.arguments", {"size": 3, "seed": 1},
            {**GENERATED, "train.train_policy.dataset": FEW_SUMS}), ("train", 4)),
    (Change(f"{MIX}.arguments", {"size": 3, "seed": 1}, {**GENERATED, MIX: [FEW_SUMS]}), ("train", 4)),
    (Change("validation.dataset.arguments", {"size": 3, "seed": 1},
            {**GENERATED, "train.train_policy.dataset": FEW_SUMS, "validation.dataset": FEW_SUMS}), ("validation", 4)),
)  # fmt: skip
def test_it_changes_the_generated_rows(change: Change, expected: tuple[str, int], folder: Path) -> None:
    split, count = expected
    before, after = usual(change.before, folder)[split], prepared(change.after, folder)[split]
    assert [len(before), len(after)] == [count, 3] and after != before[:3]


@changes(
    (Change("train.train_policy.dataset.subset", "hard", ON_HUB), ("train", "org/rows hard None train")),
    (Change("train.train_policy.dataset.revision", "v2", ON_HUB), ("train", "org/rows None v2 train")),
    (Change("validation.dataset.subset", "hard", HELD_OUT_ON_HUB), ("validation", "org/rows hard None train")),
    (Change("validation.dataset.revision", "v2", HELD_OUT_ON_HUB), ("validation", "org/rows None v2 train")),
    (Change(f"{MIX}.subset", "hard", MIXED_ON_HUB), ("train", "org/rows hard None train")),
    (Change(f"{MIX}.revision", "v2", MIXED_ON_HUB), ("train", "org/rows None v2 train")),
    (Change(f"{TERM}.subset", "hard", BESIDE_ON_HUB), ("data_term", "org/rows hard None train")),
    (Change(f"{TERM}.revision", "v2", BESIDE_ON_HUB), ("data_term", "org/rows None v2 train")),
)
def test_it_changes_what_is_asked_of_the_hub(
    change: Change, expected: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hub(name: str, subset: str | None, *, revision: str | None, split: str) -> datasets.Dataset:
        return datasets.Dataset.from_list([{"text": f"{name} {subset} {revision} {split}"}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    split, text = expected
    assert usual(change.before, folder)[split] == ["org/rows None None train<|im_end|>"]
    assert prepared(change.after, folder)[split] == [f"{text}<|im_end|>"]


@changes(
    Change(
        "train.train_policy.dataset.max_skipped_fraction", 0.5, {**SFT, "train.train_policy.dataset.name": "bad.jsonl"}
    ),
    Change("validation.dataset.max_skipped_fraction", 0.5, {**SFT_ROWS, "validation.dataset.name": "bad.jsonl"}),
    Change(f"{MIX}.max_skipped_fraction", 0.5, {**SFT, MIX: [{"name": "bad.jsonl"}]}),
    Change(f"{TERM}.max_skipped_fraction", 0.5, {**BESIDE, f"{TERM}.name": "bad.jsonl"}),
)
def test_it_bounds_the_rows_that_are_left_out(change: Change, folder: Path) -> None:
    good = json.dumps(row("x", 0))
    (folder / "bad.jsonl").write_text(f'{good}\n{{"messages": 3}}\n')
    with pytest.raises(DataError, match=r"^bad\.jsonl:2: .*more than dataset\.max_skipped_fraction = 0\.01 allows"):
        prepared(change.before, folder)
    assert talk("x q 0", "a 0") in [text for texts in prepared(change.after, folder).values() for text in texts]


@changes(
    (Change("train.train_policy.dataset.keep", "pass_rate < 0.5", SFT_ROWS), ("train", 4)),
    (Change("train.train_policy.dataset.keep", "0.25 <= pass_rate <= 0.5", GRPO_ROWS), ("train", 3)),
    (Change("validation.dataset.keep", "0.25 < pass_rate", HELD_OUT), ("validation", 5)),
    (Change("train.train_policy.dataset.pass_rates", "rates.jsonl", KEPT), ("train", 3)),
    (Change(f"{MIX}.keep", "pass_rate < 0.5", MIXED), ("train", 4)),
    (Change(f"{MIX}.pass_rates", "rates.jsonl",
            {**MIXED_PROMPTS, MIX: [{"name": "rows", "keep": KEPT["train.train_policy.dataset.keep"]}]}), ("train", 3)),
    (Change("validation.dataset.pass_rates", "rates.jsonl", HELD_OUT_KEPT), ("validation", 3)),
)  # fmt: skip
def test_it_keeps_rows_by_their_pass_rate(change: Change, expected: tuple[str, int], folder: Path) -> None:
    for name in ("rows/train", "rows/dev"):
        rows = [{**row(name, i), "pass_rate": i / 8} for i in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    lines = [{"prompt": asked(f"p {i}", "").removesuffix("|"), "pass_rate": i and 1 - i / 8} for i in range(8)]
    (folder / "rates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    split, count = expected
    before, after = prepared(change.before, folder)[split], prepared(change.after, folder)[split]
    assert before != after and len(after) == count


@pytest.mark.parametrize("key", ["train.train_policy.dataset", MIX])
def test_held_out_rows_are_the_same_and_need_no_rate_if_training_rows_are_kept_by_theirs(
    key: str, folder: Path
) -> None:
    def of(**more: str) -> dict[str, list[str]]:
        table = {"name": "rows", "test_size": 2, **more}
        return prepared(recipe({**GRPO, **LENGTHS, key: [table] if key == MIX else table}), folder)

    before = of()
    prompts = [text.removesuffix(f"a {text[-1]}").removesuffix("|") for text in before["train"]]
    lines = [json.dumps({"prompt": prompt, "pass_rate": float(i < 4)}) for i, prompt in enumerate(prompts)]
    (folder / "rates.jsonl").write_text("\n".join(lines))
    after = of(keep="pass_rate < 1", pass_rates="rates.jsonl")
    assert after == {"train": before["train"][4:], "validation": before["validation"]}


@pytest.mark.parametrize("rate", ["high", [0.5], {}])
def test_a_pass_rate_that_is_no_number_is_one_line(rate: Any, folder: Path) -> None:
    (folder / "other.jsonl").write_text(json.dumps({**row("other", 0), "pass_rate": rate}) + "\n")
    change = Change(
        "train.train_policy.dataset.keep",
        "pass_rate < 1",
        {**GRPO_ROWS, "train.train_policy.dataset.name": "other.jsonl"},
    )
    with pytest.raises(DataError, match=r"^other\.jsonl:1: the pass rate .* of its row is no number or null"):
        prepared(change.after, folder)


@changes(
    (Change(f"{MIX}.label", "talks", MIXED), Mixture(("talks",), (8,), (8,))),
    (Change(f"{MIX}.weight", 2.5, MIXED), Mixture(("rows",), (8,), (2.5,))),
)
def test_it_changes_the_mixture(change: Change, expected: Mixture, folder: Path) -> None:
    prepared(change.before, folder)
    assert read_mixture(folder / "stage/data/train.arrow") == Mixture(("rows",), (8,), (8,))
    prepared(change.after, folder)
    assert read_mixture(folder / "stage/data/train.arrow") == expected


@changes(Change(f"{MIX}.reward_function", "format", MIXED_PROMPTS))
def test_it_changes_the_rewards_of_a_data_set(change: Change) -> None:
    rewards = [side.train.train_policy.rewards for side in (change.before, change.after)]
    assert [reward_weights_of_source(each, "rows") for each in rewards] == [{"single_choice": 1.0}, {"format": 1.0}]
    assert [reward_weights_of_source(each, "") for each in rewards] == [{"single_choice": 1.0}] * 2


@changes(Change("policy.model_max_length", 25, SFT_ROWS))
def test_it_bounds_the_rows(change: Change, folder: Path) -> None:
    assert prepared(change.before, folder)["train"][0].startswith(talk("rows/train q 0", "a 0"))
    prepared(change.after, folder)
    assert set(open_sequences(folder / "stage/data", "train").lengths) == {25}


@changes(
    Change("train.train_policy.dataloader_num_workers", 2, MANY),
    full=[Change("train.train_policy.dataloader_num_workers", 2, {**MANY, **GRPO, **LENGTHS})],
)
def test_it_changes_the_processes_that_tokenise(change: Change, folder: Path) -> None:
    (folder / "many.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "response": "a"}) + "\n" for i in range(257))
    )

    others = set(multiprocessing.active_children())  # of tests before

    class Watch(ProgressWriter):
        most = 0

        def step(self, *position: Any, **metrics: float) -> None:
            self.most = max(self.most, len(set(multiprocessing.active_children()) - others))

    def processes(recipe: Recipe) -> int:
        stage = stage_of(folder / "stage", recipe, kind="prepare", model=folder / "model")
        stage.__dict__["progress"] = watch = Watch(folder / "progress.json")
        prepare.run(stage)
        return watch.most

    assert processes(change.before) == 0
    assert processes(change.after) == 2
