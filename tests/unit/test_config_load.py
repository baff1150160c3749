"""Reading TOML and the schema: what is accepted, and the one line that each mistake is told in."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.load import TomlTable, merge_tables, nest_value, read_toml
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import affects_result, all_fields, find_table_classes, support_status
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds

SFT = """
[policy]
model_name_or_path = "org/model"

[train]
epoch = 2
optm_lr = 1e-5
train_batch_per_replica = 8
optm_betas = [0.9, 0.95]

[train.train_policy]
type = "sft"
mini_batch = 4
dataset = { name = "org/rows", split = "train", test_size = 0.1 }

[train.ckpt]
enable_checkpoint = true

[validation]
enable = true
"""
GRPO = """
[policy]
model_name_or_path = "org/model"

[train]
train_batch_per_replica = 16

[train.train_policy]
type = "grpo"
reward_function = ["exact_match"]
dataset = { name = "org/rows" }

[rollout]
n_generation = 8
max_response_length = 64
"""


def load(folder: Path, text: str | bytes, *overrides: str) -> Pipeline:
    file = folder / "recipe.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_pipeline(file, overrides, all_kinds())


def refused(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The message, without the folder of the test."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


# One row a rule: the setting, and what is said of it.
WRONG = [
    ("train.epoch=0", "train.epoch = 0: input should be greater than 0"),
    ("train.epoch=1.5", "train.epoch = 1.5: must be an integer"),
    ("train.epoch='two'", "train.epoch = 'two': must be an integer"),
    ("train.epoch=true", "train.epoch = True: must be an integer"),
    ("train.optm_lr=0", "train.optm_lr = 0: input should be greater than 0"),
    ("train.optm_lr='fast'", "train.optm_lr = 'fast': must be a number"),
    ("train.optm_name='Lion'",
     "train.optm_name = 'Lion': input should be 'AdamW', 'Adam', 'AdamW8bit', 'Adam8bit' or 'Muon'"),
    ("train.optm_betas=[0.9]", "train.optm_betas.1: is required"),
    ("train.optm_betas=0.9", "train.optm_betas = 0.9: must be an array"),
    ("train.optm_warmup_steps=-1", "train.optm_warmup_steps = -1 must be a count of steps or a fraction up to 1.0"),
    ("train.optm_warmup_steps=1.5", "train.optm_warmup_steps = 1.5 must be a count of steps or a fraction up to 1.0"),
    ("train.optm_min_lr_factor=1.1", "train.optm_min_lr_factor = 1.1: input should be less than or equal to 1"),
    ("train.param_dtype='int8'", "train.param_dtype = 'int8': must be 'float32' or 'bfloat16'"),
    ("train.compile=1", "train.compile = 1: must be true or false"),
    ("train.timestamp=3", "train.timestamp = 3: must be a string, in quotes (with --set: 'train.timestamp=\"...\"')"),
    ("train.ckpt.max_keep=0", "train.ckpt.max_keep = 0 must be -1 (all) or at least 1"),
    ("train.signal_to_handle=['SIGKILL']",
     "train.signal_to_handle: 'SIGKILL' is not a signal that can ask a process to stop"),
    ("train.signal_to_handle=['USR']", "train.signal_to_handle: 'USR' is not a signal that can ask a process to stop"),
    ("train.train_policy.type='ppo'", "train: train_policy.type = 'ppo': must be one of 'grpo', 'sft'"),
    ("train.train_policy.type='dpo'", "train: train_policy.type = 'dpo': write type = 'sft' and trainer_type = 'dpo'"),
    ("train.train_policy={type='sft', dpo={beta=1.0}}",
     "train.train_policy: dpo needs trainer_type = 'dpo', not 'sft'; set it or leave dpo out"),
    ("train.train_policy=3", "train: train_policy = 3: must be a table"),
    ("train.train_policy.dataset.test_size=1.5",
     "train.train_policy.dataset.test_size = 1.5 must be a count of at least 1 or a fraction between 0 and 1"),
    ("train.train_policy.dataset.test_size=-1",
     "train.train_policy.dataset.test_size = -1 must be a count of at least 1 or a fraction between 0 and 1"),
    ("train.train_policy.dataset.split=[1]", "train.train_policy.dataset.split.0 = 1: must be a string"),
    ("policy.model_name_or_path=' '", "policy.model_name_or_path is empty; give a folder or a Hub id"),
    ("policy.model_max_length=-1", "policy.model_max_length = -1: input should be greater than 0"),
    ("rollout.backend=''", "rollout.backend = '': string should have at least 1 character"),
    ("rollout.sampling_config.top_p=0", "rollout.sampling_config.top_p = 0: input should be greater than 0"),
    ("rollout.gpu_memory_utilization=2", "rollout.gpu_memory_utilization = 2: input should be less than or equal to 1"),
    ("validation.freq=0", "validation.freq = 0: input should be greater than 0"),
    ("logging.logger=['x']", "logging.logger 'x' is not known; known: console, mlflow, tensorboard, trackio, wandb"),
    ("train=3", "train = 3: must be a table"),
    ("custom=3", "custom = 3: must be a table"),
]  # fmt: skip
WRONG_GRPO = [
    ("train.train_policy.reward_function=['a', 3]", "train.train_policy.reward_function = ['a', 3]: must be a table"),
    ("train.train_policy.reward_function={a='x'}", "train.train_policy.reward_function.a = 'x': must be a number"),
    ("train.train_policy.lower_bound_ratio=1.0", "train.train_policy.lower_bound_ratio = 1.0 must be greater than 1"),
    ("train.train_policy.batch_size_per_optimize=3",
     "train.train_policy: batch_size_per_optimize = 3 must be a multiple of mini_batch = 2"),
    ("train.train_policy.unbiased_loss_max_tokens=10",
     "train.train_policy: unbiased_loss_max_tokens has a meaning only with loss_type = 'seq-mean-token-mean'"),
    ("train.train_policy.batch_size_per_optimize=6",
     "train: train_batch_per_replica = 16 must be a multiple of train_policy.batch_size_per_optimize = 6"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "said"), WRONG, ids=[setting for setting, _ in WRONG])
def test_a_wrong_value_is_one_line_that_names_file_key_value_and_rule(tmp_path: Path, setting: str, said: str) -> None:
    assert refused(tmp_path, SFT, setting) == f"recipe.toml: {said}"


@pytest.mark.parametrize(("setting", "said"), WRONG_GRPO, ids=[setting for setting, _ in WRONG_GRPO])
def test_a_wrong_value_of_grpo_is_one_line_too(tmp_path: Path, setting: str, said: str) -> None:
    message = refused(tmp_path, GRPO, setting)
    assert message in {f"recipe.toml: {said}", f"recipe.toml: stage 'rl': {said}"}


RIGHT = [
    ("train.optm_lr=1", ("train", "optm_lr"), 1.0),
    ("train.optm_warmup_steps=0.1", ("train", "optm_warmup_steps"), 0.1),
    ("train.optm_warmup_steps=20.0", ("train", "optm_warmup_steps"), 20),
    ("train.max_num_steps=5", ("train", "max_num_steps"), 5),
    ("train.ckpt.max_keep=-1", ("train", "ckpt", "max_keep"), -1),
    ("train.signal_to_handle=[]", ("train", "signal_to_handle"), ()),
    ("train.train_policy.dataset.test_size=3", ("train", "train_policy", "dataset", "test_size"), 3),
    ("train.train_policy.dataset.test_size=0", ("train", "train_policy", "dataset", "test_size"), None),
    ("validation.reward_function='gsm8k'", ("validation", "reward_function"), {"gsm8k": 1.0}),
    ("validation.reward_function=['a', 'b']", ("validation", "reward_function"), {"a": 1.0, "b": 1.0}),
    ("validation.reward_function={a=2, b=0.5}", ("validation", "reward_function"), {"a": 2.0, "b": 0.5}),
    ("logging.logger=['Console']", ("logging", "logger"), ("console",)),
    ("custom.any.thing=[1, 'x']", ("custom",), {"any": {"thing": [1, "x"]}}),
    ("policy.model_name_or_path=org/other", ("policy", "model_name_or_path"), "org/other"),
    ("logging.experiment_name = one run ", ("logging", "experiment_name"), "one run"),
]


@pytest.mark.parametrize(("setting", "place", "value"), RIGHT, ids=[setting for setting, *_ in RIGHT])
def test_a_right_value_is_taken(tmp_path: Path, setting: str, place: tuple[str, ...], value: object) -> None:
    found = load(tmp_path, SFT, setting).recipes["sft"]
    for key in place:
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\noptm_l = 1e-3", "train.optm_l: unknown key; did you mean train.optm_lr?"),
        ("[validaton]\nenable = true", "validaton: unknown key; did you mean validation?"),
        ("epoch = 3", "epoch: unknown key; did you mean train.epoch?"),
        ("[train]\noptm_learnrate = 1e-4", "train.optm_learnrate: unknown key; did you mean train.optm_lr?"),
        ("[train]\nlearn_rate = 1e-4", "train.learn_rate: unknown key; did you mean train.optm_lr?"),
        ("[train]\nmax_gradnorm = 1.0", "train.max_gradnorm: unknown key; did you mean train.optm_grad_norm_clip?"),
        ("[train.train_policy]\ntype = 'sft'\ntemperature = 1.0",
         'train.train_policy.temperature: unknown key here; it belongs to train.train_policy.type = "grpo"'),
        ("[train.train_policy]\ntype = 'sft'\n[train.train_policy.dataset]\nnmae = 'x'",
         "train.train_policy.dataset.nmae: unknown key; did you mean train.train_policy.dataset.name?"),
        ("[train]\nzzzzzzzz = 1", "train.zzzzzzzz: unknown key"),
        ("[train]\nlearning_rate = 1e-5",
         "train.learning_rate: unknown key; learning_rate of transformers, PEFT and TRL is train.optm_lr here"),
        ("[train.train_policy]\ntype = 'grpo'\nbeta = 0.1",
         "train.train_policy.beta: unknown key; beta of transformers, PEFT and TRL is train.train_policy.kl_beta or "
         "train.train_policy.dpo.beta or train.train_policy.kto.beta here"),
        ("num_generations = 8",
         "num_generations: unknown key; num_generations of transformers, PEFT and TRL is rollout.n_generation here"),
        ("[policy.lora]\nuse_dora = true",
         "policy.lora.use_dora: unknown key; use_dora of transformers, PEFT and TRL is not supported: adapters have "
         "no magnitudes of DoRA; leave it out"),
        ("[policy.lora]\nbias = 'all'",
         "policy.lora.bias: unknown key; bias of transformers, PEFT and TRL is not supported: an adapter trains no "
         "biases; leave it out"),
        ("[train]\nint = 1", "train.int: unknown key"),
        ("str = 1", "str: unknown key"),
        ("[pipeline]\nthread = 1", "pipeline.thread: unknown key; did you mean pipeline.threads?"),
    ],
)  # fmt: skip
def test_an_unknown_key_comes_with_the_nearest_known_one(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text) == f"recipe.toml: {said}"


def test_a_misspelt_key_is_told_before_the_mistakes_that_it_causes(tmp_path: Path) -> None:
    text = "[train]\nepoch = 'x'\n[rolout]\nn_generation = 8"
    assert refused(tmp_path, text) == "recipe.toml: rolout: unknown key; did you mean rollout? (and train.epoch)"


def test_a_file_that_cannot_be_read_is_one_line_and_an_endless_one_is_not_read_to_its_end(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none.toml", "no such file"),
        (tmp_path, "is a folder; name a .toml file in it"),
        (Path("/proc/self/mem"), "cannot be read: Input/output error"),
        (Path("/dev/zero"), "more than 16777216 bytes, the most that a configuration may have"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_toml(path)
        assert str(caught.value) == f"{path}: {said}"


def test_merging_replaces_values_joins_tables_and_drops_the_keys_of_another_type() -> None:
    base = {"a": 1, "t": {"x": 1, "y": [1, 2]}, "train": {"seed": 1, "train_policy": {"type": "sft", "mini_batch": 2}}}

    def of_type(name: str) -> TomlTable:
        return merge_tables(base, {"train": {"train_policy": {"type": name}}})["train"]

    assert merge_tables(base, {"t": {"y": [3]}}) == {**base, "t": {"x": 1, "y": [3]}}
    assert of_type("grpo") == {"seed": 1, "train_policy": {"type": "grpo"}}
    assert of_type("sft") == base["train"]
    assert merge_tables(base, {"t": 3})["t"] == 3
    assert base["t"] == {"x": 1, "y": [1, 2]}, "the base is left as it was"


def test_another_type_means_something_in_the_algorithms_table_alone() -> None:
    base = {"custom": {"reward": {"type": "a", "url": "u"}}}
    assert merge_tables(base, {"custom": {"reward": {"type": "b"}}}) == {
        "custom": {"reward": {"type": "b", "url": "u"}}
    }


@pytest.mark.parametrize("table", ["", "overrides"])
def test_a_map_of_names_is_replaced_and_a_key_of_it_is_added(table: str) -> None:
    def tables(*keys: str, value: Any) -> TomlTable:
        return nest_value([name for name in (table, *keys) if name], value)

    rewards, rates = ("train", "train_policy", "reward_function"), ("train", "optm_lr")
    base = merge_tables(
        tables(*rewards, value={"gsm8k": 1.0, "format": 0.5}), tables(*rates, value={"global": 1.0, "a": 2.0})
    )
    over = merge_tables(base, tables(*rewards, value={"boxed_math": 1.0}))
    assert over == merge_tables(
        tables(*rewards, value={"boxed_math": 1.0}), tables(*rates, value={"global": 1.0, "a": 2.0})
    )
    over = merge_tables(base, tables(*rates, "global", value=3.0))
    assert over == merge_tables(base, tables(*rates, value={"global": 3.0, "a": 2.0}))


def test_every_field_is_described_and_none_is_the_default_wherever_it_is_allowed() -> None:
    from cosmos_core.config.describe import list_keys
    from cosmos_core.config.schema.pipeline import PipelineConfig

    assert not [key.name for key in list_keys() if not key.description]
    for key, _, field in (*all_fields(Recipe), *all_fields(PipelineConfig, "pipeline.")):
        # TOML cannot say None, so it must come back by being left out; the seed is never None once checked.
        if type(None) in getattr(field.annotation, "__args__", ()) and key != "train.seed":
            assert field.default is None, key


OLD_REMOTE = GRPO + "[train.train_policy.remote_reward]\n"


def test_an_older_name_is_todays_and_what_never_did_anything_is_left_out_and_both_are_said(tmp_path: Path) -> None:
    pipeline = load(tmp_path, SFT.replace("epoch = 2", "epoch = 2\nvalidation_step = 5\nmoe_backend = 'fast'"))
    assert pipeline.recipes["sft"].validation.freq == 5
    assert pipeline.notices == (
        "train.validation_step is today's validation.freq",
        "train.moe_backend = 'fast' is ignored; it would have meant the kernels of expert layers, which transformers "
        "chooses",
    )


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("validation_step = 5\nvalidation_freq = 6",
         "train.validation_step = 5 and train.validation_freq = 6 are both today's validation.freq; keep one of them"),
        ("enable_validation = false",
         "train.enable_validation = False is today's validation.enable, which says True; keep one of them"),
    ],
)  # fmt: skip
def test_two_names_of_one_thing_must_agree(tmp_path: Path, old: str, said: str) -> None:
    assert refused(tmp_path, SFT.replace("epoch = 2", f"epoch = 2\n{old}")) == f"recipe.toml: {said}"


def test_the_older_form_of_remote_rewards_is_translated_and_nothing_else_of_that_name(tmp_path: Path) -> None:
    pipeline = load(tmp_path, OLD_REMOTE + "reward_fn = { taste = 0.5 }\nscore_key = 'a'")
    policy = pipeline.recipes["rl"].train.train_policy
    assert isinstance(policy, GrpoConfig)
    [function] = policy.remote_reward.reward_fns
    assert (function.name, function.weight, function.score_key) == ("taste", 0.5, "a")
    assert refused(tmp_path, OLD_REMOTE + "reward_fn = [{ name = 'taste' }]") == (
        "recipe.toml: train.train_policy.remote_reward.reward_fn: unknown key; did you mean "
        "train.train_policy.remote_reward.reward_fns?"
    )


def test_a_recipe_and_every_table_of_one_can_be_handed_to_another_process() -> None:
    recipe = Recipe.model_validate({"distillation": {"enable": True}, "rollout": {"mode": "async"}})
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    for table in {table for _, _, field in all_fields(Recipe) for table in find_table_classes(field.annotation)}:
        assert pickle.loads(pickle.dumps(table)) is table


def test_the_fields_that_change_no_result_are_these() -> None:
    found = {f"{table.__name__}.{key.rpartition('.')[2]}" for key, table, field in all_fields(Recipe)
             if support_status(field).name == "used" and not affects_result(field)}  # fmt: skip
    assert found == {
        "BenchmarkRowsConfig.name", "DatasetConfig.name", "DatasetConfig.local_dir", "HeldOutDatasetConfig.name",
        "SourceConfig.name", "SourceConfig.pass_rates", "DatasetConfig.pass_rates", "HeldOutDatasetConfig.pass_rates",
        "DataTermConfig.name", "EvaluateConfig.include_path", "EvaluateConfig.prompts",
        "JudgeConfig.cache", "JudgeConfig.key_env", "SampleStageConfig.endpoint_key_env",
        "SampleStageConfig.endpoint_requests",
        "HeldOutDatasetConfig.local_dir", "PolicyConfig.model_name_or_path", "DistillationConfig.model_name_or_path",
        "PolicyConfig.model_safetensor_path", "PolicyConfig.chat_template", "LoraConfig.lora_path",
        "CheckpointConfig.enable_checkpoint", "CheckpointConfig.save_freq", "CheckpointConfig.save_mode",
        "CheckpointConfig.save_freq_in_epoch", "CheckpointConfig.max_keep", "CheckpointConfig.export_safetensors",
        "TrainConfig.resume",  # of these eight the content counts
        "TrainConfig.save_ckpt_at_exit", "TrainConfig.signal_to_handle",
        "TrainConfig.output_dir", "TrainConfig.timestamp", "SftConfig.dataloader_num_workers",
        "DpoConfig.dataloader_num_workers", "KtoConfig.dataloader_num_workers", "GrpoConfig.dataloader_num_workers",
        "LoggingConfig.log_completions",
        "CheckpointConfig.upload_s3", "CheckpointConfig.s3_bucket", "CheckpointConfig.s3_prefix",
        "CheckpointConfig.upload_hf", "CheckpointConfig.hf_repo_name",  # stages behind the export
        *(f"{name}Config.dataloader_num_workers" for name in ("DiffusionSft", "DiffusionNft", "FlowGrpo", "Ddrl")),
        *(f"{name}Config.reward_env" for name in ("DiffusionNft", "FlowGrpo", "Ddrl")),
        "RolloutConfig.enforce_eager", "RolloutConfig.gpu_memory_utilization", "RolloutConfig.probe_interval",
        "RolloutConfig.engine_timeout_seconds", "RolloutConfig.stop_on_alarm", "RolloutConfig.weight_transfer",
        "MultiTurnRolloutConfig.custom_chat_template_path",
        "MultiTurnRolloutConfig.tool_env",
        "RemoteRewardConfig.max_in_flight",
        "GrpoConfig.reward_env", "ValidationConfig.reward_env",  # what a variable holds is not known
        *(f"HooksConfig.{when}_{what}_hook" for when in ("pre", "post")
          for what in ("training", "training_step", "validation")),
        "HooksConfig.load_checkpoint_hook", "HooksConfig.save_checkpoint_hook",
        "ProfilerConfig.enable_profiler", *(f"SubProfilerConfig.{name}" for name in (
            "do_profile", "active_steps", "warmup_steps", "wait_steps", "rank_filter", "record_shape", "profile_memory",
            "with_stack",
        )),
        "LoggingConfig.logger", "LoggingConfig.report_mfu", "LoggingConfig.multi_modal_log_interval",
        "LoggingConfig.project_name", "LoggingConfig.group_name", "LoggingConfig.experiment_name",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [
        ({}, ("diffusion_sft", "diffusion_sft")), ({"type": "sft"}, ("diffusion_sft", "diffusion_sft")),
        ({"trainer_type": "mine.py:Own"}, ("diffusion_sft", "mine.py:Own")), ({"kl_beta": 0.1}, ("grpo", "grpo")),
    ],
)  # fmt: skip
def test_a_diffusion_model_is_fine_tuned_where_the_type_is_left_out_as_where_it_is_named(
    policy: dict[str, Any], algorithm: tuple[str, str]
) -> None:
    recipe = Recipe.model_validate({"policy": {"is_diffusers": True}, "train": {"train_policy": policy}})
    assert (recipe.train.train_policy.algorithm, recipe.train.train_policy.trainer_type) == algorithm


@pytest.mark.parametrize("rewards", ['["exact_match"]', '"exact_match"', "{ exact_match = 1.0 }"])
def test_a_reward_that_is_set_by_its_name_is_one_more(tmp_path: Path, rewards: str) -> None:
    text = GRPO.replace('["exact_match"]', rewards)
    pipeline = load(
        tmp_path, text, "train.train_policy.reward_function.format=0.5", "validation.reward_function.gsm8k=2"
    )
    recipe = pipeline.recipes["rl"]
    assert recipe.train.train_policy.rewards == {"exact_match": 1.0, "format": 0.5}
    assert recipe.validation.reward_function == {"gsm8k": 2.0}
