// Helpers for the document and for text.

export const $ = (id) => document.getElementById(id);

/** Return a new element. `options`: class, text, on (listeners), style, data; all others are attributes. */
export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return a share in per cent. Shares near 0 or 1 are not rounded to them. */
export function percent(share) {
  if (share > 0.9995 && share < 1) return "> 99.9 %";
  if (share < 0.0005 && share > 0) return "< 0.1 %";
  return `${(100 * share).toFixed(1)} %`;
}

export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : noun.endsWith("h") ? "es" : "s"}`;
