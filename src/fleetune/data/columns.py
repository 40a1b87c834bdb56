"""Choose which columns hold the texts and the label."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from fleetune.data.sources import Source, TsvFile, missing_column, require_columns
from fleetune.data.tasks import Columns
from fleetune.errors import DataError

LABEL_NAMES = ("label", "labels")
# The last two are how a table's row numbers come out when it is saved with them.
ID_NAMES = ("id", "idx", "index", "guid", "", "unnamed: 0")
PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
    ("text_a", "text_b"),
)
SINGLE_NAMES = (("sentence",), ("text",))


@dataclass(frozen=True, kw_only=True)
class ChosenColumns:
    """The columns to read, and what to tell the user where they were not named."""

    columns: Columns
    notice: str | None


def match_layout(source: Source, layouts: Sequence[Columns], *, label_optional: bool) -> Columns:
    """The first layout that the columns of this source fit.

    A layout that names the columns of a file without a header line fits a TSV file with as many cells.

    Args:
        source: An opened source.
        layouts: Layouts in order of preference.
        label_optional: Whether the label column may be missing, as in test splits (the result has none then).

    Raises:
        DataError: None fits; the columns present and the nearest names are told.
    """
    present = set(source.columns)
    with_texts = [layout for layout in layouts if layout.header is None and set(layout.texts) <= present]
    for layout in with_texts:
        if layout.label in present:
            return replace(layout, id=present_id(source, layout))
    for layout in with_texts:
        if label_optional or layout.label is None:
            return replace(layout, label=None, id=present_id(source, layout))
    for layout in layouts:
        if layout.header is not None and isinstance(source, TsvFile) and source.fits_header(layout.header):
            return layout
    raise DataError(_no_layout_fits(source, layouts, label_optional), file=source.name)


def present_id(source: Source, layout: Columns) -> str | None:
    """The layout's column of identifiers, if the source has it."""
    return layout.id if layout.id in source.columns else None


def _no_layout_fits(source: Source, layouts: Sequence[Columns], label_optional: bool) -> str:
    """Speaks of the layout that is nearest to what is there."""

    def missing(layout: Columns) -> list[str]:
        label = [] if label_optional or layout.label is None else [layout.label]
        return [name for name in (*layout.texts, *label) if name not in source.columns]

    named = [layout for layout in layouts if layout.header is None]
    return missing_column(source.columns, *missing(min(named, key=lambda layout: len(missing(layout)))))


def choose_columns(
    source: Source,
    *,
    texts: tuple[str, ...] | None = None,
    label: str | None = None,
) -> ChosenColumns:
    """Choose the columns of a file of one's own: those asked for, else the usual names, else by position.

    Args:
        source: An opened source.
        texts: Names of one or two text columns; None: choose.
        label: Name of the label column, which is no text; None: "label" or "labels", in any case.

    Raises:
        DataError: A column asked for is missing, or there is no column to choose.
    """
    asked = [*(texts or ()), *([label] if label is not None else [])]
    require_columns(source, asked)
    label = label or _default_label(source)
    texts = texts or _default_texts(source, label)
    columns = Columns(texts=texts, label=label)
    told = [] if set(texts) <= set(asked) else [f"text from {' and '.join(map(repr, texts))}"]
    if label not in asked:
        told.append(f"label from {label!r}")
    notice = f"{source.name}: {', '.join(told)} (of {', '.join(source.columns)})" if told else None
    return ChosenColumns(columns=columns, notice=notice)


def _default_label(source: Source) -> str:
    for name in source.columns:
        if name.casefold() in LABEL_NAMES:
            return name
    reason = missing_column(source.columns, "label")
    raise DataError(f"{reason}: name the label column with --label_column_name", file=source.name)


def _default_texts(source: Source, label: str) -> tuple[str, ...]:
    by_folded = {name.casefold(): name for name in source.columns if name != label}
    for names in (*PAIR_NAMES, *SINGLE_NAMES):
        if set(names) <= set(by_folded):
            return tuple(by_folded[name] for name in names)
    rest = possible_texts(source, {label})
    if not rest:
        raise DataError(
            f"there is no text column among {', '.join(map(repr, source.columns))}: name it with --text_column_names",
            file=source.name,
        )
    return tuple(rest[:2])


def possible_texts(source: Source, labels: AbstractSet[str | None]) -> list[str]:
    """The columns, in file order, whose names are none of these labels and not usual for a label or a row number."""
    not_text = {*ID_NAMES, *LABEL_NAMES}
    return [name for name in source.columns if name not in labels and name.casefold() not in not_text]


def apply_header(source: Source, columns: Columns) -> Source:
    """The source with its columns named by a layout that is for files without a header line."""
    if columns.header is not None and isinstance(source, TsvFile):
        return source.with_header(columns.header)
    return source
