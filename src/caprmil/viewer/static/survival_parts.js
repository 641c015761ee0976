// Survival: the risk, its group, the survival at horizons, and the time and event of each slide.
import { el, percent } from "./dom.js";

const GROUPS = ["low risk", "high risk"];

let horizons = []; // titles: "Survival at 12 months"
let unit = "";
let [low, high] = [-1, 1]; // ends of the scale of risks
let risks = []; // of all slides

const riskOf = ({ answer }) => (answer ? answer[0] : null);

export function start(run, slides) {
  [, ...horizons] = run.target.titles;
  unit = horizons.length ? horizons[0].replace(/^Survival at \S+ ?/, "") : "";
  risks = slides.map(riskOf).filter((risk) => risk !== null);
  [low, high] = [Math.min(-1, ...risks), Math.max(1, ...risks)];
}

const format = (risk) => `${risk > 0 ? "+" : ""}${risk.toFixed(2)}`.replace("-", "−");

const group = (answer) => GROUPS[Number(answer[0] > 0)];

/** Return the time and the word of a label "12.5, event". */
function readLabel(label) {
  const [time, word] = label.split(", ");
  return { time: Number(time), word };
}

export const predicted = group;

export function labelText(label) {
  const { time, word } = readLabel(label);
  const shown = time.toLocaleString("en", { maximumFractionDigits: 2 });
  return `${word === "event" ? "event at" : "censored at"} ${shown} ${unit}`.trim();
}

// The list of slides

export const listText = (slide) => ({ verdict: "", prediction: `${group(slide.answer)}, ${format(riskOf(slide))}` });

export const filters = () => GROUPS.map((name) => [name.replace(" ", "-"), name, (slide) => slide.answer !== null && group(slide.answer) === name]);

/** Return a comparison by a number; slides without it come last. */
function by(number, sign) {
  const key = (slide) => (number(slide) === null ? Infinity : sign * number(slide));
  return (a, b) => (key(a) === key(b) ? 0 : key(a) - key(b));
}

const timeOf = ({ label }) => (label === null ? null : readLabel(label).time);

export const orders = [
  ["highest", "highest risk first", by(riskOf, -1)],
  ["lowest", "lowest risk first", by(riskOf, 1)],
  ["shortest", "shortest time first", by(timeOf, 1)],
  ["longest", "longest time first", by(timeOf, -1)],
];

export const sortGroups = (names) => ["event", "censored"].filter((name) => names.includes(name));

// The prediction

export function headline({ label }, answer) {
  const truth = label === null ? "Time and event are not known." : `In the table: ${labelText(label)}.`;
  return [group(answer), format(answer[0]), "", truth];
}

export const numberText = ([risk]) => format(risk);

export function changeText(facts, before, after) {
  const [old, now] = [format(before[0]), format(after[0])];
  const text = old === now ? `The risk stays at ${now}` : `Risk ${old} → ${now}`;
  return group(before) === group(after) ? text : `${text}. The risk group changes.`;
}

/** Return a scale with the risk among those of all slides, and a bar for the survival at each horizon. */
export function rows(facts, title, before, after) {
  const now = after ?? before;
  const ends = [Math.min(low, now[0], before[0]), Math.max(high, now[0], before[0])];
  const mark = (name, value, hint) => el("i", { class: name, title: hint, style: { left: `${(100 * (value - ends[0])) / (ends[1] - ends[0])}%` } });
  const bars = horizons.map((name, n) =>
    el(
      "div",
      { class: "bar" },
      el("span", { class: "name", title: name, text: name.replace(/^Survival at /, "") }),
      el(
        "span",
        { class: "track", "aria-hidden": "true" },
        el("i", { class: "fill", style: { width: `${100 * now[n + 1]}%` } }),
        after ? el("i", { class: "before", style: { width: `${100 * before[n + 1]}%` } }) : null,
      ),
      el("span", { class: "value", text: percent(now[n + 1]) }),
    ),
  );
  return el(
    "div",
    { class: "bars" },
    el("h3", { text: title }),
    el(
      "div",
      { class: "scale-row" },
      el(
        "span",
        { class: "scale-track", role: "img", "aria-label": `risk ${format(now[0])} on a scale from ${format(ends[0])} to ${format(ends[1])}` },
        ...risks.map((risk) => mark("other", risk)),
        mark("before-mark", 0, "the median training slide"),
        after ? mark("before-mark", before[0], `before, ${format(before[0])}`) : null,
        mark("now-mark", now[0], format(now[0])),
      ),
      el("span", { class: "value", text: format(now[0]) }),
    ),
    el("div", { class: "scale-ends" }, el("span", { text: "lower risk" }), el("span", { text: "" }), el("span", { text: "higher risk" })),
    bars.length ? el("h3", { text: "survival at" }) : null,
    ...bars,
  );
}
