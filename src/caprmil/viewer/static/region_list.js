// The regions that the first map marks, in the order of what the prediction is without them.
import { $, count, el } from "./dom.js";
import { parts } from "./parts.js";

/** Return the answer with all patches, and without a region. */
export function effectText(regions, region) {
  return `${parts.numberText(regions.answer, regions.contrast)} → ${parts.numberText(region.answer, regions.contrast)}`;
}

/** Show regions as they are measured: null while they are, {problem} if that failed. `current` is the number of the chosen one. */
export function showRegions(facts, regions, current, choose) {
  $("region-list").replaceChildren(el("h2", { text: "Regions" }), ...content(facts, regions, current, choose));
}

function content(facts, regions, current, choose) {
  if (!regions) return [el("p", { class: "quiet", text: "Measuring the effect of regions …" })];
  if (regions.problem) return [el("p", { class: "verdict wrong", text: regions.problem })];
  if (!regions.found.length) return [el("p", { class: "quiet", text: regions.reason })];
  const { positive, negative } = facts.contrasts[regions.contrast];
  const whole = parts.numberText(regions.answer, regions.contrast);
  const sides = [[1, positive], [-1, negative]].map(([sign, words]) => [sign, words, regions.found.filter((region) => region.sign === sign)]);
  return [
    el("p", { class: "quiet", text: `What ${facts.model.name}, ${facts.model.fold}, predicts without each region; with all patches ${whole}.` }),
    ...sides.filter(([, , found]) => found.length).flatMap(([sign, words, found]) => [
      el("h3", { text: `Marked ${words}` }),
      el("ol", { class: "regions" }, ...found.map((region) => row(regions, region, region.number === current, choose))),
      ...together(regions, sign, found.length),
    ]),
  ];
}

function row(regions, region, isCurrent, choose) {
  const number = (answer) => parts.numberText(answer, regions.contrast);
  const size = count(region.patches, "patch") + (region.area === null ? "" : `, ${Paint.format(Number(region.area.toPrecision(2)))} mm²`);
  return el(
    "li",
    {},
    el(
      "button",
      { "aria-pressed": isCurrent ? "true" : "false", data: { region: region.number }, title: "Show the region", on: { click: () => choose(region) } },
      el("i", { class: region.sign > 0 ? "for" : "against", text: String(region.number) }),
      el("b", { text: effectText(regions, region) }),
      el("small", { text: `${size}; random: ${number(region.random)}` }),
    ),
  );
}

/** Return what is predicted without all regions of a sign, if there are several. */
function together(regions, sign, n) {
  const removal = regions.together[sign];
  if (!removal) return [];
  const number = (answer) => parts.numberText(answer, regions.contrast);
  return [el("p", { class: "quiet", text: `All ${n} together: ${number(removal.answer)}; random: ${number(removal.random)}.` })];
}
