// The keyboard: every key does what a button does.
import { $, el } from "./dom.js";
import { first } from "./maps.js";
import { KEYS, parse, tokenKey } from "./words.js";

const STEP = 120; // pixels that an arrow moves the slide

export function listen(act) {
  $("keys-list").append(...KEYS.flatMap(([key, what]) => [el("dt", { text: key }), el("dd", { text: what })]));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    const typing = event.target.matches?.("input[type=search], select");
    const sliding = event.target.matches?.("input[type=range]") && event.key.startsWith("Arrow");
    if (event.key === "Escape") {
      if (typing) event.target.blur();
      else act.leave();
    } else if (!typing && !sliding) {
      const run = (event.shiftKey ? shifted(act) : {})[event.key] ?? plain(act)[event.key];
      if (!run) return;
      event.preventDefault();
      run();
    }
  });
}

function plain(act) {
  const { next, previous } = act;
  return {
    j: next, ArrowDown: next, ArrowRight: next,
    k: previous, ArrowUp: previous, ArrowLeft: previous,
    "[": () => cycle(act, -1),
    "]": () => cycle(act, 1),
    e: () => again(act, "evidence"),
    a: () => again(act, "attention"),
    t: () => token(act),
    h: () => head(act),
    o: act.toggle,
    l: act.lasso,
    u: act.undo,
    "+": () => act.zoom(1.6), "=": () => act.zoom(1.6),
    "-": () => act.zoom(1 / 1.6), _: () => act.zoom(1 / 1.6),
    0: act.home,
    "/": () => $("search").focus(),
    "?": act.help,
  };
}

function shifted({ pan }) {
  return {
    ArrowLeft: () => pan(-STEP, 0),
    ArrowRight: () => pan(STEP, 0),
    ArrowUp: () => pan(0, -STEP),
    ArrowDown: () => pan(0, STEP),
  };
}

/** Choose the map so many places on. */
function cycle(act, step) {
  const bag = act.bag();
  if (!bag) return;
  const keys = [...bag.layers.keys()];
  act.choose(keys.at((keys.indexOf(act.layer()) + step) % keys.length));
}

/** Choose the first map of a group, or its next one if we are there. */
function again(act, group) {
  const bag = act.bag();
  if (!bag) return;
  const own = [...bag.layers.keys()].filter((key) => parse(key).group === group);
  const at = own.indexOf(act.layer());
  act.choose(at < 0 ? first(bag, group) : own[(at + 1) % own.length]);
}

function token(act) {
  const facts = act.bag()?.facts;
  if (!facts?.tokens) return;
  const now = parse(act.layer());
  const { tokens, blocks } = facts.tokens;
  if (now.group !== "tokens") act.choose(tokenKey(facts, blocks - 1, null, 0));
  else act.choose(tokenKey(facts, now.block, now.head, now.token === null ? 0 : (now.token + 1) % tokens));
}

/** All heads, then each, then all again. */
function head(act) {
  const facts = act.bag()?.facts;
  if (!facts?.tokens) return;
  const now = parse(act.layer());
  const { heads, blocks } = facts.tokens;
  const there = now.group === "tokens" && now.token !== null;
  const next = !there ? 0 : now.head === null ? 0 : now.head + 1 < heads ? now.head + 1 : null;
  act.choose(tokenKey(facts, there ? now.block : blocks - 1, next, there ? now.token : 0));
}
