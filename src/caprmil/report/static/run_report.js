// The script of a run report: sorts and filters the table of all slides.
"use strict";

(() => {
  const table = document.getElementById("slides");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = document.getElementById("search");
  const markedOnly = document.getElementById("marked");
  const shown = document.getElementById("shown");

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

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = (markedOnly.checked && !row.classList.contains("marked")) || !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    shown.textContent = `${count} of ${rows.length} shown`;
  }

  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sortBy(heading));
    heading.replaceChildren(button);
  }
  search.addEventListener("input", filter);
  markedOnly.addEventListener("change", filter);
})();
