"""What the data of each kind of task is made of: one row of `PROBLEMS` for each `Problem`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetune.data.columns import choose_columns
from fleetune.data.examples import ExampleReader, TextReader
from fleetune.data.label_sets import discover_label_sets, label_set_reader_of, with_label_columns
from fleetune.data.labels import FoundLabels, LabelReader, class_reader_of, discover_labels, reader_of
from fleetune.data.questions import ANSWER_COLUMN, ID_COLUMN, QUESTION_COLUMNS, AnswerReader, QuestionReader
from fleetune.data.settings import DataSettings
from fleetune.data.sources import Cell, Source, require_columns
from fleetune.data.tasks import Problem, Role, Task, custom_task
from fleetune.data.tokens import Encoder, TextEncoder, WindowEncoder, WordEncoder
from fleetune.data.words import TAG_COLUMNS, WORD_COLUMNS, TagReader, WordReader, default_columns, discover_tags
from fleetune.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class FoundTask:
    """The task that a training file of one's own sets, and what is to be told about it."""

    task: Task
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ProblemData:
    """How the data of one kind of task are read."""

    texts: Callable[[Task, Role | None], ExampleReader]
    """What an example consists of, in a split of a role, or in a file that is of no split."""
    labels: Callable[[Task, str | None], LabelReader]
    """(task, `--label_delimiter`) -> what reads its labels."""
    encoder: Callable[[Task, int], Encoder]
    """(task, `--doc_stride`) -> what makes tokens of an example."""
    discover: Callable[[DataSettings, Source], FoundTask]
    """Finds columns and labels of a training file."""


def discover_task(settings: DataSettings, source: Source) -> FoundTask:
    """The task that a training file of one's own sets, of the kind that the settings name or the file shows.

    Raises:
        ConfigError: The settings do not fit the kind of task.
        DataError: Columns or labels cannot be used.
    """
    problem: Problem = _shown_by(settings, source) if settings.problem_type == "auto" else settings.problem_type
    return PROBLEMS[problem].discover(settings, source)


def _shown_by(settings: DataSettings, source: Source) -> Problem:
    """What kind of task a file is for; "classification" stands for regression too."""
    if {*QUESTION_COLUMNS, ANSWER_COLUMN} <= set(source.columns) and settings.label_column_name is None:
        raise ConfigError(f"{source.name} holds questions, contexts and answers: say --problem_type question_answering")
    columns = None if settings.label_column_name else default_columns(source)
    if columns is not None and isinstance(_first_cell(source, columns[0]), (list, tuple)):
        return "token_classification"
    source = with_label_columns(source, settings.label_column_name)
    label = choose_columns(source, texts=settings.text_column_names, label=settings.label_column_name).columns.label
    assert label is not None
    is_several = isinstance(_first_cell(source, label), (list, tuple, dict))
    return "multi_label_classification" if is_several else "classification"


def _first_cell(source: Source, column: str) -> Cell:
    return next((row.cells[0] for row in source.rows([column]) if row.problem is None), None)


def _discover_texts(settings: DataSettings, source: Source) -> FoundTask:
    asked = settings.problem_type
    assert asked in ("auto", "classification", "regression")

    def find(source: Source, label: str) -> FoundLabels:
        return discover_labels(source, label, None if asked == "auto" else asked)

    return _with_chosen_columns(settings, source, find)


def _discover_label_sets(settings: DataSettings, source: Source) -> FoundTask:
    source = with_label_columns(source, settings.label_column_name)
    return _with_chosen_columns(
        settings, source, lambda source, label: discover_label_sets(source, label, settings.label_delimiter)
    )


def _with_chosen_columns(
    settings: DataSettings, source: Source, find: Callable[[Source, str], FoundLabels]
) -> FoundTask:
    chosen = choose_columns(source, texts=settings.text_column_names, label=settings.label_column_name)
    label = chosen.columns.label
    assert label is not None
    found = find(source, label)
    task = custom_task(found.problem, text_columns=chosen.columns.texts, label_column=label, labels=found.labels)
    return FoundTask(task=task, notices=tuple(line for line in (chosen.notice, found.notice) if line))


def _discover_words(settings: DataSettings, source: Source) -> FoundTask:
    words, tags = settings.text_column_names, settings.label_column_name
    if words is not None and len(words) != 1:
        raise ConfigError(f"text_column_names {words}: one column of words is read")
    usual = [next((name for name in names if name in source.columns), None) for names in (WORD_COLUMNS, TAG_COLUMNS)]
    chosen = [words[0] if words else usual[0], tags or usual[1]]
    if chosen[0] is None or chosen[1] is None:
        raise DataError(
            f"the columns are {', '.join(map(repr, source.columns))}: name that of the words with --text_column_names, "
            "and that of the tags with --label_column_name",
            file=source.name,
        )
    require_columns(source, [chosen[0], chosen[1]])
    found = discover_tags(source, chosen[1])
    task = custom_task(found.problem, text_columns=(chosen[0],), label_column=chosen[1], labels=found.labels)
    return FoundTask(task=task, notices=(found.notice,) if found.notice else ())


def _discover_questions(settings: DataSettings, source: Source) -> FoundTask:
    texts = settings.text_column_names or QUESTION_COLUMNS
    if len(texts) != len(QUESTION_COLUMNS):
        raise ConfigError(f"text_column_names {texts}: two are read, of the question and of its context")
    answers = settings.label_column_name or ANSWER_COLUMN
    require_columns(source, [*texts, answers])
    return FoundTask(
        task=custom_task(
            "question_answering",
            text_columns=texts,
            label_column=answers,
            id_column=ID_COLUMN if ID_COLUMN in source.columns else None,
            may_lack_answers=settings.version_2_with_negative,
        ),
        notices=(),
    )


def _label_names(task: Task) -> tuple[str, ...]:
    assert task.labels is not None
    return task.labels


_TEXTS = ProblemData(
    texts=lambda task, role: TextReader(),
    labels=lambda task, delimiter: reader_of(task),
    encoder=lambda task, stride: TextEncoder(),
    discover=_discover_texts,
)

PROBLEMS: dict[Problem, ProblemData] = {
    "classification": _TEXTS,
    "regression": _TEXTS,
    "multi_label_classification": ProblemData(
        texts=lambda task, role: TextReader(),
        labels=label_set_reader_of,
        encoder=lambda task, stride: TextEncoder(),
        discover=_discover_label_sets,
    ),
    "token_classification": ProblemData(
        texts=lambda task, role: WordReader(),
        labels=lambda task, delimiter: TagReader(class_reader_of(task)),
        encoder=lambda task, stride: WordEncoder(_label_names(task)),
        discover=_discover_words,
    ),
    "question_answering": ProblemData(
        texts=lambda task, role: QuestionReader(
            may_lack_answers=task.may_lack_answers,
            answers_must_fit=role == "train",
            ids_must_differ=role is not None,
        ),
        labels=lambda task, delimiter: AnswerReader(),
        encoder=lambda task, stride: WindowEncoder(stride),
        discover=_discover_questions,
    ),
}
"""Kind of task -> how its data are read."""
