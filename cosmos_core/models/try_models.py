"""Program of `cosmos try`: show completions or images of one model, or of two models side by side.

    python -m cosmos_core.models.try_models OPTIONS MODEL [MODEL]

OPTIONS is JSON: `prompt`, `max_tokens`, `temperature`, `names`, `system_prompts`. Transformers or diffusers loads the
models, on a GPU if there is one; each has its own conversation. Training does not use this module.
"""

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.console import Console
from rich.table import Table
from transformers.utils import cached_file

from cosmos_core.data.messages import add_system_turn, propose_merged_turns
from cosmos_core.data.rendering import is_turn_missing, make_list_contents
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import EXIT_OK, EXIT_PREEMPTED, CosmosError, ModelError, first_line
from cosmos_core.models.model_files import locate_model, translate_load_errors
from cosmos_core.models.pipeline_folder import MODEL_INDEX_FILE

ResponseFn = Callable[[str, int], str]
"""Function that returns the response of a model to a prompt with a number: the completion of a language model, or the
name of the file with the generated image."""


def open_chat(model: str, max_tokens: int, temperature: float, device: torch.device, system_prompt: str) -> ResponseFn:
    """Return a function that completes prompts with a language model; raise ModelError if the model cannot be loaded.
    If the model has a chat template, each prompt continues the conversation, which begins with the system prompt."""
    from transformers.utils.logging import disable_progress_bar

    from cosmos_core.models.hf import load_model, load_tokenizer
    from cosmos_core.models.processor import load_processor

    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = load_tokenizer(model)
    template_renderer: Any = tokenizer
    with suppress(ModelError):  # a model whose image processor is missing can still complete text
        template_renderer = load_processor(model) or tokenizer
    loaded_model = load_model(model, dtype=select_dtype(device), device=device)
    chat_turns: list[dict[str, Any]] = add_system_turn([], system_prompt)
    sampling_options: dict[str, Any] = {"do_sample": bool(temperature)}
    if temperature:
        sampling_options["temperature"] = temperature

    def render_turns(turns: list[dict[str, Any]]) -> Any:
        rendered_text = template_renderer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        # Templates of some vision models expect a list as content of a turn, and render nothing for a string.
        if template_renderer is not tokenizer and is_turn_missing(turns[-1], rendered_text):
            turns = make_list_contents(turns)
            rendered_text = template_renderer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return tokenizer(rendered_text, add_special_tokens=False, return_tensors="pt")

    def generate_response(prompt: str, prompt_index: int) -> str:
        chat_turns.append({"role": "user", "content": prompt})
        if template_renderer.chat_template:
            try:
                tokenized_prompt = render_turns(chat_turns)
            except TemplateError:  # the template refuses a system turn, so merge it into another turn
                tokenized_prompt = render_turns([*propose_merged_turns(chat_turns)][-1])
        else:
            tokenized_prompt = tokenizer(prompt, return_tensors="pt")
        torch.manual_seed(prompt_index)
        # Select the inputs that exist, because some tokenizers return no attention mask.
        model_input_names = {"input_ids", "attention_mask"} & tokenized_prompt.keys()
        model_inputs = {name: tokenized_prompt[name].to(device) for name in model_input_names}
        pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        output_ids = loaded_model.generate(  # type: ignore[operator]
            **model_inputs, max_new_tokens=max_tokens, pad_token_id=pad_token_id, **sampling_options
        )
        completion = tokenizer.decode(output_ids[0, model_inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        chat_turns.append({"role": "assistant", "content": completion})
        return str(completion)

    return generate_response


def open_image_generator(model: str, image_file_prefix: str, device: torch.device) -> ResponseFn:
    """Return a function that writes the generated image of a prompt to the current folder; raise ModelError if the
    pipeline cannot be loaded, or draws videos. Every model gets the same noise."""
    from cosmos_core.models.diffusion import DiffusionModel
    from cosmos_core.models.pipeline_folder import PipelineFolder

    pipeline_folder = PipelineFolder(model)
    pipeline_call_parameters = inspect.signature(pipeline_folder.pipeline_class.__call__).parameters
    if {"frames", "num_frames"} & pipeline_call_parameters.keys():
        raise ModelError(f"{model}: this pipeline draws videos; cosmos try shows text and images")
    try:
        pipeline = DiffusionModel.load_pipeline(pipeline_folder, select_dtype(device)).to(device)
    except (ImportError, OSError, ValueError, AttributeError, KeyError) as error:
        # A package of a component, such as the guardrail of Cosmos, or a file of the pipeline is missing.
        remedy = "" if isinstance(error, ImportError) else "; export it again"
        raise ModelError(f"{model}: the pipeline cannot be loaded: {first_line(error)}{remedy}") from error

    pipeline.set_progress_bar_config(disable=True)
    pipeline_call_settings: dict[str, Any] = {}
    # Set the image size of SANA, because it generates 1024 x 1024 pixels by default, whatever size its model has.
    if "use_resolution_binning" in pipeline_call_parameters:
        image_size = -(-pipeline.transformer.config.sample_size * pipeline.vae_scale_factor // 32) * 32
        pipeline_call_settings = {"height": image_size, "width": image_size, "use_resolution_binning": False}

    def generate_response(prompt: str, prompt_index: int) -> str:
        image_file = f"{Path(image_file_prefix).name}-{prompt_index}.png"
        noise_generator = torch.Generator("cpu").manual_seed(prompt_index)
        pipeline(prompt=prompt, generator=noise_generator, **pipeline_call_settings).images[0].save(image_file)
        return image_file

    return generate_response


def select_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of models on a device: float32 on a CPU, bfloat16 on a GPU, so that two models fit on it."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _is_pipeline(model: str) -> bool:
    model_source, load_options = locate_model(model, None)
    with translate_load_errors(MODEL_INDEX_FILE, model):
        load_options["_raise_exceptions_for_missing_entries"] = False
        return bool(cached_file(str(model_source), MODEL_INDEX_FILE, **load_options))


def _read_prompts(prompt: str) -> Iterator[str]:
    if prompt:
        yield prompt
        return
    if sys.stdin.isatty():
        sys.stderr.write("One prompt each line; end with Ctrl-D.\n")
    for line in sys.stdin:
        if line.strip():
            yield line.strip()


def _respond(name: str, generate_response: ResponseFn, prompt: str, prompt_index: int) -> str:
    """Return the response of the model `name`; raise ModelError for any error of its tokenizer, template or code, such
    as a prompt that is too long, and for an image that cannot be written."""
    problem = f"{name}: no response to prompt {prompt_index + 1}"
    with convert_errors(lambda error: ModelError(f"{problem}: {type(error).__name__}: {first_line(error)}")):
        return generate_response(prompt.encode(errors="replace").decode(), prompt_index)


def main() -> int:
    """Print the responses of all models to each prompt, or one line about an error, and return the exit code."""
    program_options, models = json.loads(sys.argv[1]), sys.argv[2:]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(highlight=False, markup=False, emoji=False)
    logging.disable(logging.WARNING)
    try:
        models_with_settings = zip(models, program_options["names"], program_options["system_prompts"], strict=True)
        response_functions = [
            open_image_generator(model, f"{name}-{model_index}", device)
            if _is_pipeline(model)
            else open_chat(model, program_options["max_tokens"], program_options["temperature"], device, system_prompt)
            for model_index, (model, name, system_prompt) in enumerate(models_with_settings)
        ]
        for prompt_index, prompt in zip(count(), _read_prompts(program_options["prompt"]), strict=False):
            named_response_functions = zip(program_options["names"], response_functions, strict=True)
            model_responses = [_respond(*pair, prompt, prompt_index) for pair in named_response_functions]
            if len(model_responses) == 1:
                console.print(model_responses[0], soft_wrap=True)
            else:
                response_table = Table(*program_options["names"], title=prompt, title_justify="left")
                response_table.add_row(*model_responses)
                console.print(response_table)
    except CosmosError as error:
        sys.stderr.write(f"cosmos: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("cosmos: interrupted\n")
        return EXIT_PREEMPTED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
