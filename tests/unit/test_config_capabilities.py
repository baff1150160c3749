"""What this version cannot do, and what it does in another way, is said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.reported import check_gates
from cosmos_core.errors import ConfigError
from tests.unit.test_config_compose import CHAIN
from tests.unit.test_config_load import GRPO, SFT, load, refused

VLLM = "vLLM samples between 0.01 and 2.0, and takes 0 for greedy; or set rollout.backend = 'hf'"
GREEDY = (
    "rollout.sampling_config.{} takes the likeliest token: the completions of a prompt are the same, and nothing is "
    "learned of their differences; raise it"
)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("sft.train.optm_lr=[1e-5,1e-6]", "stage 'sft-data': train.optm_lr = [1e-05, 1e-06]: a model is one part here; "
         "give rates by module path"),
        ("grpo.rollout.n_generation=1", "stage 'grpo': rollout.n_generation = 1: advantages compare completions of one "
         "group; make it at least 2"),
        ("grpo.rollout.n_generation=1; grpo.train.train_policy.algo='reinforce++'; "
         "grpo.train.train_policy.variant='dapo'", "stage 'grpo': rollout.n_generation = 1: variant = 'dapo' trains on "
         "groups that differ; make it at least 2"),
        ("grpo.rollout.sampling_config.temperature=0", f"stage 'grpo': {GREEDY.format('temperature = 0.0')}"),
        ("grpo.rollout.sampling_config.top_k=1", f"stage 'grpo': {GREEDY.format('top_k = 1')}"),
        ("grpo.rollout.sampling_config.temperature=2.5; grpo.train.train_policy.temperature=2.5",
         f"stage 'grpo': rollout.sampling_config.temperature = 2.5: {VLLM}"),
        ("grpo.validation.enable=true; grpo.validation.temperature=0.005",
         f"stage 'grpo': validation.temperature = 0.005: {VLLM}"),
    ],
)  # fmt: skip
def test_what_this_version_cannot_do_is_accepted_by_the_schema_and_refused_before_a_run(
    tmp_path: Path, setting: str, said: str
) -> None:
    pipeline = load(tmp_path, CHAIN, *setting.split("; "))
    with pytest.raises(ConfigError) as caught:
        check_capabilities(pipeline)
    assert str(caught.value) == f"{tmp_path}/recipe.toml: {said}"


def test_data_of_a_stage_in_place_of_a_mixture_is_refused(tmp_path: Path) -> None:
    stages = [
        'name = "made"\nkind = "custom"\nentry = "some.module:run"\n',
        'name = "fit"\nkind = "sft"\nafter = "made"\ndata = "stage:made"\n',
    ]
    alone = "".join(line for line in SFT.splitlines(keepends=True) if not line.startswith("dataset"))
    text = alone + "".join(f"\n[[pipeline.stages]]\n{stage}" for stage in stages)
    mixed = "fit.train.train_policy.datasets=[{name='a.jsonl'},{name='b.jsonl'}]"
    with pytest.raises(ConfigError, match=r"stage 'fit': data = 'stage:made' takes the place of train.train_policy"):
        check_capabilities(load(tmp_path, text, mixed))
    check_capabilities(load(tmp_path, text))


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_measuring_against_a_reference_that_no_training_saves_is_refused(algorithm: str, tmp_path: Path) -> None:
    stages = ['name = "fit"\nkind = "sft"\n', 'name = "later"\nkind = "validate"\nmodel = "stage:fit"\nafter = "fit"\n']
    text = SFT + "".join(f"\n[[pipeline.stages]]\n{stage}" for stage in stages)
    named = f"train.train_policy.trainer_type='{algorithm}'"
    with pytest.raises(ConfigError, match=r"stage 'later': .* which stage 'fit' saves only with"):
        check_capabilities(load(tmp_path, text, named, "fit.validation.enable=false"))
    check_capabilities(load(tmp_path, text, named))


@pytest.mark.parametrize("setting", ["algo='reinforce++'", "bypass_reward=true"])
def test_a_group_may_be_one_completion_where_nothing_is_compared_inside_it(setting: str, tmp_path: Path) -> None:
    check_capabilities(load(tmp_path, GRPO, "rollout.n_generation=1", f"train.train_policy.{setting}"))


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.backend=hf", "rollout.sampling_config.temperature=2.5", "train.train_policy.temperature=2.5"),
        ("validation.temperature=3.0", "validation.top_k=-1"),
        ("validation.enable=true", "validation.temperature=0"),
    ],
)
def test_temperatures_that_are_sampled_or_not_used_are_accepted(settings: tuple[str, ...], tmp_path: Path) -> None:
    check_capabilities(load(tmp_path, GRPO, *settings))


@pytest.mark.parametrize(
    ("setting", "said", "switch"),
    [
        ("ratio_cap=2.0", "ratio_cap has no effect here: it is for variant = 'cispo' or 'dppo_tv' or 'dppo_kl'",
         "variant='cispo'"),
        ("sapo_temperature_pos=2.0", "sapo_temperature_pos has no effect here: it is for variant = 'sapo'",
         "variant='sapo'"),
        ("max_retry_for_on_policy=3", "max_retry_for_on_policy has no effect here: it is for variant = 'dapo'",
         "variant='dapo'"),
        ("unbiased_kl_estimate=true", "unbiased_kl_estimate = true has no effect here: kl_beta is off",
         "kl_beta=0.1"),
        ("advantage_high=2.0", "advantage_high has no effect here: it bounds advantages of diffusion models", ""),
    ],
)  # fmt: skip
def test_a_setting_of_another_algorithm_is_told(setting: str, said: str, switch: str, tmp_path: Path) -> None:
    key = "train.train_policy"
    assert unique_notices(load(tmp_path, GRPO, f"{key}.{setting}")) == [f"{key}.{said}"]
    if switch:
        assert not any(
            said in line for line in unique_notices(load(tmp_path, GRPO, f"{key}.{setting}", f"{key}.{switch}"))
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "has never run on a GPU; without a GPU or NCCL, weights travel through host memory"),
        (("rollout.backend=hf",), "has no effect with rollout.backend = 'hf'"),
        (("rollout.quantization=mxfp4",), "has no effect with rollout.quantization = 'mxfp4'"),
        (("rollout.async_r2r_sync=inference",), "has no effect with rollout.async_r2r_sync = 'inference'"),
        (("policy.lora.r=8",), "has no effect with policy.lora"),
        (("mode=colocated",), "has no effect here: with mode = 'colocated'"),
    ],
)
def test_what_native_weight_transfer_cannot_do_is_told(settings: tuple[str, ...], said: str, tmp_path: Path) -> None:
    key = "rollout.weight_transfer"
    lines = unique_notices(load(tmp_path, GRPO, "mode=disaggregated", f"{key}=native", *settings))
    assert sum(line.startswith(key) and said in line for line in lines) == 1, lines
    assert not any(key in line for line in unique_notices(load(tmp_path, GRPO, "mode=disaggregated", *settings)))


def test_settings_of_engines_apart_are_told_where_engines_are_inside(tmp_path: Path) -> None:
    settings = ("rollout.parallelism.n_init_replicas=4", "rollout.mode=async", "rollout.async_r2r_sync=generation",
                "train.train_policy.outdated_rollout_fetch_batch_size=8")  # fmt: skip
    inside = unique_notices(load(tmp_path, GRPO, *settings))
    assert [line.partition(" ")[0] for line in inside] == [
        "rollout.mode", "rollout.async_r2r_sync", "rollout.parallelism.n_init_replicas",
        "train.train_policy.outdated_rollout_fetch_batch_size",
    ]  # fmt: skip
    assert all("has no effect here: with mode = 'colocated' each rank has an engine inside" in line for line in inside)
    assert not any(
        "no effect" in line for line in unique_notices(load(tmp_path, GRPO, *settings, "mode=disaggregated"))
    )


@pytest.mark.parametrize(("table", "length"), [("rollout", 2048), ("rollout", 9000), ("validation", 4096)])
def test_a_completion_may_be_as_long_as_the_sequence_and_gets_what_the_prompt_leaves(
    table: str, length: int, tmp_path: Path
) -> None:
    longest = 4096 if table == "validation" else 2048
    settings = (f"policy.model_max_length={longest}", f"{table}.max_response_length={length}")
    others = ("validation.enable=true", "rollout.max_response_length=64") if table == "validation" else ()
    pipeline = load(tmp_path, GRPO, *others, *settings)
    check_capabilities(pipeline)
    assert unique_notices(pipeline) == [
        f"{table}.max_response_length = {length}: a completion gets the tokens that its prompt leaves of "
        f"policy.model_max_length = {longest}"
    ]


@pytest.mark.parametrize(("batch", "size"), [(16, 3), (8, 16), (2, 16)])
def test_a_step_may_have_other_numbers_of_completions_than_whole_groups(batch: int, size: int, tmp_path: Path) -> None:
    sizes = (f"train.train_batch_per_replica={batch}", f"rollout.n_generation={size}")
    pipeline = load(tmp_path, GRPO, *sizes)
    check_capabilities(pipeline)
    assert unique_notices(pipeline) == [
        f"train.train_batch_per_replica = {batch}: groups of rollout.n_generation = {size} completions are compared as "
        "a whole and spread over train steps"
    ]
    with pytest.raises(ConfigError, match="a train step of a diffusion model has whole groups"):
        check_capabilities(load(tmp_path, GRPO, *NFT, *sizes))


def test_rewards_without_a_weight_are_told(tmp_path: Path) -> None:
    settings = "train.train_policy.reward_function={exact_match = 0.0}"
    assert unique_notices(load(tmp_path, GRPO, settings)) == [
        "train.train_policy.reward_function: every weight is 0, so that no completion is better than another"
    ]


def test_the_whole_world_on_one_rank_is_one_rank(tmp_path: Path) -> None:
    check_capabilities(load(tmp_path, CHAIN, "policy.parallelism.dp_shard_size=-1"))


def test_a_batch_that_means_more_rows_in_cosmos_rl_is_told(tmp_path: Path) -> None:
    assert unique_notices(load(tmp_path, SFT)) == []
    assert unique_notices(load(tmp_path, SFT, "policy.parallelism.dp_shard_size=2")) == [
        "train.train_batch_per_replica = 8: rows of an optimizer step, of all 2 data-parallel ranks together "
        "(Cosmos-RL: of each)"
    ]


def test_sampling_that_is_not_from_the_policy_is_told_and_runs(tmp_path: Path) -> None:
    pipeline = load(tmp_path, GRPO, "rollout.sampling_config.top_p=0.9", "rollout.sampling_config.top_k=20")
    check_capabilities(pipeline)
    assert unique_notices(pipeline) == [
        "rollout.sampling_config: top_p = 0.9, top_k = 20: training completions are not drawn from the policy; the "
        "loss weights their tokens by policy / sampled distribution, and never sees the tokens that are cut off"
    ]
    assert unique_notices(load(tmp_path, GRPO, "validation.top_p=0.9")) == []


def test_engine_sink_and_target_may_be_a_users_own_code_found_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    upload = """
[[pipeline.stages]]
name = "upload"
kind = "upload"
after = "grpo"
model = "stage:grpo"
target = "own.py:Shelf"
"""
    pipeline = load(
        tmp_path, CHAIN + upload, "rollout.backend=own.py:Engine", "logging.logger=['own.py:Sink', 'WandB']"
    )
    check_capabilities(pipeline)
    recipe = pipeline.recipes["grpo"]
    assert recipe.rollout.backend == f"{tmp_path}/own.py:Engine"
    assert recipe.logging.logger == (f"{tmp_path}/own.py:Sink", "wandb")
    assert pipeline.stage("upload").target == f"{tmp_path}/own.py:Shelf"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.backend=own.py:", "rollout.backend: 'own.py:' is no import path; write module:thing or "
         "path/file.py:thing"),
        ("logging.logger=[':Sink']", "logging.logger.0: ':Sink' is no import path; write module:thing or "
         "path/file.py:thing"),
    ],
)  # fmt: skip
def test_half_an_import_path_is_refused_by_the_schema(tmp_path: Path, setting: str, said: str) -> None:
    assert said in refused(tmp_path, SFT, setting)


def test_an_engine_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.backend = 'sglang': this version has .*'hf'.*'vllm'.*file.py:Class"
    ):
        check_capabilities(load(tmp_path, CHAIN, "rollout.backend=sglang"))


GATE = """
[[pipeline.stages]]
name = "more"
kind = "prepare"
data = "stage:rows"
after = "rows"

[[pipeline.stages]]
name = "gate"
kind = "gate"
after = ["accuracy", "grpo"]
require = "{}"
"""


@pytest.mark.parametrize(
    ("require", "settings", "said"),
    [
        ("validation/acuracy > 0.5", [],
         "no stage in its `after` reports 'validation/acuracy'; did you mean 'validation/accuracy'?"),
        ("accuracy.reward/mean > 0.5", [], "no stage in its `after` reports 'reward/mean'; known: "),
        ("grpo.validation/reward > 0.5", [], "no stage in its `after` reports 'validation/reward'"),
        ("data/train_rows > 1", ["gate.after=['more', 'accuracy']"], ""),
        ("export/bytes > 1", ["gate.after=['more']"], "no stage in its `after` reports 'export/bytes'"),
        ("validation/accuracy > 0.5", [], ""),
        ("reward/mean > 0.5", [], ""),
        ("grpo.validation/reward > 0.5", ["grpo.validation.enable=true"], ""),
        ("validation/of_my_own > 0.5", ["accuracy.train.train_policy.trainer_type=mine.py:Mine"], ""),
        ("anything > 0.5", ["gate.after=['rows']"], ""),
    ],
)  # fmt: skip
def test_a_gate_asks_for_metrics_that_a_stage_before_it_can_report(
    tmp_path: Path, require: str, settings: list[str], said: str
) -> None:
    pipeline = load(tmp_path, CHAIN + GATE.format(require), *settings)
    if not said:
        return check_gates(pipeline)
    with pytest.raises(ConfigError) as caught:
        check_capabilities(pipeline)
    assert str(caught.value).startswith(f"{tmp_path}/recipe.toml: stage 'gate': require = '{require}': {said}")


def test_a_gate_takes_what_another_gate_hands_on(tmp_path: Path) -> None:
    second = GATE.format("validation/acuracy > 0.5").replace('"gate"\n', '"second"\n', 1)
    second = second.replace('"more"', '"others"').replace('after = ["accuracy", "grpo"]', 'after = "gate"')
    pipeline = load(tmp_path, CHAIN + GATE.format("validation/accuracy > 0.5") + second)
    with pytest.raises(ConfigError, match=r"stage 'second': .* did you mean 'validation/accuracy'"):
        check_gates(pipeline)


@pytest.mark.parametrize(
    ("settings", "count"),
    [(("window_size=2", "window_range=[9,12]"), 0), (("window_size=4", "window_range=[6,12]"), 3)],
)
def test_a_window_behind_the_last_step_of_a_rollout_is_refused(
    tmp_path: Path, settings: tuple[str, ...], count: int
) -> None:
    pipeline = load(
        tmp_path, GRPO, "train.train_policy.trainer_type=flow_grpo", "policy.is_diffusers=true",
        "policy.diffusers.sample.num_steps=10", *(f"policy.diffusers.flow_rl.{setting}" for setting in settings),
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=rf"window_size = \d: there are {count} such steps .*num_steps = 10; lower it"
    ):
        check_capabilities(pipeline)


NFT = ("train.train_policy.trainer_type=diffusion_nft", "policy.is_diffusers=true")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("policy.diffusers.flow_rl.exp_reward=true", "exp_reward = true makes all advantages negative"),
        (
            "train.train_policy.bypass_reward=true",
            "bypass_reward = true makes all rewards equal, of which diff",
        ),
        ("train.train_policy.advantage_high=0", r"advantage_high = 0\.0 is a scale; make it positive"),
        ("distillation={enable=true, model_name_or_path='teacher'}", "distillation.enable = true: a teacher judges"),
    ],
)
def test_what_leaves_diffusion_nft_nothing_to_learn_is_refused(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_capabilities(load(tmp_path, GRPO, *NFT, setting))


def test_keys_of_another_diffusion_algorithm_are_told(tmp_path: Path) -> None:
    of_flow_grpo = ("policy.diffusers.flow_rl.guard=true", "policy.diffusers.flow_rl.window_size=2")
    assert [said for said in unique_notices(load(tmp_path, GRPO, *NFT, *of_flow_grpo)) if "no effect" in said] == [
        f"policy.diffusers.flow_rl.{key} has no effect with trainer_type = 'diffusion_nft'"
        for key in ("window_size", "guard")
    ]
    flow_grpo = ("train.train_policy.trainer_type=flow_grpo", "policy.is_diffusers=true")
    of_nft = ("policy.diffusers.timesteps_fraction=0.6", "policy.diffusers.nft_beta=0.1")
    assert [said for said in unique_notices(load(tmp_path, GRPO, *flow_grpo, *of_nft)) if "no effect" in said] == [
        f"policy.diffusers.{key} has no effect with trainer_type = 'flow_grpo'"
        for key in ("timesteps_fraction", "nft_beta")
    ]


def test_held_out_completions_that_cannot_differ_are_told(tmp_path: Path) -> None:
    [said] = unique_notices(load(tmp_path, GRPO, "validation.n_generation=4"))
    assert "validation.n_generation = 4: the completions of a prompt are the same" in said
    drawn = ("validation.n_generation=4", "validation.temperature=0.5", "validation.top_k=-1")
    assert unique_notices(load(tmp_path, GRPO, *drawn)) == []


def test_what_engines_apart_from_the_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    for mode in ("colocated", "colocated_separated", "disaggregated"):
        assert unique_notices(load(tmp_path, GRPO, f"mode={mode!r}")) == []
    several = ("rollout.parallelism.n_init_replicas=3", "rollout.parallelism.tp_size=2")
    check_capabilities(load(tmp_path, GRPO, "mode='disaggregated'", *several))
    with pytest.raises(ConfigError, match=r"tp_size = 2: engines share the ranks of policy.parallelism, which are 1"):
        check_capabilities(load(tmp_path, GRPO, "mode='colocated_separated'", *several))
    with pytest.raises(ConfigError, match=r"tp_size = 2: backend 'hf' has the whole model on each rank"):
        check_capabilities(load(tmp_path, GRPO, "mode='disaggregated'", "rollout.backend='hf'", *several))
    average = ("train.ema_enable=true", "validation.enable=true")
    with pytest.raises(ConfigError, match="moving average of train"):
        check_capabilities(load(tmp_path, GRPO, "mode='disaggregated'", *average))


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ('kind = "export"\nmodel = "stage:p"', "model = 'stage:p': a stage of kind 'prepare' makes no model"),
        ('kind = "sft"\ndata = "stage:s"', "data = 'stage:s': a stage of kind 'sft' makes no data"),
        (
            'kind = "export"\nmodel = "stage:s"\ncheckpoint = "best"',
            "checkpoint = 'best' needs train.ckpt.enable_checkpoint = true and validation.enable = true in stage 's'",
        ),
        ('kind = "export"\nmodel = "stage:s"\ncheckpoint = "7"', "checkpoint = '7' needs train.ckpt.enable_checkp"),
        ('kind = "merge"', r"after = \['p', 's'\] names 1 models to merge"),
    ],
)
def test_what_an_earlier_stage_will_not_make_is_refused(tmp_path: Path, stage: str, said: str) -> None:
    stages = ('name = "p"\nkind = "prepare"', 'name = "s"\nkind = "sft"\nafter = "p"\ndata = "stage:p"')
    named = f'name = "x"\nafter = ["p", "s"]\n{stage}'
    text = SFT + "".join(f"\n[[pipeline.stages]]\n{each}\n" for each in (*stages, named))
    with pytest.raises(ConfigError, match=f"stage 'x': {said}"):
        check_capabilities(load(tmp_path, text, "validation.enable=false", "train.ckpt.enable_checkpoint=false"))


def test_a_setting_of_a_stage_named_like_a_table_and_one_that_does_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, SFT, "export.retries=5", "validation.enable=false").stage("export").retries == 5
    folders = ("pipeline.output_dir=a", "train.output_dir=b")
    assert "train.output_dir = 'b' has no effect here: pipeline.output_dir = 'a'" in unique_notices(
        load(tmp_path, SFT, *folders)
    )
    for setting, said in (("sft=3", "'sft' is a stage; write sft.KEY=VALUE"), ("learning_rate=3", "is train.optm_lr")):
        with pytest.raises(ConfigError, match=said):
            load(tmp_path, SFT, setting)


def test_a_misspelt_key_of_a_diffusion_model_is_named_with_its_table(tmp_path: Path) -> None:
    for trainer in ("sft", "mine.py:Mine"):
        settings = ("policy.is_diffusers=true", f"train.train_policy.trainer_type='{trainer}'")
        with pytest.raises(ConfigError, match=r"train\.train_policy\.mini_bach: unknown key; did you mean"):
            load(tmp_path, SFT, *settings, "train.train_policy.mini_bach=3")
