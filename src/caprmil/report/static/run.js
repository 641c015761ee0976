// The table of all slides: sorted by a click on a column, and filtered.
"use strict";

(() => {
  const table = document.getElementById("slides");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const search = document.getElementById("search");
  const wrong = document.getElementById("wrong");
  const counted = document.getElementById("counted");

  function key(row, column) {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  }

  function sort(heading) {
    const column = heading.cellIndex;
    const turned = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", turned);
    const sign = turned === "ascending" ? 1 : -1;
    rows.sort((one, other) => {
      const [a, b] = [key(one, column), key(other, column)];
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    });
    body.append(...rows);
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = (wrong.checked && !row.classList.contains("wrong")) || !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    counted.textContent = `${shown} of ${rows.length} shown`;
  }

  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(heading));
    heading.replaceChildren(button);
  }
  search.addEventListener("input", filter);
  wrong.addEventListener("change", filter);
})();
