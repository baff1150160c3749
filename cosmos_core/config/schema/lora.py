"""`[policy.lora]`: low-rank adapters, as PEFT has them (arXiv 2106.09685)."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, field_validator

from cosmos_core.config.schema.field_metadata import ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import Fraction, StringList, check_regexes

_LORA_INIT_METHODS = {"gaussian", "eva", "olora", "pissa"}


class LoraConfig(Table):
    """`[policy.lora]`: settings of LoRA, which is enabled if the recipe has this table."""

    r: PositiveInt = 8
    """Rank of the LoRA adapters."""
    lora_path: Annotated[str | None, ResultNeutral, ReferenceKind.PATH] = None
    """Folder of a PEFT adapter from which training starts, with the adapter's settings (the fingerprint includes its
    content); None: a new adapter. Declared but not read in Cosmos-RL."""
    lora_alpha: PositiveFloat = 8.0
    """Alpha of the LoRA adapters, whose output is scaled by alpha / r."""
    lora_dropout: Fraction = 0.0
    """Dropout probability of the input of the LoRA matrix A."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] | str | None = None
    """Suffixes of the names of adapted modules, in the vision tower too; or a regular expression that matches whole
    names; or `all-linear`; None: PEFT's default for the family. `gate_proj`, `up_proj` and `down_proj` (or `w1`, `w3`,
    `w2`) also select experts that are one parameter of a layer; a parameter with gate and up projection gets twice the
    rank. `cosmos check` lists the adapted layers."""
    use_rslora: bool = False
    """Scale the output of the adapters by alpha / sqrt(r) instead of alpha / r (arXiv 2312.03732)."""
    modules_to_save: StringList | None = None
    """Suffixes of the names of modules that are trained fully; None: no modules."""
    alpha_pattern: Annotated[dict[str, PositiveFloat] | None, AfterValidator(check_regexes)] = None
    """Alpha by a regular expression of module names; None: `lora_alpha` for all modules."""
    r_pattern: Annotated[dict[str, PositiveInt] | None, AfterValidator(check_regexes)] = None
    """Rank by a regular expression of module names; None: `r` for all modules."""
    init_lora_weights: bool | str = True
    """Initial values of the LoRA matrices A and B. True: B starts at zero; false: neither starts at zero; or
    `gaussian`, `olora`, `pissa`, `pissa_niter_N`, which read the base weights, so that each GPU of a mesh loads the
    whole model before it is split; not yet `eva`, which needs data."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if self.init_lora_weights == "eva":
            yield "policy.lora.init_lora_weights = 'eva' needs data before the first step; use 'pissa' or true"

    @field_validator("target_modules")
    @classmethod
    def _check_target_modules(cls, target_modules: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        check_regexes((target_modules,) if isinstance(target_modules, str) else ())
        return target_modules

    @field_validator("init_lora_weights")
    @classmethod
    def _check_initialisation(cls, init_method: bool | str) -> bool | str:
        is_known_method = not isinstance(init_method, str) or init_method in _LORA_INIT_METHODS
        if not is_known_method and not re.fullmatch(r"pissa_niter_\d+", str(init_method)):
            rule = f"must be true, false, {', '.join(sorted(_LORA_INIT_METHODS - {'eva'}))} or pissa_niter_N"
            raise ValueError(f"init_lora_weights = {init_method!r} {rule}")
        return init_method
