// The keyboard: every key does what a button does.
import { $, el } from "./dom.js";
import { parse, tokenKey } from "./layer_text.js";
import { firstLayer } from "./maps.js";

const STEP = 120; // pixels that an arrow moves the slide

const HELP = [
  ["j, ↓, →", "next slide"],
  ["k, ↑, ←", "previous slide"],
  ["i", "influence; again: the next map of it"],
  ["e", "evidence; again: the next map of it"],
  ["a", "attention"],
  ["t", "next token"],
  ["h", "next head"],
  ["x", "predict without this token, or with it"],
  ["[  ]", "previous, next map"],
  ["o", "map on or off"],
  ["l", "lasso a region"],
  ["u", "undo the last region or token"],
  ["+  -  0", "zoom in, out, whole slide"],
  ["Shift + arrows", "move the slide"],
  ["c", "two slides side by side"],
  ["/", "search slides"],
  ["Esc", "leave lasso, patch or panel"],
  ["?", "this help"],
];

export function listen(actions) {
  $("keys-list").append(...HELP.flatMap(([key, text]) => [el("dt", { text: key }), el("dd", { text })]));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    const typing = event.target.matches?.("input[type=search], select");
    const sliding = event.target.matches?.("input[type=range], .panel") && event.key.startsWith("Arrow");
    if (event.key === "Escape") {
      if (typing) event.target.blur();
      else actions.leave();
    } else if (!typing && !sliding) {
      const action = (event.shiftKey ? shiftKeys(actions) : {})[event.key] ?? plainKeys(actions)[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    }
  });
}

function plainKeys(actions) {
  const { next, previous } = actions;
  return {
    j: next, ArrowDown: next, ArrowRight: next,
    k: previous, ArrowUp: previous, ArrowLeft: previous,
    "[": () => cycleLayers(actions, -1),
    "]": () => cycleLayers(actions, 1),
    i: () => cycleGroup(actions, "influence"),
    e: () => cycleGroup(actions, "evidence"),
    a: () => cycleGroup(actions, "attention"),
    t: () => nextToken(actions),
    h: () => nextHead(actions),
    x: actions.toggleToken,
    o: actions.toggleMap,
    l: actions.lasso,
    u: actions.undo,
    c: actions.compare,
    "+": () => actions.zoom(1.6), "=": () => actions.zoom(1.6),
    "-": () => actions.zoom(1 / 1.6), _: () => actions.zoom(1 / 1.6),
    0: actions.home,
    "/": () => $("search").focus(),
    "?": actions.help,
  };
}

function shiftKeys({ pan }) {
  return {
    ArrowLeft: () => pan(-STEP, 0),
    ArrowRight: () => pan(STEP, 0),
    ArrowUp: () => pan(0, -STEP),
    ArrowDown: () => pan(0, STEP),
  };
}

function cycleLayers(actions, step) {
  const bag = actions.bag();
  if (!bag) return;
  const keys = [...bag.layers.keys()];
  actions.chooseLayer(keys.at((keys.indexOf(actions.layer()) + step) % keys.length));
}

/** Choose the first layer of a group or, if one of them is shown, the next one. */
function cycleGroup(actions, group) {
  const bag = actions.bag();
  if (!bag) return;
  const keys = [...bag.layers.keys()].filter((key) => parse(key).group === group);
  const index = keys.indexOf(actions.layer());
  const next = index < 0 ? firstLayer(bag, group) : keys[(index + 1) % keys.length];
  if (next) actions.chooseLayer(next);
}

function nextToken(actions) {
  const facts = actions.bag()?.facts;
  if (!facts?.tokens) return;
  const now = parse(actions.layer());
  const { tokens, blocks } = facts.tokens;
  if (now.group !== "tokens") actions.chooseLayer(tokenKey(facts, blocks - 1, null, 0));
  else actions.chooseLayer(tokenKey(facts, now.block, now.head, now.token === null ? 0 : (now.token + 1) % tokens));
}

/** Choose the mean of all heads, then each head, then the mean again. */
function nextHead(actions) {
  const facts = actions.bag()?.facts;
  if (!facts?.tokens) return;
  const now = parse(actions.layer());
  const { heads, blocks } = facts.tokens;
  const isToken = now.group === "tokens" && now.token !== null;
  const next = !isToken ? 0 : now.head === null ? 0 : now.head + 1 < heads ? now.head + 1 : null;
  actions.chooseLayer(tokenKey(facts, isToken ? now.block : blocks - 1, next, isToken ? now.token : 0));
}
