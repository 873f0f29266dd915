// Let long names in tables break after "_", "/" and ".", and show a table that is too wide as a list.
"use strict";

addEventListener("DOMContentLoaded", () => {
  const tables = [...document.querySelectorAll("table.docutils")];
  for (const table of tables) {
    for (const name of table.querySelectorAll("code .pre")) {
      if (name.textContent.startsWith("--")) name.classList.add("option");
      name.innerHTML = name.innerHTML.replace(/(?<=\w)[_/.](?=\w)/g, "$&<wbr>");
    }
    const labels = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        const label = labels[column].trim(), isEmpty = !cell.textContent.trim();
        cell.classList.toggle("blank", isEmpty);
        if (column > 0 && label && !isEmpty) cell.dataset.label = label;
      });
    }
  }
  const isText = (table) =>
    table.rows[0].cells.length > 3 && [...table.querySelectorAll("td")].some((cell) => cell.textContent.length > 60);
  const fit = () => {
    for (const table of tables) {
      table.classList.remove("stacked");
      const isCramped = innerWidth < 740 && isText(table);
      const isTooWide = table.parentElement.scrollWidth > table.parentElement.clientWidth;
      table.classList.toggle("stacked", isCramped || isTooWide);
    }
  };
  new ResizeObserver(fit).observe(document.body);
});
