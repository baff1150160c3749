"""Binding of the arguments of a reward function by parameter name, never by position.

Accepted are the names of Cosmos-RL (`to_be_evaluated`, `reference`), of TRL (`prompts`, `completions`,
`completion_ids`), of verl (`data_source`, `solution_str`, `ground_truth`, `extra_info`), the keys of
`REWARD_PARAMETERS`, and the columns of the row. A plural name, such as `completions`, means that the function takes
lists and is called once for all completions of a prompt. The module `base.py` calls the functions.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cosmos_core.errors import RewardError

REWARD_PARAMETERS = {
    "prompt": "the rendered prompt, a string",
    "media": "the image (PIL.Image) or video (uint8 array of frames, height, width and 3) that was made; None: text",
    "metadata": "the columns of the prompt's row, a dict; of text with the prompt as the row has it under `prompt`",
    "images": "the images of a text prompt, a list of PIL.Image; passed only to functions that declare it by name",
    "turns": "the turns after the prompt, a list of {'role': 'assistant' or 'tool', 'content': text}",
    "num_tokens": "sampled tokens of the completion, the end token included",
    "completion_ids": "the tokens of the completion, a list of integers",
    "finish_reason": "'stop' or 'length'",
    "max_tokens": "most tokens that a completion may have",
    "overlong": "the recipe's table [train.train_policy.overlong_reward]",
    "judge_config": "the recipe's [judge] table",
    "custom": "the recipe's [custom] table",
}
"""Parameters, with a description, that a reward function can have besides the completion, the reference and the columns
of the data row."""

SIGNATURE_EXAMPLES = (
    "def f(completion, reference, **others), def f(prompts, completions, **columns) as in TRL, or "
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None) as in verl"
)

_COMPLETION_PARAMETERS = ("to_be_evaluated", "completion", "solution_str")
_PER_COMPLETION_PARAMETERS = {
    *_COMPLETION_PARAMETERS, "media", "turns", "num_tokens", "completion_ids", "finish_reason"
}  # fmt: skip
"""Parameters of reward functions that differ between the completions of a prompt. A reward function without any of them
is refused."""
_SINGLE_VALUE_PARAMETERS = ("max_tokens", "overlong", "judge_config", "custom", "metadata")
"""Parameters that stay single values even if the reward function takes lists for the completions of a prompt."""
_SINGULAR_NAME_BY_PLURAL = {
    "completions": "completion", "prompts": "prompt", "references": "reference", "solution_strs": "solution_str",
    "ground_truths": "ground_truth", "data_sources": "data_source", "extra_infos": "extra_info",
}  # fmt: skip
_PROMPT_AND_COMPLETION_PARAMETERS = ("completions", "prompts", "solution_strs")
"""Names of parameters of reward functions that receive lists and never mean a column of the data row."""
_LIST_PARAMETERS = {*_SINGULAR_NAME_BY_PLURAL, "completion_ids"}
_UNAVAILABLE_PARAMETERS = {
    **dict.fromkeys(
        ("tokenizer", "config", "data_packer", "trainer_state"), "rewards run in child processes without torch"
    ),
    **dict.fromkeys(("log_extra", "log_metric"), "return (number, {'name': number}) to report metrics"),
    "environments": "completions of several turns are `turns`",
}
_NO_DEFAULT = inspect.Parameter.empty

RequestFields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParameterBinding:
    """Parameters of a reward function and the rules that bind arguments to them."""

    parameters: tuple[inspect.Parameter, ...]
    passes_text_completions: bool = False
    """Whether `completions` are passed as texts even if the prompt is a list of messages, as in ms-swift."""

    @property
    def takes_whole_group(self) -> bool:
        """Return True if a parameter name implies that the function takes all completions of a prompt at once."""
        parameter_names = {each.name for each in self.parameters if each.kind is not each.VAR_KEYWORD}
        return bool(parameter_names & _LIST_PARAMETERS) and not parameter_names & {*_COMPLETION_PARAMETERS}

    @property
    def takes_images(self) -> bool:
        """Return True if the reward function has a parameter `images`; `**others` does not receive the images of a
        prompt."""
        return any(parameter.name == "images" for parameter in self.parameters)

    @property
    def declared_parameters(self) -> tuple[str, ...]:
        """Return the keys of `REWARD_PARAMETERS` that the reward function declares or receives as `**others`."""
        parameter_names = {parameter.name for parameter in self.parameters}
        return tuple(name for name in REWARD_PARAMETERS if self.takes_any_keyword or name in parameter_names)

    @property
    def takes_any_keyword(self) -> bool:
        """Return True if the function has a parameter such as `**others`."""
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters)

    def bind_arguments(
        self, requests: Sequence[RequestFields], *, takes_lists: bool
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of one call of the reward function: values of the only request
        or, with `takes_lists`, lists of values of all requests. Raise `TypeError` for an unknown parameter name."""
        get_argument = partial(_get_argument, request_fields=requests[0])
        if takes_lists:
            get_argument = partial(
                _get_list_argument, group_requests=requests, passes_text_completions=self.passes_text_completions
            )
        positional_arguments, keyword_arguments = [], {}
        for parameter in self.parameters:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            try:
                argument = get_argument(parameter.name)
            except KeyError:
                if parameter.default is _NO_DEFAULT:
                    column_names = ", ".join(_get_row_columns(requests[0])) or "none"
                    raise TypeError(
                        f"nothing is called {parameter.name!r} (columns of the row: {column_names}); arguments are "
                        f"bound by name, so write {SIGNATURE_EXAMPLES}"
                    ) from None
                argument = parameter.default
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional_arguments.append(argument)
            else:
                keyword_arguments[parameter.name] = argument
        if self.takes_any_keyword:
            text_parameters = ("prompts", "completions") if self.takes_whole_group else ("to_be_evaluated", "reference")
            declared_parameter_names = {parameter.name for parameter in self.parameters}
            parameter_names = [name for name in REWARD_PARAMETERS if name != "images"]
            variadic_names = [*text_parameters, *parameter_names, *_get_row_columns(requests[0])]
            keyword_arguments |= {
                name: get_argument(name) for name in variadic_names if name not in declared_parameter_names
            }
        return positional_arguments, keyword_arguments


def bind_parameters(
    name: str, reward_function: Callable[..., Any], *, passes_text_completions: bool = False
) -> ParameterBinding:
    """Return the parameters of a reward function with the rules for their arguments; `name` is the function's name in
    the recipe. Raise `RewardError` if the signature is not readable, takes no completion, or has an unsupported
    parameter."""
    try:
        binding = ParameterBinding(
            tuple(inspect.signature(reward_function).parameters.values()), passes_text_completions
        )
    except (TypeError, ValueError):
        raise RewardError(f"{name!r} has no signature to bind by name; write {SIGNATURE_EXAMPLES}") from None
    bindable_parameters = [each for each in binding.parameters if each.kind is not each.VAR_POSITIONAL]
    required_parameters = [each for each in binding.parameters if each.default is _NO_DEFAULT]
    for each in required_parameters:
        if each.name in _UNAVAILABLE_PARAMETERS and each.kind is not each.VAR_KEYWORD:
            unavailable_reason = _UNAVAILABLE_PARAMETERS[each.name]
            raise RewardError(f"{name!r} wants {each.name!r}, which is not offered: {unavailable_reason}")
    singular_names = {_SINGULAR_NAME_BY_PLURAL.get(each.name, each.name) for each in bindable_parameters}
    optional_names = [
        each.name for each in bindable_parameters if each.kind is each.VAR_KEYWORD or each.default is not _NO_DEFAULT
    ]
    # Refuse `**others` if a required parameter has an unknown name, such as `answer`, that may mean the completion.
    has_only_known_names = singular_names <= {*REWARD_PARAMETERS, *_SINGULAR_NAME_BY_PLURAL.values(), *optional_names}
    if not singular_names & _PER_COMPLETION_PARAMETERS and not (binding.takes_any_keyword and has_only_known_names):
        parameter_names = ", ".join(parameter.name for parameter in binding.parameters) or "nothing"
        raise RewardError(f"{name!r} takes {parameter_names}: no parameter is the completion; arguments are bound by "
                          f"name, so write {SIGNATURE_EXAMPLES}")  # fmt: skip
    return binding


def _get_argument(parameter_name: str, request_fields: RequestFields) -> Any:
    """Return the argument for a known parameter name of a reward function, or else the row's column of that name. Raise
    `KeyError` if there is no such column."""
    row_columns = _get_row_columns(request_fields)
    if parameter_name in _COMPLETION_PARAMETERS:
        return request_fields["to_be_evaluated"]
    if parameter_name == "reference":
        return request_fields["reference"] or row_columns.get(parameter_name, "")
    if parameter_name == "images":
        from cosmos_core.data.images import open_image

        image_references = request_fields.get("images", ())
        return row_columns["images"] if "images" in row_columns else [open_image(each) for each in image_references]
    if parameter_name in REWARD_PARAMETERS:
        return request_fields.get(parameter_name)
    if parameter_name in row_columns:
        return row_columns[parameter_name]
    if parameter_name == "ground_truth":  # verl's rows have the ground truth in the dict `reward_model`
        verl_reward_model = row_columns.get("reward_model")
        verl_fields = verl_reward_model if isinstance(verl_reward_model, dict) else {}
        return verl_fields.get("ground_truth", request_fields["reference"])
    return {"extra_info": {}, "data_source": ""}[parameter_name]


def _get_list_argument(name: str, group_requests: Sequence[RequestFields], passes_text_completions: bool) -> Any:
    """Return the argument that a reward function receives as `name` when one call scores all completions of a prompt:
    usually a list with one value per completion. With `passes_text_completions`, completions are strings even if the
    prompt is a list of messages."""
    row_columns = _get_row_columns(group_requests[0])
    if name in _SINGLE_VALUE_PARAMETERS:
        return _get_argument(name, group_requests[0])
    if name in _PROMPT_AND_COMPLETION_PARAMETERS or (name in _SINGULAR_NAME_BY_PLURAL and name not in row_columns):
        if name == "completions":  # as in TRL, completions are lists of messages if the prompt is a list
            has_messages = isinstance(row_columns.get("prompt"), list) and not passes_text_completions
            return [fields["turns" if has_messages else "to_be_evaluated"] for fields in group_requests]
        if name == "prompts":
            return [row_columns.get("prompt", fields.get("prompt")) for fields in group_requests]
        name = _SINGULAR_NAME_BY_PLURAL[name]
    if name == "images":
        return [_get_argument(name, group_requests[0])] * len(group_requests)
    return [_get_argument(name, fields) for fields in group_requests]


def _get_row_columns(request_fields: RequestFields) -> Mapping[str, Any]:
    return request_fields.get("metadata") or {}
