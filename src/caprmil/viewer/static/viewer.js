// The viewer: one state, which every part of the page shows and the address holds.
import { $, count } from "./dom.js";
import { listen } from "./keyboard.js";
import { parse } from "./layer_text.js";
import { initialLayer, limitOf, showLegend, showMaps, tokenNames } from "./maps.js";
import { listenToPage, sayHash, sayView, sideBySide } from "./pane.js";
import { chooseParts } from "./parts.js";
import { Pictures, showGallery, showPatch } from "./patches.js";
import { showPrediction } from "./prediction_panel.js";
import { effectText, showRegions } from "./region_list.js";
import { SlideList } from "./slide_list.js";
import { Stage } from "./stage.js";
import { packRows, ranges, read, unpackRows, unpackTokens, write } from "./url_state.js";

const TILE = 512;

const state = { slide: null, layer: null, opacity: 55, threshold: 0, overlay: true, fit: true, patch: -1, view: null };
let bag = null; // the open slide, decoded
let removed = new Uint8Array(0); // one byte per patch: 1 is removed
let off = []; // tokens whose message is removed: "block.head.token", in order
let undoSteps = []; // {removed, off} before each step, for undo
let whatIf = null; // the prediction without the removed patches and tokens
let pending = null; // a region that was drawn or chosen and is not removed yet
let regions = null; // those that the first map marks, with their effect
let region = 0; // the number of the chosen one
let pictures = null;
let isFirstLayer = true; // the map is the first one, of any slide
let list = null;
let hasSecond = false; // a second run to show beside this one
let opening = new AbortController();
let predicting = new AbortController();

const stage = new Stage({
  patch: (row) => selectPatch(row === state.patch ? -1 : row),
  hover: (row) => bag && showLegend(state.overlay ? layer() : null, limitOf(layer(), state.fit), row),
  view: () => (tellView(), delay(saveState)),
  region: (rows) => offerRegion(rows),
  failed: () => showNotice("A part of the slide cannot be read. It may be damaged or missing."),
});

const layer = () => bag.layers.get(state.layer);

// Requests

async function get(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Error("The viewer does not respond. Is `caprmil view` still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.reason ?? `The viewer responded with ${response.status}.`);
}

const getJson = async (path, options) => (await get(path, options)).json();

// Opening a slide

async function open(id, wanted = {}) {
  opening.abort();
  predicting.abort();
  opening = new AbortController();
  const { signal } = opening;
  Object.assign(state, { slide: id, patch: -1, view: null });
  [bag, whatIf, pending, undoSteps, regions, region] = [null, null, null, [], null, 0];
  list.mark(id);
  list.thumbnails.pause(true);
  const { name, problem } = list.slides.find((slide) => slide.id === id);
  $("slide-name").textContent = name;
  document.body.dataset.state = "loading";
  stage.close();
  showNotice("");
  offerRegion(null);
  showBusy(`Explaining ${name} …`);
  try {
    if (problem) throw new Error(problem);
    const facts = await getJson(`api/slides/${id}`, { signal });
    const buffer = await (await get(`api/slides/${id}/numbers?v=${facts.numbers}`, { signal })).arrayBuffer();
    await showSlide(Paint.decode(facts, buffer), wanted, signal);
    document.body.dataset.state = "ready";
  } catch (failed) {
    if (signal.aborted) return;
    clearPanels();
    showNotice(failed.message);
    document.body.dataset.state = "failed";
  }
  if (signal.aborted) return;
  showBusy("");
  if (!bag) list.thumbnails.pause(false);
}

async function showSlide(decoded, wanted, signal) {
  const { facts } = decoded;
  const source = { size: TILE, top: facts.tiles?.top };
  if (facts.tiles) {
    source.tile = (zoom, x, y) => `api/slides/${facts.id}/tiles/${zoom}/${x}_${y}.jpg?v=${facts.tiles.version}`;
  }
  await stage.open(decoded, source, wanted.view);
  if (signal.aborted) return;
  bag = decoded;
  const loaded = stage.tilesLoaded();
  loaded.then(() => list.thumbnails.pause(signal.aborted));
  pictures = new Pictures(facts, loaded);
  removed = wanted.removed ? unpackRows(wanted.removed, bag.n) : new Uint8Array(bag.n);
  off = unpackTokens(wanted.off ?? "", facts.tokens);
  const previous = isFirstLayer ? null : state.layer;
  state.layer = [wanted.layer, previous].find((key) => bag.layers.has(key)) ?? initialLayer(bag);
  isFirstLayer = state.layer === initialLayer(bag);
  state.patch = wanted.patch < bag.n ? wanted.patch : -1;
  $("slide-name").textContent = `${facts.slide}  ·  ${count(bag.n, "patch")}${facts.flags ? `  ·  ${facts.flags}` : ""}`;
  showNotice(!facts.tiles ? noPixelsText(facts) : "");
  if (removed.some(Boolean) || off.length) {
    undoSteps = [{ removed: new Uint8Array(bag.n), off: [] }];
    predict();
  }
  list.update(facts);
  refresh();
  updateRegions();
  showScale();
  saveState();
  tellView();
  measureRegions(signal);
}

async function measureRegions(signal) {
  try {
    regions = await getJson(`api/slides/${state.slide}/regions`, { signal });
  } catch (problem) {
    if (signal.aborted) return;
    regions = { problem: problem.message };
  }
  updateRegions();
}

function noPixelsText({ problem, unplaced }) {
  if (unplaced) return unplaced;
  return `${problem ?? "The slide file was not found."} Only the grid of patches is shown.`;
}

function clearPanels() {
  for (const id of ["prediction", "region-list", "gallery", "patch", "groups", "choices"]) $(id).replaceChildren();
  $("description").textContent = "";
  $("legend").hidden = $("scale").hidden = true;
}

// Showing the state

function refresh() {
  drawMap();
  showMaps(bag, layer(), { choose: chooseLayer, off, toggleToken });
  showGallery(bag, layer(), pictures, goToPatch);
  showDetails();
  updatePrediction();
}

function drawMap() {
  const now = layer();
  const limit = limitOf(now, state.fit);
  const least = (state.threshold / 100) * limit * (now.bytes ? 255 : 1);
  const skip = least ? (n) => removed[n] || Math.abs(now.values[n]) < least : (n) => removed[n];
  stage.show(Paint.raster(bag, now, { limit, skip }), { opacity: state.opacity / 100, overlay: state.overlay, patch: state.patch });
  stage.showRemoved(removed);
  showLegend(state.overlay ? now : null, limit);
  $("fit").checked = state.fit;
  $("fit-label").hidden = now.kind !== "share";
  $("overlay").setAttribute("aria-pressed", state.overlay);
  $("opacity").value = state.opacity;
  $("opacity-text").textContent = `${state.opacity} %`;
  $("threshold").value = state.threshold;
  $("threshold-text").textContent = state.threshold ? `< ${Paint.format((state.threshold / 100) * limit)}` : "none";
}

function showDetails() {
  const close = () => selectPatch(-1);
  showPatch(bag, state.patch, { pictures, layer: layer(), removed, select: goToPatch, choose: chooseLayer, close });
  document.body.classList.toggle("patch-selected", state.patch >= 0);
}

function updatePrediction() {
  showPrediction(bag.facts, whatIf, { undo, reset, show: (box) => stage.showPlace(box) });
}

function updateRegions() {
  showRegions(bag.facts, regions, region, chooseRegion);
}

function showScale() {
  const mpp = bag?.facts.mpp;
  $("scale").hidden = !mpp || !bag.facts.placed;
  if ($("scale").hidden) return;
  const pixel = mpp / stage.placement().scale; // micrometres per pixel of the screen
  const power = 10 ** Math.floor(Math.log10(130 * pixel));
  const length = [5, 2, 1].map((step) => step * power).find((um) => um / pixel <= 130) ?? power;
  $("scale-text").textContent = length >= 1000 ? `${length / 1000} mm` : `${length} µm`;
  $("scale-bar").style.setProperty("width", `${length / pixel}px`);
}

function showNotice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function showBusy(text) {
  $("busy-text").textContent = text;
  $("busy").hidden = !text;
}

// The state in the address

let timer = 0;
function delay(run) {
  if (bag) showScale();
  clearTimeout(timer);
  timer = setTimeout(run, 180);
}

function tellView() {
  if (bag && stage.bag) sayView(state.slide, bag.facts.size, stage.shownView);
}

/** Write the state into the address. With `step` the back button returns to the state before. */
function saveState(step = false) {
  if (!bag) return;
  state.view = stage.view;
  const hash = write({ ...state, removed: removed.some(Boolean) ? packRows(removed) : "", off });
  sayHash(hash);
  if (hash === location.hash) return;
  const address = location.pathname + location.search.replace(/[?&]token=[^&]*/, "") + hash;
  history[step ? "pushState" : "replaceState"](null, "", address);
}

function restoreState() {
  const wanted = read(location.hash);
  Object.assign(state, { opacity: wanted.opacity ?? state.opacity, threshold: wanted.threshold ?? 0, overlay: wanted.overlay, fit: wanted.fit });
  const exists = list.slides.some((slide) => slide.id === wanted.slide);
  if (!exists || wanted.slide !== state.slide || !bag) {
    const id = exists ? wanted.slide : list.visible[0]?.id;
    return id && open(id, wanted);
  }
  if (bag.layers.has(wanted.layer)) state.layer = wanted.layer;
  state.patch = wanted.patch < bag.n ? wanted.patch : -1;
  if (wanted.view) stage.view = wanted.view;
  const rows = unpackRows(wanted.removed ?? "", bag.n);
  const tokens = unpackTokens(wanted.off ?? "", bag.facts.tokens);
  if (packRows(rows) !== packRows(removed) || tokens.join() !== off.join()) {
    [removed, off] = [rows, tokens];
    predict();
  }
  refresh();
}

// Actions

function goToSlide(id) {
  if (!id || id === state.slide || !list.slides.some((slide) => slide.id === id)) return;
  const { slide } = state;
  if (slide && bag) history.pushState(null, "", `#s=${id}`);
  open(id);
  showTab("");
}

function chooseLayer(key) {
  if (!bag || !bag.layers.has(key) || key === state.layer) return;
  state.layer = key;
  isFirstLayer = key === initialLayer(bag);
  state.overlay = true;
  refresh();
  saveState(true);
}

function selectPatch(row) {
  if (!bag || row === state.patch) return;
  state.patch = row;
  drawMap();
  showDetails();
  if (row >= 0 && !isWide()) showTab("patches");
  saveState(true);
}

/** Select a patch and move to it. */
function goToPatch(row) {
  stage.jump(row);
  selectPatch(row);
  if (!isWide()) showTab("");
}

function toggleMap() {
  state.overlay = !state.overlay;
  if (bag) drawMap();
  saveState();
}

function lasso(on) {
  $("lasso").setAttribute("aria-pressed", on);
  stage.lasso(on);
  if (!on) offerRegion(null);
  else if (bag) showTab("");
}

/** Show a region that the map marks, and the buttons to remove it. */
function chooseRegion(chosen) {
  if (chosen.number === region) return offerRegion(null);
  const rows = new Uint8Array(bag.n);
  for (const [first, end] of chosen.rows) rows.fill(1, first, end);
  lasso(false);
  stage.showBox(chosen.box);
  offerRegion(rows, chosen);
  if (!isWide()) showTab("");
  return undefined;
}

/** Show the buttons for a region that was drawn or chosen: one byte per patch, or null. */
function offerRegion(rows, chosen = null) {
  if (rows && !rows.some((row, n) => row && !removed[n])) rows = null;
  pending = rows;
  region = rows && chosen ? chosen.number : 0;
  if (bag) stage.showPending(rows, chosen?.rings);
  if (bag) updateRegions();
  $("region").hidden = !rows;
  if (!rows) return;
  const n = rows.reduce((sum, row, index) => sum + (row && !removed[index] ? 1 : 0), 0);
  $("region-text").textContent = chosen ? `Region ${region}, ${count(n, "patch")}: ${effectText(regions, chosen)}` : count(n, "patch");
  $("remove").disabled = removed.every((row, index) => row || rows[index]);
  $("remove").focus();
}

/** Remove the region, or everything else. */
function removeRegion({ keep }) {
  const rows = pending;
  undoSteps.push({ removed, off });
  removed = removed.map((row, n) => (row || Boolean(rows[n]) !== keep ? 1 : 0));
  afterRemoval();
  lasso(false);
}

function undo() {
  if (!undoSteps.length) return;
  ({ removed, off } = undoSteps.pop());
  afterRemoval();
}

function reset() {
  undoSteps = [];
  [removed, off] = [new Uint8Array(bag.n), []];
  afterRemoval();
}

/** Remove the message of the token that is shown, or restore it; for the mean of heads, in all heads. */
function toggleToken() {
  const names = bag ? tokenNames(bag.facts, parse(state.layer)) : [];
  if (!names.length) return;
  undoSteps.push({ removed, off });
  const others = off.filter((name) => !names.includes(name));
  off = names.every((name) => off.includes(name)) ? others : [...others, ...names].sort();
  const focused = document.activeElement?.id === "token-off"; // the switch is made anew
  afterRemoval();
  if (focused) $("token-off")?.focus();
}

function afterRemoval() {
  predict();
  drawMap();
  showMaps(bag, layer(), { choose: chooseLayer, off, toggleToken });
  showDetails();
  saveState(true);
}

/** Request the prediction without the removed patches and tokens. */
async function predict() {
  predicting.abort();
  predicting = new AbortController();
  const { signal } = predicting;
  const n = removed.reduce((sum, row) => sum + row, 0);
  whatIf = n || off.length ? { ...whatIf, removed: n, off, waiting: true, problem: null } : null;
  updatePrediction();
  if (!whatIf) return;
  if (!isWide()) showTab("prediction");
  try {
    const after = await getJson(`api/slides/${state.slide}/predict`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ without: ranges(removed), tokens: off.map((name) => name.split(".").map(Number)) }),
      signal,
    });
    whatIf = { removed: n, off, after };
  } catch (problem) {
    if (signal.aborted) return;
    whatIf = { removed: n, off, problem: problem.message };
  }
  updatePrediction();
}

const isWide = () => matchMedia("(min-width: 961px)").matches;

function showTab(name) {
  document.body.dataset.tab = name;
  for (const button of $("tabs").children) button.setAttribute("aria-expanded", button.dataset.tab === name);
}

function compare() {
  if (bag) location.assign(sideBySide(location.hash, hasSecond));
}

function help() {
  if (!$("keys").open) $("keys").showModal();
}

function leave() {
  if ($("lasso").getAttribute("aria-pressed") === "true" || pending) lasso(false);
  else if (document.body.dataset.tab) showTab("");
  else selectPatch(-1);
}

// Start

async function start() {
  showBusy("Opening the run …");
  const [run, { slides }] = await Promise.all([getJson("api/run"), getJson("api/slides")]);
  $("run-name").textContent = run.name;
  document.title = `${run.name} · caprmil`;
  $("run-facts").textContent = [
    run.model,
    run.encoder,
    `${run.folds} folds`,
    run.finished ? run.score : "not finished",
  ].filter(Boolean).join("  ·  ");
  hasSecond = Boolean(run.second);
  $("compare").title = `Side by side${hasSecond ? ` with ${run.second}` : ""} (c)`;
  await chooseParts(run, slides);
  if (run.unit === "patient") {
    $("search").placeholder = "Search patients or slides";
    document.querySelector("label[for=search]").textContent = "Search patients or slides";
    document.querySelector('[data-tab="slides"]').textContent = "Patients";
  }
  list = new SlideList(slides, { open: goToSlide, unit: run.unit });
  showBusy("");
  await restoreState();
  listenToPage({ go: (view) => bag && stage.bag && (stage.view = view), open: goToSlide });
}

const actions = {
  next: () => goToSlide(list?.neighbour(state.slide, 1)),
  previous: () => goToSlide(list?.neighbour(state.slide, -1)),
  zoom: (factor) => stage.zoom(factor),
  pan: (x, y) => stage.pan(x, y),
  home: () => stage.home(),
  lasso: () => lasso($("lasso").getAttribute("aria-pressed") !== "true"),
  bag: () => bag,
  layer: () => state.layer,
  chooseLayer, toggleMap, toggleToken, undo, compare, help, leave,
};

function addListeners() {
  const click = (id, action) => $(id).addEventListener("click", action);
  click("zoom-in", () => stage.zoom(1.6));
  click("zoom-out", () => stage.zoom(1 / 1.6));
  click("home", () => stage.home());
  click("overlay", toggleMap);
  click("lasso", actions.lasso);
  click("compare", compare);
  $("compare").hidden = window.parent !== window;
  click("help", help);
  click("remove", () => removeRegion({ keep: false }));
  click("keep-only", () => removeRegion({ keep: true }));
  click("cancel", () => offerRegion(null));
  for (const name of ["opacity", "threshold"]) {
    $(name).addEventListener("input", () => {
      state[name] = Number($(name).value);
      if (bag) drawMap();
      delay(saveState);
    });
  }
  $("fit").addEventListener("change", () => {
    state.fit = $("fit").checked;
    if (bag) drawMap();
    delay(saveState);
  });
  for (const button of $("tabs").children) {
    button.addEventListener("click", () => showTab(document.body.dataset.tab === button.dataset.tab ? "" : button.dataset.tab));
  }
  addEventListener("popstate", () => list && restoreState());
  listen(actions);
}

addListeners();
start().catch((problem) => {
  showBusy("");
  showNotice(problem.message);
  document.body.dataset.state = "failed";
});
