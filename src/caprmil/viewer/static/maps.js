// The choice of a map: its kind, then its class, or head and token; and its legend.
import { $, el } from "./dom.js";
import { GROUPS, parse, sentence, tokenKey } from "./words.js";

/** Show what can be chosen, and what is. `choose(key)` is called with a layer's key. */
export function showMaps(bag, layer, choose) {
  const { facts } = bag;
  const now = parse(layer.key);
  const present = new Set([...bag.layers.keys()].map((key) => parse(key).group));
  $("groups").replaceChildren(
    ...Object.entries(GROUPS)
      .filter(([group]) => present.has(group))
      .map(([group, text]) => option(text, group === now.group, () => choose(first(bag, group)))),
  );
  const rows = now.group === "tokens" ? tokens(facts, now, choose) : [classes(bag, layer, now, choose), mean(bag, now, choose)];
  $("choices").replaceChildren(...rows.filter(Boolean));
  $("sentence").textContent = sentence(facts, layer, Paint.format);
}

/** Return the map of a group to begin with: evidence is that for the answer, or what sets patches
 * apart where all of them are on one side. */
export function first(bag, group) {
  const best = `${group}-${bag.facts.predicted}`;
  if (group === "evidence" && Paint.hasOneSign(bag.layers.get(best))) return `above-${bag.facts.predicted}`;
  if (bag.layers.has(best) && group !== "attention") return best;
  return [...bag.layers.keys()].find((key) => parse(key).group === group);
}

function option(text, chosen, click, more = {}) {
  return el("button", { "aria-pressed": chosen ? "true" : "false", on: { click }, ...more }, ...[text].flat());
}

function classes(bag, layer, now, choose) {
  const alike = (key) => parse(key).group === now.group && parse(key).above === now.above;
  const own = [...bag.layers.values()].filter(({ key }) => alike(key));
  if (own.length < 2) return null;
  const text = ({ key }) => {
    const { of, spread } = parse(key);
    return spread ? "spread" : of === null ? "overall" : bag.facts.classes[of];
  };
  return el(
    "div",
    { class: "chips", role: "group", "aria-label": "Class" },
    ...own.map((each) => option(text(each), each.key === layer.key, () => choose(each.key))),
  );
}

/** Return the choice between all evidence and what lies above the slide's mean. */
function mean(bag, now, choose) {
  if (now.group !== "evidence" || !bag.layers.has(`above-${now.of}`)) return null;
  const change = (above) => choose(`${above ? "above" : "evidence"}-${now.of}`);
  return el(
    "label",
    { class: "tick" },
    el("input", { id: "above", type: "checkbox", checked: now.above, on: { change: (event) => change(event.target.checked) } }),
    "Above the slide's mean",
  );
}

function tokens(facts, { block, head, token }, choose) {
  const { blocks, heads, tokens: n, usage } = facts.tokens;
  const share = (m) => {
    const own = usage[block];
    return head === null ? own.reduce((sum, each) => sum + each[m], 0) / own.length : own[head][m];
  };
  const pick = (label, size, value, set, all) =>
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
      { "aria-label": `Token ${m + 1}, ${Math.round(100 * share(m))} % of the slide`, title: `Token ${m + 1}: ${Math.round(100 * share(m))} % of the slide` },
    ),
  );
  return [
    el(
      "div",
      { class: "pair" },
      pick("Head", heads, head, (h) => choose(tokenKey(facts, block, h, token ?? 0)), true),
      blocks > 1 ? pick("Block", blocks, block, (b) => choose(tokenKey(facts, b, head, token)), false) : null,
    ),
    el(
      "div",
      { class: "chips", role: "group", "aria-label": "Token" },
      ...chips,
      option("undecided", token === null, () => choose(tokenKey(facts, block, null, null))),
    ),
  ];
}

/** Return where the scale of a map ends. Shares go up to 1, or to what all but a hundredth stay below. */
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
  $("ramp").style.setProperty("--ramp", gradient);
  $("low").textContent = `${layer.kind === "diverging" ? "≤ " : ""}${Paint.format(low)}`;
  $("high").textContent = layer.kind === "share" && high === 1 ? "1" : `≥ ${Paint.format(high)}`;
  $("needle").hidden = row < 0;
  $("here").textContent = row < 0 ? "" : Paint.format(Paint.value(layer, row));
  if (row >= 0) {
    const at = (Paint.value(layer, row) - low) / (high - low || 1);
    $("needle").style.setProperty("left", `${100 * Math.min(Math.max(at, 0), 1)}%`);
  }
}
