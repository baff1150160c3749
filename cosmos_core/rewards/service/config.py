"""`rewards.toml`: the rewards of a reward service and its settings. Files of Cosmos-RL are accepted unchanged."""

import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from cosmos_core.config.inputs import existing_path
from cosmos_core.config.load import parse_table, read_toml
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.value_types import StringList
from cosmos_core.errors import ConfigError

VIDEO_REWARDS = {"cosmos_reason1", "dance_grpo"}
_PUBLISHED_VAE_URL = "https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B/resolve/main/Wan2.1_VAE.pth"
_IGNORED_KEYS = ("chunk_duration", "temporal_window", "load_mean_std", "wan2pt2_model_path", "wan2pt2_credential_path")
Port = Annotated[int, Field(ge=0, le=65535)]


class RewardArgs(Table):
    """Table `[[reward_args]]` of `rewards.toml`: settings of one reward."""

    reward_type: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    """Name of the reward for clients, and of its module in cosmos_core/rewards unless `entry` names user code."""
    entry: str = ""
    """User code, `module:name` or `path/file.py:name`: a reward function, or a class with the method `score(items)`."""
    enable: bool = True
    """Whether the reward is served."""
    venv_python: str = ""
    """Python interpreter with the packages of the reward; empty or `python`: the interpreter of the service."""
    model_path: str = ""
    """Folder or Hub name of the model; empty: the default of the reward."""
    download_path: str = ""
    """Folder with further files of the reward, for example a checkpoint if `model_path` is empty."""
    dtype: str = "float16"
    """Dtype of the weights of the reward's model."""
    device: str = "cuda"
    """Device of the reward; `cuda` falls back to `cpu` on a machine without a GPU."""
    devices: StringList = ()
    """Devices of the reward, with one process each; empty: `device`."""
    endpoint_url: str = ""
    """URL of a server that runs the reward's model; empty: the reward needs no server."""
    endpoint_api_key: str = ""
    """API key for the server at `endpoint_url`; `$NAME` reads the key from the environment."""
    env: StringList = ()
    """Environment variables that the reward's processes receive in addition to standard ones."""
    options: dict[str, Any] = {}
    """Further settings, which depend on the reward."""
    batch_size: PositiveInt = 16
    """Maximum number of items, from several requests, in one batch."""
    timeout_seconds: PositiveFloat = 300.0
    """Seconds after which the process that scores a batch of items is killed and the batch is scored again."""
    load_seconds: PositiveFloat = 900.0
    """Timeout in seconds for loading the reward."""
    setup_script: str = ""
    """Setup script, a setting of Cosmos-RL without effect here: the script is not run."""
    work_dir: str = ""
    """Working directory of the reward's processes; empty: the directory of the service."""
    tmp_dir: str = ""
    """Folder for temporary files of the reward's processes; empty: the system default."""

    @property
    def python_interpreter(self) -> str:
        """Return the Python interpreter that runs the worker processes of this reward."""
        return sys.executable if self.venv_python in {"", "python"} else self.venv_python

    @property
    def process_devices(self) -> tuple[str, ...]:
        """Return the devices of this reward; the service starts one worker process for each."""
        return self.devices or (self.device,)


class DecodeArgs(Table):
    """Table `[decode_args]` of `rewards.toml`: settings of the VAE that decodes the video latents of a request, once
    for all its rewards."""

    model_path: str = ""
    """Folder or Hub name of a Wan VAE in diffusers' format, or its published file `Wan2.1_VAE.pth`. Empty: the file on
    the Hub if `cosmos_reason1` or `dance_grpo` is served, as in Cosmos-RL; otherwise latents are refused."""
    dtype: str = "bfloat16"
    """Dtype of the weights of the VAE that decodes video latents."""
    device: str = "cuda"
    """Device of the decoder of video latents."""
    chunk_duration: PositiveInt = 81
    """Setting of Cosmos-RL's own video tokenizer, without effect here: diffusers' VAE decodes a clip as a whole."""
    temporal_window: PositiveInt = 16
    """Setting of Cosmos-RL's own video tokenizer, without effect here."""
    load_mean_std: bool = False
    """Setting of Cosmos-RL, without effect here: latents are always normalised by the statistics of the VAE."""
    wan2pt2_model_path: str = ""
    """Setting of Cosmos-RL, without effect here: there is one decoder, so name a VAE of Wan2.2 in `model_path`."""
    wan2pt2_credential_path: str = ""
    """File of credentials with which Cosmos-RL downloads a video tokenizer, without effect here."""
    no_latent_decoder: bool = False
    """Whether requests with latents are refused."""


class ServiceConfig(Table):
    """Settings of a reward service, the content of `rewards.toml`."""

    host: str = "localhost"
    """Address on which the service listens; an address beyond loopback needs a token."""
    port: Port = 8080
    """Port on which the service listens; 0: any free port."""
    authentication: Literal["auto", "on", "off"] = "auto"
    """Whether requests need the token in `token_env`; `auto`: they do if the token is set, or if other machines can
    reach the service."""
    token_env: str = "REMOTE_REWARD_TOKEN"
    """Environment variable with the token that requests must have."""
    queue: Literal["memory", "redis"] = "memory"
    """Storage of accepted requests and scores; with `redis`, they survive a restart of the service."""
    redis_host: str = "localhost"
    """Host of the Redis server, used if `queue` is "redis"."""
    redis_port: Port = 6379
    """Port of the Redis server, used if `queue` is "redis"."""
    replica_id: str = ""
    """Name of this server if the reward service has several replicas. The name directs clients that fetch scores to the
    replica that accepted their request; with queue = "redis", the replica resumes the requests under its name after a
    restart. Empty: the value of `LEPTON_REPLICA_ID`; without it, clients receive no name."""
    max_body_bytes: PositiveInt = 256 * 2**20
    """Maximum size of a request in bytes."""
    max_pending_bytes: PositiveInt = 2**30
    """Maximum bytes of waiting requests, above which clients receive status 429 and retry. The same limit applies
    separately to decoded videos and to scores in memory."""
    max_pending: PositiveInt = 1024
    """Maximum number of requests that are being received or wait for scores."""
    result_seconds: PositiveFloat = 3600.0
    """Seconds for which scores are kept and can be fetched."""
    max_results: PositiveInt = 100_000
    """Maximum number of scores in memory; the oldest are dropped first."""
    batch_seconds: NonNegativeFloat = 0.005
    """Seconds for which an incomplete batch waits for items of further requests."""
    attempts: PositiveInt = 5
    """Maximum number of attempts to score a request whose worker process dies or hangs; after the last one the request
    fails."""
    drain_seconds: PositiveFloat = 60.0
    """Maximum seconds after SIGTERM to finish accepted requests and to wait until clients have fetched the scores."""
    reward_args: Annotated[tuple[RewardArgs, ...], Field(strict=False)] = ()
    """Tables `[[reward_args]]`, one for each reward."""
    decode_args: DecodeArgs = DecodeArgs()
    """Settings of the decoder of video latents."""
    no_latent_decoder: bool = False
    """Whether requests with latents are refused."""

    @field_validator("reward_args")
    @classmethod
    def _refuse_repeated_rewards(cls, rewards: tuple[RewardArgs, ...]) -> tuple[RewardArgs, ...]:
        enabled_reward_names = [reward.reward_type for reward in rewards if reward.enable]
        if repeated_name := next((name for name in enabled_reward_names if enabled_reward_names.count(name) > 1), None):
            raise ValueError(f"reward_type = {repeated_name!r} is there twice; name its devices in one table")
        return rewards

    @property
    def rewards(self) -> list[RewardArgs]:
        """Return the tables `[[reward_args]]` of the rewards that the service serves, those with `enable`."""
        return [reward for reward in self.reward_args if reward.enable]

    @property
    def vae_path(self) -> str:
        """Return the path of the VAE that decodes latents, or "" if requests with latents are refused."""
        if self.no_latent_decoder or self.decode_args.no_latent_decoder:
            return ""
        has_video_reward = any(not reward.entry and reward.reward_type in VIDEO_REWARDS for reward in self.rewards)
        return self.decode_args.model_path or (_PUBLISHED_VAE_URL if has_video_reward else "")

    @property
    def ineffective_settings(self) -> list[str]:
        """Return the names of those settings in the configuration that belong to Cosmos-RL and have no effect in this
        service."""
        decode_args, defaults = self.decode_args, DecodeArgs()
        keys = [f"decode_args.{key}" for key in _IGNORED_KEYS if getattr(decode_args, key) != getattr(defaults, key)]
        return keys + [f"reward_args.{each.reward_type}.setup_script" for each in self.rewards if each.setup_script]

    @property
    def is_loopback(self) -> bool:
        """Return True if the service is reachable from this machine only."""
        with suppress(ValueError):  # raised for the name of a host
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        return self.host == "localhost"

    def read_token(self) -> str:
        """Return the token that requests must have, or "" if they need none. Raise `ConfigError` if a required token is
        missing or invalid."""
        token = os.environ.get(self.token_env, "").strip()
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


def read_config(config_file: Path, **overrides: Any) -> ServiceConfig:
    """Return the configuration of the reward service in a file, with each keyword argument that is not None in place of
    the setting of that name. Raise `ConfigError` if the configuration is invalid."""
    settings = {**read_toml(config_file), **{key: value for key, value in overrides.items() if value is not None}}
    config = parse_table(ServiceConfig, settings, error_prefix=str(config_file))
    if not config.rewards:
        raise ConfigError(f"{config_file}: no reward is served; add a [[reward_args]] with a reward_type")
    reward_args = []
    for reward in config.reward_args:
        code_file, separator, name = reward.entry.rpartition(":")
        code_file = _to_absolute_path(code_file, config_file) if code_file.endswith(".py") else code_file
        model_path = _to_absolute_path(reward.model_path, config_file)
        reward_args.append(reward.copy_with(entry=f"{code_file}{separator}{name}", model_path=model_path))
    return config.copy_with(reward_args=tuple(reward_args))


def _to_absolute_path(path: str, config_file: Path) -> str:
    """Return the absolute path of a file or folder that exists relative to the current folder or to the folder of
    `config_file`. Return `path` unchanged if it exists in neither, because it is then empty or a name on the Hub."""
    existing_paths = [existing_path(path, folder) for folder in (Path.cwd(), config_file.parent)] if path else []
    return str(next((existing.absolute() for existing in existing_paths if existing), path))
