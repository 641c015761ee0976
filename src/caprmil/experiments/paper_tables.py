"""The paper's four tables, with a column of ours beside each of the paper's.

A cell is blank where the paper prints nothing or where nothing was run. A number in brackets at a
column of ours refers to the list of sources: the commands, and the bags that were used.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from caprmil.experiments import paper
from caprmil.experiments.cost import Cost
from caprmil.experiments.cost.cost_tables import PAPER_BAG
from caprmil.experiments.gathered_runs import Gathered, GatheredModel
from caprmil.experiments.reproduce import PROTOCOLS
from caprmil.experiments.table_layout import Cell, Column, Line, PaperTable, amount, score, seconds

POOLS = ("caprmil", "caprmil+attention", "caprmil+gated")  # the rows of table 2
METRICS = {"auc": "AUC", "kappa": "kappa", "ace": "ACE"}
TIMED = "camelyon16"  # the cohort of the paper's times and ablations


def make_tables(gathered: Gathered) -> list[PaperTable]:
    """Return tables 1 to 4. What was not run is blank."""
    sources = {n: f"[{n}] {each}" for n, each in enumerate(gathered.sources(), 1)}
    costs = PaperCosts(gathered)
    run = dict.fromkeys(model for models in gathered.models.values() for model in models)
    with_context = [*POOLS, *(m for m in run if m.startswith("caprmil+") and m not in POOLS)]
    first = dict.fromkeys([*(m for m in paper.SCORES if m not in POOLS[1:]), *run])
    others = [model for model in first if model not in with_context[1:]]
    return [
        _scores(gathered, costs, sources, 1, "slide-level performance", others),
        _scores(gathered, costs, sources, 2, "aggregators after the context", with_context),
        _ablations(gathered, sources),
        _times(gathered, costs, sources),
    ]


class PaperCosts:
    """Parameters and FLOPs of ours for the paper's bag, and where they are from."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered = gathered
        width, outputs = PAPER_BAG[1:]
        every = [(table.folder, each) for table in gathered.costs for each in table.costs]
        self.same_width: dict[str, Cost] = {}
        self.same_bag: dict[str, Cost] = {}
        folders = []
        for folder, each in every:
            if (each.in_dim, each.n_outputs) == (width, outputs):
                folders.append(folder)
                self.same_width.setdefault(each.name, each)
                if each.n_patches == PAPER_BAG[0]:
                    self.same_bag.setdefault(each.name, each)
        self.sources = gathered.numbers_of("costs", folders)

    def columns(self, *, flops: bool = True) -> list[Column]:
        heads = [("params (M)", "", "paper"), ("params (M)", "", "ours")]
        if flops:
            ours = [("FLOPs (G)", title, "ours") for title in ("as written", "as computed")]
            heads += [("FLOPs (G)", "", "paper"), *ours]
        return [
            Column(
                group=group,
                title=title,
                whose=whose,
                sources=self.sources if whose == "ours" else (),
            )
            for group, title, whose in heads
        ]

    def cells(
        self, model: str, *, flops: bool = True, gigaflops: Mapping[str, float] = paper.GIGAFLOPS
    ) -> list[Cell]:
        parameters, own = self.parameters(model), self.same_bag.get(model)
        cells = [
            amount(paper.MILLIONS.get(model)),
            amount(None if parameters is None else parameters / 1e6),
        ]
        if flops:
            cells += [
                amount(gigaflops.get(model)),
                amount(own.flops_as_written / 1e9 if own else None),
                amount(own.flops / 1e9 if own else None),
            ]
        return cells

    def parameters(self, model: str) -> int | None:
        """Return the parameters for the paper's width, or else those of a run."""
        if model in self.same_width:
            return self.same_width[model].parameters
        run = self._run(model)
        return run.parameters if run else None

    def _run(self, model: str) -> GatheredModel | None:
        runs = (models[model] for models in self.gathered.models.values() if model in models)
        return next(runs, None)

    def notes(self, models: Iterable[str], *, flops: bool = True) -> Iterator[str]:
        models = list(models)
        if any(model in self.same_width for model in models):
            what = "Parameters and FLOPs" if flops else "Parameters"
            patches = f", FLOPs for a bag of {PAPER_BAG[0]:,} patches" if flops else ""
            yield f"{what} of ours are for {PAPER_BAG[1]:,} features and two classes{patches}."
        if flops and any(model in self.same_bag for model in models):
            yield (
                "FLOPs as written: of the model's equations. As computed: of the same result with "
                "matrix products in a cheaper order."
            )
        of_runs = [m for m in models if m not in self.same_width and self._run(m)]
        if of_runs:
            runs = [run for run in map(self._run, of_runs) if run]
            widths = " and ".join(f"{width:,}" for width in sorted({r.bags.width for r in runs}))
            yield (
                f"Parameters of {', '.join(of_runs)} are those of the runs, for {widths} features: "
                "no cost table has them."
            )


def _scores(
    gathered: Gathered,
    costs: PaperCosts,
    sources: Mapping[int, str],
    number: int,
    title: str,
    models: Sequence[str],
) -> PaperTable:
    """Return table 1 or 2: two metrics of each cohort, parameters and FLOPs."""
    columns = []
    for protocol, metric in paper.COLUMNS:
        cohort, title_of = PROTOCOLS[protocol].title, METRICS[metric]
        own = [each for name, each in gathered.models.get(protocol, {}).items() if name in models]
        numbers = gathered.numbers_of("reproduction", {each.folder for each in own})
        columns += [
            Column(group=cohort, title=title_of, whose="paper"),
            Column(group=cohort, title=title_of, whose="ours", sources=numbers),
        ]
    flops = number == 1
    columns += costs.columns(flops=flops)
    rows = []
    for model in models:
        cells = []
        for protocol, metric in paper.COLUMNS:
            run = gathered.models.get(protocol, {}).get(model)
            cells.append(score(paper.SCORES.get(model, {}).get((protocol, metric))))
            cells.append(score(run.scores.get(metric) if run else None))
        rows.append(Line((model,), (*cells, *costs.cells(model, flops=flops))))
    notes = ["Mean and sample standard deviation over folds or seeds."]
    notes += [
        f"{PROTOCOLS[protocol].title}: {PROTOCOLS[protocol].remark}"
        for protocol in gathered.models
        if PROTOCOLS[protocol].remark
    ]
    notes += costs.notes(models, flops=flops)
    return PaperTable(
        number=number,
        title=title,
        labels=("model",),
        columns=columns,
        rows=rows,
        notes=notes,
        sources=_used(columns, sources),
    )


def _ablations(gathered: Gathered, sources: Mapping[int, str]) -> PaperTable:
    """Return table 3: clusters, heads and MLP ratio of CAPRMIL on CAMELYON16."""
    found: dict[paper.Ablation, dict[str, Cell]] = {}
    folders, notes = [], []
    for sweep in gathered.sweeps:
        for each in sweep.results.points:
            if each.published is None or not each.mean("test", "auc").counted:
                continue
            if each.published in found:
                notes.append(f"{each.point.name} is in several sweeps; the first one is shown.")
                continue
            means = {m: each.mean("test", m) for m in ("auc", "ace")}
            scores = {m: paper.Figure(spread.mean, spread.std) for m, spread in means.items()}
            found[each.published] = _ablation(scores, each.parameters)
            folders.append(sweep.folder)
    numbers = gathered.numbers_of("sweep", folders)
    for run in gathered.models.get(TIMED, {}).values():
        if run.published and run.published not in found:
            found[run.published] = _ablation(run.scores, run.parameters)
            numbers = (*gathered.numbers_of("reproduction", [run.folder]), *numbers)
    columns = [
        Column(group=title, title="", whose=whose, sources=numbers if whose == "ours" else ())
        for title in ("AUC", "ACE", "params (M)")
        for whose in ("paper", "ours")
    ]
    rows = []
    for row in paper.ABLATIONS:
        ours, theirs = found.get(row, {}), _ablation({"auc": row.auc, "ace": row.ace}, None)
        theirs["parameters"] = amount(row.millions)
        cells = [cell for name in theirs for cell in (theirs[name], ours.get(name, Cell()))]
        rows.append(Line((str(row.tokens), str(row.heads), str(row.mlp_ratio)), tuple(cells)))
    notes.insert(0, "Test parts, mean and sample standard deviation over folds.")
    notes.append("The paper's rows are CAMELYON16: ours can be compared on that cohort only.")
    return PaperTable(
        number=3,
        title="clusters, heads and MLP ratio",
        labels=("clusters", "heads", "MLP ratio"),
        columns=columns,
        rows=rows,
        notes=notes,
        sources=_used(columns, sources),
    )


def _ablation(scores: Mapping[str, paper.Figure], parameters: int | None) -> dict[str, Cell]:
    return {
        "auc": score(scores.get("auc")),
        "ace": score(scores.get("ace")),
        "parameters": amount(None if parameters is None else parameters / 1e6),
    }


def _times(gathered: Gathered, costs: PaperCosts, sources: Mapping[int, str]) -> PaperTable:
    """Return table 4: seconds and memory in training, on CAMELYON16 first."""
    timed = {
        protocol: [m for m in models.values() if m.epoch_seconds or m.test_seconds]
        for protocol, models in gathered.models.items()
    }
    folders = {each.folder for own in timed.values() for each in own}
    numbers = gathered.numbers_of("reproduction", folders)
    heads = {"training": "s per epoch", "inference": "s per test set"}
    columns = [
        Column(group=group, title=unit, whose=whose, sources=numbers if whose == "ours" else ())
        for group, unit in heads.items()
        for whose in ("paper", "ours")
    ]
    memory = numbers if any(m.peak_mib for own in timed.values() for m in own) else ()
    columns.append(Column(group="peak memory", title="MiB", whose="ours", sources=memory))
    columns += costs.columns()
    rows, notes = [], []
    for protocol in dict.fromkeys([TIMED, *timed]):
        own = {each.model: each for each in timed.get(protocol, [])}
        in_paper = paper.SECONDS if protocol == TIMED else {}
        for model in dict.fromkeys([*in_paper, *own]):
            run, theirs = own.get(model), in_paper.get(model)
            cells = [
                amount(theirs.training if theirs else None, decimals=1),
                seconds(run.epoch_seconds if run else None),
                amount(theirs.inference if theirs else None, decimals=1),
                seconds(run.test_seconds if run else None),
                amount(run.peak_mib if run else None, decimals=1),
                *costs.cells(model, gigaflops=paper.GIGAFLOPS_OF_TIMES),
            ]
            rows.append(Line((PROTOCOLS[protocol].title, model), tuple(cells)))
    notes.append(
        "The paper's times are of one A100 and a test set of 129 slides. Ours are means over all "
        "epochs of all folds, without validation, and over the test parts of the folds; bags are "
        "read in this time, from the disk or from the cache."
    )
    if folders and not memory:
        notes.append(
            "Peak memory is that of torch's allocator on a GPU, as a mean over epochs. These runs "
            "were trained on a CPU, which has no such counter."
        )
    elif memory:
        notes.append("Peak memory: torch's allocator in an epoch, as a mean over epochs and folds.")
    untimed = [m.model for models in gathered.models.values() for m in models.values()]
    untimed = [m for m in untimed if not any(m == e.model for own in timed.values() for e in own)]
    if untimed:
        notes.append(f"Trained before times were stored: {', '.join(dict.fromkeys(untimed))}.")
    notes += costs.notes(dict.fromkeys(row.labels[1] for row in rows))
    return PaperTable(
        number=4,
        title="time and memory",
        labels=("cohort", "model"),
        columns=columns,
        rows=rows,
        notes=notes,
        sources=_used(columns, sources),
    )


def _used(columns: Iterable[Column], sources: Mapping[int, str]) -> list[str]:
    """Return the sources that the columns refer to."""
    return [sources[n] for n in sorted({n for column in columns for n in column.sources})]
