// Draws the numbers of patches: decoding, colours, rasters and legends. Report and viewer share it.
"use strict";

const Paint = (() => {
  // Colours that are distinct for any colour vision: viridis, and blue to vermillion.
  const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];
  const AGAINST = [0, 114, 178];
  const FOR = [213, 94, 0];
  const TOKENS = ["#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000", "#f0e442"];
  const MAX_PX = 2048; // longer side of a raster whose patches are not in a grid

  const STOPS = VIRIDIS.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

  function viridis(t) {
    const position = Math.min(Math.max(t, 0), 1) * (STOPS.length - 1);
    const low = Math.min(Math.floor(position), STOPS.length - 2);
    return STOPS[low].map((value, band) => value + (position - low) * (STOPS[low + 1][band] - value));
  }

  /** Return red, green, blue (0 to 255) and alpha (0 to 1) of a value from -1 to 1. Strong values are more opaque. */
  function colour(kind, t) {
    const strength = Math.min(Math.abs(t), 1);
    if (kind === "diverging") return [...(t < 0 ? AGAINST : FOR), Math.pow(strength, 0.7)];
    return [...viridis(strength), 0.25 + 0.75 * strength];
  }

  /** Return the patches and layers of a slide as typed arrays over one buffer, without copies. */
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

  /** Return the value of a patch in a layer, in the unit of the layer. */
  function value(layer, patch) {
    return layer.bytes ? layer.values[patch] / 255 : layer.values[patch];
  }

  /** Draw a layer into a canvas: one pixel per patch if patches are in a grid, else squares.
   * `skip(patch)` leaves patches out; `limit` is the end of the colour scale. Returns the canvas
   * and its position on the slide in level-0 pixels. */
  function raster(bag, layer, { limit = layer.limit, skip = () => false } = {}) {
    return bag.grid ? gridRaster(bag, layer, limit, skip) : squareRaster(bag, layer, limit, skip);
  }

  function gridRaster(bag, layer, limit, skip) {
    const { x, y, columns, rows } = bag.grid;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [columns, rows];
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns, rows);
    for (let n = 0; n < bag.n; n++) {
      if (skip(n)) continue;
      const column = Math.round((bag.x[n] - x) / bag.side);
      const row = Math.round((bag.y[n] - y) / bag.side);
      const [red, green, blue, alpha] = colour(layer.kind, value(layer, n) / (limit || 1));
      image.data.set([red, green, blue, 255 * alpha], 4 * (row * columns + column));
    }
    context.putImageData(image, 0, 0);
    return { canvas, x, y, width: columns * bag.side, height: rows * bag.side, pixelated: true };
  }

  function squareRaster(bag, layer, limit, skip) {
    const [width, height] = bag.facts.size;
    const scale = Math.min(1, MAX_PX / Math.max(width, height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    const context = canvas.getContext("2d");
    const side = Math.max(1, bag.side * scale);
    for (let n = 0; n < bag.n; n++) {
      if (skip(n)) continue;
      const [red, green, blue, alpha] = colour(layer.kind, value(layer, n) / (limit || 1));
      context.clearRect(bag.x[n] * scale, bag.y[n] * scale, side, side);
      context.fillStyle = `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${alpha})`;
      context.fillRect(bag.x[n] * scale, bag.y[n] * scale, side, side);
    }
    return { canvas, x: 0, y: 0, width, height, pixelated: false };
  }

  /** Return a legend: both ends of the colour scale, and its CSS gradient. */
  function legend(layer, limit = layer.limit) {
    const low = layer.kind === "diverging" ? -1 : 0;
    const stops = Array.from({ length: 17 }, (_, n) => {
      const [red, green, blue, alpha] = colour(layer.kind, low + ((1 - low) * n) / 16);
      return `rgba(${red | 0}, ${green | 0}, ${blue | 0}, ${alpha.toFixed(3)})`;
    });
    return { low: low * limit, high: limit, gradient: `linear-gradient(to right, ${stops.join(", ")})` };
  }

  /** Return a number with three significant digits. */
  function format(number) {
    if (number === 0) return "0";
    const size = Math.abs(number);
    return size >= 1e-3 && size < 1e5 ? String(Number(number.toPrecision(3))) : number.toExponential(1);
  }

  /** Return whether the values of all patches have the same sign. Such a map shows little by itself. */
  function hasOneSign(layer) {
    return layer.values.every((value) => value > 0) || layer.values.every((value) => value < 0);
  }

  /** Return the patch at a position on the slide, or -1. */
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

  /** Return the patches with the most similar token weights, the most similar first. */
  function neighbours(bag, patch, k = 8) {
    const heads = headLayers(bag);
    if (!heads.length) return [];
    const distances = new Float64Array(bag.n);
    for (const { values } of heads) {
      const value = values[patch];
      for (let n = 0; n < bag.n; n++) distances[n] += (values[n] - value) ** 2;
    }
    const others = Array.from({ length: bag.n }, (_, n) => n).filter((n) => n !== patch);
    return others.sort((a, b) => distances[a] - distances[b]).slice(0, k);
  }

  return { TOKENS, decode, value, colour, raster, legend, format, hasOneSign, patchAt, neighbours, headLayers };
})();
