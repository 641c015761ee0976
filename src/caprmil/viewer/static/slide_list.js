// The list of slides: search, filter, sort, and which slide is open.
import { $, count, el } from "./dom.js";
import { parts } from "./parts.js";

const ALL = 300; // longer lists have only the rows near those in view in the page
const MARGIN = 30; // rows above and below them
const AT_ONCE = 2; // a browser has six connections to a server, and the open slide needs most of them

const byName = new Intl.Collator("en", { numeric: true });

/** Loads the thumbnails in view, a few at a time, and none while a slide is being opened. */
class Thumbnails {
  constructor() {
    this.wanted = new Set();
    [this.paused, this.running] = [true, 0];
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.wanted[isIntersecting ? "add" : "delete"](target);
      this.#load();
    });
  }

  pause(paused) {
    this.paused = paused;
    this.#load();
  }

  #load() {
    for (const image of this.paused ? [] : this.wanted) {
      if (this.running >= AT_ONCE) return;
      this.wanted.delete(image);
      this.observer.unobserve(image);
      this.running += 1;
      image.onload = () => this.#done();
      image.onerror = () => (image.replaceWith(el("span", { class: "no-picture", text: "?" })), this.#done());
      image.src = image.dataset.src;
    }
  }

  #done() {
    this.running -= 1;
    this.#load();
  }
}

/** Return the filters of the list: [value, text, test of a slide]. */
function filtersOf(slides) {
  const groups = [...new Set(slides.map((slide) => slide.group).filter((group) => group !== null))];
  const filters = [
    ["all", "all", () => true],
    ...parts.filters(slides),
    ...parts.sortGroups(groups, slides).map((name) => [`group:${name}`, name, (slide) => slide.group === name]),
  ];
  return filters.map(([value, text, test]) => [value, `${text} (${slides.filter(test).length})`, test]);
}

export class SlideList {
  constructor(slides, { open, unit = "slide" }) {
    [this.slides, this.unit] = [slides, unit];
    this.orders = [
      ["run", "as in the run", null],
      ["name", "by name", (a, b) => byName.compare(a.name, b.name)],
      ...parts.orders,
    ];
    this.open = open;
    this.thumbnails = new Thumbnails();
    this.words = new Map(slides.map((slide) => [slide.id, [slide.name, ...slide.names].join(" ").toLowerCase()]));
    this.items = new Map(); // made when they are first in view
    this.height = 64; // of a row, until one is in view
    this.filters = filtersOf(slides);
    $("filter").append(...this.filters.map(([value, text]) => el("option", { value, text })));
    $("sort").append(...this.orders.map(([value, text]) => el("option", { value, text })));
    for (const id of ["filter", "sort"]) $(id).addEventListener("change", () => this.show());
    $("search").addEventListener("input", () => this.show());
    $("list").addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe($("list"));
    this.show();
  }

  #item(slide) {
    const picture = slide.pixels
      ? el("img", { data: { src: `api/slides/${slide.id}/thumbnail.jpg` }, alt: "", width: 52, height: 44 })
      : el("span", { class: "no-picture grid" });
    if (slide.pixels) this.thumbnails.observer.observe(picture);
    const { verdict, prediction, label } = this.#text(slide);
    const button = el(
      "button",
      { on: { click: () => this.open(slide.id) }, title: slide.problem ?? slide.name },
      picture,
      el(
        "span",
        { class: "words" },
        el("b", { text: slide.name }),
        el("span", { class: `verdict ${verdict}`, text: prediction }),
        el("span", { class: "quiet", text: label }),
      ),
    );
    if (slide.id === this.current) button.setAttribute("aria-current", "true");
    return el("li", { data: { id: slide.id } }, button);
  }

  #itemOf(slide) {
    if (!this.items.has(slide.id)) this.items.set(slide.id, this.#item(slide));
    return this.items.get(slide.id);
  }

  /** Return the text of a slide: its prediction, its label, and "right", "wrong" or "". */
  #text(slide) {
    const known = slide.label === null ? "no label" : `label: ${parts.labelText(slide.label)}`;
    const label = this.unit === "slide" && slide.names.length ? `${known} · ${slide.names[0]}` : known;
    if (slide.problem) return { verdict: "", label, prediction: "its bag is missing" };
    if (slide.predicted === null) return { verdict: "", label, prediction: "not predicted yet" };
    return { label, ...parts.listText(slide) };
  }

  /** Return the slides that match the search and the filter, in order. */
  #find() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [, , matches] = this.filters.find(([value]) => value === $("filter").value);
    const [, , compare] = this.orders.find(([value]) => value === $("sort").value);
    const found = this.slides.filter((slide) => words.every((word) => this.words.get(slide.id).includes(word)) && matches(slide));
    return compare ? found.sort(compare) : found;
  }

  show() {
    this.visible = this.#find();
    this.#draw();
    $("count").textContent = this.visible.length ? count(this.visible.length, this.unit) : `No ${this.unit} matches.`;
  }

  /** Return the first row of the list in the page, and the one after the last. */
  #range() {
    const { length } = this.visible;
    if (length <= ALL) return [0, length];
    const list = $("list");
    const top = Math.floor(Math.min(list.scrollTop, length * this.height) / this.height);
    return [Math.max(top - MARGIN, 0), Math.min(top + Math.ceil(list.clientHeight / this.height) + MARGIN, length)];
  }

  /** Put the rows near those in view into the page; the list is as long as if all were there. */
  #draw() {
    const list = $("list");
    const [first, end] = this.#range();
    const rows = this.visible.slice(first, end).map((slide) => this.#itemOf(slide));
    const wanted = new Set(rows);
    for (const row of [...list.children]) if (!wanted.has(row)) row.remove();
    rows.forEach((row, n) => {
      row.setAttribute("aria-setsize", this.visible.length);
      row.setAttribute("aria-posinset", first + n + 1);
      if (list.children[n] !== row) list.insertBefore(row, list.children[n] ?? null); // what has the focus stays
    });
    // The Tab key visits one row, the open slide; arrows move on from there.
    const stop = rows.find((row) => row.dataset.id === String(this.current)) ?? rows[0];
    for (const row of rows) row.firstChild.tabIndex = row === stop ? 0 : -1;
    this.height = rows[0]?.offsetHeight || this.height;
    list.style.setProperty("--above", `${first * this.height}px`);
    list.style.setProperty("--below", `${(this.visible.length - end) * this.height}px`);
  }

  /** Add the prediction of a slide that the run had not predicted. */
  update(facts) {
    const slide = this.slides.find((each) => each.id === facts.id);
    if (slide.predicted !== null) return;
    const { mean } = facts.answer;
    Object.assign(slide, { answer: mean, predicted: parts.predicted(mean) });
    const old = this.items.get(slide.id);
    const focused = old?.contains(document.activeElement);
    this.items.set(slide.id, this.#item(slide));
    old?.replaceWith(this.items.get(slide.id));
    this.#draw();
    if (focused) this.items.get(slide.id).firstChild.focus();
  }

  /** Mark the slide that is open. If a row has the focus, that of the slide gets it. */
  mark(id) {
    const focused = $("list").contains(document.activeElement);
    this.items.get(this.current)?.firstChild.removeAttribute("aria-current");
    this.current = id;
    this.items.get(id)?.firstChild.setAttribute("aria-current", "true");
    const index = this.visible.findIndex((slide) => slide.id === id);
    if (index < 0) return;
    const [first, end] = this.#range();
    if (index < first || index >= end) $("list").scrollTop = index * this.height;
    this.#draw();
    this.items.get(id).scrollIntoView({ block: "nearest" });
    if (focused) this.items.get(id).firstChild.focus({ preventScroll: true });
  }

  /** Return the id of the slide `step` rows below another one in the visible list. */
  neighbour(id, step) {
    const { visible } = this;
    if (!visible.length) return null;
    const index = visible.findIndex((slide) => slide.id === id);
    const next = index < 0 ? 0 : Math.min(Math.max(index + step, 0), visible.length - 1);
    return visible[next].id;
  }
}
