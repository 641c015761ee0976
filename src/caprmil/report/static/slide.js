// A slide report comes alive: layers over the slide, zoom, and patches that show their place.
"use strict";

(() => {
  const find = (id) => document.getElementById(id);
  const facts = JSON.parse(find("facts").textContent);
  const bytes = Uint8Array.from(atob(find("numbers").textContent), (sign) => sign.charCodeAt(0));
  const bag = Paint.decode(facts, bytes.buffer);
  const [width, height] = facts.size;
  const pictured = new Set(facts.pictures);
  const stage = find("stage");
  const scene = find("scene");
  const canvas = find("layer-canvas");
  const chooser = find("layer");
  const FARTHEST = 1;
  const NEAREST = 40;

  // Where we look: zoom, and the scene's corner as a share of the stage.
  const view = { near: 1, x: 0, y: 0 };

  stage.style.aspectRatio = `${width} / ${height}`;
  stage.style.width = `min(100%, ${(72 * width) / height}vh)`;

  function element(name, content, attributes = {}) {
    const made = document.createElement(name);
    if (content !== undefined) made.append(...[content].flat());
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function percent(share) {
    if (share > 0 && share < 0.0005) return "< 0.1\u00a0%";
    return `${(100 * share).toFixed(share >= 0.0995 || share === 0 ? 0 : 1)}\u00a0%`;
  }

  // Layers

  const GROUPS = [
    ["Evidence", (key) => key.startsWith("evidence")],
    ["Attention and scores", (key) => /^(attention|score|spread)/.test(key)],
    ["Tokens, all heads", (key) => /(^|-)(token-\d+|entropy)$/.test(key) && !key.includes("head-")],
    ["Tokens of single heads", (key) => key.includes("head-")],
  ];

  function fillChooser() {
    for (const [title, belongs] of GROUPS) {
      const own = [...bag.layers.values()].filter((layer) => belongs(layer.key));
      if (!own.length) continue;
      const options = own.map((layer) => element("option", layer.title, { value: layer.key }));
      chooser.append(element("optgroup", options, { label: title }));
    }
    chooser.append(element("option", "No layer", { value: "" }));
    chooser.value = `evidence-${facts.shown}`;
    find("relative").checked = Paint.oneSided(bag.layers.get(chooser.value));
  }

  /** Return where a layer's scale ends: a share at the highest there is, or all would look alike. */
  function limit(layer) {
    if (layer.kind !== "share") return layer.limit;
    return layer.values.reduce((most, value) => Math.max(most, value), 1) / 255;
  }

  /** Return a layer as it is or, of evidence, what lies above the slide's mean. */
  function beside(layer) {
    if (!layer || layer.kind !== "diverging" || !find("relative").checked) return layer;
    return bag.layers.get(layer.key.replace("evidence", "above"));
  }

  function paint() {
    const plain = bag.layers.get(chooser.value);
    const layer = beside(plain);
    find("relative").parentElement.hidden = !plain || plain.kind !== "diverging";
    const context = canvas.getContext("2d");
    canvas.hidden = !layer;
    find("ramp").parentElement.hidden = !layer;
    if (!layer) return;
    const painted = Paint.raster(bag, layer, { limit: limit(layer) });
    [canvas.width, canvas.height] = [painted.canvas.width, painted.canvas.height];
    context.drawImage(painted.canvas, 0, 0);
    canvas.classList.toggle("pixelated", painted.pixelated);
    place(canvas, painted.x, painted.y, painted.width, painted.height);
    canvas.style.opacity = find("opacity").value / 100;
    const legend = Paint.legend(layer, limit(layer));
    const share = layer.kind === "share";
    find("ramp").style.backgroundImage = legend.gradient;
    find("low").textContent = share ? "0 %" : Paint.tell(legend.low);
    find("high").textContent = share ? percent(legend.high) : Paint.tell(legend.high);
    find("legend-title").textContent = layer.kind !== "diverging" ? "" : layer === plain ? "against · for" : "less · more than the mean";
    canvas.setAttribute("aria-label", `${layer.title}, over the slide`);
  }

  function place(target, x, y, wide, high) {
    target.style.left = `${(100 * x) / width}%`;
    target.style.top = `${(100 * y) / height}%`;
    target.style.width = `${(100 * wide) / width}%`;
    target.style.height = `${(100 * high) / height}%`;
  }

  // Zoom and move

  function show() {
    const least = 1 - view.near;
    view.x = Math.min(0, Math.max(least, view.x));
    view.y = Math.min(0, Math.max(least, view.y));
    scene.style.transform = `translate(${100 * view.x}%, ${100 * view.y}%) scale(${view.near})`;
    scene.style.setProperty("--near", view.near);
    stage.classList.toggle("nearer", view.near > 1);
  }

  /** Zoom so that a place of the stage (shares of it) stays where it is. */
  function zoom(factor, x = 0.5, y = 0.5) {
    const near = Math.min(NEAREST, Math.max(FARTHEST, view.near * factor));
    view.x = x - ((x - view.x) * near) / view.near;
    view.y = y - ((y - view.y) * near) / view.near;
    view.near = near;
    show();
  }

  function whole() {
    Object.assign(view, { near: 1, x: 0, y: 0 });
    show();
  }

  function at(event) {
    const box = stage.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  function patchUnder(event) {
    const [x, y] = at(event);
    return Paint.patchAt(bag, ((x - view.x) / view.near) * width, ((y - view.y) / view.near) * height);
  }

  stage.addEventListener("wheel", (event) => {
    if (event.deltaY > 0 && view.near === FARTHEST) return; // the page scrolls on
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0016), ...at(event));
  }, { passive: false });

  const held = new Map(); // pointers that are down
  let moved = false;

  stage.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, at(event));
    moved = false;
    if (view.near > 1) stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId);
    if (!before) return hover(event);
    const now = at(event);
    if (Math.hypot(now[0] - before[0], now[1] - before[1]) > 0.004) moved = true;
    else if (!moved) return undefined;
    stage.classList.add("dragged");
    const other = [...held].find(([id]) => id !== event.pointerId);
    if (other) {
      const [, [x, y]] = other;
      const far = (point) => Math.max(0.01, Math.hypot(point[0] - x, point[1] - y));
      zoom(far(now) / far(before), x, y);
    } else {
      view.x += now[0] - before[0];
      view.y += now[1] - before[1];
      show();
    }
    held.set(event.pointerId, now);
    return undefined;
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    stage.addEventListener(end, (event) => {
      held.delete(event.pointerId);
      stage.classList.remove("dragged");
    });
  }
  stage.addEventListener("click", (event) => {
    const patch = patchUnder(event);
    if (!moved && patch >= 0) choose(patch, { scroll: false });
  });
  stage.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0.1, 0], ArrowRight: [-0.1, 0], ArrowUp: [0, 0.1], ArrowDown: [0, -0.1] };
    if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0") whole();
    else if (moves[event.key] && view.near > 1) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
      show();
    } else return;
    event.preventDefault();
  });
  find("nearer").addEventListener("click", () => zoom(1.6));
  find("farther").addEventListener("click", () => zoom(1 / 1.6));
  find("whole").addEventListener("click", whole);

  // A patch: its numbers, and its place

  let chosen = -1;
  let told = -1;

  function hover(event) {
    const patch = patchUnder(event);
    if (patch >= 0 && patch !== told) tell(patch);
    return undefined;
  }

  function numbers(patch) {
    const rows = [];
    const add = (name, value) => rows.push(element("tr", [element("th", name, { scope: "row" }), element("td", value)]));
    const say = (layer) => {
      const value = Paint.value(layer, patch);
      if (layer.kind === "share") return percent(value);
      return `${layer.kind === "diverging" && value > 0 ? "+" : ""}${Paint.tell(value)}`;
    };
    for (const layer of bag.layers.values()) {
      const chosenLayer = layer.key === chooser.value;
      if (layer.key.startsWith("above-")) continue;
      const twin = facts.classes.length === 2 && layer.key === `evidence-${1 - facts.shown}`;
      if (layer.key === "attention") {
        const times = Paint.value(layer, patch) * bag.n;
        add("Attention", `${say(layer)} (${Paint.tell(times)} × mean)`);
      } else if (chosenLayer || (!twin && !layer.key.includes("head-") && !/^block-/.test(layer.key))) {
        add(layer.title.replace(", all heads", ""), say(layer));
      }
    }
    return rows;
  }

  function drawing(patch) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    const use = document.createElementNS(space, "use");
    svg.setAttribute("viewBox", "0 0 224 224");
    svg.setAttribute("aria-hidden", "true");
    use.setAttribute("href", `#p${patch}`);
    svg.append(use);
    return svg;
  }

  function tell(patch) {
    told = patch;
    const parts = [element("h3", `Patch ${patch}`)];
    if (pictured.has(patch)) parts.push(drawing(patch));
    parts.push(element("table", element("tbody", numbers(patch))));
    find("readout").replaceChildren(...parts);
  }

  function choose(patch, { scroll = true } = {}) {
    chosen = chosen === patch && !scroll ? -1 : patch;
    const spot = find("spot");
    spot.hidden = chosen < 0;
    for (const button of document.querySelectorAll(".patch")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.patch) === chosen));
    }
    if (chosen < 0) return;
    place(spot, bag.x[patch], bag.y[patch], bag.side, bag.side);
    spot.classList.remove("new");
    void spot.offsetWidth; // begins the animation anew
    spot.classList.add("new");
    tell(patch);
    if (!scroll) return;
    if (view.near > 1) {
      view.x = 0.5 - ((bag.x[patch] + bag.side / 2) / width) * view.near;
      view.y = 0.5 - ((bag.y[patch] + bag.side / 2) / height) * view.near;
      show();
    }
    const box = stage.getBoundingClientRect();
    if (box.bottom < 120 || box.top < 0) stage.scrollIntoView({ block: "center" });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest(".patch");
    if (button) choose(Number(button.dataset.patch));
  });

  // Tokens

  function tokenLayer(token, head) {
    const last = facts.tokens.blocks - 1;
    const prefix = last > 0 ? `block-${last}-` : "";
    return bag.layers.get(head === "" ? `${prefix}token-${token}` : `${prefix}head-${head}-token-${token}`);
  }

  function button(patch, layer) {
    const share = percent(Paint.value(layer, patch));
    const picture = pictured.has(patch)
      ? drawing(patch)
      : element("span", `Patch ${patch}`, { class: "no-picture" });
    const caption = element("span", [element("b", share), element("small", "of it")], { class: "caption" });
    return element("button", [picture, caption], {
      type: "button",
      class: "patch",
      "data-patch": patch,
      "aria-label": `Patch ${patch}: ${share} of it. Show its place.`,
    });
  }

  function smallMap(target, layer) {
    const picture = find("thumbnail");
    const painted = Paint.raster(bag, layer, { limit: limit(layer) });
    const scale = 420 / Math.max(width, height);
    [target.width, target.height] = [Math.max(1, width * scale), Math.max(1, height * scale)];
    const context = target.getContext("2d");
    if (picture) {
      context.filter = "grayscale(1)";
      context.globalAlpha = 0.45;
      context.drawImage(picture, 0, 0, target.width, target.height);
      context.filter = "none";
    }
    context.globalAlpha = picture ? 0.85 : 1;
    context.imageSmoothingEnabled = !painted.pixelated;
    context.drawImage(painted.canvas, painted.x * scale, painted.y * scale, painted.width * scale, painted.height * scale);
    context.globalAlpha = 1;
  }

  function drawTokens(head, first) {
    const usage = facts.tokens.usage[facts.tokens.blocks - 1];
    for (const card of document.querySelectorAll(".token")) {
      const token = Number(card.dataset.token);
      const layer = tokenLayer(token, head);
      smallMap(card.querySelector("canvas"), layer);
      card.querySelector(".swatch").style.background = Paint.TOKENS[token % Paint.TOKENS.length];
      card.querySelector(".used").style.fill = Paint.TOKENS[token % Paint.TOKENS.length];
      if (first) continue; // what was written is right
      const used = head === ""
        ? usage.reduce((sum, own) => sum + own[token], 0) / usage.length
        : usage[head][token];
      card.querySelector(".usage").textContent = percent(used);
      card.querySelector(".used").setAttribute("width", 100 * used);
      const [ofAll, ofOne] = facts.galleries;
      const many = head === "" ? ofAll || 8 : ofOne || 4;
      card.querySelector(".gallery").replaceChildren(...layer.top.slice(0, many).map((n) => button(n, layer)));
    }
  }

  function loaded(then) {
    const picture = find("thumbnail");
    if (!picture || picture.complete) then();
    else picture.addEventListener("load", then, { once: true });
  }

  fillChooser();
  chooser.addEventListener("change", () => { paint(); if (told >= 0) tell(told); });
  find("relative").addEventListener("change", paint);
  find("opacity").addEventListener("input", () => { canvas.style.opacity = find("opacity").value / 100; });
  paint();
  show();
  if (facts.tokens && document.querySelector(".token")) {
    loaded(() => drawTokens("", true));
    const heads = find("head");
    if (heads) heads.addEventListener("change", () => drawTokens(heads.value, false));
  }
})();
