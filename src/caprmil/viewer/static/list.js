// The list of slides: search, filter, sort, and which one is open.
import { $, count, el, percent } from "./dom.js";

const AT_ONCE = 2; // a browser has six connections to a server, and the slide that is open comes first

/** Loads pictures that are in view, a few at a time, and none while a slide is being opened. */
class Thumbnails {
  constructor() {
    this.wanted = new Set();
    [this.held, this.running] = [true, 0];
    this.watch = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.wanted[isIntersecting ? "add" : "delete"](target);
      this.pump();
    });
  }

  hold(held) {
    this.held = held;
    this.pump();
  }

  pump() {
    for (const image of this.held ? [] : this.wanted) {
      if (this.running >= AT_ONCE) return;
      this.wanted.delete(image);
      this.watch.unobserve(image);
      this.running += 1;
      image.onload = () => this.#done();
      image.onerror = () => (image.replaceWith(el("span", { class: "no-picture", text: "?" })), this.#done());
      image.src = image.dataset.src;
    }
  }

  #done() {
    this.running -= 1;
    this.pump();
  }
}

export class List {
  constructor(classes, slides, { open }) {
    this.slides = slides;
    this.classes = classes;
    this.open = open;
    this.thumbnails = new Thumbnails();
    this.items = new Map(slides.map((slide) => [slide.id, this.#item(slide)]));
    const mistakes = slides.filter((slide) => slide.right === false).length;
    const options = [["all", `all (${slides.length})`], ["mistakes", `mistakes (${mistakes})`]];
    for (const name of classes) {
      const n = slides.filter((slide) => slide.label === name).length;
      options.push([`class:${name}`, `${name} (${n})`]);
    }
    $("filter").append(...options.map(([value, text]) => el("option", { value, text })));
    for (const id of ["filter", "sort"]) $(id).addEventListener("change", () => this.show());
    $("search").addEventListener("input", () => this.show());
    this.show();
  }

  #item(slide) {
    const sure = slide.probabilities ? Math.max(...slide.probabilities) : null;
    const picture = slide.pixels
      ? el("img", { data: { src: `api/slides/${slide.id}/thumbnail.jpg` }, alt: "", width: 52, height: 44 })
      : el("span", { class: "no-picture grid" });
    if (slide.pixels) this.thumbnails.watch.observe(picture);
    const verdict = slide.right === null ? "" : slide.right ? "right" : "wrong";
    const said = slide.problem
      ? "its bag is gone"
      : slide.predicted === null
        ? "not answered yet"
        : `${verdict === "wrong" ? "✗ " : verdict === "right" ? "✓ " : ""}${slide.predicted} ${percent(sure)}`;
    const button = el(
      "button",
      { on: { click: () => this.open(slide.id) }, title: slide.problem ?? slide.name },
      picture,
      el(
        "span",
        { class: "words" },
        el("b", { text: slide.name }),
        el("span", { class: `verdict ${verdict}`, text: said }),
        el("span", { class: "quiet", text: slide.label === null ? "no label" : `label: ${slide.label}` }),
      ),
    );
    return el("li", { data: { id: slide.id } }, button);
  }

  /** Return the slides as they are searched, filtered and sorted now. */
  get visible() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const filter = $("filter").value;
    const fits = (slide) =>
      words.every((word) => slide.name.toLowerCase().includes(word)) &&
      (filter === "all" ||
        (filter === "mistakes" ? slide.right === false : slide.label === filter.slice("class:".length)));
    const sure = (slide) => (slide.probabilities ? Math.max(...slide.probabilities) : 2);
    const orders = {
      name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
      unsure: (a, b) => sure(a) - sure(b),
      sure: (a, b) => (sure(b) % 2) - (sure(a) % 2),
    };
    const found = this.slides.filter(fits);
    return orders[$("sort").value] ? found.sort(orders[$("sort").value]) : found;
  }

  show() {
    const { visible } = this;
    $("list").replaceChildren(...visible.map((slide) => this.items.get(slide.id)));
    $("count").textContent = visible.length ? count(visible.length, "slide") : "No slide is like that.";
  }

  /** Take in the answer to a slide that the run had not answered. */
  learn({ id, answer, classes }) {
    const slide = this.slides.find((each) => each.id === id);
    if (slide.predicted !== null) return;
    const { probabilities } = answer;
    Object.assign(slide, { probabilities, predicted: classes[probabilities.indexOf(Math.max(...probabilities))] });
    const old = this.items.get(id);
    this.items.set(id, this.#item(slide));
    old.replaceWith(this.items.get(id));
    this.mark(id);
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

  /** Return the slide so many places after one, as the list stands. */
  beside(id, step) {
    const { visible } = this;
    if (!visible.length) return null;
    const at = visible.findIndex((slide) => slide.id === id);
    const next = at < 0 ? 0 : Math.min(Math.max(at + step, 0), visible.length - 1);
    return visible[next].id;
  }
}
