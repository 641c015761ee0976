"""Mistakes of users: each is answered by one error that says what is wrong and what to do."""

import json
import shutil
from pathlib import Path
from shlex import split

import h5py
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from caprmil import cli
from caprmil.features import bags
from caprmil.runs.run import Run
from caprmil.synthetic import Section

LINES = [f"s{n},p{n},{'ab'[n % 2]}" for n in range(12)]
TABLES = {
    "labels.csv": ["slide,patient,label", *LINES],
    "columns.csv": ["name,who,grade,age", *(f"{line},{n}" for n, line in enumerate(LINES))],
    "two.csv": ["slide,patient,grade,size", *(f"{line},{n}" for n, line in enumerate(LINES))],
    "numbers.csv": ["slide,patient,label", *(f"s{n},p{n},{n * 1.37:.2f}" for n in range(12))],
    "one.csv": ["slide,patient,label", *(f"s{n},p{n},a" for n in range(12))],
    "few.csv": ["slide,patient,label", *LINES[:4]],
    "empty.csv": ["slide,patient,label"],
    "twice.csv": ["slide,patient,label", *LINES, LINES[3]],
    "others.csv": ["slide,patient,label", *(line.replace("s", "S-0") for line in LINES)],
    "unfilled.csv": ["slide,patient,label", *(f"s{n},," for n in range(12))],
    "gaps.csv": ["slide,patient,label", *LINES[:11], "s11,p11,"],
    "nameless.csv": ["slide,patient,label", *LINES[:11], "s11,,b"],
    "mixed.csv": ["slide,patient,label", *(f"s{n},p{n // 2},{'ab'[n % 2]}" for n in range(12))],
    "classes.csv": [
        "slide,patient,label",
        *(f"s{n},{'ab'[n % 2]},{'ab'[n % 2]}" for n in range(12)),
    ],
    "spelling.csv": ["slide,patient,label", *LINES[:11], "s11,p11,B"],
    "answers.csv": [
        "slide,label,prob_a,prob_b",
        *(f"s{n},{'ab'[n % 2]},0.4,0.6" for n in range(12)),
    ],
    "broken.csv": ["slide,patient,label", *LINES, "s12,p12,a,extra"],
}


@pytest.fixture(scope="module")
def home(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as users have it: tables, features, slides and runs, some of them wrong."""
    home = tmp_path_factory.mktemp("mistakes")
    for name, lines in TABLES.items():
        (home / name).write_text("\n".join(lines) + "\n")
    numbers = np.ones((5, 4), dtype=np.float32)
    for n in range(12):
        bags.write(home / "features" / f"s{n}.h5", numbers, encoder="e", mpp=1.0)
        width = numbers if n else np.ones((5, 7), dtype=np.float32)
        bags.write(home / "widths" / f"s{n}.h5", width)
        bags.write(home / "encoders" / f"s{n}.h5", numbers, encoder="uni" if n else "virchow2")
        (home / "coords").mkdir(exist_ok=True)
        with h5py.File(home / "coords" / f"s{n}.h5", "w") as file:
            file["coords"] = np.ones((5, 2), dtype=np.int64)
    shutil.copytree(home / "features", home / "damaged")
    (home / "damaged" / "s3.h5").write_bytes(b"not HDF5")
    bags.write(home / "wide.h5", np.ones((5, 8), dtype=np.float32))
    bags.write(home / "uni.h5", np.ones((5, 64), dtype=np.float32), encoder="uni_v1", mpp=1.0)
    (home / "slides").mkdir()
    Section(seed=0, width=500, height=500).write(home / "slides" / "s0.tiff")
    pd.DataFrame({"slide": ["s0"]}).to_excel(home / "sheet.xlsx", index=False)
    (home / "images").mkdir()
    Image.new("RGB", (300, 300), "purple").save(home / "images" / "scan.png")
    (home / "notes.txt").write_text("mine")
    (home / "own").mkdir()
    (home / "own" / "notes.txt").write_text("mine")
    (home / "wrong.toml").write_text('cohort = "labels.csv"\n[train]\nepoch = 3\n')
    (home / "damaged.toml").write_text("cohort = labels.csv")
    shutil.copytree(tiny_run.folder, home / "run")
    shutil.copytree(tiny_run.folder, home / "format")
    facts = json.loads((home / "format" / "run.json").read_text())
    (home / "format" / "run.json").write_text(json.dumps(facts | {"format": 1}))
    return home


BARS = ("Checking bags", "Encoding")
FOLLOWING = ("Correct these errors and repeat the command: it tries these again.",)

MISTAKES = [
    ("train nothing.csv --out new", "There is no file nothing.csv."),
    ("train nothing.toml --out new", "There is no recipe nothing.toml."),
    ("train abmli --out new", "There is no recipe or table called 'abmli'. Did you mean 'abmil'?"),
    (
        "train features --out new",
        "features is a folder. Pass a table of slides and labels; one to fill in is written",
    ),
    (
        "train notes.txt --features features --out new",
        "notes.txt has no rows. It needs a line of column names, then a line for each slide.",
    ),
    (
        "train sheet.xlsx --features features --out new",
        "No column is recognised as the label. Columns: slide. Set [data] label (--label",
    ),
    (
        "train wrong.toml --features features --out new",
        "wrong.toml: train has no setting called 'epoch'. Did you mean 'epochs'?",
    ),
    (
        "train damaged.toml --features features --out new",
        "damaged.toml is not a TOML file: Invalid value (at line 1, column 10).",
    ),
    (
        "train columns.csv --features features --out new",
        "No column is recognised as the slide. Columns: name, who, grade, age. Set [data]",
    ),
    (
        "train two.csv --features features --out new",
        "No column is recognised as the label. Columns: slide, patient, grade, size. Set",
    ),
    (
        "train two.csv --features features --label grad --out new",
        "[data] label: no column is 'grad'. Did you mean 'grade'?",
    ),
    (
        "train numbers.csv --features features --out new",
        "Column label has 12 different numbers, not classes: 0.00, 1.37, 2.74, 4.11, 5.48, ...",
    ),
    (
        "train one.csv --features features --out new",
        "Column label has fewer than two classes: a. Set [data] label (--label COLUMN) if the",
    ),
    (
        "train few.csv --features features --out new",
        "Classes with too few patients (2): a: 2, b: 2. folds = 5 with validation = 0.2 needs",
    ),
    (
        "train empty.csv --features features --out new",
        "empty.csv has no rows. It needs a line of column names, then a line for each slide.",
    ),
    (
        "train twice.csv --features features --out new",
        "Slides with more than one row (1): s3. Leave one row of each.",
    ),
    (
        "train others.csv --features features --out new",
        "Slides without a bag in features (12): S-00, S-01, S-02, S-03, S-04, S-05, S-06,",
    ),
    (
        "train unfilled.csv --features features --out new",
        "Slides without a label (12): s0, s1, s2, s3, s4, s5, s6, s7, s8, s9 and 2 more. Fill",
    ),
    (
        "train gaps.csv --features features --out new",
        "Slides without a label (1): s11. Fill column label, or remove their rows.",
    ),
    (
        "train nameless.csv --features features --out new",
        "Slides without a patient (1): s11. Fill column patient, remove their rows, or delete",
    ),
    (
        "train mixed.csv --features features --out new",
        "Patients with more than one label (6): p0 (a, b), p1 (a, b), p2 (a, b), p3 (a, b), p4",
    ),
    (
        "train classes.csv --features features --out new",
        "Column patient does not name patients: it has one value for all slides of a class (a,",
    ),
    (
        "train spelling.csv --features features --out new",
        "Classes that differ only in spelling (1): B and b. Use one spelling.",
    ),
    (
        "train broken.csv --features features --out new",
        "broken.csv, line 14: 4 cells, but 3 columns. Put quotes around a cell that holds the",
    ),
    (
        "train labels.csv --out new",
        "Slides without a bag (12): s0, s1, s2, s3, s4, s5, s6, s7, s8, s9 and 2 more. Pass a",
    ),
    (
        "train labels.csv --features nowhere --out new",
        "There is no folder nowhere to look for bags in.",
    ),
    (
        "train labels.csv --features slides --out new",
        "slides is a folder of slides, without features. Encode them, and pass the new folder:",
    ),
    (
        "train labels.csv --features coords --folds 2 --out new",
        "Files of coordinates, without features (12): s0, s1, s2, s3, s4, s5, s6, s7, s8, s9",
    ),
    (
        "train labels.csv --features widths --folds 2 --out new",
        "Bags that differ in width (2): 7 (s0), 4 (s1, s2, s3, s4, s5, s6, s7, s8, s9, s10 and",
    ),
    (
        "train labels.csv --features encoders --folds 2 --out new",
        "Bags that differ in encoder (2): virchow2 (s0), uni (s1, s2, s3, s4, s5, s6, s7, s8,",
    ),
    (
        "train labels.csv --features damaged --folds 2 --out new",
        "Bags that cannot be used (1): damaged/s3.h5 is not an HDF5 file.",
    ),
    (
        "train labels.csv --features features --folds 20 --out new",
        "Classes with too few patients (2): a: 6, b: 6. folds = 20 with validation = 0.2 needs",
    ),
    (
        "train labels.csv --features features --folds 1 --out new",
        "recipe: splits: [splits] folds is 1, and must be 2 or more for kind = 'kfold'.",
    ),
    (
        "train labels.csv --features features --epochs 0 --out new",
        "recipe: train: epochs must be 1 or more, not 0.",
    ),
    (
        "train labels.csv --features features --model abmli --out new",
        "There is no model called 'abmli'. Did you mean 'abmil'?",
    ),
    (
        "train labels.csv --features features --set epochs=5 --out new",
        "recipe has no setting called 'epochs'. Did you mean 'train.epochs'?",
    ),
    (
        "train labels.csv --features features --set train.epoch=5 --out new",
        "recipe: train has no setting called 'epoch'. Did you mean 'epochs'?",
    ),
    (
        "train labels.csv --features features --set train.epochs=five --out new",
        "recipe: train: epochs must be a whole number, not 'five'.",
    ),
    (
        "train labels.csv --features features --set train.epochs --out new",
        "A change has the form KEY=VALUE, e.g. train.epochs=5, not 'train.epochs'.",
    ),
    (
        "train labels.csv --features features --set target.kind=regresion --out new",
        "recipe: target: There is no target called 'regresion'. Did you mean 'regression'?",
    ),
    (
        "train labels.csv --features features --set target.kind=regression --out new",
        "Slides with a label that is not a number (12): s0 (a), s1 (b), s2 (a), s3 (b), s4",
    ),
    (
        "train labels.csv --features features --set model.token=2 --out new",
        "caprmil has no setting called 'token'. Did you mean 'tokens'?",
    ),
    (
        "train labels.csv --features features --set splits.kind=kfolds --out new",
        "recipe: splits: kind must be 'kfold' or 'random' or 'fixed', not 'kfolds'.",
    ),
    (
        "train labels.csv --features features --folds 2 --set model.start=a/b/gone --out new",
        "[model] start: there is no folder a/b/gone. Pass one",
    ),
    (
        "train labels.csv --features features --epochs 5 --set train.epochs=6 --out new",
        "--epochs and --set train.epochs are one setting. Leave out one.",
    ),
    (
        "train labels.csv --features features --out own",
        "own exists and is not a run. Choose another folder for the new run.",
    ),
    (
        "train labels.csv --features features --folds 2 --out run",
        "run holds a finished run. Choose another folder for the new run.",
    ),
    (
        "sweep labels.csv --features features --out new --set train.lr=1e-4,2e-4 --metric aucc",
        "There is no metric of a classification called 'aucc'. Did you mean 'auc'?",
    ),
    (
        "sweep labels.csv --features features --out new --set train.lr=1e-4",
        "No setting varies. Give one several values, e.g. --set model.tokens=2,4,8.",
    ),
    (
        "sweep labels.csv --features features --out new --lr 1e-4 --set train.lr=1e-4,2e-4",
        "--lr and --set train.lr are one setting. Leave out one.",
    ),
    ("encode nowhere --out new", "There is no slide or folder nowhere. Check its name."),
    (
        "encode notes.txt --out new",
        "failed: notes.txt: notes.txt is neither a slide that OpenSlide can read nor an image",
    ),
    (
        "encode slides --out new --encoder lite1",
        "There is no encoder called 'lite1'. Did you mean 'lite0'?",
    ),
    (
        "encode slides --out new --set patches.pix=3",
        "--set: patches has no setting called 'pix'. Did you mean 'px'?",
    ),
    (
        "encode slides --out new --shard 9/8",
        "--shard must be I/N with I from 1 to N, e.g. 2/8, not '9/8'. Array jobs must count",
    ),
    ("encode images --out new", "failed: scan: images/scan.png has no scale. Pass --slide-mpp"),
    ("predict labels.csv features", "labels.csv is not a run: there is no run.json in it."),
    ("predict own features", "own is not a run: there is no run.json in it."),
    ("predict nowhere features", "nowhere is not a run: there is no run.json in it."),
    (
        "predict format features",
        "format was made by caprmil 0.1.0 in run format 1; this is caprmil 0.1.0, which reads",
    ),
    ("predict run nowhere", "There is no slide or folder nowhere. Check its name."),
    (
        "predict run wide.h5",
        "wide is of 8 features, not 64 as the models of run were trained on. Extract its",
    ),
    (
        "predict run uni.h5",
        "uni is of encoder uni_v1, not synthetic as the models of run were trained on. Extract",
    ),
    ("predict run labels.csv", "labels.csv is a table. Pass slides or bags, or folders of them."),
    (
        "predict run uni.h5 --fold fold-9",
        "There is no fold in run called 'fold-9'. Did you mean 'fold-2'?",
    ),
    (
        "predict run uni.h5 --out labels.csv",
        "labels.csv already exists. Move it away, or choose another name.",
    ),
    (
        "predict run slides",
        "The models of run read features of synthetic, an encoder that caprmil does not have.",
    ),
    ("evaluate nowhere.csv", "There is no file nowhere.csv."),
    (
        "evaluate labels.csv",
        "labels.csv needs a column prob_<class> for each class, or for the labels 0 and 1 a",
    ),
    ("evaluate run --cohort nowhere.csv", "There is no file nowhere.csv."),
    (
        "explain run slide_00",
        "slide_00 is neither a slide of run nor a bag file. Its slides",
    ),
    (
        "explain run slide_000 --map evidense",
        "There is no map called 'evidense'. Did you mean 'evidence'?",
    ),
    (
        "explain run slide_000 --method exakt",
        "There is no method called 'exakt'. Did you mean 'exact'?",
    ),
    (
        "explain run slide_000 --fold fold-9",
        "There is no fold in run called 'fold-9'. Did you mean 'fold-2'?",
    ),
    (
        "explain run slide_000 --implant top:5%",
        "--implant REGION and --into SLIDE belong together, without --method, --head,",
    ),
    (
        "report run slide_99",
        "slide_99 is neither a slide of run nor a bag file. Its slides: slide_000, slide_001,",
    ),
    (
        "report run --fold fold-0",
        "--fold is for reports of slides. The report of a run is about all folds.",
    ),
    (
        "compare run answers.csv",
        "run has the answers prob_normal, prob_tumour, and answers.csv has prob_a, prob_b.",
    ),
    (
        "status own",
        "own holds no bags, run, sweep or reproduction. Name the folder that was --out.",
    ),
    (
        "convert features --to tridnet --out new",
        "There is no format called 'tridnet'. Did you mean 'trident'?",
    ),
    ("init nowhere", "There is no folder nowhere. Pass one of slides or of features."),
    (
        "init own --out own",
        "own has neither features (.h5, .hdf5, .npz, .npy, .pt) nor slides (.svs, .tif, .tiff,",
    ),
    (
        "init features --model abmli --out new",
        "There is no recipe called 'abmli'. Did you mean 'abmil'?",
    ),
    ("export run --to onx", "There is no format called 'onx'. Did you mean 'onnx'?"),
    ("cost --models abmil,claam", "There is no model called 'claam'. Did you mean 'clam'?"),
    ("calibrate own", "own is not a run: there is no run.json in it."),
    ("reproduce pandaa --out new", "There is no protocol called 'pandaa'. Did you mean 'panda'?"),
    ("explain own s0", "own is not a run: there is no run.json in it."),
    (
        "faithfulness run slide_99",
        "slide_99 is neither a slide of run nor a bag file. Its slides",
    ),
]


@pytest.mark.parametrize(("words", "answer"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_answered_by_what_is_wrong_and_what_to_do(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    answer: str,
) -> None:
    """A table is one error with a line for each problem, and here each has only one."""
    monkeypatch.chdir(home)
    with pytest.raises(SystemExit) as end:
        cli.run(split(words))
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(BARS)]
    first, *more = [line for line in lines if line not in FOLLOWING]
    if first.endswith(" cannot be used as it is."):
        first, *more = more
    if more and more[0].startswith("    "):
        first += f" {more.pop(0).strip()}"
    assert first.removeprefix("error: ").removeprefix("- ").startswith(answer)
    assert (end.value.code, more) == (2, [])
    assert not (home / "new" / "run.json").exists()
