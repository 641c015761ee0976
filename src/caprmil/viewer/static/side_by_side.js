// Two viewers in frames, which move together. The address holds the state of both.

const given = new URLSearchParams(location.hash.replace(/^#/, ""));
const linked = document.getElementById("linked");
const panes = ["left", "right"].map((id) => ({ frame: document.getElementById(id), hash: given.get(id) ?? "", at: null }));
const isOtherRun = given.has("run"); // the right pane shows the second run
let active = panes[0]; // the one that was touched last; the other follows it

/** Return the view of `pane` after the other one moved from `from` to `to`: the same, if it shows the same slide. */
function follow(pane, from, to) {
  const { view, slide, size } = pane.at;
  if (slide === to.slide && size.join() === to.size.join()) return to.view;
  if (from?.slide !== to.slide) return null; // another slide was opened
  const step = (axis) => ((to.view[axis] - from.view[axis]) * to.view.zoom) / view.zoom; // as far on the screen
  return { x: view.x + step("x"), y: view.y + step("y"), zoom: (view.zoom * to.view.zoom) / from.view.zoom };
}

function save() {
  const parts = panes.map(({ frame, hash }) => `${frame.id}=${encodeURIComponent(hash)}`);
  if (isOtherRun) parts.push("run=2");
  if (!linked.checked) parts.push("linked=0");
  history.replaceState(null, "", `#${parts.join("&")}`);
  document.getElementById("single").href = `./#${panes[0].hash}`;
}

addEventListener("message", ({ source, origin, data }) => {
  const pane = panes.find(({ frame }) => frame.contentWindow === source);
  if (!pane || origin !== location.origin) return;
  if (data.touched) active = pane;
  if (data.hash !== undefined) {
    pane.hash = data.hash;
    save();
  }
  if (!data.at) return;
  const [before, other] = [pane.at, panes.find((each) => each !== pane)];
  pane.at = data.at;
  if (pane !== active || !linked.checked || !other.at) return;
  const send = (message) => other.frame.contentWindow.postMessage(message, location.origin);
  if (isOtherRun && other.at.slide !== data.at.slide && before?.slide !== data.at.slide) return send({ open: data.at.slide });
  const view = follow(other, before, data.at);
  if (!view) return;
  other.at.view = view; // until it says so itself
  send({ view });
});

linked.checked = given.get("linked") !== "0";
linked.addEventListener("change", save);
panes.forEach(({ frame, hash }, n) => (frame.src = `${isOtherRun && n ? "second/" : "./"}#${hash}`));
panes[0].frame.focus();
