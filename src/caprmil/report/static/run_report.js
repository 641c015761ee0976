// The script of a run report: sorts and filters the table of all slides.
"use strict";

(() => {
  const table = document.getElementById("slides");
  const rows = [...table.tBodies[0].rows];
  const search = document.getElementById("search");
  const markedOnly = document.getElementById("marked");
  const shown = document.getElementById("shown");

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

  sortable(table);
  search.addEventListener("input", filter);
  markedOnly.addEventListener("change", filter);
})();
