"""`[train.train_policy.clean]`: search for duplicates among training rows, and for training rows that contain text of
benchmarks."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.field_metadata import FieldUnit, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import Fraction, SplitNames

BENCHMARKS_KEY = "train.train_policy.clean.decontaminate_against"
"""Key of the benchmarks whose text training rows must not contain."""


class BenchmarkRowsConfig(Table):
    """`[[train.train_policy.clean.decontaminate_against]]`: location of the rows of a benchmark."""

    # `repr=False`, because the repr enters the fingerprint, which includes the content of the rows but not their name.
    name: Annotated[str, ResultNeutral, ReferenceKind.PATH, Field(min_length=1, repr=False)]
    """Path, URL or Hub id of the rows, as in `dataset.name`, or `stage:NAME` of a stage that makes rows of text; every
    text in every column is compared."""
    subset: str = ""
    """Configuration name of the data set on the Hub; empty: the default configuration."""
    revision: str = ""
    """Commit, tag or branch of the data set on the Hub; empty: the newest commit."""
    split: SplitNames = ("train",)
    """Split, or list of splits to concatenate; a benchmark on the Hub usually has `test`."""

    @property
    def dataset(self) -> DatasetConfig:
        """Return the data set of the benchmark's rows."""
        return DatasetConfig(name=self.name, subset=self.subset, revision=self.revision, split=self.split)


def _convert_names_to_tables(names_or_tables: Any) -> Any:
    items = [names_or_tables] if isinstance(names_or_tables, str) else names_or_tables
    return [{"name": each} if isinstance(each, str) else each for each in items] if isinstance(items, list) else items


class CleanConfig(Table):
    """`[train.train_policy.clean]`: search for duplicates among the training rows and for training rows that contain
    text of benchmarks. Each match is written to `data/clean.jsonl` of the `prepare` stage, with both texts."""

    decontaminate_against: Annotated[
        tuple[BenchmarkRowsConfig, ...],
        BeforeValidator(_convert_names_to_tables, json_schema_input_type=str | list[str | BenchmarkRowsConfig]),
        Field(strict=False),
    ] = ()
    """Benchmarks whose text must not be trained on: names, or tables with `name`, `subset`, `revision` and `split`."""
    ngram: Annotated[PositiveInt, FieldUnit("words")] = 13
    """Number of consecutive words of a benchmark's text that match wherever a training row contains them; a shorter
    text of at least 8 words matches as a whole."""
    min_overlap: Fraction = 0.8
    """Minimum fraction of the words of a benchmark's text that the matches must cover for `drop` to leave out the row
    (0.8 as for Llama 2, arXiv 2307.09288). Matches that cover less are only reported."""
    near_duplicates: Fraction = 0.9
    """Two rows are near duplicates if the Jaccard similarity of their sets of pairs of consecutive words is at least
    this value; the later row counts as the duplicate. 0: only rows of equal texts are duplicates."""
    action: Literal["report", "drop"] = "report"
    """What happens to duplicates and to rows that contain a benchmark's text: `report` keeps them, `drop` leaves them
    out."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if stage.recipe.policy.is_diffusers:
            yield "train.train_policy.clean: only rows of text are compared; leave it out for a diffusion model"
