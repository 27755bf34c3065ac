const figure = document.getElementById("timeline" + data.number);
const canvas = figure.querySelector("canvas.plot"), readout = figure.querySelector(".readout");
const names = Object.keys(data.styles), positions = data.timeline.position, last = positions.at(-1) || 1;
const totals = positions.map((_, i) => names.reduce((sum, name) => sum + data.timeline[name][i], 0));
const highest = Math.max(...totals), peak = totals.indexOf(highest);
const size = bytes => (bytes / data.unit.bytes).toFixed(3) + " " + data.unit.label;
const line = 18;  // from one row of phases' names to the next, in CSS pixels
let marked = data.moment ? positions.findLastIndex(position => position <= data.moment.position) : peak;
const nearest = position => positions.reduce(
  (best, other, i) => Math.abs(other - position) < Math.abs(positions[best] - position) ? i : best, 0);
function sharpened(element) {
  element.width = element.clientWidth * devicePixelRatio;
  element.height = element.clientHeight * devicePixelRatio;
  const pen = element.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.font = "13px system-ui, sans-serif";
  return pen;
}
function hatched(pen, name) {  // the category's color, and over it its hatch
  const {color, hatch, ink} = data.styles[name], tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = color;
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = brush.fillStyle = ink + "70";
  const lines = {"/": [[-2, 2, 2, -2], [0, 8, 8, 0], [6, 10, 10, 6]], "\\": [[-2, 6, 2, 10], [0, 0, 8, 8], [6, -2, 10, 2]],
    "-": [[0, 4, 8, 4]], "|": [[4, 0, 4, 8]]};
  for (const kind of hatch) {
    if (kind === ".") brush.fillRect(3, 3, 2, 2);
    for (const [x0, y0, x1, y1] of lines[kind] || []) {
      brush.beginPath();
      brush.moveTo(x0, y0);
      brush.lineTo(x1, y1);
      brush.stroke();
    }
  }
  return pen.createPattern(tile, "repeat");
}
function draw() {
  const pen = sharpened(canvas), width = canvas.clientWidth, ink = getComputedStyle(canvas).color;
  const left = 10 + Math.max(...data.ticks.map(tick => pen.measureText(tick.label).width)), right = width - 6;
  const x = position => left + position / last * (right - left);
  const ends = [0, 0, 0].slice(0, data.regions.length), starts = data.regions.map(region => {
    // Of phases' names: each in the lowest row with room, or left out.
    const length = pen.measureText(region.name).width;
    const start = Math.max(left, Math.min(x(region.start) + 5, right - length)), row = ends.findIndex(end => end < start);
    if (row >= 0) ends[row] = start + length + 5;
    return {start, row};
  });
  const top = line * ends.filter(end => end).length + line, bottom = canvas.clientHeight - 2.4 * line;
  const y = bytes => bottom - (bottom - top) * bytes / (highest || 1);
  const below = totals.map(() => 0), labels = [];
  for (const name of names) {
    pen.beginPath();
    below.forEach((base, i) => pen.lineTo(x(positions[i]), y(base + data.timeline[name][i])));
    for (let i = below.length - 1; i >= 0; i--) pen.lineTo(x(positions[i]), y(below[i]));
    pen.fillStyle = hatched(pen, name);
    pen.fill();
    // Named where it is thick, near the middle.
    const most = Math.max(...data.timeline[name]);
    const middle = positions.reduce((best, position, i) => data.timeline[name][i] < 0.9 * most ? best
      : best < 0 || Math.abs(position - last / 2) < Math.abs(positions[best] - last / 2) ? i : best, -1);
    if (y(0) - y(most) > 1.3 * line) labels.push([name, x(positions[middle]), y(below[middle] + most / 2)]);
    below.forEach((base, i) => below[i] = base + data.timeline[name][i]);
  }
  pen.textBaseline = "middle";
  const taken = [];
  for (const [name, at, height] of labels) {
    const length = pen.measureText(name).width + 8, start = Math.max(left + 2, Math.min(at - length / 2, right - length));
    if (taken.some(([from, to, other]) => start < to && from < start + length && Math.abs(height - other) < line)) continue;
    taken.push([start, start + length, height]);
    pen.fillStyle = "#fffd";
    pen.fillRect(start, height - 9, length, 18);
    pen.fillStyle = "#111";
    pen.fillText(name, start + 4, height);
  }
  pen.fillStyle = ink;
  data.regions.forEach((region, i) => {
    const from = starts[i].row < 0 ? top : line * (starts[i].row + 0.2);
    pen.fillRect(x(region.start), from, starts[i].row < 0 ? 0.5 : 1, bottom - from);
    if (starts[i].row >= 0) pen.fillText(region.name, starts[i].start, line * (starts[i].row + 0.7));
  });
  pen.textAlign = "right";
  const every = Math.ceil(0.9 * line / ((bottom - top) / data.ticks.length));
  for (const tick of data.ticks.filter((_, i) => i % every === 0)) {
    pen.fillRect(left - 5, y(tick.bytes), 5, 1);
    pen.fillText(tick.label, left - 8, y(tick.bytes));
  }
  pen.textAlign = "center";
  const step = data.events.find(step => (right - left) * step / last > 60) || last;
  for (let event = 0; event <= last; event += step) {
    pen.fillRect(x(event), bottom, 1, 5);
    pen.textAlign = event === 0 ? "left" : x(event) > right - 25 ? "right" : "center";
    pen.fillText(event.toLocaleString("en"), x(event), bottom + 13);
  }
  pen.textAlign = "center";
  pen.fillText("allocations and frees", (left + right) / 2, bottom + 31);
  pen.fillRect(left, top, 1, bottom - top);
  pen.fillRect(left, bottom, right - left, 1);
  const mark = (index, label) => {
    const at = x(positions[index]);
    pen.fillRect(at - 1, top - line * 0.8, 2, bottom - top + line * 0.8);
    pen.textAlign = at > (left + right) / 2 ? "right" : "left";
    pen.fillText(label, at + (pen.textAlign === "right" ? -5 : 5), top - line / 2);
  };
  mark(marked, data.moment && positions[marked] === data.moment.position ? data.moment.name : marked === peak ? "peak" : "");
  const region = data.regions.find(region => positions[marked] >= region.start && positions[marked] <= region.end);
  const when = "event " + positions[marked].toLocaleString("en") + (region ? ", " + region.name : "");
  readout.textContent = when + ": " + size(totals[marked]);
  for (const item of figure.querySelectorAll(".legend li")) {
    const swatch = item.querySelector("canvas"), brush = sharpened(swatch);
    brush.fillStyle = hatched(brush, item.dataset.name);
    brush.fillRect(0, 0, swatch.clientWidth, swatch.clientHeight);
    item.querySelector("b").textContent = size(data.timeline[item.dataset.name][marked]);
  }
  canvas.onpointerdown = canvas.onpointermove = event => {
    if (event.type === "pointermove" && event.pointerType === "touch" && !event.pressure) return;
    marked = nearest((event.offsetX - left) / (right - left) * last);
    draw();
  };
}
canvas.addEventListener("keydown", event => {
  const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity};
  if (!(event.key in steps) && event.key !== "p") return;
  event.preventDefault();
  marked = event.key === "p" ? peak : Math.max(0, Math.min(positions.length - 1, marked + steps[event.key]));
  draw();
});
addEventListener("resize", draw);
addEventListener("beforeprint", draw);
addEventListener("afterprint", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
