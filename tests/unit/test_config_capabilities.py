"""What this version cannot do, and what it does in another way, is said before anything runs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.errors import ConfigError
from tests.cells import full
from tests.unit.test_config_compose import CHAIN, stages
from tests.unit.test_config_load import GRPO, SFT, load, refused

P = "train.train_policy"
FLOW = f"{P}.trainer_type=flow_grpo; policy.is_diffusers=true"
NFT = f"{P}.trainer_type=diffusion_nft; policy.is_diffusers=true"
SHORT = f"{FLOW}; policy.diffusers.sample.num_steps=10; policy.diffusers.flow_rl"
APART = "rollout.parallelism.n_init_replicas=3; rollout.parallelism.tp_size=2"
STEPS = "such steps in window_range below the last of policy.diffusers.sample.num_steps = 10; lower it"
VLLM = "vLLM samples between 0.01 and 2.0, and takes 0 for greedy; or set rollout.backend = 'hf'"
GREEDY = (
    "takes the likeliest token: the completions of a prompt are the same, and nothing is learned of their differences"
)
NOT_DRAWN = (
    "training completions are not drawn from the policy; the loss weights their tokens by policy / sampled distribution"
)
GATED = '\n[[pipeline.stages]]\nname = "gate"\nkind = "gate"\nafter = "grpo"\nrequire = ["a > 0"]\n'
SAMPLED = stages('name = "s"\nkind = "sample"', 'name = "fit"\nkind = "rl"')


def settings_in(text: str) -> list[str]:
    return text.split("; ") if text else []


@pytest.mark.parametrize(
    ("recipe", "settings", "said"),
    [
        (CHAIN, "sft.train.optm_lr=[1e-5,1e-6]", "stage 'sft-data': train.optm_lr = [1e-05, 1e-06]: a model is one "
         "part here; give rates by module path"),
        (CHAIN, "grpo.rollout.n_generation=1", "stage 'grpo': rollout.n_generation = 1: advantages compare completions "
         "of one group; make it at least 2"),
        (CHAIN, f"grpo.rollout.n_generation=1; grpo.{P}.algo='reinforce++'; grpo.{P}.variant='dapo'",
         "stage 'grpo': rollout.n_generation = 1: variant = 'dapo' trains on groups that differ; make it at least 2"),
        *full((CHAIN, "grpo.rollout.sampling_config.temperature=0", f"sampling_config.temperature = 0.0 {GREEDY}")),
        (CHAIN, "grpo.rollout.sampling_config.top_k=1", f"rollout.sampling_config.top_k = 1 {GREEDY}; raise it"),
        (CHAIN, f"grpo.rollout.sampling_config.temperature=2.5; grpo.{P}.temperature=2.5",
         f"stage 'grpo': rollout.sampling_config.temperature = 2.5: {VLLM}"),
        (CHAIN, "grpo.validation.enable=true; grpo.validation.temperature=0.005",
         f"stage 'grpo': validation.temperature = 0.005: {VLLM}"),
        (CHAIN, "rollout.backend=sglang", "rollout.backend = 'sglang': this version has 'flow_sampler', 'hf', 'vllm'; "
         "take one of them, or a class of your own, path/file.py:Class"),
        (SFT, "policy.lora.init_lora_weights='eva'", "init_lora_weights = 'eva' needs data before the first step; use "
         "'pissa' or true"),
        (GRPO, f"{SHORT}.window_size=2; policy.diffusers.flow_rl.window_range=[9,12]", f"= 2: there are 0 {STEPS}"),
        (GRPO, f"{SHORT}.window_size=4; policy.diffusers.flow_rl.window_range=[6,12]", f"= 4: there are 3 {STEPS}"),
        (GRPO, f"{NFT}; policy.diffusers.flow_rl.exp_reward=true", "exp_reward = true makes all advantages negative"),
        (GRPO, f"{NFT}; {P}.bypass_reward=true", "bypass_reward = true makes all rewards equal, of which diff"),
        (GRPO, f"{NFT}; {P}.advantage_high=0", "advantage_high = 0.0 is a scale; make it positive"),
        (GRPO, f"{NFT}; distillation={{enable=true, model_name_or_path='teacher'}}",
         "distillation.enable = true: a teacher judges"),
        (GRPO, f"{NFT}; train.train_batch_per_replica=8; rollout.n_generation=16",
         "a train step of a diffusion model has whole groups"),
        (GRPO, f"mode='colocated_separated'; {APART}",
         "tp_size = 2: engines share the ranks of policy.parallelism, which are 1"),
        (GRPO, f"mode='disaggregated'; rollout.backend='hf'; {APART}",
         "tp_size = 2: backend 'hf' has the whole model on each rank"),
        (GRPO, "mode='disaggregated'; train.ema_enable=true; validation.enable=true", "moving average of train"),
    ],
)  # fmt: skip
def test_what_this_version_cannot_do_is_accepted_by_the_schema_and_refused_before_a_run(
    tmp_path: Path, recipe: str, settings: str, said: str
) -> None:
    pipeline = load(tmp_path, recipe, *settings_in(settings))
    with pytest.raises(ConfigError) as caught:
        check_capabilities(pipeline)
    assert str(caught.value).startswith(f"{tmp_path}/recipe.toml: stage ") and said in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (GRPO, f"rollout.n_generation=1; {P}.algo='reinforce++'"),  # nothing is compared in a group
        (GRPO, f"rollout.n_generation=1; {P}.bypass_reward=true"),
        (GRPO, f"rollout.backend=hf; rollout.sampling_config.temperature=2.5; {P}.temperature=2.5"),
        (GRPO, f"validation.temperature=3.0; validation.top_k=-1; mode='disaggregated'; {APART}"),  # which is not used
        (GRPO, "validation.enable=true; validation.temperature=0"),
        (CHAIN, "policy.parallelism.dp_shard_size=-1"),
    ],
)
def test_what_this_version_can_do_is_accepted(tmp_path: Path, recipe: str, settings: str) -> None:
    check_capabilities(load(tmp_path, recipe, *settings_in(settings)))


def of_variants(key: str, variants: str) -> list[str]:
    return [f"{P}.{key} has no effect here: it is for variant = {variants}"]


CLIPPING = "'grpo' or 'dapo' or 'gspo' or 'dppo_tv' or 'dppo_kl'"


@pytest.mark.parametrize(
    ("recipe", "settings", "said"),
    [
        (SFT, "", []),
        (CHAIN, "sft.timeout=1h", []),
        *((GRPO, f"mode={mode!r}", []) for mode in ("colocated_separated", "disaggregated")),
        (GRPO, f"{P}.ratio_cap=2.0; {P}.sapo_temperature_pos=2.0; {P}.max_retry_for_on_policy=3",
         of_variants("max_retry_for_on_policy", "'dapo'")
         + of_variants("ratio_cap", "'cispo' or 'dppo_tv' or 'dppo_kl'")
         + of_variants("sapo_temperature_pos", "'sapo'")),
        (GRPO, f"{P}.variant='cispo'; {P}.epsilon_high=5.0", of_variants("epsilon_high", CLIPPING)),
        (GRPO, f"{P}.variant='gspo'; {P}.lower_bound_ratio=4.0; {P}.loss_type='token-mean'",
         of_variants("lower_bound_ratio", "'grpo' or 'dapo'")),
        (GRPO, f"{P}.aipo_rho=2.0; {P}.epsilon_low=0.1", of_variants("epsilon_low", f"{CLIPPING}, without aipo_rho")),
        (GRPO, f"{P}.ratio_cap=2.0; {P}.variant='cispo'", []),
        (GRPO, f"{P}.max_retry_for_on_policy=3; {P}.variant='dapo'", []),
        (GRPO, f"{P}.unbiased_kl_estimate=true; {P}.kl_beta=0.1; validation.top_p=0.9", []),
        (GRPO, f"{P}.unbiased_kl_estimate=true; {P}.advantage_high=2.0",
         [f"{P}.unbiased_kl_estimate = true has no effect here: kl_beta is off",
          f"{P}.advantage_high has no effect here: it bounds advantages of diffusion models"]),
        (GRPO, f"{P}.reward_function={{exact_match = 0.0}}",
         [f"{P}.reward_function: every weight is 0, so that no completion is better than another"]),
        (SFT, "policy.parallelism.dp_shard_size=2",
         ["train.train_batch_per_replica = 8: rows of an optimizer step, of all 2 data-parallel ranks together "
          "(Cosmos-RL: of each)"]),
        (GRPO, "rollout.sampling_config.top_p=0.9; rollout.sampling_config.top_k=20",
         [f"rollout.sampling_config: top_p = 0.9, top_k = 20: {NOT_DRAWN}, and never sees the tokens that are cut "
          "off"]),
        *((recipe, f"{stage}{P}.temperature=0.9",
           [f"{P}.temperature = 0.9 and rollout.sampling_config.temperature = 1.0 differ: {NOT_DRAWN}"])
          for recipe, stage in ((CHAIN, "grpo."), (GRPO, ""))),
        (GRPO, "validation.n_generation=4",
         ["validation.n_generation = 4: the completions of a prompt are the same: each takes the likeliest token; set "
          "validation.temperature = 1 and validation.top_k = -1 to draw"]),
        (GRPO, "validation.n_generation=4; validation.temperature=0.5; validation.top_k=-1", []),
        *((GRPO, f"policy.model_max_length=2048; rollout.max_response_length={length}",
           [f"rollout.max_response_length = {length}: a completion gets the tokens that its prompt leaves of "
            "policy.model_max_length = 2048"]) for length in (2048,)),
        (GRPO, "policy.model_max_length=4096; validation.enable=true; validation.max_response_length=4096",
         ["validation.max_response_length = 4096: a completion gets the tokens that its prompt leaves of "
          "policy.model_max_length = 4096"]),
        *((GRPO, f"train.train_batch_per_replica={batch}; rollout.n_generation={size}",
           [f"train.train_batch_per_replica = {batch}: groups of rollout.n_generation = {size} completions are "
            "compared as a whole and spread over train steps"]) for batch, size in ((16, 3), (2, 16))),
        (SFT, "validation.dataset={name='org/rows', split='test'}", []),
        (SFT, "validation.enable=false; validation.dataset.name='org/rows'", []),
        (SFT, "policy.is_diffusers=true; validation.dataset={name='org/rows', local_dir='held_out'}", []),
        (SFT, "validation.dataset.name='org/rows'",
         [f"validation.dataset.name = 'org/rows': its rows are trained on too ({P}.dataset); name other rows or "
          "another split, or leave it out and hold rows out with test_size"]),
        (CHAIN + GATED, "gate.timeout=1h",
         ["stage 'gate': timeout = '1h' has no effect here: kind gate has no worker that could be ended"]),
        (SFT, "pipeline.output_dir=a; train.output_dir=b",
         ["train.output_dir = 'b' has no effect here: pipeline.output_dir = 'a'"]),
        (GRPO + SAMPLED, "train.optm_decay_ratio=0.1; sample.min_margin=0.1",
         ["sample.min_margin = 0.1 has no effect here: pairs is off",
          "train.optm_decay_ratio = 0.1 has no effect here: optm_decay_type is off"]),
        # a rule has set others
        (GRPO + SAMPLED,
         f"train.optm_min_lr_factor=0.1; train.optm_decay_type='cosine'; {P}.use_decoupled_loss=true", []),
        (SFT, "policy.parallelism.tp_size=2; train.compile=true",
         ["train.compile = true: the blocks run as they are, because torch does not compile weights that tp_size = 2 "
          "splits for rows of any length"]),
        (SFT, f"policy.parallelism.pp_size=4; policy.parallelism.pp_micro_batch_size=2; {P}.mini_batch=8", []),
        (SFT, f"policy.parallelism.pp_size=4; policy.parallelism.pp_micro_batch_size=2; {P}.mini_batch=4",
         [f"{P}.mini_batch = 4: rows that go through the pipeline between two waits, fewer than pp_size x "
          "pp_micro_batch_size = 4 x 2; raise it to keep the ranks busy"]),
    ],
)  # fmt: skip
def test_what_a_user_may_not_expect_is_told_and_accepted(
    tmp_path: Path, recipe: str, settings: str, said: list[str]
) -> None:
    pipeline = load(tmp_path, recipe, *settings_in(settings))
    assert unique_notices(pipeline) == said
    if recipe not in (CHAIN + GATED, GRPO + SAMPLED):  # whose stages ask for what no stage has
        check_capabilities(pipeline)


def test_a_subset_of_a_folder_is_read_where_it_has_one_and_is_told_to_have_no_effect_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "rows" / "main").mkdir(parents=True)
    for subset, readme, is_read in (
        ("main", "", True),
        ("other", "", False),
        ("other", "configs: [{data_dir: a}]", True),
    ):
        (tmp_path / "rows" / "README.md").write_text(f"---\n{readme}\n---\n")
        notices = unique_notices(
            load(tmp_path, SFT, f"{P}.dataset.name={tmp_path}/rows", f"{P}.dataset.subset={subset}")
        )
        assert any("subset" in notice for notice in notices) != is_read
    (tmp_path / "list").mkdir()
    for name in ("rows.jsonl", "list/metadata.csv"):  # the latter lists media, which are read whatever the subset
        (tmp_path / name).touch()
    cases = (("rows", "main", True), ("rows", "other", True), ("rows.jsonl", "other", False), ("list", "other", False))
    for name, subset, is_read in cases:
        local_dir = ("policy.is_diffusers=true", f"{P}.dataset.name=", f"{P}.dataset.local_dir={tmp_path}/{name}")
        notices = unique_notices(load(tmp_path, SFT, *local_dir, f"{P}.dataset.subset={subset}"))
        assert [notice for notice in notices if "subset" in notice] == [
            f"{P}.dataset.subset = 'other' has no effect here: {tmp_path}/{name} is on this machine"
        ] * (not is_read)


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "has never run on a GPU; without a GPU or NCCL, weights travel through host memory"),
        (("rollout.backend=hf",), "has no effect with rollout.backend = 'hf'"),
        *full((("rollout.quantization=mxfp4",), "has no effect with rollout.quantization = 'mxfp4'")),
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
        *full(("validation/tool_errors < 0.1", [], ""), ("validation/diversity > 0.1", [], "")),
        ("validation/logps/chosen > -9", [], ""),
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
        return check_capabilities(pipeline)
    with pytest.raises(ConfigError) as caught:
        check_capabilities(pipeline)
    assert str(caught.value).startswith(f"{tmp_path}/recipe.toml: stage 'gate': require = '{require}': {said}")


def test_a_gate_takes_what_another_gate_hands_on(tmp_path: Path) -> None:
    second = GATE.format("validation/acuracy > 0.5").replace('"gate"\n', '"second"\n', 1)
    second = second.replace('"more"', '"others"').replace('after = ["accuracy", "grpo"]', 'after = "gate"')
    pipeline = load(tmp_path, CHAIN + GATE.format("validation/accuracy > 0.5") + second)
    with pytest.raises(ConfigError, match=r"stage 'second': .* did you mean 'validation/accuracy'"):
        check_capabilities(pipeline)


def test_keys_of_another_diffusion_algorithm_are_told(tmp_path: Path) -> None:
    for algorithm, values, name in (
        (NFT, {"flow_rl.window_size": "2", "flow_rl.guard": "true"}, "diffusion_nft"),
        (FLOW, {"timesteps_fraction": "0.6", "nft_beta": "0.1"}, "flow_grpo"),
    ):
        others = [f"policy.diffusers.{key}={value}" for key, value in values.items()]
        said = unique_notices(load(tmp_path, GRPO, *settings_in(algorithm), *others))
        assert [line for line in said if "no effect" in line] == [
            f"policy.diffusers.{key} has no effect with trainer_type = '{name}'" for key in values
        ]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ('kind = "export"\nmodel = "stage:p"', "model = 'stage:p': a stage of kind 'prepare' makes no model"),
        ('kind = "sft"\ndata = "stage:s"', "data = 'stage:s': a stage of kind 'sft' makes no data"),
        ('kind = "export"\nmodel = "stage:s"\ncheckpoint = "best"',
         "checkpoint = 'best' needs train.ckpt.enable_checkpoint = true and validation.enable = true in stage 's'"),
        ('kind = "export"\nmodel = "stage:s"\ncheckpoint = "7"', "checkpoint = '7' needs train.ckpt.enable_checkp"),
        ('kind = "merge"', r"after = \['p', 's'\] names 1 models to merge"),
    ],
)  # fmt: skip
def test_what_an_earlier_stage_will_not_make_is_refused(tmp_path: Path, stage: str, said: str) -> None:
    stages = ('name = "p"\nkind = "prepare"', 'name = "s"\nkind = "sft"\nafter = "p"\ndata = "stage:p"')
    named = f'name = "x"\nafter = ["p", "s"]\n{stage}'
    text = SFT + "".join(f"\n[[pipeline.stages]]\n{each}\n" for each in (*stages, named))
    with pytest.raises(ConfigError, match=f"stage 'x': {said}"):
        check_capabilities(load(tmp_path, text, "validation.enable=false", "train.ckpt.enable_checkpoint=false"))


@pytest.mark.parametrize("checkpoint", ["7", "25", "20", "7 validation.enable=true", "7 train.ckpt.save_freq=7"])
def test_a_checkpoint_of_a_step_that_is_not_saved_is_refused(tmp_path: Path, checkpoint: str) -> None:
    checkpoint, *settings = checkpoint.split()
    stage = f'name = "x"\nafter = "s"\nkind = "export"\nmodel = "stage:s"\ncheckpoint = "{checkpoint}"'
    text = SFT + f'\n[[pipeline.stages]]\nname = "s"\nkind = "sft"\n\n[[pipeline.stages]]\n{stage}\n'
    ckpt = ("train.ckpt.enable_checkpoint=true", "train.ckpt.save_freq=5", "train.max_num_steps=20")
    error = pytest.raises(ConfigError, match=f"'{checkpoint}': stage 's' saves each 5 steps .* of 20")
    with error if checkpoint in {"7", "25"} and not settings else nullcontext():
        check_capabilities(load(tmp_path, text, "validation.enable=false", *ckpt, *settings))


def test_a_setting_of_a_stage_named_like_a_table_is_of_the_stage(tmp_path: Path) -> None:
    assert load(tmp_path, SFT, "export.retries=5", "validation.enable=false").stage("export").retries == 5
    for setting, said in (("sft=3", "'sft' is a stage; write sft.KEY=VALUE"), ("learning_rate=3", "is train.optm_lr")):
        with pytest.raises(ConfigError, match=said):
            load(tmp_path, SFT, setting)


def test_a_misspelt_key_of_a_diffusion_model_is_named_with_its_table(tmp_path: Path) -> None:
    for trainer in ("sft", "mine.py:Mine"):
        settings = ("policy.is_diffusers=true", f"train.train_policy.trainer_type='{trainer}'")
        with pytest.raises(ConfigError, match=r"train\.train_policy\.mini_bach: unknown key; did you mean"):
            load(tmp_path, SFT, *settings, "train.train_policy.mini_bach=3")
