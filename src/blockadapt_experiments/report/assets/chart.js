// Curves as SVG: numbers, ticks, panels, and reading values off them. No library and no network.
// What is shown is in `data`, which the page carries, and `state`, which `page.js` changes.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const MARGIN = { top: 8, right: 18, bottom: 38, left: 56 };
const initial = {
  metric: data.series[0]?.metric ?? "", variant: "", y: "", x: "axis", from: "", to: "", seeds: "", off: "",
};
const state = { ...initial };

const metric = () => data.metrics.find((entry) => entry.key === state.metric);
const isLog = () => (state.y || (metric().log ? "log" : "linear")) === "log";
const xLabel = (timed) => (timed ? "seconds" : data.axis);
const hidden = () => new Set(state.off.split(",").filter(Boolean));

// Elements ------------------------------------------------------------------------------------------------------------

const SVG = ["svg", "g", "path", "line", "rect", "circle", "text", "clipPath", "defs"];

function element(name, attributes = {}, ...children) {
  const node = SVG.includes(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// Colour and dash are the optimizer's own, as in every other plot; the page has the colours for light and for dark.
const colour = (arm) => `var(--c${data.arms[arm].colour})`;

function stroked(node, arm) {
  node.style.stroke = colour(arm);
  if (data.arms[arm].dash.length) node.style.strokeDasharray = data.arms[arm].dash.map((part) => 1.6 * part).join(" ");
  return node;
}

function swatch(arm) {
  const line = element("line", { x1: 1, x2: 25, y1: 4, y2: 4, class: "line" });
  return element("svg", { viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true" }, stroked(line, arm));
}

function dot(arm, x, y) {
  const node = element("circle", { cx: x, cy: y, r: 4, class: "dot" });
  node.style.fill = colour(arm);
  return node;
}

// Numbers -------------------------------------------------------------------------------------------------------------

function fixed(value, least, most = least) {
  const digits = { minimumFractionDigits: least, maximumFractionDigits: Math.min(most, 12) };
  return value.toLocaleString("en", digits).replace("-", "−");
}

function number(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-4 && size < 1e6) return fixed(value, 0, Math.max(digits - 1 - Math.floor(Math.log10(size)), 0));
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  return `${String(Number(mantissa)).replace("-", "−")}e${Number(exponent)}`;
}

// A mean with the half width of its interval, which is given two digits; as in the table. Of a geometric mean the ends.
function estimate({ y, spread, low, high }) {
  if (spread === null) return number(y);
  if (isLog()) return `${number(y, 3)} (${number(low, 3)} – ${number(high, 3)})`;
  const [mean, half] = [y, spread];
  const decimals = half ? Math.max(0, 1 - Math.floor(Math.log10(half))) : 4;
  if (decimals > 6 || Math.abs(mean) >= 1e6) return `${number(mean)} ± ${number(half, 2)}`;
  return `${fixed(mean, decimals)} ± ${fixed(half, decimals)}`;
}

const raised = (power) => "10" + String(power).replace(/./g, (sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign]));

// About so many ticks, as pairs of value and text; `counted` things have none between two whole numbers.
function linearTicks(low, high, count, counted = false) {
  const rough = Math.max((high - low) / count, counted ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
    const value = i * step || 0; // never −0
    ticks.push([value, Math.abs(value) < 1e6 && decimals <= 6 ? fixed(value, decimals) : number(value, 3)]);
  }
  return ticks;
}

function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const within = ([value]) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9);
  const finer = [];
  for (let p = first; p <= last; p++) for (const m of [1, 2, 5]) finer.push([m * 10 ** p, number(m * 10 ** p, 2)]);
  const fine = finer.filter(within);
  if (fine.length < 2) return linearTicks(low, high, 4);
  if (fine.length < 10) return fine;
  const decades = [];
  for (let p = first; p <= last; p += Math.ceil((last - first) / 7)) decades.push([10 ** p, raised(p)]);
  return decades.filter(within);
}

// Points --------------------------------------------------------------------------------------------------------------

// The points of a curve over the axis of the rows, or over seconds if it is `timed`. On a log axis they are geometric means, and
// their intervals those of the logarithms, so that a band has a lower end.
function points(series, timed) {
  const xs = timed ? series.seconds : series.x;
  const { middle, spread, n } = isLog() ? series.log : series.linear;
  return middle
    .map((y, i) => ({ x: xs[i], y, spread: spread[i], ...ends(y, spread[i]), n: n[i], step: series.x[i] }))
    .filter((point) => point.x !== null && point.y !== null);
}

function ends(y, spread) {
  if (y === null || spread === null) return { low: null, high: null };
  return isLog() ? { low: y / spread, high: y * spread } : { low: y - spread, high: y + spread };
}

function shownCurves(timed = state.x === "seconds") {
  const off = hidden();
  return data.series
    .filter((series) => series.metric === state.metric && !off.has(data.arms[series.arm].name))
    .filter((series) => !state.variant || data.variants[series.variant] === state.variant)
    .map((series) => ({ series, points: points(series, timed) }));
}

function xDomain(curves) {
  const all = curves.flatMap((curve) => curve.points.map((point) => point.x));
  const [first, last] = all.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
  const [from, to] = [parseFloat(state.from), parseFloat(state.to)];
  const [low, high] = [Number.isFinite(from) ? from : first, Number.isFinite(to) ? to : last];
  if (low < high) return [low, high];
  return first < last ? [first, last] : [first - 0.5, first + 0.5];
}

// All means that have settled, and the bands as far as they do not flatten the means: as in the PNG files. What led up
// to a seed's divergence is no measure for the others.
function yDomain(curves, [xLow, xHigh]) {
  const log = isLog();
  const scale = log ? Math.log10 : (value) => value;
  const steady = curves.filter((curve) => !curve.series.diverged && curve.points.length);
  let [low, high, farLow, farHigh] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { points } of steady.length ? steady : curves) {
    const settling = points.length >= 10 && !log && state.from === "";
    const start = settling ? points[0].x + 0.1 * (points.at(-1).x - points[0].x) : xLow;
    for (const point of points.filter(({ x }) => x >= start && x <= xHigh)) {
      [low, high] = [Math.min(low, scale(point.y)), Math.max(high, scale(point.y))];
      if (point.spread === null) continue;
      [farLow, farHigh] = [Math.min(farLow, scale(point.low)), Math.max(farHigh, scale(point.high))];
    }
  }
  if (low > high) return null;
  const room = high - low || Math.abs(high) || 1;
  const bottom = Math.min(low - 0.04 * room, Math.max(farLow, low - 0.4 * room));
  const top = Math.max(high + 0.04 * room, Math.min(farHigh, high + 0.4 * room));
  return log ? [10 ** bottom, 10 ** top] : [bottom, top];
}

// Panels --------------------------------------------------------------------------------------------------------------

// From values to pixels. Far outside is as good as infinitely far, and keeps the numbers of a path short.
function scales(xs, ys, box) {
  const log = isLog();
  const scale = (value) => (log ? Math.log10(value) : value);
  const [low, high] = ys.map(scale);
  return {
    toX: (value) => box.x + ((value - xs[0]) / (xs[1] - xs[0])) * box.width,
    toY: (value) => {
      if (value === null || (log && value <= 0)) return NaN;
      const share = (scale(value) - low) / (high - low);
      return box.y + box.height - Math.max(-50, Math.min(50, share)) * box.height;
    },
  };
}

function path(pairs) {
  let pen = "M";
  let text = "";
  for (const [x, y] of pairs) {
    const there = Number.isFinite(x) && Number.isFinite(y);
    if (there) text += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = there ? "L" : "M";
  }
  return text;
}

function makePanel({ variant, timed, curves, xs }, ys, width, height, index) {
  const box = { x: MARGIN.left, y: MARGIN.top, width: width - MARGIN.left - MARGIN.right };
  box.height = height - MARGIN.top - MARGIN.bottom;
  const panel = { timed, curves, xs, width, box, ...scales(xs, ys, box) };
  const names = curves.map((curve) => data.arms[curve.series.arm].label).join(", ");
  const about = `${metric().label} over ${xLabel(timed)}${variant && `, ${variant}`}: ${names}. Arrow keys read values.`;
  panel.svg = element("svg", { viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "group", "aria-label": about });
  panel.svg.append(element("defs", {}, element("clipPath", { id: `clip-${index}` }, element("rect", box))));
  drawAxes(panel, ys, height);
  const drawing = element("g", { "clip-path": `url(#clip-${index})` });
  panel.svg.append(drawing);
  for (const curve of curves) drawBand(drawing, panel, curve);
  if (state.seeds) for (const curve of curves) drawSeeds(drawing, panel, curve);
  for (const curve of curves) if (curve.points.length) drawMean(drawing, panel, curve);
  return panel;
}

function drawAxes({ svg, timed, box, xs, width, toX, toY }, ys, height) {
  const [right, bottom] = [box.x + box.width, box.y + box.height];
  for (const [value, text] of isLog() ? logTicks(...ys) : linearTicks(...ys, height > 320 ? 7 : 5)) {
    svg.append(element("line", { x1: box.x, x2: right, y1: toY(value), y2: toY(value), class: "grid" }));
    svg.append(element("text", { x: box.x - 8, y: toY(value) + 4, "text-anchor": "end" }, text));
  }
  const counted = !timed && ["epoch", "step"].includes(data.axis);
  for (const [value, text] of linearTicks(...xs, Math.max(2, Math.floor(width / 75)), counted)) {
    svg.append(element("line", { x1: toX(value), x2: toX(value), y1: bottom, y2: bottom + 4, class: "frame" }));
    svg.append(element("text", { x: toX(value), y: bottom + 18, "text-anchor": "middle" }, text));
  }
  svg.append(element("line", { x1: box.x, x2: right, y1: bottom, y2: bottom, class: "frame" }));
  svg.append(element("text", { x: right, y: height - 4, "text-anchor": "end" }, xLabel(timed)));
}

function drawMean(drawing, { toX, toY, width }, { series, points }) {
  const pairs = points.map((point) => [toX(point.x), toY(point.y)]);
  const line = element("path", { d: path(pairs), class: "line", "data-arm": data.arms[series.arm].name });
  if (points.length > width / 2) line.classList.add("dense");
  drawing.append(stroked(line, series.arm));
  if (points.length === 1) drawing.append(dot(series.arm, ...pairs[0])); // one point makes no line
}

// An interval around a diverged seed would cover all others, so such a curve has no band.
function drawBand(drawing, { toX, toY }, { series, points }) {
  const banded = points.filter((point) => point.spread !== null);
  if (banded.length < 2 || series.diverged) return;
  const upper = banded.map((point) => [toX(point.x), toY(point.high)]);
  const lower = banded.map((point) => [toX(point.x), toY(point.low)]);
  const node = element("path", { d: `${path([...upper, ...lower.reverse()])}Z`, class: "band" });
  node.style.fill = colour(series.arm);
  drawing.append(node);
}

function drawSeeds(drawing, { timed, toX, toY }, { series }) {
  for (const seed of series.seeds) {
    const xs = timed ? seed.seconds : series.seed_x;
    const pairs = seed.y.map((y, i) => [xs[i] === null ? NaN : toX(xs[i]), toY(y)]);
    const node = element("path", { d: path(pairs), class: "seed", "data-seed": seed.seed });
    node.style.stroke = colour(series.arm);
    drawing.append(node);
  }
}

// Reading values ------------------------------------------------------------------------------------------------------

function nearest(points, x) {
  const closer = (best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best);
  return points.length ? points.reduce(closer) : null;
}

// What is read at this place. On the axis of the rows all curves are read at one point; on seconds each at its own.
function valuesAt(panel, x) {
  const inside = (point) => point.x >= panel.xs[0] && point.x <= panel.xs[1];
  const found = panel.curves
    .map((curve) => ({ arm: curve.series.arm, point: nearest(curve.points.filter(inside), x) }))
    .filter(({ point }) => point);
  const sign = metric().better === "high" ? -1 : 1;
  found.sort((a, b) => sign * (a.point.y - b.point.y));
  if (panel.timed || !found.length) return { at: x, found };
  const at = nearest(found.map(({ point }) => point), x).x;
  return { at, found: found.filter(({ point }) => point.x === at) };
}

function readValues(panel, tip, marks, x) {
  marks.replaceChildren();
  const { at, found } = valuesAt(panel, x);
  if (!found.length) return;
  const { box } = panel;
  const line = panel.toX(at);
  marks.append(element("line", { x1: line, x2: line, y1: box.y, y2: box.y + box.height, class: "cross" }));
  tip.replaceChildren(element("strong", {}, `${xLabel(panel.timed)} ${number(at)}`));
  for (const { arm, point } of found) {
    const y = panel.toY(point.y);
    if (y >= box.y && y <= box.y + box.height) marks.append(dot(arm, panel.toX(point.x), y));
    const where = panel.timed ? ` at ${data.axis} ${number(point.step)}` : "";
    const seeds = point.n < data.seeds ? ` (${point.n} of ${data.seeds} seeds)` : "";
    const text = `${estimate(point)}${where}${seeds}`;
    tip.append(element("div", {}, swatch(arm), element("span", {}, data.arms[arm].label), element("span", {}, text)));
  }
  tip.hidden = false;
  // Beside the line, or below the panel where that leaves no room.
  const room = panel.width - tip.offsetWidth;
  const beside = line < panel.width / 2 ? line + 14 : line - 14 - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  tip.style.top = beside >= 0 && beside <= room ? "2.2rem" : "100%";
}

// Let a panel be read by mouse, finger and keyboard, and a part of it be enlarged by dragging.
function listen(panel, tip, enlarge) {
  const { svg, box, xs } = panel;
  const marks = element("g");
  const zoom = element("rect", { y: box.y, height: box.height, width: 0, class: "zoom" });
  svg.append(zoom, marks);
  let [held, read] = [null, null];
  const across = (event) => {
    const frame = svg.getBoundingClientRect();
    const pixel = ((event.clientX - frame.left) / frame.width) * panel.width;
    return Math.max(box.x, Math.min(box.x + box.width, pixel));
  };
  const value = (pixel) => xs[0] + ((pixel - box.x) / box.width) * (xs[1] - xs[0]);
  const show = (x) => readValues(panel, tip, marks, (read = x));
  const close = () => {
    tip.hidden = true;
    marks.replaceChildren();
  };
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    held = across(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const pixel = across(event);
    show(value(pixel));
    if (held === null) return;
    zoom.setAttribute("x", Math.min(held, pixel));
    zoom.setAttribute("width", Math.abs(pixel - held));
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = held === null ? [0, 0] : [held, across(event)].sort((a, b) => a - b);
    held = null;
    zoom.setAttribute("width", 0);
    if (ends[1] - ends[0] > 8) enlarge(...ends.map((pixel) => Number(value(pixel).toPrecision(5))));
  });
  svg.addEventListener("pointerleave", close);
  svg.addEventListener("blur", close);
  svg.addEventListener("dblclick", () => enlarge("", ""));
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    const inside = panel.curves.flatMap((curve) => curve.points.map((point) => point.x));
    const stops = [...new Set(inside)].filter((x) => x >= xs[0] && x <= xs[1]).sort((a, b) => a - b);
    const next = {
      ArrowRight: () => stops.find((x) => read === null || x > read) ?? stops.at(-1),
      ArrowLeft: () => stops.findLast((x) => read === null || x < read) ?? stops[0],
      Home: () => stops[0],
      End: () => stops.at(-1),
    }[event.key];
    if (!next || !stops.length) return;
    event.preventDefault();
    show(next());
  });
}
