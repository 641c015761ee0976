// The script of a slide report: layers over the slide, zoom, and the position and numbers of patches.
"use strict";

(() => {
  const byId = (id) => document.getElementById(id);
  const facts = JSON.parse(byId("facts").textContent);
  const bytes = Uint8Array.from(atob(byId("numbers").textContent), (character) => character.charCodeAt(0));
  const bag = Paint.decode(facts, bytes.buffer);
  const [width, height] = facts.size;
  const withPicture = new Set(facts.pictures);
  const stage = byId("stage");
  const scene = byId("scene");
  const canvas = byId("layer-canvas");
  const layerSelect = byId("layer");
  const aboveMean = byId("above-mean");
  const MIN_ZOOM = 1;
  const MAX_ZOOM = 40;

  // The zoom, and the scene's top left corner as a share of the stage.
  const view = { zoom: 1, x: 0, y: 0 };

  stage.style.aspectRatio = `${width} / ${height}`;
  stage.style.width = `min(100%, ${(72 * width) / height}vh)`;

  function element(name, content, attributes = {}) {
    const node = document.createElement(name);
    if (content !== undefined) node.append(...[content].flat());
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  function percent(share) {
    if (share > 0 && share < 0.0005) return "< 0.1\u00a0%";
    return `${(100 * share).toFixed(share >= 0.0995 || share === 0 ? 0 : 1)}\u00a0%`;
  }

  // Layers

  const GROUPS = [
    ["Influence", (key) => /^(sampled-influence|influence|integrated-gradients)-/.test(key)],
    ["Evidence", (key) => key.startsWith("evidence")],
    ["Attention and scores", (key) => /^(attention|score|spread)/.test(key)],
    ["Tokens, all heads", (key) => /(^|-)(token-\d+|entropy)$/.test(key) && !key.includes("head-")],
    ["Tokens of single heads", (key) => key.includes("head-")],
  ];

  function fillLayerSelect() {
    for (const [title, belongs] of GROUPS) {
      const layers = [...bag.layers.values()].filter((layer) => belongs(layer.key));
      if (!layers.length) continue;
      const options = layers.map((layer) => element("option", layer.title, { value: layer.key }));
      layerSelect.append(element("optgroup", options, { label: title }));
    }
    layerSelect.append(element("option", "No layer", { value: "" }));
    layerSelect.value = facts.first_layer;
    aboveMean.checked = isEvidence(bag.layers.get(layerSelect.value)) && Paint.hasOneSign(bag.layers.get(layerSelect.value));
  }

  /** Return the end of a layer's colour scale. For shares it is the highest share, or all colours would be alike. */
  function limitOf(layer) {
    if (layer.kind !== "share") return layer.limit;
    return layer.values.reduce((highest, value) => Math.max(highest, value), 1) / 255;
  }

  function isEvidence(layer) {
    return Boolean(layer?.key.startsWith("evidence-"));
  }

  /** Return the layer to draw: the one selected or, for evidence, how far it is above the slide's mean. */
  function drawnLayer(layer) {
    if (!isEvidence(layer) || !aboveMean.checked) return layer;
    return bag.layers.get(layer.key.replace("evidence", "above"));
  }

  function drawLayer() {
    const selected = bag.layers.get(layerSelect.value);
    const layer = drawnLayer(selected);
    aboveMean.parentElement.hidden = !isEvidence(selected);
    const context = canvas.getContext("2d");
    canvas.hidden = !layer;
    byId("colour-bar").parentElement.hidden = !layer;
    if (!layer) return;
    const raster = Paint.raster(bag, layer, { limit: limitOf(layer) });
    [canvas.width, canvas.height] = [raster.canvas.width, raster.canvas.height];
    context.drawImage(raster.canvas, 0, 0);
    canvas.classList.toggle("pixelated", raster.pixelated);
    setPosition(canvas, raster.x, raster.y, raster.width, raster.height);
    canvas.style.opacity = byId("opacity").value / 100;
    const legend = Paint.legend(layer, limitOf(layer));
    const isShare = layer.kind === "share";
    byId("colour-bar").style.backgroundImage = legend.gradient;
    byId("low").textContent = isShare ? "0 %" : Paint.format(legend.low);
    byId("high").textContent = isShare ? percent(legend.high) : Paint.format(legend.high);
    byId("legend-title").textContent = layer.kind !== "diverging" ? "" : layer === selected ? endsOf(layer) : "below · above the mean";
    canvas.setAttribute("aria-label", `${layer.title}, over the slide`);
  }

  /** Return what both ends of a map of evidence mean. */
  function endsOf(layer) {
    return facts.contrasts[Number(layer.key.match(/\d+$/)[0])].ends.join(" · ");
  }

  /** Place an element at a position on the slide, given in level-0 pixels. */
  function setPosition(node, x, y, wide, high) {
    node.style.left = `${(100 * x) / width}%`;
    node.style.top = `${(100 * y) / height}%`;
    node.style.width = `${(100 * wide) / width}%`;
    node.style.height = `${(100 * high) / height}%`;
  }

  // Zoom and move

  function updateView() {
    const least = 1 - view.zoom;
    view.x = Math.min(0, Math.max(least, view.x));
    view.y = Math.min(0, Math.max(least, view.y));
    scene.style.transform = `translate(${100 * view.x}%, ${100 * view.y}%) scale(${view.zoom})`;
    scene.style.setProperty("--zoom", view.zoom);
    stage.classList.toggle("zoomed", view.zoom > 1);
  }

  /** Zoom around a point of the stage, given as shares of its size. */
  function zoomBy(factor, x = 0.5, y = 0.5) {
    const zoom = Math.min(MAX_ZOOM, Math.max(MIN_ZOOM, view.zoom * factor));
    view.x = x - ((x - view.x) * zoom) / view.zoom;
    view.y = y - ((y - view.y) * zoom) / view.zoom;
    view.zoom = zoom;
    updateView();
  }

  function resetView() {
    Object.assign(view, { zoom: 1, x: 0, y: 0 });
    updateView();
  }

  /** Return the position of a pointer as shares of the stage. */
  function pointOf(event) {
    const box = stage.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  function patchUnder(event) {
    const [x, y] = pointOf(event);
    return Paint.patchAt(bag, ((x - view.x) / view.zoom) * width, ((y - view.y) / view.zoom) * height);
  }

  stage.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && view.zoom === MIN_ZOOM) return; // the page scrolls instead
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY * 0.0016), ...pointOf(event));
  }, { passive: false });

  const pointers = new Map(); // pointers that are down, with their positions
  let moved = false;

  stage.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, pointOf(event));
    moved = false;
    if (view.zoom > 1) stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return hover(event);
    const now = pointOf(event);
    if (Math.hypot(now[0] - before[0], now[1] - before[1]) > 0.004) moved = true;
    else if (!moved) return undefined;
    stage.classList.add("dragged");
    const other = [...pointers].find(([id]) => id !== event.pointerId);
    if (other) {
      const [, [x, y]] = other;
      const distance = (point) => Math.max(0.01, Math.hypot(point[0] - x, point[1] - y));
      zoomBy(distance(now) / distance(before), x, y);
    } else {
      view.x += now[0] - before[0];
      view.y += now[1] - before[1];
      updateView();
    }
    pointers.set(event.pointerId, now);
    return undefined;
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    stage.addEventListener(end, (event) => {
      pointers.delete(event.pointerId);
      stage.classList.remove("dragged");
    });
  }
  stage.addEventListener("click", (event) => {
    const patch = patchUnder(event);
    if (!moved && patch >= 0) selectPatch(patch, { scroll: false });
  });
  stage.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0.1, 0], ArrowRight: [-0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] };
    if (event.key === "+" || event.key === "=") zoomBy(1.5);
    else if (event.key === "-") zoomBy(1 / 1.5);
    else if (event.key === "0") resetView();
    else if (moves[event.key] && view.zoom > 1) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
      updateView();
    } else return;
    event.preventDefault();
  });
  byId("zoom-in").addEventListener("click", () => zoomBy(1.6));
  byId("zoom-out").addEventListener("click", () => zoomBy(1 / 1.6));
  byId("zoom-reset").addEventListener("click", resetView);

  // Patches: their numbers and positions

  let selected = -1;
  let shown = -1; // the patch whose numbers are shown

  function hover(event) {
    const patch = patchUnder(event);
    if (patch >= 0 && patch !== shown) showNumbers(patch);
    return undefined;
  }

  function numberRows(patch) {
    const rows = [];
    const add = (name, value) => rows.push(element("tr", [element("th", name, { scope: "row" }), element("td", value)]));
    const text = (layer) => {
      const value = Paint.value(layer, patch);
      if (layer.kind === "share") return percent(value);
      return `${layer.kind === "diverging" && value > 0 ? "+" : ""}${Paint.format(value)}`;
    };
    for (const layer of bag.layers.values()) {
      const isSelected = layer.key === layerSelect.value;
      if (layer.key.startsWith("above-")) continue;
      const repeated = facts.repeated_layers.includes(layer.key);
      if (layer.key === "attention") {
        const times = Paint.value(layer, patch) * bag.n;
        add("Attention", `${text(layer)} (${Paint.format(times)} × mean)`);
      } else if (isSelected || (!repeated && !layer.key.includes("head-") && !/^block-/.test(layer.key))) {
        add(layer.title.replace(", all heads", ""), text(layer));
      }
    }
    return rows;
  }

  function patchPicture(patch) {
    const namespace = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(namespace, "svg");
    const use = document.createElementNS(namespace, "use");
    svg.setAttribute("viewBox", "0 0 224 224");
    svg.setAttribute("aria-hidden", "true");
    use.setAttribute("href", `#p${patch}`);
    svg.append(use);
    return svg;
  }

  function showNumbers(patch) {
    shown = patch;
    const parts = [element("h3", `Patch ${patch}`)];
    if (withPicture.has(patch)) parts.push(patchPicture(patch));
    parts.push(element("table", element("tbody", numberRows(patch))));
    byId("readout").replaceChildren(...parts);
  }

  function selectPatch(patch, { scroll = true } = {}) {
    selected = selected === patch && !scroll ? -1 : patch;
    const marker = byId("marker");
    marker.hidden = selected < 0;
    for (const button of document.querySelectorAll(".patch")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.patch) === selected));
    }
    if (selected < 0) return;
    setPosition(marker, bag.x[patch], bag.y[patch], bag.side, bag.side);
    marker.classList.remove("new");
    void marker.offsetWidth; // restarts the animation
    marker.classList.add("new");
    showNumbers(patch);
    if (!scroll) return;
    if (view.zoom > 1) {
      view.x = 0.5 - ((bag.x[patch] + bag.side / 2) / width) * view.zoom;
      view.y = 0.5 - ((bag.y[patch] + bag.side / 2) / height) * view.zoom;
      updateView();
    }
    const box = stage.getBoundingClientRect();
    if (box.bottom < 120 || box.top < 0) stage.scrollIntoView({ block: "center" });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".patch");
    if (button) selectPatch(Number(button.dataset.patch));
  });

  // Regions

  function outlineRegion(found) {
    const svg = byId("region-outline");
    svg.toggleAttribute("hidden", !found);
    for (const button of document.querySelectorAll(".region")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.region) === found?.number));
    }
    if (!found) return;
    const path = found.rings.map((ring) => `M${ring.map((point) => point.join(",")).join("L")}Z`).join("");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const line of svg.children) line.setAttribute("d", path);
    svg.setAttribute("class", found.sign > 0 ? "for" : "against");
  }

  function selectRegion(button) {
    const isShown = button.getAttribute("aria-pressed") === "true";
    const found = facts.regions.found.find(({ number }) => number === Number(button.dataset.region));
    outlineRegion(isShown ? null : found);
    if (isShown) return;
    const [x, y, wide, high] = found.box;
    if (view.zoom > 1) {
      view.x = 0.5 - ((x + wide / 2) / width) * view.zoom;
      view.y = 0.5 - ((y + high / 2) / height) * view.zoom;
      updateView();
    }
    const box = stage.getBoundingClientRect();
    if (box.bottom < 120 || box.top < 0) stage.scrollIntoView({ block: "center" });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".region");
    if (button) selectRegion(button);
  });

  // Tokens

  function tokenLayer(token, head) {
    const last = facts.tokens.blocks - 1;
    const prefix = last > 0 ? `block-${last}-` : "";
    return bag.layers.get(head === "" ? `${prefix}token-${token}` : `${prefix}head-${head}-token-${token}`);
  }

  function patchButton(patch, layer) {
    const weight = percent(Paint.value(layer, patch));
    const picture = withPicture.has(patch)
      ? patchPicture(patch)
      : element("span", `Patch ${patch}`, { class: "no-picture" });
    const caption = element("span", [element("b", weight), element("small", "weight")], { class: "caption" });
    return element("button", [picture, caption], {
      type: "button",
      class: "patch",
      "data-patch": patch,
      "aria-label": `Patch ${patch}: ${weight} weight. Show its position.`,
    });
  }

  function drawSmallMap(target, layer) {
    const thumbnail = byId("thumbnail");
    const raster = Paint.raster(bag, layer, { limit: limitOf(layer) });
    const scale = 420 / Math.max(width, height);
    [target.width, target.height] = [Math.max(1, width * scale), Math.max(1, height * scale)];
    const context = target.getContext("2d");
    if (thumbnail) {
      context.filter = "grayscale(1)";
      context.globalAlpha = 0.45;
      context.drawImage(thumbnail, 0, 0, target.width, target.height);
      context.filter = "none";
    }
    context.globalAlpha = thumbnail ? 0.85 : 1;
    context.imageSmoothingEnabled = !raster.pixelated;
    context.drawImage(raster.canvas, raster.x * scale, raster.y * scale, raster.width * scale, raster.height * scale);
    context.globalAlpha = 1;
  }

  function drawTokens(head, { mapsOnly }) {
    const usage = facts.tokens.usage[facts.tokens.blocks - 1];
    const { patches, patchesPerHead } = byId("tokens").dataset;
    for (const card of document.querySelectorAll(".token")) {
      const token = Number(card.dataset.token);
      const layer = tokenLayer(token, head);
      drawSmallMap(card.querySelector("canvas"), layer);
      card.querySelector(".swatch").style.background = Paint.TOKENS[token % Paint.TOKENS.length];
      card.querySelector(".used").style.fill = Paint.TOKENS[token % Paint.TOKENS.length];
      if (mapsOnly) continue;
      const used = head === ""
        ? usage.reduce((sum, perHead) => sum + perHead[token], 0) / usage.length
        : usage[head][token];
      card.querySelector(".usage").textContent = percent(used);
      card.querySelector(".used").setAttribute("width", 100 * used);
      const top = layer.top.slice(0, Number(head === "" ? patches : patchesPerHead));
      card.querySelector(".gallery").replaceChildren(...top.map((patch) => patchButton(patch, layer)));
    }
  }

  function whenThumbnailLoaded(run) {
    const thumbnail = byId("thumbnail");
    if (!thumbnail || thumbnail.complete) run();
    else thumbnail.addEventListener("load", run, { once: true });
  }

  fillLayerSelect();
  layerSelect.addEventListener("change", () => { drawLayer(); if (shown >= 0) showNumbers(shown); });
  aboveMean.addEventListener("change", drawLayer);
  byId("opacity").addEventListener("input", () => { canvas.style.opacity = byId("opacity").value / 100; });
  drawLayer();
  updateView();
  if (facts.tokens && document.querySelector(".token")) {
    whenThumbnailLoaded(() => drawTokens("", { mapsOnly: true })); // the page has the rest already
    const heads = byId("head");
    if (heads) heads.addEventListener("change", () => drawTokens(heads.value, { mapsOnly: false }));
  }
})();
