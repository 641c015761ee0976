// The parts of the page that show an answer, chosen by what the run predicts.
//
// To show another kind of answer, write a file with the exports below, import it and add its line to PARTS
// to FILES in
// several_parts.js and to DISPLAYS in library.py. A target names its parts: `Target.display`.
//
//   start(run, slides)                  gets the run and all slides, once; may return a promise
//   predicted(answer)                   an answer as one word or number
//   labelText(label)                    a label for readers
//   listText(slide)                     {verdict, prediction} of a slide in the list; the verdict is "right", "wrong" or ""
//   filters(slides), orders             of the list: [value, text, test of a slide], [value, text, comparison]
//   sortGroups(names, slides)           the names of groups of labels in order
//   headline(facts, answer)             [title, number, verdict, sentence on the label]
//   changeText(facts, before, after)    how an answer changed, in a sentence
//   numberText(answer, contrast)        the number of an answer that belongs to a contrast
//   rows(facts, title, before, after)   an element that shows the numbers of an answer
import * as classes from "./class_parts.js";
import * as grades from "./grade_parts.js";
import * as labels from "./label_parts.js";
import * as several from "./several_parts.js";
import * as survival from "./survival_parts.js";
import * as value from "./value_parts.js";

const PARTS = { classes, grades, labels, several, survival, value };

export let parts = null;

export async function chooseParts(run, slides) {
  parts = PARTS[run.target.display];
  await parts.start(run, slides);
}
