// The stage: deep zoom of a slide, and a canvas over it on which maps, patches and the lasso are drawn.
import { $ } from "./dom.js";

const BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
const CLOSEST = 4; // screen pixels of a pixel of the slide
const PATCH = 220; // screen pixels of a patch that is looked at

// OpenSeadragon adds a style element unless it finds one marked so, and the page's policy forbids that.
const decoy = document.createElementNS("urn:caprmil", "style");
decoy.setAttribute("data-openseadragon-mobile-css", "");
document.head.append(decoy);

const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Stage {
  /** `on` has patch(row), hover(row), view(), region(rows). */
  constructor(on) {
    this.on = on;
    this.bag = null;
    this.raster = this.veil = this.pending = this.path = null;
    this.shown = { opacity: 0.65, overlay: true, patch: -1, hover: -1 };
    this.canvas = $("ink");
    this.osd = OpenSeadragon({
      element: $("deep"),
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: matchMedia("(min-width: 821px)").matches,
      navigatorPosition: "BOTTOM_RIGHT",
      navigatorSizeRatio: 0.14,
      navigatorOpacity: 1, // or the map shines through
      navigatorBorderColor: "#8a949e",
      navigatorDisplayRegionColor: "#d55e00",
      animationTime: still ? 0 : 0.4,
      springStiffness: 9,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
      gestureSettingsTouch: { clickToZoom: false, dblClickToZoom: true, pinchRotate: false },
      minZoomImageRatio: 0.5,
      visibilityRatio: 0.25,
      timeout: 180000,
      immediateRender: still,
    });
    this.osd.canvas.after(this.canvas); // over the slide, under the navigator
    this.osd.innerTracker.keyHandler = this.osd.innerTracker.keyDownHandler = null; // keys are ours
    this.osd.canvas.removeAttribute("tabindex");
    this.osd.addHandler("update-viewport", () => this.draw());
    this.osd.addHandler("resize", () => this.refresh());
    this.osd.addHandler("viewport-change", () => on.view());
    this.osd.addHandler("canvas-click", (event) => event.quick && on.patch(this.patchAt(event.position)));
    this.osd.addHandler("tile-load-failed", (event) => on.failed?.(event.message));
    $("deep").addEventListener("pointermove", (event) => this.#hover(event));
    $("deep").addEventListener("pointerleave", () => this.#hover(null));
    this.#listenForLasso();
    new ResizeObserver(() => this.refresh()).observe(this.canvas);
  }

  /** Open a bag, with its slide under it if `tile(zoom, x, y)` gives addresses. Resolves when it is in view. */
  open(bag, { top, tile, size }, view) {
    this.raster = this.veil = this.pending = this.path = null;
    this.bag = null;
    const [width, height] = bag.facts.size;
    const source = new OpenSeadragon.TileSource(
      tile
        ? { width, height, tileSize: size, minLevel: 0, maxLevel: top, getTileUrl: tile }
        : { width, height, tileSize: Math.ceil(Math.max(width, height)), minLevel: 0, maxLevel: 0, getTileUrl: () => BLANK },
    );
    this.osd.viewport.maxZoomPixelRatio = tile ? Math.max(CLOSEST, PATCH / bag.side) : PATCH / bag.side;
    return new Promise((resolve, reject) => {
      this.osd.addOnceHandler("open", () => {
        this.bag = bag;
        this.bare = !tile;
        this.cells = tile ? null : this.#cells();
        this.osd.navigator?.element.classList.toggle("away", this.bare);
        if (view) this.view = view;
        else this.osd.viewport.goHome(true);
        this.refresh();
        resolve();
      });
      this.osd.addOnceHandler("open-failed", (event) => reject(new Error(event.message)));
      this.osd.open(source);
    });
  }

  /** Resolves when all tiles of the view are there, or soon after. */
  settled() {
    const image = this.osd.world.getItemAt(0);
    return new Promise((resolve) => {
      image.addHandler("fully-loaded-change", ({ fullyLoaded }) => fullyLoaded && resolve());
      setTimeout(resolve, 2500);
    });
  }

  close() {
    this.bag = null;
    this.osd.close();
    this.draw();
  }

  /** Show a raster of a map, or none. */
  show(raster, shown) {
    this.raster = raster;
    Object.assign(this.shown, shown);
    this.refresh();
  }

  /** Hatch the patches that are taken out; `rows` has a byte for each. */
  hatch(rows) {
    this.veil = rows && rows.some(Boolean) ? this.#mask(rows) : null;
    this.refresh();
  }

  /** Mark a region that waits for a word. */
  mark(rows) {
    this.pending = rows ? this.#mask(rows) : null;
    if (!rows) this.path = null;
    this.refresh();
  }

  #mask(rows) {
    const layer = { kind: "share", bytes: false, limit: 1, values: new Float32Array(this.bag.n).fill(1) };
    return Paint.raster(this.bag, layer, { skip: (n) => !rows[n] });
  }

  // Where things are

  get width() {
    return this.bag.facts.size[0];
  }

  /** Where the slide's corner is on the screen, and how many screen pixels a pixel of it is wide. */
  place() {
    const { viewport } = this.osd;
    const corner = viewport.pixelFromPoint(new OpenSeadragon.Point(0, 0), true);
    return { left: corner.x, top: corner.y, scale: (viewport.getContainerSize().x * viewport.getZoom(true)) / this.width };
  }

  get view() {
    if (!this.bag) return null;
    const { viewport } = this.osd;
    const centre = viewport.getCenter();
    const zoom = (viewport.getContainerSize().x * viewport.getZoom()) / this.width;
    return { x: centre.x * this.width, y: centre.y * this.width, zoom };
  }

  set view({ x, y, zoom }) {
    const { viewport } = this.osd;
    viewport.zoomTo((zoom * this.width) / viewport.getContainerSize().x, null, true);
    viewport.panTo(new OpenSeadragon.Point(x / this.width, y / this.width), true);
  }

  /** Go to a patch, near enough to see it, but not further out than we are. */
  jump(row) {
    const { viewport } = this.osd;
    const [x, y] = [this.bag.x[row] + this.bag.side / 2, this.bag.y[row] + this.bag.side / 2];
    const zoom = Math.max(PATCH / this.bag.side, this.view.zoom);
    viewport.panTo(new OpenSeadragon.Point(x / this.width, y / this.width));
    viewport.zoomTo((zoom * this.width) / viewport.getContainerSize().x);
    viewport.applyConstraints();
  }

  zoom(factor) {
    this.osd.viewport.zoomBy(factor);
    this.osd.viewport.applyConstraints();
  }

  pan(x, y) {
    this.osd.viewport.panBy(this.osd.viewport.deltaPointsFromPixels(new OpenSeadragon.Point(x, y)));
    this.osd.viewport.applyConstraints();
  }

  home() {
    this.osd.viewport.goHome();
  }

  toSlide({ x, y }) {
    const { left, top, scale } = this.place();
    return [(x - left) / scale, (y - top) / scale];
  }

  patchAt(point) {
    return this.bag ? Paint.patchAt(this.bag, ...this.toSlide(point)) : -1;
  }

  #hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const mouse = event?.pointerType === "mouse" && !event.buttons && !event.target.closest(".navigator");
    const row = mouse ? this.patchAt({ x: event.clientX - box.left, y: event.clientY - box.top }) : -1;
    if (row === this.shown.hover) return;
    this.shown.hover = row;
    this.on.hover(row);
    this.refresh();
  }

  // Drawing

  refresh() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.waiting);
    this.waiting = 0;
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const ink = canvas.getContext("2d");
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width, height);
    if (!this.bag) return;
    const place = this.place();
    if (this.bare) this.#paper(ink, place);
    if (this.raster && this.shown.overlay) this.#lay(ink, this.raster, place, this.shown.opacity);
    if (this.veil) this.#stripe(ink, this.veil, place, ratio);
    if (this.pending) this.#lay(ink, this.pending, place, 0.45);
    if (this.shown.hover >= 0) this.#frame(ink, this.shown.hover, place, 1);
    if (this.shown.patch >= 0) this.#frame(ink, this.shown.patch, place, 2.5);
    if (this.path) this.#trace(ink, place);
  }

  #lay(ink, raster, { left, top, scale }, alpha) {
    ink.globalAlpha = alpha;
    ink.imageSmoothingEnabled = !raster.pixelated && scale < 1;
    ink.drawImage(raster.canvas, left + raster.x * scale, top + raster.y * scale, raster.width * scale, raster.height * scale);
    ink.globalAlpha = 1;
  }

  #paper(ink, { left, top, scale }) {
    const [width, height] = this.bag.facts.size;
    ink.fillStyle = "#fff";
    ink.fillRect(left, top, width * scale, height * scale);
    this.#lay(ink, this.cells, { left, top, scale }, 1);
  }

  /** Return all patches as one grey picture. */
  #cells() {
    const found = this.#mask(new Uint8Array(this.bag.n).fill(1));
    const pen = found.canvas.getContext("2d");
    pen.globalCompositeOperation = "source-in";
    pen.fillStyle = "#dfe4e8";
    pen.fillRect(0, 0, found.canvas.width, found.canvas.height);
    return found;
  }

  /** Grey and hatch what is taken out: the mask is cut from a pattern. */
  #stripe(ink, mask, place, ratio) {
    const sheet = (this.sheet ??= document.createElement("canvas"));
    [sheet.width, sheet.height] = [this.canvas.width, this.canvas.height];
    const pen = sheet.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#lay(pen, mask, place, 1);
    pen.globalCompositeOperation = "source-in";
    pen.fillStyle = "rgba(236, 239, 242, 0.86)";
    pen.fillRect(0, 0, sheet.width, sheet.height);
    pen.globalCompositeOperation = "source-atop";
    pen.fillStyle = this.#hatching(pen);
    pen.fillRect(0, 0, sheet.width, sheet.height);
    ink.drawImage(sheet, 0, 0, this.canvas.width / ratio, this.canvas.height / ratio);
  }

  #hatching(pen) {
    const stamp = document.createElement("canvas");
    [stamp.width, stamp.height] = [8, 8];
    const line = stamp.getContext("2d");
    line.strokeStyle = "rgba(60, 68, 76, 0.7)";
    line.lineWidth = 1.2;
    line.beginPath();
    for (const shift of [-8, 0, 8]) line.moveTo(shift - 1, 9), line.lineTo(shift + 9, -1);
    line.stroke();
    return pen.createPattern(stamp, "repeat");
  }

  #frame(ink, row, { left, top, scale }, width) {
    const side = this.bag.side * scale;
    const box = [left + this.bag.x[row] * scale, top + this.bag.y[row] * scale, side, side];
    ink.lineWidth = width + 2;
    ink.strokeStyle = "rgba(255, 255, 255, 0.9)";
    ink.strokeRect(...box);
    ink.lineWidth = width;
    ink.strokeStyle = "#101418";
    ink.strokeRect(...box);
  }

  #trace(ink, { left, top, scale }) {
    ink.beginPath();
    for (const [x, y] of this.path) ink.lineTo(left + x * scale, top + y * scale);
    ink.closePath();
    ink.fillStyle = "rgba(255, 255, 255, 0.12)";
    ink.fill();
    ink.setLineDash([]);
    ink.lineWidth = 3.5;
    ink.strokeStyle = "#fff";
    ink.stroke();
    ink.setLineDash([6, 4]);
    ink.lineWidth = 1.8;
    ink.strokeStyle = "#101418";
    ink.stroke();
    ink.setLineDash([]);
  }

  // Lasso

  /** Take the pointer for drawing, or give it back. */
  lasso(on) {
    this.canvas.classList.toggle("drawing", on);
    if (!on && this.drawing) [this.drawing, this.path] = [false, null];
    this.refresh();
  }

  #listenForLasso() {
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return this.toSlide({ x: event.clientX - box.left, y: event.clientY - box.top });
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      if (!this.bag || event.button !== 0) return;
      this.canvas.setPointerCapture(event.pointerId);
      this.pending = null;
      [this.drawing, this.path] = [true, [point(event)]];
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.drawing) return;
      this.path.push(point(event));
      this.refresh();
    });
    const end = (event) => {
      if (!this.drawing) return;
      this.drawing = false;
      if (event.type === "pointercancel") this.path = null;
      else this.on.region(this.#inside(this.path));
      this.refresh();
    };
    this.canvas.addEventListener("pointerup", end);
    this.canvas.addEventListener("pointercancel", end);
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = this.canvas.getBoundingClientRect();
      const at = new OpenSeadragon.Point(event.clientX - box.left, event.clientY - box.top);
      this.osd.viewport.zoomBy(event.deltaY < 0 ? 1.2 : 1 / 1.2, this.osd.viewport.pointFromPixel(at));
      this.osd.viewport.applyConstraints();
    }, { passive: false });
  }

  /** Return a byte for each patch: 1 where its middle lies inside a path. A tap means one patch. */
  #inside(path) {
    const rows = new Uint8Array(this.bag.n);
    const half = this.bag.side / 2;
    const [xs, ys] = [path.map(([x]) => x), path.map(([, y]) => y)];
    const bounds = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    for (let n = 0; n < this.bag.n; n++) {
      const [x, y] = [this.bag.x[n] + half, this.bag.y[n] + half];
      if (x < bounds[0] || x > bounds[1] || y < bounds[2] || y > bounds[3]) continue;
      rows[n] = inside(xs, ys, x, y) ? 1 : 0;
    }
    if (!rows.some(Boolean)) {
      const tapped = Paint.patchAt(this.bag, ...path[0]);
      if (tapped >= 0 && bounds[1] - bounds[0] < half && bounds[3] - bounds[2] < half) rows[tapped] = 1;
    }
    return rows;
  }
}

/** Tell whether a point lies in a polygon: a ray from it crosses the border an odd number of times. */
function inside(xs, ys, x, y) {
  let within = false;
  for (let i = 0, j = xs.length - 1; i < xs.length; j = i++) {
    if (ys[i] > y !== ys[j] > y && x < ((xs[j] - xs[i]) * (y - ys[i])) / (ys[j] - ys[i]) + xs[i]) within = !within;
  }
  return within;
}
