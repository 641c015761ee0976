// Patches: those a map shows first, and one with all its numbers and those most like it.
import { $, el } from "./dom.js";
import { headings, parse, tokenKey } from "./words.js";

const NEAREST = 8;

/** Pictures of patches: from one sheet for those shown first, else each by itself. */
export class Pictures {
  /** `ready`: when the slide is in view, for its tiles come first. */
  constructor(facts, ready) {
    this.facts = facts;
    this.base = `api/slides/${facts.id}`;
    this.places = new Map((facts.gallery?.rows ?? []).map((row, place) => [row, place]));
    this.version = facts.tiles?.version;
    if (!this.places.size) return;
    this.sheet = new Image();
    this.loaded = new Promise((resolve) => {
      this.sheet.onload = () => resolve(true);
      this.sheet.onerror = () => resolve(false);
    });
    ready.then(() => (this.sheet.src = `${this.base}/gallery.jpg?v=${this.version}-${facts.numbers}`));
  }

  /** Return a picture of a patch, or a square in its colour where there are no pixels. */
  of(row, colour) {
    if (!this.facts.tiles) return el("span", { class: "swatch", style: { background: colour } });
    if (!this.places.has(row)) return this.alone(row, 112);
    const { px, columns } = this.facts.gallery;
    const canvas = el("canvas", { width: px, height: px });
    this.loaded.then((good) => {
      if (!good) return canvas.replaceWith(this.alone(row, 112));
      const place = this.places.get(row);
      const [left, top] = [(place % columns) * px, Math.floor(place / columns) * px];
      canvas.getContext("2d").drawImage(this.sheet, left, top, px, px, 0, 0, px, px);
    });
    return canvas;
  }

  alone(row, px) {
    return el("img", { src: `${this.base}/patches/${row}.jpg?px=${px}&v=${this.version}`, alt: "", width: px, height: px });
  }
}

function thumbs(bag, layer, pictures, rows, select, said) {
  return el(
    "div",
    { class: "thumbs" },
    ...rows.map((row) => {
      const value = Paint.format(Paint.value(layer, row));
      const words = said ?? value;
      return el(
        "button",
        { title: `Patch ${row}: ${value}`, "aria-label": `Patch ${row}, ${value}`, data: { row }, on: { click: () => select(row) } },
        pictures.of(row, colour(layer, row)),
        el("span", { text: words === "row" ? `#${row}` : words }),
      );
    }),
  );
}

function colour(layer, row) {
  const [red, green, blue, alpha] = Paint.colour(layer.kind, Paint.value(layer, row) / (layer.limit || 1));
  return `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${alpha})`;
}

/** Show the patches that a map has first, and last if it has two ends. */
export function showGallery(bag, layer, pictures, select) {
  const [high, low] = headings(bag.facts, layer);
  const some = layer.top.filter((row, place) => place === 0 || layer.kind === "diverging" || layer.values[row] > 0);
  const parts = [el("h2", { text: high }), thumbs(bag, layer, pictures, some, select)];
  if (layer.bottom && low) parts.push(el("h2", { text: low }), thumbs(bag, layer, pictures, layer.bottom, select));
  $("gallery").replaceChildren(...parts);
}

/** Show a patch, or how to choose one. */
export function showPatch(bag, row, { pictures, layer, out, select, choose, close }) {
  if (row < 0) {
    $("patch").replaceChildren(el("p", { class: "quiet", text: "Click a patch on the slide for its numbers." }));
    return;
  }
  const { facts } = bag;
  const near = Paint.neighbours(bag, row, NEAREST);
  $("patch").replaceChildren(
    el("h2", { text: `Patch ${row}` }, el("button", { class: "plain", text: "Close", on: { click: close } })),
    el(
      "div",
      { class: "portrait" },
      facts.tiles ? pictures.alone(row, 224) : el("span", { class: "swatch", style: { background: colour(layer, row) } }),
      el("div", {}, el("p", { class: "quiet", text: place(bag, row) }), out[row] ? el("p", { text: "It is taken out." }) : null, plain(bag, row)),
    ),
    numbers(bag, row, layer, choose),
    ...(facts.tokens ? [grid(bag, row, layer, choose)] : []),
    ...(near.length ? [el("h3", { text: "Most alike in token space" }), thumbs(bag, layer, pictures, near, select, "row")] : []),
  );
}

function place(bag, row) {
  const { facts } = bag;
  const [x, y] = [bag.x[row], bag.y[row]].map(Math.round);
  if (!facts.placed) return "Where it lies on the slide is not known.";
  const um = facts.mpp ? `, ${Paint.format(bag.side * facts.mpp)} µm wide` : "";
  return `At ${x.toLocaleString("en")}, ${y.toLocaleString("en")} px${um}.`;
}

/** Return where a patch stands among all, by the map of the answer. */
function plain(bag, row) {
  const layer = bag.layers.get(`evidence-${bag.facts.predicted}`);
  const value = Paint.value(layer, row);
  let above = 0;
  for (let n = 0; n < bag.n; n++) above += layer.values[n] > value;
  const side = value > 0 ? "for" : value < 0 ? "against" : "neither for nor against";
  return el("p", { text: `Speaks ${side} ${bag.facts.classes[bag.facts.predicted]}, rank ${above + 1} of ${bag.n.toLocaleString("en")}.` });
}

function numbers(bag, row, current, choose) {
  const plainLayers = [...bag.layers.values()].filter(({ key }) => parse(key).group !== "tokens" || key.endsWith("entropy"));
  const place = ({ key }) => (parse(key).group === "evidence" ? parse(key).of - bag.facts.classes.length : 0);
  plainLayers.sort((a, b) => place(a) - place(b)); // of each class, all evidence and then that above the mean
  return el(
    "table",
    { class: "numbers" },
    el(
      "tbody",
      {},
      ...plainLayers.map((layer) => {
        const value = Paint.value(layer, row);
        const share = Math.min(Math.abs(value / (layer.limit || 1)), 1);
        const two = layer.kind === "diverging";
        return el(
          "tr",
          { class: layer.key === current.key ? "current" : "" },
          el("th", { scope: "row" }, el("button", { class: "plain", text: parse(layer.key).above ? "… above the mean" : layer.title, title: layer.title, on: { click: () => choose(layer.key) } })),
          el(
            "td",
            { "aria-hidden": "true" },
            el("span", { class: two ? "meter two" : "meter" }, el("i", { class: value < 0 ? "against" : two ? "for" : "", style: { width: `${100 * share * (two ? 0.5 : 1)}%` } })),
          ),
          el("td", { class: "value", text: Paint.format(value) }),
        );
      }),
    ),
  );
}

/** Return the weights of a patch: a row for each head of the last block, a column for each token. */
function grid(bag, row, current, choose) {
  const { blocks, heads, tokens } = bag.facts.tokens;
  const cell = (head, token) => {
    const key = tokenKey(bag.facts, blocks - 1, head, token);
    const value = Paint.value(bag.layers.get(key), row);
    const [red, green, blue] = Paint.colour("share", value);
    const dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128;
    const name = `Head ${head + 1}, token ${token + 1}: ${value.toFixed(2)}`;
    const style = { background: `rgb(${red | 0}, ${green | 0}, ${blue | 0})`, color: dark ? "#fff" : "#000" };
    const button = el("button", { title: name, "aria-label": name, style, text: value.toFixed(2), on: { click: () => choose(key) } });
    return el("td", { class: key === current.key ? "current" : "" }, button);
  };
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  return el(
    "table",
    { class: "heat" },
    el("caption", { text: `Token weights${blocks > 1 ? " of the last block" : ""}, head by head` }),
    el("thead", {}, el("tr", {}, el("td"), ...range(tokens).map((m) => el("th", { scope: "col", text: `T${m + 1}` })))),
    el("tbody", {}, ...range(heads).map((h) => el("tr", {}, el("th", { scope: "row", text: `H${h + 1}` }), ...range(tokens).map((m) => cell(h, m))))),
  );
}
