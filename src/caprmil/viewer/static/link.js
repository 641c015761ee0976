// The link: the state of the page as the hash of its address, and back.

/** Return rows (a byte each, 1: taken out) as lengths of runs, 7 bits a byte, in base64 for URLs. */
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
  if (value) push(length); // what follows the last run is in
  const text = bytes.map((byte) => String.fromCharCode(byte)).join("");
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Return the rows again; of a damaged text, none. */
export function unpackRows(text, n) {
  const rows = new Uint8Array(n);
  try {
    const bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    let [at, value, number, shift] = [0, 0, 0, 0];
    for (const letter of bytes) {
      const byte = letter.charCodeAt(0);
      number += (byte & 127) * 2 ** shift;
      shift += 7;
      if (byte & 128) continue;
      if (at + number > n) return new Uint8Array(n); // of another bag
      rows.fill(value, at, at + number);
      [at, value, number, shift] = [at + number, 1 - value, 0, 0];
    }
  } catch {
    return new Uint8Array(n);
  }
  return rows;
}

/** Return rows as the server wants them: [[first, end], ...]. */
export function spans(rows) {
  const found = [];
  for (let n = 0; n < rows.length; n++) {
    if (!rows[n]) continue;
    const first = n;
    while (n < rows.length && rows[n]) n += 1;
    found.push([first, n]);
  }
  return found;
}

/** Return a state as a hash. `out` is packed already. */
export function write({ slide, layer, opacity, threshold, overlay, fit, view, patch, out }) {
  const parts = [`s=${slide}`];
  if (layer) parts.push(`m=${layer}`);
  parts.push(`o=${overlay ? opacity : -opacity}`);
  if (threshold) parts.push(`t=${threshold}`);
  if (!fit) parts.push("f=0");
  if (patch >= 0) parts.push(`p=${patch}`);
  if (out) parts.push(`r=${out}`);
  if (view) parts.push(`v=${view.x.toFixed(1)},${view.y.toFixed(1)},${view.zoom.toPrecision(5)}`);
  return `#${parts.join("&")}`;
}

/** Return what a hash says; what it does not say, or says wrongly, is undefined. */
export function read(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const number = (name, low, high) => {
    const value = Number(said.get(name) ?? NaN);
    return value >= low && value <= high ? value : undefined;
  };
  const view = (said.get("v") ?? "").split(",").map(Number);
  const whole = view.length === 3 && view.every(Number.isFinite) && view[2] > 0;
  const opacity = number("o", -100, 100);
  return {
    slide: said.get("s") ?? undefined,
    layer: said.get("m") ?? undefined,
    opacity: opacity === undefined ? undefined : Math.abs(opacity),
    overlay: !(opacity < 0 || Object.is(opacity, -0)),
    threshold: number("t", 0, 95),
    fit: said.get("f") !== "0",
    patch: number("p", 0, 1e9),
    out: said.get("r") ?? undefined,
    view: whole ? { x: view[0], y: view[1], zoom: view[2] } : undefined,
  };
}
