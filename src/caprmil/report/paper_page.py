"""The paper's tables and plots with our numbers: one page, and each table and plot as a file.

index.html
tables/table1.md, table1.tex, ..., table4.tex
figures/NAME.png, NAME.svg
"""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from caprmil import figures
from caprmil.experiments.gathered_runs import Gathered, Source
from caprmil.experiments.paper_figures import Drawn, draw_bubbles, draw_grids
from caprmil.experiments.paper_tables import make_tables
from caprmil.experiments.table_layout import PaperTable
from caprmil.io.atomic import write_text
from caprmil.io.new_files import new_files
from caprmil.report.html_page import page, render
from caprmil.report.report_files import INDEX

TABLES, FIGURES = "tables", "figures"


def write_paper(gathered: Gathered, out: Path) -> list[Path]:
    """Write the page, the tables and the plots, and return their paths. Nothing is overwritten."""
    tables = make_tables(gathered)
    bubbles, grids = draw_bubbles(gathered), draw_grids(gathered)
    texts = {f"{TABLES}/table{each.number}.md": each.as_markdown() for each in tables}
    texts |= {f"{TABLES}/table{each.number}.tex": each.as_latex() for each in tables}
    pictures = {
        f"{FIGURES}/{each.name}.{suffix}": each
        for each in [*bubbles, *grids]
        for suffix in ("png", "svg")
    }
    with new_files(out, (INDEX, *texts, *pictures)) as folder:
        texts[INDEX] = paper_page(gathered, tables, bubbles, grids)
        for name, drawn in pictures.items():
            figures.save(drawn.figure, folder / name)
        for name, text in texts.items():
            write_text(folder / name, text)
    return [out / name for name in (*texts, *pictures)]


def paper_page(
    gathered: Gathered,
    tables: Sequence[PaperTable],
    bubbles: Sequence[Drawn],
    grids: Sequence[Drawn],
) -> str:
    """Return the page."""
    sources = gathered.sources()
    sections = [
        render("paper_sources.html", sources=_rows(sources), notes=gathered.notes),
        *(_table(each) for each in tables),
        _figures("Memory, time and accuracy", bubbles, layout="figures"),
        _figures("Ablations", grids, layout="figure-list"),
    ]
    return page(
        "paper_page.html",
        title="The paper's tables",
        name="The paper's tables, and ours",
        scripts=(),
        sections=sections,
        generated=any(each.generated for each in sources),
    )


def _rows(sources: Sequence[Source]) -> list[dict[str, object]]:
    return [
        {
            "title": each.title,
            "content": each.content,
            "bags": str(each.bags).removeprefix("generated, ") if each.bags else "",
            "generated": each.generated,
            "commands": each.commands,
        }
        for each in sources
    ]


def _table(table: PaperTable) -> Markup:
    return render(
        "paper_table.html",
        table=table,
        heads=[table.head_spans(level) for level in table.head_levels],
    )


def _figures(title: str, drawn: Sequence[Drawn], *, layout: str) -> Markup:
    shown = [
        {
            "title": f"{each.title} {_references(each.sources)}".strip(),
            "remark": each.remark,
            "svg": Markup(figures.as_svg(each.figure, alt=each.title)),
        }
        for each in drawn
    ]
    return render("paper_figures.html", title=title, figures=shown, layout=layout)


def _references(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]" if numbers else ""
