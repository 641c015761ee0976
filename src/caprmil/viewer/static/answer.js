// The answer: what the run, the explained model and the calibrated run say, and what changes without a region.
import { $, count, el, percent } from "./dom.js";

/** Show the answer. `asked`: {before, after, out, waiting, problem} of what was taken out, or null. */
export function showAnswer(facts, asked, { undo, reset }) {
  const { answer, model, classes, label } = facts;
  const now = asked?.after ? asked.after.answer : answer.probabilities;
  const best = now.indexOf(Math.max(...now));
  const verdict = label === null ? "" : label === classes[best] ? "right" : "wrong";
  const sources = [[runWords(answer), answer.probabilities, asked?.after?.answer]];
  if (answer.models > 1) {
    sources.push([`explained: ${model.name}, ${model.fold}`, model.probabilities, asked?.after?.probabilities]);
  }
  if (answer.calibrated) sources.push(["calibrated", answer.calibrated, asked?.after?.calibrated]);
  $("answer").replaceChildren(
    el(
      "div",
      { class: "headline", "aria-live": "polite", "aria-atomic": "true" },
      el("h2", { text: classes[best] }, el("span", { class: "sure", text: percent(now[best]) })),
      el("p", { class: `verdict ${verdict}`, text: labelWords(label, verdict) }),
      asked ? change(facts, asked) : null,
    ),
    ...sources.map(([title, before, after]) => bars(classes, title, before, after, label)),
    asked ? region(facts, asked, { undo, reset }) : el("p", { class: "quiet", text: basis(facts) }),
  );
}

function runWords({ models, unseen }) {
  const who = models === 1 ? "one model" : `mean of ${models} models`;
  return unseen ? `${who} that had not seen it` : `${who}, trained on this very slide`;
}

function labelWords(label, verdict) {
  if (label === null) return "The run knows no label.";
  return `${verdict === "right" ? "✓ right" : "✗ wrong"}, the label is ${label}`;
}

function basis({ model, patches }) {
  const words = { exact: "exact evidence", perturbation: "evidence by taking patches out" };
  return `${model.name}, ${model.fold}; ${words[model.method] ?? `evidence by ${model.method}`} of ${count(patches, "patch")}.`;
}

function change(facts, { after, waiting, problem }) {
  if (problem) return el("p", { class: "change verdict wrong", text: problem });
  if (!after) return el("p", { class: "change quiet", text: waiting ? "Asking …" : "" });
  const old = facts.answer.probabilities;
  const best = old.indexOf(Math.max(...old));
  const [was, is] = [percent(old[best]), percent(after.answer[best])];
  const text = was === is ? `${facts.classes[best]} stays at ${is}` : `${facts.classes[best]}: ${was} → ${is}`;
  const turned = after.answer.indexOf(Math.max(...after.answer)) !== best;
  return el("p", { class: "change", text: turned ? `${text}. The answer turns.` : text });
}

function region(facts, { out, after }, { undo, reset }) {
  const left = facts.patches - out;
  return el(
    "div",
    { class: "region" },
    el("p", { text: `${count(out, "patch")} out, ${left.toLocaleString("en")} left.` }),
    after ? el("p", { class: "quiet", text: lead(facts, after) }) : null,
    el(
      "div",
      { class: "buttons" },
      el("button", { text: "Undo", title: "Undo the last region (u)", on: { click: undo } }),
      el("button", { text: "Reset", title: "Put all patches back", on: { click: reset } }),
    ),
  );
}

/** Return how the lead changes: it moves where a probability is as good as 1. */
function lead({ classes, model, predicted }, after) {
  const of = (logits) => logits[predicted] - (logits.reduce((sum, each) => sum + each, 0) - logits[predicted]) / (classes.length - 1);
  return `Lead of ${classes[predicted]} in logits: ${Paint.format(of(model.logits))} → ${Paint.format(of(after.logits))}.`;
}

/** Return a bar for each class; what was before stays as an outline. */
function bars(classes, title, before, after, label) {
  const now = after ?? before;
  const best = now.indexOf(Math.max(...now));
  const rows = classes.map((name, n) =>
    el(
      "div",
      { class: `bar${n === best ? " best" : ""}` },
      el("span", { class: "name", title: name === label ? "the label" : undefined, text: name === label ? `${name} ◂` : name }),
      el(
        "span",
        { class: "track", "aria-hidden": "true" },
        el("i", { class: "fill", style: { width: `${100 * now[n]}%` } }),
        after ? el("i", { class: "ghost", style: { width: `${100 * before[n]}%` } }) : null,
      ),
      el("span", { class: "value", text: percent(now[n]) }),
    ),
  );
  return el("div", { class: "bars" }, el("h3", { text: title }), ...rows);
}
