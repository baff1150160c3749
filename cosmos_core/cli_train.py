"""`cosmos sft`, `dpo`, `grpo`, `diffusion-sft` and `eval`: write a recipe for a user's model and rows, and run it.

`cosmos init` asks for the options of such a command, and `cosmos try` loads the trained model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from cosmos_core.cli_config import print_notices
from cosmos_core.cli_runs import OutputDirOption
from cosmos_core.config.schema.methods import DIFFUSION_SFT, DPO, GRPO, SFT, TRAINING_METHODS
from cosmos_core.errors import EXIT_USAGE, ConfigError, CosmosError
from cosmos_core.imports import make_python_command

_MODEL_HELP = "Model to start from: a folder, Hub id, s3:// URL, run or run/stages/STAGE."
ModelOption = Annotated[str, typer.Option(help=_MODEL_HELP)]
DataOption = Annotated[str, typer.Option(help="Training rows: .jsonl, .csv, .parquet, a folder, Hub id or s3:// URL.")]
PromptOption = Annotated[str, typer.Option(help="Column of the prompt, if its name is not a known one.")]
ResponseOption = Annotated[str, typer.Option(help="Column of the response or reference, likewise.")]
SaveOption = Annotated[str, typer.Option(help="Recipe file to write; empty: named after the data, in this folder.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the recipe without writing it.")]
SetOption = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the recipe.")]

_RECIPE_HEADER = "# Written by cosmos, digest "
_DATASET_KEY = "train.train_policy.dataset"
_ROW_SELECTION_KEYS = ("subset", "split", "revision")
_Setting = tuple[str, Any, str]
"""Key of a setting, its value, and the reason for the value."""


def sft(  # noqa: PLR0913 - the options of a command
    model: ModelOption, data: DataOption, prompt: PromptOption = "", response: ResponseOption = "",
    save: SaveOption = "", dry_run: DryRunOption = False, overrides: SetOption = [],  # noqa: B006 - read by typer
) -> None:  # fmt: skip
    """Fine-tune a language model on your own rows. The settings are proposed and explained in a new recipe."""
    cli_args = {"method": SFT.command, "model": model, "data": data, "prompt": prompt, "response": response}
    _propose_and_run(cli_args, save, dry_run, overrides)


def dpo(  # noqa: PLR0913 - the options of a command
    model: ModelOption, data: DataOption, prompt: PromptOption = "",
    chosen: Annotated[str, typer.Option(help="Column of the better completion, likewise.")] = "",
    rejected: Annotated[str, typer.Option(help="Column of the other completion, likewise.")] = "",
    save: SaveOption = "", dry_run: DryRunOption = False, overrides: SetOption = [],  # noqa: B006
) -> None:  # fmt: skip
    """Train a language model on preference pairs (DPO). Rows have `prompt`, `chosen` and `rejected`."""
    column_options = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    _propose_and_run({"method": DPO.command, "model": model, "data": data, **column_options}, save, dry_run, overrides)


def grpo(  # noqa: PLR0913 - the options of a command
    model: ModelOption, data: DataOption,
    reward: Annotated[list[str], typer.Option(help="Name of a reward, or file.py:function; several with commas.")],
    prompt: PromptOption = "", response: ResponseOption = "", save: SaveOption = "", dry_run: DryRunOption = False,
    overrides: SetOption = [],  # noqa: B006
) -> None:  # fmt: skip
    """Train a language model on prompts with a reward (GRPO)."""
    cli_args = {"method": GRPO.command, "model": model, "data": data, "reward": _check_rewards(reward)}
    _propose_and_run({**cli_args, "prompt": prompt, "response": response}, save, dry_run, overrides)


def _check_rewards(rewards: Sequence[str]) -> str:
    """Return the names of rewards in the values of the option `--reward`, separated by commas; raise ConfigError if a
    name is neither a built-in reward nor an import path of an existing function."""
    from cosmos_core.registry import is_user_code, list_defined_names, locate_code, suggest_names

    builtin_reward_names = list_defined_names("cosmos_core.rewards")
    for name in (reward_names := _parse_name_list(",".join(rewards)) or [""]):
        if is_user_code(name):
            locate_code(name)
        elif name.endswith(".py"):
            raise ConfigError(f"--reward {name}: name a function of the file as well, {name}:FUNCTION")
        elif name not in builtin_reward_names:
            suggestion_text = suggest_names(name, builtin_reward_names)
            raise ConfigError(f"--reward {name}: no such reward{suggestion_text}; your own is file.py:function")
    return ",".join(reward_names)


def diffusion_sft(
    model: ModelOption, data: DataOption, save: SaveOption = "", dry_run: DryRunOption = False,
    overrides: SetOption = [],  # noqa: B006
) -> None:  # fmt: skip
    """Fine-tune a diffusion model on captioned images or videos."""
    _propose_and_run({"method": DIFFUSION_SFT.command, "model": model, "data": data}, save, dry_run, overrides)


def evaluate(  # noqa: PLR0913 - the options of a command
    model: Annotated[str, typer.Option(help="A model, run, or run/stages/STAGE.")],
    tasks: Annotated[str, typer.Option(help="Tasks of lm-eval, separated by commas.")] = "",
    prompts: Annotated[str, typer.Option(help="Diffusion model: files of prompts, separated by commas.")] = "",
    reward: Annotated[str, typer.Option(help="Diffusion model: rewards, names or file.py:function, with commas.")] = "",
    size: Annotated[int, typer.Option(min=0, help="Diffusion model: pixels on each side; 0: as in the recipe.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of items per task or prompt set; 0: all.")] = 0,
    include_path: Annotated[str, typer.Option(help="Folder with YAML files of your own tasks.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Render prompts with the model's chat template.")] = False,
    save: SaveOption = "", dry_run: DryRunOption = False, overrides: SetOption = [],  # noqa: B006
    output_dir: OutputDirOption = Path("outputs")
) -> None:  # fmt: skip
    """Evaluate a model, or the model of a run or a stage. A language model is evaluated on public benchmarks, a
    diffusion model by the rewards of its samples for sets of prompts."""
    if bool(tasks) == bool(prompts) or bool(prompts) != bool(reward):
        raise ConfigError("give --tasks for a language model, or --prompts and --reward for a diffusion model")
    cli_args = {"method": "eval", "model": model, "tasks": tasks, "prompts": prompts, "reward": reward}
    model_setting = ("policy.model_name_or_path", _resolve_model(model, output_dir), "--model")
    settings: list[_Setting] = [
        ("evaluate.tasks", _parse_name_list(tasks), "--tasks"),
        ("policy.is_diffusers", bool(prompts), "--prompts"),
        ("evaluate.prompts", _parse_name_list(prompts), "--prompts"),
        ("evaluate.rewards", _parse_name_list(reward), "--reward"),
        ("policy.diffusers.inference_size", [size, size] if size else [], "--size"),
        ("evaluate.limit", limit, "--limit"),
        ("evaluate.include_path", include_path, "--include-path"),
        ("evaluate.apply_chat_template", chat, "--chat"),
    ]
    _save_and_run_recipe(cli_args, [model_setting, *(each for each in settings if each[1])], save, dry_run, overrides)


def _parse_name_list(comma_separated_names: str) -> list[str]:
    return [name.strip() for name in comma_separated_names.split(",") if name.strip()]


def init() -> None:
    """Ask five questions and write a recipe. The command that runs it is printed."""
    if not sys.stdin.isatty():
        raise ConfigError("cosmos init asks questions in a terminal; elsewhere use cosmos sft --model M --data ROWS")
    training_method = typer.prompt(f"What shall be done? {', '.join(TRAINING_METHODS)}", default=SFT.command)
    if training_method not in TRAINING_METHODS:
        raise ConfigError(f"{training_method!r} is none of {', '.join(TRAINING_METHODS)}")
    model = typer.prompt("Which model? A folder, a Hub id or a run", default="Qwen/Qwen3-0.6B")
    data = typer.prompt("Which rows? A file, a folder or a Hub id")
    cli_args = {"method": training_method, "model": _resolve_model(model, Path("outputs")), "data": data}
    if TRAINING_METHODS[training_method].needs_reward:
        reward = typer.prompt("Which reward? A name, or file.py:function", default="boxed_math")
        cli_args["reward"] = _check_rewards([os.path.expanduser(reward)])
    settings = _propose_settings(cli_args)
    default_recipe_path = str(_make_recipe_path(cli_args, ""))
    path = _write_recipe(cli_args, settings, typer.prompt("Where to write the recipe?", default=default_recipe_path))
    if typer.confirm(f"saved as {path}. Run it now?"):
        _replace_process_with_run(path, [])
    typer.echo(f"run it with: {shlex.join(['cosmos', 'run', str(path)])}")


def try_model(
    models: Annotated[
        list[str], typer.Argument(help="A model, run or run/stages/STAGE; two are compared side by side.")
    ],
    prompt: Annotated[str, typer.Option(help="Single prompt; empty: read one per line from standard input.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a completion.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature; 0: greedy decoding.")] = 0.0,
    output_dir: OutputDirOption = Path("outputs"),
) -> None:
    """Chat with a model, or generate images with it. It is that of a run or a stage, a folder, or a Hub id."""
    if len(models) > 2:
        raise ConfigError(f"{len(models)} models; give one, or two to see them side by side")
    from cosmos_core.observe.logs import add_log_silencing_variables
    from cosmos_core.run.remote import download_url

    model_folders = [download_url(_resolve_model(name, output_dir), output_dir) for name in models]
    cli_args: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "names": models}
    cli_args["system_prompts"] = [_find_system_prompt(folder) for folder in model_folders]
    sys.stdout.flush()
    os.environ |= add_log_silencing_variables(os.environ)
    io_encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    # With `replace`, a character that the encoding lacks is printed as "?" instead of raising an error.
    os.environ["PYTHONIOENCODING"] = f"{io_encoding}:replace"
    command = [*make_python_command(), "-m", "cosmos_core.models.try_models"]
    os.execv(sys.executable, [*command, json.dumps(cli_args), *model_folders])


def _resolve_model(model_name: str, output_dir: Path) -> str:
    """Return the model folder of a run or of a stage; return any other name with `~` expanded."""
    from cosmos_core.observe.record import read_run
    from cosmos_core.run.directory import find_run
    from cosmos_core.run.manifest import read_result

    model_name = os.path.expanduser(model_name)
    candidate_paths = (Path(model_name), output_dir / model_name)
    if stage_path := next((each for each in candidate_paths if (each / "result.json").is_file()), None):
        stage_result = read_result(stage_path)
        model_path = str(stage_result["info"].get("model") or "") if stage_result else ""
        if not model_path:
            raise ConfigError(f"{model_name}: this stage made no model")
        return model_path if "://" in model_path else str(stage_path / model_path)
    is_run_folder = any((each / "pipeline.toml").is_file() for each in candidate_paths)
    # A name that is no run folder may be that of a run only if it has the form of an id, which is digits only, or if it
    # is a path inside the folder of runs.
    is_run_name = model_name.isdecimal() or (output_dir in Path(model_name).parents and not os.path.exists(model_name))
    if not is_run_folder and (not is_run_name or os.path.isdir(model_name)):
        return model_name
    run = read_run(find_run(model_name, output_dir))
    if run.model is None:
        raise ConfigError(f"run {run.path.name} has made no model yet; cosmos status {run.path.name} says where it is")
    if run.outcome != "done":  # warn, because the model of an unfinished run may be an earlier one or the base model
        print_notices([f"run {run.path.name} is {run.outcome}; its last model so far is {run.model}"])
    return str(run.model)


def _find_system_prompt(model_folder: str) -> str:
    """Return the system prompt of the training that made the model in `model_folder`, a folder inside a run; empty if
    the folder is outside of any run, or if the training had no system prompt."""
    from cosmos_core.config.inputs import referenced_stage
    from cosmos_core.run.directory import open_run
    from tasks.kinds import all_kinds

    for parent_folder in Path(model_folder).absolute().parents:
        if parent_folder.parent.name == "stages" and (parent_folder / "result.json").is_file():
            with suppress(ConfigError):  # ignore a run of an older version, which may be unreadable
                pipeline = open_run(parent_folder.parents[1], all_kinds()).pipeline
                stage = pipeline.stage(parent_folder.name)
                while not pipeline.stage_kind(stage).trains_model and (stage_name := referenced_stage(stage.model)):
                    stage = pipeline.stage(stage_name)
                return str(getattr(pipeline.recipes[stage.name].train.train_policy, "system_prompt", ""))
    return ""


def _propose_and_run(cli_args: dict[str, str], output_file: str, dry_run: bool, overrides: Sequence[str]) -> None:
    cli_args = {**cli_args, "model": _resolve_model(cli_args["model"], Path("outputs"))}
    _save_and_run_recipe(cli_args, _propose_settings(cli_args, overrides), output_file, dry_run, overrides)


def _save_and_run_recipe(
    cli_args: dict[str, str], settings: list[_Setting], output_file: str, dry_run: bool, overrides: Sequence[str]
) -> None:
    set_options = [argument for override in overrides for argument in ("--set", override)]
    if overrides:
        _check_overrides(_render_recipe(cli_args, settings), overrides)
    if dry_run:
        run_command_comment = f"\n# run with {shlex.join(set_options)}\n" if set_options else ""
        typer.echo(_render_recipe(cli_args, settings) + run_command_comment, nl=False)
        return
    recipe_path = _write_recipe(cli_args, settings, output_file)
    run_command = shlex.join(["cosmos", "run", str(recipe_path), *set_options])
    typer.echo(f"saved as {recipe_path}; each value has its reason there. Edit it and run it again: {run_command}")
    _replace_process_with_run(recipe_path, set_options)


def _check_overrides(recipe_text: str, overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for an override that is invalid for the recipe, before the recipe is saved."""
    from cosmos_core.config.compose import load_pipeline
    from tasks.kinds import all_kinds

    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as recipe_file:
        recipe_file.write(recipe_text)
        recipe_file.flush()
        try:
            load_pipeline(Path(recipe_file.name), overrides, all_kinds())
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(f"{recipe_file.name}: ")) from error


def _propose_settings(cli_args: dict[str, str], overrides: Sequence[str] = ()) -> list[_Setting]:
    """Return the settings that are proposed for the user's model and rows. A subprocess reads the model and the rows,
    because only the subprocess can import torch. The overrides can select the subset, split and revision of the
    rows, the class of a diffusion model, and the rank of an adapter."""
    from cosmos_core.config.compat.translate import find_parent_table
    from cosmos_core.config.override import parse_override, recipe_overrides
    from cosmos_core.config.schema.dataset import data_suffix
    from cosmos_core.run.remote import download_url

    nested_overrides = recipe_overrides([*map(parse_override, overrides)])
    dataset_table, _ = find_parent_table(nested_overrides, f"{_DATASET_KEY}.name")
    row_selection = {key: value for key, value in dataset_table.items() if key in _ROW_SELECTION_KEYS}
    custom_settings, _ = find_parent_table(nested_overrides, "custom.KEY")
    policy_table, _ = find_parent_table(nested_overrides, "policy.model_class")
    # Expand `~`, because no shell does so in the input of `cosmos init` or in `--model=~/model`.
    input_paths = {name: os.path.expanduser(cli_args.get(name, "")) for name in ("model", "data")}
    if not (data := input_paths["data"]).startswith("s3://") and data_suffix(data) and not os.path.exists(data):
        raise ConfigError(f"--data {data!r}: it does not exist in {os.getcwd()!r}; give a file, a folder or a Hub id")
    local_input_paths = {name: download_url(path, Path("outputs")) for name, path in input_paths.items()}
    options: dict[str, Any] = dict(cli_args, **local_input_paths, rows=row_selection, custom=custom_settings)
    options["model_class"] = policy_table.get("model_class")
    if isinstance(lora_table := policy_table.get("lora"), dict):
        options["lora_rank"] = rank if isinstance(rank := lora_table.get("r"), int) else 16
    arguments = json.dumps(options, default=str)
    propose_command = [*make_python_command(), "-m", "cosmos_core.train.propose", arguments]
    completed_process = subprocess.run(propose_command, capture_output=True, text=True, check=False)
    if completed_process.returncode == EXIT_USAGE:
        key, error_message = f"{_DATASET_KEY}.name", completed_process.stderr.strip().splitlines()[-1]
        error_message = error_message.replace(f"{key} = ", "--data ").replace(key, "--data")
        raise ConfigError(error_message.replace(" or beside the file that is run", ""))
    if completed_process.returncode:
        [*_, error_line] = ["", *completed_process.stderr.strip().splitlines()]
        raise CosmosError(f"the look at model and rows ended with {completed_process.returncode}: {error_line[-2000:]}")
    input_by_local_path = {path: cli_args[name] for name, path in local_input_paths.items() if path}
    settings_and_reasons = json.loads(completed_process.stdout)
    return [(key, input_by_local_path.get(str(value), value), reason) for key, value, reason in settings_and_reasons]


def _render_recipe(cli_args: dict[str, str], settings: list[_Setting]) -> str:
    table_lines: dict[str, list[str]] = {}
    for key, value, reason in settings:
        table_key, _, name = key.rpartition(".")
        table_lines.setdefault(table_key, []).append(f"{name} = {json.dumps(value, ensure_ascii=False)}  # {reason}")
    command_line_options = [(f"--{name}", value) for name, value in cli_args.items() if value and name != "method"]
    # The options are written into a comment of the recipe, which must be a single line.
    options_text = " ".join(shlex.join([word for option in command_line_options for word in option]).split())
    recipe_text = f"# cosmos {cli_args['method']} {options_text}\n"
    if cli_args["method"] == "eval":  # add a stage, because `cosmos run` trains the model if there is none
        recipe_text += '\n[[pipeline.stages]]\nname = "evaluate"\nkind = "evaluate"\n'
    for table_key, lines_of_table in sorted(table_lines.items()):
        recipe_text += f"\n[{table_key}]\n" + "\n".join(lines_of_table) + "\n"
    try:
        return f"{_RECIPE_HEADER}{hashlib.sha256(recipe_text.encode()).hexdigest()[:16]}\n{recipe_text}"
    except UnicodeEncodeError as error:
        word = recipe_text[: error.end].split()[-1]
        raise ConfigError(f"{word!a}: it is not UTF-8, which a recipe has to be; rename the file or folder") from error


def _make_recipe_path(cli_args: dict[str, str], output_file: str) -> Path:
    file_name = Path(cli_args.get("data") or cli_args["model"]).name
    file_stem = file_name.split(".")[0].lstrip("-") or "rows"  # `cosmos run` would read a leading hyphen as an option
    return Path(os.path.expanduser(output_file) or f"{file_stem}-{cli_args['method']}.toml")


def _write_recipe(cli_args: dict[str, str], settings: list[_Setting], output_file: str) -> Path:
    """Write the recipe and return its path. An existing file is overwritten only if an earlier command wrote it, no
    user has edited it and no running command uses it; otherwise raise `ConfigError`."""
    path, recipe_text = _make_recipe_path(cli_args, output_file), _render_recipe(cli_args, settings)
    try:
        with path.open("a+", encoding="utf-8") as recipe_file:
            is_run_lock_free = True
            try:
                fcntl.flock(recipe_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # only a BlockingIOError shows that another command holds the lock
                is_run_lock_free = not isinstance(error, BlockingIOError)
            existing_recipe_text = path.read_text(encoding="utf-8", errors="replace")
            if existing_recipe_text == recipe_text:
                return path
            if not is_run_lock_free:
                raise ConfigError(f"{path} is the recipe of a command that still runs; write another with --save FILE")
            header_line, _, recipe_body = existing_recipe_text.partition("\n")
            recipe_digest = hashlib.sha256(recipe_body.encode()).hexdigest()[:16]
            if existing_recipe_text and header_line != f"{_RECIPE_HEADER}{recipe_digest}":
                remedy_text = f"run it with cosmos run {shlex.quote(str(path))}, or write another with --save FILE"
                raise ConfigError(f"{path} is there and was edited; {remedy_text}")
            path.write_text(recipe_text, encoding="utf-8")
    except OSError as error:
        remedy_text = "name a file in a folder that exists with --save"
        raise ConfigError(f"{path}: the recipe cannot be written: {error.strerror}; {remedy_text}") from error
    return path


def _replace_process_with_run(recipe_path: Path, set_options: Sequence[str]) -> None:
    sys.stdout.flush()
    recipe_descriptor = os.open(recipe_path, os.O_RDONLY)
    os.set_inheritable(recipe_descriptor, True)  # the run keeps the lock: no command may replace the recipe meanwhile
    with suppress(OSError):
        fcntl.flock(recipe_descriptor, fcntl.LOCK_SH)
    os.execv(sys.executable, [*make_python_command(), "-m", "cosmos_core", "run", str(recipe_path), *set_options])
