// The list of slides: search, filter, sort, and which slide is open.
import { LIST_ORDERS, listFilters, listText, newPrediction } from "./class_parts.js";
import { $, count, el } from "./dom.js";

const AT_ONCE = 2; // a browser has six connections to a server, and the open slide needs most of them

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

const ORDERS = [
  ["run", "as in the run", null],
  ["name", "by name", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })],
  ...LIST_ORDERS,
];

export class SlideList {
  constructor(run, slides, { open }) {
    this.slides = slides;
    this.open = open;
    this.thumbnails = new Thumbnails();
    this.items = new Map(slides.map((slide) => [slide.id, this.#item(slide)]));
    this.filters = listFilters(run, slides);
    $("filter").append(...this.filters.map(([value, text]) => el("option", { value, text })));
    $("sort").append(...ORDERS.map(([value, text]) => el("option", { value, text })));
    for (const id of ["filter", "sort"]) $(id).addEventListener("change", () => this.show());
    $("search").addEventListener("input", () => this.show());
    this.show();
  }

  #item(slide) {
    const picture = slide.pixels
      ? el("img", { data: { src: `api/slides/${slide.id}/thumbnail.jpg` }, alt: "", width: 52, height: 44 })
      : el("span", { class: "no-picture grid" });
    if (slide.pixels) this.thumbnails.observer.observe(picture);
    const { verdict, prediction, label } = listText(slide);
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
    return el("li", { data: { id: slide.id } }, button);
  }

  /** Return the slides that match the search and the filter, in order. */
  get visible() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [, , matches] = this.filters.find(([value]) => value === $("filter").value);
    const [, , compare] = ORDERS.find(([value]) => value === $("sort").value);
    const found = this.slides.filter((slide) => words.every((word) => slide.name.toLowerCase().includes(word)) && matches(slide));
    return compare ? found.sort(compare) : found;
  }

  show() {
    const { visible } = this;
    $("list").replaceChildren(...visible.map((slide) => this.items.get(slide.id)));
    $("count").textContent = visible.length ? count(visible.length, "slide") : "No slide matches.";
  }

  /** Add the prediction of a slide that the run had not predicted. */
  update(facts) {
    const slide = this.slides.find((each) => each.id === facts.id);
    if (slide.predicted !== null) return;
    Object.assign(slide, newPrediction(facts));
    const old = this.items.get(slide.id);
    this.items.set(slide.id, this.#item(slide));
    old.replaceWith(this.items.get(slide.id));
    this.mark(slide.id);
  }

  /** Mark the slide that is open. */
  mark(id) {
    for (const [key, item] of this.items) {
      const button = item.firstChild;
      if (key === id) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    this.items.get(id)?.scrollIntoView({ block: "nearest" });
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
