"""The vLLM engine against the trainer's own log-probabilities, in one process beside this one."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from cosmos_core.rollout.vllm import VllmEngine
from cosmos_core.types import ImageRef, Prompt
from tests.unit.tiny_model import save_tiny_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def results(work: Path, is_tied: bool, *, further_engines: bool = False) -> dict[str, Any]:
    folder = save_tiny_model(work / "tiny", tied=is_tied)
    program = f"from tests.unit import vllm_program; vllm_program.main(*sys.argv[1:], {further_engines=})"
    command = [sys.executable, "-c", f"import sys; {program}", str(folder), str(work / "found.json")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads((work / "found.json").read_text())


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.full)], ids=["tied", "untied"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("vllm"), request.param)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("vllm"), is_tied=True, further_engines=True)


def test_logprobs_agree_with_the_trainer(found: dict[str, Any]) -> None:
    assert found["name"] == "vllm"
    assert all(value < 1e-4 for value in found["sampled"]["difference"].values()), found["sampled"]["difference"]


def test_tokens_depend_on_seed_and_step_alone_not_on_the_batch(found: dict[str, Any]) -> None:
    sampled = found["sampled"]
    assert sampled["again"] == sampled["tokens"]
    assert sampled["subset"] == sampled["tokens"][1:4]
    assert sampled["fewer"] == [answers[:2] for answers in sampled["tokens"]]
    assert sampled["next_step"] != sampled["tokens"]
    answers = [tuple(answer) for group in sampled["tokens"] for answer in group]
    assert len(set(answers)) == len(answers)


def test_more_prompts_than_one_pass_takes_are_read_in_several(found: dict[str, Any]) -> None:
    many, few = found["sampled"]["many"]
    assert len(many) == 120 and many[:3] == few


def test_completions_are_those_of_the_hf_engine(found: dict[str, Any]) -> None:
    for name in ("greedy", "penalised", "drawn", "filtered"):
        vllm, hf = found["sampled"][name]
        assert vllm == hf


def test_logprobs_are_of_the_distribution_that_was_drawn_from(found: dict[str, Any]) -> None:
    # At most six tokens are left, together 1; the least likely of those in the nucleus holds no less than this.
    assert found["sampled"]["filtered_least"] > -3.5


def test_a_completion_gets_the_room_that_its_prompt_leaves(found: dict[str, Any]) -> None:
    some, least = found["sampled"]["long"]
    assert {tuple(end) for end in least} <= {(1, "length"), (1, "stop")}
    assert all(length <= 56 and (reason == "stop" or length == 56) for length, reason in some)
    assert "length" in {reason for _, reason in some}


def test_an_answer_ends_with_its_end_token_or_at_the_limit(found: dict[str, Any]) -> None:
    eos = 258
    ends = found["sampled"]["ends"]
    assert {reason for _, reason, _, _ in ends} == {"stop", "length"}
    for token_ids, reason, text, num_logprobs in ends:
        assert num_logprobs == len(token_ids) and "<|im_end|>" not in text
        assert eos not in token_ids[:-1]
        assert (token_ids[-1] == eos) if reason == "stop" else (len(token_ids) == 60 and token_ids[-1] != eos)


def test_changed_weights_arrive_and_wrong_ones_are_noticed(found: dict[str, Any]) -> None:
    synced = found["synced"]
    assert synced["after"] != synced["before"] == found["sampled"]["tokens"]
    assert synced["difference"] < 1e-4
    assert synced["metrics"]["sync/version"] == 7
    assert set(found["sampled"]["versions"]) == {0} and set(synced["versions"]) == {7}
    assert synced["wrong"].startswith("StageFailed: weight sync: engine and trainer differ")
    assert synced["partial"] == "StageFailed: weight sync: 1 tensors did not come, such as lm_head.weight"
    assert synced["interrupted"] == "StageFailed: weight sync: the trainer has gone"


def test_completions_in_flight_go_on_with_new_weights_and_every_token_is_of_the_version_that_is_named(
    found: dict[str, Any],
) -> None:
    swapped = found["swapped"]
    assert swapped["groups"] == [0, 1, 2, 3]
    assert [20, 21, 22] in swapped["versions"]
    assert swapped["difference"] < 1e-4
    assert swapped["aborted"] == 0 and swapped["again"]


def test_an_adapter_comes_alone_and_the_engine_computes_what_the_trainer_does(found: dict[str, Any]) -> None:
    if "adapted" not in found:
        pytest.skip("once is enough")
    adapted = found["adapted"]
    assert adapted["format"] == "adapter" and adapted["quantised"]
    assert [metrics["sync/bytes"] for metrics in adapted["metrics"]] == [adapted["bytes"]] * 3
    assert adapted["base"] == found["sampled"]["tokens"]  # a new adapter changes nothing
    assert adapted["difference"] < 1e-4 and adapted["second"][0] < 1e-4
    assert adapted["second"][1] != adapted["tokens"]
    assert [1, 2] in adapted["versions"]
    assert adapted["partial"].startswith("StageFailed: weight sync: 1 tensors did not come, such as model.layers.0")


def test_weights_that_came_natively_are_those_of_the_host_path_to_the_bit(found: dict[str, Any]) -> None:
    for load in found["transferred"]["loads"]:
        assert load["names_agree"] and load["parameters"] > 10 and load["different"] == [], load
    assert len(found["transferred"]["loads"]) == 8


def test_loads_are_native_idle_and_with_completions_in_flight(found: dict[str, Any]) -> None:
    loads = found["transferred"]["loads"]
    assert [load["in_flight"] for load in loads] == [0, 2] * 4
    numbers = {load["buckets"] for load in loads if load["name"] != "cut off"}
    assert len(numbers) == 1 and min(numbers) > 2, "each load has the same buckets, all of them native"
    assert all(len(load["versions"]) == 2 for load in loads if load["in_flight"]), loads


def test_a_load_that_is_cut_off_continues_through_host_memory_and_the_next_connects_again(
    found: dict[str, Any],
) -> None:
    [cut] = [load for load in found["transferred"]["loads"] if load["name"] == "cut off"]
    assert cut["buckets"] == 1
    [message] = found["transferred"]["messages"]
    assert message.startswith("native weight transfer: ") and "host memory" in message
    assert found["transferred"]["worlds"] == [[2, [0, 1]]] * 3  # at first, after the cut, and unpacked


def test_vllm_takes_the_infos_that_the_trainer_makes_and_gives_each_rank_of_two_engines_its_number(
    found: dict[str, Any],
) -> None:
    assert found["transferred"]["ranks"] == [[128, rank, 5] for rank in (1, 2, 3, 4)]


@pytest.mark.full
def test_an_engine_apart_may_have_ranks_of_its_own_which_end_with_it(further: dict[str, Any]) -> None:
    spread = further["spread"]
    assert max(spread["difference"]) < 1e-4 and set(spread["versions"]) == {5}
    assert spread["interrupted"] == "StageFailed: weight sync: the trainer has gone"
    ranks = ["VLLM::Worker_TP0", "VLLM::Worker_TP1"]
    assert [name for name in spread["ranks"] if "Worker" in name] == ranks
    assert not any("Worker" in name for name in spread["left"])
    before, created = spread["state"]
    assert {name for name in before if before[name] != created[name]} == {"children"}


@pytest.mark.full
def test_an_engine_started_anew_gives_the_same_tokens(further: dict[str, Any]) -> None:
    assert further["closed"] and further["second"] == further["synced"]["last"]


def test_creating_and_using_an_engine_leaves_the_process_as_it_was(found: dict[str, Any]) -> None:
    before, created, used = found["state"]
    for name in before:
        assert created[name] == before[name], name
        assert used[name] == before[name], name


def test_what_follows_a_prompt_with_images_is_part_of_its_next_turn() -> None:
    Image.new("RGB", (2, 2)).save(png := io.BytesIO(), format="PNG")
    image = ImageRef(None, png.getvalue(), "")
    prompt = Prompt(1, (8, 9, 9, 5, 6), "two", "", (image,), later_turn_token_ids=(5, 6))

    class Words:
        """A tokenizer with this first token, of number 0, which it adds where it is told to."""

        def __init__(self, bos_token: str | None) -> None:
            self.bos_token = bos_token

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [0] * bool(self.bos_token and add_special_tokens) + [8, len(text)]}

    def token_ids(bos_token: str | None) -> list[int]:
        engine: Any = SimpleNamespace(_tokenizer=Words(bos_token), _vllm=SimpleNamespace(TokensPrompt=dict))
        return list(VllmEngine._make_tokens_prompt(engine, prompt)["prompt_token_ids"])

    assert token_ids(None) == [8, 3, 5, 6] == token_ids("two")
    assert token_ids("<s>") == [0, 8, 3, 5, 6], "the template of LLaVA 1.5 leaves its first token to the tokenizer"


def test_what_vllm_cannot_do_is_refused_in_our_words(found: dict[str, Any]) -> None:
    assert found["too_cold"].startswith("ConfigError: temperature = 0.005: vLLM samples between 0.01 and 2.0")
    assert found["too_hot"].startswith("ConfigError: temperature = 2.5: vLLM samples between 0.01 and 2.0")
    assert found["head_dim"].startswith("ConfigError: vLLM on CPU has no attention for head_dim = 16")
    assert found["too_long"].startswith("DataError: prompt 8 has 256 tokens")


def test_a_head_size_that_vllm_lacks_on_cpu_is_refused_by_a_check_where_vllm_completes(found: dict[str, Any]) -> None:
    checked = found["checked"]
    assert checked.pop("sft") == "" and sorted(checked) == ["rl", "sample", "validate"]
    for said in checked.values():
        assert said.startswith("ConfigError: ") and "head_dim = 24 " in said and "backend = 'hf'" in said, said
