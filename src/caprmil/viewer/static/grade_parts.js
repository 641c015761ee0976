// Grades: as classes, in their order. A mistake by one grade is another thing than one by three.
import * as classes from "./class_parts.js";

let grades = [];

export function start(run, slides) {
  grades = run.target.titles;
  classes.start(run, slides);
}

export const predicted = classes.predicted;
export const labelText = classes.labelText;
export const numberText = classes.numberText;
export const orders = classes.orders;
export const sortGroups = classes.sortGroups;
export const rows = classes.rows;

// The list of slides

const apart = ({ label, predicted }) =>
  label === null || predicted === null ? 0 : Math.abs(grades.indexOf(predicted) - grades.indexOf(label));

export function listText(slide) {
  const { verdict, prediction } = classes.listText(slide);
  return { verdict, prediction: apart(slide) > 1 ? `${prediction}, ${apart(slide)} apart` : prediction };
}

export const filters = (slides) => [
  ...classes.filters(slides),
  ["far", "off by two grades or more", (slide) => apart(slide) > 1],
];

// The prediction

export function headline(facts, answer) {
  const [name, number, verdict, sentence] = classes.headline(facts, answer);
  const distance = apart({ label: facts.label, predicted: name });
  return [name, number, verdict, distance > 1 ? `${sentence}: ${distance} grades apart` : sentence];
}

export const changeText = (facts, before, after) =>
  classes.changeText(facts, before, after).replace("predicted class", "predicted grade");
