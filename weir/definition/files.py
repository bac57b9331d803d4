"""Files that arrive in a directory, as a source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from state_ops.outputs import MAIN as MAIN
from weir.connectors.source import FAIL
from weir.connectors.source import Source as Source

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """Files that arrive in a directory, taken in name order.

    Attributes:
        pattern: Directory and file name pattern, with {placeholders} from the configuration.
        format: What the files are: "parquet" or what is decoded: "csv", "json", "avro".
        options: How such files are written, as `connectors.formats` names it.
        schema: Their columns. None: those of the first file.
        partitions: By column that stands in the files' directories its type: "string", "int" or "date"; of others the
            first file's value says it.
        below_floor: What to do about new names that sort below the oldest remembered one: "fail" or "warn".
        on_bad: As of every source; a file that cannot be read is set aside as a whole.
    """

    pattern: str
    name: str = field(default="files", kw_only=True)
    below_floor: str = field(default=FAIL, kw_only=True)
    format: str = field(default=PARQUET, kw_only=True)
    options: tuple[tuple[str, Any], ...] = field(default=(), kw_only=True)
    schema: pa.Schema | None = field(default=None, kw_only=True)
    partitions: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)

    @property
    def decodes(self) -> bool:
        return self.format != PARQUET

    @property
    def declared_columns(self) -> pa.Schema | None:
        if self.schema is None:
            return None
        from state_ops.arrow.frames import canonical_schema

        return canonical_schema(self.schema)
