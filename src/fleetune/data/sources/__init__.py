"""A file or hub data set as a stream of rows."""

from fleetune.data.sources.delimited import TsvFile
from fleetune.data.sources.joined import JoinedColumns
from fleetune.data.sources.locate import Places
from fleetune.data.sources.opening import missing_column, open_source, require_columns
from fleetune.data.sources.rows import MISSING, Cell, Row, Source

__all__ = [
    "MISSING",
    "Cell",
    "JoinedColumns",
    "Places",
    "Row",
    "Source",
    "TsvFile",
    "missing_column",
    "open_source",
    "require_columns",
]
