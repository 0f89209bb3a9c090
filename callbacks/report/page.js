"use strict";

// Draws the charts. The data are in #data (which curves there are) and #points (base64 of gzip: arrays of numbers).

const DASHES = 4, COLORS = 8, HEIGHT = 216, MOST_ROWS = 100, MOST_MARKS = 30, MOST_LEGEND = 12, POLL_MS = 2000, LABEL_ROWS = 3;
const view = { axis: "x", log: false, smooth: 0, range: null, hidden: new Set(), filter: "" };

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "circle", "g"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function decoded(text) {
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(text);
  else {
    const raw = atob(text);
    bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  }
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

// -- numbers -----------------------------------------------------------------------------------------------------------------------

function short(value, unit = "") {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (unit === "bytes") {
    const names = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (Math.abs(value) >= 1024 && power < names.length - 1) { value /= 1024; power++; }
    return `${+value.toPrecision(4)} ${names[power]}`;
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(+value.toPrecision(5));
}

function when(value) {
  if (view.axis === "x") return `step ${Math.round(value).toLocaleString("en")}`;
  if (value < 60) return `${+value.toPrecision(3)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || 10 * power;
  const found = [];
  for (let n = Math.ceil(low / gap - 1e-9); n * gap <= high + gap * 1e-9 && found.length < 50; n++) found.push(+(n * gap).toPrecision(12));
  return found.length < 2 && count < 40 ? ticks(low, high, count * 2) : found;
}

function logTicks(low, high) {
  const found = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((to - from) / 6)), digits = to - from <= 2 ? [1, 2, 5] : [1];
  for (let power = from; power <= to; power += every) for (const digit of digits) {
    const value = +(digit * 10 ** power).toPrecision(3);
    if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
  }
  return found.length > 1 ? found : ticks(low, high, 4).filter((value) => value > 0);
}

function at(xs, value) {  // the first index whose x is not below value
  let low = 0, high = xs.length;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < value) low = middle + 1; else high = middle; }
  return low;
}

function nearest(xs, value) {
  const index = at(xs, value);
  if (index === 0) return 0;
  return index === xs.length || value - xs[index - 1] <= xs[index] - value ? index - 1 : index;
}

// Exponential average without the bias of its start; what is not finite is left out of it.
function smoothed(ys, weight) {
  const found = new Float64Array(ys.length);
  let sum = 0, total = 0;
  for (let i = 0; i < ys.length; i++) {
    if (Number.isFinite(ys[i])) { sum = weight * sum + (1 - weight) * ys[i]; total = weight * total + (1 - weight); found[i] = sum / total; }
    else found[i] = ys[i];
  }
  return found;
}

// -- a chart -----------------------------------------------------------------------------------------------------------------------

class Chart {
  constructor(figure, chart, runs, stages) {
    this.figure = figure; this.title = chart.title; this.unit = chart.unit; this.several = runs.length > 1; this.stages = stages;
    const names = new Set(chart.series.map((one) => one.name));
    this.series = chart.series.map((one) => ({
      ...one, of: runs[one.run], label: !this.several ? one.name : names.size > 1 ? `${runs[one.run]}: ${one.name}` : runs[one.run],
      look: `c${(this.several ? one.run : one.color) % COLORS} s${one.dash % DASHES}`,
    }));
    this.words = `${chart.title} ${[...names].join(" ")}`.toLowerCase();
    this.names = names;
    this.cursor = null;
    this.build();
  }

  build() {
    const id = `chart-${this.figure.dataset.chart}`;
    this.legend = make("ul", { class: "legend" });
    this.svg = make("svg", { "aria-hidden": "true" });
    this.values = make("div", { class: "values", "aria-hidden": "true", hidden: "" });
    this.plot = make("div", { class: "plot", tabindex: 0, role: "slider", "aria-labelledby": id, "aria-describedby": `${id}-summary keys`,
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0 }, this.svg, this.values);
    this.summary = make("p", { class: "hidden", id: `${id}-summary` });
    this.note = make("p", { class: "note" });
    this.details = make("details", {}, make("summary", {}, "Values as a table"));
    this.figure.append(make("figcaption", {}, make("h4", { id }, this.title)), this.legend, this.plot, this.summary, this.note, this.details);
    this.details.addEventListener("toggle", () => this.fillTable());
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.press(event));
    this.plot.addEventListener("pointerup", (event) => this.release(event));
    this.plot.addEventListener("pointerleave", () => { if (document.activeElement !== this.plot && this.pressed === undefined) this.show(null); });
    this.plot.addEventListener("dblclick", () => zoom(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("focus", () => { if (this.cursor === null && this.plot.matches(":focus-visible")) this.show(Infinity); });
    this.plot.addEventListener("blur", () => this.show(null));
  }

  visible() {
    return this.series.filter((one) => !view.hidden.has(one.run) && one[view.axis] && one.y.length);
  }

  drawn(one) {
    if (!view.smooth) return one.y;
    if (one.weight !== view.smooth) { one.smooth = smoothed(one.y, view.smooth); one.weight = view.smooth; }
    return one.smooth;
  }

  draw() {
    const shown = this.visible(), width = Math.max(200, this.plot.clientWidth || 400);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.describe(shown);
    this.scale = null;
    if (!this.limits(shown)) {
      const text = view.log ? "No values above 0 here" : view.axis === "t" && !shown.length ? "No times were recorded" : "No values here";
      this.svg.append(make("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, text));
      return;
    }
    this.axes(width);
    this.marks(new Set(shown.map((one) => one.run)));
    for (const one of shown) {
      if (view.smooth) this.curve(one, one.y, "curve raw", false);
      this.curve(one, this.drawn(one), "curve", true);
    }
    this.overlay = make("g");
    this.svg.append(this.overlay);
    this.show(this.cursor);
  }

  limits(shown) {
    let [x0, x1] = view.range || [Infinity, -Infinity];
    if (!view.range) for (const one of shown) {
      const xs = one[view.axis];
      x0 = Math.min(x0, xs[0]); x1 = Math.max(x1, xs[xs.length - 1]);
    }
    let low = Infinity, high = -Infinity;
    for (const one of shown) {
      const xs = one[view.axis];
      for (let i = at(xs, x0); i < xs.length && xs[i] <= x1; i++) {
        const y = one.y[i];
        if (Number.isFinite(y) && (!view.log || y > 0)) { if (y < low) low = y; if (y > high) high = y; }
      }
    }
    if (low > high) return false;
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    if (view.log) {
      if (low === high) { low /= 2; high *= 2; }
      const room = (high / low) ** 0.05;
      low /= room; high *= room;
    } else {
      const room = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 1;
      const floor = low >= 0 && low < (high - low) * 0.3;  // near zero: start there
      low = floor ? 0 : low - room; high += room;
    }
    this.box = { x0, x1, low, high };
    return true;
  }

  axes(width) {
    const { x0, x1, low, high } = this.box, top = 8, bottom = HEIGHT - 24;
    const per = this.unit === "bytes" ? 1024 ** Math.floor(Math.log(high) / Math.log(1024)) : 1;
    const marks = view.log ? logTicks(low, high) : ticks(low / per, high / per, 4).map((mark) => mark * per);
    const left = 10 + Math.max(...marks.map((mark) => short(mark, this.unit).length), 2) * 7, right = width - 12;
    const [from, to] = view.log ? [Math.log(low), Math.log(high)] : [low, high];
    const y = (value) => bottom - (((view.log ? Math.log(value) : value) - from) / (to - from)) * (bottom - top);
    const x = (value) => left + ((value - x0) / (x1 - x0)) * (right - left);
    this.scale = { x, y, left, right, top, bottom, value: (px) => x0 + ((px - left) / (right - left)) * (x1 - x0) };
    for (const mark of marks) {
      this.svg.append(make("line", { class: "gridline", x1: left, x2: right, y1: y(mark), y2: y(mark) }));
      this.svg.append(make("text", { class: "y", x: left - 6, y: y(mark) + 4, "text-anchor": "end", "data-value": mark }, short(mark, this.unit)));
    }
    this.svg.append(make("line", { class: "baseline", x1: left, x2: right, y1: bottom, y2: bottom }));
    const [size, name] = view.axis === "x" ? [1, ""] : x1 < 120 ? [1, " s"] : x1 < 7200 ? [60, " min"] : [3600, " h"];
    for (const mark of ticks(x0 / size, x1 / size, (right - left) / 95)) {
      if (view.axis === "x" && mark !== Math.round(mark)) continue;
      const text = (Math.abs(mark) >= 1e6 ? short(mark) : mark.toLocaleString("en", { maximumSignificantDigits: 6 })) + name;
      this.svg.append(make("line", { class: "baseline", x1: x(mark * size), x2: x(mark * size), y1: bottom, y2: bottom + 4 }));
      this.svg.append(make("text", { class: "x", x: x(mark * size), y: HEIGHT - 5, "text-anchor": x(mark * size) > right - 12 ? "end" : "middle", "data-value": mark * size }, text));
    }
  }

  // A line where a stage begins, and its text where there is room beside earlier ones; a table of the page has all texts.
  marks(runs) {
    const { x, left, right, top, bottom } = this.scale, ends = Array(LABEL_ROWS).fill(-Infinity);
    const stages = this.stages.filter((one) => runs.has(one.run) && one[view.axis] !== null && one[view.axis] >= this.box.x0 && one[view.axis] <= this.box.x1);
    for (const one of stages.sort((a, b) => a[view.axis] - b[view.axis])) {
      const px = x(one[view.axis]), text = one.text.length > 24 ? `${one.text.slice(0, 23)}…` : one.text, width = text.length * 6.6;
      const look = this.several ? `c${one.run % COLORS}` : "quiet";
      this.svg.append(make("line", { class: `stage ${look}`, x1: px, x2: px, y1: top, y2: bottom, "data-value": one[view.axis] }));
      const from = px + 4 + width <= right ? px + 4 : Math.max(left, px - 4 - width), row = ends.findIndex((end) => end + 6 <= from);
      if (row < 0) continue;
      ends[row] = from + width;
      this.svg.append(make("text", { class: "stage", x: from, y: top + 11 + 14 * row }, text));
    }
  }

  // In each column of pixels: the first, the lowest, the highest and the last point, so that no peak is lost.
  curve(one, ys, kind, named) {
    const xs = one[view.axis], { x, y, top, bottom } = this.scale;
    const from = Math.max(0, at(xs, this.box.x0) - 1), to = Math.min(xs.length, at(xs, this.box.x1) + 1);
    const parts = [];
    let pen = "M", column = null, held = [];
    const flush = () => {
      const [first, low, high, last] = held;
      const order = [...new Set(low < high ? [first, low, high, last] : [first, high, low, last])];
      for (const i of order) {
        const py = Math.min(bottom + 2e3, Math.max(top - 2e3, y(ys[i])));
        parts.push(`${pen}${x(xs[i]).toFixed(2)} ${py.toFixed(2)}`);
        pen = "L";
      }
      column = null;
    };
    for (let i = from; i < to; i++) {
      if (!Number.isFinite(ys[i]) || (view.log && ys[i] <= 0)) {
        if (column !== null) flush();
        pen = "M";
        continue;
      }
      const here = Math.floor(x(xs[i]));
      if (here !== column) { if (column !== null) flush(); column = here; held = [i, i, i, i]; }
      if (ys[i] < ys[held[1]]) held[1] = i;
      if (ys[i] > ys[held[2]]) held[2] = i;
      held[3] = i;
    }
    if (column !== null) flush();
    if (parts.length === 1) kind += " lone";
    const path = make("path", { class: `${kind} ${one.look}`, d: parts.join("").replace(/M([\d.-]+ [\d.-]+)(?=M|$)/g, "M$1h0") });  // h0: a lone point is a dot
    if (named) { path.dataset.name = one.name; path.dataset.run = one.run; }
    this.svg.append(this.cropped(path));
    if (named && to - from <= MOST_MARKS) {
      const dots = [];
      for (let i = from; i < to; i++) if (Number.isFinite(ys[i]) && (!view.log || ys[i] > 0)) dots.push(`M${x(xs[i]).toFixed(2)} ${y(ys[i]).toFixed(2)}h0`);
      this.svg.append(this.cropped(make("path", { class: `marks c${one.look.slice(1, 2)}`, d: dots.join("") })));
    }
  }

  cropped(path) {  // an inner svg hides what is outside of it
    if (!view.range) return path;
    const { left, right } = this.scale, width = right - left;
    return make("svg", { class: "inner", x: left, y: 0, width, height: HEIGHT, viewBox: `${left} 0 ${width} ${HEIGHT}` }, path);
  }

  describe(shown) {
    this.fillLegend(shown);
    this.summary.textContent = shown.map((one) => {
      let low = 0, high = 0;
      one.y.forEach((y, i) => {
        if (!Number.isFinite(y)) return;
        if (!(y >= one.y[low])) low = i;
        if (!(y <= one.y[high])) high = i;
      });
      const xs = one[view.axis], text = (i) => `${short(one.y[i], this.unit)} at ${when(xs[i])}`;
      return `${one.label}: ${one.total} values, first ${text(0)}, last ${text(xs.length - 1)}, lowest ${text(low)}, highest ${text(high)}.`;
    }).join(" ");
    const odd = shown.reduce((sum, one) => sum + one.odd, 0);
    const thin = shown.some((one) => one.y.length < one.total) ? "Long curves are thinned; peaks are kept." : "";
    this.note.textContent = [odd ? `${odd} ${odd === 1 ? "value is" : "values are"} not finite.` : "", thin].filter(Boolean).join(" ");
    this.note.hidden = !this.note.textContent;
    if (this.details.open) this.fillTable();
  }

  // Of several runs each has one entry, with a value for each of its curves; a second line names these.
  fillLegend(shown) {
    const swatch = (look) => make("svg", { class: "swatch", viewBox: "0 0 24 11", "aria-hidden": "true" }, make("path", { class: `curve ${look}`, d: "M1 5.5H23" }));
    const last = (one) => make("b", {}, short(one.y[one.y.length - 1], this.unit));
    if (!this.several || this.names.size === 1) {
      const rest = shown.length - MOST_LEGEND;
      const items = shown.slice(0, rest > 1 ? MOST_LEGEND : shown.length).map((one) => make("li", {}, swatch(one.look), make("span", {}, one.label), " ", last(one)));
      this.legend.replaceChildren(...items, ...(rest > 1 ? [make("li", {}, `and ${rest} more`)] : []));
      return;
    }
    const byRun = new Map(), dashes = new Map();
    for (const one of shown) {
      if (!byRun.has(one.run)) byRun.set(one.run, []);
      byRun.get(one.run).push(one);
      dashes.set(one.name, one.dash % DASHES);
    }
    const names = [...dashes].map(([name, dash]) => make("li", { class: "name" }, swatch(`s${dash} quiet`), make("span", {}, name)));
    const rest = byRun.size - MOST_LEGEND;
    const runs = [...byRun.values()].slice(0, rest > 1 ? MOST_LEGEND : byRun.size).map((series) => make("li", {}, swatch(series[0].look.slice(0, 2)),
      make("span", {}, series[0].of), " ", ...series.flatMap((one, i) => (i ? [" / ", last(one)] : [last(one)]))));
    this.legend.replaceChildren(...names, ...runs, ...(rest > 1 ? [make("li", {}, `and ${rest} more`)] : []));
  }

  fillTable() {
    this.details.querySelector(".scroll")?.remove();
    if (!this.details.open) return;
    const shown = this.visible(), each = Math.max(2, Math.floor(MOST_ROWS / Math.max(1, shown.length)));
    const rows = new Set();
    for (const one of shown) {
      const xs = one[view.axis], count = Math.min(each, xs.length);
      for (let i = 0; i < count; i++) rows.add(xs[count === 1 ? 0 : Math.round((i * (xs.length - 1)) / (count - 1))]);
    }
    const all = new Set(shown.flatMap((one) => (one.total > each ? [one.total] : [])));
    const name = all.size ? `${this.title}: ${rows.size} of the recorded values` : this.title;
    const head = [view.axis === "x" ? "step" : "time", ...shown.map((one) => one.label)].map((text) => make("th", { scope: "col", class: "number" }, text));
    const body = [...rows].sort((a, b) => a - b).map((x) => make("tr", {}, make("th", { scope: "row", class: "number" }, view.axis === "x" ? x.toLocaleString("en") : when(x)),
      ...shown.map((one) => { const i = at(one[view.axis], x); return make("td", { class: "number" }, one[view.axis][i] === x ? short(one.y[i], this.unit) : ""); })));
    const table = make("table", {}, make("caption", {}, name), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
    this.details.append(make("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": name }, table));
  }

  // -- the cursor ------------------------------------------------------------------------------------------------------------------

  stops() {  // the x that the cursor may stand at: those of the longest curve
    const shown = this.visible();
    return shown.length ? shown.reduce((a, b) => (b.y.length > a.y.length ? b : a))[view.axis] : [];
  }

  show(x) {
    this.cursor = x;
    this.overlay?.replaceChildren();
    const xs = this.stops();
    if (x === null || !this.scale || !xs.length) { this.values.hidden = true; return; }
    const [from, to] = [Math.max(0, at(xs, this.box.x0)), Math.max(0, Math.min(xs.length, at(xs, this.box.x1) + 1) - 1)];
    const index = Math.min(to, Math.max(from, x === Infinity ? to : x === -Infinity ? from : nearest(xs, x)));
    const here = (this.cursor = xs[index]), { left, right, top, bottom } = this.scale, px = this.scale.x(here);
    this.overlay.append(make("line", { class: "cursor", x1: px, x2: px, y1: top, y2: bottom }));
    const lines = [make("div", {}, when(here))], spoken = [when(here)];
    for (const one of this.visible()) {
      const ox = one[view.axis], i = nearest(ox, here), ys = this.drawn(one);
      if (Number.isFinite(ys[i]) && (!view.log || ys[i] > 0) && ox[i] >= this.box.x0 && ox[i] <= this.box.x1)
        this.overlay.append(make("circle", { class: `dot ${one.look}`, cx: this.scale.x(ox[i]), cy: this.scale.y(ys[i]), r: 4 }));
      const text = short(ys[i], this.unit) + (ox[i] === here ? "" : ` (${when(ox[i])})`);
      lines.push(make("div", {}, make("span", {}, one.label), make("b", {}, text)));
      spoken.push(`${one.label}: ${text}`);
    }
    this.values.replaceChildren(...lines);
    this.values.hidden = false;
    const side = px < (left + right) / 2;
    this.values.style.left = side ? `${px + 12}px` : "auto";
    this.values.style.right = side ? "auto" : `${this.plot.clientWidth - px + 12}px`;
    for (const [name, value] of [["min", xs[from]], ["max", xs[to]], ["now", here], ["text", spoken.join(", ")]]) this.plot.setAttribute(`aria-value${name}`, value);
  }

  key(event) {
    const xs = this.stops();
    if (!xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const index = this.cursor === null ? xs.length - 1 : nearest(xs, this.cursor), page = Math.max(1, Math.round(xs.length / 20));
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page };
    if (event.key in moves) this.show(xs[Math.min(xs.length - 1, Math.max(0, index + moves[event.key]))]);
    else if (event.key === "Home") this.show(-Infinity);
    else if (event.key === "End") this.show(Infinity);
    else if (event.key === "Escape") zoom(null);
    else if ("+-=".includes(event.key) && this.box) {
      const { x0, x1 } = this.box, middle = this.cursor ?? (x0 + x1) / 2, half = ((x1 - x0) / 2) * (event.key === "-" ? 2 : 0.5);
      if (middle + half > middle - half + 1e-9) zoom(event.key === "-" && middle - half <= xs[0] && middle + half >= xs[xs.length - 1] ? null : [middle - half, middle + half]);
    } else return;
    event.preventDefault();
  }

  px(event) {
    return event.clientX - this.plot.getBoundingClientRect().left;
  }

  point(event) {
    if (!this.scale) return;
    const px = Math.min(this.scale.right, Math.max(this.scale.left, this.px(event)));
    this.show(this.scale.value(px));
    if (this.pressed !== undefined && Math.abs(px - this.pressed) > 4)
      this.overlay.append(make("rect", { class: "selection", x: Math.min(px, this.pressed), width: Math.abs(px - this.pressed), y: this.scale.top, height: this.scale.bottom - this.scale.top }));
  }

  press(event) {
    if (!this.scale || event.button !== 0) return;
    if (event.pointerType === "touch") { this.point(event); return; }
    this.pressed = Math.min(this.scale.right, Math.max(this.scale.left, this.px(event)));
    this.plot.setPointerCapture(event.pointerId);
  }

  release(event) {
    if (this.pressed === undefined) return;
    const ends = [this.pressed, Math.min(this.scale.right, Math.max(this.scale.left, this.px(event)))].sort((a, b) => a - b);
    this.pressed = undefined;
    if (ends[1] - ends[0] > 4) zoom(ends.map(this.scale.value));
  }
}

// -- the page ----------------------------------------------------------------------------------------------------------------------

const charts = [];
let whole;

function redraw() {
  for (const chart of charts) chart.draw();
}

function filter() {
  for (const chart of charts) chart.figure.hidden = !chart.words.includes(view.filter);
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector("figure:not([hidden])");
}

function zoom(range) {
  if (!range && !view.range) return;
  view.range = range;
  whole.hidden = !range;
  redraw();
}

function controls(runs) {
  const place = document.getElementById("controls");
  const box = (type, text, attributes, change) => {
    const input = make("input", { type, ...attributes });
    input.addEventListener(type === "range" || type === "search" ? "input" : "change", () => change(input));
    return make("label", {}, ...(type === "range" || type === "search" ? [text, input] : [input, text]));
  };
  const axis = (text, value, attributes) => box("radio", text, { name: "axis", ...attributes }, () => { view.axis = value; view.range = null; whole.hidden = true; redraw(); });
  place.append(make("fieldset", {}, make("legend", {}, "Across"), axis("steps", "x", { checked: "" }), axis("training time", "t")));
  place.append(box("checkbox", "logarithmic", {}, (input) => { view.log = input.checked; redraw(); }));
  place.append(box("range", "smoothing", { min: 0, max: 0.99, step: 0.01, value: 0 }, (input) => { view.smooth = +input.value; redraw(); }));
  if (charts.length > 6) place.append(box("search", "find", { placeholder: "name of a metric" }, (input) => { view.filter = input.value.trim().toLowerCase(); filter(); }));
  const boxes = make("fieldset", {}, make("legend", {}, "Runs"));
  if (runs.length > 1) place.append(runs.length > MOST_LEGEND ? make("details", {}, make("summary", {}, `${runs.length} runs`), boxes) : boxes);
  if (runs.length > 1) boxes.append(...runs.map((name, run) => {
    const label = box("checkbox", name, { checked: "" }, (input) => { if (input.checked) view.hidden.delete(run); else view.hidden.add(run); redraw(); });
    label.append(make("svg", { class: "swatch", viewBox: "0 0 24 11", "aria-hidden": "true" }, make("path", { class: `curve c${run % COLORS}`, d: "M1 5.5H23" })));
    return label;
  }));
  whole = make("button", { type: "button", hidden: "" }, "Show the whole range");
  whole.addEventListener("click", () => zoom(null));
  place.append(whole);
  place.after(make("p", { class: "note", id: "keys" }, "Drag across a chart to zoom in. With the keyboard: arrow keys read values, + and − zoom, Escape shows the whole range."));
}

// -- the table of runs -------------------------------------------------------------------------------------------------------------

const sorted = { head: "", up: true };

function sort(table) {
  const heads = [...table.tHead.rows[0].cells], column = heads.findIndex((head) => head.textContent === sorted.head);
  if (column < 0) return;
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
  const numeric = heads[column].classList.contains("number"), way = sorted.up ? 1 : -1;
  const keyed = [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[column], text = cell.tagName === "TH" ? cell.textContent : cell.dataset.value;
    const key = text === undefined ? null : numeric ? Number(text.replace("inf", "Infinity")) : text;
    return { row, run: +row.dataset.run, key: Number.isNaN(key) ? null : key };  // also "nan"
  });
  keyed.sort((a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.run - b.run;  // rows without a value stay below
    return way * (numeric ? (a.key > b.key) - (a.key < b.key) : a.key.localeCompare(b.key, "en", { numeric: true })) || a.run - b.run;
  });
  table.tBodies[0].append(...keyed.map((one) => one.row));
}

function sortable() {
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const head of table.tHead.rows[0].cells) {
      const button = make("button", { type: "button" }, head.textContent);
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        sorted.up = sorted.head === button.textContent ? !sorted.up : true;
        sorted.head = button.textContent;
        sort(table);
      });
    }
    sort(table);
  }
}

async function draw() {
  const { runs, labels, charts: known, stages } = JSON.parse(document.getElementById("data").textContent);
  sortable();
  charts.length = 0;
  if (!known.length) return;
  const buffer = await decoded(document.getElementById("points").textContent);
  document.getElementById("points").remove();
  const array = (place) => place && new (place[2] === 8 ? Float64Array : Float32Array)(buffer, place[0], place[1]);
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = known[figure.dataset.chart];
    chart.series = chart.series.map((one) => ({ ...one, x: array(one.x), t: array(one.t), y: array(one.y) }));
    charts.push(new Chart(figure, chart, labels, stages));
  }
  if (!document.getElementById("keys")) controls(labels);
  filter();
  redraw();
}

// -- a page that a server gives ----------------------------------------------------------------------------------------------------

const data = () => JSON.parse(document.getElementById("data").textContent);
const title = (details) => `${details.closest("figure")?.querySelector("h4").textContent} ${details.querySelector("summary").textContent}`;

// Takes the server's newer page into this one. What a reader has chosen, opened and focused stays.
async function update() {
  const answer = await fetch("/", { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  const next = new DOMParser().parseFromString(await answer.text(), "text/html");
  const newer = JSON.parse(next.getElementById("data").textContent), older = data(), names = (one) => JSON.stringify(one.runs);
  if (names(newer) !== names(older) || !older.charts.length) { location.reload(); return newer.live; }
  const open = new Set([...document.querySelectorAll("details[open]")].map(title)), top = scrollY, active = document.activeElement;
  const plot = charts.find((chart) => chart.plot === active), cursor = plot?.cursor, head = active?.closest(".sortable thead") ? active.textContent : null;
  next.getElementById("controls").replaceWith(document.getElementById("controls"), document.getElementById("keys"));
  next.querySelector("header").append(document.getElementById("live"));
  document.title = next.title;
  for (const part of ["header", "main", "#data"]) document.querySelector(part).replaceWith(next.querySelector(part));
  document.body.append(next.getElementById("points"));
  await draw();
  for (const details of document.querySelectorAll("details")) details.open ||= open.has(title(details));
  scrollTo(0, top);
  const again = plot && charts.find((chart) => chart.title === plot.title);
  if (again) { again.plot.focus(); again.show(cursor); }
  if (head !== null) [...document.querySelectorAll(".sortable thead button")].find((button) => button.textContent === head)?.focus();
  return newer.live;
}

async function follow(version) {
  const note = make("p", { class: "note", id: "live", role: "status" }, "This page follows the training.");
  document.querySelector("header").append(note);
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    if (document.hidden || charts.some((chart) => chart.pressed !== undefined)) continue;
    let text = "This page follows the training.";
    try {
      const newest = await (await fetch("/version", { cache: "no-store" })).text();
      if (newest !== version) version = await update();
    } catch {
      text = "The server has ended, or cannot read the runs: this page stays as it was last.";
    }
    if (note.textContent !== text) note.textContent = text;
  }
}

async function start() {
  await draw();
  if (data().live) follow(data().live);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
}

start().then(
  () => { document.documentElement.dataset.drawn = "yes"; },
  (error) => {
    document.getElementById("controls")?.append(`The curves cannot be drawn in this browser (${error.message}). The tables below have the last values.`);
    document.documentElement.dataset.drawn = "no";
  },
);
