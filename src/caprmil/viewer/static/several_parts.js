// Several targets: the parts of each, one below the other.
import { el } from "./dom.js";
import { splitCells } from "./named_cells.js";

const FILES = {
  classes: "class_parts.js",
  grades: "grade_parts.js",
  labels: "label_parts.js",
  survival: "survival_parts.js",
  value: "value_parts.js",
};

let targets = []; // {name, answers, contrasts, parts} of each
export const orders = [];

/** Import the parts of each target. With an address of its own, every target has its own instance. */
export async function start(run, slides) {
  const names = run.target.parts.map((target) => target.name);
  const load = async (target) => {
    const parts = await import(`./${FILES[target.display]}?target=${target.name}`);
    const cell = (label) => (label === null ? null : splitCells(label, names)[target.name]);
    const slice = (answer) => answer?.slice(...target.answers) ?? null;
    const bare = slides.map((slide) => ({ ...slide, label: cell(slide.label), answer: slice(slide.answer), group: null }));
    parts.start({ ...run, target }, bare);
    return { ...target, parts, cell, slice };
  };
  targets = await Promise.all(run.target.parts.map(load));
  const found = targets.flatMap((target) =>
    target.parts.orders.map(([value, text, compare]) => [
      `${target.name}:${value}`,
      `${target.name}: ${text}`,
      (a, b) => compare(own(target, a), own(target, b)),
    ]),
  );
  orders.splice(0, orders.length, ...found);
}

/** Return a slide, or the facts of the open one, as one target has them. */
function own(target, slide) {
  const answer = Array.isArray(slide.answer) ? target.slice(slide.answer) : null;
  const predicted = answer ? target.parts.predicted(answer) : null;
  return { ...slide, label: target.cell(slide.label), answer, predicted, group: null };
}

export const predicted = (answer) => targets.map((each) => `${each.name} ${each.parts.predicted(each.slice(answer))}`).join("; ");

export function labelText(label) {
  const known = targets.filter((each) => each.cell(label) !== null);
  return known.map((each) => `${each.name} ${each.parts.labelText(each.cell(label))}`).join("; ");
}

// The list of slides

export function listText(slide) {
  const texts = targets.map((each) => ({ name: each.name, ...each.parts.listText(own(each, slide)) }));
  const verdicts = texts.map((text) => text.verdict);
  const verdict = verdicts.includes("wrong") ? "wrong" : verdicts.includes("right") ? "right" : "";
  return { verdict, prediction: texts.map(({ name, prediction }) => `${name} ${prediction}`).join("; ") };
}

export const filters = (slides) =>
  targets.flatMap((each) =>
    each.parts
      .filters(slides.map((slide) => own(each, slide)))
      .map(([value, text, test]) => [`${each.name}:${value}`, `${each.name}: ${text}`, (slide) => test(own(each, slide))]),
  );

/** Groups are combinations of labels, which balance folds. They are not shown. */
export const sortGroups = () => [];

// The prediction

export function headline(facts, answer) {
  const lines = targets.map((each) => [each.name, ...each.parts.headline(own(each, facts), each.slice(answer))]);
  const title = lines.map(([name, text, number]) => `${name}: ${text}${number ? ` ${number}` : ""}`).join("\n");
  const verdicts = [...new Set(lines.map(([, , , verdict]) => verdict))];
  return [title, "", verdicts.length === 1 ? verdicts[0] : "", lines.map(([name, , , , sentence]) => `${name}: ${sentence}`).join("\n")];
}

/** `numbers` are those of an answer that go with the contrasts. */
export function numberText(numbers, contrast) {
  const target = targets.find(({ contrasts: [first, end] }) => first <= contrast && contrast < end);
  const [first, end] = target.contrasts;
  return target.parts.numberText(numbers.slice(first, end), contrast - first);
}

export const changeText = (facts, before, after) =>
  targets.map((each) => `${each.name}: ${each.parts.changeText(own(each, facts), each.slice(before), each.slice(after))}`).join(". ");

export function rows(facts, title, before, after) {
  const each = (target) =>
    target.parts.rows(own(target, facts), `${target.name}, ${title}`, target.slice(before), after ? target.slice(after) : after);
  const known = targets.filter((target) => target.slice(before).every((number) => number !== null)); // not all are calibrated
  return el("div", { class: "targets" }, ...known.map(each));
}
