// The slides of a patient, or the sources of a slide: what each adds to the prediction, and its share of the attention.
import { count, el } from "./dom.js";

/** Return the list of slides for the prediction panel; nothing for a single slide. `show` moves to one. */
export function patientSlides({ slides, part, contrasts, first_contrast: first, model }, show) {
  if (!slides.length) return [];
  const { positive } = contrasts[first];
  const reach = Math.max(...slides.map((slide) => Math.abs(slide.evidence[first]))) || 1;
  const how = model.exact ? "With the part that belongs to no patch, they add up to the prediction." : "Estimated.";
  return [
    el("h3", { text: `${part === "source" ? "Sources" : "Slides"}: evidence ${positive}` }),
    el("ol", { class: "patient-slides" }, ...slides.map((slide) => row(slide, part, slide.evidence[first], reach, show))),
    el("p", { class: "quiet", text: `From left to right. ${how}` }),
  ];
}

function row(slide, part, value, reach, show) {
  const about = `${count(slide.patches, "patch")}, ${Math.round(100 * slide.attention)} % of the attention`;
  const meter = el("meter", { min: 0, max: 1, value: Math.abs(value) / reach, class: value < 0 ? "against" : "for" });
  meter.setAttribute("aria-hidden", "true");
  return el(
    "li",
    {},
    el(
      "button",
      { title: `Show the ${part}`, on: { click: () => show(slide.box) } },
      el("b", { text: slide.name }),
      el("span", { class: "value", text: `${value > 0 ? "+" : ""}${Paint.format(value)}` }),
      meter,
      el("small", { text: about }),
    ),
  );
}
