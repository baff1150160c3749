"""`rewards.toml`: what a reward service serves, and how. Cosmos-RL's files are read as they are."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from cosmos_core.config.load import read_toml
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.values import NonNegativeFloat, PositiveFloat, PositiveInt, Strings
from cosmos_core.errors import ConfigError

_OF_VIDEOS = {"cosmos_reason1", "dance_grpo"}
_PUBLISHED_VAE = "https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B/resolve/main/Wan2.1_VAE.pth"
_NO_EFFECT = ("chunk_duration", "temporal_window", "load_mean_std", "wan2pt2_model_path", "wan2pt2_credential_path")
Port = Annotated[int, Field(ge=0, le=65535)]


class RewardArgs(Table):
    """`[[reward_args]]`: one reward."""

    reward_type: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    """What clients call it; also the file of cosmos_core/rewards that has it, unless `entry` names another."""
    entry: str = ""
    """A reward of your own, `module:thing` or `path/file.py:thing`: a function as in `reward_function`, or a class with
    `score(items)`."""
    enable: bool = True
    """False: it is not served."""
    venv_python: str = ""
    """Interpreter of its processes, where its packages cannot be installed beside ours; empty or `python`: this one."""
    model_path: str = ""
    """Folder or Hub name of its model; empty: what its file names."""
    download_path: str = ""
    """Folder of what else it reads."""
    dtype: str = "float16"
    """Of its weights."""
    device: str = "cuda"
    """Where it runs; `cuda` falls back to `cpu` on a machine without a GPU."""
    devices: Strings = ()
    """Several of them, a process each; empty: `device`."""
    endpoint_url: str = ""
    """Of a server that has the model."""
    endpoint_api_key: str = ""
    """Of that server; `$NAME` reads it from the environment."""
    env: Strings = ()
    """Environment variables that its processes see beyond those that any program needs."""
    options: dict[str, Any] = {}
    """Further settings; each reward says which it has."""
    batch_size: PositiveInt = 16
    """Most items of several requests that it scores at once."""
    timeout_seconds: PositiveFloat = 300.0
    """A batch that takes longer costs its process, and is tried again."""
    load_seconds: PositiveFloat = 900.0
    """Longest time to load."""
    setup_script: str = ""
    """Of Cosmos-RL; not run."""
    work_dir: str = ""
    """Folder that its processes run in; empty: this one."""
    tmp_dir: str = ""
    """Their folder for temporary files; empty: the system's."""

    @property
    def all_devices(self) -> tuple[str, ...]:
        """Return the device of each process."""
        return self.devices or (self.device,)


class DecodeArgs(Table):
    """`[decode_args]`: the VAE that decodes latents of videos, once for all rewards that are asked."""

    model_path: str = ""
    """Folder or Hub name of a Wan VAE in diffusers' format, or its published file `Wan2.1_VAE.pth`; empty: that of the
    Hub where `cosmos_reason1` or `dance_grpo` is served, as in Cosmos-RL; else latents are refused."""
    dtype: str = "bfloat16"
    """Of its weights."""
    device: str = "cuda"
    """Where it runs."""
    chunk_duration: PositiveInt = 81
    """Of Cosmos-RL's own tokenizer; diffusers' VAE decodes a clip as a whole."""
    temporal_window: PositiveInt = 16
    """The same."""
    load_mean_std: bool = False
    """Of Cosmos-RL, for statistics of a data set; latents are always normalised by those of the VAE, as there."""
    wan2pt2_model_path: str = ""
    """Of Cosmos-RL; one VAE decodes here, so a VAE of Wan2.2 is named in `model_path` in place of that of Wan2.1."""
    wan2pt2_credential_path: str = ""
    """Of Cosmos-RL, which fetches its tokenizer with it; not read."""
    no_latent_decoder: bool = False
    """True: latents are refused."""


class ServiceConfig(Table):
    """The whole file."""

    host: str = "localhost"
    """Address to listen at; one that is not loopback needs a token."""
    port: Port = 8080
    """0: any that is free."""
    authentication: Literal["auto", "on", "off"] = "auto"
    """Whether requests need the bearer token in `token_env`; `auto`: where that is set, and always beyond loopback."""
    token_env: str = "REMOTE_REWARD_TOKEN"
    """Environment variable with the token."""
    queue: Literal["memory", "redis"] = "memory"
    """Where accepted requests and scores are kept; `redis`: they outlive the service."""
    redis_host: str = "localhost"
    """With queue = "redis"."""
    redis_port: Port = 6379
    """With queue = "redis"."""
    replica_id: str = ""
    """What clients name to come back to this replica, and with queue = "redis" whose requests are its own; empty:
    `LEPTON_REPLICA_ID`, else none is told, and its own are those of its machine, host and port."""
    max_body_bytes: PositiveInt = 256 * 2**20
    """Largest request."""
    max_pending_bytes: PositiveInt = 2**30
    """Most bytes of requests that wait; beyond it clients are told to come back (429). Also of videos that were decoded
    from latents and wait, and of scores that are kept in memory."""
    max_pending: PositiveInt = 1024
    """Most requests that wait or are being read."""
    result_seconds: PositiveFloat = 3600.0
    """How long scores can be fetched."""
    max_results: PositiveInt = 100_000
    """Most scores that are kept in memory; the oldest go first."""
    batch_seconds: NonNegativeFloat = 0.005
    """How long a batch that is not full waits for more."""
    attempts: PositiveInt = 5
    """How often a request is tried whose process dies or hangs, before it is answered with an error."""
    drain_seconds: PositiveFloat = 60.0
    """After SIGTERM: longest time to finish what was accepted and to have it fetched."""
    reward_args: Annotated[tuple[RewardArgs, ...], Field(strict=False)] = ()
    """The rewards."""
    decode_args: DecodeArgs = DecodeArgs()
    """How latents are decoded."""
    no_latent_decoder: bool = False
    """True: latents are refused."""

    @field_validator("reward_args")
    @classmethod
    def _once_each(cls, rewards: tuple[RewardArgs, ...]) -> tuple[RewardArgs, ...]:
        names = [reward.reward_type for reward in rewards if reward.enable]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"reward_type = {twice!r} is there twice; name its devices in one table")
        return rewards

    @property
    def rewards(self) -> list[RewardArgs]:
        """Return those that are served."""
        return [reward for reward in self.reward_args if reward.enable]

    @property
    def vae(self) -> str:
        """Return what decodes latents; empty: they are refused."""
        if self.no_latent_decoder or self.decode_args.no_latent_decoder:
            return ""
        is_for_videos = any(not reward.entry and reward.reward_type in _OF_VIDEOS for reward in self.rewards)
        return self.decode_args.model_path or (_PUBLISHED_VAE if is_for_videos else "")

    @property
    def ignored(self) -> list[str]:
        """Return the settings of Cosmos-RL that the file sets and that have no effect here."""
        decode, default = self.decode_args, DecodeArgs()
        found = [f"decode_args.{key}" for key in _NO_EFFECT if getattr(decode, key) != getattr(default, key)]
        return found + [f"reward_args.{each.reward_type}.setup_script" for each in self.rewards if each.setup_script]

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def token(self) -> str:
        """Return the token that requests need; empty: none.

        Raises:
            ConfigError: they need one, and there is none.
        """
        token = os.environ.get(self.token_env, "")
        if self.authentication == "off":
            return ""
        if not token and (self.authentication == "on" or not self.is_loopback):
            raise ConfigError(
                f"host = {self.host!r} can be reached from other machines and {self.token_env} is not set; put a token "
                f'in it, or say authentication = "off"'
                if self.authentication == "auto"
                else f'authentication = "on" needs a token in {self.token_env}'
            )
        if token and not (token.isascii() and token.isprintable()):
            raise ConfigError(f"the token in {self.token_env} must be printable ASCII")
        return token


def read_config(file: Path, **overrides: Any) -> ServiceConfig:
    """Return the configuration in a file; `overrides` that are None are none.

    Raises:
        ConfigError: it is not there, or wrong.
    """
    values = read_toml(file)
    try:
        config = ServiceConfig.model_validate({**values, **{k: v for k, v in overrides.items() if v is not None}})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"{file}: {key}: {first['msg'].removeprefix('Value error, ')}") from error
    if not config.rewards:
        raise ConfigError(f"{file}: no reward is served; add a [[reward_args]] with a reward_type")
    return config
