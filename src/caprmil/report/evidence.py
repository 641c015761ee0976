"""Evidence for and against a class: the sum that a lead is made of, and the patches in it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caprmil.explain import TOP, Case, Explanation, top_patches
from caprmil.report import charts
from caprmil.report.answer import predicted
from caprmil.report.page import EMPTY, Html, fill, join, tag
from caprmil.report.pictures import Album
from caprmil.report.words import RESTS, count, how, part, percent, signed

MOST_CLASSES = 4  # of which the evidence is shown


@dataclass(frozen=True, eq=False, kw_only=True)
class Ledger:
    """A class's lead over the mean of the others, as a sum: rest, what is for it, and against."""

    terms: NDArray[np.float64]  # (N,)
    rest: float
    lead: float  # of the model's own logits

    @classmethod
    def of(cls, told: Explanation, number: int) -> "Ledger":
        return cls(
            terms=told.towards(number).astype(np.float64),
            rest=_lead(told.rest, number),
            lead=_lead(told.logits, number),
        )

    @property
    def plus(self) -> float:
        return float(self.terms[self.terms > 0].sum())

    @property
    def minus(self) -> float:
        return float(self.terms[self.terms < 0].sum())

    @property
    def gap(self) -> float:
        """What is missing to the lead of the model's own logits."""
        return self.lead - (self.rest + self.plus + self.minus)

    def half(self, sign: int = 1) -> int:
        """Return how few patches make up half of all that is for the class, or against it."""
        ordered = np.sort((sign * self.terms).clip(min=0))[::-1]
        if not ordered.sum():
            return 0
        return int(np.searchsorted(np.cumsum(ordered), ordered.sum() / 2)) + 1

    def top(self, sign: int = 1) -> list[int]:
        """Return the patches that say most for the class, or against it."""
        best = top_patches(sign * self.terms, TOP)
        return [int(row) for row in best if sign * self.terms[row] > 0]


def _lead(values: NDArray[np.floating], of: int) -> float:
    whole = values.astype(np.float64)
    return float((whole[of] * len(whole) - whole.sum()) / (len(whole) - 1))


def shown(case: Case) -> list[int]:
    """Return the classes to show: of two the predicted one, else the likeliest few."""
    if len(case.explanation.classes) == 2:
        return [predicted(case)]  # the other's evidence is the same with the sign turned
    order = np.argsort(-case.answer.probabilities, kind="stable")
    return [int(number) for number in order[:MOST_CLASSES]]


def choose(case: Case, album: Album) -> None:
    """Ask for the pictures that these sections need."""
    ledgers = [Ledger.of(case.explanation, number) for number in shown(case)]
    album.choose([ledger.top(sign) for ledger in ledgers for sign in (1, -1)], TOP)


def section(case: Case, album: Album) -> Html:
    """Return the evidence of the predicted class and, of more than two, of the next likely."""
    told = case.explanation
    first, *others = shown(case)
    more = [
        tag(
            "details",
            tag("summary", f"Evidence for {told.classes[number]}"),
            _one(told, number, album),
        )
        for number in others
    ]
    left = len(told.classes) - 1 - len(others)
    terms = told.towards(first)
    if len(told.classes) == 2:
        other = told.classes[1 - first]
        remark = f"What speaks against {told.classes[first]} speaks for {other}, and by as much."
    else:
        remark = "Evidence is for the lead of a class over the mean of the others."
        remark += f" {count(left, 'less likely class')}: on the map alone." if left else ""
    if (terms > 0).all() or (terms < 0).all():
        remark += (
            " All patches speak for one side: on the map, “above the slide’s mean” shows which "
        )
        remark += "do so more than others."
    return fill(
        "evidence.html",
        name=told.classes[first],
        how=how(told),
        first=_one(told, first, album),
        others=join(more),
        remark=remark,
    )


def _one(told: Explanation, number: int, album: Album) -> Html:
    ledger, name = Ledger.of(told, number), told.classes[number]
    return join(
        [
            tag("p", few(ledger, name), class_="few"),
            _table(told, number, ledger),
            tag("div", *(_side(ledger, name, sign, album) for sign in (1, -1)), class_="sides"),
        ]
    )


def few(ledger: Ledger, name: str) -> Html:
    """Return in a sentence how few patches it takes to half of what is for the class."""
    whole, half = len(ledger.terms), ledger.half()
    if not half:
        return join(["No patch speaks for ", tag("b", name), "."])
    need = f"{half:,} of {count(whole, 'patch')}"
    carry = "carries" if half == 1 else "carry"
    return join(
        [tag("b", need), f" ({part(half / whole)}) {carry} half of all evidence for ", name, "."]
    )


def _table(told: Explanation, number: int, ledger: Ledger) -> Html:
    name = told.classes[number]
    ahead = int((ledger.terms > 0).sum())
    behind = int((ledger.terms < 0).sum())
    total = ledger.rest + ledger.plus + ledger.minus
    high = ledger.rest + ledger.plus
    rows = [
        (RESTS[told.method], ledger.rest, "rest"),
        (f"{count(ahead, 'patch')} for {name}", ledger.plus, "plus"),
        (f"{count(behind, 'patch')} against", ledger.minus, "minus"),
        (_lead_words(told, number), total, "lead"),
    ]
    bars = charts.steps([(0.0, ledger.rest), (ledger.rest, high), (high, total), (0.0, total)])
    cells = []
    for (words, value, kind), bar in zip(rows, bars, strict=True):
        drawn, told_value = tag("td", bar), tag("td", signed(value), data_value=repr(value))
        cells.append(tag("tr", tag("th", words, scope="row"), told_value, drawn, class_=kind))
    return fill(
        "ledger.html",
        rows=join(cells),
        number=number,
        gap=f"{abs(ledger.gap):.1e}",
        exact_gap=repr(ledger.gap),
        meaning=_meaning(told, total),
    )


def _lead_words(told: Explanation, number: int) -> str:
    others = [name for code, name in enumerate(told.classes) if code != number]
    over = others[0] if len(others) == 1 else "the mean of the others"
    return f"= lead of {told.classes[number]} over {over}"


def _meaning(told: Explanation, lead: float) -> str:
    """Return the probability that a lead is, where it is one: two classes, and no estimate."""
    estimated = told.method == "integrated gradients" or told.spread is not None
    if len(told.classes) > 2 or estimated:
        return ""
    sure = 1 / (1 + np.exp(-lead))
    return f" A lead of {signed(lead)} is a probability of {percent(float(sure))}."


def _side(ledger: Ledger, name: str, sign: int, album: Album) -> Html:
    patches, word = ledger.top(sign), f"{'For' if sign > 0 else 'Against'} {name}"
    whole = ledger.plus if sign > 0 else ledger.minus
    if not patches:
        body, share = tag("p", f"No patch speaks {word.lower()}.", class_="quiet"), EMPTY
    else:
        shares = [float(ledger.terms[row]) / whole for row in patches]
        captions = [
            (part(own), signed(float(ledger.terms[row])))
            for row, own in zip(patches, shares, strict=True)
        ]
        body = album.gallery(patches, captions)
        words = f"{part(sum(shares))} of it in these {len(patches)}"
        share = tag("small", words)
    kind = "for" if sign > 0 else "against"
    return tag("div", tag("h3", word, " ", share), body, class_=f"side {kind}")
