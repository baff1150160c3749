"""`[train.ckpt]`: when checkpoints are saved, how many are kept, and where the model is published."""

from typing import Annotated, Literal, Self

from pydantic import field_validator, model_validator

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit, ResultNeutral
from cosmos_core.config.schema.table import Table


class CheckpointConfig(Table):
    """`[train.ckpt]`: settings of the checkpoints of a training, and of the publication of its model."""

    enable_checkpoint: Annotated[bool, ResultNeutral] = False
    """Save checkpoints during training. The best checkpoint by validation is kept and named in `best.json`. The final
    state and the state at a stop signal are saved in any case."""
    save_freq: Annotated[int, FieldUnit("train steps"), ResultNeutral] = 20
    """Number of train steps between two checkpoints; 0 or less: by `save_freq_in_epoch`."""
    save_freq_in_epoch: Annotated[int, FieldUnit("epochs"), ResultNeutral] = 0
    """Number of epochs between two checkpoints, in place of `save_freq`; 0 or less: off."""
    save_mode: Annotated[Literal["sync", "async"], ResultNeutral] = "async"
    """Mode of saving. `async`: training continues while a checkpoint is written, and at most one is written at a time.
    `sync`: training waits."""
    max_keep: Annotated[int, FieldUnit("checkpoints"), ResultNeutral] = 5
    """Number of newest checkpoints to keep in addition to the best; -1: all."""
    export_safetensors: Annotated[bool, ResultNeutral] = True
    """Add an `export` stage to a recipe without stages: it writes the model in safetensors format and verifies that
    the files can be loaded."""
    upload_hf: Annotated[bool, ResultNeutral] = False
    """Publish the export of the last training on the Hugging Face Hub, in a stage `NAME-hub` after it. A new repository
    is private; each run is a commit with a tag. The token is `HF_TOKEN` in the environment."""
    hf_repo_name: Annotated[str, EnabledBy("upload_hf"), ResultNeutral] = "Comos-Reason1"
    """Repository on the Hub, `OWNER/NAME`, or `NAME` in the account of the token; the default is spelt as in
    Cosmos-RL."""
    upload_s3: Annotated[bool | str, ResultNeutral] = False
    """Publish in an S3-compatible store: false, `final` (the export, in a stage `NAME-s3` after it) or `all` (also each
    checkpoint during the training). Credentials are environment variables: `PROD_S3_CHECKPOINT_*`, as in Cosmos-RL, or
    those of AWS, including `AWS_ENDPOINT_URL`."""
    s3_bucket: Annotated[str | None, EnabledBy("upload_s3"), ResultNeutral] = None
    """Bucket of the S3-compatible store; None: no upload."""
    s3_prefix: Annotated[str, EnabledBy("upload_s3"), ResultNeutral] = "outputs"
    """Prefix of object keys in the S3 bucket, before the names of pipeline and stage."""

    def s3_url(self, *path_parts: str) -> str:
        """Return the S3 URL that ends with `path_parts`, below the bucket and the prefix of this table; empty if
        `upload_s3` is off."""
        url_parts = (self.s3_bucket or "", self.s3_prefix.strip("/"), *path_parts)
        return f"s3://{'/'.join(filter(None, url_parts))}" if self.upload_s3 else ""

    def upload_urls(self, *path_parts: str, is_last_model: bool) -> dict[str, str]:
        """Return the URLs to which a model is published, by the suffix of the name of the upload stage, `s3` or `hub`.
        Only the last model of a pipeline (`is_last_model`) is published on the Hub."""
        hub_url = f"hub://{self.hf_repo_name}" if self.upload_hf and is_last_model else ""
        urls_by_suffix = {"s3": self.s3_url(*path_parts), "hub": hub_url}
        return {stage_suffix: url for stage_suffix, url in urls_by_suffix.items() if url}

    @field_validator("max_keep")
    @classmethod
    def _require_one_checkpoint(cls, max_keep: int) -> int:
        if max_keep == 0 or max_keep < -1:
            raise ValueError(f"max_keep = {max_keep} must be -1 (all) or at least 1")
        return max_keep

    @field_validator("upload_s3")
    @classmethod
    def _normalise_upload_setting(cls, upload_setting: bool | str) -> bool | str:
        if upload_setting not in {False, "", "final", "all"}:
            raise ValueError(f"upload_s3 = {upload_setting!r} must be false, 'final' or 'all'")
        return upload_setting or False

    @model_validator(mode="after")
    def _check_upload_targets(self) -> Self:
        if self.save_freq <= 0 and self.save_freq_in_epoch <= 0:
            condition_text = f"unless save_freq_in_epoch (= {self.save_freq_in_epoch}) is"
            raise ValueError(f"save_freq = {self.save_freq} must be at least 1 {condition_text}")
        if self.upload_s3 and not self.s3_bucket:
            remedy_text = "name the bucket or set upload_s3 = false"
            raise ValueError(f"upload_s3 = {self.upload_s3!r} needs s3_bucket; {remedy_text}")
        return self
