// The prediction of the open slide, and what it would be without a region or a token.
import { $, count, el, percent } from "./dom.js";
import { parts } from "./parts.js";
import { patientSlides } from "./patient_slides.js";

/** Show the prediction. `whatIf`: {removed, off, after, waiting, problem} of patches and tokens that were removed,
 * or null. */
export function showPrediction(facts, whatIf, { undo, reset, show }) {
  const { answer, model } = facts;
  const after = whatIf?.after;
  const [title, number, verdict, sentence] = parts.headline(facts, after ? after.answer.mean : answer.mean);
  const sources = [[modelsText(facts), answer.mean, after?.answer.mean]];
  if (answer.models > 1) sources.push([`explained: ${model.name}, ${model.fold}`, model.answer, after?.model.answer]);
  if (answer.calibrated) sources.push(["calibrated", answer.calibrated, after?.answer.calibrated]);
  $("prediction").replaceChildren(
    el(
      "div",
      { class: "headline", "aria-live": "polite", "aria-atomic": "true" },
      el("h2", { text: title }, el("span", { class: "probability", text: number })),
      el("p", { class: `verdict ${verdict}`, text: sentence }),
      facts.caution ? el("p", { class: "verdict wrong", id: "caution", text: facts.caution }) : null,
      whatIf ? change(facts, whatIf) : null,
    ),
    ...sources.map(([heading, before, now]) => parts.rows(facts, heading, before, now)),
    ...modalityTable(facts),
    whatIf ? removalSummary(facts, whatIf, { undo, reset }) : el("p", { class: "quiet", text: methodText(facts) }),
    ...patientSlides(facts, show),
  );
}

function modelsText({ answer: { models, unseen }, unit: what }) {
  const number = models === 1 ? "one model" : `mean of ${models} models`;
  return unseen ? `${number}, not trained on this ${what}` : `${number}, trained on this ${what}`;
}

function methodText({ model, patches }) {
  return `${model.name}, ${model.fold}; ${count(patches, "patch")}.`;
}

/** Return a table of what patches and covariates add to the total of the first contrast; none without covariates. */
function modalityTable({ modalities, contrasts, first_contrast: first }) {
  if (!modalities) return [];
  const row = (title, { adds, shares }) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", text: title }),
      el("td", { text: Paint.format(adds[first]) }),
      el("td", { text: shares ? percent(shares[first]) : "" }),
    );
  const table = el(
    "div",
    { class: "modalities" },
    el("h3", { text: `What adds to the ${contrasts[first].total}${modalities.patches.shares ? ", and its share" : ""}` }),
    el(
      "table",
      {},
      el(
        "tbody",
        {},
        row("all patches", modalities.patches),
        ...modalities.covariates
          .filter((each) => each.scales)
          .map((each) => row(`of these, scaled by ${each.title}`, { adds: each.scales })),
        ...modalities.covariates.map((each) => row(each.title, each)),
        row("bias", { adds: modalities.bias }),
      ),
    ),
  );
  return [table];
}

function change(facts, { after, waiting, problem }) {
  if (problem) return el("p", { class: "change verdict wrong", text: problem });
  if (!after) return el("p", { class: "change quiet", text: waiting ? "Predicting …" : "" });
  return el("p", { class: "change", text: parts.changeText(facts, facts.answer.mean, after.answer.mean) });
}

function removalSummary(facts, { removed, off, after }, { undo, reset }) {
  const left = facts.patches - removed;
  return el(
    "div",
    { class: "region" },
    removed ? el("p", { text: `${count(removed, "patch")} removed, ${left.toLocaleString("en")} left.` }) : null,
    off.length ? el("p", { text: tokensText(facts, off) }) : null,
    after ? el("p", { class: "quiet", text: totalText(facts, after) }) : null,
    el(
      "div",
      { class: "buttons" },
      el("button", { text: "Undo", title: "Undo the last region or token (u)", on: { click: undo } }),
      el("button", { text: "Reset", title: "Restore all patches and tokens", on: { click: reset } }),
    ),
  );
}

/** Return which tokens have no message, and what that means if several models predict. */
function tokensText({ tokens, answer }, off) {
  const name = (each) => {
    const [block, head, token] = each.split(".").map((number) => Number(number) + 1);
    return `${tokens.blocks > 1 ? `block ${block}, ` : ""}head ${head}, token ${token}`;
  };
  const shown = off.slice(0, 4).map(name).join("; ") + (off.length > 4 ? "; …" : "");
  const matched = answer.models > 1 ? " In the other models, the tokens that collect the same patches." : "";
  return `Without the message of ${count(off.length, "token")}: ${shown}.${matched}`;
}

/** Return how the total of the evidence changes. It also changes where a probability is close to 1. */
function totalText({ contrasts, first_contrast: first, model }, after) {
  const { total } = contrasts[first];
  const [before, now] = [model.totals[first], after.model.totals[first]].map(Paint.format);
  return `${total[0].toUpperCase()}${total.slice(1)}: ${before} → ${now}.`;
}
