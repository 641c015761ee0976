// Tables that are sorted by a click on a heading. Cells with data-value are sorted as numbers. `show` gets the sorted rows.
"use strict";

const byText = new Intl.Collator(undefined, { numeric: true }).compare;

/** Show these rows in a table. In a new body: with 10,000 rows, to move them within a body takes seconds. */
function fill(table, rows) {
  const body = document.createElement("tbody");
  for (const row of rows) body.append(row);
  table.tBodies[0].replaceWith(body);
}

function sortable(table, show = (rows) => fill(table, rows)) {
  const rows = [...table.tBodies[0].rows];

  function sortKey(row, column) {
    const cell = row.cells[column];
    if (cell.dataset.value === undefined) return cell.textContent;
    const value = Number(cell.dataset.value);
    return Number.isNaN(value) ? -Infinity : value; // a number that is not known
  }

  function sortBy(heading) {
    const column = heading.cellIndex;
    const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const keys = new Map(rows.map((row) => [row, sortKey(row, column)])); // read once: tables may have 10,000 rows
    rows.sort((first, second) => {
      const [a, b] = [keys.get(first), keys.get(second)];
      return sign * (typeof a === "number" ? a - b : byText(a, b));
    });
    show(rows);
  }

  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sortBy(heading));
    heading.replaceChildren(button);
  }
}
