// The viewer as one of two panes side by side (side_by_side.js): it says where it is, and goes where the other pane goes.

const isPane = window.parent !== window;
const send = (message) => isPane && window.parent.postMessage(message, location.origin);

/** Listen to the page around the pane: `go(view)` moves the slide, `open(id)` opens another one. */
export function listenToPage({ go, open }) {
  if (!isPane) return;
  addEventListener("message", ({ source, origin, data }) => {
    if (source !== window.parent || origin !== location.origin) return;
    if (data.view) go(data.view);
    if (data.open) open(data.open);
  });
  for (const type of ["pointerdown", "wheel", "keydown"]) addEventListener(type, () => send({ touched: true }), { capture: true, passive: true });
}

export const sayView = (slide, size, view) => send({ at: { slide, size, view } });
export const sayHash = (hash) => send({ hash: hash.replace(/^#/, "") });

/** Return the address of this state beside itself, or beside the second run. */
export function sideBySide(hash, hasSecond) {
  const own = encodeURIComponent(hash.replace(/^#/, ""));
  return `compare#left=${own}&right=${own}${hasSecond ? "&run=2" : ""}`;
}
