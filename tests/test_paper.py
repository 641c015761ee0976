"""The paper's tables with what was run: numbers of the runs, blanks, sources, and files."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from caprmil import cli, config
from caprmil.errors import CaprmilError, RunError
from caprmil.experiments import paper
from caprmil.experiments.command_log import record_command
from caprmil.experiments.cost import Cost, cost_tables
from caprmil.experiments.gathered_runs import gather
from caprmil.experiments.paper_figures import draw_bubbles, draw_grids
from caprmil.experiments.paper_tables import make_tables
from caprmil.experiments.sweep.plan import Plan
from caprmil.experiments.table_layout import PaperTable, amount, score, seconds
from caprmil.report.paper_page import write_paper
from caprmil.runs.run import Run
from caprmil.training.recipe import ModelConfig, Recipe

pytestmark = pytest.mark.slow

COMMAND = "caprmil reproduce camelyon16 --features UNI --labels labels.csv"


def reproduction(folder: Path, run: Run, models: list[str], *, encoder: str = "uni_v1") -> Path:
    """Write a reproduction of CAMELYON16 whose models are copies of a run."""
    for model in models:
        copy = shutil.copytree(run.folder, folder / model)
        facts = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(facts | {"encoder": encoder, "mpp": 1.0}))
    (folder / "protocol.json").write_text('{"protocol": "camelyon16"}')
    record_command(folder, COMMAND.split()[1:])
    return folder


def sweep(folder: Path, recipe: Recipe, points: dict[int, list[float]]) -> Path:
    """Write a sweep over tokens, with the test AUC of each fold."""
    recipe = replace(recipe, model=ModelConfig())
    plan = Plan(recipe=recipe, axes={"model.tokens": ",".join(map(str, points))})
    folder.mkdir(parents=True)
    (folder / "sweep.toml").write_text(config.dump(plan))
    with (folder / "sweep.csv").open("w", newline="") as file:
        table = csv.writer(file)
        columns = ["parameters", "seconds", "validation_auc", "validation_ace"]
        table.writerow(["point", "tokens", "fold", *columns, "test_auc", "test_ace"])
        for tokens, aucs in points.items():
            for number, auc in enumerate(aucs):
                cells = [f"tokens={tokens}", tokens, f"fold-{number}", 314_000, 1.0, "", ""]
                table.writerow([*cells, auc, 0.1])
    return folder


def costs(folder: Path, **changes: object) -> Path:
    """Write a table of costs for one model."""
    sizes = {"in_dim": 1024, "n_outputs": 2, "n_patches": 1000, "device": "cpu"}
    counted = {"parameters": 314_318, "flops": 418_000_000, "flops_as_written": 625_969_664}
    times = {"train_ms": 2.0, "inference_ms": 1.0, "train_ms_spread": 0.1}
    memory = {"inference_ms_spread": 0.1, "train_peak_mib": 15.25, "inference_peak_mib": 3.0}
    values = {"name": "caprmil"} | sizes | counted | times | memory | changes
    folder.mkdir(parents=True)
    (folder / "cost.csv").write_text(cost_tables.as_csv([Cost(**values)]))  # type: ignore[arg-type]
    return folder


def column(table: PaperTable, *heads: str) -> dict[tuple[str, ...], str]:
    """Return the cells of a column by the labels of their rows; `heads` without references."""
    (number,) = (
        n
        for n, c in enumerate(table.columns)
        if tuple(filter(None, [c.group, c.title, c.whose])) == heads
    )
    return {row.labels: row.cells[number].plain() for row in table.rows}


@pytest.fixture(scope="module")
def runs(tiny_run: Run, tiny_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a reproduction of two models, a sweep and a table of costs."""
    folder = tmp_path_factory.mktemp("paper") / "runs"
    reproduction(folder / "camelyon16", tiny_run, ["caprmil", "caprmil+gated"])
    sweep(folder / "clusters", tiny_recipe, {2: [0.9, 0.8], 3: [0.7, 0.7]})
    costs(folder / "deep" / "cost")
    return folder


@pytest.fixture(scope="module")
def tables(runs: Path) -> list[PaperTable]:
    return make_tables(gather([runs]))


# Numbers


def test_scores_are_those_of_the_predictions(tiny_run: Run, tables: list[PaperTable]) -> None:
    found = pd.read_csv(tiny_run.folder / "predictions.csv")
    positive = tiny_run.target.titles[1]
    aucs = [
        roc_auc_score(own["label"].astype(str) == positive, own[f"prob_{positive}"])
        for _, own in found.groupby("fold")
    ]
    expected = score(paper.Figure(float(np.mean(aucs)), float(np.std(aucs, ddof=1)))).plain()
    for table, model in ((tables[0], "caprmil"), (tables[1], "caprmil+gated")):
        ours = column(table, "CAMELYON16", "AUC", "ours")
        assert ours[model,] == expected


def test_the_columns_of_the_paper_are_its_numbers(tables: list[PaperTable]) -> None:
    assert column(tables[0], "BRACS", "ACE", "paper")["sgpmil",] == ".142 ± .032"
    assert column(tables[0], "FLOPs (G)", "paper")["transmil",] == "85.02"
    assert column(tables[1], "PANDA", "kappa", "paper")["caprmil+gated",] == ".952 ± .043"
    assert column(tables[2], "params (M)", "paper")["4", "12", "4"] == "0.310"
    assert column(tables[3], "training", "s per epoch", "paper")["CAMELYON16", "dgrmil"] == "16.7"
    assert column(tables[3], "FLOPs (G)", "paper")["CAMELYON16", "sgpmil"] == "2.43"


def test_what_was_not_run_is_blank(tables: list[PaperTable], tmp_path: Path) -> None:
    for title in ("TCGA-NSCLC", "PANDA", "BRACS"):
        metric = "kappa" if title == "PANDA" else "AUC"
        assert set(column(tables[0], title, metric, "ours").values()) == {""}
    ours = column(tables[0], "CAMELYON16", "AUC", "ours")
    assert [model for (model,), cell in ours.items() if cell] == ["caprmil"]
    only_costs = make_tables(gather([costs(tmp_path / "cost")]))
    for table in only_costs:
        for number, each in enumerate(table.columns):
            if each.whose == "ours" and each.group not in ("params (M)", "FLOPs (G)"):
                assert {row.cells[number].plain() for row in table.rows} == {""}


def test_points_of_a_sweep_fill_the_rows_of_the_paper(tables: list[PaperTable]) -> None:
    ours = column(tables[2], "AUC", "ours")
    assert ours["2", "8", "4"] == score(paper.Figure(0.85, 0.1 / np.sqrt(2))).plain()
    assert [labels for labels, cell in ours.items() if cell] == [("2", "8", "4")]


def test_a_run_of_camelyon16_fills_its_row_if_no_sweep_has_it(runs: Path) -> None:
    found = gather([runs])
    same = {row.tokens: row for row in paper.ABLATIONS if row[1:3] == (8, 4)}
    run = found.models["camelyon16"]["caprmil"]
    for tokens, sources in ((4, "[1, 2]"), (2, "[2]")):
        models = {"camelyon16": {"caprmil": replace(run, published=same[tokens])}}
        table = make_tables(replace(found, models=models))[2]
        ours = column(table, "AUC", "ours")
        assert (ours["4", "8", "4"] == score(run.scores["auc"]).plain()) == (tokens == 4)
        assert ours["2", "8", "4"] == ".850 ± .071"
        assert table.columns[1].references == sources


def test_times_are_means_of_what_was_measured(tiny_run: Run, tables: list[PaperTable]) -> None:
    found = [json.loads(path.read_text()) for path in tiny_run.folder.glob("folds/*/timing.json")]
    epochs = [epoch["seconds"] for fold in found for epoch in fold["epochs"]]
    tests = [fold["test"]["seconds"] for fold in found]
    row = ("CAMELYON16", "caprmil")
    ours = column(tables[3], "training", "s per epoch", "ours")
    assert ours[row] == seconds(float(np.mean(epochs))).plain()
    ours = column(tables[3], "inference", "s per test set", "ours")
    assert ours[row] == seconds(float(np.mean(tests))).plain()
    assert set(column(tables[3], "peak memory", "MiB", "ours").values()) == {""}
    assert any("trained on a CPU" in note for note in tables[3].notes)


def test_runs_without_times_have_none(tiny_run: Run, tmp_path: Path) -> None:
    folder = reproduction(tmp_path / "runs", tiny_run, ["caprmil"])
    for path in folder.rglob("timing.json"):
        path.unlink()
    table = make_tables(gather([folder]))[3]
    assert set(column(table, "training", "s per epoch", "ours").values()) == {""}
    assert any("before times were stored: caprmil" in note for note in table.notes)


def test_parameters_and_operations_are_for_the_bag_of_the_paper(
    tiny_run: Run, tables: list[PaperTable], tmp_path: Path
) -> None:
    assert column(tables[0], "params (M)", "ours")["caprmil",] == "0.314"
    assert column(tables[0], "FLOPs (G)", "as written", "ours")["caprmil",] == "0.626"
    assert column(tables[0], "FLOPs (G)", "as computed", "ours")["caprmil",] == "0.418"
    folder = reproduction(tmp_path / "runs", tiny_run, ["caprmil"])
    costs(tmp_path / "runs/cost", n_patches=20, in_dim=16)
    table = make_tables(gather([folder]))[0]
    assert column(table, "FLOPs (G)", "as written", "ours")["caprmil",] == ""
    of_run = sum(p.numel() for p in tiny_run.model("fold-0").parameters())
    assert column(table, "params (M)", "ours")["caprmil",] == amount(of_run / 1e6).plain()
    assert any("those of the runs, for 64 features" in note for note in table.notes)


# Sources


def test_a_column_names_its_command_and_features(tables: list[PaperTable]) -> None:
    heads = [each.heads for each in tables[0].columns]
    assert ("CAMELYON16", "AUC", "ours [1]") in heads
    assert ("BRACS", "AUC", "ours") in heads
    assert COMMAND in tables[0].sources[0]
    assert "encoder uni_v1, 64 features, 1 um/px" in tables[0].sources[0]
    for text in (tables[0].as_markdown(), tables[0].as_latex()):
        assert COMMAND in text


def test_results_of_generated_bags_are_marked_and_left_out_next_to_real_ones(
    tiny_run: Run, tmp_path: Path
) -> None:
    generated = reproduction(tmp_path / "rehearsal", tiny_run, ["caprmil"], encoder="synthetic")
    (source,) = gather([generated]).sources()
    assert source.generated
    assert "generated: the scores mean nothing" in str(source)
    reproduction(tmp_path / "real", tiny_run, ["caprmil+gated"])
    found = gather([tmp_path])
    assert list(found.models["camelyon16"]) == ["caprmil+gated"]
    assert "generated bags are left out" in found.notes[0]


def test_a_model_that_was_run_twice_is_an_error(tiny_run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        reproduction(tmp_path / name, tiny_run, ["caprmil"])
    with pytest.raises(RunError, match="twice"):
        gather([tmp_path])
    assert gather([tmp_path / "one", tmp_path / "one"]).models


def test_unfinished_runs_are_left_out_with_a_note(tiny_run: Run, tmp_path: Path) -> None:
    folder = reproduction(tmp_path, tiny_run, ["caprmil", "mean"])
    (folder / "mean/scores.json").unlink()
    found = gather([folder])
    assert list(found.models["camelyon16"]) == ["caprmil"]
    assert "mean" in found.notes[0]


def test_a_folder_of_an_earlier_version_is_recognised_by_its_title(
    tiny_run: Run, tmp_path: Path
) -> None:
    folder = reproduction(tmp_path, tiny_run, ["caprmil"])
    for name in ("protocol.json", "commands.txt"):
        (folder / name).unlink()
    for name, text in {"table.md": "# CAMELYON16\n", "table.csv": "", "cohort.csv": ""}.items():
        (folder / name).write_text(text)
    found = gather([folder])
    assert "caprmil" in found.models["camelyon16"]
    assert "not recorded" in str(found.sources()[0])


# Files


def test_a_page_and_files_are_written_once(runs: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["paper", str(runs), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    names = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*"))
    tables = [f"tables/table{n}.{suffix}" for n in range(1, 5) for suffix in ("md", "tex")]
    plots = ["camelyon16-accuracy", "camelyon16-time", "sweep-1-tokens"]
    pictures = [f"figures/{name}.{suffix}" for name in plots for suffix in ("png", "svg")]
    assert names == sorted(["index.html", *tables, *pictures])
    page = (tmp_path / "out/index.html").read_text()
    assert COMMAND in page
    assert "encoder uni_v1, 64 features, 1 um/px" in page
    assert page.count("<svg") == 3
    tex = (tmp_path / "out/tables/table1.tex").read_text()
    widths = {line.count("&") for line in tex.splitlines() if line.startswith(("abmil", "caprmil"))}
    assert widths == {21}


def test_a_file_of_the_user_is_not_overwritten(runs: Path, tmp_path: Path) -> None:
    mine = tmp_path / "tables" / "table3.md"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(CaprmilError, match="already exists"):
        write_paper(gather([runs]), tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["tables", "table3.md"]
    assert mine.read_text() == "mine"


def test_plots_use_the_memory_of_a_step_where_training_has_none(runs: Path) -> None:
    drawn = draw_bubbles(gather([runs]))
    assert [each.name for each in drawn] == ["camelyon16-time", "camelyon16-accuracy"]
    axes = drawn[0].figure.axes[0]
    assert axes.get_xlabel() == "Peak memory of a step (MiB), a bag of 1,000 patches"
    assert [text.get_text() for text in axes.texts] == ["caprmil"]


def test_a_grid_of_two_settings_is_drawn_over_each(tiny_recipe: Recipe, tmp_path: Path) -> None:
    folder = sweep(tmp_path / "grid", tiny_recipe, {2: [0.9], 4: [0.8]})
    plan = Plan(
        recipe=replace(tiny_recipe, model=ModelConfig()),
        axes={"model.tokens": "2,4", "model.heads": "4,8"},
    )
    (folder / "sweep.toml").write_text(config.dump(plan))
    table = pd.read_csv(folder / "sweep.csv")
    both = [table.assign(heads=h, point=table["point"] + f",heads={h}") for h in (4, 8)]
    pd.concat(both).to_csv(folder / "sweep.csv", index=False)
    drawn = draw_grids(gather([folder]))
    assert [each.name for each in drawn] == ["sweep-1-tokens", "sweep-1-heads"]
    labels = [{axes.get_ylabel() for axes in each.figure.axes} - {""} for each in drawn]
    assert labels == [{"heads = 4", "heads = 8"}, {"tokens = 2", "tokens = 4"}]


def test_commands_are_recorded_once_each(tmp_path: Path) -> None:
    for words in (["cost", "--models", "mean"], ["cost"], ["cost", "--models", "mean"]):
        record_command(tmp_path, words)
    lines = (tmp_path / "commands.txt").read_text().splitlines()
    assert lines == ["caprmil cost --models mean", "caprmil cost"]


def test_wrong_input_is_an_error_of_one_line(
    mistake: Callable[..., str], tiny_run: Run, tmp_path: Path
) -> None:
    new = ("--out", tmp_path / "out")
    assert "There is no folder" in mistake("paper", tmp_path / "nowhere", *new)
    assert "written by `caprmil reproduce`" in mistake("paper", tiny_run.folder, *new)
    folder = costs(tmp_path / "cost")
    (folder / "index.html").write_text("mine")
    assert "already exists" in mistake("paper", folder, "--out", folder)
    (folder / "cost.csv").write_text("name,flops\nmean,1\n")
    assert "no column in_dim" in mistake("paper", folder, *new)
    assert "is a file" in mistake("paper", folder, "--out", folder / "index.html")
    assert not (tmp_path / "out").exists()
