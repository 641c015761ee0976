// What scrolls sideways, or in a box, can be scrolled with the keyboard: it gets the focus, and the name of its section.
"use strict";

(() => {
  function update(box) {
    const scrolls = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
    if (scrolls === box.hasAttribute("tabindex")) return;
    if (!scrolls) return ["tabindex", "role", "aria-label"].forEach((name) => box.removeAttribute(name));
    const title = box.closest("section, article, main")?.querySelector("h2, h3")?.textContent.trim() ?? "Table";
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `${title}, scrolls`);
  }

  const watch = new ResizeObserver((entries) => entries.forEach(({ target }) => update(target)));
  for (const box of document.querySelectorAll(".wide, .slides, .atlas-figure, pre")) watch.observe(box);
})();
