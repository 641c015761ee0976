// What a layer is, from its key, and what it means in a sentence.

export const GROUPS = { influence: "Influence", evidence: "Evidence", attention: "Attention", score: "Scores", tokens: "Tokens" };

/** Return the parts of a layer's key: its group, and contrast, block, head and token if it has them. */
export function parse(key) {
  const block = Number(key.match(/block-(\d+)-/)?.[1] ?? 0);
  const head = key.match(/head-(\d+)/)?.[1];
  const token = key.match(/token-(\d+)/)?.[1];
  const contrast = key.match(/^(?:evidence|above|attention|score|influence|sampled-influence|integrated-gradients)-(\d+)$/)?.[1];
  const [above, spread] = [key.startsWith("above-"), key === "spread"];
  const depends = /^(sampled-influence|influence|integrated-gradients)-/.test(key);
  const prefix = depends ? "influence" : above ? "evidence" : spread ? "attention" : key.split("-")[0];
  const group = token !== undefined || key.endsWith("entropy") ? "tokens" : prefix;
  const number = (text) => (text === undefined ? null : Number(text));
  return { group, block, head: number(head), token: number(token), contrast: number(contrast), above, spread };
}

/** Return the key of a layer of tokens. Without a token it is the entropy of the weights. */
export function tokenKey(facts, block, head, token) {
  const prefix = facts.tokens.blocks > 1 ? `block-${block}-` : "";
  if (token === null) return `${prefix}entropy`;
  return head === null ? `${prefix}token-${token}` : `${prefix}head-${head}-token-${token}`;
}

/** Return the map that a layer belongs to, or undefined for tokens and spread. */
function mapOf(facts, key) {
  const keys = { above: "evidence", score: "patch-scores" };
  const stem = key.replace(/-\d+$/, "");
  const wanted = stem === "attention" && stem !== key ? "class-attention" : (keys[stem] ?? stem);
  return facts.maps.find((map) => map.key === wanted);
}

/** Return what a layer means, and how faithful it is. */
export function describe(facts, layer) {
  const map = mapOf(facts, layer.key);
  return [meaning(facts, layer, map), map?.faithfulness].filter(Boolean).join(" ");
}

function meaning(facts, layer, map) {
  const { group, block, head, token, contrast, above, spread } = parse(layer.key);
  const total = contrast === null ? "" : `the ${facts.contrasts[contrast].total}`;
  const where = facts.tokens?.blocks > 1 ? ` of block ${block + 1}` : "";
  const even = 1 / facts.patches;
  if (group === "influence") return `For each patch: ${map.meanings[contrast]}.`;
  if (above) return `How much more each patch adds to ${total} than the mean patch of this slide. The values add up to 0.`;
  if (group === "evidence") return EVIDENCE[facts.model.method](total, facts.output, Paint.format(facts.model.gap));
  if (spread) return "Standard deviation of a patch's attention over the random draws of this model.";
  if (group === "attention") {
    if (contrast === null && Math.abs(layer.limit - even) < 1e-4 * even) {
      return `Every patch has the same weight (${Paint.format(even)}): this model takes the mean. See the evidence instead.`;
    }
    return `The weight of a patch in the pooled representation; equal weights would be ${Paint.format(even)}. The prediction need not depend on it.`;
  }
  if (group === "score") return `The model's score of each single patch for ${facts.contrasts[contrast].name}.`;
  if (token === null) return `Entropy of a patch's weights on the tokens${where}. 0: all weight on one token; 1: equal weight on all.`;
  const heads = head === null ? `Mean of ${facts.tokens.heads} heads${where}` : `Head ${head + 1}${where}`;
  return `${heads}: the weight of each patch on token ${token + 1}. The weights of a patch on all tokens add up to 1.`;
}

const EVIDENCE = {
  exact: (total) =>
    `What each patch contributes to ${total}, after it has received the context of all others. The values and a constant add up to it exactly. The prediction need not depend on these patches.`,
  "integrated gradients": (total, output, gap) =>
    `Integrated gradients: an estimate of what each patch adds to ${total}. The sum differs from the ${output} by ${gap}.`,
  perturbation: (total) =>
    `An estimate: how much ${total} falls if one patch is removed. Patches with the same content hide each other's effect.`,
};

/** Return what a patch is marked for, in words. */
export function markedText(facts, contrast, value) {
  const { positive, negative } = facts.contrasts[contrast];
  if (value === 0) return `Neither ${positive} nor ${negative}`;
  return `Marked ${value > 0 ? positive : negative}`;
}

/** Return the headings of the patches with the highest and lowest values of a layer. */
export function headings(facts, layer) {
  const { group, contrast, above } = parse(layer.key);
  const { positive, negative } = facts.contrasts[contrast ?? 0];
  if (above) return [`Most ${positive}, relative to the mean`, `Least ${positive}, relative to the mean`];
  if (group === "evidence" || group === "influence") {
    return [
      layer.values[layer.top[0]] > 0 ? `Most ${positive}` : `Least ${negative}`,
      layer.values[layer.bottom[0]] < 0 ? `Most ${negative}` : `Least ${positive}`,
    ];
  }
  return [`Highest: ${layer.title[0].toLowerCase()}${layer.title.slice(1)}`, ""];
}
