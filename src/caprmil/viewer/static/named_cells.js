// Several cells as one text, `name=cell; name=cell`, as the server writes them (targets/named_cells.py).

/** Return the cell of each name; null where there is none. */
export function splitCells(text, names) {
  const cells = Object.fromEntries(names.map((name) => [name, null]));
  for (const field of fields(text ?? "")) {
    const own = names.find((name) => field.startsWith(`${name}=`));
    if (own !== undefined) cells[own] = field.slice(own.length + 1);
  }
  return cells;
}

/** Return the fields between semicolons. In a quoted field a quote is doubled. */
function fields(text) {
  const found = [""];
  let quoted = false;
  for (let n = 0; n < text.length; n += 1) {
    const character = text[n];
    if (character === '"' && quoted && text[n + 1] === '"') {
      found[found.length - 1] += '"';
      n += 1;
    } else if (character === '"' && (quoted || !found.at(-1))) quoted = !quoted;
    else if (character === ";" && !quoted) found.push("");
    else if (character !== " " || quoted || found.at(-1)) found[found.length - 1] += character;
  }
  return found.filter(Boolean);
}
