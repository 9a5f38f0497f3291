// Sort tables of class "sortable" by a click on a header: by the first number of a cell, or by its text.
document.querySelectorAll("table.sortable").forEach((table) => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].textContent.trim();
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)].map((text) => ({ text, number: parseFloat(text) }));
        if (isNaN(x.number) !== isNaN(y.number)) return isNaN(x.number) ? 1 : -1;
        const order = isNaN(x.number) ? y.text.localeCompare(x.text) : y.number - x.number;
        return up ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
});
