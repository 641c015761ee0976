// Words: what a map is, taken from its key, and what it means in a plain sentence.

export const GROUPS = { evidence: "Evidence", attention: "Attention", score: "Alone", tokens: "Tokens" };

/** Return the parts of a layer's key: its group, and class, block, head and token as it has them. */
export function parse(key) {
  const block = Number(key.match(/block-(\d+)-/)?.[1] ?? 0);
  const head = key.match(/head-(\d+)/)?.[1];
  const token = key.match(/token-(\d+)/)?.[1];
  const of = key.match(/^(?:evidence|above|attention|score)-(\d+)$/)?.[1];
  const [above, spread] = [key.startsWith("above-"), key === "spread"];
  const plain = above ? "evidence" : spread ? "attention" : key.split("-")[0];
  const group = token !== undefined || key.endsWith("entropy") ? "tokens" : plain;
  const known = (text) => (text === undefined ? null : Number(text));
  return { group, block, head: known(head), token: known(token), of: known(of), above, spread };
}

/** Return the key of a map of tokens. Without a token it is how undecided patches are. */
export function tokenKey(facts, block, head, token) {
  const prefix = facts.tokens.blocks > 1 ? `block-${block}-` : "";
  if (token === null) return `${prefix}entropy`;
  return head === null ? `${prefix}token-${token}` : `${prefix}head-${head}-token-${token}`;
}

/** Return what a map means. */
export function sentence(facts, layer, tell) {
  const { group, block, head, token, of, above, spread } = parse(layer.key);
  const others = facts.classes.filter((_, number) => number !== of);
  const lead = `the lead of ${facts.classes[of]} over ${others.length === 1 ? others[0] : "the other classes"}`;
  const where = facts.tokens?.blocks > 1 ? ` of block ${block + 1}` : "";
  const even = 1 / facts.patches;
  if (above) {
    return `What sets patches apart: how much more than the mean patch of this slide each adds to ${lead}. These add up to 0.`;
  }
  if (group === "evidence") return EVIDENCE[facts.model.method](lead, tell(facts.model.gap));
  if (spread) return "How far a patch's attention varies from draw to draw of this model.";
  if (group === "attention") {
    if (of === null && Math.abs(layer.limit - even) < 1e-4 * even) {
      return `Every patch counts the same (${tell(even)}): this model takes the mean. Look at the evidence instead.`;
    }
    return `How much a patch counts in what is classified; an even share would be ${tell(even)}. It says where the model looked, not what for.`;
  }
  if (group === "score") return `What the model says of each patch alone: its score for ${facts.classes[of]}.`;
  if (token === null) return `How undecided a patch is between the tokens${where}: 0 goes to one token, 1 evenly to all.`;
  const who = head === null ? `Mean over ${facts.tokens.heads} heads${where}` : `Head ${head + 1}${where}`;
  return `${who}: the share of each patch that goes to token ${token + 1}. Over all tokens, shares add up to 1.`;
}

const EVIDENCE = {
  exact: (lead) => `Exact: what each patch adds to ${lead}. With a rest that no patch adds, these add up to the logit.`,
  "integrated gradients": (lead, gap) =>
    `Integrated gradients: an estimate of what each patch adds to ${lead}. The sum misses the logit by ${gap}.`,
  perturbation: (lead) =>
    `An estimate: by how much ${lead} falls when a patch alone is taken out. Patches that stand for each other hide one another.`,
};

/** Return the headings of what is shown first of a map. */
export function headings(facts, layer) {
  const { group, of, above } = parse(layer.key);
  if (above) return [`Most for ${facts.classes[of]}, beside the mean`, `Least for ${facts.classes[of]}, beside the mean`];
  if (group === "evidence") {
    const [high, low] = [layer.values[layer.top[0]], layer.values[layer.bottom[0]]];
    const name = facts.classes[of];
    return [high > 0 ? `Most for ${name}` : `Least against ${name}`, low < 0 ? `Most against ${name}` : `Least for ${name}`];
  }
  return [`Highest: ${layer.title[0].toLowerCase()}${layer.title.slice(1)}`, ""];
}

export const KEYS = [
  ["j, ↓, →", "next slide"],
  ["k, ↑, ←", "previous slide"],
  ["e", "evidence; again: next class"],
  ["a", "attention"],
  ["t", "next token"],
  ["h", "next head"],
  ["[  ]", "previous, next map"],
  ["o", "map on or off"],
  ["l", "lasso a region"],
  ["u", "undo the last region"],
  ["+  -  0", "zoom in, out, whole slide"],
  ["Shift + arrows", "move the slide"],
  ["/", "search slides"],
  ["Esc", "leave lasso, patch or panel"],
  ["?", "this help"],
];
