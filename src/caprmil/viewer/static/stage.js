// The stage: deep zoom of a slide, and a canvas over it for maps, patches and the lasso.
import { $ } from "./dom.js";

const BLANK = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";
const MAX_ZOOM = 4; // screen pixels per pixel of the slide
const PATCH_PX = 220; // screen pixels of a patch after a jump to it

// OpenSeadragon adds a style element unless it finds this one. The content security policy forbids that.
const marker = document.createElementNS("urn:caprmil", "style");
marker.setAttribute("data-openseadragon-mobile-css", "");
document.head.append(marker);

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Stage {
  /** `on` has the listeners patch(row), hover(row), view(), region(rows) and failed(). */
  constructor(on) {
    this.on = on;
    this.bag = null;
    this.raster = this.removed = this.pending = this.path = this.rings = null;
    this.shown = { opacity: 0.65, overlay: true, patch: -1, hover: -1 };
    this.canvas = $("map-canvas");
    this.osd = OpenSeadragon({
      element: $("slide-canvas"),
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: matchMedia("(min-width: 961px)").matches,
      navigatorPosition: "BOTTOM_RIGHT",
      navigatorSizeRatio: 0.14,
      navigatorOpacity: 1, // else the map is visible through it
      navigatorBorderColor: "#8a949e",
      navigatorDisplayRegionColor: "#d55e00",
      animationTime: reducedMotion ? 0 : 0.4,
      springStiffness: 9,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
      gestureSettingsTouch: { clickToZoom: false, dblClickToZoom: true, pinchRotate: false },
      minZoomImageRatio: 0.5,
      visibilityRatio: 0.25,
      timeout: 180000,
      immediateRender: reducedMotion,
    });
    this.osd.canvas.after(this.canvas); // over the slide, under the navigator
    this.osd.innerTracker.keyHandler = this.osd.innerTracker.keyDownHandler = null; // keyboard.js handles keys
    this.osd.canvas.removeAttribute("tabindex");
    this.osd.addHandler("update-viewport", () => this.draw());
    this.osd.addHandler("resize", () => this.refresh());
    this.osd.addHandler("viewport-change", () => on.view());
    this.osd.addHandler("canvas-click", (event) => event.quick && on.patch(this.patchAt(event.position)));
    this.osd.addHandler("tile-load-failed", (event) => on.failed?.(event.message));
    $("slide-canvas").addEventListener("pointermove", (event) => this.#hover(event));
    $("slide-canvas").addEventListener("pointerleave", () => this.#hover(null));
    this.#listenForLasso();
    new ResizeObserver(() => this.refresh()).observe(this.canvas);
  }

  /** Open a bag, with its slide if `tile(zoom, x, y)` returns addresses. Resolves when it is in view. */
  open(bag, { top, tile, size }, view) {
    this.raster = this.removed = this.pending = this.path = this.rings = null;
    this.bag = null;
    const [width, height] = bag.facts.size;
    const source = new OpenSeadragon.TileSource(
      tile
        ? { width, height, tileSize: size, minLevel: 0, maxLevel: top, getTileUrl: tile }
        : { width, height, tileSize: Math.ceil(Math.max(width, height)), minLevel: 0, maxLevel: 0, getTileUrl: () => BLANK },
    );
    this.osd.viewport.maxZoomPixelRatio = tile ? Math.max(MAX_ZOOM, PATCH_PX / bag.side) : PATCH_PX / bag.side;
    return new Promise((resolve, reject) => {
      this.osd.addOnceHandler("open", () => {
        this.bag = bag;
        this.hasPixels = Boolean(tile);
        this.squares = tile ? null : this.#greySquares();
        this.osd.navigator?.element.classList.toggle("hidden", !this.hasPixels);
        if (view) this.view = view;
        else this.osd.viewport.goHome(true);
        this.refresh();
        resolve();
      });
      this.osd.addOnceHandler("open-failed", (event) => reject(new Error(event.message)));
      this.osd.open(source);
    });
  }

  /** Resolves when all tiles in view are loaded, or after a short time. */
  tilesLoaded() {
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

  /** Hatch the removed patches; `rows` has one byte per patch. */
  showRemoved(rows) {
    this.removed = rows && rows.some(Boolean) ? this.#mask(rows) : null;
    this.refresh();
  }

  /** Mark a region that is not removed yet: one byte per patch, with its outline if it is known. */
  showPending(rows, rings = null) {
    this.pending = rows ? this.#mask(rows) : null;
    this.rings = rows ? rings : null;
    if (!rows || rings) this.path = null;
    this.refresh();
  }

  #mask(rows) {
    const layer = { kind: "share", bytes: false, limit: 1, values: new Float32Array(this.bag.n).fill(1) };
    return Paint.raster(this.bag, layer, { skip: (n) => !rows[n] });
  }

  // Positions

  get width() {
    return this.bag.facts.size[0];
  }

  /** Return the slide's corner on the screen, and the number of screen pixels per pixel of the slide. */
  placement() {
    const { viewport } = this.osd;
    const corner = viewport.pixelFromPoint(new OpenSeadragon.Point(0, 0), true);
    return { left: corner.x, top: corner.y, scale: (viewport.getContainerSize().x * viewport.getZoom(true)) / this.width };
  }

  get view() {
    return this.bag ? this.#viewAt(false) : null;
  }

  /** The view at this moment; `view` is where a movement will end. */
  get shownView() {
    return this.bag ? this.#viewAt(true) : null;
  }

  #viewAt(current) {
    const { viewport } = this.osd;
    const centre = viewport.getCenter(current);
    const zoom = (viewport.getContainerSize().x * viewport.getZoom(current)) / this.width;
    return { x: centre.x * this.width, y: centre.y * this.width, zoom };
  }

  set view({ x, y, zoom }) {
    const { viewport } = this.osd;
    viewport.zoomTo((zoom * this.width) / viewport.getContainerSize().x, null, true);
    viewport.panTo(new OpenSeadragon.Point(x / this.width, y / this.width), true);
  }

  /** Move to a patch, and zoom in if it is too small to see. */
  jump(row) {
    const { viewport } = this.osd;
    const [x, y] = [this.bag.x[row] + this.bag.side / 2, this.bag.y[row] + this.bag.side / 2];
    const zoom = Math.max(PATCH_PX / this.bag.side, this.view.zoom);
    viewport.panTo(new OpenSeadragon.Point(x / this.width, y / this.width));
    viewport.zoomTo((zoom * this.width) / viewport.getContainerSize().x);
    viewport.applyConstraints();
  }

  /** Show a box of the slide, with a margin as wide as the box on each side. */
  showBox([x, y, width, height]) {
    const margin = Math.max(width, height);
    const box = [x - margin, y - margin, width + 2 * margin, height + 2 * margin].map((value) => value / this.width);
    this.osd.viewport.fitBoundsWithConstraints(new OpenSeadragon.Rect(...box));
  }

  /** Show a box that is a whole slide of a patient. */
  showPlace(box) {
    this.osd.viewport.fitBoundsWithConstraints(new OpenSeadragon.Rect(...box.map((value) => value / this.width)));
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
    const { left, top, scale } = this.placement();
    return [(x - left) / scale, (y - top) / scale];
  }

  patchAt(point) {
    return this.bag ? Paint.patchAt(this.bag, ...this.toSlide(point)) : -1;
  }

  #hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const isMouse = event?.pointerType === "mouse" && !event.buttons && !event.target.closest(".navigator");
    const row = isMouse ? this.patchAt({ x: event.clientX - box.left, y: event.clientY - box.top }) : -1;
    if (row === this.shown.hover) return;
    this.shown.hover = row;
    this.on.hover(row);
    this.refresh();
  }

  // Drawing

  refresh() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    if (!this.bag) return;
    const placement = this.placement();
    if (!this.hasPixels) this.#drawSquares(context, placement);
    if (this.raster && this.shown.overlay) this.#drawRaster(context, this.raster, placement, this.shown.opacity);
    this.#drawNames(context, placement);
    if (this.removed) this.#drawHatched(context, this.removed, placement, ratio);
    if (this.pending && !this.rings) this.#drawRaster(context, this.pending, placement, 0.45);
    if (this.rings) this.#drawOutline(context, this.rings, placement);
    if (this.shown.hover >= 0) this.#drawFrame(context, this.shown.hover, placement, 1);
    if (this.shown.patch >= 0) this.#drawFrame(context, this.shown.patch, placement, 2.5);
    if (this.path) this.#drawOutline(context, [this.path], placement);
  }

  #drawRaster(context, raster, { left, top, scale }, alpha) {
    context.globalAlpha = alpha;
    context.imageSmoothingEnabled = !raster.pixelated && scale < 1;
    context.drawImage(raster.canvas, left + raster.x * scale, top + raster.y * scale, raster.width * scale, raster.height * scale);
    context.globalAlpha = 1;
  }

  #drawSquares(context, { left, top, scale }) {
    const [width, height] = this.bag.facts.size;
    context.fillStyle = "#fff";
    context.fillRect(left, top, width * scale, height * scale);
    this.#drawRaster(context, this.squares, { left, top, scale }, 1);
  }

  /** Return all patches as grey squares. */
  #greySquares() {
    const raster = this.#mask(new Uint8Array(this.bag.n).fill(1));
    const context = raster.canvas.getContext("2d");
    context.globalCompositeOperation = "source-in";
    context.fillStyle = "#dfe4e8";
    context.fillRect(0, 0, raster.canvas.width, raster.canvas.height);
    return raster;
  }

  /** Draw the removed patches grey and hatched, by filling their mask with a pattern. */
  #drawHatched(context, mask, placement, ratio) {
    const sheet = (this.sheet ??= document.createElement("canvas"));
    [sheet.width, sheet.height] = [this.canvas.width, this.canvas.height];
    const pen = sheet.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#drawRaster(pen, mask, placement, 1);
    pen.globalCompositeOperation = "source-in";
    pen.fillStyle = "rgba(236, 239, 242, 0.86)";
    pen.fillRect(0, 0, sheet.width, sheet.height);
    pen.globalCompositeOperation = "source-atop";
    pen.fillStyle = this.#hatchPattern(pen);
    pen.fillRect(0, 0, sheet.width, sheet.height);
    context.drawImage(sheet, 0, 0, this.canvas.width / ratio, this.canvas.height / ratio);
  }

  #hatchPattern(pen) {
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

  /** Write the name of each slide of a patient above it. */
  #drawNames(context, { left, top, scale }) {
    for (const { name, box } of this.bag.facts.slides) {
      const [x, y, width] = [left + box[0] * scale, top + box[1] * scale, box[2] * scale];
      context.font = "600 12px system-ui, sans-serif";
      context.lineWidth = 3;
      context.strokeStyle = "rgba(255, 255, 255, 0.9)";
      context.fillStyle = "#101418";
      let text = name;
      while (text.length > 2 && context.measureText(text).width > width) text = `${text.slice(0, -2)}…`;
      context.strokeText(text, x, y - 5);
      context.fillText(text, x, y - 5);
    }
  }

  #drawFrame(context, row, { left, top, scale }, width) {
    const side = this.bag.side * scale;
    const box = [left + this.bag.x[row] * scale, top + this.bag.y[row] * scale, side, side];
    context.lineWidth = width + 2;
    context.strokeStyle = "rgba(255, 255, 255, 0.9)";
    context.strokeRect(...box);
    context.lineWidth = width;
    context.strokeStyle = "#101418";
    context.strokeRect(...box);
  }

  #drawOutline(context, rings, { left, top, scale }) {
    context.beginPath();
    for (const ring of rings) {
      ring.forEach(([x, y], n) => context[n ? "lineTo" : "moveTo"](left + x * scale, top + y * scale));
      context.closePath();
    }
    context.fillStyle = "rgba(255, 255, 255, 0.12)";
    context.fill("evenodd");
    context.setLineDash([]);
    context.lineWidth = 3.5;
    context.strokeStyle = "#fff";
    context.stroke();
    context.setLineDash([6, 4]);
    context.lineWidth = 1.8;
    context.strokeStyle = "#101418";
    context.stroke();
    context.setLineDash([]);
  }

  // Lasso

  /** Use the pointer for drawing, or stop that. */
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
      this.pending = this.rings = null;
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
      else this.on.region(this.#patchesInside(this.path));
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

  /** Return one byte per patch: 1 if its centre is inside a path. A tap selects one patch. */
  #patchesInside(path) {
    const rows = new Uint8Array(this.bag.n);
    const half = this.bag.side / 2;
    const [xs, ys] = [path.map(([x]) => x), path.map(([, y]) => y)];
    const bounds = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    for (let n = 0; n < this.bag.n; n++) {
      const [x, y] = [this.bag.x[n] + half, this.bag.y[n] + half];
      if (x < bounds[0] || x > bounds[1] || y < bounds[2] || y > bounds[3]) continue;
      rows[n] = isInside(xs, ys, x, y) ? 1 : 0;
    }
    if (!rows.some(Boolean)) {
      const tapped = Paint.patchAt(this.bag, ...path[0]);
      if (tapped >= 0 && bounds[1] - bounds[0] < half && bounds[3] - bounds[2] < half) rows[tapped] = 1;
    }
    return rows;
  }
}

/** Return whether a point is in a polygon: a ray from it crosses the border an odd number of times. */
function isInside(xs, ys, x, y) {
  let inside = false;
  for (let i = 0, j = xs.length - 1; i < xs.length; j = i++) {
    if (ys[i] > y !== ys[j] > y && x < ((xs[j] - xs[i]) * (y - ys[i])) / (ys[j] - ys[i]) + xs[i]) inside = !inside;
  }
  return inside;
}
