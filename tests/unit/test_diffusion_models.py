"""Families of diffusion models, each against its own pipeline of diffusers: text, latents, and what the network is
called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models import verify_pipeline_export
from cosmos_core.models.cosmos_predict import CONDITIONING_NOISE_LEVEL, GuardrailPlaceholder, substitute_torchvision
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.export_pipeline import export_pipeline
from cosmos_core.models.families import find_pipeline_modules, open_pipeline
from cosmos_core.models.lora import add_adapter
from cosmos_core.models.pipeline_folder import MODEL_INDEX_FILE, PipelineFolder
from cosmos_core.models.verify_pipeline_export import ImageRequest, generate_images
from cosmos_core.observe.record import render_loading_code
from tests import tiny_pipelines
from tests.cells import full

PROMPTS = ["7 is a digit", "a cat"]
LENGTH = 24


@pytest.fixture(scope="module", params=tiny_pipelines.FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    """Each family, from a folder."""
    folder = tiny_pipelines.save(request.param, tmp_path_factory.mktemp("pipelines") / request.param)
    return opened(folder)


def opened(folder: Path, **diffusers: Any) -> DiffusionModel:
    settings = {"max_prompt_length": LENGTH, **diffusers}
    return open_pipeline(str(folder), PolicyConfig(is_diffusers=True, diffusers=settings))


def pipeline_of(family: DiffusionModel) -> Any:
    """The pipeline as a user has it."""
    extra = {"safety_checker": GuardrailPlaceholder()} if family.max_conditioning_frames else {}
    substitute_torchvision()
    pipeline = family.folder.pipeline_class.from_pretrained(family.folder.path, **extra)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call(family: DiffusionModel, pipeline: Any, **settings: Any) -> Any:
    """A call of the pipeline at the tiny size; SANA as it is called by itself, with its instruction."""
    sizes: dict[str, Any] = {"height": 32, "width": 32, "max_sequence_length": LENGTH, "num_inference_steps": 2}
    name = family.folder.class_name
    if name.startswith("Sana"):
        sizes["use_resolution_binning"] = False
    if family.is_video:
        sizes["frames" if name == "SanaVideoPipeline" else "num_frames"] = 9
    return pipeline(prompt=PROMPTS, generator=torch.Generator().manual_seed(0), **sizes | settings)


class Recorder:
    """Notes what a network is called with, and what it gives."""

    def __init__(self, network: Any) -> None:
        self.calls: list[tuple[dict[str, Any], Tensor]] = []
        self._forward, network.forward = network.forward, self

    def __call__(self, *args: Tensor, **kwargs: Any) -> Any:
        found = self._forward(*args, **kwargs)
        self.calls.append((dict(kwargs) | ({"hidden_states": args[0]} if args else {}), found[0]))
        return found


@torch.no_grad()
def test_prediction_and_decoding_are_those_of_the_pipelines_own_call(family: DiffusionModel) -> None:
    pipeline = pipeline_of(family)
    shown = call(family, pipeline, guidance_scale=1.0, output_type="pt")[0]
    recorder = Recorder(pipeline.transformer)
    latents = call(family, pipeline, guidance_scale=1.0, output_type="latent")[0]
    ours = (family.decode(latents) / 2 + 0.5).clamp(0, 1)
    assert ((ours.transpose(1, 2) if family.is_video else ours) - shown).abs().max() <= 1e-6
    text = family.text_embedding(PROMPTS)
    network = family.load_denoiser(torch.float32)
    assert len(recorder.calls) == 2
    for given, theirs in recorder.calls:
        timestep = given["timestep"]
        sigma_B = timestep[:, 0, 0, 0, 0] if timestep.ndim == 5 else timestep / 1000
        for name in ("encoder_hidden_states", "encoder_attention_mask", "pooled_projections"):
            if name in given:
                ours = family.nft_prepare_transformer_input(given["hidden_states"], sigma_B, text)[name]
                assert torch.equal(ours, given[name]), name
        ours = family.predict(network, given["hidden_states"], sigma_B, text)
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_encoding_is_what_decoding_takes_back(family: DiffusionModel) -> None:
    """The statistics are undone: a VAE with the identity in place of its networks would give the pixels back."""
    pixels = tiny_pipelines.pixels(family.folder.path.name, 2)
    mean, logvar = family.visual_embedding(pixels)
    assert mean.shape[1:] == family.latent_shape(32, 32, 9 if family.is_video else 1)
    with torch.no_grad():
        vae = family.pipeline.vae
        posterior = vae.encode(pixels)
        raw = posterior.latent_dist.mode() if hasattr(posterior, "latent_dist") else posterior.latent
        assert torch.allclose(family.decode(mean), vae.decode(raw, return_dict=False)[0], atol=1e-5)
    if logvar is not None:
        scale = family.folder.settings("vae")["scaling_factor"]
        drawn = posterior.latent_dist.mean + posterior.latent_dist.std - family.folder.settings("vae")["shift_factor"]
        assert torch.allclose(mean + torch.exp(0.5 * logvar), drawn * scale, atol=1e-5)


def test_encoders_are_loaded_when_needed_and_dropped_when_asked(tmp_path: Path) -> None:
    fresh = opened(tiny_pipelines.save("sd3", tmp_path))
    fresh.load_denoiser(torch.float32)
    fresh.set_scheduler_timestep(4)
    assert "pipeline" not in vars(fresh)
    fresh.text_embedding(["a"])
    assert "pipeline" in vars(fresh)
    fresh.drop_encoders()
    assert "pipeline" not in vars(fresh)


def test_given_frames_come_clean_have_velocity_0_and_their_own_level(tmp_path: Path) -> None:
    family = opened(tiny_pipelines.save("cosmos_predict", tmp_path / "cosmos_predict"))
    latents, noise = torch.randn(2, 16, 3, 4, 4), torch.randn(2, 16, 3, 4, 4)
    sigma_B, given_B = torch.tensor([0.5, 0.25]), torch.tensor([0, 2])
    noisy = family.add_noise(latents, noise, sigma_B, given_B)
    assert torch.equal(noisy[1, :, :2], latents[1, :, :2])
    assert torch.allclose(noisy[1, :, 2], 0.75 * latents[1, :, 2] + 0.25 * noise[1, :, 2])
    assert torch.allclose(noisy[0], 0.5 * latents[0] + 0.5 * noise[0])
    text = family.text_embedding(PROMPTS)
    inputs = family.nft_prepare_transformer_input(noisy, sigma_B, text, given_B)
    assert inputs["timestep"].flatten().tolist() == pytest.approx([0.5] * 3 + [CONDITIONING_NOISE_LEVEL] * 2 + [0.25])
    assert inputs["condition_mask"][1, 0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]
    with torch.no_grad():
        velocity = family.predict(family.load_denoiser(torch.float32), noisy, sigma_B, text, given_B)
    assert velocity[1, :, :2].abs().max() == 0
    assert velocity[1, :, 2].abs().max() > 0
    assert all(value.abs().max() == 0 for value in family.dropped_text(text).values())
    assert torch.equal(family.apply_guidance(latents, noise, 0.0), latents)


def test_a_pipeline_that_is_none_or_of_no_family_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model_index\.json that names a pipeline"):
        PipelineFolder(str(tmp_path))
    (tmp_path / MODEL_INDEX_FILE).write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(ModelError, match=r"WanPipeline is of no family here, which are those of Cosmos.*, Stable.*; w"):
        opened(tmp_path)
    (tmp_path / MODEL_INDEX_FILE).write_text(json.dumps({"_class_name": "SanaPipeline", "vae": ["os", "path"]}))
    with pytest.raises(ModelError, match=r"wants os.path for 'vae', which is not installed"):
        opened(tmp_path).folder.load("vae")
    with pytest.raises(ConfigError, match="must be a subclass of"):
        open_pipeline(str(tmp_path), PolicyConfig(is_diffusers=True, model_class="pathlib:Path"))


def test_weights_of_a_variant_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / MODEL_INDEX_FILE).write_text(json.dumps({"_class_name": "SanaPipeline", "vae": ["diffusers", "VAE"]}))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/diffusion_pytorch_model.fp16-00001-of-00002.safetensors").touch()
    with pytest.raises(ModelError, match=r"of 'vae' .*fp16-00001.* alone, .*variant='fp16'\)\.save_pretrained"):
        PipelineFolder(str(tmp_path))
    (tmp_path / "vae/diffusion_pytorch_model-00001-of-00002.safetensors").touch()
    assert PipelineFolder(str(tmp_path)).components == ("vae",)


@pytest.mark.parametrize(
    ("name", "part"), [("sd3", "transformer"), ("sd3", "vae"), ("cosmos_predict", "transformer"), ("sd3", "scheduler")]
)
def test_a_component_without_its_configuration_is_refused(tmp_path: Path, name: str, part: str) -> None:
    """As Cosmos-RL exports the transformer of a pipeline."""
    family = opened(tiny_pipelines.save(name, tmp_path))
    file_name = "scheduler_config.json" if part == "scheduler" else "config.json"
    (tmp_path / part / file_name).unlink()
    with pytest.raises(ModelError, match=f"'{part}' has no configuration; copy its {file_name} from the model"):
        assert family.latent_shape(32, 32) and family.schedule


def test_a_scheduler_that_is_no_flow_is_refused(tmp_path: Path) -> None:
    folder = tiny_pipelines.save("sana", tmp_path / "sana")
    settings = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps(settings | {"use_flow_sigmas": False}))
    with pytest.raises(ConfigError, match="is not that of a rectified flow"):
        opened(folder).set_scheduler_timestep(4)


FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
EULER, UNIPC, DPM = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        (EULER, {"shift": 3.0}),
        (EULER, {"shift": 3.0, "shift_terminal": 0.1}),
        (EULER, {"use_karras_sigmas": True}),
        (EULER, {"use_exponential_sigmas": True, "shift": 2.0}),
        (EULER, {"use_beta_sigmas": True}),
        (EULER, {"num_train_timesteps": 200, "shift": 3.0}),
        (UNIPC, {"flow_shift": 5.0}),
        (UNIPC, {"flow_shift": 5.0, "shift_terminal": 0.05}),
        (UNIPC, {"num_train_timesteps": 100}),
        (UNIPC, {"use_karras_sigmas": True, "sigma_max": 80.0, "sigma_min": 0.002}),
        (UNIPC, {"use_karras_sigmas": True}),
        (DPM, {"flow_shift": 3.0}),
        (DPM, {"flow_shift": 3.0, "num_train_timesteps": 100}),
    ],
)
def test_the_table_of_noise_levels_is_the_schedulers(scheduler: str, settings: dict[str, Any], tmp_path: Path) -> None:
    family = with_scheduler(tmp_path, scheduler, settings)
    theirs = family.folder.load("scheduler")
    for num_steps in (2, 4, 10):
        theirs.set_timesteps(num_steps)
        ours_N = family.set_scheduler_timestep(num_steps)
        assert ours_N.dtype == torch.float64
        assert torch.allclose(ours_N, theirs.sigmas.double(), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("scheduler", "settings", "message"),
    [
        (EULER, {"use_dynamic_shifting": True}, "`mu` must be passed"),
        (UNIPC, {"use_dynamic_shifting": True}, "`mu` must be passed"),
        (EULER, {"invert_sigmas": True}, "go from 0 to 1; they must fall"),
        (UNIPC, {"final_sigmas_type": "sigma_min"}, "they must fall from at most 1 to 0"),
        (DPM, {"final_sigmas_type": "sigma_min"}, "they must fall from at most 1 to 0"),
        (DPM, {"use_karras_sigmas": True}, "they must fall from at most 1 to 0"),
        (DPM, {"use_beta_sigmas": True}, "they must fall from at most 1 to 0"),
        (UNIPC, {"use_exponential_sigmas": True}, "they must fall from at most 1 to 0"),
        ("FlowMatchHeunDiscreteScheduler", {}, "they must fall from at most 1 to 0"),
    ],
)
def test_a_table_that_is_no_path_from_noise_to_data_is_refused(
    scheduler: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_scheduler(tmp_path, scheduler, settings).set_scheduler_timestep(4)


def with_scheduler(folder: Path, name: str, settings: dict[str, Any]) -> DiffusionModel:
    """A pipeline of which there is only the scheduler."""
    getattr(diffusers, name)(**({} if name.startswith("FlowMatch") else FLOW), **settings).save_pretrained(
        folder / "scheduler"
    )
    (folder / MODEL_INDEX_FILE).write_text(
        json.dumps({"_class_name": "SanaPipeline", "scheduler": ["diffusers", name]})
    )
    return DiffusionModel(PipelineFolder(str(folder)), DiffusersConfig())


def test_a_network_is_told_noise_levels_in_the_timesteps_of_its_scheduler(tmp_path: Path) -> None:
    folder = tiny_pipelines.save("sd3", tmp_path / "sd3")
    file = folder / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_train_timesteps": 200}))
    family = opened(folder)
    theirs = family.folder.load("scheduler")
    theirs.set_timesteps(4)
    text, levels_N = family.text_embedding(PROMPTS), family.set_scheduler_timestep(4)[:-1]
    inputs = family.nft_prepare_transformer_input(torch.zeros(4, 16, 2, 2), levels_N, text)
    assert torch.allclose(inputs["timestep"].float(), theirs.timesteps, rtol=1e-5)


@torch.no_grad()
def test_without_a_t5_its_tokens_are_zeros_and_the_others_stay_as_they_are(tmp_path: Path) -> None:
    whole = opened(tiny_pipelines.save("sd3", tmp_path / "whole")).text_embedding(PROMPTS)
    bare = opened(tiny_pipelines.save("sd3", tmp_path / "bare", has_t5=False)).text_embedding(PROMPTS)
    tokens = bare["prompt_embeds"]
    assert tokens.shape == (2, 77 + LENGTH, 32) and not tokens[:, 77:].any()
    assert torch.equal(tokens[:, :77], whole["prompt_embeds"][:, :77])
    assert torch.equal(bare["pooled_prompt_embeds"], whole["pooled_prompt_embeds"])


def test_the_loading_line_says_what_the_folder_has_not(tmp_path: Path) -> None:
    def line(name: str, **components: list[str | None]) -> str:
        (tmp_path / MODEL_INDEX_FILE).write_text(
            json.dumps({"_class_name": name, "vae": ["diffusers", "VAE"], **components})
        )
        return render_loading_code(tmp_path)

    none: list[str | None] = [None, None]
    bare = line("StableDiffusion3Pipeline", image_encoder=none, text_encoder_3=none, tokenizer_3=none)
    assert bare.endswith(f"from_pretrained({str(tmp_path)!r}, text_encoder_3=None, tokenizer_3=None)")
    guarded = line("Cosmos2_5_PredictBasePipeline")
    assert guarded.endswith("')  # pip install cosmos_guardrail, or give a safety_checker")
    assert line("Cosmos2_5_PredictBasePipeline", safety_checker=none) == guarded
    assert line("SanaPipeline").endswith(f"from_pretrained({str(tmp_path)!r})")


def test_the_loading_line_loads_a_pipeline_without_a_t5(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    exec(render_loading_code(tiny_pipelines.save("sd3", tmp_path / "bare", has_t5=False)), found)
    assert found["pipe"].text_encoder_3 is None and found["pipe"].transformer is not None


def test_every_family_is_found_by_the_name_of_its_pipeline() -> None:
    assert find_pipeline_modules() == {
        "StableDiffusion3Pipeline": "sd3", "SanaPipeline": "sana", "SanaVideoPipeline": "sana_video",
        "Cosmos2_5_PredictBasePipeline": "cosmos_predict",
    }  # fmt: skip


def test_sizes_that_the_network_cannot_take_are_refused(tmp_path: Path) -> None:
    family = opened(tiny_pipelines.save("sana_video", tmp_path / "sana_video"))
    assert family.latent_shape(64, 32, 5) == (16, 2, 8, 4)
    with pytest.raises(ConfigError, match="height = 48 must be a multiple of 32"):
        family.latent_shape(48, 32, 5)
    with pytest.raises(ConfigError, match="inference_frames = 6 must be 1 more than a multiple of 4"):
        family.latent_shape(32, 32, 6)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("sd3", {"min_given_frames": 1, "max_given_frames": 1}, r"frames = 1: \w+ can be given no latent frames"),
        ("cosmos_predict", {"min_given_frames": 3, "max_given_frames": 3}, r"frames = 3: \w+ can be given 2 latent"),
        ("sd3", {"max_prompt_length": 600}, r"max_prompt_length = 600: the T5 of a .* takes at most 512 tokens"),
    ],
)
def test_frames_and_prompts_that_the_network_does_not_take_are_refused_before_anything_is_encoded(
    name: str, settings: dict[str, int], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(tiny_pipelines.save(name, tmp_path), **settings)


def test_a_guardrail_that_the_folder_names_is_not_loaded(tmp_path: Path) -> None:
    folder = tiny_pipelines.save("cosmos_predict", tmp_path / "cosmos_predict")
    index = json.loads((folder / MODEL_INDEX_FILE).read_text()) | {
        "safety_checker": ["cosmos_guardrail", "CosmosSafetyChecker"]
    }
    (folder / MODEL_INDEX_FILE).write_text(json.dumps(index))
    assert len(opened(folder).text_embedding(PROMPTS)["prompt_embeds"]) == 2


@pytest.mark.parametrize(
    ("name", "lora"), [("sd3", {"r": 1}), *full(("sana", {"target_modules": ["linear_1", "proj_out"]}))]
)
def test_kernels_that_round_differently_refuse_no_export(
    name: str, lora: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They depend on the alignment of weights, and on whether weights have gradients."""
    monkeypatch.setattr(
        verify_pipeline_export, "call_in_interpreter", lambda pool, function, arguments, *_: function(*arguments)
    )
    family = opened(tiny_pipelines.save(name, tmp_path / name))
    network = family.load_denoiser(torch.float32)
    torch.manual_seed(0)
    add_adapter(network, LoraConfig(**lora), family.lora_targets)
    for parameter in filter(lambda parameter: parameter.requires_grad, network.parameters()):
        torch.nn.init.normal_(parameter, std=0.05)
    export_pipeline(family, network, tmp_path / "export")
    checks = verify_pipeline_export.verify_pipeline(family, network, tmp_path / "export")
    assert checks == ["tensors", "copies", "images: bit-identical", "adapter: bit-identical"]
    assert all(each.requires_grad == ("lora_" in key) for key, each in network.named_parameters())


def test_an_export_names_no_folder_of_the_machine_that_made_it(tmp_path: Path) -> None:
    """Else the same weights, trained in another run, would be another model to the stages that take them up."""
    family = opened(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    network = family.load_denoiser(torch.float32)
    export_pipeline(family, network, tmp_path / "export")
    written = json.loads((tmp_path / "export/transformer/config.json").read_text())
    of_base = json.loads((tmp_path / "sd3/transformer/config.json").read_text())
    assert written == {key: value for key, value in of_base.items() if key != "_name_or_path"}
    assert diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "export/transformer").config.num_layers == 2


def test_pipelines_that_prove_an_export_are_in_memory_one_after_the_other(tmp_path: Path) -> None:
    code = tmp_path / "counted.py"
    code.write_text("""
import weakref
from cosmos_core.models.sd3 import SD3
loaded = []
class Counted(SD3):
    @classmethod
    def load_pipeline(cls, folder, dtype):
        assert not any(each() for each in loaded), "the one before is still in memory"
        pipeline = super().load_pipeline(folder, dtype)
        loaded.append(weakref.ref(pipeline.text_encoder_3))
        return pipeline
""")
    family = opened(tiny_pipelines.save("sd3", tmp_path / "sd3"))
    probe = ImageRequest(family.folder.path, None, family.probe_settings(), torch.float32, f"{code}:Counted", 1)
    one, other = generate_images([probe, probe])
    assert (one == other).all()
