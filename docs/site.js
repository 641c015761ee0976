// Tables that scroll sideways get the keyboard's focus and a name.
const mark = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const scrolls = box.scrollWidth > box.clientWidth;
    if (scrolls) for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", "Table"]]) box.setAttribute(name, value);
    else for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
  }
};
addEventListener("load", () => {
  new ResizeObserver(mark).observe(document.body);
  new MutationObserver(mark).observe(document.querySelector("article"), { childList: true, subtree: true });
  mark();
});
