"""SFT of diffusion models: the loss against closed forms and diffusers, and whole trainings from images to exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cosmos_core.algorithms.diffusion_sft import DiffusionSft, compute_velocity_error
from cosmos_core.checkpoint import export
from cosmos_core.config.schema.diffusion_sft import DiffusionSftConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import StageContext
from cosmos_core.data import prepare
from cosmos_core.data.flow_sample import FlowSample, NoiseSampler
from cosmos_core.data.media_rows import MediaRow
from cosmos_core.errors import ConfigError
from cosmos_core.models.denoiser import Denoiser, RequestedOutputs
from cosmos_core.models.families import open_pipeline
from cosmos_core.parallel.fsdp import transformer_blocks
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import check
from cosmos_core.train.setup import export_trained, open_trainer, train
from cosmos_core.train.trainer import Trainer
from tasks.kinds import all_kinds
from tests import tiny_pipelines
from tests.effects.change import recipe, stage_of
from tests.unit.test_media_source import png, write_clip
from tests.unit.trainers import NoView, assert_same_weights, curve, train_until

BASE: dict[str, Any] = {
    "train.compile": False, "train.param_dtype": "float32", "train.train_batch_per_replica": 4,
    "train.train_policy.type": "sft", "train.train_policy.mini_batch": 2, "train.optm_lr": 1e-3,
    "train.optm_warmup_steps": 0, "train.epoch": 3, "train.ckpt.enable_checkpoint": True, "train.ckpt.save_freq": 2,
    "policy.is_diffusers": True, "policy.diffusers.max_prompt_length": 16, "policy.diffusers.train_frames": 9,
    "policy.diffusers.inference_size": [32, 32], "policy.diffusers.inference_frames": 9,
    "policy.diffusers.sample.eval_num_steps": 2, "validation.enable": True, "validation.freq": 3,
    "train.train_policy.dataset.test_size": 2,
}  # fmt: skip
LORA = {"policy.lora.r": 4, "policy.lora.lora_alpha": 8.0}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


class Inputs:
    """Of each family a pipeline and prepared rows, made when first asked for: eight to learn, two held out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, name: str) -> Path:
        path = self.folder / name
        if path.exists():
            return path
        return tiny_pipelines.save(name.removeprefix("bare_"), path, **({"has_t5": False} if "bare" in name else {}))

    def data(self, name: str) -> Path:
        path = self.folder / f"{name}-data"
        if not path.exists():
            source = write_media(self.folder / f"{name}-media", is_video=name in tiny_pipelines.CLIPS)
            settings = {**BASE, "train.train_policy.dataset.local_dir": str(source)}
            prepare.run(stage_of(path, recipe(settings), kind="prepare", model=self.model(name)))
        return path / "data"

    def stage(self, path: Path, name: str = "sd3", **settings: Any) -> Stage:
        config: Recipe = recipe({**BASE, **settings})
        return stage_of(path, config, model=self.model(name), data=self.data(name))


def write_media(folder: Path, *, is_video: bool) -> Path:
    folder.mkdir(parents=True)
    for i in range(10):
        (folder / f"{i:04}.json").write_text(json.dumps({"prompt": f"{i} is a colour"}))
        if is_video:
            write_clip(folder / f"{i:04}.mp4")
        else:
            (folder / f"{i:04}.png").write_bytes(png((20 * i, 255 - 20 * i, 128), (32, 32)))
    return folder


def drawn(count: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[FlowSample]:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return [
        FlowSample(
            tensor(4, 8, 8), float(torch.rand((), generator=generator)),
            {"prompt_embeds": tensor(12, 32), "pooled_prompt_embeds": tensor(32)}, tensor(4, 8, 8),
            weight=0.5 + i,
        )
        for i in range(count)
    ]  # fmt: skip


def trainer_of(model: Path, settings: dict[str, Any], dtype: torch.dtype, path: Path) -> Trainer:
    config = recipe({**BASE, **settings})
    family = open_pipeline(str(model), config.policy)
    return Trainer(
        Denoiser(family.load_denoiser(dtype), family, config.train), config.train, ProgressWriter(path / "p.json")
    )


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trainer.adapter.model.named_parameters() if p.grad is not None}


def test_the_loss_of_held_out_samples_is_the_mean_over_them_without_frames_that_are_given() -> None:
    class Still(NoView):
        def evaluate(self, samples: list[FlowSample], *_: Any, **__: Any) -> list[dict[str, Tensor]]:
            return [{"velocity": torch.zeros_like(sample.latents)} for sample in samples]

    latents = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    samples = [*drawn(2), FlowSample(latents, 0.5, {}, torch.zeros_like(latents), num_conditioning_frames=2)]
    found = DiffusionSft(DiffusionSftConfig(type="sft")).measure([samples[:2], samples[2:]], Still(), 2)
    errors = [(s.noise - s.latents).square().mean() for s in samples[:2] if s.noise is not None]
    expected = torch.stack([*errors, latents[:, 2:].square().mean()]).mean().item()
    assert found == {"loss": pytest.approx(expected, rel=1e-6), "samples": 3.0}


def test_the_loss_is_the_closed_form(inputs: Inputs, tmp_path: Path) -> None:
    trainer = trainer_of(inputs.model("sd3"), {}, torch.float32, tmp_path)
    samples = drawn(5)
    [update] = DiffusionSft(DiffusionSftConfig(type="sft")).updates(samples, NoView())
    found = trainer.update(update)
    network = diffusers.SD3Transformer2DModel.from_pretrained(inputs.model("sd3"), subfolder="transformer")
    network.train()
    total = torch.zeros(())
    for sample in samples:
        assert sample.noise is not None
        noisy = (1 - sample.sigma) * sample.latents + sample.sigma * sample.noise
        predicted = network(
            noisy[None], sample.text["prompt_embeds"][None], sample.text["pooled_prompt_embeds"][None],
            torch.tensor([1000 * sample.sigma]), return_dict=False,
        )[0][0]  # fmt: skip
        total = total + sample.weight * (predicted - (sample.noise - sample.latents)).square().mean()
    (total / 5).backward()
    assert found["loss"] == pytest.approx((total / 5).item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm()
    assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.full), True], ids=["", "recomputed"])
def test_micro_batches_and_recomputation_change_nothing(inputs: Inputs, tmp_path: Path, recomputes: bool) -> None:
    """In float64: the gradient of four micro-batches is that of the large batch."""
    samples, found = drawn(8, dtype=torch.float64), []
    for size in (8, 2):
        settings = {"train.train_policy.mini_batch": size, "train.train_batch_per_replica": 8}
        trainer = trainer_of(inputs.model("sd3"), settings, torch.float64, tmp_path)
        if recomputes and size == 2:
            trainer.adapter.model.enable_gradient_checkpointing()
        [update] = DiffusionSft(DiffusionSftConfig(type="sft")).updates(samples, NoView())
        found.append((trainer.update(update)["loss"], gradients(trainer)))
    (loss, large), (other, small) = found
    assert loss == pytest.approx(other, rel=1e-12)
    most = max(gradient.abs().max() for gradient in large.values())
    assert max((large[name] - small[name]).abs().max() for name in large) <= 1e-9 * most


def test_given_frames_are_no_part_of_the_mean() -> None:
    predicted, target = torch.zeros(2, 1, 3, 2, 2), torch.ones(2, 1, 3, 2, 2)
    target[:, :, 0] = 5.0
    mask = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])[:, None, :, None, None]
    assert compute_velocity_error(predicted, target, mask).tolist() == pytest.approx([9.0, 1.0])


def test_guidance_of_a_micro_batch_is_the_rule_of_the_pipeline(inputs: Inputs, tmp_path: Path) -> None:
    trainer = trainer_of(inputs.model("sd3"), {}, torch.float32, tmp_path)
    one, other = drawn(2)
    guided = FlowSample(one.latents, one.sigma, one.text, one.noise, negative_text=other.text)
    blind = FlowSample(one.latents, one.sigma, other.text, one.noise)
    [c], [u], [found] = (
        trainer.evaluate([each], wants)
        for each, wants in ((one, None), (blind, None), (guided, RequestedOutputs(guidance=3.0)))
    )
    assert torch.allclose(found["velocity"], u["velocity"] + 3 * (c["velocity"] - u["velocity"]), atol=1e-5)


def row(seed: int = 0, frames: int = 0) -> MediaRow:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn((4, *((frames,) if frames else ()), 8, 8), generator=generator)
    return MediaRow(seed, "a prompt", {"prompt_embeds": torch.ones(3, 2)}, mean, torch.full_like(mean, -1.0))


def test_what_is_drawn_for_a_row_is_a_function_of_the_seed_and_the_recipe() -> None:
    config = recipe(BASE).policy.diffusers
    null = {"prompt_embeds": torch.zeros(3, 2)}
    draws = NoiseSampler(config, null, timestep_shift=1.0)
    one, again, other = (draws.sample(row(), seed, prompt_dropout=0.0) for seed in (1, 1, 2))
    assert one.noise is not None and again.noise is not None and other.noise is not None
    assert torch.equal(one.noise, again.noise) and one.sigma == again.sigma and torch.equal(one.latents, again.latents)
    assert not torch.equal(one.noise, other.noise) and one.sigma != other.sigma
    spread = torch.stack([draws.sample(row(), seed).latents - row().mean for seed in range(300)])
    assert spread.std().item() == pytest.approx(torch.tensor(-0.5).exp().item(), rel=0.02)
    texts = [draws.sample(row(), seed).text["prompt_embeds"].sum().item() for seed in range(500)]
    assert 0.06 < texts.count(0.0) / 500 < 0.14, "a tenth of the prompts is dropped"
    clips = NoiseSampler(config, null, timestep_shift=1.0, max_conditioning_frames=2)
    for frames, counts in ((3, {0, 1, 2}), (2, {0, 1})):  # one frame is left to learn
        assert {clips.sample(row(frames=frames), seed).num_conditioning_frames for seed in range(40)} == counts
    assert {draws.sample(row(frames=3), seed).num_conditioning_frames for seed in range(9)} == {0}


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param("sd3", {}, marks=pytest.mark.full),
        pytest.param("sd3", LORA | {"policy.lora.lora_dropout": 0.1}, marks=pytest.mark.full),
        pytest.param("sana", LORA, marks=pytest.mark.full),
        pytest.param("sana_video", {}, marks=pytest.mark.full),
        ("cosmos_predict", LORA),
    ],
    ids=["sd3-full", "sd3-lora", "sana-lora", "sana_video-full", "cosmos_predict-lora"],
)
def test_a_training_falls_and_its_export_draws_what_the_policy_draws(
    inputs: Inputs, tmp_path: Path, name: str, lora: dict[str, Any]
) -> None:
    settings = {"train.ema_enable": True, "train.optm_lr": 6e-3 if lora else 2e-3}
    stage = inputs.stage(tmp_path / "sft", name, **lora, **settings)
    trained = train(stage)
    outcome = export_trained(stage, trained, "float32", "base")
    lines = read_metrics(stage.path / "metrics.jsonl")
    found = [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert found[-1] < found[0]
    assert outcome.metrics["validation/loss"] == found[-1]
    checks = ["tensors", "copies", "images: bit-identical", *(["adapter: bit-identical"] if lora else [])]
    assert outcome.info["checks"] == checks
    if name == "sd3":
        check_what_a_user_loads(inputs.model("sd3"), stage.path / "safetensors/step_6", has_adapter=bool(lora))


def check_what_a_user_loads(start: Path, folder: Path, *, has_adapter: bool) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    before = load_file(start / "transformer/diffusion_pytorch_model.safetensors")
    after = pipeline.transformer.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if not has_adapter:
        unchanged = before.keys() - changed
        assert all("pos_embed" in n or "blocks.1.attn" in n for n in unchanged), "the last block has no use for them"
    else:
        assert changed and all(".attn" in name for name in changed)
        with safe_open(folder / "lora/model.safetensors", "pt") as file:
            assert all(key.startswith("transformer.") for key in file.keys())  # noqa: SIM118
        base = diffusers.DiffusionPipeline.from_pretrained(start)
        base.load_lora_weights(folder / "lora")
        assert not [m for n, m in base.transformer.named_modules() if "lora" in n and isinstance(m, torch.nn.Dropout)]
        layer = base.transformer.transformer_blocks[0].attn.to_q
        assert layer.scaling == {base.get_active_adapters()[0]: 2.0}


@pytest.mark.parametrize("lora", [{}, pytest.param(LORA, marks=pytest.mark.full)], ids=["full", "lora"])
def test_a_training_that_stopped_ends_with_the_same_bits_and_saves_its_weights_and_their_average(
    inputs: Inputs, tmp_path: Path, lora: dict[str, Any]
) -> None:
    settings = {**lora, "train.ema_enable": True, "train.ema_decay": 0.5, "train.epoch": 2}
    whole, stopped = (inputs.stage(tmp_path / name, **settings) for name in ("whole", "stopped"))
    through = train(whole)
    train_until(stopped, 3)
    assert_same_weights(train(stopped).adapter.model, through.adapter.model)
    assert curve(stopped) == curve(whole)
    newest = whole.path / "checkpoints/step_4/policy"
    names = {name for part in newest.rglob("*.safetensors") for name in load_file(part)}
    raw = {name.removeprefix("model.") for name in names if name.startswith("model.")} - {"pos_embed.pos_embed"}
    average = {name.removeprefix("ema.") for name in names if name.startswith("ema.")}
    assert raw and raw == average and all("lora_" in name for name in raw) == bool(lora)


@pytest.mark.parametrize(
    "name", ["bare_sd3", *(pytest.param(name, marks=pytest.mark.full) for name in tiny_pipelines.FAMILIES)]
)
def test_the_published_form_is_proven_in_half_precision_and_carries_the_adapter(
    inputs: Inputs, tmp_path: Path, name: str
) -> None:
    stage = inputs.stage(tmp_path / "export", name, **{"train.param_dtype": "bfloat16"})
    stage = stage_of(tmp_path / "export", stage.recipe, kind="export", model=inputs.model(name))
    outcome = export.run(stage)
    assert outcome.info["checks"] == ["tensors", "copies", "images: bit-identical"]
    folder = stage.path / "safetensors/step_0"
    card = (folder / "README.md").read_text()
    absent = ", text_encoder_3=None, tokenizer_3=None" if name == "bare_sd3" else ""
    assert f"DiffusionPipeline.from_pretrained(path{absent})" in card
    assert ("cosmos_guardrail" in card) == (name == "cosmos_predict")
    weights = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_an_export_is_proven_with_blocks_that_are_not_compiled(inputs: Inputs, tmp_path: Path) -> None:
    adapter: Any = open_trainer(inputs.stage(tmp_path / "sft")).adapter
    for block in transformer_blocks(adapter.model):  # the kernels of a compiler round differently
        block.compile(backend=lambda graph, inputs: lambda *args: [each * 1.001 for each in graph(*args)])
    assert adapter.export(tmp_path / "export").passed_checks[-1] == "images: bit-identical"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [("sd3", 2, "no tokens that ranks can share"), ("cosmos_predict", 3, "does not divide the 2 attention heads")],
)
def test_check_refuses_ranks_that_cannot_share_a_clip(
    inputs: Inputs, tmp_path: Path, name: str, size: int, said: str
) -> None:
    config = recipe({**BASE, "policy.parallelism.cp_size": size})
    with pytest.raises(ConfigError, match=f"policy.parallelism.cp_size = {size}.*{said}"):
        check.run(stage_of(tmp_path, config, model=inputs.model(name)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy.parallelism.tp_size": 2}, "policy.parallelism.tp_size = 2: this version spreads diffusion models by"),
        ({"policy.parallelism.cp_size": 2, "train.compile": True}, "train.compile = true excludes policy.parallelism"),
        ({"policy.enable_liger_kernel": True}, "Liger has no kernels for diffusion models"),
        ({"policy.lora.modules_to_save": ["proj_out"]}, "diffusers loads adapters alone"),
        ({"policy.lora.init_lora_weights": "pissa"}, "moves a part of the base weights"),
        ({"policy.is_diffusers": False, "train.train_policy.trainer_type": "diffusion_sft"}, "set it to true"),
        ({"train.train_policy.trainer_type": "dpo"}, "trainer_type = 'dpo' does not train such models; give one"),
        ({"policy.model_safetensor_path": "here"}, "policy.model_safetensor_path"),
        ({"policy.chat_template": "chatml"}, "policy.chat_template"),
        ({"logging.report_mfu": True}, "logging.report_mfu = true is for language models"),
        ({"train.sequence_packing": True}, "train.sequence_packing = true is for language models"),
        ({"rollout.multi_turn_config.enable": True}, "rollout.multi_turn_config.enable = true is for language models"),
    ],
)
def test_what_is_not_done_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    config = recipe({**{key: BASE[key] for key in ("train.train_policy.type", "policy.is_diffusers")}, **settings})
    problems = list(config.policy.unsupported_setting_errors(StageContext(config, all_kinds()["sft"])))
    assert [problem for problem in problems if said in problem]


FLOW_SFT = {"type": "sft"}
NFT, DDRL = ({"type": "grpo", "trainer_type": name} for name in ("diffusion_nft", "ddrl"))
GIVEN = {"max_conditional_frames": 1, "data_beta": 0.01}


@pytest.mark.parametrize(
    ("policy", "diffusers", "said"),
    [
        (FLOW_SFT | {"system_prompt": "s"}, {}, "system_prompt is for rows of text; leave it out"),
        (FLOW_SFT | {"enable_dp_load_balancing": True}, {}, "enable_dp_load_balancing is for rows of text"),
        (NFT | {"system_prompt": "s"}, {}, "system_prompt has no meaning with trainer_type = 'diffusion_nft'"),
        (NFT | {"variant": "gspo"}, {}, "variant has no meaning with trainer_type = 'diffusion_nft'"),
        (DDRL, {"train_frames": 9, "inference_frames": 5, "flow_rl": GIVEN}, "train_frames = 9: .*_frames = 5"),
        (DDRL | {"dataset": {"aspect_ratio_buckets": True}}, {"flow_rl": GIVEN}, "aspect_ratio_buckets = true: "),
    ],
)
def test_keys_that_do_not_fit_the_rows_of_a_diffusion_model_are_refused(
    policy: dict[str, Any], diffusers: dict[str, Any], said: str
) -> None:
    train_values = {"train_policy": policy, "max_num_steps": 1}
    values = {"policy": {"is_diffusers": True, "diffusers": diffusers}, "train": train_values}
    config = Recipe.model_validate(values, context={"notices": []})
    kind = all_kinds()["sft" if policy["type"] == "sft" else "rl"]
    assert re.search(said, " | ".join(config.train.train_policy.unsupported_setting_errors(StageContext(config, kind))))


def test_check_asks_a_scheduler_for_no_table_that_the_recipe_gives(inputs: Inputs, tmp_path: Path) -> None:
    model = tiny_pipelines.save("sd3", tmp_path / "sd3")
    file = model / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dynamic_shifting": True}))
    with pytest.raises(ConfigError, match=r"no table of noise levels .*policy.diffusers.sample.sigma_schedule$"):
        check.run(stage_of(tmp_path / "a", recipe(BASE), model=model, data=inputs.data("sd3")))
    given = recipe({**BASE, "policy.diffusers.sample.sigma_schedule": "flow"})
    check.run(stage_of(tmp_path / "b", given, model=model, data=inputs.data("sd3")))
