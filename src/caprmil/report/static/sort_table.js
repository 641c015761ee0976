// Tables that are sorted by a click on a heading. Cells with data-value are sorted as numbers.
"use strict";

function sortable(table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];

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
    rows.sort((first, second) => {
      const [a, b] = [sortKey(first, column), sortKey(second, column)];
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    });
    body.append(...rows);
  }

  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sortBy(heading));
    heading.replaceChildren(button);
  }
}
