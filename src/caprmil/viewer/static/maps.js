// The choice of a map: its kind, then its contrast, or head and token; and its legend.
import { $, el } from "./dom.js";
import { GROUPS, describe, parse, tokenKey } from "./layer_text.js";

/** Show the maps to choose from, and which one is chosen. `choose(key)` gets the key of a layer; `off` are the
 * tokens whose message is removed, and `toggleToken()` removes or restores that of the token that is shown. */
export function showMaps(bag, layer, { choose, off, toggleToken }) {
  const { facts } = bag;
  const now = parse(layer.key);
  const present = new Set([...bag.layers.keys()].map((key) => parse(key).group));
  $("groups").replaceChildren(
    ...Object.entries(GROUPS)
      .filter(([group]) => present.has(group))
      .map(([group, text]) => option(text, group === now.group, () => choose(firstLayer(bag, group)))),
  );
  const rows = now.group === "tokens" ? tokens(facts, now, { choose, off, toggleToken }) : [contrasts(bag, layer, now, choose), aboveMean(bag, now, choose)];
  $("choices").replaceChildren(...rows.filter(Boolean));
  $("description").textContent = describe(facts, layer);
}

/** Return the layer to show first: that of the most faithful map. */
export function initialLayer(bag) {
  const key = bag.facts.first_layer;
  return parse(key).group === "evidence" || !bag.layers.has(key) ? firstLayer(bag, "evidence") : key;
}

/** Return the layer of a group to show first. For evidence it is that of the prediction, relative to the
 * mean if the evidence of all patches has the same sign. */
export function firstLayer(bag, group) {
  const number = bag.facts.first_contrast;
  const key = `${group}-${number}`;
  if (group === "evidence" && Paint.hasOneSign(bag.layers.get(key))) return `above-${number}`;
  if (bag.layers.has(key) && group !== "attention") return key;
  if (group === "influence" && parse(bag.facts.first_layer).group === group) return bag.facts.first_layer;
  return [...bag.layers.keys()].find((key) => parse(key).group === group);
}

function option(text, chosen, click, more = {}) {
  return el("button", { "aria-pressed": chosen ? "true" : "false", on: { click }, ...more }, ...[text].flat());
}

function contrasts(bag, layer, now, choose) {
  const stem = (key) => (now.group === "influence" ? key.replace(/-\d+$/, "") : "");
  const isAlike = (key) => parse(key).group === now.group && parse(key).above === now.above && stem(key) === stem(layer.key);
  const layers = [...bag.layers.values()].filter(({ key }) => isAlike(key));
  if (layers.length < 2) return null;
  const text = ({ key }) => {
    const { contrast, spread } = parse(key);
    return spread ? "spread" : contrast === null ? "overall" : bag.facts.contrasts[contrast].name;
  };
  return el(
    "div",
    { class: "chips", role: "group", "aria-label": "Evidence for" },
    ...layers.map((each) => option(text(each), each.key === layer.key, () => choose(each.key))),
  );
}

/** Return the choice between evidence, and evidence relative to the slide's mean. */
function aboveMean(bag, now, choose) {
  if (now.group !== "evidence" || !bag.layers.has(`above-${now.contrast}`)) return null;
  const change = (above) => choose(`${above ? "above" : "evidence"}-${now.contrast}`);
  return el(
    "label",
    { class: "check" },
    el("input", { id: "above", type: "checkbox", checked: now.above, on: { change: (event) => change(event.target.checked) } }),
    "Above the slide's mean",
  );
}

/** Return the tokens of a layer as "block.head.token"; that of the mean of heads has one per head. */
export function tokenNames(facts, { group, block, head, token }) {
  if (group !== "tokens" || token === null) return [];
  const heads = head === null ? [...Array(facts.tokens.heads).keys()] : [head];
  return heads.map((h) => `${block}.${h}.${token}`);
}

/** Return the switch that removes the message of the token that is shown. */
function tokenSwitch(facts, now, { off, toggleToken }) {
  const names = tokenNames(facts, now);
  if (!names.length) return null;
  const all = now.head === null && facts.tokens.heads > 1;
  return el(
    "label",
    { class: "check", title: "The prediction without what this token adds to the patches (x)" },
    el("input", { id: "token-off", type: "checkbox", checked: names.every((name) => off.includes(name)), on: { change: toggleToken } }),
    all ? "Without this token in all heads" : "Without this token",
  );
}

function tokens(facts, now, { choose, off, toggleToken }) {
  const { block, head, token } = now;
  const { blocks, heads, tokens: n, usage } = facts.tokens;
  const share = (m) => {
    const perHead = usage[block];
    return head === null ? perHead.reduce((sum, each) => sum + each[m], 0) / perHead.length : perHead[head][m];
  };
  const select = (label, size, value, set, all) =>
    el(
      "label",
      {},
      `${label} `,
      el(
        "select",
        { id: `${label.toLowerCase()}-choice`, on: { change: (event) => set(event.target.value === "all" ? null : Number(event.target.value)) } },
        all ? el("option", { value: "all", text: "all", selected: value === null }) : null,
        ...Array.from({ length: size }, (_, i) => el("option", { value: i, text: i + 1, selected: value === i })),
      ),
    );
  const chips = Array.from({ length: n }, (_, m) =>
    option(
      [el("i", { class: "dot", style: { background: Paint.TOKENS[m % Paint.TOKENS.length] } }), `${m + 1}`, el("small", { text: `${Math.round(100 * share(m))} %` })],
      token === m,
      () => choose(tokenKey(facts, block, head, m)),
      {
        class: tokenNames(facts, { ...now, group: "tokens", token: m }).every((name) => off.includes(name)) ? "off" : "",
        "aria-label": `Token ${m + 1}, ${Math.round(100 * share(m))} % of all weight`,
        title: `Token ${m + 1}: ${Math.round(100 * share(m))} % of all weight`,
      },
    ),
  );
  return [
    el(
      "div",
      { class: "pair" },
      select("Head", heads, head, (h) => choose(tokenKey(facts, block, h, token ?? 0)), true),
      blocks > 1 ? select("Block", blocks, block, (b) => choose(tokenKey(facts, b, head, token)), false) : null,
    ),
    el(
      "div",
      { class: "chips", role: "group", "aria-label": "Token" },
      ...chips,
      option("entropy", token === null, () => choose(tokenKey(facts, block, null, null))),
    ),
    tokenSwitch(facts, now, { off, toggleToken }),
  ];
}

/** Return the end of a map's colour scale. For shares it is 1 or, if `fit`, the 99th percentile. */
export function limitOf(layer, fit) {
  if (layer.kind !== "share" || !fit) return layer.limit;
  const sorted = Float32Array.from(layer.values).sort();
  const high = sorted[Math.floor(0.99 * (sorted.length - 1))] || sorted.at(-1);
  return high ? high / (layer.bytes ? 255 : 1) : layer.limit;
}

/** Show the legend; `row` is the patch under the pointer, or -1. */
export function showLegend(layer, limit, row = -1) {
  $("legend").hidden = !layer;
  if (!layer) return;
  const { low, high, gradient } = Paint.legend(layer, limit);
  $("legend-title").textContent = layer.title;
  $("colour-bar").style.setProperty("--gradient", gradient);
  $("low").textContent = `${layer.kind === "diverging" ? "≤ " : ""}${Paint.format(low)}`;
  $("high").textContent = layer.kind === "share" && high === 1 ? "1" : `≥ ${Paint.format(high)}`;
  $("legend-mark").hidden = row < 0;
  $("legend-value").textContent = row < 0 ? "" : Paint.format(Paint.value(layer, row));
  if (row >= 0) {
    const position = (Paint.value(layer, row) - low) / (high - low || 1);
    $("legend-mark").style.setProperty("left", `${100 * Math.min(Math.max(position, 0), 1)}%`);
  }
}
