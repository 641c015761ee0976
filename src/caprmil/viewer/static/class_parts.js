// Everything on the page that depends on classes and probabilities. A run that predicts something else
// needs another file with the same exports.
import { $, count, el, percent } from "./dom.js";

const best = (probabilities) => probabilities.indexOf(Math.max(...probabilities));

// The list of slides

/** Return the text of a slide in the list: its prediction, its label, and "right", "wrong" or "". */
export function listText(slide) {
  const verdict = slide.right === null ? "" : slide.right ? "right" : "wrong";
  const mark = { right: "✓ ", wrong: "✗ " }[verdict] ?? "";
  const label = slide.label === null ? "no label" : `label: ${slide.label}`;
  if (slide.problem) return { verdict, label, prediction: "its bag is missing" };
  if (slide.predicted === null) return { verdict, label, prediction: "not predicted yet" };
  return { verdict, label, prediction: `${mark}${slide.predicted} ${percent(Math.max(...slide.probabilities))}` };
}

/** Return the filters of the list: [value, text, test of a slide]. */
export function listFilters({ classes }, slides) {
  const filters = [
    ["all", "all", () => true],
    ["mistakes", "mistakes", (slide) => slide.right === false],
    ...classes.map((name) => [`class:${name}`, name, (slide) => slide.label === name]),
  ];
  return filters.map(([value, text, test]) => [value, `${text} (${slides.filter(test).length})`, test]);
}

const certainty = (slide) => (slide.probabilities ? Math.max(...slide.probabilities) : null);

/** Orders of the list: [value, text, comparison]. Slides without a prediction come last. */
export const LIST_ORDERS = [
  ["uncertain", "least certain first", (a, b) => (certainty(a) ?? 2) - (certainty(b) ?? 2)],
  ["certain", "most certain first", (a, b) => (certainty(b) ?? 0) - (certainty(a) ?? 0)],
];

/** Return what the list shows of a slide that was predicted just now. */
export function newPrediction({ answer, classes }) {
  const { probabilities } = answer;
  return { probabilities, predicted: classes[best(probabilities)] };
}

// Evidence

/** Return the number of the contrast whose evidence is shown first: that of the predicted class. */
export const firstContrast = (facts) => facts.predicted;

/** Return the name of a contrast: its class. */
export const contrastName = (facts, number) => facts.classes[number];

/** Return what the evidence of a contrast adds up to. */
export function contrastTotal(facts, number) {
  const others = facts.classes.filter((_, other) => other !== number);
  return `the lead of ${facts.classes[number]} over ${others.length === 1 ? others[0] : "the other classes"}`;
}

/** Return what the evidence of a patch is for, in words. */
export function evidenceText(facts, number, value) {
  const name = facts.classes[number];
  if (value === 0) return `Neither for nor against ${name}`;
  return `Evidence ${value > 0 ? "for" : "against"} ${name}`;
}

/** Return the headings of the patches at both ends of a map of evidence. */
export function evidenceHeadings(facts, number, highest, lowest) {
  const name = facts.classes[number];
  return [
    highest > 0 ? `Most for ${name}` : `Least against ${name}`,
    lowest < 0 ? `Most against ${name}` : `Least for ${name}`,
  ];
}

// The prediction

/** Show the prediction. `whatIf`: {removed, after, waiting, problem} of a region that was removed, or null. */
export function showPrediction(facts, whatIf, { undo, reset }) {
  const { answer, model, classes, label } = facts;
  const now = whatIf?.after ? whatIf.after.answer : answer.probabilities;
  const predicted = best(now);
  const verdict = label === null ? "" : label === classes[predicted] ? "right" : "wrong";
  const sources = [[modelsText(answer), answer.probabilities, whatIf?.after?.answer]];
  if (answer.models > 1) {
    sources.push([`explained: ${model.name}, ${model.fold}`, model.probabilities, whatIf?.after?.probabilities]);
  }
  if (answer.calibrated) sources.push(["calibrated", answer.calibrated, whatIf?.after?.calibrated]);
  $("prediction").replaceChildren(
    el(
      "div",
      { class: "headline", "aria-live": "polite", "aria-atomic": "true" },
      el("h2", { text: classes[predicted] }, el("span", { class: "probability", text: percent(now[predicted]) })),
      el("p", { class: `verdict ${verdict}`, text: labelText(label, verdict) }),
      whatIf ? changeText(facts, whatIf) : null,
    ),
    ...sources.map(([title, before, after]) => bars(classes, title, before, after, label)),
    whatIf ? regionSummary(facts, whatIf, { undo, reset }) : el("p", { class: "quiet", text: methodText(facts) }),
  );
}

function modelsText({ models, unseen }) {
  const number = models === 1 ? "one model" : `mean of ${models} models`;
  return unseen ? `${number}, not trained on this slide` : `${number}, trained on this slide`;
}

function labelText(label, verdict) {
  if (label === null) return "The label is not known.";
  return `${verdict === "right" ? "✓ right" : "✗ wrong"}, the label is ${label}`;
}

function methodText({ model, patches }) {
  const names = { exact: "exact evidence", perturbation: "evidence by removing patches" };
  return `${model.name}, ${model.fold}; ${names[model.method] ?? `evidence by ${model.method}`} of ${count(patches, "patch")}.`;
}

function changeText(facts, { after, waiting, problem }) {
  if (problem) return el("p", { class: "change verdict wrong", text: problem });
  if (!after) return el("p", { class: "change quiet", text: waiting ? "Predicting …" : "" });
  const before = facts.answer.probabilities;
  const predicted = best(before);
  const [old, now] = [percent(before[predicted]), percent(after.answer[predicted])];
  const name = facts.classes[predicted];
  const text = old === now ? `${name} stays at ${now}` : `${name}: ${old} → ${now}`;
  const changed = best(after.answer) !== predicted;
  return el("p", { class: "change", text: changed ? `${text}. The predicted class changes.` : text });
}

function regionSummary(facts, { removed, after }, { undo, reset }) {
  const left = facts.patches - removed;
  return el(
    "div",
    { class: "region" },
    el("p", { text: `${count(removed, "patch")} removed, ${left.toLocaleString("en")} left.` }),
    after ? el("p", { class: "quiet", text: leadText(facts, after) }) : null,
    el(
      "div",
      { class: "buttons" },
      el("button", { text: "Undo", title: "Undo the last region (u)", on: { click: undo } }),
      el("button", { text: "Reset", title: "Restore all patches", on: { click: reset } }),
    ),
  );
}

/** Return how the lead changes. It also changes where a probability is close to 1. */
function leadText({ classes, model, predicted }, after) {
  const lead = (logits) => logits[predicted] - (logits.reduce((sum, each) => sum + each, 0) - logits[predicted]) / (classes.length - 1);
  return `Lead of ${classes[predicted]} in logits: ${Paint.format(lead(model.logits))} → ${Paint.format(lead(after.logits))}.`;
}

/** Return a bar for each class. Probabilities before the change are marked by a line. */
function bars(classes, title, before, after, label) {
  const now = after ?? before;
  const predicted = best(now);
  const rows = classes.map((name, n) =>
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
  return el("div", { class: "bars" }, el("h3", { text: title }), ...rows);
}
