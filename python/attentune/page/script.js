"use strict";
{
  const table = document.getElementById("front");
  const body = table.tBodies[0];
  const search = document.getElementById("search");
  const count = document.getElementById("count");
  const rows = [...body.rows];

  // Numbers sort as numbers; a cell without one comes last either way.
  function compare(a, b, column, sign) {
    const [x, y] = [a, b].map((row) => row.cells[column].dataset.value ?? "");
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return sign * order;
  }

  function sort(header) {
    const up = header.ariaSort !== "ascending";
    for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
    header.ariaSort = up ? "ascending" : "descending";
    rows.sort((a, b) => compare(a, b, header.cellIndex, up ? 1 : -1));
    body.append(...rows);
  }

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
      const section = document.getElementById(row.dataset.key);
      if (section) section.hidden = row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} shown`;
  }

  // A link opens what it leads to.
  function unfold() {
    const section = document.getElementById(location.hash.slice(1));
    if (section instanceof HTMLDetailsElement) {
      section.open = true;
      section.scrollIntoView();
    }
  }

  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) sort(button.closest("th"));
  });
  search.addEventListener("input", filter);
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    search.value = "";
    filter();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target === search) return;
    event.preventDefault();
    search.focus();
  });
  window.addEventListener("hashchange", unfold);
  filter();
  unfold();
}
