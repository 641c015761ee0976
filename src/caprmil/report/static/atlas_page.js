// The script of an atlas: sorts the tokens and the table of their numbers.
"use strict";

(() => {
  const cards = document.getElementById("cards");
  const order = document.getElementById("order");

  order.addEventListener("change", () => {
    const name = order.value;
    const sign = name === "number" ? 1 : -1;
    const key = (card) => sign * Number(card.dataset[name]);
    cards.append(...[...cards.children].sort((a, b) => key(a) - key(b)));
  });
  sortable(document.getElementById("numbers-table"));
})();
