// Paints numbers of patches: decoding, colours, rasters and legends, for report and viewer alike.
"use strict";

const Paint = (() => {
  // Colours people with any colour vision can tell apart: viridis, and blue to vermillion.
  const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];
  const AGAINST = [0, 114, 178];
  const FOR = [213, 94, 0];
  const TOKENS = ["#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000", "#f0e442"];
  const LONGEST = 2048; // pixels of a raster whose patches are in no grid

  const RAMP = VIRIDIS.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

  function ramp(t) {
    const place = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1);
    const low = Math.min(Math.floor(place), RAMP.length - 2);
    return RAMP[low].map((value, band) => value + (place - low) * (RAMP[low + 1][band] - value));
  }

  /** Return red, green, blue (0 to 255) and alpha (0 to 1): what is stronger hides more tissue. */
  function shade(kind, t) {
    const strength = Math.min(Math.abs(t), 1);
    if (kind === "diverging") return [...(t < 0 ? AGAINST : FOR), Math.pow(strength, 0.7)];
    return [...ramp(strength), 0.25 + 0.75 * strength];
  }

  /** Return a case: typed arrays over one buffer, nothing is copied. */
  function decode(facts, buffer) {
    const n = facts.patches;
    const layers = new Map();
    for (const layer of facts.layers) {
      const Kind = layer.bytes ? Uint8Array : Float32Array;
      layers.set(layer.key, { ...layer, values: new Kind(buffer, layer.start, n) });
    }
    const x = new Float32Array(buffer, 0, n);
    const y = new Float32Array(buffer, 4 * n, n);
    return { facts, layers, x, y, n, side: facts.side, grid: facts.grid };
  }

  /** Return the value of a patch in a layer, in the layer's own unit. */
  function value(layer, patch) {
    return layer.bytes ? layer.values[patch] / 255 : layer.values[patch];
  }

  /** Paint a layer into a canvas: one pixel a patch where they are in a grid, else squares.
   * `skip(patch)` leaves patches out; `limit` ends the scale. Returns the canvas and its place
   * on the slide in level-0 pixels. */
  function raster(bag, layer, { limit = layer.limit, skip = () => false } = {}) {
    return bag.grid ? cells(bag, layer, limit, skip) : squares(bag, layer, limit, skip);
  }

  function cells(bag, layer, limit, skip) {
    const { x, y, columns, rows } = bag.grid;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [columns, rows];
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    for (let n = 0; n < bag.n; n++) {
      if (skip(n)) continue;
      const column = Math.round((bag.x[n] - x) / bag.side);
      const row = Math.round((bag.y[n] - y) / bag.side);
      const [red, green, blue, alpha] = shade(layer.kind, value(layer, n) / (limit || 1));
      image.data.set([red, green, blue, 255 * alpha], 4 * (row * columns + column));
    }
    context.putImageData(image, 0, 0);
    return { canvas, x, y, width: columns * bag.side, height: rows * bag.side, pixelated: true };
  }

  function squares(bag, layer, limit, skip) {
    const [width, height] = bag.facts.size;
    const scale = Math.min(1, LONGEST / Math.max(width, height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    const context = canvas.getContext("2d");
    const side = Math.max(1, bag.side * scale);
    for (let n = 0; n < bag.n; n++) {
      if (skip(n)) continue;
      const [red, green, blue, alpha] = shade(layer.kind, value(layer, n) / (limit || 1));
      context.clearRect(bag.x[n] * scale, bag.y[n] * scale, side, side);
      context.fillStyle = `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${alpha})`;
      context.fillRect(bag.x[n] * scale, bag.y[n] * scale, side, side);
    }
    return { canvas, x: 0, y: 0, width, height, pixelated: false };
  }

  /** Return a legend: where a scale starts, ends, and a CSS gradient between. */
  function legend(layer, limit = layer.limit) {
    const low = layer.kind === "diverging" ? -1 : 0;
    const stops = Array.from({ length: 17 }, (_, n) => {
      const [red, green, blue, alpha] = shade(layer.kind, low + ((1 - low) * n) / 16);
      return `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${alpha.toFixed(3)})`;
    });
    return { low: low * limit, high: limit, gradient: `linear-gradient(to right, ${stops.join(", ")})` };
  }

  /** Return a number with three digits that count. */
  function tell(number) {
    if (number === 0) return "0";
    const size = Math.abs(number);
    return size >= 1e-3 && size < 1e5 ? String(Number(number.toPrecision(3))) : number.toExponential(1);
  }

  /** Tell whether all patches speak for the same side: such a map shows little by itself. */
  function oneSided(layer) {
    return layer.values.every((value) => value > 0) || layer.values.every((value) => value < 0);
  }

  /** Return the patch at a place of the slide, or -1. */
  function patchAt(bag, x, y) {
    for (let n = bag.n - 1; n >= 0; n--) {
      if (x >= bag.x[n] && x < bag.x[n] + bag.side && y >= bag.y[n] && y < bag.y[n] + bag.side) return n;
    }
    return -1;
  }

  /** Return the layers of single heads and tokens of the last block, in order. */
  function headLayers(bag) {
    const last = bag.facts.tokens ? bag.facts.tokens.blocks - 1 : 0;
    const prefix = last > 0 ? `block-${last}-` : "";
    return [...bag.layers.values()].filter((layer) => layer.key.startsWith(`${prefix}head-`));
  }

  /** Return the patches whose assignments are most like a patch's, nearest first. */
  function neighbours(bag, patch, k = 8) {
    const heads = headLayers(bag);
    if (!heads.length) return [];
    const distances = new Float64Array(bag.n);
    for (const { values } of heads) {
      const own = values[patch];
      for (let n = 0; n < bag.n; n++) distances[n] += (values[n] - own) ** 2;
    }
    const others = Array.from({ length: bag.n }, (_, n) => n).filter((n) => n !== patch);
    return others.sort((a, b) => distances[a] - distances[b]).slice(0, k);
  }

  return { TOKENS, decode, value, shade, raster, legend, tell, oneSided, patchAt, neighbours, headLayers };
})();
