// A number: predicted, true, and the error between them.
import { el } from "./dom.js";

const LARGE = 0.1; // the share of slides whose errors are the largest

let digits = null; // decimals that matter, given how far the numbers of the run differ
let [low, high] = [0, 1]; // ends of the scale
let values = []; // predicted for all slides

const labelOf = ({ label }) => (label === null ? null : Number(label));
const valueOf = ({ answer }) => (answer ? answer[0] : null);
const errorOf = (slide) => (slide.answer && slide.label !== null ? valueOf(slide) - labelOf(slide) : null);

export function start(run, slides) {
  values = slides.map(valueOf).filter((value) => value !== null);
  const all = [...values, ...slides.map(labelOf).filter((label) => label !== null)];
  [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
  digits = high > low ? Math.min(Math.max(0, 2 - Math.floor(Math.log10((high - low) / 4))), 6) : null;
}

function format(number) {
  const text = digits === null ? Paint.format(number) : number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return text.replace("-", "−");
}

const signed = (number) => `${number > 0 ? "+" : ""}${format(number)}`;

export const predicted = (answer) => String(answer[0]);

export const labelText = (label) => format(Number(label));

// The list of slides

export function listText(slide) {
  const error = errorOf(slide);
  return { verdict: "", prediction: `${format(valueOf(slide))}${error === null ? "" : `, error ${signed(error)}`}` };
}

export function filters(slides) {
  const errors = slides.map(errorOf).filter((error) => error !== null).map(Math.abs).sort((a, b) => b - a);
  const least = errors[Math.ceil(LARGE * errors.length) - 1] ?? Infinity;
  return [["errors", "largest errors", (slide) => errorOf(slide) !== null && Math.abs(errorOf(slide)) >= least]];
}

/** Return a comparison by a number; slides without it come last. */
function by(number, sign) {
  const key = (slide) => (number(slide) === null ? Infinity : sign * number(slide));
  return (a, b) => (key(a) === key(b) ? 0 : key(a) - key(b));
}

const size = (slide) => (errorOf(slide) === null ? null : Math.abs(errorOf(slide)));

export const orders = [
  ["highest", "highest value first", by(valueOf, -1)],
  ["lowest", "lowest value first", by(valueOf, 1)],
  ["errors", "largest error first", by(size, -1)],
  ["right", "smallest error first", by(size, 1)],
];

/** Return groups in the order of their labels. */
export function sortGroups(names, slides) {
  const least = (name) => Math.min(...slides.filter((slide) => slide.group === name).map(labelOf));
  return [...names].sort((a, b) => least(a) - least(b));
}

// The prediction

export function headline(facts, answer) {
  const label = labelOf(facts);
  const ends = answer.length > 1 ? `${format(answer[1])} to ${format(answer[2])}` : "";
  if (label === null) return [format(answer[0]), ends, "", "The true value is not known."];
  return [format(answer[0]), ends, "", `The true value is ${format(label)}: error ${signed(answer[0] - label)}.`];
}

export const numberText = ([number]) => format(number);

export function changeText(facts, [before], [after]) {
  const [old, now] = [format(before), format(after)];
  return old === now ? `The value stays at ${now}` : `${old} → ${now} (${signed(after - before)})`;
}

/** Return a scale with the value, the label, and those of all slides. */
export function rows(facts, title, [before], after) {
  const now = after ? after[0] : before;
  const label = labelOf(facts);
  const ends = [Math.min(low, now, before, label ?? now), Math.max(high, now, before, label ?? now)];
  const at = (value) => `${(100 * (value - ends[0])) / (ends[1] - ends[0] || 1)}%`;
  const mark = (name, value, hint) => el("i", { class: name, title: hint, style: { left: at(value) } });
  return el(
    "div",
    { class: "bars" },
    el("h3", { text: title }),
    el(
      "div",
      { class: "scale-row" },
      el(
        "span",
        { class: "scale-track", role: "img", "aria-label": `${format(now)} on a scale from ${format(ends[0])} to ${format(ends[1])}` },
        ...values.map((value) => mark("other", value)),
        label === null ? null : mark("label-mark", label, `the true value, ${format(label)}`),
        after ? mark("before-mark", before, `before, ${format(before)}`) : null,
        mark("now-mark", now, format(now)),
      ),
      el("span", { class: "value", text: format(now) }),
    ),
    el("div", { class: "scale-ends" }, el("span", { text: format(ends[0]) }), el("span", { text: label === null ? "" : "◆ true value" }), el("span", { text: format(ends[1]) })),
  );
}
