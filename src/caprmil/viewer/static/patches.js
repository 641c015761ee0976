// Patches: those with the highest values of a map, and one with all its numbers and the most similar ones.
import { $, el } from "./dom.js";
import { markedText, headings, parse, tokenKey } from "./layer_text.js";

const NEIGHBOURS = 8;

/** Pictures of patches. Those that any map shows first come in one sheet, others one by one. */
export class Pictures {
  /** `ready` resolves when the tiles in view are loaded, which come first. */
  constructor(facts, ready) {
    this.facts = facts;
    this.base = `api/slides/${facts.id}`;
    this.positions = new Map((facts.gallery?.rows ?? []).map((row, position) => [row, position]));
    this.version = facts.tiles?.version;
    if (!this.positions.size) return;
    this.sheet = new Image();
    this.loaded = new Promise((resolve) => {
      this.sheet.onload = () => resolve(true);
      this.sheet.onerror = () => resolve(false);
    });
    ready.then(() => (this.sheet.src = `${this.base}/gallery.jpg?v=${this.version}-${facts.numbers}`));
  }

  /** Return a picture of a patch, or a square of its colour if there are no pixels. */
  picture(row, colour) {
    if (!this.facts.tiles) return el("span", { class: "swatch", style: { background: colour } });
    if (!this.positions.has(row)) return this.single(row, 112);
    const { px, columns } = this.facts.gallery;
    const canvas = el("canvas", { width: px, height: px });
    this.loaded.then((succeeded) => {
      if (!succeeded) return canvas.replaceWith(this.single(row, 112));
      const position = this.positions.get(row);
      const [left, top] = [(position % columns) * px, Math.floor(position / columns) * px];
      canvas.getContext("2d").drawImage(this.sheet, left, top, px, px, 0, 0, px, px);
    });
    return canvas;
  }

  single(row, px) {
    return el("img", { src: `${this.base}/patches/${row}.jpg?px=${px}&v=${this.version}`, alt: "", width: px, height: px });
  }
}

function thumbnails(layer, pictures, rows, select, { showRow = false } = {}) {
  return el(
    "div",
    { class: "thumbnails" },
    ...rows.map((row) => {
      const value = Paint.format(Paint.value(layer, row));
      return el(
        "button",
        { title: `Patch ${row}: ${value}`, "aria-label": `Patch ${row}, ${value}`, data: { row }, on: { click: () => select(row) } },
        pictures.picture(row, colour(layer, row)),
        el("span", { text: showRow ? `#${row}` : value }),
      );
    }),
  );
}

function colour(layer, row) {
  const [red, green, blue, alpha] = Paint.colour(layer.kind, Paint.value(layer, row) / (layer.limit || 1));
  return `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${alpha})`;
}

/** Show the patches with the highest values of a map and, if it has two signs, the lowest, each with the sign of its heading. */
export function showGallery(bag, layer, pictures, select) {
  const [high, low] = headings(bag.facts, layer);
  const sameSign = (rows) => rows.filter((row) => row === rows[0] || layer.values[row] * layer.values[rows[0]] > 0);
  const parts = [el("h2", { text: high }), thumbnails(layer, pictures, sameSign(layer.top), select)];
  if (layer.bottom && low) parts.push(el("h2", { text: low }), thumbnails(layer, pictures, sameSign(layer.bottom), select));
  $("gallery").replaceChildren(...parts);
}

/** Show the numbers of a patch, or how to choose one. */
export function showPatch(bag, row, { pictures, layer, removed, select, choose, close }) {
  if (row < 0) {
    $("patch").replaceChildren(el("p", { class: "quiet", text: "Click a patch on the slide for its numbers." }));
    return;
  }
  const { facts } = bag;
  const similar = Paint.neighbours(bag, row, NEIGHBOURS);
  $("patch").replaceChildren(
    el("h2", { text: `Patch ${row}` }, el("button", { class: "plain", text: "Close", on: { click: close } })),
    el(
      "div",
      { class: "patch-picture" },
      facts.tiles ? pictures.single(row, 224) : el("span", { class: "swatch", style: { background: colour(layer, row) } }),
      el("div", {}, el("p", { class: "quiet", text: position(bag, row) }), removed[row] ? el("p", { text: "It is removed." }) : null, rank(bag, row)),
    ),
    numbers(bag, row, layer, choose),
    ...(facts.tokens ? [tokenWeights(bag, row, layer, choose)] : []),
    ...(similar.length ? [el("h3", { text: "Most similar token weights" }), thumbnails(layer, pictures, similar, select, { showRow: true })] : []),
  );
}

function position(bag, row) {
  const { facts } = bag;
  const [x, y] = [bag.x[row], bag.y[row]].map(Math.round);
  if (!facts.placed) return "Its position on the slide is not known.";
  const um = facts.mpp ? `, ${Paint.format(bag.side * facts.mpp)} µm wide` : "";
  return `At ${x.toLocaleString("en")}, ${y.toLocaleString("en")} px${um}.`;
}

/** Return the rank of a patch on the first map or, if that has no sign, by its evidence. */
function rank(bag, row) {
  const contrast = bag.facts.first_contrast;
  const first = bag.layers.get(bag.facts.first_layer);
  const layer = first?.kind === "diverging" ? first : bag.layers.get(`evidence-${contrast}`);
  const value = Paint.value(layer, row);
  let above = 0;
  for (let n = 0; n < bag.n; n++) above += layer.values[n] > value;
  return el("p", { text: `${markedText(bag.facts, contrast, value)}, rank ${above + 1} of ${bag.n.toLocaleString("en")}.` });
}

function numbers(bag, row, current, choose) {
  const layers = [...bag.layers.values()].filter(({ key }) => parse(key).group !== "tokens" || key.endsWith("entropy"));
  const places = { influence: -2 * bag.layers.size, evidence: -bag.layers.size };
  const order = ({ key }) => (places[parse(key).group] ?? 0) + (places[parse(key).group] ? parse(key).contrast : 0);
  layers.sort((a, b) => order(a) - order(b)); // for each contrast, evidence and then that relative to the mean
  return el(
    "table",
    { class: "numbers" },
    el(
      "tbody",
      {},
      ...layers.map((layer) => {
        const value = Paint.value(layer, row);
        const share = Math.min(Math.abs(value / (layer.limit || 1)), 1);
        const hasSign = layer.kind === "diverging";
        return el(
          "tr",
          { class: layer.key === current.key ? "current" : "" },
          el("th", { scope: "row" }, el("button", { class: "plain", text: parse(layer.key).above ? "… above the mean" : layer.title, title: layer.title, on: { click: () => choose(layer.key) } })),
          el(
            "td",
            { "aria-hidden": "true" },
            el("span", { class: hasSign ? "meter signed" : "meter" }, el("i", { class: value < 0 ? "against" : hasSign ? "for" : "", style: { width: `${100 * share * (hasSign ? 0.5 : 1)}%` } })),
          ),
          el("td", { class: "value", text: Paint.format(value) }),
        );
      }),
    ),
  );
}

/** Return the token weights of a patch: a row for each head of the last block, a column for each token. */
function tokenWeights(bag, row, current, choose) {
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
    { class: "token-weights" },
    el("caption", { text: `Token weights${blocks > 1 ? " of the last block" : ""} by head` }),
    el("thead", {}, el("tr", {}, el("td"), ...range(tokens).map((m) => el("th", { scope: "col", text: `T${m + 1}` })))),
    el("tbody", {}, ...range(heads).map((h) => el("tr", {}, el("th", { scope: "row", text: `H${h + 1}` }), ...range(tokens).map((m) => cell(h, m))))),
  );
}
