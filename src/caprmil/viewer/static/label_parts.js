// Several labels: the probability of each, and whether it is positive.
import { el, percent } from "./dom.js";
import { splitCells } from "./named_cells.js";

let labels = [];

const isPositive = (probability) => probability > 0.5;
const sign = (cell) => (cell === "1" ? "+" : "−");

/** Orders of the list: by the probability of each label. Slides without a prediction come last. */
export const orders = [];

export function start(run) {
  labels = run.target.titles;
  const by = (n) => (a, b) => (b.answer?.[n] ?? -1) - (a.answer?.[n] ?? -1);
  orders.splice(0, orders.length, ...labels.map((name, n) => [`label:${name}`, `highest ${name} first`, by(n)]));
}

export const predicted = (answer) => labels.filter((_, n) => isPositive(answer[n])).join(", ") || "none";

export function labelText(label) {
  const cells = splitCells(label, labels);
  return labels.filter((name) => cells[name] !== null).map((name) => `${name} ${sign(cells[name])}`).join(", ");
}

/** Return the names of the labels that are predicted wrongly. */
function wrongOf(label, answer) {
  const cells = splitCells(label, labels);
  return labels.filter((name, n) => cells[name] !== null && isPositive(answer[n]) !== (cells[name] === "1"));
}

// The list of slides

const isWrong = ({ label, answer }) => label !== null && answer !== null && wrongOf(label, answer).length > 0;

export function listText(slide) {
  const verdict = slide.label === null ? "" : isWrong(slide) ? "wrong" : "right";
  const mark = { right: "✓ ", wrong: "✗ " }[verdict] ?? "";
  return { verdict, prediction: `${mark}${predicted(slide.answer)}` };
}

export const filters = () => [
  ["mistakes", "mistakes", isWrong],
  ...labels.map((name) => [`positive:${name}`, `${name} positive`, ({ label }) => splitCells(label, labels)[name] === "1"]),
];

/** Groups are combinations of labels, which balance folds. The filters of labels are shown instead. */
export const sortGroups = () => [];

// The prediction

export function headline({ label }, answer) {
  const title = predicted(answer);
  if (label === null) return [title, "", "", "The labels are not known."];
  const wrong = wrongOf(label, answer);
  if (!wrong.length) return [title, "", "right", `✓ right: ${labelText(label)}`];
  return [title, "", "wrong", `✗ wrong: ${wrong.join(", ")}. The labels are ${labelText(label)}`];
}

export const numberText = (answer, contrast) => percent(answer[contrast]);

export function changeText(facts, before, after) {
  const change = (n) => Math.abs(after[n] - before[n]);
  const most = labels.map((_, n) => n).sort((a, b) => change(b) - change(a))[0];
  const [old, now] = [percent(before[most]), percent(after[most])];
  const text = old === now ? `${labels[most]} stays at ${now}` : `${labels[most]}: ${old} → ${now}`;
  const crossed = labels.filter((_, n) => isPositive(before[n]) !== isPositive(after[n]));
  return crossed.length ? `${text}. Predicted differently: ${crossed.join(", ")}.` : text;
}

/** Return a bar for each label. Probabilities before the change are marked by a line. */
export function rows({ label }, title, before, after) {
  const now = after ?? before;
  const cells = splitCells(label, labels);
  const bars = labels.map((name, n) => {
    const mark = cells[name] === null ? "" : ` ${sign(cells[name])}`;
    const hint = cells[name] === null ? `${name}: not known` : `${name}: ${cells[name] === "1" ? "positive" : "negative"}`;
    return el(
      "div",
      { class: `bar${isPositive(now[n]) ? " best" : ""}` },
      el("span", { class: "name", title: hint, text: `${name}${mark}` }),
      el(
        "span",
        { class: "track", "aria-hidden": "true" },
        el("i", { class: "fill", style: { width: `${100 * now[n]}%` } }),
        after ? el("i", { class: "before", style: { width: `${100 * before[n]}%` } }) : null,
      ),
      el("span", { class: "value", text: percent(now[n]) }),
    );
  });
  return el("div", { class: "bars" }, el("h3", { text: title }), ...bars);
}
