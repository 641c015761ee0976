"""Runs on the Hugging Face hub: models, their card, and what prediction needs; no slide by name.

README.md                     the card
run.json, recipe.toml         as in the run, without notes, paths and loggers
splits.json                   the names of the folds only
calibration.json              if the run has it
folds/NAME/                   model/, fold.json, combination.json if there is one

The model of one fold is a repository by itself: README.md, config.json, model.safetensors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import tomli_w

from caprmil import config
from caprmil.cohort.folds import Fold
from caprmil.errors import CaprmilError, RunError, one_line
from caprmil.evaluation.predictions import Predictions
from caprmil.evaluation.score_summary import summary
from caprmil.io.atomic import write_text
from caprmil.io.json_files import as_json
from caprmil.io.leftovers import temporary_folder
from caprmil.io.model_hub import CARD, download, upload
from caprmil.models.model_card import CardScore, CardScores, model_card, model_usage
from caprmil.runs.facts import ADVICE, FACTS, RECIPE
from caprmil.runs.model_metadata import model_metadata
from caprmil.runs.remote import FOLD, FOLDS
from caprmil.runs.run import COMBINATION, Run
from caprmil.runs.scores import CALIBRATION
from caprmil.runs.splits import SPLITS

FILES = (
    *(FACTS, RECIPE, SPLITS, CALIBRATION),
    *(f"{FOLDS}/*/{name}" for name in (FOLD, COMBINATION)),
    *(f"{FOLDS}/*/model/{name}" for name in ("config.json", "model.safetensors")),
)
"""What is downloaded of a run. Nothing else in a repository is read."""


def push_run(
    run: Run,
    repository: str,
    *,
    fold: str | None = None,
    private: bool = True,
    token: str | bool | None = None,
    branch: str | None = None,
    licence: str | None = None,
) -> str:
    """Upload a run, or the model of one fold, with its card; return the URL of the commit.

    Neither slides nor patients are named, and no path, prediction or feature is uploaded.
    """
    with temporary_folder() as temporary:
        folder = Path(temporary) / "run"
        name = repository.partition("@")[0]
        if fold is None:
            _write_run(run, folder)
        else:
            _write_model(run, fold, folder)
        write_text(folder / CARD, run_card(run, name, fold=fold, licence=licence))
        options: dict[str, Any] = {"private": private, "token": token, "branch": branch}
        what = f"the model of {fold}" if fold else "a run"
        return upload(folder, repository, message=f"Push {what} by caprmil", **options)


def pull_run(
    repository: str, *, revision: str | None = None, token: str | bool | None = None
) -> Run:
    """Return a run that was pushed to a repository of the hub, from the cache of the hub."""
    folder = download(repository, FILES, revision=revision, token=token)
    if not (folder / FACTS).is_file():
        raise RunError(
            f"{repository} on the hub is not a run: it has no {FACTS}. If it is a model, load it "
            "with MILModel.from_pretrained."
        )
    return Run(folder)


def run_card(
    run: Run, repository: str, *, fold: str | None = None, licence: str | None = None
) -> str:
    """Return the card of a run, or of the model of one fold."""
    target = run.target if fold is None else run.fold_target(fold)
    title = PurePath(repository).name
    return model_card(
        run.facts.model,
        model_metadata(run, target, fold),
        in_dim=run.facts.in_dim,
        title=title,
        licence=licence,
        scores=_scores(run, fold),
        recipe=shared_recipe(run),
        usage=_run_usage(run, repository) if fold is None else model_usage(repository),
    )


def shared_recipe(run: Run) -> str:
    """Return the recipe of a run without loggers, and with the last part of each path only."""
    recipe = {name: value for name, value in run.recipe.content.items() if name != "loggers"}
    recipe |= _last_parts(recipe, ("cohort", "features"))
    for name, keys in {"data": ("vectors",), "splits": ("files",), "model": ("start",)}.items():
        if name in recipe:
            table = run.recipe.table(name)
            recipe[name] = table | _last_parts(table, keys)
    return tomli_w.dumps(recipe)


def _last_parts(table: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return these settings, which are paths, as far as a table has them."""
    return {key: _last_part(table[key]) for key in keys if key in table}


def _last_part(path: Any) -> Any:
    if isinstance(path, list):
        return [_last_part(each) for each in path]
    return PurePath(str(path)).name


def _write_run(run: Run, folder: Path) -> None:
    """Write what is uploaded of a run into a folder."""
    folds = run.trained_folds()
    named = {each.name: each.seed for each in folds}
    empty = [Fold(name=n, seed=s, train=(), validation=(), test=()) for n, s in named.items()]
    splits: dict[str, Any] = {"patients": {}, "labels": {}, "paths": {}}
    splits["folds"] = [vars(each) for each in empty]
    splits |= {"unit": "patient"} if run.unit == "patient" else {}
    splits |= {"combine": run.combine} if run.combine else {}
    splits |= {"sources": {name: {} for name in run.sources}} if run.sources else {}
    write_text(folder / FACTS, as_json(_shared_facts(run.facts.as_table(), run.folder)))
    write_text(folder / RECIPE, shared_recipe(run))
    write_text(folder / SPLITS, as_json(splits))
    if (run.folder / CALIBRATION).is_file():
        temperatures = run.calibration
        write_text(folder / CALIBRATION, as_json(config.as_table(temperatures)))
    for each in folds:
        own, out = run.fold_folder(each.name), folder / FOLDS / each.name
        _write_model(run, each.name, out / "model")
        for name in (FOLD, COMBINATION):
            if (own / name).is_file():
                write_text(out / name, (own / name).read_text(encoding="utf-8"))


def _shared_facts(facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return run.json of a folder without notes, and without the hash of a slide's file."""
    for table in (facts, *facts.get("sources", ())):
        if table.get("settings"):
            try:
                settings = config.read_toml(table["settings"])
            except (ValueError, RecursionError) as problem:
                raise RunError(
                    f"{folder / FACTS} is damaged (settings: {one_line(problem)}). {ADVICE}"
                ) from None
            table["settings"] = tomli_w.dumps(settings | {"slide_file": ""})
    if start := facts.get("start"):
        start |= {"source": _last_part(start["source"]), "notes": ()}
    return facts | {"notes": ()}


def _write_model(run: Run, fold: str, folder: Path) -> None:
    """Write the model of a fold, with what it was trained on, also if an older caprmil did it."""
    model = run.model(fold)
    model.metadata = model_metadata(run, run.fold_target(fold), fold)
    model.save_pretrained(folder)


def _scores(run: Run, fold: str | None) -> CardScores | None:
    """Return the scores of a run, or of one fold on its own test part."""
    if fold is not None:
        table = _test_table(run, fold)
        if table is None:
            return None
        found = summary(table).as_dict()
        where = f"The test part of {fold}: {len(table)} {run.predicts}s."
    elif run.finished:
        found = run.scores
        number = found.get("slides") or found.get("patients")
        where = (
            f"Test parts of {len(run.splits)} folds, {number} {run.predicts}s: each predicted by "
            "models that have not seen it. Values and intervals are of all of them together."
        )
    else:
        return None
    unit = "patient" if found["patients"] else "slide"
    return CardScores(
        rows=tuple(_card_score(run, name, own) for name, own in found["metrics"].items()),
        measured_on=f"{where} Intervals are by {unit}.",
        level=found["interval_level"],
    )


def _test_table(run: Run, fold: str) -> Predictions | None:
    """Return the labelled test part of a fold, if it has one."""
    path = run.fold_folder(fold) / "test.csv"
    if not path.is_file():
        return None
    table = run.read_predictions(path)
    try:
        table.labelled()
    except CaprmilError:
        return None
    return table


def _card_score(run: Run, name: str, metric: Mapping[str, Any]) -> CardScore:
    low, high = metric["interval"] or (None, None)
    several = metric["folds_counted"] > 1
    return CardScore(
        name=name,
        title=run.target.metric(name).long_title,
        value=metric["all_slides_pooled"],
        interval=None if low is None or high is None else (low, high),
        mean_over_folds=metric["mean_over_folds"] if several else None,
        std_over_folds=metric["std_over_folds"] if several else None,
    )


def _run_usage(run: Run, repository: str) -> str:
    fold = run.done[0].name
    return f"""\
The models of {len(run.done)} folds. Predict slides or bags with their mean:

```
caprmil predict hf://{repository} NEW_SLIDES --out predictions.csv
```

In Python:

```python
from caprmil import MILModel, Run

run = Run.from_pretrained("{repository}")
model = MILModel.from_pretrained("{repository}", subfolder="{FOLDS}/{fold}/model")
```

Slides that were used in training are not named here. Their predictions would be too good: leave
them out."""
