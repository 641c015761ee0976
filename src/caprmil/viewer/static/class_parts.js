// Classes: the predicted one, and the probability of each.
import { el, percent } from "./dom.js";

let classes = [];

const best = (probabilities) => probabilities.indexOf(Math.max(...probabilities));

export function start(run) {
  classes = run.target.titles;
}

export const predicted = (answer) => classes[best(answer)];

export const labelText = (label) => label;

// The list of slides

const isWrong = ({ label, predicted }) => label !== null && predicted !== null && label !== predicted;
const certainty = (slide) => (slide.answer ? Math.max(...slide.answer) : null);

export function listText(slide) {
  const verdict = slide.label === null ? "" : isWrong(slide) ? "wrong" : "right";
  const mark = { right: "✓ ", wrong: "✗ " }[verdict] ?? "";
  return { verdict, prediction: `${mark}${slide.predicted} ${percent(Math.max(...slide.answer))}` };
}

export const filters = () => [["mistakes", "mistakes", isWrong]];

/** Orders of the list. Slides without a prediction come last. */
export const orders = [
  ["uncertain", "least certain first", (a, b) => (certainty(a) ?? 2) - (certainty(b) ?? 2)],
  ["certain", "most certain first", (a, b) => (certainty(b) ?? 0) - (certainty(a) ?? 0)],
];

export const sortGroups = (names) => classes.filter((name) => names.includes(name));

// The prediction

export function headline({ label }, answer) {
  const name = predicted(answer);
  const number = percent(Math.max(...answer));
  if (label === null) return [name, number, "", "The label is not known."];
  const right = label === name;
  return [name, number, right ? "right" : "wrong", `${right ? "✓ right" : "✗ wrong"}, the label is ${label}`];
}

export const numberText = (answer, contrast) => percent(answer[contrast]);

export function changeText(facts, before, after) {
  const n = best(before);
  const [old, now] = [percent(before[n]), percent(after[n])];
  const text = old === now ? `${classes[n]} stays at ${now}` : `${classes[n]}: ${old} → ${now}`;
  return best(after) === n ? text : `${text}. The predicted class changes.`;
}

/** Return a bar for each class. Probabilities before the change are marked by a line. */
export function rows({ label }, title, before, after) {
  const now = after ?? before;
  const predicted = best(now);
  const bars = classes.map((name, n) =>
    el(
      "div",
      { class: `bar${n === predicted ? " best" : ""}` },
      el("span", { class: "name", title: name === label ? "the label" : undefined, text: name === label ? `${name} ◂` : name }),
      el(
        "span",
        { class: "track", "aria-hidden": "true" },
        el("i", { class: "fill", style: { width: `${100 * now[n]}%` } }),
        after ? el("i", { class: "before", style: { width: `${100 * before[n]}%` } }) : null,
      ),
      el("span", { class: "value", text: percent(now[n]) }),
    ),
  );
  return el("div", { class: "bars" }, el("h3", { text: title }), ...bars);
}
