// The state of the page in the hash of its address, and back.

/** Return rows (one byte each, 1: removed) as run lengths, 7 bits per byte, in base64 for URLs. */
export function packRows(rows) {
  const bytes = [];
  let length = 0;
  let value = 0;
  const push = (number) => {
    for (; number > 127; number >>>= 7) bytes.push((number & 127) | 128);
    bytes.push(number);
  };
  for (const row of rows) {
    if (row === value) length += 1;
    else [value, length] = [row, (push(length), 1)];
  }
  if (value) push(length); // rows after the last run are not removed
  const text = bytes.map((byte) => String.fromCharCode(byte)).join("");
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Return the rows of a text; none if the text is damaged. */
export function unpackRows(text, n) {
  const rows = new Uint8Array(n);
  try {
    const bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    let [row, value, number, shift] = [0, 0, 0, 0];
    for (const character of bytes) {
      const byte = character.charCodeAt(0);
      number += (byte & 127) * 2 ** shift;
      shift += 7;
      if (byte & 128) continue;
      if (row + number > n) return new Uint8Array(n); // from another bag
      rows.fill(value, row, row + number);
      [row, value, number, shift] = [row + number, 1 - value, 0, 0];
    }
  } catch {
    return new Uint8Array(n);
  }
  return rows;
}

/** Return rows as ranges, as the server expects them: [[first, end], ...]. */
export function ranges(rows) {
  const found = [];
  for (let n = 0; n < rows.length; n++) {
    if (!rows[n]) continue;
    const first = n;
    while (n < rows.length && rows[n]) n += 1;
    found.push([first, n]);
  }
  return found;
}

/** Return tokens of a text such as "0.1.2,0.1.3" (block, head, token) that the slide has, in order. */
export function unpackTokens(text, tokens) {
  if (!tokens) return [];
  const sizes = [tokens.blocks, tokens.heads, tokens.tokens];
  const exists = (name) => {
    const numbers = name.split(".");
    return numbers.length === 3 && numbers.every((number, n) => /^\d{1,4}$/.test(number) && Number(number) < sizes[n]);
  };
  return [...new Set(text.split(",").filter(exists))].sort();
}

/** Return a state as a hash. `removed` is packed already; `off` are the tokens without a message. */
export function write({ slide, layer, opacity, threshold, overlay, fit, view, patch, removed, off }) {
  const parts = [`s=${slide}`];
  if (layer) parts.push(`m=${layer}`);
  parts.push(`o=${overlay ? opacity : -opacity}`);
  if (threshold) parts.push(`t=${threshold}`);
  if (!fit) parts.push("f=0");
  if (patch >= 0) parts.push(`p=${patch}`);
  if (removed) parts.push(`r=${removed}`);
  if (off?.length) parts.push(`x=${off.join(",")}`);
  if (view) parts.push(`v=${view.x.toFixed(1)},${view.y.toFixed(1)},${view.zoom.toPrecision(5)}`);
  return `#${parts.join("&")}`;
}

/** Return the state of a hash. Missing and invalid values are undefined. */
export function read(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const number = (name, low, high) => {
    const value = Number(given.get(name) ?? NaN);
    return value >= low && value <= high ? value : undefined;
  };
  const view = (given.get("v") ?? "").split(",").map(Number);
  const isValid = view.length === 3 && view.every(Number.isFinite) && view[2] > 0;
  const opacity = number("o", -100, 100);
  return {
    slide: given.get("s") ?? undefined,
    layer: given.get("m") ?? undefined,
    opacity: opacity === undefined ? undefined : Math.abs(opacity),
    overlay: !(opacity < 0 || Object.is(opacity, -0)),
    threshold: number("t", 0, 95),
    fit: given.get("f") !== "0",
    patch: number("p", 0, 1e9),
    removed: given.get("r") ?? undefined,
    off: given.get("x") ?? undefined,
    view: isValid ? { x: view[0], y: view[1], zoom: view[2] } : undefined,
  };
}
