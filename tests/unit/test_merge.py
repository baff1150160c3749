"""Kind `merge`: weighted sums by hand, TIES and DARE as PEFT has them, and models that cannot be merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cosmos_core.checkpoint.merge import combine_tensors, run
from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.schema.merge import MergeConfig
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, ModelError, Preempted
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds
from tests.conftest import PROGRAMS
from tests.unit.run_folder import fingerprint_of
from tests.unit.tiny_model import save_tiny_model

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two models trained from it, and one of another width; the first in several shards."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "base")
    for name, seed in (("a", 1), ("b", 2)):
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)
        target = folder / "stages" / name / "model"
        model.save_pretrained(target, max_shard_size="20KB" if name == "a" else "1GB")
        for file in (folder / "base").glob("*token*"):
            (target / file.name).write_bytes(file.read_bytes())
    wide = AutoModelForCausalLM.from_pretrained(folder / "base")
    wide.resize_token_embeddings(wide.config.vocab_size + 1)
    wide.save_pretrained(folder / "stages" / "wide" / "model")
    return folder


def stage_of(folder: Path, path: Path, names: tuple[str, ...] = ("a", "b"), model: str = "", **merge: Any) -> Stage:
    path.mkdir()
    inputs = {name: {"path": str(folder / "stages" / name), "info": {"model": "model"}} for name in names}
    inputs["data"] = {"path": str(folder), "info": {"data": "rows"}}
    config = StageConfig(name="merge", kind="merge", after=(*names, "data"), model=model)
    base = str(folder / "base")
    return Stage(path, config, Recipe.model_validate({"merge": merge}), base, None, inputs, "f", all_kinds()["merge"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("given", "used"), [((), (0.5, 0.5)), ((0.25, 0.5), (0.25, 0.5))])
def test_a_linear_merge_is_the_weighted_sum(folder: Path, tmp_path: Path, given: tuple[float, ...], used: Any) -> None:
    outcome = run(stage_of(folder, tmp_path / "merge", weights=given))
    merged = weights(tmp_path / "merge/model")
    a, b = (weights(folder / "stages" / name / "model") for name in ("a", "b"))
    assert merged.keys() == a.keys() and outcome.info["merged"] == ["a", "b"]
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, used[0] * a[name] + used[1] * b[name], rtol=0, atol=1e-6)
    index = json.loads((tmp_path / "merge/model/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == merged.keys(), "the files are those of the first model"


def test_ties_is_the_mean_of_the_largest_differences_of_the_majority_sign() -> None:
    base = {"w": torch.zeros(4)}
    models = [{"w": torch.tensor([4.0, -3.0, 1.0, 0.5])}, {"w": torch.tensor([2.0, 5.0, 0.5, 1.0])}]
    merged = combine_tensors(MergeConfig(method="ties", density=0.5), [1.0, 1.0], models, base, "w", 0)
    # The two largest of each: (4, -3, 0, 0) and (2, 5, 0, 0); the sign of the second is that of 5.
    assert merged.tolist() == [3.0, 5.0, 0.0, 0.0]


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_keeps_random_differences_scaled_up_and_depends_on_seed_and_name(folder: Path, method: Any) -> None:
    base, a, b = (weights(folder / each) for each in ("base", "stages/a/model", "stages/b/model"))
    config = MergeConfig(method=method, density=0.25)

    def merged(seed: int) -> torch.Tensor:
        return combine_tensors(config, [1.0, 0.0], [a, b], base, NAME, seed) - base[NAME]

    before = torch.get_rng_state()
    first, difference = merged(0), a[NAME] - base[NAME]
    kept = (first != 0) & (difference.abs() > 1e-3)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0.1 < kept.float().mean() < 0.4
    ratios = set((first[kept] / difference[kept]).round(decimals=1).tolist())
    assert ratios <= {4.0, 2.0} and (method == "dare_ties" or ratios == {4.0}), "two where the mean is of both models"
    assert torch.equal(first, merged(0)) and not torch.equal(first, merged(1))


def test_a_sum_that_its_dtype_cannot_hold_is_refused() -> None:
    models = [{"w": torch.full((2,), 6e4, dtype=torch.float16)}] * 2
    with pytest.raises(ModelError, match="w has values that are not finite"):
        combine_tensors(MergeConfig(), [1.0, 1.0], models, None, "w", 0)


def test_a_model_of_other_dtype_and_shards_counts_as_its_values(folder: Path, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(folder / "stages/b/model", dtype=torch.bfloat16)
    half.save_pretrained(folder / "stages/half/model", max_shard_size="50KB")
    run(stage_of(folder, tmp_path / "merge", ("a", "half")))
    merged, a, b = (weights(each) for each in (tmp_path / "merge/model", *(folder / f"stages/{n}/model" for n in "ab")))
    torch.testing.assert_close(merged[NAME], (a[NAME] + b[NAME].bfloat16().float()) / 2, rtol=0, atol=1e-6)


def test_the_base_among_the_stages_is_no_model_to_merge(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names 1 models to merge; name at least two besides the base 'b'"):
        run(stage_of(folder, tmp_path / "ties", model="stage:b", method="ties"))


@pytest.mark.parametrize(
    ("names", "settings", "error", "message"),
    [
        (("a",), {}, ConfigError, "names 1 models to merge; name at least two"),
        (("a", "b"), {"weights": (1.0,)}, ConfigError, "merge.weights has 1 values for 2 models"),
        (("a", "wide"), {}, ModelError, "tensors differ, such as .*merge models of one architecture"),
    ],
)
def test_what_cannot_be_merged_is_one_line(
    folder: Path, tmp_path: Path, names: tuple[str, ...], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(stage_of(folder, tmp_path / "merge", names, **settings))
    assert not (tmp_path / "merge/model").exists()


def test_a_base_may_store_tensors_that_the_models_do_not(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "base")
    [file] = (tmp_path / "base").glob("*.safetensors")
    save_file({**load_file(file), "lm_head.copy": torch.zeros(1)}, file, metadata={"format": "pt"})
    stage = stage_of(folder, tmp_path / "merge", method="ties")
    stage.model = str(tmp_path / "base")
    run(stage)
    assert weights(tmp_path / "merge/model").keys() == weights(folder / "stages/a/model").keys()


def test_a_base_may_store_names_without_their_first_component(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "base")
    [file] = (tmp_path / "base").glob("*.safetensors")
    run(stage_of(folder, tmp_path / "merge", method="ties"))
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    stage = stage_of(folder, tmp_path / "short", method="ties")
    stage.model = str(tmp_path / "base")
    run(stage)
    expected, merged = (weights(tmp_path / name / "model") for name in ("merge", "short"))
    assert merged.keys() == expected.keys() and all(torch.equal(merged[name], expected[name]) for name in merged)


def test_a_base_of_pickled_weights_counts_as_its_values(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "base", tmp_path / "base")
    [file] = (tmp_path / "base").glob("*.safetensors")
    torch.save(load_file(file), tmp_path / "base/pytorch_model.bin")
    file.unlink()
    merged = []
    for name in (str(folder / "base"), str(tmp_path / "base")):
        stage = stage_of(folder, tmp_path / f"merge-{len(merged)}", method="ties")
        stage.model = name
        run(stage)
        merged.append(weights(stage.path / "model"))
        assert [path.name for path in stage.path.iterdir() if path.is_dir()] == ["model"]
    assert merged[0].keys() == merged[1].keys()
    assert all(torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())


def test_a_merged_model_has_each_chat_template_of_its_first_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "stages/a", tmp_path / "stages/a")
    shutil.copytree(folder / "stages/b", tmp_path / "stages/b")
    model = tmp_path / "stages/a/model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(model)
    (model / "lora").mkdir()
    (model / "lora/adapter_config.json").write_text("{}")
    (model / "assets/licences").mkdir(parents=True)
    (model / "assets/licences/a.txt").write_text("a")
    run(stage_of(tmp_path, tmp_path / "merge"))
    assert AutoTokenizer.from_pretrained(tmp_path / "merge/model").chat_template == tokenizer.chat_template
    assert (tmp_path / "merge/model/assets/licences/a.txt").read_text() == "a"
    assert not (tmp_path / "merge/model/lora").exists(), "the adapter of one of the models is not that of the merge"


def test_a_stop_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    stage = stage_of(folder, tmp_path / "merge")
    stage.stop_requested = True
    with pytest.raises(Preempted):
        run(stage)
    assert not list((tmp_path / "merge").glob("**/*.safetensors"))


def pipeline_of(folder: Path, file: Path, after: str, weights: str) -> Pipeline:
    entry = f'kind = "custom"\nentry = "{PROGRAMS}/counting.py:count"'
    stages = "".join(f'[[pipeline.stages]]\nname = "{name}"\n{entry}\n' for name in "ab")
    merge = f'[[pipeline.stages]]\nname = "merged"\nkind = "merge"\nafter = {after}\n'
    file.write_text(f'{stages}{merge}[policy]\nmodel_name_or_path = "{folder}/base"\n[merge]\nweights = {weights}\n')
    return load_pipeline(file, (), all_kinds())


def test_the_order_of_models_to_merge_counts(folder: Path, tmp_path: Path) -> None:
    def merged(after: str) -> str:
        return fingerprint_of(pipeline_of(folder, tmp_path / "merge.toml", after, "[0.7, 0.3]"), "merged").value

    assert merged('["a", "b"]') == merged('["a", "b"]') != merged('["b", "a"]')


def test_weights_of_a_soup_that_sum_to_0_are_refused_before_the_run(folder: Path, tmp_path: Path) -> None:
    pipeline = pipeline_of(folder, tmp_path / "merge.toml", '["a", "b"]', "[1.0, -1.0]")
    with pytest.raises(ConfigError, match=r"merge.weights = \[1.0, -1.0\] sum to 0, so the merged model"):
        check_capabilities(pipeline)
