"""Scoring of completions in worker processes that can be killed, so that no reward can hang or crash a run.

A reward that raises, returns no finite number, ends its process or misses the deadline makes its completion *invalid*
(`Score.value is None`, with the reason), never 0, and does not affect other completions. pebble manages processes and
deadlines. Each reward has its own module; `algorithms/grpo.py` handles invalid scores in a group.

The processes are spawned, so they share no memory, locks or GPUs with the trainer, and do not import torch. Each has
its own process group in the session of its parent, so that a kill includes the child processes of a reward.
"""

import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache, partial
from traceback import print_exception
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from cosmos_core.config.source_weights import reward_weights_of_source
from cosmos_core.environment import find_secrets, mask_secrets, mask_text
from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.machine_properties import count_usable_cores
from cosmos_core.registry import is_import_path
from cosmos_core.rewards.base import Reward, error_on_one_line, load_reward, make_reward_request, metric_names
from cosmos_core.rewards.process import WORKER_START_TIMEOUT, WorkerPool, describe_exit, init_worker, wait_for_futures
from cosmos_core.rewards.reward_model import is_model_reward, open_model
from cosmos_core.transient import is_transient
from cosmos_core.types import Group, Score, ScoredGroup

ScoreGroupsFn = Callable[[Sequence[Group]], list[ScoredGroup]]
"""Function that scores every completion of each group."""

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_SECONDS = 900.0  # maximum number of seconds to load the rewards, which may first download their models
_MAX_BROKEN_POOLS = 3  # maximum number of broken pools per call of `score`; an idle process that dies breaks its pool
_MAX_TIMEOUTS_PER_WORKER = 4
"""If the first calls of a reward function, as many as this number per worker process, have all timed out, its other
calls are cancelled."""


class _RewardResult(NamedTuple):
    """Result of one reward function for one completion. If it has neither `raw_score` nor `error`, the function does
    not apply to the data row of the completion."""

    raw_score: float | None = None
    metrics: Mapping[str, float] = {}
    error: str = ""
    is_permanent_error: bool = False
    """Whether the reward function raised an error that a retry cannot fix, unlike errors of networks and memory."""


class _RewardCall(NamedTuple):
    """Arguments of one call of a reward function in a worker process."""

    reward: str
    requests: Sequence[Mapping[str, Any]]
    """Request of one completion, or of all completions of a prompt if the function takes lists."""
    takes_lists: bool


class RewardRunner(WorkerPool):
    """Runner that scores completions by a weighted sum of rewards in worker processes.

    `timeout_seconds` is the deadline of each call of a reward function, unless `timeout_by_reward` has another; a
    call that ends its process is retried up to `retries` times. `request_constants` are the values of
    `base.REWARD_PARAMETERS` that are the same for each completion; `on_wait` is called while the runner waits. If the
    first calls of a reward all time out, its other calls are cancelled. The processes see standard environment
    variables and `env_variable_names`. With `scores_whole_groups`, user functions are called once for all completions
    of a prompt, with one deadline; if the call fails, these completions are all invalid. Only one thread scores at a
    time. Entering the runner, and a call that replaces all processes, raise `RewardError` if a reward cannot be loaded.
    """

    def __init__(  # noqa: PLR0913 - all are settings, most with a default
        self,
        weights: Mapping[str, float],
        *,
        timeout_seconds: float,
        timeout_by_reward: Mapping[str, float] | None = None,
        num_workers: int | None = None,
        retries: int = 1,
        request_constants: Mapping[str, Any] | None = None,
        env_variable_names: Sequence[str] = (),
        on_wait: Callable[[], None] = lambda: None,
        scores_whole_groups: bool = False,
    ) -> None:
        """Set up the runner; `num_workers` None starts one worker process per core, or one in all if a reward has a
        model."""
        self._reward_weights = weights
        self._group_reward_names = {name for name in weights if scores_whole_groups and is_import_path(name)}
        self._image_reward_names: set[str] = set()
        self._metric_names = metric_names(weights)
        self._default_timeout_seconds, self._retries, self._has_loaded_rewards = timeout_seconds, retries, False
        self._timeout_by_reward = timeout_by_reward or {}
        self._num_workers = num_workers or (1 if any(map(is_model_reward, weights)) else count_usable_cores())
        self._max_timeouts = _MAX_TIMEOUTS_PER_WORKER * self._num_workers
        self._request_constants = {"custom": {}, **(request_constants or {})}
        self._env_variable_names, self._on_wait, self._scoring_lock = (
            tuple(env_variable_names),
            on_wait,
            threading.Lock(),
        )

    def score_groups(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return the groups, in order, each with one score per completion."""
        requests = [[make_reward_request(group, k) for k in range(len(group.completions))] for group in groups]
        data_sources = [group.prompt.source for group in groups]
        return [ScoredGroup(*each) for each in zip(groups, self._score_requests(requests, data_sources), strict=True)]

    def score(self, requests: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Return one score per request, in order. A request has `to_be_evaluated`, `reference` and optionally some of
        `base.REWARD_PARAMETERS`; requests are scored independently, as if each had its own prompt."""
        return [score for (score,) in self._score_requests([[request] for request in requests])]

    def _score_requests(
        self, request_groups: Sequence[Sequence[Mapping[str, Any]]], data_sources: Sequence[str] = ()
    ) -> list[tuple[Score, ...]]:
        """Return one tuple of scores per prompt. `request_groups` has, for each prompt, one request per completion;
        `data_sources`, the names of the prompts' data sets, select the reward weights of each prompt."""
        reward_calls = []
        get_reward_weights = partial(reward_weights_of_source, self._reward_weights)
        reward_weights_by_group = list(map(get_reward_weights, data_sources or [""] * len(request_groups)))
        for group, weights in zip(request_groups, reward_weights_by_group, strict=True):
            for name in weights:
                requests = group if name in self._image_reward_names else [{**each, "images": ()} for each in group]
                takes_lists = name in self._group_reward_names
                request_batches = [requests] if takes_lists else [[request] for request in requests]
                reward_calls += [_RewardCall(name, batch, takes_lists) for batch in request_batches if batch]
        with cleanup_on_error(self.close), self._scoring_lock:  # after an error, kill processes that still run calls
            reward_results = itertools.chain.from_iterable(self._run_reward_calls(reward_calls))
        scores = []
        for group, weights in zip(request_groups, reward_weights_by_group, strict=True):
            results_by_reward = [[next(reward_results) for _ in group] for _ in weights]
            scores.append(tuple(self._combine_results(each, weights) for each in zip(*results_by_reward, strict=True)))
        return scores

    def _start_pool(self) -> ProcessPool:
        """Start the worker processes and wait until one of them has loaded the rewards. Raise `RewardError` if a reward
        cannot be loaded, or the process exits. Raise `StageFailed` if loading times out, if a signal kills the process,
        or if the process exits although an earlier pool of this runner has loaded the rewards."""
        reward_names = list(self._reward_weights)
        failure_prefix = f"loading the rewards {', '.join(reward_names)} failed"
        process_pool = self._replace_pool(_start_worker, reward_names, self._request_constants)
        try:
            with cleanup_on_error(self.close):
                load_future = process_pool.schedule(_load_rewards, args=(reward_names,))
                if not wait_for_futures([load_future], _LOAD_TIMEOUT_SECONDS, self._on_wait):
                    raise StageFailed(f"{failure_prefix}: not done in {_LOAD_TIMEOUT_SECONDS:g} s")
                group_reward_names, self._image_reward_names = load_future.result()
                self._group_reward_names |= group_reward_names
        except (BrokenProcessPool, ProcessExpired) as error:
            is_transient_exit = self._has_loaded_rewards or getattr(error, "exitcode", 0) < 0
            error_class = StageFailed if is_transient_exit else RewardError
            raise error_class(f"{failure_prefix}: a process ended while it loaded") from error
        self._has_loaded_rewards = True
        return process_pool

    def _run_reward_calls(self, reward_calls: Sequence[_RewardCall]) -> list[list[_RewardResult]]:
        """Return the results of each call of a reward function. Calls that ended their worker process are retried when
        all other calls are done, unless the remaining calls of that reward function were cancelled."""
        results_by_call: list[list[_RewardResult]] = [[]] * len(reward_calls)
        pending_call_indices = list(range(len(reward_calls)))
        attempt, num_broken_pools = 1, 0
        while pending_call_indices and attempt <= self._retries + 1 and num_broken_pools <= _MAX_BROKEN_POOLS:
            process_pool = self._get_working_pool()
            call_futures = {
                i: process_pool.schedule(
                    _score_completions, args=reward_calls[i], timeout=self._get_timeout_seconds(reward_calls[i].reward)
                )
                for i in pending_call_indices
            }
            cancelled_rewards: set[str] = set()
            rewards_and_futures = [(reward_calls[i].reward, future) for i, future in call_futures.items()]
            cancel_hanging_rewards = partial(self._cancel_hanging_rewards, rewards_and_futures, cancelled_rewards)
            max_call_seconds = max(self._get_timeout_seconds(reward_calls[i].reward) for i in pending_call_indices)
            max_wait_seconds = max_call_seconds + WORKER_START_TIMEOUT
            if not wait_for_futures(call_futures.values(), max_wait_seconds, cancel_hanging_rewards):
                self.close()  # the pool is unusable: a call was lost with its process, or no process started
            pending_call_indices, is_pool_broken = [], False
            for i, future in call_futures.items():
                reward = reward_calls[i].reward
                try:
                    results_by_call[i] = future.result(timeout=0)
                except (BrokenProcessPool, ProcessExpired, TimeoutError, CancelledError) as error:
                    is_pool_broken |= isinstance(error, BrokenProcessPool)
                    error_text = self._describe_failure(error, reward)
                    results_by_call[i] = [_RewardResult(error=error_text)] * len(reward_calls[i].requests)
                    if reward not in cancelled_rewards:
                        pending_call_indices.append(i)
                        logger.warning(
                            "reward %s: %s (attempt %d of %d)", reward, error_text, attempt, self._retries + 1
                        )
            for reward in cancelled_rewards:
                logger.warning("reward %s: its first %d calls were not done in %g s; the rest is given up",
                               reward, self._max_timeouts, self._get_timeout_seconds(reward))  # fmt: skip
            attempt, num_broken_pools = attempt + (not is_pool_broken), num_broken_pools + is_pool_broken
        return results_by_call

    def _cancel_hanging_rewards(
        self, rewards_and_futures: Sequence[tuple[str, Future[Any]]], cancelled_rewards: set[str]
    ) -> None:
        """Call `on_wait`, and cancel the remaining calls of each reward whose first calls have all timed out, because
        each would occupy a process until its deadline; add the names of these rewards to `cancelled_rewards`."""
        self._on_wait()
        for reward in {name for name, _ in rewards_and_futures} - cancelled_rewards:
            reward_futures = [future for name, future in rewards_and_futures if name == reward]
            call_errors = [future.exception() for future in reward_futures if future.done()]
            if len(call_errors) >= self._max_timeouts and all(isinstance(each, TimeoutError) for each in call_errors):
                cancelled_rewards.add(reward)
                for future in reward_futures:
                    future.cancel()

    def _get_timeout_seconds(self, reward: str) -> float:
        return self._timeout_by_reward.get(reward, self._default_timeout_seconds)

    def _describe_failure(self, call_error: Exception, reward: str) -> str:
        if isinstance(call_error, BrokenProcessPool | ProcessExpired):
            return describe_exit(call_error)
        timeout_text = f"not done in {self._get_timeout_seconds(reward):g} s"
        if isinstance(call_error, CancelledError):
            return f"given up, because the {self._max_timeouts} calls before were {timeout_text}"
        return timeout_text

    def _combine_results(self, reward_results: Sequence[_RewardResult], weights: Mapping[str, float]) -> Score:
        weighted_sum, metrics, error_texts, is_permanent_error = 0.0, {}, [], False
        weighted_results = [result for result, weight in zip(reward_results, weights.values(), strict=True) if weight]
        if weighted_results and not any(result.raw_score is not None or result.error for result in weighted_results):
            return Score(None, error="no reward applies to it: each returned None", is_permanent_error=True)
        for (reward, weight), result in zip(weights.items(), reward_results, strict=True):
            metric_name = self._metric_names[reward]
            if result.raw_score is None:
                if weight and result.error:
                    error_texts.append(f"{metric_name}: {result.error}")
                    is_permanent_error |= result.is_permanent_error
                continue
            weighted_sum += weight * result.raw_score
            metrics[metric_name] = result.raw_score
            metrics |= {f"{metric_name}/{key}": metric for key, metric in result.metrics.items()}
        if not error_texts and not math.isfinite(weighted_sum):
            error_texts.append(f"the weighted sum is {weighted_sum}")
        return Score(None if error_texts else weighted_sum, metrics, "; ".join(error_texts), is_permanent_error)


# The code below runs in the worker processes.

_request_constants: dict[str, Any] = {}
_logged_errors: set[tuple[str, type]] = set()
"""Reward and error class pairs that were already logged, so that the log shows one traceback for each."""


def _start_worker(
    reward_names: Sequence[str],
    request_constants: Mapping[str, Any],
    env_variable_names: Sequence[str],
    parent_pid: int,
) -> None:
    """Prepare a worker process and load the rewards; ignore `RewardError`, which `_load_rewards` raises again."""
    init_worker(env_variable_names, parent_pid)
    mask_secrets(secret_values=find_secrets(request_constants["custom"]))
    _request_constants.update(request_constants)
    with suppress(RewardError):
        _load_rewards(reward_names)


def _load_rewards(reward_names: Sequence[str]) -> tuple[set[str], set[str]]:
    """Load the rewards with their models. Return the names of those that take all completions of a prompt as lists, and
    the names of those that take the images of a prompt."""
    binding_by_reward = {name: _load_cached_reward(name).binding for name in reward_names}
    group_reward_names = {name for name, binding in binding_by_reward.items() if binding.takes_whole_group}
    image_reward_names = {name for name, binding in binding_by_reward.items() if binding.takes_images}
    for name in filter(is_model_reward, reward_names):
        open_model(name, _request_constants["custom"])
    return group_reward_names, image_reward_names


_load_cached_reward = cache(load_reward)


def _score_completions(name: str, requests: Sequence[Mapping[str, Any]], takes_lists: bool) -> list[_RewardResult]:
    reward = _load_cached_reward(name)
    request_fields = [{**request, **_request_constants} for request in requests]
    try:
        reward_results = (
            reward.score_group(request_fields) if takes_lists else [reward(item) for item in request_fields]
        )
        return [
            _make_error_result(reward, each) if isinstance(each, ValueError) else _RewardResult(*(each or ()))
            for each in reward_results
        ]
    except BaseException as error:  # noqa: BLE001 - user code may raise any error, and the parent needs a result
        if (name, type(error)) not in _logged_errors:
            print_exception(error)
        _logged_errors.add((name, type(error)))
        return [_make_error_result(reward, error)] * len(requests)


def _make_error_result(reward: Reward, error: BaseException) -> _RewardResult:
    error_text = error_on_one_line(error, reward.find_user_code_location(error))
    return _RewardResult(error=mask_text(error_text), is_permanent_error=not is_transient(error))
