// The viewer: one state, which every part of the page shows and the address remembers.
import { showAnswer } from "./answer.js";
import { $, count } from "./dom.js";
import { listen } from "./keys.js";
import { packRows, read, spans, unpackRows, write } from "./link.js";
import { List } from "./list.js";
import { first, limitOf, showLegend, showMaps } from "./maps.js";
import { Pictures, showGallery, showPatch } from "./patches.js";
import { Stage } from "./stage.js";

const TILE = 512;

const state = { slide: null, layer: null, opacity: 55, threshold: 0, overlay: true, fit: true, patch: -1, view: null };
let bag = null; // the slide that is open, decoded
let out = new Uint8Array(0); // a byte for each patch: 1 is taken out
let before = []; // what was out before each step, to be undone
let asked = null; // what the run says without them
let pending = null; // a region that waits for a word
let pictures = null;
let follows = true; // the map is the evidence for whatever the answer is
let list = null;
let opening = new AbortController();
let asking = new AbortController();

const stage = new Stage({
  patch: (row) => select(row === state.patch ? -1 : row),
  hover: (row) => bag && showLegend(state.overlay ? layer() : null, limitOf(layer(), state.fit), row),
  view: () => later(remember),
  region: (rows) => offer(rows),
  failed: () => notice("A part of the slide cannot be read. It may be damaged, or gone."),
});

const layer = () => bag.layers.get(state.layer);

// Talking to the server

async function get(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Error("The viewer does not answer. Is `caprmil view` still running?");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.reason ?? `The viewer answered ${answer.status}.`);
}

const json = async (path, options) => (await get(path, options)).json();

// Opening a slide

async function open(id, wanted = {}) {
  opening.abort();
  asking.abort();
  opening = new AbortController();
  const { signal } = opening;
  Object.assign(state, { slide: id, patch: -1, view: null });
  [bag, asked, pending, before] = [null, null, null, []];
  list.mark(id);
  list.thumbnails.hold(true);
  const { name, problem } = list.slides.find((slide) => slide.id === id);
  $("slide-name").textContent = name;
  document.body.dataset.state = "loading";
  stage.close();
  notice("");
  offer(null);
  busy(`Explaining ${name} …`);
  try {
    if (problem) throw new Error(problem);
    const facts = await json(`api/slides/${id}`, { signal });
    const buffer = await (await get(`api/slides/${id}/numbers?v=${facts.numbers}`, { signal })).arrayBuffer();
    await show(Paint.decode(facts, buffer), wanted, signal);
    document.body.dataset.state = "ready";
  } catch (failed) {
    if (signal.aborted) return;
    blank();
    notice(failed.message);
    document.body.dataset.state = "failed";
  }
  if (signal.aborted) return;
  busy("");
  if (!bag) list.thumbnails.hold(false);
}

async function show(found, wanted, signal) {
  const { facts } = found;
  const source = { size: TILE, top: facts.tiles?.top };
  if (facts.tiles) {
    source.tile = (zoom, x, y) => `api/slides/${facts.id}/tiles/${zoom}/${x}_${y}.jpg?v=${facts.tiles.version}`;
  }
  await stage.open(found, source, wanted.view);
  if (signal.aborted) return;
  bag = found;
  const settled = stage.settled();
  settled.then(() => list.thumbnails.hold(signal.aborted));
  pictures = new Pictures(facts, settled);
  out = wanted.out ? unpackRows(wanted.out, bag.n) : new Uint8Array(bag.n);
  const kept = follows ? null : state.layer;
  state.layer = [wanted.layer, kept].find((key) => bag.layers.has(key)) ?? first(bag, "evidence");
  follows = state.layer === first(bag, "evidence");
  state.patch = wanted.patch < bag.n ? wanted.patch : -1;
  $("slide-name").textContent = `${facts.slide}  ·  ${count(bag.n, "patch")}${facts.flags ? `  ·  ${facts.flags}` : ""}`;
  notice(!facts.tiles ? why(facts) : "");
  if (out.some(Boolean)) {
    before = [new Uint8Array(bag.n)];
    ask();
  }
  list.learn(facts);
  refresh();
  measure();
  remember();
}

function why({ problem, unplaced }) {
  if (unplaced) return unplaced;
  return `${problem ?? "The pixels are not at hand."} The bare grid of patches is shown.`;
}

function blank() {
  for (const id of ["answer", "gallery", "patch", "groups", "choices"]) $(id).replaceChildren();
  $("sentence").textContent = "";
  $("legend").hidden = $("scale").hidden = true;
}

// Showing the state

function refresh() {
  paint();
  showMaps(bag, layer(), choose);
  showGallery(bag, layer(), pictures, visit);
  showDetails();
  answer();
}

function paint() {
  const now = layer();
  const limit = limitOf(now, state.fit);
  const least = (state.threshold / 100) * limit * (now.bytes ? 255 : 1);
  const skip = least ? (n) => out[n] || Math.abs(now.values[n]) < least : (n) => out[n];
  stage.show(Paint.raster(bag, now, { limit, skip }), { opacity: state.opacity / 100, overlay: state.overlay, patch: state.patch });
  stage.hatch(out);
  showLegend(state.overlay ? now : null, limit);
  $("fit").checked = state.fit;
  $("fit-line").hidden = now.kind !== "share";
  $("overlay").setAttribute("aria-pressed", state.overlay);
  $("opacity").value = state.opacity;
  $("opacity-said").textContent = `${state.opacity} %`;
  $("threshold").value = state.threshold;
  $("threshold-said").textContent = state.threshold ? `< ${Paint.format((state.threshold / 100) * limit)}` : "none";
}

function showDetails() {
  const close = () => select(-1);
  showPatch(bag, state.patch, { pictures, layer: layer(), out, select: visit, choose, close });
  document.body.classList.toggle("looking", state.patch >= 0);
}

function answer() {
  showAnswer(bag.facts, asked, { undo, reset });
}

function measure() {
  const mpp = bag?.facts.mpp;
  $("scale").hidden = !mpp || !bag.facts.placed;
  if ($("scale").hidden) return;
  const pixel = mpp / stage.place().scale; // micrometres of a pixel of the screen
  const power = 10 ** Math.floor(Math.log10(130 * pixel));
  const length = [5, 2, 1].map((step) => step * power).find((um) => um / pixel <= 130) ?? power;
  $("scale-said").textContent = length >= 1000 ? `${length / 1000} mm` : `${length} µm`;
  $("scale-bar").style.setProperty("width", `${length / pixel}px`);
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function busy(text) {
  $("busy-said").textContent = text;
  $("busy").hidden = !text;
}

// Remembering it in the address

let timer = 0;
function later(run) {
  if (bag) measure();
  clearTimeout(timer);
  timer = setTimeout(run, 180);
}

/** Write the state into the address; `step` makes it one that the back button returns from. */
function remember(step = false) {
  if (!bag) return;
  state.view = stage.view;
  const hash = write({ ...state, out: out.some(Boolean) ? packRows(out) : "" });
  if (hash === location.hash) return;
  const address = location.pathname + location.search.replace(/[?&]token=[^&]*/, "") + hash;
  history[step ? "pushState" : "replaceState"](null, "", address);
}

function restore() {
  const wanted = read(location.hash);
  Object.assign(state, { opacity: wanted.opacity ?? state.opacity, threshold: wanted.threshold ?? 0, overlay: wanted.overlay, fit: wanted.fit });
  const known = list.slides.some((slide) => slide.id === wanted.slide);
  if (!known || wanted.slide !== state.slide || !bag) {
    const id = known ? wanted.slide : list.visible[0]?.id;
    return id && open(id, wanted);
  }
  if (bag.layers.has(wanted.layer)) state.layer = wanted.layer;
  state.patch = wanted.patch < bag.n ? wanted.patch : -1;
  if (wanted.view) stage.view = wanted.view;
  const rows = unpackRows(wanted.out ?? "", bag.n);
  if (packRows(rows) !== packRows(out)) {
    out = rows;
    ask();
  }
  refresh();
}

// What can be done

function go(id) {
  if (!id || id === state.slide) return;
  const { slide } = state;
  if (slide && bag) history.pushState(null, "", `#s=${id}`);
  open(id);
  tab("");
}

function choose(key) {
  if (!bag || !bag.layers.has(key) || key === state.layer) return;
  state.layer = key;
  follows = key === first(bag, "evidence");
  state.overlay = true;
  refresh();
  remember(true);
}

function select(row) {
  if (!bag || row === state.patch) return;
  state.patch = row;
  paint();
  showDetails();
  if (row >= 0 && !wide()) tab("patches");
  remember(true);
}

/** Select a patch and go there. */
function visit(row) {
  stage.jump(row);
  select(row);
  if (!wide()) tab("");
}

function toggle() {
  state.overlay = !state.overlay;
  if (bag) paint();
  remember();
}

function lasso(on) {
  $("lasso").setAttribute("aria-pressed", on);
  stage.lasso(on);
  if (!on) offer(null);
  else if (bag) tab("");
}

/** Offer what can be done with a region: rows that were drawn around. */
function offer(rows) {
  if (rows && !rows.some((row, n) => row && !out[n])) rows = null;
  pending = rows;
  if (bag) stage.mark(rows);
  $("asking").hidden = !rows;
  if (!rows) return;
  const n = rows.reduce((sum, row, at) => sum + (row && !out[at] ? 1 : 0), 0);
  $("asking-said").textContent = count(n, "patch");
  $("take-out").disabled = out.every((row, at) => row || rows[at]);
  $("take-out").focus();
}

function settle(keep) {
  const rows = pending;
  change(out.map((row, n) => (row || Boolean(rows[n]) !== keep ? 1 : 0)));
  lasso(false);
}

function change(rows) {
  before.push(out);
  out = rows;
  after();
}

function undo() {
  if (!before.length) return;
  out = before.pop();
  after();
}

function reset() {
  before = [];
  out = new Uint8Array(bag.n);
  after();
}

function after() {
  ask();
  paint();
  showDetails();
  remember(true);
}

/** Ask the run what it says without what is out. */
async function ask() {
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  const gone = out.reduce((sum, row) => sum + row, 0);
  asked = gone ? { ...asked, out: gone, waiting: true, problem: null } : null;
  answer();
  if (!gone) return;
  if (!wide()) tab("answer");
  try {
    const found = await json(`api/slides/${state.slide}/ask`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ without: spans(out) }),
      signal,
    });
    asked = { out: gone, after: found };
  } catch (problem) {
    if (signal.aborted) return;
    asked = { out: gone, problem: problem.message };
  }
  answer();
}

const wide = () => matchMedia("(min-width: 821px)").matches;

function tab(name) {
  document.body.dataset.tab = name;
  for (const button of $("tabs").children) button.setAttribute("aria-expanded", button.dataset.tab === name);
}

function help() {
  if (!$("keys").open) $("keys").showModal();
}

function leave() {
  if ($("lasso").getAttribute("aria-pressed") === "true" || pending) lasso(false);
  else if (document.body.dataset.tab) tab("");
  else select(-1);
}

// Beginning

async function start() {
  busy("Opening the run …");
  const [run, { slides }] = await Promise.all([json("api/run"), json("api/slides")]);
  $("run-name").textContent = run.name;
  document.title = `${run.name} · caprmil`;
  const auc = run.scores.auc;
  $("run-facts").textContent = [
    run.model,
    run.encoder,
    `${run.folds} folds`,
    auc === undefined || auc === null ? (run.finished ? "" : "not finished") : `AUC ${auc.toFixed(3)}`,
  ].filter(Boolean).join("  ·  ");
  list = new List(run.classes, slides, { open: go });
  busy("");
  await restore();
}

const actions = {
  next: () => go(list?.beside(state.slide, 1)),
  previous: () => go(list?.beside(state.slide, -1)),
  zoom: (factor) => stage.zoom(factor),
  pan: (x, y) => stage.pan(x, y),
  home: () => stage.home(),
  lasso: () => lasso($("lasso").getAttribute("aria-pressed") !== "true"),
  bag: () => bag,
  layer: () => state.layer,
  choose, toggle, undo, help, leave,
};

function wire() {
  const click = (id, run) => $(id).addEventListener("click", run);
  click("zoom-in", () => stage.zoom(1.6));
  click("zoom-out", () => stage.zoom(1 / 1.6));
  click("home", () => stage.home());
  click("overlay", toggle);
  click("lasso", actions.lasso);
  click("help", help);
  click("take-out", () => settle(false));
  click("keep-only", () => settle(true));
  click("cancel", () => offer(null));
  for (const name of ["opacity", "threshold"]) {
    $(name).addEventListener("input", () => {
      state[name] = Number($(name).value);
      if (bag) paint();
      later(remember);
    });
  }
  $("fit").addEventListener("change", () => {
    state.fit = $("fit").checked;
    if (bag) paint();
    later(remember);
  });
  for (const button of $("tabs").children) {
    button.addEventListener("click", () => tab(document.body.dataset.tab === button.dataset.tab ? "" : button.dataset.tab));
  }
  addEventListener("popstate", () => list && restore());
  listen(actions);
}

wire();
start().catch((problem) => {
  busy("");
  notice(problem.message);
  document.body.dataset.state = "failed";
});
