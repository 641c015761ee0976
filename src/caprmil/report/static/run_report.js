// The script of a run report: sorts and filters the table of all slides.
"use strict";

(() => {
  const MOST = 500; // rows that are shown before "show all": a browser lays out 10,000 in seconds
  const table = document.getElementById("slides");
  const search = document.getElementById("search");
  const markedOnly = document.getElementById("marked");
  const shown = document.getElementById("shown");
  const more = document.getElementById("more");
  let rows = [...table.tBodies[0].rows]; // in order
  let most = MOST;
  const texts = new Map(rows.map((row) => [row, `${row.textContent} ${row.dataset.names ?? ""}`.toLowerCase()]));
  const number = (n) => n.toLocaleString("en");

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => (!markedOnly.checked || row.classList.contains("marked")) && words.every((word) => texts.get(row).includes(word));
    const found = rows.filter(matches);
    const first = found.slice(0, most);
    fill(table, first);
    more.hidden = first.length === found.length;
    more.textContent = `Show all ${number(found.length)}`;
    const part = more.hidden ? "shown" : `found, the first ${number(first.length)} shown`;
    shown.textContent = `${number(found.length)} of ${number(rows.length)} ${part}`;
  }

  sortable(table, (sorted) => ((rows = sorted), show()));
  search.addEventListener("input", show);
  markedOnly.addEventListener("change", show);
  more.addEventListener("click", () => ((most = Infinity), show()));
  addEventListener("beforeprint", () => ((most = Infinity), show()));
  if (rows.length > MOST) show();
})();
