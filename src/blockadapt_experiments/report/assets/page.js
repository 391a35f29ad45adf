// The view as a whole: what is chosen, the legend, and tables that sort. Comes after `chart.js`.
// What is chosen is kept in the address after "#", so that a view can be linked to.
const controls = document.getElementById("controls");
const panels = document.getElementById("panels");
const tableMetric = document.getElementById("table-metric");

// A view for each variant and each horizontal axis; all views over one axis show the same part of it.
function views() {
  const variants = state.variant ? [state.variant] : data.variants;
  const axes = (state.x === "both" ? [false, true] : [state.x === "seconds"]).map((timed) => {
    const curves = shownCurves(timed);
    return { timed, curves, xs: xDomain(curves) };
  });
  const of = (curves, variant) => curves.filter((curve) => data.variants[curve.series.variant] === variant);
  return variants.flatMap((variant) =>
    axes.map(({ timed, curves, xs }) => ({ variant, timed, xs, curves: of(curves, variant) })),
  );
}

function render() {
  const shown = views();
  const first = shown.filter((view) => view.timed === shown[0].timed);
  const curves = first.flatMap((view) => view.curves);
  const ys = yDomain(curves, shown[0].xs);
  panels.dataset.rendered = 0;
  panels.replaceChildren();
  if (!ys) {
    const none = "Nothing to show: every optimizer is switched off, or nothing is measured here yet.";
    const once = "Every run measured this once, which makes no curve; the table below has it.";
    const low = "No value is above zero, which a log axis needs.";
    const drawn = data.series.some((series) => series.metric === state.metric);
    const reason = !drawn ? once : curves.length && isLog() ? low : none;
    panels.append(element("p", { class: "empty" }, reason));
    return;
  }
  // Empty boxes first, to learn how wide the grid makes them.
  const boxes = shown.map(() => panels.appendChild(element("div", { class: "panel" })));
  const width = Math.max(280, Math.round(boxes[0].clientWidth));
  const height = shown.length > 1 || width < 480 ? 290 : 400;
  shown.forEach((view, index) => {
    const { variant, timed } = view;
    const panel = makePanel(view, ys, width, height, index);
    const tip = element("div", { class: "tip", role: "status", hidden: "" });
    const title = element("h3", {}, variant ? `${variant} ` : "", element("span", {}, metric().label));
    boxes[index].append(title, panel.svg, tip);
    listen(panel, tip, (from, to) => {
      change(from === "" ? { from, to } : { x: timed ? "seconds" : "axis", from, to }); // a part is of one axis
    });
  });
  panels.dataset.rendered = panels.querySelectorAll(".line[data-arm]").length;
}

function showControls() {
  for (const name of ["metric", "variant", "x", "from", "to"]) {
    if (controls.elements[name]) controls.elements[name].value = state[name];
  }
  controls.elements.y.value = isLog() ? "log" : "linear";
  controls.elements.seeds.checked = Boolean(state.seeds);
  document.getElementById("whole").disabled = state.from === "" && state.to === "";
  const off = hidden();
  for (const button of document.querySelectorAll("#legend button")) {
    button.setAttribute("aria-pressed", !off.has(button.dataset.arm));
  }
}

// The columns of one metric; its name is then in the field above and not in every heading.
function showTable() {
  for (const cell of document.querySelectorAll("[data-metric]")) cell.hidden = cell.dataset.metric !== state.metric;
  for (const table of document.querySelectorAll(".sortable")) table.classList.toggle("one", Boolean(tableMetric));
  if (tableMetric) tableMetric.value = state.metric;
}

function show() {
  showControls();
  showTable();
  render();
}

// Take over what is asked for; a value that this report does not know is left as it was.
function take(asked) {
  const known = {
    metric: data.metrics.map((entry) => entry.key),
    variant: ["", ...data.variants],
    y: ["", "linear", "log"],
    x: data.timed ? ["axis", "seconds", "both"] : ["axis"],
    seeds: ["", "1"],
  };
  for (const key of Object.keys(initial)) {
    const value = asked[key] === undefined ? undefined : String(asked[key]);
    if (value !== undefined && (!known[key] || known[key].includes(value))) state[key] = value;
  }
}

function change(asked) {
  if ("metric" in asked && asked.metric !== state.metric) asked = { y: "", ...asked }; // each has its own axis
  if (state.x === "both" && (asked.from || asked.to)) asked = { x: "axis", ...asked };
  if ("x" in asked && asked.x !== state.x) asked = { from: "", to: "", ...asked };
  take(asked);
  const chosen = Object.keys(initial).filter((key) => state[key] !== initial[key]);
  history.replaceState(null, "", `#${new URLSearchParams(chosen.map((key) => [key, state[key]]))}`);
  show();
}

function makeLegend() {
  const title = "Click: hide or show. Double click: this one alone, or all.";
  data.arms.forEach(({ name, label, diverged }, arm) => {
    const button = element("button", { type: "button", "data-arm": name, title }, swatch(arm), label);
    if (diverged) button.append(element("small", {}, `${diverged} diverged`));
    button.addEventListener("click", () => {
      const off = hidden();
      if (!off.delete(name)) off.add(name);
      change({ off: [...off].join(",") });
    });
    button.addEventListener("dblclick", () => {
      const others = data.arms.map((entry) => entry.name).filter((other) => other !== name);
      const alone = others.every((other) => hidden().has(other));
      change({ off: alone ? "" : others.join(",") });
    });
    document.getElementById("legend").append(button);
  });
}

function makeSortable(table) {
  const headings = [...table.querySelectorAll("thead th")];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value;
      const sign = up ? 1 : -1;
      const byText = (a, b) => sign * key(a).localeCompare(key(b), "en");
      const byNumber = (a, b) => {
        const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // no number comes last
        return sign * (x - y);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(column === 0 ? byText : byNumber));
    });
  });
}

function start() {
  const asked = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  makeLegend();
  take(asked());
  show();
  controls.addEventListener("submit", (event) => event.preventDefault());
  controls.addEventListener("change", ({ target }) => {
    change({ [target.name]: target.type === "checkbox" ? (target.checked ? "1" : "") : target.value });
  });
  document.getElementById("whole").addEventListener("click", () => change({ from: "", to: "" }));
  tableMetric?.addEventListener("change", () => change({ metric: tableMetric.value }));
  addEventListener("hashchange", () => {
    take(asked());
    show();
  });
  let width = panels.clientWidth;
  const onResize = () => {
    if (panels.clientWidth === width) return;
    width = panels.clientWidth;
    render();
  };
  new ResizeObserver(onResize).observe(panels);
}

document.querySelectorAll(".sortable").forEach(makeSortable);
for (const key of document.querySelectorAll(".key")) {
  key.append(swatch(data.arms.findIndex((entry) => entry.name === key.dataset.arm)));
}
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const details of opened) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
if (controls) start(); // or there is nothing to draw
