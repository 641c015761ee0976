"""Which target is compared, where a run has several and another only one of them."""

from collections.abc import Mapping

from caprmil.errors import CohortError, UnknownNameError
from caprmil.evaluation.predictions import Predictions

Tables = Mapping[str, Predictions]
Baselines = Mapping[str, Tables]


def match_targets(
    tables: Tables, baselines: Baselines, name: str | None = None
) -> tuple[dict[str, Predictions], dict[str, dict[str, Predictions]]]:
    """Return tables and their baselines of the same target.

    Of a table with several targets, only the one of that name is taken. Without a name it is the
    one that the single tables have: of their columns, and with the same labels.
    """
    single = [table for table in tables.values() if not table.target.has_tasks]
    chosen: dict[str, str | None] = {}
    for title, table in tables.items():
        chosen[title] = None
        if table.target.has_tasks and (name or single):
            chosen[title] = name or _shared(title, table, single)
            if chosen[title] not in table.target.parts:
                raise UnknownNameError(f"target in {title}", str(name), table.target.parts)
    if name and not any(chosen.values()):
        raise CohortError(f"None of these predicts several targets. Omit --target {name}.")

    def part(table: Predictions, own: str | None) -> Predictions:
        return table if own is None else table.part(own)

    return (
        {title: part(table, chosen[title]) for title, table in tables.items()},
        {
            title: {baseline: part(table, chosen[title]) for baseline, table in own.items()}
            for title, own in baselines.items()
        },
    )


def _shared(title: str, table: Predictions, others: list[Predictions]) -> str:
    """Return the target of a table that all other tables predict; raise if it is not one."""
    fitting = [
        name for name in table.target.parts if all(_fits(table.part(name), own) for own in others)
    ]
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(table.target.parts)
    raise CohortError(
        f"{title} predicts {known}; {'none' if not fitting else 'more than one'} of these has the "
        "answers and labels of the others. Choose it with --target NAME."
    )


def _fits(one: Predictions, other: Predictions) -> bool:
    """Return whether two tables can be compared, and have the same labels on shared slides."""
    if one.target.shared(other.target) is None:
        return False
    here, there = (_labels(table) for table in (one, other))
    shared = here.keys() & there.keys()
    return bool(shared) and all(here[slide] == there[slide] for slide in shared)


def _labels(table: Predictions) -> dict[str, str]:
    if table.labels is None:
        return {}
    shown = zip(table.slides, table.labels.tolist(), strict=True)
    return {slide: text for slide, label in shown if (text := table.target.show_label(label))}
