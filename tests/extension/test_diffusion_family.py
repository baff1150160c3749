"""A fifth family of diffusion models, in a file of the user's own: checked, prepared, trained and exported."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from cosmos_core.cli_train import _propose_settings
from cosmos_core.data import prepare
from cosmos_core.models.check_model import check_model
from cosmos_core.train.setup import run
from tests import tiny_pipelines
from tests.effects.change import recipe, stage_of
from tests.unit.test_diffusion_sft import BASE, LORA, write_media

USER = Path(__file__).parent / "user"
CLASS = f"{USER / 'flux.py'}:Flux"
UNET = f"{USER / 'unet.py'}:FlowUnet"


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX.1."""
    clip, t5 = tiny_pipelines._clip_tokenizer(), tiny_pipelines._t5_tokenizer()
    torch.manual_seed(0)
    text = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=clip.bos_token_id, eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )  # fmt: skip
    long = T5Config(vocab_size=len(t5), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
                    relative_attention_num_buckets=8)  # fmt: skip
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=False,
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0), vae=tiny_pipelines.sd3().vae,
        text_encoder=CLIPTextModel(text).eval(), tokenizer=clip, text_encoder_2=T5EncoderModel(long).eval(),
        tokenizer_2=t5, transformer=transformer.eval(),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("flux") / "flux"
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion that is a flow."""
    clip = tiny_pipelines._clip_tokenizer()
    torch.manual_seed(0)
    text = CLIPTextConfig(
        vocab_size=len(clip), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=clip.bos_token_id, eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )  # fmt: skip
    network = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=tiny_pipelines.sd3().vae, text_encoder=CLIPTextModel(text).eval(), tokenizer=clip, unet=network.eval(),
        scheduler=tiny_pipelines._flow_dpm(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("unet") / "unet"
    pipeline.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "model_class"), [pytest.param("flux", CLASS, marks=pytest.mark.full), ("unet", UNET)], ids=["flux", "unet"]
)
def test_it_passes_the_checks_of_a_new_model(name: str, model_class: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    assert [check for check in check_model(str(folder), model_class) if not check.has_passed] == []


def test_without_a_class_the_remedy_is_named(flux: Path) -> None:
    [check] = check_model(str(flux))
    assert "FluxPipeline is of no family here" in check.message and "policy.model_class" in check.message


def test_a_recipe_is_proposed_for_the_class_that_set_names(unet: Path, tmp_path: Path) -> None:
    given = {"method": "diffusion-sft", "model": str(unet), "data": str(write_media(tmp_path / "m", is_video=False))}
    proposed = {key: value for key, value, _ in _propose_settings(given, [f"policy.model_class={UNET}"])}
    assert proposed["policy.diffusers.inference_size"] == [16, 16] and "policy.is_diffusers" in proposed


@pytest.mark.parametrize(
    ("name", "model_class"), [("flux", CLASS), pytest.param("unet", UNET, marks=pytest.mark.full)], ids=["flux", "unet"]
)
def test_it_is_prepared_trained_and_exported(
    name: str, model_class: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(name)
    source = write_media(tmp_path / "media", is_video=False)
    settings = {
        **BASE, **LORA, "policy.model_class": model_class, "train.train_policy.dataset.local_dir": str(source),
        "train.epoch": 2, "train.optm_lr": 3e-3,
    }  # fmt: skip
    config = recipe(settings)
    data = stage_of(tmp_path / "data", config, kind="prepare", model=folder)
    prepare.run(data)
    stage = stage_of(tmp_path / "sft", config, model=folder, data=data.path / "data")
    outcome = run(stage)
    assert outcome.info["checks"] == ["tensors", "copies", "images: bit-identical", "adapter: bit-identical"]
